"""Triton kernels of the low-rank update: each reads its rows once and is bound by that.

fp32 factors meet bf16 rows on tensor cores. A number in fp32 is the sum of three parts in bf16, each the rounded
remainder of those before: products with the parts, summed in fp32, lose nothing of it. Factors and low rows lie in
memory as parts [PARTS, ...], so the products take everything as it is loaded. Beside fp32 and fp16 rows there is one
part in fp32, multiplied without tensor cores.

Tensor cores cut a sum off where fp32 rounds it. So they sum over a block only, and blocks are added outside.

Sizes: T rows, K width of a row, R rank up to a power of two, S sums that are added up later, M and N rows and columns
       of a sum; tiles BT, BK, BM, BN.
"""

import triton
import triton.language as tl

# The interpreter multiplies bf16 wrongly.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _dot(a, b, acc):
    if b.dtype == tl.float32 or _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _rows_dot(b_x, p_parts, size, m_parts, acc, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """acc + b_x times the sum of the parts at p_parts, the smallest first; TRANSPOSED: times the transpose of it."""
    for i_p in tl.static_range(PARTS - 1, -1, -1):
        b_f = tl.load(p_parts + i_p * size, mask=m_parts, other=0.0)
        acc = _dot(b_x, tl.trans(b_f) if TRANSPOSED else b_f, acc)
    return acc


@triton.jit(do_not_specialize=["T"])
def low_kernel(
    x, factor, low, T, K, KS, R: tl.constexpr, PARTS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """low [S, T, R] = x [T, K] times parts [PARTS, R, K] of a factor, summed over KS columns, a multiple of BK."""
    i_s = tl.program_id(1)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT).to(tl.int64)
    o_r = tl.arange(0, R)
    m_t = (o_t < T)[:, None]
    acc = tl.zeros([BT, R], tl.float32)
    for i_k in range(i_s * KS, tl.minimum(i_s * KS + KS, K), BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = (o_k < K)[None, :]
        b_x = tl.load(x + o_t[:, None] * K + o_k[None, :], mask=m_t & m_k, other=0.0)
        p_f = factor + o_r[:, None] * K + o_k[None, :]
        acc += _rows_dot(b_x, p_f, R * K, m_k, tl.zeros([BT, R], tl.float32), PARTS, True)
    o_t += i_s.to(tl.int64) * T
    tl.store(low + o_t[:, None] * R + o_r[None, :], acc, mask=m_t)


@triton.jit(do_not_specialize=["T", "TS"])
def add_kernel(
    y, low, factor, out, T, K, TS, scaling, R: tl.constexpr, PARTS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out [T, K] = y (or 0 if that is None) + scaling * low times factor, from parts [PARTS, T, R] and [PARTS, R, K].

    A program keeps the parts of its columns and walks over TS rows, which are copied ahead.
    """
    i_s = tl.program_id(1)
    o_k = tl.program_id(0) * BK + tl.arange(0, BK)
    o_r = tl.arange(0, R)
    m_k = (o_k < K)[None, :]
    if PARTS == 3:
        p_f = factor + o_r[:, None] * K + o_k[None, :]
        b_f0 = tl.load(p_f, mask=m_k, other=0.0)
        b_f1 = tl.load(p_f + R * K, mask=m_k, other=0.0)
        b_f2 = tl.load(p_f + 2 * R * K, mask=m_k, other=0.0)
    for i_t in tl.range(i_s * TS, tl.minimum(i_s * TS + TS, T), BT, num_stages=STAGES):
        o_t = i_t + tl.arange(0, BT).to(tl.int64)
        m_t = (o_t < T)[:, None]
        acc = tl.zeros([BT, BK], tl.float32)
        if PARTS == 3:
            p_l = low + o_t[:, None] * R + o_r[None, :]
            size = T.to(tl.int64) * R
            b_l0 = tl.load(p_l, mask=m_t, other=0.0)
            b_l1 = tl.load(p_l + size, mask=m_t, other=0.0)
            b_l2 = tl.load(p_l + 2 * size, mask=m_t, other=0.0)
            # Of two sums of parts, the products that fp32 can hold, the smallest first.
            acc = _dot(b_l2, b_f0, acc)
            acc = _dot(b_l1, b_f1, acc)
            acc = _dot(b_l0, b_f2, acc)
            acc = _dot(b_l1, b_f0, acc)
            acc = _dot(b_l0, b_f1, acc)
            acc = _dot(b_l0, b_f0, acc)
        else:
            # Without tensor cores operands are held in registers, so few ranks at a time.
            for i_r in range(0, R, 16):
                o_c = i_r + tl.arange(0, 16)
                b_l = tl.load(low + o_t[:, None] * R + o_c[None, :], mask=m_t, other=0.0)
                b_f = tl.load(factor + o_c[:, None] * K + o_k[None, :], mask=m_k, other=0.0)
                acc = _dot(b_l, b_f, acc)
        acc *= scaling
        o_y = o_t[:, None] * K + o_k[None, :]
        if y is not None:
            acc += tl.load(y + o_y, mask=m_t & m_k, other=0.0).to(tl.float32)
        tl.store(out + o_y, acc.to(out.dtype.element_ty), mask=m_t & m_k)


@triton.jit(do_not_specialize=["T", "TS"])
def gradient_kernel(
    low, x, gradient, T, K, TS, R: tl.constexpr, PARTS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """gradient [S, K, R] = x [T, K] transposed times parts [PARTS, T, R] of low rows, summed over TS rows."""
    i_s = tl.program_id(1)
    o_k = tl.program_id(0) * BK + tl.arange(0, BK)
    o_r = tl.arange(0, R)
    m_k = (o_k < K)[None, :]
    acc = tl.zeros([BK, R], tl.float32)
    for i_t in range(i_s * TS, tl.minimum(i_s * TS + TS, T), BT):
        o_t = i_t + tl.arange(0, BT).to(tl.int64)
        m_t = (o_t < T)[:, None]
        b_x = tl.load(x + o_t[:, None] * K + o_k[None, :], mask=m_t & m_k, other=0.0)
        p_l = low + o_t[:, None] * R + o_r[None, :]
        size = T.to(tl.int64) * R
        acc += _rows_dot(tl.trans(b_x), p_l, size, m_t, tl.zeros([BK, R], tl.float32), PARTS, False)
    o_g = i_s.to(tl.int64) * K + o_k
    tl.store(gradient + o_g[:, None] * R + o_r[None, :], acc, mask=(o_k < K)[:, None])


@triton.jit
def _store_parts(p, size, b, mask, PARTS: tl.constexpr):
    """b as parts at p, each `size` behind the one before."""
    for _ in tl.static_range(PARTS):
        b_part = b.to(p.dtype.element_ty)
        tl.store(p, b_part, mask=mask)
        b -= b_part.to(tl.float32)
        p += size


@triton.jit
def _split(x, parts, K, rank, stride_r, stride_k, R: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr):
    o_r = tl.arange(0, R)[:, None]
    o_k = (tl.program_id(0) * BK + tl.arange(0, BK))[None, :]
    b = tl.load(x + o_r * stride_r + o_k * stride_k, mask=(o_r < rank) & (o_k < K), other=0.0).to(tl.float32)
    _store_parts(parts + o_r * K + o_k, R * K, b, o_k < K, PARTS)


@triton.jit
def split_kernel(
    a, b, a_parts, b_parts, inputs, outputs, rank, R: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Parts [PARTS, R, inputs] of a [rank, inputs], and [PARTS, R, outputs] of b [outputs, rank] transposed.

    Rows from `rank` on are zero.
    """
    if tl.program_id(1) == 0:
        _split(a, a_parts, inputs, rank, inputs, 1, R, PARTS, BK)
    else:
        _split(b, b_parts, outputs, rank, 1, rank, R, PARTS, BK)


@triton.jit(do_not_specialize=["S", "M"])
def split_sums_kernel(
    x, out, S, M, N, stride_s, stride_m, stride_n, scaling, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """out [PARTS, M, N] = parts of scaling * sum over S, in order, of x [S, M, N]."""
    o_m = (tl.program_id(0) * BM + tl.arange(0, BM).to(tl.int64))[:, None]
    o_n = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    m_x = (o_m < M) & (o_n < N)
    p_x = x + o_m * stride_m + o_n.to(tl.int64) * stride_n
    b = tl.zeros([BM, BN], tl.float32)
    for _ in range(S):
        b += tl.load(p_x, mask=m_x, other=0.0)
        p_x += stride_s
    _store_parts(out + o_m * N + o_n, M.to(tl.int64) * N, b * scaling, m_x, PARTS)
