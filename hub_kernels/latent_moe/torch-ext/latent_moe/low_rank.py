"""Low-rank terms of the expert matrices: rows times a factor, and the gradient of a factor.

A factor is [E, RANK, K]: A as it is, B transposed, so that both sides of an adapter take the same two kernels. Its
matrices are contiguous; one that all experts share has a first stride of 0. Low-rank rows are fp32 [R, P]: P is RANK
made a multiple of four, the columns behind RANK are zero, and a copy engine can load the rows.

Sizes: R rows sorted by expert, S slots per token, E experts, K width. Tiles: BM rows, BK columns, BR >= P.
"""

import torch
import triton
import triton.language as tl

from .integers import cdiv, next_power_of_2
from .mxfp4 import contraction_order
from .products import add_product, find_tile, row_offsets


@triton.jit
def nearest_tf32(x):
    """fp32 rounded to the 11 bits that products in tf32 read; they cut off the rest."""
    nearest = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    # The sum may make another number of NaN.
    return tl.where(x == x, nearest, x)


@triton.jit
def add_mixed_product(acc, b_x, b_f, PRECISION: tl.constexpr):
    """acc + b_x b_f for fp32 b_f, where b_x may have 16 bits: bf16 ones meet two halves of b_f, of 8 bits each.

    So b_x goes from shared memory to the tensor cores as it was loaded.
    """
    if b_x.dtype == tl.bfloat16:
        b_high = b_f.to(tl.bfloat16)
        acc = tl.dot(b_x, b_high, acc)
        return tl.dot(b_x, (b_f - b_high.to(tl.float32)).to(tl.bfloat16), acc)
    else:
        return add_product(acc, b_x.to(tl.float32), b_f, PRECISION)


@triton.jit(do_not_specialize=["R"])
def low_rank_kernel(
    x, slots, offsets, factor, low, R, stride,
    E: tl.constexpr, S: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, ORDERED: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """low fp32 [R, P] = factor x of every row; x is in contraction order if ORDERED."""
    i_e, i_m, end, _ = find_tile(offsets, R, E, 1, BM, BE)
    if i_e == E:
        return
    o_m, o_r, o_k = i_m + tl.arange(0, BM), tl.arange(0, BR), tl.arange(0, BK)
    m_r = (o_r < RANK)[:, None]
    p_x = row_offsets(x, slots, i_m, end, S, K, BM) + o_k[None, :]
    p_f = factor + i_e.to(tl.int64) * stride + o_r[:, None] * K + o_k[None, :]
    acc = tl.zeros([BM, BR], tl.float32)
    for i_k in range(0, K, BK):
        m_k = (i_k + o_k < K)[None, :]
        b_x = tl.load(p_x + i_k, mask=m_k, other=0.0)
        b_f = tl.load(p_f + i_k, mask=m_r & m_k, other=0.0).to(tl.float32)
        if ORDERED:
            b_f = contraction_order(b_f, BR, BK)
        acc = add_mixed_product(acc, b_x, tl.trans(b_f), PRECISION)
    if x.dtype.element_ty == tl.bfloat16:
        # Products beside bf16 read no more, and would cut it off.
        acc = nearest_tf32(acc)
    P: tl.constexpr = tl.cdiv(RANK, 4) * 4
    p_l = low + o_m.to(tl.int64)[:, None] * P + o_r[None, :]
    tl.store(p_l, acc, mask=(o_m < end)[:, None] & (o_r < P)[None, :])


@triton.jit
def factor_gradient_kernel(
    low, x, slots, weights, offsets, dfactor, scaling,
    S: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, GATHER: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dfactor [E, RANK, K] = scaling * sum over the expert's rows, in their order, of low x^T, times the slot's weight.

    Rows of x are tokens if GATHER.
    """
    P: tl.constexpr = tl.cdiv(RANK, 4) * 4
    i_e = tl.program_id(0)
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    o_r = tl.arange(0, BR)
    end = tl.load(offsets + i_e + 1)
    acc = tl.zeros([BK, BR], tl.float32)
    for i_m in range(tl.load(offsets + i_e), end, BM):
        o_m = i_m + tl.arange(0, BM)
        m_m = o_m < end
        p_l = low + o_m.to(tl.int64)[:, None] * P + o_r[None, :]
        b_l = tl.load(p_l, mask=m_m[:, None] & (o_r < RANK)[None, :], other=0.0)
        o_x = o_m
        if slots is not None:
            b_slot = tl.load(slots + o_m, mask=m_m, other=0)
            if GATHER:
                o_x = b_slot // S
            if weights is not None:
                b_l *= tl.load(weights + b_slot, mask=m_m, other=0.0).to(tl.float32)[:, None]
        p_x = x + o_x.to(tl.int64)[:, None] * K + o_k[None, :]
        b_x = tl.load(p_x, mask=m_m[:, None] & (o_k < K)[None, :], other=0.0)
        acc = add_mixed_product(acc, tl.trans(b_x), b_l, PRECISION)
    p_d = dfactor + (i_e.to(tl.int64) * RANK + o_r[None, :]) * K + o_k[:, None]
    tl.store(p_d, (acc * scaling).to(dfactor.dtype.element_ty), mask=(o_r < RANK)[None, :] & (o_k < K)[:, None])


def low_width(rank: int) -> int:
    """Columns of low-rank rows in memory."""
    return cdiv(rank, 4) * 4


def rank_tile(rank: int) -> int:
    return max(16, next_power_of_2(rank))


def precision(dtype: torch.dtype) -> str:
    """Of products with fp32 operands: those next to 16-bit rows need no more than tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _tiles(dtype: torch.dtype, rank: int) -> dict[str, int]:
    if dtype == torch.float32:
        return {"BM": 32, "BK": 64, "num_warps": 4, "num_stages": 1}
    if dtype != torch.bfloat16:
        # The left operand is converted in registers, which is not safe in several stages: see products.after_products.
        return {"BM": 64, "BK": 128, "num_warps": 4, "num_stages": 1}
    # Few rows are few programs per multiprocessor: each must have its loads on their way.
    return {"BM": 64, "BK": 128 if rank <= 32 else 64, "num_warps": 4, "num_stages": 4}


def low_rank(
    x: torch.Tensor,
    slot_R: torch.Tensor | None,
    offset: torch.Tensor,
    factor_ErK: torch.Tensor,
    slots: int,
    rows: int,
    ordered: bool = False,
) -> torch.Tensor:
    """fp32 [R, P]: the factor of its expert times every row of x, or, with `slot_R`, times the token of its slot."""
    E, RANK, K = factor_ErK.shape
    low_RP, tiles = x.new_empty(rows, low_width(RANK), dtype=torch.float32), _tiles(x.dtype, RANK)
    low_rank_kernel[(cdiv(rows, tiles["BM"]) + E,)](
        x, slot_R, offset, factor_ErK, low_RP, rows, factor_ErK.stride(0), E, slots, K, RANK, ordered,
        precision(x.dtype), BE=next_power_of_2(E), BR=rank_tile(RANK), **tiles,
    )  # fmt: skip
    return low_RP


def factor_gradient(
    low_RP: torch.Tensor,
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
    dfactor_ErK, tiles = like_ErK.new_empty(E, RANK, K), _tiles(x.dtype, RANK)
    factor_gradient_kernel[(E, cdiv(K, tiles["BK"]))](
        low_RP, x, slot_R, weights_TS, offset, dfactor_ErK, scaling, slots, K, RANK, gather, precision(x.dtype),
        BR=rank_tile(RANK), **tiles,
    )  # fmt: skip
    return dfactor_ErK
