"""Activations that are kept in host memory until backward needs them."""

import inspect
from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

# saved tensors below this stay on the device: it takes longer to send for them than they are worth
SMALLEST_BYTES = 2**16


def offload_activations(model: nn.Module) -> None:
    """Keep what `model` computes for the backward pass in host memory, pinned where there is an accelerator.

    What several operations keep is sent once, and comes back once for all of them. Copies are launched on the stream
    that computes: the host waits for none, and computation for each. Weights stay. Torch's pinned memory comes in
    powers of two: the host needs more than the device is spared. What memory holds is told apart by autograd's
    versions: writing through `.data` between two operations that keep a tensor is not seen.
    """
    # weak: a model that holds its own method is not freed when it is dropped, but whenever Python looks for cycles
    forward = WeakMethod(model.forward)

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        sent = _Sent()
        with saved_tensors_hooks(sent.pack, _unpack):
            try:
                return forward()(*args, **kwargs)
            finally:
                # Autograd keeps the hooks as long as what they packed.
                sent.clear()

    # `generate` looks at it
    offloaded.__signature__ = inspect.signature(model.forward)
    model.forward = offloaded


class _Elements:
    """The elements of a tensor, on the host."""

    def __init__(self, elements: Tensor) -> None:
        self.device = elements.device
        self.host = torch.empty_like(elements, device="cpu", pin_memory=self.device.type != "cpu")
        self.host.copy_(elements, non_blocking=True)
        # How many operations keep them, and how many of these still need them after they came back.
        self.uses = self.left = 0
        self.value: Tensor | None = None

    def fetch(self) -> Tensor:
        if not self.left:
            self.value, self.left = self.host.to(self.device, non_blocking=True), self.uses
        value = self.value
        self.left -= 1
        if not self.left:
            self.value = None
        return value


class _Kept(NamedTuple):
    """In place of a saved tensor: its elements, and how they lay."""

    elements: _Elements
    size: torch.Size
    stride: tuple[int, ...]


class _Sent(dict[Hashable, _Elements]):
    """What was sent to the host in this forward pass, by the memory that it lay in. References to that are weak: as
    long as they exist no other memory has its name."""

    def pack(self, x: Tensor) -> Tensor | _Kept:
        owner = x if x._base is None else x._base
        if isinstance(owner, nn.Parameter) or not x.is_floating_point() or x.nbytes < SMALLEST_BYTES:
            return x
        # Strides survive where every element has a place of its own and none is left out: other shapes of the same
        # elements are then the same memory from the same place on.
        x = x if torch.empty_like(x, device="meta").stride() == x.stride() else x.contiguous()
        place = StorageWeakRef(x.untyped_storage()), x.storage_offset(), x.numel(), x.dtype, x._version
        if place not in self:
            self[place] = _Elements(x.detach().as_strided((x.numel(),), (1,)))
        self[place].uses += 1
        return _Kept(self[place], x.size(), x.stride())


def _unpack(kept: Tensor | _Kept) -> Tensor:
    return kept.elements.fetch().as_strided(kept.size, kept.stride) if isinstance(kept, _Kept) else kept
