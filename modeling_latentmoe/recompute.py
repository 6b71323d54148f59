"""What backward needs, computed again there instead of kept.

Adapters keep the inputs of their layers, attention its queries, keys and values. Many of these are made by norms,
convolutions and activations, which cost little, from tensors that are kept anyway.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def recomputed(
    outputs: torch.Tensor | Sequence[torch.Tensor], function: Callable, *inputs: torch.Tensor
) -> AbstractContextManager:
    """Where operations under this keep `outputs` for backward, or views of them, `inputs` are kept instead, of which
    backward computes function(*inputs) again: to the same bits, and once for all that need it.

    outputs: what function(*inputs) gave, one tensor or several. Those that lie in the memory of an input, as where the
    function had nothing to do, are kept. The function draws no random numbers; what it needs beside `inputs`, such as
    weights, is there in backward, unchanged. RuntimeError where an input was changed in place before it was kept, or
    in backward where a tensor was after it, as torch raises without these hooks. They nest, also in activation
    checkpointing and other hooks on saved tensors: the hooks around are given what is kept here. What is compiled keeps
    what its compiler chooses.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nullcontext()
    return _Hooks(_Again((outputs,) if isinstance(outputs, torch.Tensor) else outputs, function, inputs))


class _Hooks(torch.autograd.graph.saved_tensors_hooks):
    """A part of its own: what is packed refers to `again`, and in a cycle it would wait for the garbage collector."""

    def __init__(self, again: "_Again") -> None:
        super().__init__(again.pack, again.unpack)
        self.again = again

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self.again.close()


class _Output(NamedTuple):
    """In place of a saved tensor: which output it lies in, and where."""

    place: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Other(NamedTuple):
    """A saved tensor that lies in none of the outputs, as the hooks around these have packed it."""

    packed: Any


class _Again:
    """Packs and unpacks. Refers to inputs, as the hooks around have packed them, and to outputs while they are used."""

    def __init__(self, outputs: Sequence[torch.Tensor], function: Callable, inputs: Sequence[torch.Tensor]) -> None:
        self.function, self.inputs = function, inputs
        # Tensors of inference mode have none, and none of them is kept.
        self.versions = [0 if x.is_inference() else x._version for x in inputs]
        # Torch calls the innermost hooks only.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.outer_pack, self.outer_unpack = hooks or (_pack, _unpack)
        given = {_memory(x) for x in inputs}
        self.places = {_memory(x): place for place, x in enumerate(outputs) if _memory(x) not in given}
        self.dtypes = [x.dtype for x in outputs]
        # How often outputs were packed, and how often they are still needed after they were computed again.
        self.uses = self.left = 0
        self.values: Sequence[torch.Tensor] = ()
        self.autocast = _autocast(inputs[0].device.type)

    def pack(self, x: torch.Tensor) -> _Output | _Other:
        place = self.places.get(_memory(x))
        if place is None or x.dtype != self.dtypes[place]:
            return _Other(self.outer_pack(x))
        if not self.uses:
            for y, version in zip(self.inputs, self.versions, strict=True):
                _check(y, version)
            self.packed, self.inputs = [self.outer_pack(y) for y in self.inputs], ()
        self.uses += 1
        return _Output(place, x.size(), x.stride(), x.storage_offset())

    def close(self) -> None:
        self.places, self.inputs = {}, ()

    def unpack(self, kept: _Output | _Other) -> torch.Tensor:
        if isinstance(kept, _Other):
            return self.outer_unpack(kept.packed)
        if not self.left:
            self.values, self.left = self._compute(), self.uses
        x = self.values[kept.place].as_strided(kept.size, kept.stride, kept.offset)
        self.left -= 1
        if not self.left:
            self.values = ()
        return x

    def _compute(self) -> Sequence[torch.Tensor]:
        inputs = [self.outer_unpack(y) for y in self.packed]
        with torch.no_grad(), self.autocast():
            values = self.function(*inputs)
        return (values,) if isinstance(values, torch.Tensor) else values


def _autocast(device: str) -> Callable[[], AbstractContextManager]:
    """What enters the autocast of now again; the meta device has none."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    return partial(torch.autocast, device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))


def _pack(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    # Parameters as the objects that they are, whose bytes may be elsewhere by then; all others without their graph.
    return x if x.is_leaf else x.detach(), x._version


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """What torch checks of saved tensors where there are no hooks."""
    _check(*packed)
    return packed[0]


def _check(x: torch.Tensor, version: int) -> None:
    if x._version != version:
        raise RuntimeError(
            f"a tensor of {tuple(x.shape)} that backward needs was changed in place "
            f"(it is at version {x._version}, version {version} was expected): change a copy"
        )


def _memory(x: torch.Tensor) -> StorageWeakRef:
    """Names the memory that x lies in, does not keep it, and as long as it exists no other memory has this name."""
    return StorageWeakRef(x.untyped_storage())
