"""A checkpoint of dense attention becomes one of sparse attention: the same weights, and new indexers beside them."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from modeling_latentmoe.configuration_latentmoe import LINEAR, LatentMoEConfig
from modeling_latentmoe.headers import StoredTensor, read_header
from modeling_latentmoe.indexer import LightningIndexer
from modeling_latentmoe.training.files import new_folder
from modeling_latentmoe.training.overlay import copy_code
from modeling_latentmoe.training.preflight import check_folder, is_released, read_config, summarize
from modeling_latentmoe.training.sources import INDEX
from modeling_latentmoe.training.streaming import STORED_DTYPES

# of the base: written anew, or not a part of its weights
REPLACED = ("*.safetensors", "*.safetensors.index.json", "config.json", ".*")


def add_indexer(
    base: Path, out: Path, *, topk: int, heads: int, head_dim: int, every: int = 1, pool: int = 1, seed: int = 0
) -> list[int]:
    """Write the folder `out`: the checkpoint `base` with untrained indexers; returns the layers that own one.

    All attention layers that are not KDA become sparse: of every `every` of them the first owns an indexer, which the
    others share. Weights are links to those of `base`, which has to stay where it is. ValueError for a `base` that is
    not whole, is of the released form (overlay.py), or has indexers, for an `out` that is in use or inside of it, and
    for settings that contradict each other.
    """
    if not base.is_dir():
        raise ValueError(f"{base} is not a folder")
    if base.resolve() in out.resolve().parents:
        raise ValueError(f"{out} lies inside {base}: write elsewhere")
    if every < 1:
        raise ValueError(f"--every {every} must be at least 1")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed {seed} must be at least 0 and below 2**32")
    if is_released(base):
        raise ValueError(f"{base} has the released config: lay ours over it first, with scripts/overlay.py")
    report = check_folder(base)
    if report.faults:
        raise ValueError(f"{base} is not a whole checkpoint: {'; '.join(summarize(report.faults))}")
    old = read_config(base)
    if old.text_config.index_topk is not None:
        raise ValueError(f"{base} has indexers already (index_topk in its config)")
    config = sparse_config(old, topk, heads, head_dim, every, pool)
    headers = {name: read_header(base / name) for name in report.shards}
    tensors = new_tensors(config, seed, weight_dtype(headers))
    count = len(headers) + 1
    # a single file would be taken for all weights under its own name
    links = {name: f"model-{number:05d}-of-{count:05d}.safetensors" for number, name in enumerate(headers, start=1)}
    shard = f"model-{count:05d}-of-{count:05d}.safetensors"
    with new_folder(out) as partial:
        shutil.copytree(base, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*REPLACED))
        copy_code(partial)
        (partial / "config.json").write_text(config.to_json_string())
        weight_map = dict.fromkeys(tensors, shard)
        save_file(tensors, partial / shard, metadata={"format": "pt"})
        for name, link in links.items():
            (partial / link).symlink_to((base / name).resolve())
            weight_map |= dict.fromkeys(headers[name], link)
        added = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {"metadata": {"total_size": report.nbytes + added}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [layer for layer, kind in enumerate(config.text_config.indexer_types) if kind == "full"]


def sparse_config(
    config: LatentMoEConfig, topk: int, heads: int, head_dim: int, every: int, pool: int
) -> LatentMoEConfig:
    """The config of a dense model with these indexers. ValueError for what contradicts itself."""
    fields = config.to_dict()
    text = fields["text_config"]
    indexers, count = [], 0
    for kind in text["layer_types"]:
        indexers.append("none" if kind == LINEAR else "shared" if count % every else "full")
        count += kind != LINEAR
    text |= {"index_topk": topk, "index_n_heads": heads, "index_head_dim": head_dim, "index_kpool": pool}
    text |= {"indexer_types": indexers, "layer_types": None}
    if "full" not in indexers:
        raise ValueError("the model has no attention layer but KDA: there is nothing to make sparse")
    return LatentMoEConfig(**fields)


def weight_dtype(headers: dict[str, dict[str, StoredTensor]]) -> torch.dtype:
    """What attention layers of the base are stored in."""
    tensors = (item for header in headers.values() for item in header.items())
    return next(STORED_DTYPES[tensor.dtype] for name, tensor in tensors if name.endswith("kv_b_proj.weight"))


def new_tensors(config: LatentMoEConfig, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Untrained indexers by their names in a checkpoint, a function of config, seed and dtype alone."""
    text, tensors = config.text_config, {}
    generator = torch.Generator().manual_seed(seed)
    for layer, kind in enumerate(text.indexer_types):
        if kind != "full":
            continue
        indexer = LightningIndexer(text)
        for name, parameter in indexer.named_parameters():
            value = parameter.detach()
            # norms and the mixture of pools are what they start as
            if name in ("wq_b.weight", "wk.weight", "weights_proj.weight"):
                value = torch.randn(value.shape, generator=generator) * text.initializer_range
            tensors[f"language_model.model.layers.{layer}.self_attn.indexer.{name}"] = value.to(dtype).contiguous()
    return tensors
