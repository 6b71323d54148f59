"""Checkpoint names <-> module names, and the check that a checkpoint is exactly what the model needs.

On disk every routed expert has its own matrices, under the released names (Kimi-K3 checkpoint):

    experts.{e}.w1.weight   experts.{e}.w3.weight   experts.{e}.w2.weight           float checkpoints
    experts.{e}.w1.weight_packed, experts.{e}.w1.weight_scale, ...                  MXFP4 checkpoints

In memory the experts of a layer are stacked: `gate_up_proj` [E, 2F, L] holds the rows of w1 then of w3,
`down_proj` [E, L, F] is w2; packed stacks have `gate_up_scale` and `down_scale` beside them. All other
tensors have the same name and shape on both sides. Everything here is derived from the two tables below.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    SplitModulelist,
    WeightConverter,
)

from .configuration_latentmoe import MXFP4_GROUP, LatentMoETextConfig

EXPERTS = "block_sparse_moe.experts"
# Stacked parameter -> the matrices of one expert whose rows it holds, in this order.
MATRICES = {"gate_up": ("w1", "w3"), "down": ("w2",)}
# Suffix of a stacked parameter -> leaf name of one expert's matrix on disk.
FLOAT_LEAVES = {"proj": "weight"}
PACKED_LEAVES = {"proj": "weight_packed", "scale": "weight_scale"}

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
BYTES = frozenset({"U8"})
SHOWN_FAULTS = 10


class UnstackExperts(SplitModulelist):
    """[E, rows, columns] -> one tensor per expert."""

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        # The in-tree op of transformers 5.22 also squeezes other dimensions of size 1: scales of one column.
        tensors = {}
        for pattern, value in input_dict.items():
            stack = value[0] if isinstance(value, list) else value
            names = self.get_target_patterns(input_dict, pattern, target_patterns, stack.shape[0])
            tensors.update(zip(names, stack.unbind(0), strict=True))
        return tensors


class StackExperts(MergeModulelist):
    """One tensor per expert -> [E, rows, columns]."""

    @property
    def reverse_op(self) -> ConversionOps:
        return UnstackExperts(self.dim)


def _stacking_converters(leaves: dict[str, str]) -> list[WeightConverter]:
    converters = []
    for stem, matrices in MATRICES.items():
        for suffix, leaf in leaves.items():
            sources = [f"{EXPERTS}.*.{matrix}.{leaf}" for matrix in matrices]
            operations = [StackExperts(dim=0)] + ([Concatenate(dim=1)] if len(matrices) > 1 else [])
            converters.append(WeightConverter(sources, f"{EXPERTS}.{stem}_{suffix}", operations))
    return converters


def float_converters() -> list[WeightConverter]:
    """Float experts on disk <-> float stacks."""
    return _stacking_converters(FLOAT_LEAVES)


def packed_converters() -> list[WeightConverter]:
    """MXFP4 experts on disk <-> stacks of bytes.

    A packed model that was not loaded from disk needs them as its `_weight_conversions` to be saved.
    """
    return _stacking_converters(PACKED_LEAVES)


def decoding_converters(operation: ConversionOps) -> list[WeightConverter]:
    """MXFP4 experts on disk -> float stacks, decoded by `operation`; not reversible."""
    return [
        WeightConverter(
            [f"{EXPERTS}.*.{matrix}.{leaf}" for matrix in matrices for leaf in PACKED_LEAVES.values()],
            f"{EXPERTS}.{stem}_proj",
            [operation],
        )
        for stem, matrices in MATRICES.items()
    ]


class DiskTensor(NamedTuple):
    """What a tensor on disk is, or must be: `dtypes` in safetensors words."""

    shape: tuple[int, ...]
    dtypes: frozenset[str]


def expected_tensors(model: nn.Module, packed: bool) -> dict[str, DiskTensor]:
    """Every tensor that a checkpoint of `model` must hold: name -> shape and allowed dtypes.

    packed: whether experts are MXFP4 on disk. Needs no memory: the model may be on the meta device.
    """
    expected = {}
    for name, param in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        stack, _, suffix = leaf.rpartition("_")
        if not stem.endswith(EXPERTS) or stack not in MATRICES:
            dtypes = FLOAT_DTYPES if param.is_floating_point() else BYTES
            expected[name] = DiskTensor(tuple(param.shape), dtypes)
        elif suffix == "proj":
            columns = param.shape[-1] * (2 if param.dtype == torch.uint8 else 1)
            expected.update(_expert_tensors(stem, stack, param.shape[0], param.shape[1], columns, packed))
    return expected


def _expert_tensors(
    stem: str, stack: str, experts: int, rows: int, columns: int, packed: bool
) -> Iterator[tuple[str, DiskTensor]]:
    matrices = MATRICES[stack]
    widths = {"proj": columns // 2, "scale": columns // MXFP4_GROUP} if packed else {"proj": columns}
    leaves = PACKED_LEAVES if packed else FLOAT_LEAVES
    for suffix, leaf in leaves.items():
        tensor = DiskTensor((rows // len(matrices), widths[suffix]), BYTES if packed else FLOAT_DTYPES)
        for expert in range(experts):
            for matrix in matrices:
                yield f"{stem}.{expert}.{matrix}.{leaf}", tensor


def read_header(path: Path) -> dict[str, DiskTensor]:
    """Names, shapes and dtypes of one safetensors file, from its header alone.

    ValueError naming the file when it is missing, cut short or not safetensors.
    """
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise ValueError(f"{path.name} is truncated or not a safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path.name} is not a safetensors file") from error
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        raise ValueError(f"{path.name} is truncated or damaged: {size} bytes instead of {end}")
    return {name: DiskTensor(tuple(entry["shape"]), frozenset({entry["dtype"]})) for name, entry in header.items()}


def check_checkpoint(model: nn.Module, files: Iterable[str | Path], packed: bool) -> None:
    """Raise one ValueError listing all that keeps `files` from being exactly the weights of `model`.

    model: a PreTrainedModel, possibly on the meta device. files: all its safetensors files. packed: whether
    the experts are MXFP4 on disk. Reads headers only. Reported: files that are missing or cut short, tensors
    that are missing, unexpected (renumbered experts are both), of another shape or dtype, stored twice, or
    not where the index says. Without this, transformers starts missing tensors at random, drops unexpected
    ones with a warning, and accepts renumbered experts and signed bytes in silence.
    """
    files = [Path(file) for file in files]
    expected = expected_tensors(model, packed)
    faults, where, found = [], {}, {}
    unreadable = 0
    for file in files:
        try:
            header = read_header(file)
        except ValueError as error:
            faults.append(str(error))
            unreadable += 1
            continue
        for name, tensor in header.items():
            if name in where:
                faults.append(f"{name} is stored twice, in {where[name].name} and {file.name}")
            where[name] = file
            found[_model_name(name, model.base_model_prefix, expected)] = tensor

    ignore_missing = [
        *(model._keys_to_ignore_on_load_missing or ()),
        *map(re.escape, model.all_tied_weights_keys),
    ]
    ignore_unexpected = model._keys_to_ignore_on_load_unexpected or ()
    absent = [name for name in expected if name not in found and not _matches(ignore_missing, name)]
    # Tensors of an unreadable file are not known to be missing.
    if not unreadable:
        faults += [f"{name} is missing" for name in absent]
    for name, tensor in found.items():
        if name not in expected:
            if not _matches(ignore_unexpected, name):
                faults.append(f"{name} is unexpected")
        elif tensor.shape != expected[name].shape:
            faults.append(f"{name} has shape {list(tensor.shape)} instead of {list(expected[name].shape)}")
        elif not tensor.dtypes <= expected[name].dtypes:
            faults.append(f"{name} is {'/'.join(tensor.dtypes)} instead of {'/'.join(sorted(expected[name].dtypes))}")
    if not unreadable:
        faults += _index_faults(files[0], where, known=found.keys() | set(absent))
    if faults:
        more = f"; and {len(faults) - SHOWN_FAULTS} more" if len(faults) > SHOWN_FAULTS else ""
        raise ValueError(
            f"checkpoint in {files[0].parent} does not fit {type(model).__name__} and its config, "
            f"{len(faults)} fault(s): {'; '.join(faults[:SHOWN_FAULTS])}{more}"
        )


def _index_faults(file: Path, where: dict[str, Path], known: set[str]) -> list[str]:
    """Contradictions between the shards and the index beside `file`, if there is one.

    where: tensor name -> its shard. known: tensors that are accounted for, present or reported missing.
    """
    index = file.with_name(re.sub(r"-\d+-of-\d+$", "", file.stem) + ".safetensors.index.json")
    if not index.is_file():
        return []
    listed = json.loads(index.read_text())["weight_map"]
    faults = []
    for name, shard in listed.items():
        if name in where and where[name].name != shard:
            faults.append(f"{name} is in {where[name].name} but {index.name} says {shard}")
        elif name not in where and name not in known:
            faults.append(f"{name} is in {index.name} but in no shard")
    unlisted = [name for name in where if name not in listed]
    return faults + [f"{name} is in {where[name].name} but not in {index.name}" for name in unlisted]


def _model_name(name: str, prefix: str, expected: dict[str, DiskTensor]) -> str:
    """`name`, with the base-model prefix added or removed if only that makes it known (as when loading)."""
    if name in expected:
        return name
    for candidate in (name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
        if candidate in expected:
            return candidate
    return name


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


# Registered for the text model, which is found as such and inside the composite one. `overwrite`: this file
# can be imported twice (installed package and remote code).
register_checkpoint_conversion_mapping(LatentMoETextConfig.model_type, float_converters(), overwrite=True)
