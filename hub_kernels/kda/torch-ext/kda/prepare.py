"""First pass over the chunks: everything of a chunk that needs no state, for all chunks at once.

With G the running sum of the log decay in the chunk, q and k of unit length, a the triangle beta_i k_i.k_j
exp(G_i - G_j) and T = (1 + a)^-1, the recurrence over chunks needs only products with the state S:

    u - w S        the corrected values, u = T (beta v), w = T (beta k exp(G))
    q_in           q K^-1/2 exp(G), reads the state at the chunk's start
    attend         q_i.k_j K^-1/2 exp(G_i - G_j), reads the chunk's own values
    k_out, decay   k exp(G_end - G) writes the values, exp(G_end) fades the state

A chunk is worked on as two halves of 32 tokens: of the 64 x 64 scores one quarter is zero, the products of halves are
small enough for the matrix units to take their operands from registers, and more programs run at a time.

Legend: M tokens of all documents, N chunks of BT tokens in halves of BC, H heads, K key width, V value width.
"""

import triton
import triton.language as tl

from .gate import L2_EPS
from .scores import LIFT, exp2, factors, inside_scores, magnitude, scaled, small, small_dot, unit_lower_inverse
from .tiles import (
    BC,
    BT,
    chunk_of,
    load_rows,
    load_scalars,
    read_block,
    read_rows,
    read_tile,
    write_block,
    write_rows,
    write_scalars,
)


@triton.jit
def _rstd_rows(p, i_t, i_h, length, H, K: tl.constexpr):
    """1 / sqrt(sum x^2 + eps) of half a chunk's rows; 0 for rows that do not exist."""
    b_x = load_rows(p, i_t, i_h, length, H, K, 0, BC, K)
    return tl.where(tl.arange(0, BC) < length, tl.rsqrt(tl.sum(b_x * b_x, 1) + L2_EPS), 0.0)


@triton.jit
def half_totals(sums, i_t, i_h, length, M, K: tl.constexpr, i_k, BK: tl.constexpr):
    """The log decay over each half of a chunk, [BK]: its sum at the last token."""
    first = read_tile(sums, i_t + tl.minimum(length, BC) - 1, i_h, 1, M, K, i_k, 1, BK)
    second = read_tile(sums, i_t + length - 1, i_h, length - BC, M, K, i_k, 1, BK)
    return tl.reshape(first, (BK,)), tl.reshape(second, (BK,))


@triton.jit(do_not_specialize=["M"])
def scores_kernel(
    q,
    k,
    sums,
    chunks,
    q_in,
    k_in,
    k_out,
    attend,
    keys,
    decay,
    q_rstds,
    k_rstds,
    M,
    H,
    K: tl.constexpr,
    BK: tl.constexpr,
    NARROW: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Of half a chunk: q_in, k_in and k_out, LIFT times; attend, decay, the scores of keys (before beta) and the
    factors of unit length."""
    i_c = tl.program_id(0) % 2
    i_nh = (tl.program_id(0) // 2).to(tl.int64)
    i_h = i_nh % H
    i_t1, length = chunk_of(chunks, i_nh // H)
    # This program's half: its first token and number of tokens.
    i_t, left = i_t1 + BC * i_c, length - BC * i_c
    if left <= 0:
        return
    q_rstd = _rstd_rows(q, i_t, i_h, left, H, K)
    k_rstd = _rstd_rows(k, i_t, i_h, left, H, K)
    write_scalars(q_rstds, q_rstd, i_t, i_h, left, M, BC)
    write_scalars(k_rstds, k_rstd, i_t, i_h, left, M, BC)
    q_rstd *= K**-0.5
    k_rstd1 = k_rstd
    if i_c == 1:
        k_rstd1 = _rstd_rows(k, i_t1, i_h, BC, H, K)
    qk = tl.zeros([BC, BC], tl.float32)
    kk, qk_across, kk_across = qk, qk, qk
    for i_k in tl.range(0, K, BK, disable_licm=True):
        total1, total2 = half_totals(sums, i_t1, i_h, length, M, K, i_k, BK)
        if i_c == 0:
            total, before, after = total1, tl.zeros_like(total1), total2
            tl.store(decay + i_nh * K + i_k + tl.arange(0, BK), exp2(total1 + total2))
        else:
            total, before, after = total2, total1, tl.zeros_like(total1)
        b_c = read_rows(sums, i_t, i_h, left, M, K, i_k, BC, BK)
        row, column, start, end = factors(b_c, total, NARROW)
        b_q = load_rows(q, i_t, i_h, left, H, K, i_k, BC, BK) * q_rstd[:, None]
        b_k = load_rows(k, i_t, i_h, left, H, K, i_k, BC, BK) * k_rstd[:, None]
        qk_inside, kk_inside = inside_scores(b_q, b_k, b_c, row, column, NARROW, EXACT)
        qk += qk_inside
        kk += kk_inside
        write_rows(k_out, b_k * (end * (exp2(after) * LIFT)[None, :]), i_t, i_h, left, M, K, i_k, BC, BK)
        b_q *= start
        b_k *= start
        before = (exp2(before) * LIFT)[None, :]
        write_rows(q_in, b_q * before, i_t, i_h, left, M, K, i_k, BC, BK)
        write_rows(k_in, b_k * before, i_t, i_h, left, M, K, i_k, BC, BK)
        if i_c == 1:
            end = exp2(total1[None, :] - read_rows(sums, i_t1, i_h, BC, M, K, i_k, BC, BK))
            b_k1 = load_rows(k, i_t1, i_h, BC, H, K, i_k, BC, BK) * k_rstd1[:, None]
            columns = tl.trans(small(b_k1 * end, EXACT))
            qk_across += small_dot(small(b_q, EXACT), columns, EXACT)
            kk_across += small_dot(small(b_k, EXACT), columns, EXACT)
    o_i, o_j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    qk, kk = tl.where(o_i >= o_j, qk, 0.0), tl.where(o_i > o_j, kk, 0.0)
    # The other block of these rows: zeros behind the first half's own.
    write_rows(attend, qk, i_t, i_h, left, M, BT, BC * i_c, BC, BC)
    write_rows(attend, qk_across, i_t, i_h, left, M, BT, BC - BC * i_c, BC, BC)
    write_rows(keys, kk, i_t, i_h, left, M, BT, BC * i_c, BC, BC)
    write_rows(keys, kk_across, i_t, i_h, left, M, BT, BC - BC * i_c, BC, BC)


@triton.jit(do_not_specialize=["M"])
def solve_kernel(
    v,
    beta,
    chunks,
    k_in,
    keys,
    w,
    u,
    u_scale,
    inverse,
    M,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BACKWARD: tl.constexpr,
    EXACT: tl.constexpr,
):
    """w, LIFT times, u with a scale per chunk, and with BACKWARD the inverse."""
    i_n, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_t, length = chunk_of(chunks, i_n)
    if length == 0:
        return
    i_t2, left = i_t + BC, length - BC
    beta1 = tl.sigmoid(load_scalars(beta, i_t, i_h, length, H, BC))
    beta2 = tl.sigmoid(load_scalars(beta, i_t2, i_h, left, H, BC))
    a_11 = read_block(keys, i_t, i_h, length, M, 0, 0).to(tl.float32) * beta1[:, None]
    a_21 = read_block(keys, i_t, i_h, length, M, 1, 0).to(tl.float32) * beta2[:, None]
    a_22 = read_block(keys, i_t, i_h, length, M, 1, 1).to(tl.float32) * beta2[:, None]
    t_11, t_22 = unit_lower_inverse(a_11, EXACT), unit_lower_inverse(a_22, EXACT)
    x = small_dot(small(t_22, EXACT), small(a_21, EXACT), EXACT)
    t_21 = -small_dot(small(x, EXACT), small(t_11, EXACT), EXACT)
    if BACKWARD:
        write_block(inverse, t_11, i_t, i_h, length, M, 0, 0)
        write_block(inverse, tl.zeros([BC, BC], tl.float32), i_t, i_h, length, M, 0, 1)
        write_block(inverse, t_21, i_t, i_h, length, M, 1, 0)
        write_block(inverse, t_22, i_t, i_h, length, M, 1, 1)
    # Beta multiplies the columns of the inverse instead of the rows of k and v.
    t_11, t_21 = small(t_11 * beta1[None, :], EXACT), small(t_21 * beta1[None, :], EXACT)
    t_22 = small(t_22 * beta2[None, :], EXACT)
    b_k1 = read_tile(k_in, i_t, i_h, length, M, K, 0, BC, K)
    write_rows(w, small_dot(t_11, b_k1, EXACT), i_t, i_h, length, M, K, 0, BC, K)
    b_w2 = small_dot(t_21, b_k1, EXACT) + small_dot(t_22, read_tile(k_in, i_t2, i_h, left, M, K, 0, BC, K), EXACT)
    write_rows(w, b_w2, i_t2, i_h, left, M, K, 0, BC, K)
    b_v1, b_v2 = load_rows(v, i_t, i_h, length, H, V, 0, BC, V), load_rows(v, i_t2, i_h, left, H, V, 0, BC, V)
    largest = tl.maximum(magnitude(b_v1), magnitude(b_v2))
    x_1, scale = scaled(b_v1, largest, EXACT)
    x_2, scale = scaled(b_v2, largest, EXACT)
    tl.store(u_scale + i_n.to(tl.int64) * H + i_h, scale)
    # No element of the inverse exceeds 1: see recurrence.py on what is scaled.
    write_rows(u, small_dot(t_11, x_1, EXACT), i_t, i_h, length, M, V, 0, BC, V)
    write_rows(u, small_dot(t_21, x_1, EXACT) + small_dot(t_22, x_2, EXACT), i_t2, i_h, left, M, V, 0, BC, V)
