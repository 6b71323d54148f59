"""Triton kernels of the attention residual: persistent programs walk over rows, one source after the other.

Steps over (row, source) form one loop, so that copies into shared memory run ahead across rows. Sources are separate
tensors: their pointers are kernel arguments, chosen by a chain of selects. A table of pointers in device memory would
need a copy per call, which a CUDA graph would replay from host memory that has changed since.

Legend: T rows (tokens), J sources, D width, P programs; BJ, BD powers of two that hold J and D.
"""

import triton
import triton.language as tl


@triton.jit
def _choose(pointers, i, N: tl.constexpr):
    p = pointers[0]
    for k in tl.static_range(1, N):
        p = tl.where(i == k, pointers[k], p)
    return p


@triton.jit
def _add2(a, b, x, y):
    return a + x, b + y


@triton.jit(do_not_specialize=["T"])
def mixture_fwd_kernel(
    sources, score, out, stats_T2J, T, eps, J: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr
):
    """stats_T2J keeps, of every source of a row, its logit and 1 / rms."""
    i_p = tl.program_id(0)
    P = tl.num_programs(0)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_c = tl.load(score + o_d, mask=m_d, other=0.0)
    # Of the row at hand: sources met, running maximum and sum of its softmax, mixture in units of exp(maximum).
    i_t = i_p
    i_j = 0
    b_m = float("-inf")
    b_l = 0.0
    b_o = tl.zeros([BD], tl.float32)
    for step in tl.range(0, tl.cdiv(T - i_p, P) * J, num_stages=STAGES):
        # Copies run ahead of the row at hand, so they count for themselves.
        p_v = _choose(sources, step % J, J) + (i_p + step // J * P).to(tl.int64) * D
        b_v = tl.load(p_v + o_d, mask=m_d, other=0.0).to(tl.float32)
        # Nothing new, but the compiler sees which registers are zero for every thread and drops their arithmetic.
        b_v = tl.where(m_d, b_v, 0.0)
        b_square, b_dot = tl.reduce((b_v * b_v, b_v * b_c), 0, _add2)
        b_r = tl.rsqrt(b_square / D + eps)
        b_s = b_dot * b_r
        p_stats = stats_T2J + i_t.to(tl.int64) * (2 * J) + i_j
        tl.store(p_stats, b_s)
        tl.store(p_stats + J, b_r)
        b_max = tl.maximum(b_m, b_s)
        b_old = tl.exp(b_m - b_max)
        b_new = tl.exp(b_s - b_max)
        b_m = b_max
        b_l = b_l * b_old + b_new
        b_o = b_o * b_old + b_new * b_v
        i_j += 1
        if i_j == J:
            tl.store(out + i_t.to(tl.int64) * D + o_d, (b_o / b_l).to(out.dtype.element_ty), mask=m_d)
            i_t += P
            i_j = 0
            b_m = float("-inf")
            b_l = 0.0
            b_o = tl.zeros([BD], tl.float32)


@triton.jit(do_not_specialize=["T"])
def mixture_bwd_kernel(
    streams,
    score,
    stats_T2J,
    dsources,
    dscore_PD,
    T,
    J: tl.constexpr,
    BJ: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """streams: the gradient of the output, then the sources. A row takes 2 J + 1 steps: its gradient, every source for
    the gradient of its weight, and every source again (by now in L2) for its own gradient

        dV_j = a_j dout + b_j score - b_j s_j r_j / D V_j,    b_j = a_j (<dout, V_j> - sum_k a_k <dout, V_k>) r_j,

    a the weights, s the logits, r = 1 / rms; the gradient of the score is the sum of b_j V_j over sources and rows.
    """
    i_p = tl.program_id(0)
    P = tl.num_programs(0)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_j = tl.arange(0, BJ)
    m_j = o_j < J
    b_dc = tl.zeros([BD], tl.float32)
    # Of the row at hand: steps made, gradient of its output; of its sources: logit, 1 / rms, <dout, V>, a and b.
    i_t = i_p
    i_s = 0
    b_do = tl.zeros([BD], tl.float32)
    b_s = tl.zeros([BJ], tl.float32)
    b_r = tl.zeros([BJ], tl.float32)
    b_da = tl.zeros([BJ], tl.float32)
    b_a = tl.zeros([BJ], tl.float32)
    b_b = tl.zeros([BJ], tl.float32)
    for step in tl.range(0, tl.cdiv(T - i_p, P) * (2 * J + 1), num_stages=STAGES):
        # Copies run ahead of the row at hand, so they count for themselves.
        i_x = step % (2 * J + 1)
        p_x = _choose(streams, tl.where(i_x > J, i_x - J, i_x), J + 1)
        p_x += (i_p + step // (2 * J + 1) * P).to(tl.int64) * D
        b_x = tl.load(p_x + o_d, mask=m_d, other=0.0).to(tl.float32)
        # Nothing new, but the compiler sees which registers are zero for every thread and drops their arithmetic.
        b_x = tl.where(m_d, b_x, 0.0)
        if i_s == 0:
            b_do = b_x
            p_stats = stats_T2J + i_t.to(tl.int64) * (2 * J) + o_j
            b_s = tl.load(p_stats, mask=m_j, other=0.0)
            b_r = tl.load(p_stats + J, mask=m_j, other=0.0)
        elif i_s <= J:
            b_da = tl.where(o_j == i_s - 1, tl.sum(b_x * b_do, axis=0), b_da)
            if i_s == J:
                b_e = tl.where(m_j, b_s, float("-inf"))
                b_a = tl.exp(b_e - tl.max(b_e, axis=0))
                b_a = b_a / tl.sum(b_a, axis=0)
                b_b = b_a * (b_da - tl.sum(b_a * b_da, axis=0)) * b_r
        else:
            m_i = o_j == i_s - 1 - J
            b_ai = tl.sum(tl.where(m_i, b_a, 0.0), axis=0)
            b_bi = tl.sum(tl.where(m_i, b_b, 0.0), axis=0)
            b_ci = tl.sum(tl.where(m_i, b_b * b_s * b_r, 0.0), axis=0) / D
            # From L1 every time: it would cost a quarter of the registers.
            b_c = tl.load(score + o_d, mask=m_d, other=0.0)
            b_dv = b_ai * b_do + b_bi * b_c - b_ci * b_x
            b_dc += b_bi * b_x
            p_dv = _choose(dsources, i_s - 1 - J, J) + i_t.to(tl.int64) * D
            # Streamed, so that the sources stay in L2 until they are read again.
            tl.store(p_dv + o_d, b_dv.to(p_dv.dtype.element_ty), mask=m_d, cache_modifier=".cs")
        i_s += 1
        if i_s == 2 * J + 1:
            i_t += P
            i_s = 0
    tl.store(dscore_PD + i_p.to(tl.int64) * D + o_d, b_dc, mask=m_d)
