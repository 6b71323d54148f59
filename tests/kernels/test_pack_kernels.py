"""scripts/pack_kernels.py: what it writes, that `kernels` loads it, and what it says about mistakes."""

import base64
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import kernel_repositories
import pytest
from kernel_repositories import AS_ON_CUDA, write_toy

from scripts import pack_kernels

LOAD = """
import kernels
from pathlib import Path
module = kernels.get_local_kernel(Path(os.environ["FOLDER"]))
assert all(hasattr(module, name) for name in module.__all__) and module.layers
print(module.__name__)
"""
REDIRECTED = """
import kernels
module = kernels.get_kernel(os.environ["REPOSITORY"], version=1)
assert all(hasattr(module, name) for name in module.__all__) and module.layers
print(module.__name__)
"""


def packed(folder: Path | None, tmp_path: Path) -> Path:
    """The folder that the script writes for a repository."""
    source = folder or write_toy(tmp_path / "toy-kernel")
    output = tmp_path / "packed"
    assert pack_kernels.main([str(source), "--output", str(output)]) == 0
    return output / source.name


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write_toy(tmp_path / "toy-kernel")


@kernel_repositories.EVERY
def test_the_build_is_the_source_under_a_name_of_its_own(folder: Path | None, tmp_path: Path) -> None:
    """Every file is there once and described by its digest; only the namespace of operators differs."""
    build = packed(folder, tmp_path) / "build"
    source = folder or tmp_path / "toy-kernel"
    backends = pack_kernels.read_repository(source).backends
    assert {variant.name for variant in build.iterdir()} == {f"torch-{pack_kernels.BACKENDS[x]}" for x in backends}
    for backend in backends:
        variant = build / f"torch-{pack_kernels.BACKENDS[backend]}"
        described = json.loads((variant / "metadata.json").read_text())
        assert described["backend"] == {"type": backend}
        package = source / "torch-ext" / described["name"].replace("-", "_")
        files = {path.relative_to(package) for path in package.rglob("*.py")}
        assert {path.relative_to(variant) for path in variant.rglob("*") if path.is_file()} == {
            *files,
            Path("metadata.json"),
        }
        assert described["digest"]["files"] == {
            file.as_posix(): base64.b64encode(hashlib.sha256((variant / file).read_bytes()).digest()).decode()
            for file in files
        }
        for file in files:
            want = (package / file).read_text()
            if file.name == "_ops.py":
                want = want.replace(f"latentmoe_{package.name}_source", described["id"])
            assert (variant / file).read_text() == want
        assert described["id"].startswith(f"latentmoe_{package.name}_")


@kernel_repositories.TOY_FIRST
def test_local_folders_load(folder: Path | None, tmp_path: Path, fresh_process: Callable[..., str]) -> None:
    target = packed(folder, tmp_path)
    described = json.loads((target / "build" / "torch-cuda" / "metadata.json").read_text())
    printed = fresh_process(AS_ON_CUDA + LOAD, env={"FOLDER": str(target)})
    assert printed.split()[-1] == described["id"]


@kernel_repositories.TOY_FIRST
def test_local_kernels_redirects_to_the_folder(
    folder: Path | None, tmp_path: Path, fresh_process: Callable[..., str]
) -> None:
    """Public report 94: without a network, a local folder takes the Hub's place."""
    target = packed(folder, tmp_path)
    described = json.loads((target / "build" / "torch-cuda" / "metadata.json").read_text())
    env = {"REPOSITORY": "some/name", "LOCAL_KERNELS": f"some/name={target}:other/name=/nowhere"}
    printed = fresh_process(AS_ON_CUDA + REDIRECTED, env=env)
    assert printed.split()[-1] == described["id"]


def test_the_models_loader_takes_local_kernels(tmp_path: Path, fresh_process: Callable[..., str]) -> None:
    code = """
from modeling_latentmoe import kernel_loading
kernel_loading.REPOSITORIES["toy"] = "some/name"
kernel_loading.logging.set_verbosity_info()
for choice in ("auto", "hub"):
    module = kernel_loading.load("toy", choice)
    assert module.scale(torch.ones(2)).tolist() == [3, 3]
"""
    env = {"LOCAL_KERNELS": f"some/name={packed(None, tmp_path)}"}
    fresh_process(AS_ON_CUDA + code, env=env, package=True)


def test_a_missing_variant_is_an_error(tmp_path: Path, fresh_process: Callable[..., str]) -> None:
    """Public report 95: what was built for other devices does not load here, in no mode, and is named."""
    target = packed(None, tmp_path)
    (target / "build" / "torch-cuda").rename(target / "build" / "torch-rocm")
    code = """
from modeling_latentmoe import kernel_loading
kernel_loading.REPOSITORIES["toy"] = "some/name"
for choice in ("auto", "hub"):
    try:
        kernel_loading.load("toy", choice)
    except ValueError as error:
        print(error)
"""
    env = {"LOCAL_KERNELS": f"some/name={target}"}
    printed = fresh_process(AS_ON_CUDA + code, env=env, package=True)
    assert printed.count("no kernels for this torch and device, built are ['torch-rocm']") == 2
    assert printed.count(str(target)) >= 2


@pytest.mark.slow
def test_two_versions_in_one_process(tmp_path: Path, fresh_process: Callable[..., str]) -> None:
    """Each keeps its own operators; a second copy of the same one is harmless."""
    folders = {"first": write_toy(tmp_path / "first", factor=3), "second": write_toy(tmp_path / "second", factor=5)}
    for name, folder in folders.items():
        for copy in ("a", "b"):
            assert pack_kernels.main([str(folder), "--output", str(tmp_path / copy)]) == 0
        assert (tmp_path / "a" / name / "build").is_dir()
    code = """
import kernels
from pathlib import Path
root = Path(os.environ["ROOT"])
names = ("a/first", "a/second", "b/first", "b/second")
modules = {name: kernels.get_local_kernel(root / name) for name in names}
for name, module in modules.items():
    assert module.scale(torch.ones(2)).tolist() == ([3, 3] if "first" in name else [5, 5]), name
    assert module.layers.Scale()(torch.ones(1)).item() == (3 if "first" in name else 5), name
assert len({module.__name__ for module in modules.values()}) == 2
"""
    fresh_process(AS_ON_CUDA + code, env={"ROOT": str(tmp_path)})


def test_names_change_with_the_content_alone(toy: Path, tmp_path: Path) -> None:
    first = pack_kernels.read_repository(toy).id
    again = pack_kernels.read_repository(write_toy(tmp_path / "again")).id
    assert first == again
    assert pack_kernels.read_repository(write_toy(tmp_path / "other", factor=4)).id != first
    assert pack_kernels.read_repository(write_toy(tmp_path / "newer", version=2)).id != first
    (toy / "torch-ext" / "toy_kernel" / "__pycache__").mkdir()
    (toy / "torch-ext" / "toy_kernel" / "__pycache__" / "x.pyc").write_bytes(b"")
    assert pack_kernels.read_repository(toy).id == first


def test_in_place_an_older_build_is_replaced(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack_kernels.main([str(toy)]) == 0
    (toy / "build" / "torch-cuda" / "stale.py").write_text("")
    operators = toy / "torch-ext" / "toy_kernel" / "operators.py"
    operators.write_text(operators.read_text().replace("* 3", "* 7"))
    assert pack_kernels.main([str(toy)]) == 0
    variant = toy / "build" / "torch-cuda"
    assert not (variant / "stale.py").exists()
    assert "* 7" in (variant / "operators.py").read_text()
    assert not [path for path in toy.iterdir() if path.name.startswith(".")]
    assert not (toy / "README.md").exists()
    assert "torch-cuda" in capsys.readouterr().out


def test_a_failed_write_leaves_the_older_build(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pack_kernels.main([str(toy)]) == 0
    before = {path: path.read_bytes() for path in (toy / "build").rglob("*.*") if path.is_file()}
    operators = toy / "torch-ext" / "toy_kernel" / "operators.py"
    operators.write_text(operators.read_text().replace("* 3", "* 7"))

    def full(*args) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pack_kernels, "metadata", full)
        assert pack_kernels.main([str(toy)]) == 2
    assert {path: path.read_bytes() for path in (toy / "build").rglob("*.*") if path.is_file()} == before
    assert pack_kernels.main([str(toy)]) == 0
    assert "* 7" in (toy / "build" / "torch-cuda" / "operators.py").read_text()


def test_the_card_is_the_readme_of_what_is_uploaded(tmp_path: Path) -> None:
    assert (packed(None, tmp_path) / "README.md").read_text() == "# Toy\n"


MISTAKES = {
    "name": ('name = "toy-kernel"', 'name = "Toy_Kernel"', "general.name 'Toy_Kernel'"),
    "no name": ('name = "toy-kernel"', "", "general.name is None"),
    "package": ('name = "toy-kernel"', 'name = "toy"', "general.name in .* names this package"),
    "version": ("version = 1", 'version = "1"', "general.version is '1', expected a int"),
    "backend": ('backends = ["cuda"]', 'backends = ["gpu"]', r"general.backends \['gpu'\] must be some of cpu, cuda"),
    "no backend": ('backends = ["cuda"]', "backends = []", "general.backends"),
    "toml": ("[general]", "[general", "not valid TOML"),
    "true version": ("version = 1", "version = true", "general.version is True, expected a int"),
    "list of lists": ('backends = ["cuda"]', 'backends = [["cuda"]]', "general.backends"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_build_toml(mistake: str, toy: Path) -> None:
    old, new, message = MISTAKES[mistake]
    file = toy / "build.toml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ValueError, match=f"build.toml.*{message}|{message}.*build.toml|names this package"):
        pack_kernels.read_repository(toy)


def test_mistakes_in_the_sources(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = toy / "torch-ext" / "toy_kernel"
    ops = (package / "_ops.py").read_text()
    (package / "_ops.py").write_text(ops.replace("_source", "_sauce"))
    assert pack_kernels.main([str(toy)]) == 2
    assert 'must have one line NAMESPACE = "latentmoe_toy_kernel_source"' in capsys.readouterr().err
    (package / "_ops.py").write_text(ops)
    (toy / "CARD.md").unlink()
    assert pack_kernels.main([str(toy), "--output", str(tmp_path / "out")]) == 2
    assert "CARD.md is missing" in capsys.readouterr().err
    (package / "__init__.py").write_text("")
    assert pack_kernels.main([str(toy)]) == 2
    assert "has no __all__" in capsys.readouterr().err
    (package / "__init__.py").write_text("def (")
    assert pack_kernels.main([str(toy)]) == 2
    assert "__init__.py is not valid Python" in capsys.readouterr().err
    (toy / "build.toml").write_text("general = 3")
    assert pack_kernels.main([str(toy)]) == 2
    assert "build.toml: general is 3, expected a table" in capsys.readouterr().err
    (toy / "build.toml").write_bytes(b"\xff")
    assert pack_kernels.main([str(toy)]) == 2
    assert "build.toml is not valid TOML" in capsys.readouterr().err
    assert pack_kernels.main(["unknown"]) == 2
    assert "unknown has no build.toml" in capsys.readouterr().err
    assert not (toy / "build").exists()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        pack_kernels.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("get_local_kernel", "LOCAL_KERNELS=", "--output", "NAME"))
    assert max(map(len, text.splitlines())) <= 120 and os.linesep in text
