"""Read a checkpoint range by range, straight into the parameters of a model that holds a share of the experts.

The model is made without memory, the whole checkpoint is checked by its headers, what this process owns is
allocated once, and several threads fill it. Everything else about loading stays that of `from_pretrained`.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MethodType
from typing import NamedTuple

import psutil
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.loading_report import LoadStateDictInfo

from modeling_latentmoe.conversion import EXPERTS, FLOAT_LEAVES, MATRICES, PACKED_LEAVES, check_checkpoint, check_values
from modeling_latentmoe.headers import StoredTensor, read_header
from modeling_latentmoe.mxfp4 import assert_packed
from modeling_latentmoe.training.mesh import check_layout, expert_layers, owned_experts
from modeling_latentmoe.training.sources import READERS, Files, LocalFiles, RemoteFiles

# Bytes of one read. READERS of them are in flight, which bounds the memory for what is not read in place.
REQUEST_BYTES = 16 * 2**20
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}


class Part(NamedTuple):
    """Consecutive values on disk and their place in memory, both one-dimensional."""

    start: int
    stop: int
    stored: torch.dtype
    target: Tensor


class Request(NamedTuple):
    """Parts that follow each other in one file, read at once."""

    file: str
    parts: list[Part]


class StoredExperts(NamedTuple):
    """The experts of one layer that stay in their files, of which this process owns those of `owned`.

    tensors: where they are, by file and name on disk. stem: what these names start with.
    """

    files: Files
    tensors: dict[str, dict[str, StoredTensor]]
    stem: str
    owned: range
    packed: bool

    def plan(self, stacks: dict[str, Tensor]) -> list[Request]:
        """The reads that fill `stacks`, the parameters of the module by name."""
        targets = expert_destinations(self.stem, self.owned, stacks, self.packed)
        return [request for file, tensors in self.tensors.items() for request in plan(file, tensors, targets)]


def streamed(
    cls: type[PreTrainedModel],
    ep_rank: int,
    ep_degree: int,
    remote: RemoteFiles | None = None,
    on_disk: Collection[int] = (),
) -> type[PreTrainedModel]:
    """`cls` with another way to read weights, for `from_pretrained`; change the `__class__` of the result back.

    Of n = ep_degree ranks, rank r reads experts [r * E / n, (r + 1) * E / n) of every layer, and all other
    weights. With one rank, a local checkpoint that fits in memory is left to `cls`. remote: read the bytes
    from there instead of the local files, of which only the headers are used then. on_disk: layers whose experts are
    not read (see `leave_on_disk`).
    """

    def load(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        fits = remote is None and ep_degree == 1 and not on_disk and _fits_in_memory(checkpoint_files)
        if fits or model._hf_peft_config_loaded:
            return cls._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        packed = load_config.hf_quantizer is not None
        if packed and load_config.hf_quantizer.quantization_config.dequantize:
            raise ValueError("dequantize: a checkpoint that is read range by range keeps its experts packed")
        where = check_checkpoint(model, checkpoint_files, packed)
        restrict_experts(model, ep_rank, ep_degree)
        files = remote or LocalFiles(str(Path(checkpoint_files[0]).parent))
        headers = [Path(file) for file in checkpoint_files]
        leave_on_disk(model, files, headers, packed, on_disk)
        missing = fill(model, files, headers, packed, ep_rank)
        check_values(model, where)
        if packed:
            assert_packed(model)
        show_stand_ins(model)
        # What may be missing is tied; `from_pretrained` ties it.
        return LoadStateDictInfo(missing, set(), set(), [], {}, set()), None

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "_load_pretrained_model": staticmethod(load)})


def _fits_in_memory(files: Iterable[str]) -> bool:
    return sum(Path(file).stat().st_size for file in files) <= psutil.virtual_memory().available


def check_shares(config: PreTrainedConfig, ep_rank: int, ep_degree: int) -> None:
    """ValueError unless `ep_degree` ranks can hold equal numbers of the experts of every layer."""
    check_layout(config, ep_degree, ep_degree)
    if not 0 <= ep_rank < ep_degree:
        raise ValueError(f"--ep {ep_degree}: there is no rank {ep_rank}")


def restrict_experts(model: nn.Module, ep_rank: int, ep_degree: int) -> None:
    """Keep rank `ep_rank`'s share of the experts of every layer."""
    for module in model.modules():
        # by an attribute: the class may come from the installed package or from remote code
        if "logical_shapes" in module.__dict__:
            module.restrict(owned_experts(ep_rank, ep_degree, module.config.num_experts))


def leave_on_disk(model: nn.Module, files: Files, headers: list[Path], packed: bool, layers: Collection[int]) -> None:
    """Have `fill` pass over the experts of these layers, and give them `stored`, from which they can be read later.

    The other arguments are those of `fill`.
    """
    found = {layer: experts for layer, experts in expert_layers(model).items() if layer in layers}
    names = {id(module): name for name, module in model.named_modules()}
    wanted: dict[str, dict[str, dict[str, StoredTensor]]] = {}
    owners: dict[str, str] = {}
    for experts in found.values():
        stem = names[id(experts)]
        stacks = dict(experts.named_parameters(recurse=False))
        owners |= dict.fromkeys(expert_destinations(stem, experts.owned, stacks, packed), stem)
    if found:
        for header in headers:
            for name, tensor in read_header(header).items():
                known = _name_in(owners, name, model.base_model_prefix)
                if known is not None:
                    wanted.setdefault(owners[known], {}).setdefault(header.name, {})[known] = tensor
    for experts in found.values():
        stem = names[id(experts)]
        experts.stored = StoredExperts(files, wanted[stem], stem, experts.owned, packed)
        stay(experts)


def show_stand_ins(model: nn.Module) -> None:
    """Give what `leave_on_disk` left parameters that hold no memory: the right shapes, and values that make NaNs."""
    for experts in expert_layers(model).values():
        if "stored" in experts.__dict__:
            for name, param in list(experts.named_parameters(recurse=False)):
                nothing = torch.full((), float("nan") if param.is_floating_point() else 255, dtype=param.dtype)
                stand_in = nn.Parameter(nothing.expand(param.shape), requires_grad=False)
                # for transformers, as in `fill`
                stand_in._is_hf_initialized = True
                setattr(experts, name, stand_in)


def stay(experts: nn.Module) -> None:
    """Let `model.to(...)` and its kin leave these experts as and where they are."""
    experts._apply = MethodType(_unmoved, experts)


def _unmoved(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    return self


def fill(model: nn.Module, files: Files, headers: list[Path], packed: bool, ep_rank: int) -> set[str]:
    """Allocate `model`, which is on the meta device, and read its weights; returns the names that are not stored.

    headers: local files that start with the headers of the shards of the same names in `files`.
    """
    needed = sum(target.nbytes for target in destinations(model, packed).values())
    free = psutil.virtual_memory().available
    if needed > free:
        raise OSError(f"the weights need {needed / 1e9:,.1f} GB of memory, but only {free / 1e9:,.1f} GB are free")
    model.to_empty(device="cpu")
    for param in model.parameters():
        # for transformers: nothing to be initialised at random
        param._is_hf_initialized = True
    requests, missing = planned_reads(model, headers, packed)
    total = sum(request.parts[-1].stop - request.parts[0].start for request in requests)
    bar_options = {
        "disable": int(os.environ.get("RANK", ep_rank)) != 0,
        # a log file gets a line now and then instead of an animation
        "mininterval": 0.1 if sys.stderr.isatty() else 10,
    }
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="weights", **bar_options) as bar,
        ThreadPoolExecutor(READERS) as pool,
    ):
        for length in pool.map(lambda request: read_request(files, request), requests):
            bar.update(length)
    return missing


def planned_reads(model: nn.Module, headers: list[Path], packed: bool) -> tuple[list[Request], set[str]]:
    """All reads that fill `model`, and the names of what it holds that is not stored.

    headers: local files that start with the headers of the shards. packed: whether the experts are MXFP4 on disk.
    """
    targets = destinations(model, packed)
    requests, stored = [], set()
    for header in headers:
        tensors = {}
        for name, tensor in read_header(header).items():
            known = _name_in(targets, name, model.base_model_prefix)
            if known is not None:
                tensors[known] = tensor
        stored.update(tensors)
        requests += plan(header.name, tensors, targets)
    return requests, targets.keys() - stored


def _name_in(targets: Mapping[str, object], name: str, prefix: str) -> str | None:
    """The target that `name` on disk means, which may have or lack the base-model prefix; None for other ranks'."""
    return next((n for n in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}") if n in targets), None)


def destinations(model: nn.Module, packed: bool) -> dict[str, Tensor]:
    """Name on disk -> one-dimensional view of the memory, of everything that `model` holds and does not leave on disk.

    packed: whether the experts are MXFP4 on disk.
    """
    targets, stacks = {}, {}
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if stem.endswith(EXPERTS) and leaf.rpartition("_")[0] in MATRICES:
            stacks.setdefault(stem, {})[leaf] = tensor
        else:
            targets[name] = tensor.view(-1)
    for stem, tensors in stacks.items():
        experts = model.get_submodule(stem)
        if "stored" not in experts.__dict__:
            targets |= expert_destinations(stem, experts.owned, tensors, packed)
    return targets


def expert_destinations(stem: str, owned: range, stacks: dict[str, Tensor], packed: bool) -> dict[str, Tensor]:
    """`destinations` of the stacks of the experts `owned` of a layer, which are given by their parameters' names."""
    leaves, targets = PACKED_LEAVES if packed else FLOAT_LEAVES, {}
    for name, tensor in stacks.items():
        stack, _, suffix = name.rpartition("_")
        matrices = MATRICES[stack]
        for expert, rows in zip(owned, tensor, strict=True):
            for matrix, part in zip(matrices, rows.chunk(len(matrices)), strict=True):
                targets[f"{stem}.{expert}.{matrix}.{leaves[suffix]}"] = part.view(-1)
    return targets


def plan(file: str, tensors: dict[str, StoredTensor], targets: dict[str, Tensor]) -> Iterator[Request]:
    """Reads of at most REQUEST_BYTES that cover `tensors` of one file exactly; neighbours share a read."""
    parts: list[Part] = []
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        dtype, target = STORED_DTYPES[tensor.dtype], targets[name]
        step = REQUEST_BYTES // dtype.itemsize
        for first in range(0, len(target), step):
            piece = target[first : first + step]
            start = tensor.start + first * dtype.itemsize
            part = Part(start, start + len(piece) * dtype.itemsize, dtype, piece)
            if parts and (part.start != parts[-1].stop or part.stop - parts[0].start > REQUEST_BYTES):
                yield Request(file, parts)
                parts = []
            parts.append(part)
    if parts:
        yield Request(file, parts)


def read_request(files: Files, request: Request) -> int:
    """Read the parts of `request` into place, through a buffer those that are stored in another dtype.

    Returns the number of bytes.
    """
    read = [
        part.target if part.target.dtype == part.stored else torch.empty(len(part.target), dtype=part.stored)
        for part in request.parts
    ]
    files.read(request.file, request.parts[0].start, [tensor.view(torch.uint8).numpy().data for tensor in read])
    for part, tensor in zip(request.parts, read, strict=True):
        if tensor is not part.target:
            part.target.copy_(tensor)
    return request.parts[-1].stop - request.parts[0].start
