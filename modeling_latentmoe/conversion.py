"""Checkpoint names <-> module names, and the check that a checkpoint is exactly what the model needs.

On disk every routed expert has its own matrices, under the released names (Kimi-K3 checkpoint):

    experts.{e}.w1.weight   experts.{e}.w3.weight   experts.{e}.w2.weight           float checkpoints
    experts.{e}.w1.weight_packed, experts.{e}.w1.weight_scale, ...                  MXFP4 checkpoints

In memory the experts of a layer are stacked: `gate_up_proj` [E, 2F, L] holds the rows of w1 then of w3,
`down_proj` [E, L, F] is w2; packed stacks have `gate_up_scale` and `down_scale` beside them. All other
tensors have the same name and shape on both sides. Everything here is derived from the tables below.

Legend: E experts, F expert hidden width, L latent width, M matrices in a stack.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
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
from .headers import Index, StoredTensor, collector_paused, index_path, read_header, read_index

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


class Fault(NamedTuple):
    """One thing that keeps a checkpoint from being the weights of a model; tensor and file where they are known."""

    what: str
    tensor: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        subject = f"{self.tensor} " if self.tensor else ""
        return (f"{self.file}: " if self.file else "") + subject + self.what


class Survey(NamedTuple):
    """What the headers of a checkpoint say: all that is wrong, the file name of every tensor, the bytes of all."""

    faults: list[Fault]
    shards: dict[str, str]
    nbytes: int
    index: Index


class FileSurvey(NamedTuple):
    """What the header of one file says: the names of its tensors, a line each, and their bytes.

    renamed: names that are known with the base-model prefix added or removed -> those known ones. differing: tensors
    of another shape or dtype than expected. damage: why the header could not be read, if it could not.
    """

    file: Path
    names: str = ""
    nbytes: int = 0
    renamed: dict[str, str] = {}  # noqa: RUF012
    differing: list[Fault] = []  # noqa: RUF012
    damage: str | None = None


@collector_paused()
def survey_file(file: Path, prefix: str, expected: dict[str, DiskTensor]) -> FileSurvey:
    """Compare the header of one file with the tensors that are expected in the whole checkpoint."""
    try:
        header = read_header(file)
    except ValueError as error:
        return FileSurvey(file, damage=str(error))
    renamed = _renamed(header.keys() - expected.keys(), prefix, expected)
    nbytes = sum(stored.stop - stored.start for stored in header.values())
    return FileSurvey(
        file, "\n".join(header), nbytes, renamed, list(_differences(header, file.name, expected, renamed))
    )


@collector_paused()
def survey_checkpoint(
    model: nn.Module, files: Iterable[str | Path], packed: bool, run: Callable[..., Iterable[FileSurvey]] = map
) -> Survey:
    """Compare the headers of `files` with what `model` needs, and with the index beside them if there is one.

    model: a PreTrainedModel, possibly on the meta device. files: its safetensors files, of one folder. packed: whether
    the experts are MXFP4 on disk. Found are files that are missing, damaged or cut short, and tensors that are
    missing, unexpected (renumbered experts are both), of another shape or dtype, stored twice, or not where the
    index says. `Survey.shards` has the names that tensors have in the model. ValueError for a damaged index.

    run: `map`, or what calls a function of a file for all files on several cores.
    """
    files = [Path(file) for file in files]
    folders = sorted({str(file.parent) for file in files})
    if len(folders) > 1:
        raise ValueError(f"the files of a checkpoint must be in one folder, its index names {', '.join(folders)}")
    index_file = index_path(files[0])
    index = read_index(index_file)
    expected = expected_tensors(model, packed)
    unreadable = set(index.shards.values()).difference(file.name for file in files)
    faults = [Fault(f"{shard} is missing") for shard in sorted(unreadable)]
    shards: dict[str, str] = {}
    differing, renamed, nbytes = [], {}, 0
    for one in run(partial(survey_file, prefix=model.base_model_prefix, expected=expected), files):
        if one.damage:
            faults.append(Fault(one.damage))
            unreadable.add(one.file.name)
            continue
        names = dict.fromkeys(one.names.split("\n") if one.names else (), one.file.name)
        for name in shards.keys() & names.keys():
            differing.append(Fault(f"is stored twice, in {shards[name]} and {one.file.name}", name))
        shards |= names
        nbytes += one.nbytes
        renamed |= one.renamed
        differing += one.differing
    found = {renamed.get(name, name): shard for name, shard in shards.items()} if renamed else shards
    if len(found) < len(shards):
        for name in sorted(name for name, known in renamed.items() if known in shards):
            differing.append(Fault(f"is stored twice, also as {renamed[name]}", name, shards[name]))
    absent = expected.keys() - found.keys()
    ignored = [*(model._keys_to_ignore_on_load_missing or ()), *map(re.escape, model.all_tied_weights_keys)]
    for name in sorted(absent):
        # Tensors of an unreadable file are not known to be missing.
        listed = index.shards.get(name)
        unknown = listed in unreadable if listed else unreadable and not index.shards
        if not unknown and not _matches(ignored, name):
            faults.append(Fault("is missing", name, listed or _shard_of_other_half(name, found)))
    for name in sorted(shards.keys() - expected.keys() - renamed.keys()):
        if not _matches(model._keys_to_ignore_on_load_unexpected or (), name):
            faults.append(Fault("is unexpected", name, shards[name]))
    faults += differing
    if index.shards and index.shards != shards:
        faults += _index_faults(index_file.name, index.shards, shards, absent | unreadable)
    return Survey(faults, found, nbytes, index)


def check_checkpoint(model: nn.Module, files: Iterable[str | Path], packed: bool) -> dict[str, str]:
    """The file name of every tensor; one ValueError if `files` are not exactly the weights of `model`.

    Arguments and faults are those of `survey_checkpoint`; reads headers only. Without this, transformers starts
    missing tensors at random, drops unexpected ones with a warning, and accepts renumbered experts and signed bytes
    in silence.
    """
    files = [Path(file) for file in files]
    survey = survey_checkpoint(model, files, packed)
    if survey.faults:
        raise ValueError(
            f"checkpoint in {files[0].parent} does not fit {type(model).__name__} and its config, "
            f"{_summary(survey.faults)}"
        )
    return survey.shards


@contextmanager
def read_as_needed() -> Iterator[None]:
    """Keeps transformers from reading tensors ahead of their conversion: without bound, up to a second model."""
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    try:
        yield
    finally:
        del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        if before is not None:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before


def lazy_tensors(files: Iterable[str | Path]) -> dict[str, Any]:
    """Name -> slice of a safetensors file that is read, not memory-mapped, when it is indexed."""
    handles = [safe_open(file, framework="pt", backend="pread") for file in files]
    return {name: handle.get_slice(name) for handle in handles for name in handle.keys()}  # noqa: SIM118


@torch.no_grad()
def check_values(model: nn.Module, shards: Mapping[str, str]) -> None:
    """One ValueError for loaded weights that no sound checkpoint holds: scale byte 255, numbers in A_log's padding.

    shards: name of every tensor that was loaded -> name of its file. The byte 255 is NaN, and so are experts that were
    decoded with it; what A_log has beyond its heads is padding. Weights on the meta device are passed over.
    """
    faults = []
    for name, module in model.named_modules():
        params = {leaf: param for leaf, param in module.named_parameters(recurse=False) if not param.is_meta}
        if name.endswith(EXPERTS):
            for leaf, stack in params.items():
                scales = _nan_scales(name, module.owned.start, leaf, stack, shards)
                faults += [Fault("has the byte 255 (NaN)", scale) for scale in scales]
        elif "A_log" in params and params["A_log"][module.num_heads :].any():
            faults.append(Fault(f"is not zero beyond its {module.num_heads} heads", f"{name}.A_log"))
    if faults:
        faults = [fault._replace(file=shards[fault.tensor]) for fault in faults]
        raise ValueError(f"the checkpoint holds impossible values, {_summary(faults)}")


def _nan_scales(module: str, first: int, leaf: str, stack: torch.Tensor, shards: Mapping[str, str]) -> list[str]:
    """Names of the MXFP4 scales in `shards` that make NaNs of a stack whose first expert has the id `first`."""
    stem, _, suffix = leaf.rpartition("_")
    matrices = MATRICES[stem]
    scale = f"{module}.{{}}.{{}}.{PACKED_LEAVES['scale']}"
    if suffix == "proj" and (stack.dtype == torch.uint8 or scale.format(first, matrices[0]) not in shards):
        return []
    largest_EM = stack.unflatten(1, (len(matrices), -1)).amax((2, 3))
    bad_EM = largest_EM == 255 if stack.dtype == torch.uint8 else largest_EM.isnan()
    return [scale.format(first + expert, matrices[matrix]) for expert, matrix in bad_EM.nonzero().tolist()]


def _summary(faults: list[Fault]) -> str:
    more = f"; and {len(faults) - SHOWN_FAULTS} more" if len(faults) > SHOWN_FAULTS else ""
    return f"{len(faults)} fault(s): {'; '.join(map(str, faults[:SHOWN_FAULTS]))}{more}"


def _shard_of_other_half(name: str, shards: dict[str, str]) -> str | None:
    """For MXFP4 bytes, the file that holds their scale, or the reverse."""
    stem, _, leaf = name.rpartition(".")
    if leaf not in PACKED_LEAVES.values():
        return None
    return next(filter(None, (shards.get(f"{stem}.{half}") for half in PACKED_LEAVES.values())), None)


def _differences(
    header: dict[str, StoredTensor], shard: str, expected: dict[str, DiskTensor], renamed: dict[str, str]
) -> Iterator[Fault]:
    """The tensors of a shard, as far as they are known, that have another shape or dtype than expected."""
    for name, stored in header.items():
        wanted = expected.get(name) or expected.get(renamed.get(name))
        if wanted is None:
            continue
        if stored.shape != wanted.shape:
            yield Fault(f"has shape {list(stored.shape)} instead of {list(wanted.shape)}", name, shard)
        elif stored.dtype not in wanted.dtypes:
            yield Fault(f"is {stored.dtype} instead of {'/'.join(sorted(wanted.dtypes))}", name, shard)


def _index_faults(index: str, listed: dict[str, str], shards: dict[str, str], excused: set[str]) -> list[Fault]:
    """Contradictions between the index, tensor name -> shard, and what the shards hold.

    excused: tensors that are accounted for as missing, and shards of which it is not known what they hold.
    """
    faults = []
    for name, shard in listed.items():
        if name in shards:
            if shards[name] != shard:
                faults.append(Fault(f"is in {shards[name]} but {index} says {shard}", name))
        elif name not in excused and shard not in excused:
            faults.append(Fault(f"is in {index} but in no shard", name))
    unlisted = [name for name in shards if name not in listed]
    return faults + [Fault(f"is in {shards[name]} but not in {index}", name) for name in unlisted]


def _renamed(names: Iterable[str], prefix: str, expected: dict[str, DiskTensor]) -> dict[str, str]:
    """The names that are known with the base-model prefix added or removed (as when loading) -> those known ones."""
    candidates = {name: (name.removeprefix(f"{prefix}."), f"{prefix}.{name}") for name in names}
    return {name: known for name, pair in candidates.items() for known in pair if known in expected}


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


# Registered for the text model, which is found as such and inside the composite one. `overwrite`: this file
# can be imported twice (installed package and remote code).
register_checkpoint_conversion_mapping(LatentMoETextConfig.model_type, float_converters(), overwrite=True)
