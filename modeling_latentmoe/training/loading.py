"""Load a model and its processor through the Auto classes, safely when several processes start at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils.hub import HF_MODULES_CACHE

import modeling_latentmoe

# the trained tiny model that comes with the package
_TINY = Path(modeling_latentmoe.__file__).parent / "tiny"
SHIPPED_MODEL = str(_TINY.relative_to(Path.cwd()) if _TINY.is_relative_to(Path.cwd()) else _TINY)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@contextmanager
def remote_code_lock() -> Iterator[None]:
    """One process of this machine at a time copies remote code into the module cache.

    transformers copies the .py files there without a lock: a process that imports while another one is still
    writing sees a truncated file.
    """
    cache = Path(HF_MODULES_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".latentmoe.lock"):
        yield


def load_processor(model: str) -> ProcessorMixin:
    """The processor of `model` (a local folder or a Hub id), its code fetched under the lock."""
    with remote_code_lock():
        return AutoProcessor.from_pretrained(model, trust_remote_code=True)


def load_model(model: str, dtype: str) -> PreTrainedModel:
    """The image-text-to-text model of `model` (a local folder or a Hub id) in "fp32" or "bf16".

    Only the code is fetched under the lock; the weights are read by all processes at the same time.
    Raises ValueError or OSError, in one line that names the file, for a checkpoint that is not whole.
    """
    with remote_code_lock():
        config = AutoConfig.from_pretrained(model, trust_remote_code=True)
        reference = getattr(config, "auto_map", {}).get("AutoModelForImageTextToText")
        if reference is not None:
            get_class_from_dynamic_module(reference, model)
    try:
        return AutoModelForImageTextToText.from_pretrained(model, trust_remote_code=True, dtype=DTYPES[dtype])
    except SafetensorError as error:
        raise OSError(f"{broken_shard(model)}: the file is damaged or cut short ({error})") from error


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass; transformers 5.23 gave the method a new name."""
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()


def broken_shard(model: str) -> str:
    """The first weight file of a local folder that safetensors cannot open; the model's name if none is."""
    for file in sorted(Path(model).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return str(file)
    return model
