"""What runs below autograd: how often each operator ran, and how much of what they made is still held."""

from collections import Counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """`calls`: operator -> how often it ran. A result that checkpointing kept is not computed, nor counted, again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()
        self._bytes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls[func] += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._bytes[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def live_bytes(self) -> int:
        """Memory that operators returned since this mode was entered and that something still refers to."""
        return sum(size for reference, size in self._bytes.items() if not reference.expired())
