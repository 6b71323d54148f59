"""Load a model and its processor through the Auto classes, safely when several processes start at once."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils.hub import HF_MODULES_CACHE

import modeling_latentmoe
from modeling_latentmoe.headers import read_index
from modeling_latentmoe.training.expert_parallel import RECEIVED
from modeling_latentmoe.training.lora import read_json
from modeling_latentmoe.training.sources import (
    CONFIG,
    INDEX,
    OPTIONAL_FILES,
    RemoteFiles,
    fetch_small_files,
    header_files,
    hub_config,
    is_url,
)
from modeling_latentmoe.training.streaming import check_shares, streamed

# the trained tiny model that comes with the package
_TINY = Path(modeling_latentmoe.__file__).parent / "tiny"
SHIPPED_MODEL = str(_TINY.relative_to(Path.cwd()) if _TINY.is_relative_to(Path.cwd()) else _TINY)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# what scaled_dot_product_attention runs; where keys and values differ in width, torch has no fused kernel on CPU
FUSED_ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


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
    """The processor of `model` (a local folder, a Hub id or a URL), its code fetched under the lock."""
    with remote_code_lock():
        return AutoProcessor.from_pretrained(_local(model), trust_remote_code=True)


def load_config(model: str) -> PreTrainedConfig:
    """The config of `model` (a local folder, a Hub id or a URL), its code fetched under the lock."""
    with remote_code_lock():
        return AutoConfig.from_pretrained(_local(model), trust_remote_code=True)


def load_model(
    model: str,
    dtype: str,
    ep_rank: int = 0,
    ep_degree: int = 1,
    kernels: str = "auto",
    on_disk: Collection[int] = (),
) -> PreTrainedModel:
    """The image-text-to-text model of `model` (a local folder, a Hub id or a URL) in "fp64", "fp32" or "bf16".

    With an expert-parallel degree n above 1 this process, rank r, holds and reads experts [r * E / n, (r + 1) * E / n)
    of every layer only. So read, range by range, are also checkpoints that do not fit in memory and those at a URL,
    such as s3://bucket/folder or https://host/folder. Only the code is fetched under the lock; the weights are read by
    all processes at the same time. kernels: where fused operations come from (kernel_loading.py). on_disk: layers of a
    local checkpoint whose experts are left in their files, for expert_homes.py. Raises ValueError or OSError, in one
    line that names the file, for a checkpoint that is not whole or a degree that does not divide the number of experts.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} must be one of {', '.join(DTYPES)}")
    remote = RemoteFiles(model) if is_url(model) else None
    with remote_code_lock():
        place = _local(model)
        config = AutoConfig.from_pretrained(place, trust_remote_code=True)
        config.kernels = kernels
        reference = getattr(config, "auto_map", {}).get("AutoModelForImageTextToText")
        if reference is None:
            raise ValueError(f"{model}/config.json: auto_map has no AutoModelForImageTextToText to load")
        cls = get_class_from_dynamic_module(reference, place)
    check_shares(config, ep_rank, ep_degree)
    streaming = streamed(cls, ep_rank, ep_degree, remote, on_disk)
    with header_files(remote, Path(place)) if remote else nullcontext(place) as folder:
        try:
            loaded = streaming.from_pretrained(folder, config=config, dtype=DTYPES[dtype])
        except SafetensorError as error:
            raise OSError(f"{broken_shard(model)}: the file is damaged or cut short ({error})") from error
        except (ValueError, OSError) as error:
            # the user knows the URL, not the local folder that stands for it
            if remote is None:
                raise
            kind = OSError if isinstance(error, OSError) else ValueError
            raise kind(str(error).replace(str(folder), remote.place)) from error
    loaded.__class__ = cls
    loaded.config.name_or_path = model
    unfilled = [name for name, tensor in chain(loaded.named_parameters(), loaded.named_buffers()) if tensor.is_meta]
    assert not unfilled, unfilled
    return loaded


def _local(model: str) -> str:
    """Where to read all but the weights: `model` itself, or the copy of a URL's small files.

    ValueError where neither a folder nor an id of the Hub has this name, or where a JSON file of a folder is damaged;
    OSError for a model of the Hub that is neither cached nor to be had from there.
    """
    if is_url(model):
        return str(fetch_small_files(RemoteFiles(model)))
    folder = Path(model)
    if not folder.is_dir():
        hub_config(model)
    # transformers reports these without their names, or not at all
    for file in (CONFIG, *OPTIONAL_FILES):
        if file.endswith(".json") and file != INDEX and (folder / file).is_file():
            read_json(folder / file)
    read_index(folder / INDEX)
    return model


def checkpoint_activations(model: PreTrainedModel, selective: bool = False) -> None:
    """Recompute activations in the backward pass, but never decisions (see modeling_latentmoe.py).

    selective: results that are dear to compute again for their size are kept too, what came over the network and those
    of fused attention: a recomputed forward then takes no collective of expert parallelism.
    """
    kwargs = {"saved_ops": [*RECEIVED, *FUSED_ATTENTION]} if selective else None
    # transformers 5.23 gave the method a new name
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")(kwargs)


def broken_shard(model: str) -> str:
    """The first weight file of a local folder that safetensors cannot open; the model's name if none is."""
    for file in sorted(Path(model).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return str(file)
    return model
