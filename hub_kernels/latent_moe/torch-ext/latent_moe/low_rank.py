"""Low-rank terms of the expert matrices: rows times a factor, and the gradient of a factor.

A factor is [E, RANK, K]: A as it is, B transposed, so that both sides of an adapter take the same two kernels. Its
matrices are contiguous; one that all experts share has a first stride of 0.

Sizes: R rows sorted by expert, S slots per token, E experts, K width. Tiles: BM rows, BK columns, BR >= RANK.
"""

import torch
import triton
import triton.language as tl

from .products import add_product, find_tile, row_offsets


@triton.jit(do_not_specialize=["R"])
def low_rank_kernel(
    x, slots, offsets, factor, low, R, stride,
    E: tl.constexpr, S: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, ORDERED: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """low fp32 [R, RANK] = factor x of every row; x is in contraction order if ORDERED."""
    i_e, i_m, end, _ = find_tile(offsets, R, E, 1, BM, BE)
    if i_e == E:
        return
    o_m, o_r, o_k = i_m + tl.arange(0, BM), tl.arange(0, BR), tl.arange(0, BK)
    m_r = (o_r < RANK)[:, None]
    p_x = row_offsets(x, slots, i_m, end, S, K, BM) + o_k[None, :]
    o_f = o_k
    if ORDERED:
        o_f = o_k // 32 * 32 + o_k // 2 % 4 * 8 + o_k % 2 * 4 + o_k // 8 % 4
    p_f = factor + i_e.to(tl.int64) * stride + o_r[:, None] * K + o_f[None, :]
    acc = tl.zeros([BM, BR], tl.float32)
    for i_k in range(0, K, BK):
        b_x = tl.load(p_x + i_k, mask=(i_k + o_k < K)[None, :], other=0.0).to(tl.float32)
        b_f = tl.load(p_f + i_k, mask=m_r & (i_k + o_f < K)[None, :], other=0.0).to(tl.float32)
        acc = add_product(acc, b_x, tl.trans(b_f), PRECISION)
    p_l = low + o_m.to(tl.int64)[:, None] * RANK + o_r[None, :]
    tl.store(p_l, acc, mask=(o_m < end)[:, None] & (o_r < RANK)[None, :])


@triton.jit
def factor_gradient_kernel(
    low, x, slots, weights, offsets, dfactor, scaling,
    S: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, GATHER: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dfactor [E, RANK, K] = scaling * sum over the expert's rows, in their order, of low x^T, times the slot's weight.

    Rows of x are tokens if GATHER.
    """
    i_e = tl.program_id(0)
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    o_r = tl.arange(0, BR)
    end = tl.load(offsets + i_e + 1)
    acc = tl.zeros([BR, BK], tl.float32)
    for i_m in range(tl.load(offsets + i_e), end, BM):
        o_m = i_m + tl.arange(0, BM)
        m_m = o_m < end
        p_l = low + o_m.to(tl.int64)[:, None] * RANK + o_r[None, :]
        b_l = tl.load(p_l, mask=m_m[:, None] & (o_r < RANK)[None, :], other=0.0)
        o_x = o_m
        if slots is not None:
            b_slot = tl.load(slots + o_m, mask=m_m, other=0)
            if GATHER:
                o_x = b_slot // S
            if weights is not None:
                b_l *= tl.load(weights + b_slot, mask=m_m, other=0.0).to(tl.float32)[:, None]
        p_x = x + o_x.to(tl.int64)[:, None] * K + o_k[None, :]
        b_x = tl.load(p_x, mask=m_m[:, None] & (o_k < K)[None, :], other=0.0).to(tl.float32)
        acc = add_product(acc, tl.trans(b_l), b_x, PRECISION)
    p_d = dfactor + (i_e.to(tl.int64) * RANK + o_r[:, None]) * K + o_k[None, :]
    tl.store(p_d, (acc * scaling).to(dfactor.dtype.element_ty), mask=(o_r < RANK)[:, None] & (o_k < K)[None, :])


def rank_tile(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))


def precision(dtype: torch.dtype) -> str:
    """Of products with fp32 operands: those next to 16-bit rows need no more than tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def low_rank(
    x: torch.Tensor,
    slot_R: torch.Tensor | None,
    offset: torch.Tensor,
    factor_ErK: torch.Tensor,
    slots: int,
    rows: int,
    ordered: bool = False,
) -> torch.Tensor:
    """fp32 [R, r]: the factor of its expert times every row of x, or, with `slot_R`, times the token of its slot."""
    E, RANK, K = factor_ErK.shape
    low_Rr = x.new_empty(rows, RANK, dtype=torch.float32)
    exact = x.dtype == torch.float32
    BM, BK = (32, 64) if exact else (64, 128)
    low_rank_kernel[(triton.cdiv(rows, BM) + E,)](
        x, slot_R, offset, factor_ErK, low_Rr, rows, factor_ErK.stride(0), E, slots, K, RANK, ordered,
        precision(x.dtype), BM, BK, triton.next_power_of_2(E), rank_tile(RANK), num_warps=4, num_stages=1,
    )  # fmt: skip
    return low_Rr


def factor_gradient(
    low_Rr: torch.Tensor,
    x: torch.Tensor,
    slot_R: torch.Tensor | None,
    weights_TS: torch.Tensor | None,
    offset: torch.Tensor,
    like_ErK: torch.Tensor,
    scaling: float,
    slots: int,
    gather: bool,
) -> torch.Tensor:
    """Gradient of a factor: scaling * sum over each expert's rows of weight * low x^T, in the dtype of the factor."""
    E, RANK, K = like_ErK.shape
    dfactor_ErK = like_ErK.new_empty(E, RANK, K)
    exact = x.dtype == torch.float32
    BM, BK = (32, 64) if exact else (64, 128)
    factor_gradient_kernel[(E, triton.cdiv(K, BK))](
        low_Rr, x, slot_R, weights_TS, offset, dfactor_ErK, scaling, slots, K, RANK, gather, precision(x.dtype),
        BM, BK, rank_tile(RANK), num_warps=4, num_stages=1,
    )  # fmt: skip
    return dfactor_ErK
