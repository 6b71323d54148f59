"""Write an adapter under the names that servers read: every matrix of every expert has factors of its own.

    adapter   ...block_sparse_moe.experts.base_layer.lora_A.weight     [E * r, in]   gate and up rows of all experts
    export    ...block_sparse_moe.experts.7.w1.lora_A.weight           [r, in]       the gate of expert 7

Both are PEFT files. w1 and w3 of an expert share their A in the adapter and get a copy each here. Some servers read
one `lora_alpha / r` for the whole file and no patterns: the exported config gives every layer the same scale, and
the B of a layer that had another one is multiplied by the difference (`scripts/lora.py` gives all the same).
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.conversion import FLOAT_LEAVES, MATRICES, expected_tensors
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.training.factors import CONFIG_FILE, WEIGHTS_FILE, Adapter, list_faults
from modeling_latentmoe.training.files import new_folder
from modeling_latentmoe.training.indexer import INDEXER_FILE
from modeling_latentmoe.training.lora import BASE_FILE, EXPERT_TARGETS, read_json
from modeling_latentmoe.training.preflight import read_config
from modeling_latentmoe.training.router_bias import BIAS_FILE
from modeling_latentmoe.training.shards import STORED_NAMES, write_header, write_tensor


def export(folder: Path, out: Path) -> int:
    """Write the adapter `folder` into the new folder `out`; returns its number of adapted matrices.

    ValueError for an adapter that is damaged or not understood, for stacked experts of some layers only, and for one
    that was trained with router biases of its own.
    """
    check_no_more_learned(folder)
    adapter = Adapter(folder)
    adapter.check_trained()
    scale = Counter(part.pair.scale for part in adapter.parts.values()).most_common(1)[0][0]
    layout = {}
    for name, part in adapter.parts.items():
        rows, columns = part.shape
        dtype = STORED_NAMES[adapter.dtype(name)]
        layout[f"base_model.model.{name}.lora_A.weight"] = (dtype, (part.pair.rank, columns))
        layout[f"base_model.model.{name}.lora_B.weight"] = (dtype, (rows, part.pair.rank))
    config = exported_config(adapter, scale)
    with new_folder(out) as partial:
        with (partial / WEIGHTS_FILE).open("wb") as file:
            write_header(file, layout)
            for name in adapter.parts:
                factors = adapter.factors(name)
                write_tensor(file, factors.a)
                write_tensor(file, factors.b * (factors.scale / scale))
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if (folder / BASE_FILE).is_file():
            (partial / BASE_FILE).write_bytes((folder / BASE_FILE).read_bytes())
    return len(adapter.parts)


def check_no_more_learned(folder: Path) -> None:
    """ValueError for an adapter with router biases or indexers: servers would apply it to a model that routes, or
    chooses keys, in another way."""
    for file, what in ((BIAS_FILE, "the routers' biases"), (INDEXER_FILE, "the indexers")):
        if os.path.lexists(folder / file):
            raise ValueError(
                f"{folder / file}: the adapter changes {what}, which servers do not read from an adapter; use "
                "scripts/merge_adapter.py instead"
            )


def exported_config(adapter: Adapter, scale: float) -> dict[str, Any]:
    """adapter_config.json of the export, where all layers have this scale."""
    ranks = {name: part.pair.rank for name, part in adapter.parts.items()}
    largest = max(ranks.values())
    patterns = {name: rank for name, rank in patterns_of(ranks).items() if rank != largest}
    return read_json(adapter.folder / CONFIG_FILE) | {
        "r": largest,
        "lora_alpha": scale * largest,
        "use_rslora": False,
        "rank_pattern": patterns,
        "alpha_pattern": {name: scale * rank for name, rank in patterns.items()},
        "target_parameters": None,
        **selection(adapter),
    }


def patterns_of(ranks: dict[str, int]) -> dict[str, int]:
    """Ranks by the last part of the names where that is enough, by full names otherwise."""
    by_leaf: dict[str, set[int]] = {}
    for name, rank in ranks.items():
        by_leaf.setdefault(name.rpartition(".")[2], set()).add(rank)
    return {leaf if len(by_leaf[leaf := name.rpartition(".")[2]]) == 1 else name: rank for name, rank in ranks.items()}


def selection(adapter: Adapter) -> dict[str, Any]:
    """The fields of the config that select exactly the exported matrices."""
    config, matrices = adapter.config, []
    for target in config.target_parameters or ():
        if target not in EXPERT_TARGETS:
            raise ValueError(
                f"{adapter.folder / CONFIG_FILE}: target_parameters {target} cannot be exported, only "
                f"{' and '.join(EXPERT_TARGETS)} of all layers"
            )
        matrices += MATRICES[target.rpartition(".")[2].removesuffix("_proj")]
    if isinstance(config.target_modules, str) or config.layers_to_transform is not None:
        dense = [name for name, part in adapter.parts.items() if part.expert is None]
        fields = {"exclude_modules": None, "layers_to_transform": None, "layers_pattern": None}
        return {"target_modules": sorted([*dense, *matrices]), **fields}
    return {"target_modules": sorted([*(config.target_modules or ()), *matrices])}


def check(folder: Path, model: Path) -> int:
    """Prove that every tensor of the adapter `folder` lands on a module of the released layout; returns their number.

    model: a checkpoint folder or a config.json; weights are not needed. One ValueError lists what does not land, has
    another shape or is not selected by the adapter's config, and modules that the config selects without factors.
    """
    check_no_more_learned(folder)
    adapter = Adapter(folder)
    adapter.check_trained()
    shapes = released_matrices(read_config(model))
    stacked = dict.fromkeys(part.pair.name for part in adapter.parts.values() if part.expert is not None)
    faults = [f"{name} is stacked over experts, export it first" for name in stacked]
    faults += adapter.faults(shapes)
    if faults:
        raise ValueError(f"adapter {folder} does not fit the released layout of {model}: {list_faults(faults)}")
    return len(adapter.parts)


def released_matrices(config: LatentMoEConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape [out, in] of every weight matrix of the released layout."""
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(config)
    suffix = f".{FLOAT_LEAVES['proj']}"
    tensors = expected_tensors(model, packed=False)
    return {
        name.removesuffix(suffix): tensor.shape
        for name, tensor in tensors.items()
        if name.endswith(suffix) and len(tensor.shape) == 2
    }
