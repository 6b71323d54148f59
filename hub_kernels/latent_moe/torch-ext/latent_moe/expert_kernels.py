"""Triton kernels of the expert MLP: a grouped product each, with what belongs before and after it.

Sizes: R rows sorted by expert, S slots per token, E experts, L latent width, F hidden width. Tiles: BM rows, BN
outputs, BK of the contraction, BE >= E experts, BR >= RANK. Products leave [BN, BM]: see products.py.
"""

import triton
import triton.language as tl

from .activation import activate
from .mxfp4 import contraction_order
from .products import (
    add_low_rank,
    backward_product,
    find_tile,
    forward_product,
    output_order,
    row_offsets,
    rows_in_order,
)


@triton.jit
def _store(p, b_y, o_m, o_n, end, N: tl.constexpr, P: tl.constexpr):
    """Rows o_m of [BM, BN] into columns o_n of a [R, P] tensor, those below the row `end` and the column N."""
    p += o_m.to(tl.int64)[:, None] * P + o_n[None, :]
    tl.store(p, b_y.to(p.dtype.element_ty), mask=(o_m < end)[:, None] & (o_n < N)[None, :])


@triton.jit(do_not_specialize=["R"])
def gate_up_kernel(
    x, slots, offsets, weight, scale, low, factor, gate_up, h, R, stride, scaling, beta, linear_beta,
    E: tl.constexpr, S: tl.constexpr, L: tl.constexpr, F: tl.constexpr,
    RANK: tl.constexpr, ACTIVATION: tl.constexpr, FAST: tl.constexpr, ORDERED: tl.constexpr,
    PACKED: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr, LOW_PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """h = act(W_gate x, W_up x) of every row, gate and up side by side in a tile; also stores those if asked to.

    x [T, L] is in contraction order if PACKED, h [R, F] if ORDERED.
    """
    BF: tl.constexpr = BN // 2
    i_e, i_m, end, i_n = find_tile(offsets, R, E, tl.cdiv(F, BF), BM, BE)
    if i_e == E:
        return
    # Eight gates, their eight ups, and so on: the same thread gets both.
    o_n = tl.arange(0, BN)
    o_w = i_n * BF + o_n // 16 * 8 + o_n % 8
    o_w = tl.minimum(o_w, F - 1) + o_n // 8 % 2 * F
    p_x = row_offsets(x, slots, i_m, end, S, L, BM)
    acc = forward_product(p_x, weight, scale, i_e, o_w, 2 * F, L, BM, BN, BK, PACKED, PTX, PRECISION)
    if low is not None:
        acc = add_low_rank(acc, low, factor, stride, i_e, i_m, end, o_w, scaling, 2 * F, RANK, BM, BR, LOW_PRECISION)
    acc = tl.permute(tl.reshape(acc, [BN // 16, 2, 8, BM]), (0, 2, 3, 1))
    b_g, b_u = tl.split(acc.to(h.dtype.element_ty))
    b_g, b_u = tl.trans(tl.reshape(b_g, [BF, BM])), tl.trans(tl.reshape(b_u, [BF, BM]))
    o_m, o_f = i_m + tl.arange(0, BM), i_n * BF + tl.arange(0, BF)
    if gate_up is not None:
        _store(gate_up, b_g, o_m, o_f, end, F, 2 * F)
        _store(gate_up + F, b_u, o_m, o_f, end, F, 2 * F)
    b_h = activate(b_g.to(tl.float32), b_u.to(tl.float32), beta, linear_beta, ACTIVATION, FAST)
    b_h = b_h.to(h.dtype.element_ty)
    if ORDERED:
        b_h = contraction_order(b_h, BM, BF)
    _store(h, b_h, o_m, o_f, end, F, F)


@triton.jit(do_not_specialize=["R"])
def forward_kernel(
    x, offsets, weight, scale, low, factor, y, R, stride, scaling,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr,
    PACKED: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr, LOW_PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """y [R, N] = W x of every row; x [R, K] is in contraction order if PACKED."""
    i_e, i_m, end, i_n = find_tile(offsets, R, E, tl.cdiv(N, BN), BM, BE)
    if i_e == E:
        return
    o_m, o_n = i_m + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    p_x = row_offsets(x, None, i_m, end, 1, K, BM)
    o_w = tl.minimum(o_n, N - 1)
    acc = forward_product(p_x, weight, scale, i_e, o_w, N, K, BM, BN, BK, PACKED, PTX, PRECISION)
    if low is not None:
        acc = add_low_rank(acc, low, factor, stride, i_e, i_m, end, o_w, scaling, N, RANK, BM, BR, LOW_PRECISION)
    _store(y, tl.trans(acc.to(y.dtype.element_ty)), o_m, o_n, end, N, N)


@triton.jit(do_not_specialize=["R"])
def backward_kernel(
    dy, slots, offsets, weight, scale, low, factor, dx, R, stride, scaling,
    E: tl.constexpr, S: tl.constexpr, N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr,
    PACKED: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr, LOW_PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dx [R, K] = W^T dy of every row, W [N, K]; rows of dy are tokens if there are slots."""
    i_e, i_m, end, i_n = find_tile(offsets, R, E, tl.cdiv(K, BN), BM, BE)
    if i_e == E:
        return
    p_y = row_offsets(dy, slots, i_m, end, S, N, BM)
    acc = backward_product(p_y, weight, scale, i_e, i_n * BN, N, K, BM, BN, BK, PACKED, PTX, PRECISION)
    if low is not None:
        o_w = output_order(i_n * BN, BN, PACKED)
        acc = add_low_rank(acc, low, factor, stride, i_e, i_m, end, o_w, scaling, K, RANK, BM, BR, LOW_PRECISION)
    o_m, o_n = i_m + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    _store(dx, rows_in_order(acc.to(dx.dtype.element_ty), BM, BN, PACKED), o_m, o_n, end, K, K)
