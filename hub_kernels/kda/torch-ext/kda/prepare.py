"""First pass over the chunks: everything of a chunk that needs no state, for all chunks at once.

With G the running sum of the log decay in the chunk, q and k of unit length, a the triangle beta_i k_i.k_j
exp(G_i - G_j) and T = (1 + a)^-1, the recurrence over chunks needs only products with the state S:

    q_in, k_in     q K^-1/2 exp(G) and k exp(G), read the state at the chunk's start
    solve          T beta, makes the values that tokens add of v - k_in S
    attend         q_i.k_j K^-1/2 exp(G_i - G_j), reads the chunk's own values
    k_out, decay   k exp(G_end - G) writes the values, exp(G_end) fades the state

A chunk is worked on as two halves of 32 tokens: of the 64 x 64 scores one quarter is zero, the products of halves are
small enough for the matrix units to take their operands from registers, and more programs run at a time.

Legend: M tokens of all documents, N chunks of BT tokens in halves of BC, H heads, K key width, V value width.
"""

import triton
import triton.language as tl

from .gate import L2_EPS
from .scores import LIFT, exp2, factors, inside_scores, small, small_dot, unit_lower_inverse
from .tiles import (
    BC,
    BQ,
    BT,
    chunk_of,
    first_row,
    load_rows,
    load_scalars,
    read_block,
    read_rows,
    write_block,
    write_rows,
    write_scalars,
)


@triton.jit
def _rstds(q, k, q_rstds, k_rstds, i_t, i_h, length, M, H, K: tl.constexpr, BK: tl.constexpr):
    """1 / sqrt(sum x^2 + eps) of half a chunk's rows of q and k, of q times K^-1/2; 0 for rows that do not exist.

    They are stored, without K^-1/2.
    """
    q_squares = tl.zeros([BC, BK], tl.float32)
    k_squares = tl.zeros([BC, BK], tl.float32)
    for i_k in tl.range(0, K, BK):
        b_q = load_rows(q, i_t, i_h, length, H, K, i_k, BC, BK)
        b_k = load_rows(k, i_t, i_h, length, H, K, i_k, BC, BK)
        q_squares += b_q * b_q
        k_squares += b_k * b_k
    m_t = tl.arange(0, BC) < length
    q_rstd = tl.where(m_t, tl.rsqrt(tl.sum(q_squares, 1) + L2_EPS), 0.0)
    k_rstd = tl.where(m_t, tl.rsqrt(tl.sum(k_squares, 1) + L2_EPS), 0.0)
    write_scalars(q_rstds, q_rstd, i_t, i_h, length, M, BC)
    write_scalars(k_rstds, k_rstd, i_t, i_h, length, M, BC)
    return q_rstd * K**-0.5, k_rstd


@triton.jit
def half_decays(quarters, i_nh, i_c, K: tl.constexpr, i_k, BK: tl.constexpr, NARROW: tl.constexpr):
    """Of a half, [BK]: what `quarters` has for its first and second quarter, and the decay over both."""
    p = quarters + (i_nh * (BT // BQ) + i_c * (BC // BQ)) * K + i_k + tl.arange(0, BK)
    first, second = tl.load(p), tl.load(p + K)
    return first, second, first * second if NARROW else exp2(first + second)


@triton.jit(do_not_specialize=["M"])
def scores_kernel(
    q,
    k,
    sums,
    quarters,
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
    """Of a chunk: q_in, k_in and k_out, LIFT times; attend, decay, the scores of keys (before beta) and the factors of
    unit length."""
    i_nh = tl.program_id(0).to(tl.int64)
    i_h = i_nh % H
    i_t1, length = chunk_of(chunks, i_nh // H)
    if length == 0:
        return
    i_t2, left = i_t1 + BC, length - BC
    q_rstd1, k_rstd1 = _rstds(q, k, q_rstds, k_rstds, i_t1, i_h, length, M, H, K, BK)
    q_rstd2, k_rstd2 = _rstds(q, k, q_rstds, k_rstds, i_t2, i_h, left, M, H, K, BK)
    zeros = tl.zeros([BC, BC], tl.float32)
    qk_11, kk_11, qk_21, kk_21, qk_22, kk_22 = zeros, zeros, zeros, zeros, zeros, zeros
    for i_k in tl.range(0, K, BK, disable_licm=True):
        first1, second1, total1 = half_decays(quarters, i_nh, 0, K, i_k, BK, NARROW)
        first2, second2, total2 = half_decays(quarters, i_nh, 1, K, i_k, BK, NARROW)
        tl.store(decay + i_nh * K + i_k + tl.arange(0, BK), total1 * total2)

        b_c = read_rows(sums, i_t1, i_h, length, M, K, i_k, BC, BK)
        b_q = load_rows(q, i_t1, i_h, length, H, K, i_k, BC, BK) * q_rstd1[:, None]
        b_k = load_rows(k, i_t1, i_h, length, H, K, i_k, BC, BK) * k_rstd1[:, None]
        row, column, into, out = factors(b_c, first1, second1, NARROW)
        p_sums = first_row(sums, i_t1, i_h, M, K, i_k, BK)
        qk_11, kk_11 = inside_scores(b_q, b_k, b_c, row, column, qk_11, kk_11, p_sums, length, K, NARROW, EXACT)
        write_rows(q_in, b_q * row * (into * LIFT)[None, :], i_t1, i_h, length, M, K, i_k, BC, BK)
        write_rows(k_in, b_k * row * (into * LIFT)[None, :], i_t1, i_h, length, M, K, i_k, BC, BK)
        b_k = b_k * column * out[None, :]
        write_rows(k_out, b_k * (total2 * LIFT)[None, :], i_t1, i_h, length, M, K, i_k, BC, BK)
        columns = tl.trans(small(b_k, EXACT))

        b_c = read_rows(sums, i_t2, i_h, left, M, K, i_k, BC, BK)
        b_q = load_rows(q, i_t2, i_h, left, H, K, i_k, BC, BK) * q_rstd2[:, None]
        b_k = load_rows(k, i_t2, i_h, left, H, K, i_k, BC, BK) * k_rstd2[:, None]
        row, column, into, out = factors(b_c, first2, second2, NARROW)
        p_sums = first_row(sums, i_t2, i_h, M, K, i_k, BK)
        qk_22, kk_22 = inside_scores(b_q, b_k, b_c, row, column, qk_22, kk_22, p_sums, left, K, NARROW, EXACT)
        write_rows(k_out, b_k * column * (out * LIFT)[None, :], i_t2, i_h, left, M, K, i_k, BC, BK)
        b_q = b_q * row * into[None, :]
        b_k = b_k * row * into[None, :]
        qk_21 = small_dot(small(b_q, EXACT), columns, qk_21, EXACT)
        kk_21 = small_dot(small(b_k, EXACT), columns, kk_21, EXACT)
        write_rows(q_in, b_q * (total1 * LIFT)[None, :], i_t2, i_h, left, M, K, i_k, BC, BK)
        write_rows(k_in, b_k * (total1 * LIFT)[None, :], i_t2, i_h, left, M, K, i_k, BC, BK)
    o_i, o_j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    write_block(attend, tl.where(o_i >= o_j, qk_11, 0.0), i_t1, i_h, length, M, 0, 0)
    write_block(attend, zeros, i_t1, i_h, length, M, 0, 1)
    write_block(attend, qk_21, i_t1, i_h, length, M, 1, 0)
    write_block(attend, tl.where(o_i >= o_j, qk_22, 0.0), i_t1, i_h, length, M, 1, 1)
    write_block(keys, tl.where(o_i > o_j, kk_11, 0.0), i_t1, i_h, length, M, 0, 0)
    write_block(keys, zeros, i_t1, i_h, length, M, 0, 1)
    write_block(keys, kk_21, i_t1, i_h, length, M, 1, 0)
    write_block(keys, tl.where(o_i > o_j, kk_22, 0.0), i_t1, i_h, length, M, 1, 1)


@triton.jit(do_not_specialize=["M"])
def solve_kernel(beta, chunks, keys, solve, inverse, M, H, BACKWARD: tl.constexpr, EXACT: tl.constexpr):
    """solve: the inverse T times beta, which it applies to its columns; with BACKWARD also the inverse itself."""
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
    zeros = tl.zeros([BC, BC], tl.float32)
    x = small_dot(small(t_22, EXACT), small(a_21, EXACT), zeros, EXACT)
    t_21 = -small_dot(small(x, EXACT), small(t_11, EXACT), zeros, EXACT)
    write_block(solve, t_11 * beta1[None, :], i_t, i_h, length, M, 0, 0)
    write_block(solve, zeros, i_t, i_h, length, M, 0, 1)
    write_block(solve, t_21 * beta1[None, :], i_t, i_h, length, M, 1, 0)
    write_block(solve, t_22 * beta2[None, :], i_t, i_h, length, M, 1, 1)
    if BACKWARD:
        write_block(inverse, t_11, i_t, i_h, length, M, 0, 0)
        write_block(inverse, zeros, i_t, i_h, length, M, 0, 1)
        write_block(inverse, t_21, i_t, i_h, length, M, 1, 0)
        write_block(inverse, t_22, i_t, i_h, length, M, 1, 1)
