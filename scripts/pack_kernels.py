"""Pack the kernel repositories of hub_kernels/ into what the `kernels` library loads and the Hub serves.

    python scripts/pack_kernels.py                            # all of them, each into its own build/
    python scripts/pack_kernels.py kda --output packed        # one, into packed/kda, with its card: ready to upload

What is packed loads without being installed:

    kernels.get_local_kernel(Path("hub_kernels/kda"))
    LOCAL_KERNELS=latentmoe/kda=hub_kernels/kda python ...    # wherever get_kernel("latentmoe/kda", ...) is called
    hf upload latentmoe/kda packed/kda . --repo-type kernel --revision v1
    kernels.get_kernel("latentmoe/kda", version=1)            # the branch v1

Sources are build.toml and torch-ext/NAME. Every backend that build.toml lists gets a folder build/torch-BACKEND: the
sources, with the namespace of their operators and the id in metadata.json made unique by a digest of the content, so
that two versions can be loaded into one process. `kernels` takes the folder of the backend that torch is built for; the
code is Triton, so nothing is compiled here. An older build/ is replaced once the new one is whole.
"""

import ast
import base64
import hashlib
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.files import TEMPORARY

ROOT = Path(__file__).resolve().parent.parent / "hub_kernels"
# what `kernels` calls a backend -> the folder that it looks into
BACKENDS = {"cpu": "cpu", "cuda": "cuda", "rocm": "rocm", "xpu": "xpu", "cann": "npu"}
KERNEL_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
DIGEST_LENGTH = 12


@dataclass(frozen=True)
class Repository:
    """What build.toml says and the files of the Python package, by their paths in it."""

    name: str
    version: int
    license: str
    backends: list[str]
    files: dict[str, bytes]

    @property
    def package(self) -> str:
        return self.name.replace("-", "_")

    @property
    def id(self) -> str:
        """Name of the module in a process, and of the namespace of its operators: another one for other content."""
        digest = hashlib.sha256(f"{self.version}\0".encode())
        for path, content in sorted(self.files.items()):
            digest.update(f"{path}\0{len(content)}\0".encode() + content)
        return f"latentmoe_{self.package}_{digest.hexdigest()[:DIGEST_LENGTH]}"


def read_repository(folder: Path) -> Repository:
    """Read hub_kernels/NAME. ValueError that names the file, and the field, that is missing or wrong."""
    file = folder / "build.toml"
    try:
        settings: dict[str, Any] = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid TOML: {error}") from error
    general = settings.get("general", {})
    if not isinstance(general, dict):
        raise ValueError(f"{file}: general is {general!r}, expected a table")
    for name, kind in {"name": str, "version": int, "license": str, "backends": list}.items():
        if type(general.get(name)) is not kind:
            raise ValueError(f"{file}: general.{name} is {general.get(name)!r}, expected a {kind.__name__}")
    name, backends = general["name"], general["backends"]
    if not KERNEL_NAME.fullmatch(name):
        raise ValueError(f"{file}: general.name {name!r} must be of lower-case letters, digits and dashes")
    if not backends or not all(backend in list(BACKENDS) for backend in backends):
        raise ValueError(f"{file}: general.backends {backends} must be some of {', '.join(BACKENDS)}")
    package = folder / "torch-ext" / name.replace("-", "_")
    files = {
        path.relative_to(package).as_posix(): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if "__init__.py" not in files:
        raise ValueError(f"{package}/__init__.py is missing: general.name in {file} names this package")
    try:
        code = ast.parse(files["__init__.py"])
    except SyntaxError as error:
        raise ValueError(f"{package}/__init__.py is not valid Python: {error}") from error
    if not any(is_assignment(node, "__all__") for node in code.body):
        raise ValueError(f"{package}/__init__.py has no __all__, the public names")
    return Repository(name, general["version"], general["license"], backends, files)


def is_assignment(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]


def with_namespace(repository: Repository, folder: Path) -> dict[str, bytes]:
    """The files, with the namespace that `_ops.py` gives to operators replaced by the repository's id."""
    line = f'NAMESPACE = "latentmoe_{repository.package}_source"\n'.encode()
    ops = repository.files.get("_ops.py", b"")
    if ops.count(line) != 1:
        raise ValueError(f"{folder}/torch-ext/{repository.package}/_ops.py must have one line {line.decode().strip()}")
    return {**repository.files, "_ops.py": ops.replace(line, f'NAMESPACE = "{repository.id}"\n'.encode())}


def metadata(repository: Repository, backend: str, files: dict[str, bytes]) -> dict[str, Any]:
    """metadata.json of a variant."""
    digests = {path: base64.b64encode(hashlib.sha256(content).digest()).decode() for path, content in files.items()}
    return {
        "id": repository.id,
        "name": repository.name,
        "version": repository.version,
        "license": repository.license,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": dict(sorted(digests.items()))},
    }


def write_build(target: Path, repository: Repository, files: dict[str, bytes]) -> None:
    """Write target/build, in place of an older one once it is complete."""
    build, partial = target / "build", target / f".build{TEMPORARY}"
    shutil.rmtree(partial, ignore_errors=True)
    for backend in repository.backends:
        variant = partial / "new" / f"torch-{BACKENDS[backend]}"
        for path, content in files.items():
            (variant / path).parent.mkdir(parents=True, exist_ok=True)
            (variant / path).write_bytes(content)
        described = json.dumps(metadata(repository, backend, files), indent=2)
        (variant / "metadata.json").write_text(described + "\n")
    if build.exists():
        build.replace(partial / "old")
    (partial / "new").replace(build)
    shutil.rmtree(partial)


def pack(folder: Path, output: Path | None) -> None:
    repository = read_repository(folder)
    files = with_namespace(repository, folder)
    target = output / folder.name if output else folder
    card = folder / "CARD.md"
    if output and not card.is_file():
        raise ValueError(f"{card} is missing: it becomes README.md of the repository on the Hub")
    write_build(target, repository, files)
    if output:
        shutil.copyfile(card, target / "README.md")
    variants = ", ".join(f"torch-{BACKENDS[backend]}" for backend in repository.backends)
    print(f"{target}: {repository.name} version {repository.version}, {variants}, {repository.id}")


def pack_kernels(argv: Sequence[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="in hub_kernels/, or path of a folder (default: all)")
    parser.add_argument("--output", type=Path, help="folder to write NAME/build and NAME/README.md into")
    args = parser.parse_args(argv)
    known = sorted(file.parent for file in ROOT.glob("*/build.toml"))
    folders = [Path(name) if "/" in name else ROOT / name for name in args.names] or known
    if not folders:
        raise ValueError(f"{ROOT} has no folder with a build.toml")
    for folder in folders:
        if not (folder / "build.toml").is_file():
            names = ", ".join(path.name for path in known) or "nothing"
            raise ValueError(f"{folder} has no build.toml; hub_kernels/ has {names}")
    for folder in folders:
        pack(folder, args.output)


def main(argv: Sequence[str]) -> int:
    return run_command(pack_kernels, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
