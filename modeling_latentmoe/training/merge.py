"""Add an adapter to the weights of a checkpoint folder, shard by shard, without building the model.

    W' = W + scale * B A     computed in fp32, then rounded to the form of W

Router biases and indexers that were learned with an adapter (see values.py) replace those of the base.

Names, shards and every tensor that the adapter does not touch stay what they are, byte for byte. A shard without any
touched tensor is copied and not linked: the result must not change with the base, and an adapter on experts leaves
only 3 of the 96 released shards untouched. Nothing larger than one weight matrix and the factors of one layer is in
memory at a time.

Experts are written in one of two forms:

    mxfp4   packed as in the base, with the base's config. The error of an element is at most half a step of its
            group's 4-bit grid; a smaller delta can vanish. Error and bound of every tensor are in the report.
    bf16    all of them as bfloat16 weights, four times as large, with a config that no longer says "quantized".
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from modeling_latentmoe.configuration_latentmoe import MXFP4_GROUP, LatentMoEConfig
from modeling_latentmoe.conversion import FLOAT_DTYPES, FLOAT_LEAVES, PACKED_LEAVES, check_checkpoint
from modeling_latentmoe.headers import DTYPE_BYTES, StoredTensor, read_header, read_index
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.mxfp4 import decode, encode
from modeling_latentmoe.training.factors import EXPERT, Adapter, group_of, list_faults
from modeling_latentmoe.training.files import new_folder
from modeling_latentmoe.training.indexer import read_indexers
from modeling_latentmoe.training.lora import BASE_FILE, FINGERPRINT, base_digest, read_json
from modeling_latentmoe.training.preflight import read_config
from modeling_latentmoe.training.router_bias import LEAF, read_biases
from modeling_latentmoe.training.shards import (
    Layout,
    copy_tensor,
    data_bytes,
    read_tensor,
    write_header,
    write_tensor,
)
from modeling_latentmoe.training.sources import INDEX, SINGLE_FILE
from modeling_latentmoe.training.streaming import STORED_DTYPES

REPORT_FILE = "merge_report.json"
LEAVES = WEIGHT, PACKED, SCALE = FLOAT_LEAVES["proj"], PACKED_LEAVES["proj"], PACKED_LEAVES["scale"]
# not carried over: rewritten weights and index, and what is no part of a snapshot
REPLACED = ("*.safetensors", "*.safetensors.index.json", REPORT_FILE, ".*")

# of a matrix that are merged at a time
ROWS = 128

Form = Literal["mxfp4", "bf16"]


class Location(NamedTuple):
    file: Path
    stored: StoredTensor


class Checkpoint:
    """A checkpoint folder by its headers: `shards`, file -> its tensors, and `tensors`, name -> where it is.

    ValueError naming file and tensor where headers are damaged or the index does not say the same.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = read_index(folder / INDEX).shards
        files = [folder / name for name in sorted(set(listed.values())) or [SINGLE_FILE]]
        try:
            self.shards = {file: read_header(file) for file in files}
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        self.tensors: dict[str, Location] = {}
        for file, header in self.shards.items():
            for name, stored in header.items():
                if name in self.tensors:
                    raise ValueError(f"{name} is stored twice, in {self.tensors[name].file} and {file}")
                self.tensors[name] = Location(file, stored)
        for name in listed.keys() ^ self.tensors.keys() if listed else ():
            raise ValueError(f"{folder / INDEX} and the shards do not agree about {name}")
        for name, shard in listed.items():
            if self.tensors[name].file.name != shard:
                raise ValueError(f"{name} is in {self.tensors[name].file} but {INDEX} says {shard}")

    def read(self, name: str) -> Tensor:
        return read_tensor(*self.tensors[name])

    def first_row(self, name: str) -> Tensor:
        file, stored = self.tensors[name]
        columns = stored.shape[-1]
        end = stored.start + columns * DTYPE_BYTES[stored.dtype]
        return read_tensor(file, stored._replace(shape=(columns,), stop=end))

    def config(self) -> LatentMoEConfig:
        return read_config(self.folder)

    def matrices(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name without leaf and shape [out, in] of every weight matrix, packed ones included.

        ValueError for half an MXFP4 pair.
        """
        for name, (file, stored) in self.tensors.items():
            matrix, _, leaf = name.rpartition(".")
            if leaf == WEIGHT and len(stored.shape) == 2 and stored.dtype in FLOAT_DTYPES:
                yield matrix, stored.shape
            elif leaf in (PACKED, SCALE):
                other = SCALE if leaf == PACKED else PACKED
                if f"{matrix}.{other}" not in self.tensors:
                    raise ValueError(f"{file}: {name} has no {other} beside it")
                if leaf == PACKED:
                    yield matrix, (stored.shape[0], 2 * stored.shape[1])


@dataclass
class Record:
    """What became of one weight matrix.

    max_delta, rms_delta: of the fp32 term that was added. max_error, rms_error: of the difference between what was
    written and the fp32 sum. bound: for MXFP4, the largest error that rounding can make anywhere in this matrix, None
    where nothing was rounded. changed: whether what was written differs from the base.
    """

    file: str
    form: str
    max_delta: float = 0.0
    rms_delta: float = 0.0
    max_error: float = 0.0
    rms_error: float = 0.0
    bound: float | None = None
    changed: bool = False

    def add(self, rows: "Rows", new: Tensor, share: float) -> None:
        """Count rows of which `new` was written and which are this share of the matrix."""
        for name, value in (("delta", rows.delta), ("error", new - rows.exact)):
            largest, rms = getattr(self, f"max_{name}"), getattr(self, f"rms_{name}")
            setattr(self, f"max_{name}", max(largest, value.abs().max().item()))
            setattr(self, f"rms_{name}", math.sqrt(rms**2 + share * value.square().mean().item()))
        self.changed |= not torch.equal(new, rows.old)


class Rows(NamedTuple):
    """Some rows of a weight matrix in fp32 or wider: of the base, the term to add (None without factors), the sum."""

    rows: slice
    old: Tensor
    delta: Tensor | None
    exact: Tensor


@dataclass
class Report:
    """What a merge did.

    records: matrix name -> its record. router_biases, indexers: name of a router's bias, or a part of an indexer, that
    the adapter brings -> the largest change of one of its values.
    """

    base: str
    adapter: str
    experts: Form | None
    records: dict[str, Record] = field(default_factory=dict)
    router_biases: dict[str, float] = field(default_factory=dict)
    indexers: dict[str, float] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people."""
        records = self.records.values()
        changed = sum(record.changed for record in records)
        lines = [f"{changed:,} of {len(records):,} weight matrices that the adapter has factors for changed"]
        if zero := sum(record.max_delta == 0 for record in records):
            # beside indexers also what did not train in their warm-up
            why = "" if self.indexers else ": experts that saw no token"
            lines.append(f"{zero:,} have factors whose product is zero{why}")
        if lost := len(records) - changed - zero:
            lines.append(f"{lost:,} are those of the base: their delta is below the rounding of their form")
        if packed := [record for record in records if record.bound is not None]:
            worst = max(record.max_error / record.bound for record in packed)
            error, delta = (max(getattr(record, name) for record in packed) for name in ("max_error", "max_delta"))
            share = math.sqrt(sum(r.rms_error**2 for r in packed) / max(sum(r.rms_delta**2 for r in packed), 1e-300))
            lines.append(
                f"MXFP4: rounding error at most {error:.3g}, {worst:.0%} of its bound; delta at most {delta:.3g}; the "
                f"error is {share:.0%} of the delta (root mean squares)"
            )
        if self.router_biases:
            largest = max(self.router_biases.values())
            lines.append(
                f"the biases of {len(self.router_biases):,} routers are those of the adapter, changed by at most "
                f"{largest:.3g}"
            )
        if self.indexers:
            largest = max(self.indexers.values())
            lines.append(f"the indexers are those of the adapter, changed by at most {largest:.3g}")
        return lines

    def modules(self, adapter: Adapter) -> dict[str, list[Record]]:
        """Records by the dense layer or stack of experts that has the factors."""
        modules: dict[str, list[Record]] = {}
        for name, record in self.records.items():
            modules.setdefault(group_of(adapter.parts[name].pair.name), []).append(record)
        return modules


class Merger:
    """The new value of every tensor of `checkpoint`. learned: those that come in their place, fp32, by name."""

    def __init__(
        self, checkpoint: Checkpoint, adapter: Adapter, experts: Form | None, learned: Mapping[str, Tensor]
    ) -> None:
        self.checkpoint, self.adapter, self.learned = checkpoint, adapter, learned
        self.shapes = dict(checkpoint.matrices())
        self.report = Report(str(checkpoint.folder), str(adapter.folder), experts)
        self.decodes = experts == "bf16"
        # One matrix is written as two tensors, usually one after the other.
        self._packed = lru_cache(maxsize=1)(self._pack)

    def layout(self, file: Path) -> Layout:
        """What a shard will hold, in the order of the base's."""
        layout = {}
        for name, stored in self.checkpoint.shards[file].items():
            matrix, _, leaf = name.rpartition(".")
            if name in self.learned:
                # exact, whatever the base stores
                layout[name] = ("F32", stored.shape)
            elif not self._changes_form(name) or leaf == WEIGHT:
                layout[name] = ("BF16" if self._changes_form(name) else stored.dtype, stored.shape)
            elif leaf == PACKED:
                layout[f"{matrix}.{WEIGHT}"] = ("BF16", (stored.shape[0], 2 * stored.shape[1]))
        return layout

    def touches(self, file: Path) -> bool:
        """Whether anything of a shard changes."""
        return any(self._changes(name) for name in self.checkpoint.shards[file])

    def _changes(self, name: str) -> bool:
        matrix, _, leaf = name.rpartition(".")
        merged = leaf in LEAVES and matrix in self.adapter.parts
        return merged or name in self.learned or self._changes_form(name)

    def _changes_form(self, name: str) -> bool:
        matrix, _, leaf = name.rpartition(".")
        return self.decodes and leaf in LEAVES and EXPERT.fullmatch(matrix) is not None

    def write(self, file: Path, target: Path, bar: tqdm) -> None:
        """Write the new version of a shard."""
        layout = self.layout(file)
        with file.open("rb") as old, target.open("wb") as new:
            write_header(new, layout)
            for name in layout:
                if self._changes(name):
                    write_tensor(new, self.value(name))
                else:
                    copy_tensor(old, new, self.checkpoint.shards[file][name])
                bar.update(data_bytes({name: layout[name]}))

    def value(self, name: str) -> Tensor:
        """The new tensor of this name."""
        if name in self.learned:
            new = self.learned[name]
            changes = self.report.router_biases if name.endswith(LEAF) else self.report.indexers
            changes[name] = (new - self.checkpoint.read(name)).abs().max().item()
            return new
        matrix, _, leaf = name.rpartition(".")
        return self._float(matrix) if leaf == WEIGHT else self._packed(matrix)[leaf == SCALE]

    def _float(self, matrix: str) -> Tensor:
        """A merged matrix in its own dtype, or a matrix of an expert in bf16."""
        leaf = WEIGHT if f"{matrix}.{WEIGHT}" in self.checkpoint.tensors else PACKED
        file, stored = self.checkpoint.tensors[f"{matrix}.{leaf}"]
        decoded = self.decodes and EXPERT.fullmatch(matrix)
        new = torch.empty(self.shapes[matrix], dtype=torch.bfloat16 if decoded else STORED_DTYPES[stored.dtype])
        record = Record(file.name, str(new.dtype).removeprefix("torch."))
        for part in self._rows(matrix):
            new[part.rows] = part.exact.to(new.dtype)
            if not new[part.rows].isfinite().all():
                raise ValueError(f"{matrix} would hold infinite weights: the merged ones do not fit into {record.form}")
            if part.delta is not None:
                record.add(part, new[part.rows].to(part.exact.dtype), len(part.exact) / len(new))
                self.report.records[matrix] = record
        return new

    def _pack(self, matrix: str) -> tuple[Tensor, Tensor]:
        """MXFP4 bytes and scales of a merged expert matrix; those of the base where nothing was added to it."""
        packed, scale = self._stored(matrix)
        record = Record(self.checkpoint.tensors[f"{matrix}.{PACKED}"].file.name, "mxfp4")
        for part in self._rows(matrix):
            new = part.old
            if part.delta.any():
                packed[part.rows], scale[part.rows], bound = pack(part.exact)
                new = decode(packed[part.rows], scale[part.rows], part.exact.dtype)
                assert (in_groups(new - part.exact).abs() <= bound.unsqueeze(-1)).all(), matrix
                record.bound = max(record.bound or 0, bound.max().item())
            record.add(part, new, len(new) / len(packed))
        self.report.records[matrix] = record
        return packed, scale

    def _stored(self, matrix: str) -> tuple[Tensor, Tensor]:
        return self.checkpoint.read(f"{matrix}.{PACKED}"), self.checkpoint.read(f"{matrix}.{SCALE}")

    def _rows(self, matrix: str) -> Iterator[Rows]:
        """The matrix from top to bottom, few rows at a time: temporaries then stay in the processor's cache."""
        is_packed = f"{matrix}.{PACKED}" in self.checkpoint.tensors
        stored = self._stored(matrix) if is_packed else (self.checkpoint.read(f"{matrix}.{WEIGHT}"),)
        factors = self.adapter.factors(matrix) if matrix in self.adapter.parts else None
        for start in range(0, len(stored[0]), ROWS):
            rows = slice(start, start + ROWS)
            block = [tensor[rows] for tensor in stored]
            old = decode(*block, torch.float32) if is_packed else block[0]
            old = old.to(torch.promote_types(old.dtype, torch.float32))
            delta = None if factors is None else factors._replace(b=factors.b[rows]).product()
            exact = old if delta is None else old + delta
            if not exact.isfinite().all():
                raise ValueError(f"{matrix} would hold NaN or infinite weights: the base or the adapter does")
            yield Rows(rows, old, delta, exact)


def pack(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float weights [..., in] -> MXFP4 bytes [..., in / 2], scales [..., in / 32], error bounds [..., in / 32].

    Like `encode`, but a group takes half the scale where its error is smaller then, although its largest values are
    cut. Many groups of the base use the whole grid: a delta that moves the largest value of one past the end, by
    however little, would double its scale and round all its other values to a grid twice as coarse.
    The bound is the largest error that rounding alone can make in a group, with or without the cut.
    """
    packed, scale = encode(weight)
    groups = in_groups(weight)
    unit = torch.ldexp(torch.ones_like(scale, dtype=weight.dtype), scale.int() - 127).unsqueeze(-1)
    # Half a step at the largest value: the grid steps by 0.5 up to 2, by 1 up to 4 and by 2 up to 6.
    largest = groups.abs().amax(-1, keepdim=True) / unit
    bound = unit * torch.where(largest > 4, 1.0, torch.where(largest > 2, 0.5, 0.25))
    cut, cut_scale = encode(groups.clamp(-3 * unit, 3 * unit).flatten(-2))
    error, cut_error = (
        in_groups(decode(*candidate, weight.dtype) - weight) for candidate in ((packed, scale), (cut, cut_scale))
    )
    better = cut_error.square().sum(-1) < error.square().sum(-1)
    better &= (cut_error.abs() <= bound).all(-1)
    chosen = torch.where(better.unsqueeze(-1), in_groups(cut, MXFP4_GROUP // 2), in_groups(packed, MXFP4_GROUP // 2))
    return chosen.flatten(-2), torch.where(better, cut_scale, scale), bound.squeeze(-1)


def in_groups(x: Tensor, size: int = MXFP4_GROUP) -> Tensor:
    """[..., in] -> [..., in / size, size]"""
    return x.unflatten(-1, (-1, size))


def merge(base: Path, adapter: Path, out: Path, experts: Form | None = None) -> Report:
    """Write the checkpoint folder `out`: `base` with the adapter of the folder `adapter` in its weights.

    experts: the form of routed experts; None leaves them as they are stored. `out` appears in one step when it is
    complete, with the other files of `base` and the report. Every tensor of the adapter is used exactly once, those of
    router biases and indexers beside it too. Raises ValueError, before anything is written, for an adapter that does
    not fit, was made for another base or whose factors are not finite or zero (beside indexers all may be zero), and on
    the way where rounding has undone all of what a layer or a stack of experts learned.
    """
    checkpoint, factors = Checkpoint(base), Adapter(adapter)
    if experts == "mxfp4" and not any(name.endswith(f".{PACKED}") for name in checkpoint.tensors):
        raise ValueError(f"--experts mxfp4: the experts of {base} are not packed, leave the switch out")
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(checkpoint.config())
    check_checkpoint(model, checkpoint.shards, any(name.endswith(f".{PACKED}") for name in checkpoint.tensors))
    check_base(checkpoint, adapter)
    indexers = read_indexers(adapter, model)
    merger = Merger(checkpoint, factors, experts, read_biases(adapter, model) | indexers)
    faults = factors.faults(merger.shapes)
    if faults:
        raise ValueError(f"adapter {adapter} does not fit {base}: {list_faults(faults)}")
    # where indexers warmed up nothing else learned
    learned = factors.check_trained(all_zero=bool(indexers))
    layouts = {file: merger.layout(file) for file in checkpoint.shards}
    sizes = {file: data_bytes(layout) for file, layout in layouts.items()}
    total = sum(sizes.values())
    if base.resolve() in out.resolve().parents:
        raise ValueError(f"{out} lies inside {base}: write elsewhere")
    with new_folder(out) as partial:
        free = shutil.disk_usage(partial).free
        if free < total:
            raise OSError(f"{out} needs {total / 1e9:,.1f} GB, but only {free / 1e9:,.1f} GB are free there")
        carry_over(base, partial, unpacked=merger.decodes)
        with tqdm(total=total, unit="B", unit_scale=True, desc="merging") as bar:
            for file in layouts:
                if merger.touches(file):
                    merger.write(file, partial / file.name, bar)
                    if learned:
                        check_changed(merger.report, factors)
                else:
                    shutil.copyfile(file, partial / file.name)
                    bar.update(sizes[file])
        if (base / INDEX).is_file():
            weight_map = {name: file.name for file, layout in layouts.items() for name in layout}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (partial / REPORT_FILE).write_text(json.dumps(asdict(merger.report), indent=1) + "\n")
    return merger.report


def check_base(checkpoint: Checkpoint, adapter: Path) -> None:
    """ValueError if the adapter says that it was made for another base model."""
    if not (adapter / BASE_FILE).is_file():
        return
    made_for = read_json(adapter / BASE_FILE, "digest", "base_model")
    rows = {name: checkpoint.first_row(name) for name in checkpoint.tensors if FINGERPRINT.search(name)}
    if made_for["digest"] != base_digest(checkpoint.config(), rows):
        raise ValueError(f"adapter {adapter} was made for another base model ({made_for['base_model']})")


def check_changed(report: Report, adapter: Adapter) -> None:
    """ValueError naming a layer or stack of experts that is merged, but whose weights are all those of the base."""
    sizes = Counter(group_of(part.pair.name) for part in adapter.parts.values())
    for name, records in report.modules(adapter).items():
        if len(records) == sizes[name] and not any(record.changed for record in records):
            delta, form = max(record.max_delta for record in records), records[0].form
            raise ValueError(
                f"{name} would not change: the delta of adapter {adapter.folder} is at most {delta:.3g}, below the "
                f"rounding of {form}{'; use --experts bf16' if form == 'mxfp4' else ''}"
            )


def carry_over(base: Path, out: Path, unpacked: bool) -> None:
    """Copy all files but the weights; `unpacked` takes the quantization out of config.json.

    Links are followed: a snapshot in the Hub's cache is made of them.
    """
    ignored = shutil.ignore_patterns(*REPLACED)
    for folder, names, files in os.walk(base, followlinks=True):
        here = out / Path(folder).relative_to(base)
        here.mkdir(exist_ok=True)
        left_out = ignored(folder, [*names, *files])
        names[:] = [name for name in names if name not in left_out]
        for name in files:
            # contents alone: the files of a base may be read-only
            if name not in left_out:
                shutil.copyfile(Path(folder) / name, here / name)
    if unpacked:
        config = read_json(base / "config.json")
        for part in (config, config.get("text_config", {})):
            part.pop("quantization_config", None)
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
