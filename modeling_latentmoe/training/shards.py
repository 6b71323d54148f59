"""Read and write safetensors files one tensor at a time, so that a shard never has to fit in memory."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from modeling_latentmoe.headers import DTYPE_BYTES, StoredTensor
from modeling_latentmoe.training.streaming import STORED_DTYPES

COPY_BYTES = 16 * 2**20
STORED_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}

# Tensor name -> its dtype in safetensors words and its shape, in the order of a file.
Layout = Mapping[str, tuple[str, tuple[int, ...]]]


def data_bytes(layout: Layout) -> int:
    """Bytes of all tensors, without the header."""
    return sum(math.prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in layout.values())


def write_header(file: BinaryIO, layout: Layout) -> None:
    """The head of a safetensors file; the bytes of every tensor follow, in this order and without gaps."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)


def write_tensor(file: BinaryIO, value: Tensor) -> None:
    file.write(value.contiguous().flatten().view(torch.uint8).numpy())


def copy_tensor(source: BinaryIO, target: BinaryIO, stored: StoredTensor) -> None:
    """The bytes of a tensor, unchanged and a few at a time."""
    source.seek(stored.start)
    for start in range(stored.start, stored.stop, COPY_BYTES):
        target.write(source.read(min(COPY_BYTES, stored.stop - start)))


def read_tensor(path: Path, stored: StoredTensor) -> Tensor:
    """One tensor, by reading its bytes and no others."""
    buffer = bytearray(stored.stop - stored.start)
    with path.open("rb") as file:
        file.seek(stored.start)
        if file.readinto(buffer) != len(buffer):
            raise OSError(f"{path} has become shorter while it was read")
    return torch.frombuffer(buffer, dtype=STORED_DTYPES[stored.dtype]).view(stored.shape)
