"""What runs below autograd: how often each operator ran, and how much of what they made is still held."""

from collections import Counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """`calls`: operator -> how often it ran. A result that checkpointing kept is not computed, nor counted, again.
    `peak_bytes`: the most that was held at a time of what operators returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()
        self.peak_bytes = 0
        self._bytes: dict[StorageWeakRef, int] = {}
        self._most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls[func] += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._most += storage.nbytes()
                self._bytes[StorageWeakRef(storage)] = storage.nbytes()
        if self._most > self.peak_bytes:
            # No less than what is held; the truth costs a look at every tensor.
            self._bytes = {reference: size for reference, size in self._bytes.items() if not reference.expired()}
            self._most = sum(self._bytes.values())
            self.peak_bytes = max(self.peak_bytes, self._most)
        return out

    def live_bytes(self) -> int:
        """Memory that operators returned since this mode was entered and that something still refers to."""
        return sum(size for reference, size in self._bytes.items() if not reference.expired())
