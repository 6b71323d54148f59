"""Triton kernels of the attention residual for Ascend: rows of a program one after the other, BD elements at a time.

Triton-Ascend compiles copies between memory and the buffer of a core, so addresses are a pointer and a number, and the
pointer is known when compiling: loops over sources are unrolled. It takes no tuples of arguments.

Legend: T rows (tokens), J sources v0 to v15 (those from J on are not read), D width, P programs; BJ a power of two that
holds J, BD elements of a tile.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def mixture_fwd_cores_kernel(
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
    score, out, stats_T2J, T, eps, J: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A row is read for its weights, and again (by now from L2) for the mixture. stats_T2J: of every source of a row,
    its logit and 1 / rms."""
    i_p = tl.program_id(0)
    P = tl.num_programs(0)
    o_b = tl.arange(0, BD)
    o_j = tl.arange(0, BJ)
    m_j = o_j < J
    for step in tl.range(0, tl.cdiv(T - i_p, P)):
        i_t = (i_p + step * P).to(tl.int64)
        i_v = i_t * D
        b_square = tl.zeros([BJ], tl.float32)
        b_dot = tl.zeros([BJ], tl.float32)
        for i_d in range(0, D, BD):
            o_d = i_d + o_b
            m_d = o_d < D
            b_c = tl.load(score + o_d, mask=m_d, other=0.0)
            for j in tl.static_range(J):
                p_v = (v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15)[j] + i_v
                b_v = tl.load(p_v + o_d, mask=m_d, other=0.0).to(tl.float32)
                b_square += tl.where(o_j == j, tl.sum(b_v * b_v, axis=0), 0.0)
                b_dot += tl.where(o_j == j, tl.sum(b_v * b_c, axis=0), 0.0)
        b_r = tl.rsqrt(b_square / D + eps)
        b_s = b_dot * b_r
        p_stats = stats_T2J + i_t * (2 * J) + o_j
        tl.store(p_stats, b_s, mask=m_j)
        tl.store(p_stats + J, b_r, mask=m_j)
        b_e = tl.where(m_j, b_s, float("-inf"))
        b_a = tl.exp(b_e - tl.max(b_e, axis=0))
        b_a = b_a / tl.sum(b_a, axis=0)
        for i_d in range(0, D, BD):
            o_d = i_d + o_b
            m_d = o_d < D
            b_o = tl.zeros([BD], tl.float32)
            for j in tl.static_range(J):
                p_v = (v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15)[j] + i_v
                b_v = tl.load(p_v + o_d, mask=m_d, other=0.0).to(tl.float32)
                b_o += tl.sum(tl.where(o_j == j, b_a, 0.0), axis=0) * b_v
            tl.store(out + i_v + o_d, b_o.to(out.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["T"])
def mixture_factors_kernel(
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
    dout, stats_T2J, factors_T3J, T, J: tl.constexpr, BJ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Of every source of a row, what its gradient is made of (mixture_kernels.py): a, b and b s r / D."""
    i_p = tl.program_id(0)
    P = tl.num_programs(0)
    o_b = tl.arange(0, BD)
    o_j = tl.arange(0, BJ)
    m_j = o_j < J
    for step in tl.range(0, tl.cdiv(T - i_p, P)):
        i_t = (i_p + step * P).to(tl.int64)
        i_v = i_t * D
        b_da = tl.zeros([BJ], tl.float32)
        for i_d in range(0, D, BD):
            o_d = i_d + o_b
            m_d = o_d < D
            b_do = tl.load(dout + i_v + o_d, mask=m_d, other=0.0).to(tl.float32)
            for j in tl.static_range(J):
                p_v = (v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15)[j] + i_v
                b_v = tl.load(p_v + o_d, mask=m_d, other=0.0).to(tl.float32)
                b_da += tl.where(o_j == j, tl.sum(b_v * b_do, axis=0), 0.0)
        p_stats = stats_T2J + i_t * (2 * J) + o_j
        b_s = tl.load(p_stats, mask=m_j, other=0.0)
        b_r = tl.load(p_stats + J, mask=m_j, other=0.0)
        b_e = tl.where(m_j, b_s, float("-inf"))
        b_a = tl.exp(b_e - tl.max(b_e, axis=0))
        b_a = b_a / tl.sum(b_a, axis=0)
        b_b = b_a * (b_da - tl.sum(b_a * b_da, axis=0)) * b_r
        p_f = factors_T3J + i_t * (3 * J) + o_j
        tl.store(p_f, b_a, mask=m_j)
        tl.store(p_f + J, b_b, mask=m_j)
        tl.store(p_f + 2 * J, b_b * b_s * b_r / D, mask=m_j)


@triton.jit(do_not_specialize=["T"])
def mixture_bwd_cores_kernel(
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
    d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11, d12, d13, d14, d15,
    dout, score, factors_T3J, dscore_PD, T, J: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The gradients d0 to d15 of the sources, and of the score what the rows of every program add up to."""
    i_p = tl.program_id(0)
    P = tl.num_programs(0)
    o_b = tl.arange(0, BD)
    # All rows for a tile before the next tile: only its sum is held.
    for i_d in range(0, D, BD):
        o_d = i_d + o_b
        m_d = o_d < D
        b_c = tl.load(score + o_d, mask=m_d, other=0.0)
        b_dc = tl.zeros([BD], tl.float32)
        for step in tl.range(0, tl.cdiv(T - i_p, P)):
            i_t = (i_p + step * P).to(tl.int64)
            i_v = i_t * D
            p_f = factors_T3J + i_t * (3 * J)
            b_do = tl.load(dout + i_v + o_d, mask=m_d, other=0.0).to(tl.float32)
            for j in tl.static_range(J):
                p_v = (v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15)[j] + i_v
                b_v = tl.load(p_v + o_d, mask=m_d, other=0.0).to(tl.float32)
                b_b = tl.load(p_f + J + j)
                b_dv = tl.load(p_f + j) * b_do + b_b * b_c - tl.load(p_f + 2 * J + j) * b_v
                b_dc += b_b * b_v
                p_dv = (d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11, d12, d13, d14, d15)[j] + i_v
                tl.store(p_dv + o_d, b_dv.to(p_dv.dtype.element_ty), mask=m_d)
        tl.store(dscore_PD + i_p.to(tl.int64) * D + o_d, b_dc, mask=m_d)
