"""Where the kernels of `ops.py` come from: each repository is looked for once per process and choice.

    "auto"   on CUDA devices the first of: a folder named in LOCAL_KERNELS, this checkout's hub_kernels/, the pinned
             revision in the Hub cache. Without any of them, and wherever a kernel does not apply, the torch definition.
    "torch"  the torch definitions.
    "hub"    the pinned revision (or the folder in LOCAL_KERNELS), downloaded if need be. What cannot run as a kernel
             is a ValueError.

On Ascend "auto" takes operators of torch-npu instead (npu.py), and of the kernels those that Triton-Ascend compiles
(npu_kernels.py).

LOCAL_KERNELS, a variable of the `kernels` library, lists folders written by scripts/pack_kernels.py as
"org/repo=folder:org/repo=folder". This file may be imported twice in a process: what it loads is kept in sys.modules
under names of its own, so both copies get the same kernels.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Folder in hub_kernels/ -> Hub repository. The revision is the branch of the interface that `ops.py` is written to.
REPOSITORIES = {
    "kda": "latentmoe/kda",
    "latent_moe": "latentmoe/latent-moe",
    "residual": "latentmoe/residual",
    "linear_cross_entropy": "latentmoe/linear-cross-entropy",
    "low_rank": "latentmoe/low-rank",
    "sparse_attention": "latentmoe/sparse-attention",
}
REVISION = "v1"
DEVICES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LOADED: dict[tuple[str, str], ModuleType | None] = {}


def kernel_for(name: str, choice: str, *tensors: torch.Tensor, problem: str | None = None) -> ModuleType | None:
    """The repository `name` of kernels for a call on `tensors`, or None for the torch definition.

    problem: why its kernels cannot make this call, if they cannot. Raises ValueError where `choice` is "hub" and no
    kernel can run.
    """
    first = tensors[0]
    if choice == "torch" or not first.numel():
        return None
    if anywhere := _problem_of_tensors(first.device, first.dtype):
        problem = anywhere
    elif any(x.dtype != first.dtype for x in tensors):
        # as under autocast, where a layer's result is narrower than what it is added to
        problem = f"the tensors differ in dtype: {', '.join(str(x.dtype) for x in tensors)}"
    if problem is None:
        return loaded(name, choice)
    if choice == "hub":
        raise ValueError(f'kernels="hub": {name}: {problem}; "auto" uses torch where a kernel does not apply')
    return None


def check_choice(choice: str, device: torch.device, dtype: torch.dtype) -> None:
    """ValueError where `choice` is "hub" and there are no kernels for tensors of this device and dtype."""
    if choice == "hub" and (problem := _problem_of_tensors(device, dtype)):
        raise ValueError(f'kernels="hub": {problem}; "auto" uses torch where a kernel does not apply')


def _problem_of_tensors(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type not in DEVICES:
        return f"kernels run on {' and '.join(DEVICES)} devices, the tensors are on {device}"
    # Torch calls AMD's devices cuda too, some even with the capability of Hopper.
    if torch.version.hip is not None:
        return "kernels are written for the GPUs of NVIDIA, this torch is built for those of AMD"
    return None if dtype in DTYPES else f"there are no kernels for {dtype}"


def loaded(name: str, choice: str) -> ModuleType | None:
    """`load`, once per process."""
    if (name, choice) not in _LOADED:
        _LOADED[name, choice] = load(name, choice)
    return _LOADED[name, choice]


def load(name: str, choice: str) -> ModuleType | None:
    """Find and import a repository, and say in the log which one it is; None where "auto" finds none.

    Raises ValueError where "hub" finds none, and ValueError or ImportError where the first one found does not load.
    """
    try:
        place, module = _find(name, choice)
    except _NotFound as missing:
        if choice == "hub":
            raise ValueError(f'kernels="hub": {name}: {missing}') from missing
        logger.warning(f"{name}: torch definitions, {missing}")
        return None
    logger.info(f"{name}: kernels of {place}")
    return module


class _NotFound(Exception):
    """Says why there is no kernel."""


def _find(name: str, choice: str) -> tuple[str | Path, ModuleType]:
    """Where the kernels of `name` are, and the imported module."""
    repository = REPOSITORIES[name]
    if importlib.util.find_spec("triton") is None:
        raise _NotFound("triton is not installed")
    folder = _local_kernels().get(repository)
    if folder is not None:
        return folder, _packed(folder)
    source = _checkout(name)
    if choice == "auto" and source is not None:
        return source, _source(name, source)
    if importlib.util.find_spec("kernels") is None:
        raise _NotFound(f"loading {repository} needs `pip install kernels`")
    try:
        folder = snapshot_download(
            repository,
            repo_type="kernel",
            revision=REVISION,
            allow_patterns="build/*",
            cache_dir=os.environ.get("KERNELS_CACHE"),
            local_files_only=choice == "auto",
        )
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        reason = "is not in the Hub cache" if choice == "auto" else f"was not fetched: {error}"
        raise _NotFound(f"{repository}, revision {REVISION}, {reason}") from error
    return f"{repository}, revision {REVISION}", _packed(Path(folder))


def _local_kernels() -> dict[str, Path]:
    entries = os.environ.get("LOCAL_KERNELS", "").split(":")
    return {name: Path(folder) for name, _, folder in (entry.partition("=") for entry in entries)}


def _packed(folder: Path) -> ModuleType:
    """A folder in the layout that the `kernels` library loads."""
    try:
        from kernels import get_local_kernel
    except ImportError as error:
        raise ImportError(f"{folder}: loading it needs `pip install kernels`") from error
    try:
        return get_local_kernel(folder)
    except FileNotFoundError as error:
        built = sorted(variant.name for variant in (folder / "build").glob("*"))
        raise ValueError(f"{folder}: no kernels for this torch and device, built are {built}: {error}") from error


def _checkout(name: str) -> Path | None:
    """Sources in the checkout from which the installed package runs: remote code lies elsewhere and has none."""
    package = importlib.util.find_spec("modeling_latentmoe")
    if package is None or package.origin is None:
        return None
    source = Path(package.origin).parents[1] / "hub_kernels" / name / "torch-ext" / name / "__init__.py"
    return source if source.is_file() else None


def _source(name: str, file: Path) -> ModuleType:
    full_name = f"latentmoe_{name}_source"
    if full_name in sys.modules:
        return sys.modules[full_name]
    spec = importlib.util.spec_from_file_location(full_name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[full_name]
        raise
    return module
