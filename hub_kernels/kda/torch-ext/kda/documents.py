"""Where the chunks of every document lie, worked out on the device.

Legend: X documents, N chunks of BT tokens.
"""

import torch
import triton
import triton.language as tl

from .tiles import BT

# Documents or chunks handled at a time.
BX = tl.constexpr(256)


@triton.jit
def _bound(cu_seqlens, o_x, T, PACKED: tl.constexpr):
    """First token of documents o_x."""
    if PACKED:
        return tl.load(cu_seqlens + o_x).to(tl.int32)
    return o_x * T


@triton.jit(do_not_specialize=["X", "N", "T"])
def _chunks_kernel(cu_seqlens, documents, chunks, X, N, T, PACKED: tl.constexpr):
    """One program per document, and one for the places in `chunks` behind the last chunk."""
    i_x = tl.program_id(0)
    first = 0
    for i in range(0, i_x, BX):
        o_x = tl.minimum(i + tl.arange(0, BX), i_x)
        o_next = tl.minimum(o_x + 1, i_x)
        length = _bound(cu_seqlens, o_next, T, PACKED) - _bound(cu_seqlens, o_x, T, PACKED)
        first += tl.sum((length + BT - 1) // BT)
    if i_x < X:
        start = _bound(cu_seqlens, i_x, T, PACKED)
        length = _bound(cu_seqlens, i_x + 1, T, PACKED) - start
        count = (length + BT - 1) // BT
        tl.store(documents + 4 * i_x, first)
        tl.store(documents + 4 * i_x + 1, count)
        tl.store(documents + 4 * i_x + 2, start)
        tl.store(documents + 4 * i_x + 3, length)
    else:
        start, length, count = 0, 0, N - first
    for i in range(0, count, BX):
        o_n = i + tl.arange(0, BX)
        tl.store(chunks + 2 * (first + o_n), start + o_n * BT, mask=o_n < count)
        left = tl.maximum(tl.minimum(length - o_n * BT, BT), 0)
        tl.store(chunks + 2 * (first + o_n) + 1, left, mask=o_n < count)


def chunk_tables(
    B: int, T: int, cu_seqlens: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 documents [X, 4]: first chunk, chunks, first token, tokens; chunks [N, 2]: first token, tokens.

    The number of chunks of packed documents is known on the device only: N is its bound, and chunks that do not exist
    have no tokens.
    """
    if cu_seqlens is None:
        X, N = B, B * triton.cdiv(T, BT.value)
    else:
        X, N = cu_seqlens.shape[0] - 1, T // BT.value + cu_seqlens.shape[0] - 1
    documents = torch.empty(X, 4, dtype=torch.int32, device=device)
    chunks = torch.empty(N, 2, dtype=torch.int32, device=device)
    _chunks_kernel[(X + 1,)](cu_seqlens, documents, chunks, X, N, T, PACKED=cu_seqlens is not None)
    return documents, chunks
