"""What safetensors files say about themselves: headers and indices, read strictly and without their data."""

import gc
import json
import math
import operator
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
# The format's own limit, and how files begin that hold pickles: zip archives of torch.save, and bare ones.
HEADER_LIMIT = 100_000_000
PICKLES = (b"PK", b"\x80\x02", b"\x80\x04")


class StoredTensor(NamedTuple):
    """What a header says about one tensor: dtype in safetensors words, and its bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header_size(raw: bytes, size: int, name: str) -> int:
    """Bytes at the head of a safetensors file before its data, from its first 8 bytes `raw`.

    size: bytes of the whole file. ValueError naming the file when it is cut short or of another format.
    """
    length = 8 + int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > min(size, 8 + HEADER_LIMIT):
        kind = " but a pickle, which is refused because it can run code" if raw.startswith(PICKLES) else ""
        raise ValueError(f"{name} is truncated or not a safetensors file{kind} ({size} bytes)")
    return length


@contextmanager
def collector_paused() -> Iterator[None]:
    """A large header becomes millions of objects at once; the cyclic collector would walk them over and over."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@collector_paused()
def parse_header(raw: bytes, size: int, name: str) -> dict[str, StoredTensor]:
    """Tensors of a safetensors file in the order of their bytes, from its head `raw` of `header_size` bytes.

    size: bytes of the whole file. ValueError naming the file, and the tensor where there is one, unless the
    tensors are of known dtypes, have as many bytes as their shapes need and fill the file without gap or overlap.
    """
    length = header_size(raw, size, name)
    try:
        entries = json.loads(raw[8:length])
        entries.pop("__metadata__", None)
        # JSON readers keep the last of two entries of one name in silence. Looking at every pair of a large header
        # would take longer than all else, so that is done only where the count says that one is gone.
        if raw.count(b'"data_offsets"', 8, length) != len(entries):
            json.loads(raw[8:length], object_pairs_hook=_refuse_repeats)
    except RepeatedName as error:
        raise ValueError(f"{name}: {error} is stored twice in this file") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{name} is not a safetensors file, or its header is damaged") from error
    tensors = {tensor: _stored_tensor(name, tensor, entry, length) for tensor, entry in entries.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1][2:]))
    end = length
    for tensor, stored in tensors.items():
        if stored.start != end:
            raise ValueError(
                f"{name} is damaged: its header puts {tensor} at byte {stored.start}, but the bytes before end at {end}"
            )
        end = stored.stop
    if size != end:
        cut = next((f", cut in {tensor}" for tensor, stored in tensors.items() if stored.stop > size), "")
        raise ValueError(f"{name} is truncated or damaged: {size} bytes instead of {end}{cut}")
    return tensors


def _stored_tensor(name: str, tensor: str, entry: Any, length: int) -> StoredTensor:
    """The header entry of a tensor in the file `name`, whose data begin after `length` bytes."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        start, stop = operator.index(start), operator.index(stop)
        stored = StoredTensor(sys.intern(dtype), tuple(shape), length + start, length + stop)
        needed = operator.index(math.prod(shape)) * DTYPE_BYTES[dtype]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{name} is damaged: its header describes {tensor} as {str(entry)[:100]}") from error
    if stop - start != needed:
        raise ValueError(
            f"{name} is damaged: its header gives {tensor} {stop - start} bytes, but {dtype} {shape} needs {needed}"
        )
    return stored


def read_header(path: Path) -> dict[str, StoredTensor]:
    """`parse_header` of a local file; ValueError also where it cannot be opened."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = file.read(8)
            return parse_header(raw + file.read(header_size(raw, size, path.name) - 8), size, path.name)
    except FileNotFoundError as error:
        link = f", a link to {path.readlink()}," if path.is_symlink() else ""
        raise ValueError(f"{path.name}{link} is missing") from error
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from error


class RepeatedName(Exception):
    """A JSON object names one field twice."""


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise RepeatedName(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return values


def index_path(file: Path) -> Path:
    """The index that belongs to a shard `name-00001-of-00002.safetensors`, or to a single file."""
    return file.with_name(re.sub(r"-\d+-of-\d+$", "", file.stem) + ".safetensors.index.json")


class Index(NamedTuple):
    """Tensor name -> shard, and the bytes that all tensors are said to have (None where that is not said)."""

    shards: dict[str, str]
    total_size: int | None


def read_index(path: Path) -> Index:
    """Contents of an index file, empty when there is no such file. ValueError naming it when damaged."""
    try:
        contents = json.loads(path.read_bytes())
        shards, total_size = contents["weight_map"], contents.get("metadata", {}).get("total_size")
        foreign = next((shard for shard in set(shards.values()) if Path(shard).name != shard), None)
    except FileNotFoundError:
        return Index({}, None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or not an index of safetensors files") from error
    if foreign is not None:
        raise ValueError(f"{path}: {foreign} is not the name of a file in its folder")
    return Index(shards, total_size)
