"""From selected pools of keys to the keys in them.

Legend: T queries, S pools, k selected pools of a query, P keys of a pool.
"""

import torch
import triton
import triton.language as tl

from ._ops import op
from .index import check_range


@triton.jit
def expand_kernel(pool, token, first, end, index, k: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_k, o_w = tl.arange(0, BK), tl.arange(0, BW)
    b_pool = tl.load(pool + i_t * k + o_k, mask=o_k < k, other=-1)
    inside = tl.sum((b_pool >= 0).to(tl.int32)) * P
    stop = tl.load(end + i_t)
    tail = (stop - tl.load(first + i_t)) % P
    b_i = tl.load(pool + i_t * k + o_w // P, mask=o_w < inside, other=0)
    b_s = tl.load(token + b_i, mask=o_w < inside, other=0) + o_w % P
    b_s = tl.where(o_w < inside, b_s, tl.where(o_w < inside + tail, stop - tail + o_w - inside, -1))
    W: tl.constexpr = k * P + P - 1
    tl.store(index + i_t * W + o_w, b_s, mask=o_w < W)


@torch.library.custom_op(op("expand_pools"), mutates_args=())
def _expand_pools(
    pool_Tk: torch.Tensor, token_S: torch.Tensor, first_T: torch.Tensor, end_T: torch.Tensor, size: int
) -> torch.Tensor:
    pool_Tk, token_S, first_T, end_T = (x.contiguous() for x in (pool_Tk, token_S, first_T, end_T))
    T, k = pool_Tk.shape
    width = k * size + size - 1
    index_TW = pool_Tk.new_empty(T, width)
    if T:
        with torch.cuda.device_of(pool_Tk):
            expand_kernel[(T,)](
                pool_Tk,
                token_S,
                first_T,
                end_T,
                index_TW,
                k=k,
                P=size,
                BK=triton.next_power_of_2(k),
                BW=triton.next_power_of_2(width),
                num_warps=4,
            )
    return index_TW


@_expand_pools.register_fake
def _(pool_Tk, token_S, first_T, end_T, size):
    return pool_Tk.new_empty(len(pool_Tk), pool_Tk.shape[1] * size + size - 1)


def expand_pools(
    pool_Tk: torch.Tensor, token_S: torch.Tensor, first_T: torch.Tensor, end_T: torch.Tensor, size: int
) -> torch.Tensor:
    """The keys of the selected pools and those behind the last complete pool: int32 [T, k * size + size - 1].

    pool_Tk: int32, selected pools as `index_topk` gives them, ascending, -1 at the end. Pool s holds the `size` keys
    from position token_S[s] on, int32 [S]. A query sees the keys first <= s < end, int32 [T] each; their pools begin
    at `first`, and those that no complete pool holds, the last (end - first) % size, are always added. Positions are
    ascending, -1 at the end. ValueError names an argument.
    """
    if pool_Tk.dim() != 2 or pool_Tk.shape[1] < 1 or pool_Tk.dtype != torch.int32:
        raise ValueError(
            f"pool_Tk: expected int32 [queries, selected pools], got {pool_Tk.dtype} {list(pool_Tk.shape)}"
        )
    if token_S.dim() != 1 or token_S.dtype != torch.int32:
        raise ValueError(f"token_S: expected int32 [pools], got {token_S.dtype} {list(token_S.shape)}")
    check_range("first_T", first_T, len(pool_Tk))
    check_range("end_T", end_T, len(pool_Tk))
    if size < 1:
        raise ValueError(f"size: {size}, expected 1 or more")
    return _expand_pools(pool_Tk, token_S, first_T, end_T, size)
