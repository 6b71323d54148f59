"""The arrow of imports, read from the syntax trees.

    hub_kernels  ->  torch, triton, themselves
    model files  ->  torch, transformers, siblings; kernels only in kernel_loading.py, which is for ops.py;
                     optional packages only in `try`
    training     ->  the model package, the training libraries
    scripts      ->  everything; nobody imports scripts

The model files are also remote code: transformers copies them beside weights by a regular expression over
`from .name import`, and import-checks the rest, so their imports obey its rules.
"""

import ast
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers
from transformers.dynamic_module_utils import check_imports, get_relative_import_files, get_relative_imports

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "modeling_latentmoe"
MODEL_FILES = sorted(path for path in PACKAGE.glob("*.py") if path.name != "__init__.py")
TRAINING_FILES = sorted((PACKAGE / "training").glob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
KERNEL_FILES = sorted((ROOT / "hub_kernels").glob("*/torch-ext/**/*.py"))
EVERYTHING = [*sorted(PACKAGE.glob("*.py")), *TRAINING_FILES, *SCRIPTS, *KERNEL_FILES]

STDLIB = sys.stdlib_module_names
# tokenizers, safetensors and huggingface_hub come with every transformers.
MODEL_IMPORTS = {"torch", "transformers", "tokenizers", "safetensors", "huggingface_hub"}
IMAGE_IMPORTS = {"numpy", "PIL"}
IMAGE_FILES = {"image_processing_latentmoe.py", "processing_latentmoe.py"}
KERNEL_IMPORTS = {"kernels", "triton", "fla", "torch_npu"}
TRAINING_IMPORTS = {
    *MODEL_IMPORTS,
    *IMAGE_IMPORTS,
    *(
        "accelerate",
        "datasets",
        "filelock",
        "fsspec",
        "matplotlib",
        "modeling_latentmoe",
        "peft",
        "psutil",
        "tokenizers",
        "tqdm",
        "yaml",
    ),
}

PUBLIC_MODULES = {"transformers", "transformers.generation", "transformers.utils"}

# What we use of transformers beyond its top-level names, each with its reason. A minor release may move them.
NON_PUBLIC = {
    "transformers.activations.ACT2FN": "vision activations by their config name",
    "transformers.conversion_mapping.register_checkpoint_conversion_mapping": "released tensor names on disk",
    "transformers.core_model_loading.ConversionOps": "stacking and decoding experts while loading",
    "transformers.core_model_loading.WeightConverter": "stacking experts while loading",
    "transformers.dynamic_module_utils.get_class_from_dynamic_module": "fetching code under a lock",
    "transformers.modeling_layers.GradientCheckpointingLayer": "gradient checkpointing finds these layers",
    "transformers.quantizers.auto": "registering the quantizer that keeps experts packed",
    "transformers.quantizers.base.HfQuantizer": "base class of that quantizer",
    "transformers.utils.generic.can_return_tuple": "`return_dict=False`",
    "transformers.utils.hub.HF_MODULES_CACHE": "where the lock lives",
    "transformers.utils.loading_report.LoadStateDictInfo": "what a streaming load reports to `from_pretrained`",
    "transformers.distributed.expert_parallel.AllToAllEP": "what bench_dispatch.py measures beside",
}


@dataclass(frozen=True)
class Import:
    """One imported name: `module` as written (dots kept), `name` None for a plain `import module`."""

    module: str
    name: str | None
    guarded: bool
    line: int

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def relative(self) -> bool:
        return self.module.startswith(".")


def imports_of(path: Path) -> list[Import]:
    """Every import of a file, also those inside functions; `guarded` when a `try` body surrounds it."""
    found: list[Import] = []

    def visit(node: ast.AST, guarded: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, None, guarded, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.extend(Import(module, alias.name, guarded, node.lineno) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, guarded or isinstance(node, ast.Try))

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def each(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", files, ids=[str(path.relative_to(ROOT)) for path in files])


def test_the_reader_sees_what_it_must(tmp_path: Path) -> None:
    """The checks below are only as good as `imports_of`: it sees nested, guarded and relative imports."""
    sample = tmp_path / "sample.py"
    sample.write_text(
        "import a.b\ndef f():\n    from .c import d\n    from . import e\n"
        "try:\n    import g\nexcept ImportError: g = 0\n"
    )
    seen = [(item.module, item.name, item.guarded) for item in imports_of(sample)]
    assert seen == [("a.b", None, False), (".c", "d", False), (".", "e", False), ("g", None, True)]


def test_there_is_something_to_check() -> None:
    assert {"modeling_latentmoe.py", "configuration_latentmoe.py", "ops.py"} <= {path.name for path in MODEL_FILES}
    assert TRAINING_FILES and SCRIPTS


@each(MODEL_FILES)
def test_model_files_import_only_torch_transformers_and_siblings(path: Path) -> None:
    allowed = STDLIB | MODEL_IMPORTS | (IMAGE_IMPORTS if path.name in IMAGE_FILES else set())
    for item in imports_of(path):
        if item.relative:
            assert (PACKAGE / f"{item.module[1:]}.py").exists(), f"line {item.line}: no sibling {item.module}"
        elif item.top in KERNEL_IMPORTS:
            here = item.guarded and path.name in ("kernel_loading.py", "npu.py")
            assert here, f"line {item.line}: {item.top} belongs to kernel_loading.py or npu.py, in try"
        else:
            assert item.guarded or item.top in allowed, f"line {item.line}: {item.top} outside try"
            assert item.top not in ("modeling_latentmoe", "scripts"), f"line {item.line}: not by its own name"


def test_kernels_are_reached_through_ops() -> None:
    users = {path.name for path in MODEL_FILES for item in imports_of(path) if item.module == ".kernel_loading"}
    assert users == {"ops.py", "npu_kernels.py"}
    ascend = {".npu", ".npu_experts", ".npu_kernels", ".npu_sparse"}
    users = {path.name for path in MODEL_FILES for item in imports_of(path) if item.module in ascend}
    assert users == {"ops.py", "npu_experts.py", "npu_kernels.py", "npu_sparse.py"}


@each(MODEL_FILES)
def test_remote_code_rules(path: Path) -> None:
    """The regular expression finds exactly the real sibling imports, and every file they lead to exists."""
    relative = {item.module[1:] for item in imports_of(path) if item.relative}
    assert "" not in relative, "`from . import x` is not copied beside the weights"
    assert not any("." in module for module in relative), "only siblings are copied"
    assert set(get_relative_imports(path)) == relative, "a docstring or comment line reads like a relative import"
    assert all(Path(needed).is_file() for needed in get_relative_import_files(path))
    assert set(check_imports(path)) == relative


def test_model_files_never_reach_training() -> None:
    for path in MODEL_FILES:
        closure = [path, *map(Path, get_relative_import_files(path))]
        assert all(file.parent == PACKAGE for file in closure)


@each(TRAINING_FILES)
def test_training_imports_the_package_and_its_libraries(path: Path) -> None:
    for item in imports_of(path):
        known = item.relative or item.guarded or item.top in STDLIB | TRAINING_IMPORTS
        assert known, f"line {item.line}: {item.top}"


@each(KERNEL_FILES)
def test_kernel_repositories_stand_alone(path: Path) -> None:
    for item in imports_of(path):
        assert item.relative or item.top in STDLIB | {"torch", "triton"}, f"line {item.line}: {item.top}"


@each(EVERYTHING)
def test_nobody_imports_scripts(path: Path) -> None:
    names = {"scripts", *(script.stem for script in SCRIPTS)}
    assert not [item for item in imports_of(path) if item.top in names]


@each([*MODEL_FILES, *TRAINING_FILES, *SCRIPTS])
def test_no_private_transformers_symbols(path: Path) -> None:
    for item in imports_of(path):
        if item.top != "transformers":
            continue
        parts = [*item.module.split("."), item.name or ""]
        assert not any(part.startswith("_") for part in parts), f"line {item.line}: private {'.'.join(parts)}"
        qualified = f"{item.module}.{item.name}"
        public = item.module in PUBLIC_MODULES or hasattr(transformers, item.name or "")
        assert public or qualified in NON_PUBLIC, f"line {item.line}: {qualified} is neither public nor listed"


def test_listed_symbols_are_used_and_exist() -> None:
    files = [*MODEL_FILES, *TRAINING_FILES, *SCRIPTS]
    used = {f"{item.module}.{item.name}" for path in files for item in imports_of(path)}
    assert set(NON_PUBLIC) <= used, "drop what is no longer used"
    for qualified in NON_PUBLIC:
        module, _, name = qualified.rpartition(".")
        assert hasattr(importlib.import_module(module), name), qualified
