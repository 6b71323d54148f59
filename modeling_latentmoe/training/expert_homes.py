"""Where the routed experts of a layer live while they are not on the device: in host memory, or in their files.

The experts are frozen, so what leaves the device never has to be written back. Between two uses the parameters of a
module show its home: the bytes in host memory, or stand-ins of the same shape that hold no memory and decode to NaN.
"""

import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from modeling_latentmoe.training.mesh import expert_layers
from modeling_latentmoe.training.placement import Placement
from modeling_latentmoe.training.sources import READERS
from modeling_latentmoe.training.streaming import Request, read_request, stay

# where a tensor may start in a buffer: what the widest loads of a kernel, and a copy engine, like best
ALIGNMENT = 256


class Place(NamedTuple):
    start: int
    shape: torch.Size
    dtype: torch.dtype


class Layout:
    """Places of the tensors of an experts module in one buffer of `nbytes` bytes, by the names of its parameters."""

    def __init__(self, experts: nn.Module) -> None:
        self.places, self.nbytes = {}, 0
        for name, param in experts.named_parameters(recurse=False):
            self.places[name] = Place(self.nbytes, param.shape, param.dtype)
            self.nbytes += -(-param.nbytes // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors in a uint8 buffer."""
        return {
            name: buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (start, shape, dtype) in self.places.items()
        }


class HostHome:
    """The experts of one layer in one buffer of pinned host memory, moved there from the module's own tensors."""

    # the bytes are ready to be sent at any time
    staged = False

    def __init__(self, experts: nn.Module, device: torch.device) -> None:
        self.experts, self.layout = experts, Layout(experts)
        self.buffer = pinned_bytes(self.layout.nbytes, device)
        for name, view in self.tensors().items():
            param = getattr(experts, name)
            view.copy_(param.data)
            param.data = view
        stay(experts)

    def read(self) -> Tensor:
        """The bytes, in the order of `layout`."""
        return self.buffer

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by name, for who saves them."""
        return self.layout.views(self.buffer)


class FileHome:
    """The experts of one layer in the files of a checkpoint, loaded with `on_disk` (streaming.py).

    staging: a buffer of pinned host memory, which the layers of a model share. The page cache of the system is what
    makes a second reading fast.
    """

    # a reading overwrites the bytes of the one before
    staged = True

    def __init__(self, experts: nn.Module, staging: Tensor, readers: ThreadPoolExecutor) -> None:
        self.experts, self.layout = experts, Layout(experts)
        self.staging, self.readers = staging, readers
        self.requests = experts.stored.plan(self.layout.views(staging))

    def read(self) -> Tensor:
        """The bytes, in the order of `layout`, read now; OSError naming the file."""
        self._read(self.requests)
        return self.staging

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by name, for who saves them: read into memory of their own."""
        views = self.layout.views(torch.empty(self.layout.nbytes, dtype=torch.uint8))
        self._read(self.experts.stored.plan(views))
        return views

    def _read(self, requests: list[Request]) -> None:
        list(self.readers.map(partial(read_request, self.experts.stored.files), requests))


def keep_off_device(model: nn.Module, placement: Placement, device: torch.device) -> list[HostHome | FileHome]:
    """The homes of the experts of the layers that `placement` names, in order; from here on `to` does not move them.

    Before `model` is put on the device. ValueError for experts that are trained, OSError for too little memory.
    """
    chosen = [experts for layer, experts in expert_layers(model).items() if layer in placement.layers]
    if any(param.requires_grad for experts in chosen for param in experts.parameters(recurse=False)):
        raise ValueError(f"--experts_in {placement.text}: the experts are trained, freeze them or use device")
    try:
        if placement.kind == "file":
            staging = pinned_bytes(max(Layout(experts).nbytes for experts in chosen), device)
            readers = ThreadPoolExecutor(READERS, thread_name_prefix="expert-files")
            return [FileHome(experts, staging, readers) for experts in chosen]
        return [HostHome(experts, device) for experts in chosen]
    except OSError as error:
        raise OSError(
            f"--experts_in {placement.text}: host memory cannot be pinned ({error}), name fewer layers or use file:"
        ) from error


def pinned_bytes(nbytes: int, device: torch.device) -> Tensor:
    """An uninitialised uint8 buffer in host memory, from which an accelerator copies without the CPU's help.

    On CUDA not torch's own pinned memory, which comes in powers of two: a layer of 2.1 GB would take 4.3.
    """
    if device.type not in ("cpu", "cuda"):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(pages, dtype=np.uint8)
    if device.type == "cuda":
        cudart = torch.get_device_module(device).cudart()
        code = int(cudart.cudaHostRegister(array.ctypes.data, nbytes, 0))
        if code:
            raise OSError(f"CUDA error {code} for {nbytes / 1e9:.1f} GB")
        # an array, unlike a mapping, tells so before its memory goes
        weakref.finalize(array, cudart.cudaHostUnregister, array.ctypes.data).atexit = False
    return torch.from_numpy(array)
