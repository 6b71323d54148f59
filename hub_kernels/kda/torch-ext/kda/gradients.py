"""Gradients inside the chunks, for all chunks at once, from the states and their gradients at the chunks' borders.

`value_gradients_kernel` takes every product over the value width; `key_gradients_kernel` goes on, channel by channel
of the keys, through scores, decays and norms to q, k and the decay's sums. Between the two go tensors in fp16 and bf16
whose scales are products of those of the operands they come from: nothing has to be measured.

With S the state at a chunk's start, c = u - w S its corrected values, dS and dc their gradients, y = beta (v - k
exp(G) S) and T = (1 + a)^-1, so that c = T y:

    dy = T^T dc,   da = -dy c^T,   dv = beta dy,   d(k exp(G)) = -beta dy S^T,   d attend = do c^T,
    d q_in = do S^T,   d k_out = c dS^T,   d(log decay of the chunk) = sum_v S dS exp(G_end)

Legend: M tokens, N chunks of BT tokens in halves of BC, H heads, K key width, V value width, T tokens of a chunk.
"""

import triton
import triton.language as tl

from .prepare import half_totals
from .scores import (
    INTERPRETED,
    LIFT,
    column_gradients,
    exp2,
    factors,
    product,
    rounded,
    row_gradients,
    split_dots,
    split_dots_sum,
)
from .tiles import (
    BC,
    BT,
    chunk_of,
    load_rows,
    load_scalars,
    read_rows,
    read_scalars,
    read_tile,
    store_rows,
    store_scalars,
    write_rows,
    write_scalars,
)

# Operands are at most 16 and have 128 terms: products are at most 2^15. dy, of 64 terms, is at most 2^10, and its
# products 2^21, which is brought into fp16. Gradients of scores meet factors of up to 2^115 and down to 2^-115: what is
# usual in them is to be near 1, and what is possible with fast decays below 2^11.
DY_SHIFT = tl.constexpr(2.0**-6)
SCORE_SHIFT = tl.constexpr(2.0**-6)


@triton.jit
def in_bf16(x, EXACT: tl.constexpr):
    """x, to be stored in bf16 unless exact: Triton's interpreter would cut bits off instead of rounding."""
    if EXACT or not INTERPRETED:
        return x
    else:
        return rounded(x, 16)


@triton.jit
def _replace(p, x_TD, i_t, i_h, length, M, D: tl.constexpr):
    """Write over what this program has read there."""
    tl.debug_barrier()
    write_rows(p, x_TD, i_t, i_h, length, M, D, 0, BT, D)


@triton.jit
def common_scale(p_scale, i_nh, NV: tl.constexpr):
    """The largest of the scales that the NV programs of a chunk and head gave their values."""
    return tl.max(tl.load(p_scale + i_nh * NV + tl.arange(0, NV)), 0)


@triton.jit
def _ratios(p_scale, i_nh, V: tl.constexpr, NV: tl.constexpr, EXACT: tl.constexpr):
    """The common scale, and [V] by how much each value's is smaller: a power of two."""
    largest = common_scale(p_scale, i_nh, NV)
    ratio = tl.load(p_scale + i_nh * NV + tl.arange(0, V) // (V // NV)) / largest
    return largest, ratio.to(tl.float32 if EXACT else tl.float16)


@triton.jit(do_not_specialize=["M"])
def value_gradients_kernel(
    do,
    v,
    beta,
    inverse,
    chunks,
    q_in,
    dk_in,
    k_out,
    attend,
    keys,
    decay,
    do_scale,
    states,
    states_scale,
    dstates,
    dstates_scale,
    values,
    values_scale,
    dvalues,
    dvalues_scale,
    dv,
    dbeta,
    dtotal,
    dscores,
    own_scores,
    q_dots,
    k_dots,
    M,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    NV: tl.constexpr,
    EXACT: tl.constexpr,
):
    """dv, dbeta, dtotal; the gradients of attend and of the keys' scores; those of q_in and k_out in their places, and
    in dk_in that of -k_in before beta. The last five are not scaled back.

    q_dots, k_dots: products of q and k, of unit length, with their gradients, which the norms' gradients need. They
    are known here, from every product that q or k enters: x . dx = sum y dy if all y are linear in x.
    """
    i_n, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_t, length = chunk_of(chunks, i_n)
    if length == 0:
        return
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, V)
    i_nh = i_n.to(tl.int64) * H + i_h
    span = M.to(tl.int64) * H * BT
    o_vk = i_nh * (K * V) + o_v[:, None] * K + o_k[None, :]
    do_s = common_scale(do_scale, i_nh, NV)
    s_s, s_ratio = _ratios(states_scale, i_nh, V, NV, EXACT)
    ds_s, ds_ratio = _ratios(dstates_scale, i_nh, V, NV, EXACT)
    c_s, c_ratio = _ratios(values_scale, i_nh, V, NV, EXACT)
    dc_s, dc_ratio = _ratios(dvalues_scale, i_nh, V, NV, EXACT)

    b_s = tl.load(states + o_vk) * s_ratio[:, None]
    b_ds = tl.load(dstates + o_vk) * ds_ratio[:, None]
    dtotal_K = tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 0) * (s_s * ds_s) * tl.load(decay + i_nh * K + o_k)
    b_c = read_tile(values, i_t, i_h, length, M, V, 0, BT, V) * c_ratio[None, :]
    tl.store(dtotal + i_nh * K + o_k, dtotal_K)
    b_dx = product(b_c, b_ds, EXACT)
    k_dot = tl.sum(b_dx * read_rows(k_out, i_t, i_h, length, M, K, 0, BT, K), 1) * (c_s * ds_s / LIFT)
    _replace(k_out, b_dx, i_t, i_h, length, M, K)

    b_do = (load_rows(do, i_t, i_h, length, H, V, 0, BT, V) * (1.0 / do_s)).to(b_c.dtype)
    b_dx = product(b_do, b_s, EXACT)
    q_dot = tl.sum(b_dx * read_rows(q_in, i_t, i_h, length, M, K, 0, BT, K), 1) * (do_s * s_s / LIFT)
    _replace(q_in, b_dx, i_t, i_h, length, M, K)

    b_da = tl.where(o_t[:, None] >= o_t[None, :], product(b_do, tl.trans(b_c), EXACT), 0.0)
    # A token's score with itself does not decay: kept apart, it need not cancel in the decay's gradient.
    same = o_t[:, None] == o_t[None, :]
    write_scalars(own_scores, tl.sum(tl.where(same, b_da, 0.0), 1) * (do_s * c_s), i_t, i_h, length, M, BT)
    # One scale for both kinds of scores.
    larger = tl.maximum(do_s, dc_s)
    b_dqk = tl.where(same, 0.0, b_da) * (SCORE_SHIFT * do_s / larger)
    write_rows(dscores, in_bf16(b_dqk, EXACT), i_t, i_h, length, M, BT, 0, BT, BT)
    b_da *= read_rows(attend, i_t, i_h, length, M, BT, 0, BT, BT)
    write_scalars(q_dots, q_dot + tl.sum(b_da, 1) * (do_s * c_s), i_t, i_h, length, M, BT)
    k_dot += tl.sum(b_da, 0) * (do_s * c_s)

    b_dc = read_tile(dvalues, i_t, i_h, length, M, V, 0, BT, V) * dc_ratio[None, :]
    b_inverse = read_tile(inverse, i_t, i_h, length, M, BT, 0, BT, BT)
    b_dy = product(tl.trans(b_inverse), b_dc, EXACT)
    b_beta = tl.sigmoid(load_scalars(beta, i_t, i_h, length, H, BT))
    store_rows(dv, b_dy * (b_beta * dc_s)[:, None], i_t, i_h, length, H, V, 0, BT, V)
    # From (1 + a) c = beta (v - k exp(G) S): beta times its gradient, of which nothing cancels.
    dbeta_own = tl.sum(b_dy * b_c.to(tl.float32), 1) * (dc_s * c_s)
    store_scalars(dbeta, dbeta_own * (1.0 - b_beta), i_t, i_h, length, H, BT)
    b_v = load_rows(v, i_t, i_h, length, H, V, 0, BT, V)
    k_dot += dbeta_own - b_beta * dc_s * tl.sum(b_dy * b_v, 1)

    b_dy = b_dy.to(b_c.dtype)
    write_rows(dk_in, product(b_dy, b_s, EXACT) * DY_SHIFT, i_t, i_h, length, M, K, 0, BT, K)
    b_da = tl.where(o_t[:, None] > o_t[None, :], product(b_dy, tl.trans(b_c), EXACT), 0.0)
    b_dkk = in_bf16(b_da * (-SCORE_SHIFT * dc_s / larger), EXACT)
    write_rows(dscores + span, b_dkk, i_t, i_h, length, M, BT, 0, BT, BT)
    b_da *= read_rows(keys, i_t, i_h, length, M, BT, 0, BT, BT)
    k_dot -= tl.sum(b_da * b_beta[:, None], 0) * (dc_s * c_s)
    write_scalars(k_dots, k_dot, i_t, i_h, length, M, BT)


@triton.jit(do_not_specialize=["M"])
def key_gradients_kernel(
    q,
    k,
    sums,
    dq_in,
    dk_in,
    dk_out,
    dscores,
    beta,
    chunks,
    do_scale,
    states_scale,
    dstates_scale,
    values_scale,
    dvalues_scale,
    q_rstds,
    k_rstds,
    own_scores,
    q_dots,
    k_dots,
    dq,
    dk,
    dlater,
    dearlier,
    M,
    H,
    K: tl.constexpr,
    BK: tl.constexpr,
    NV: tl.constexpr,
    NARROW: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Of half a chunk: dq, dk, and for `gate_gradients_kernel` the gradients of what the decays change."""
    i_c = tl.program_id(0) % 2
    i_nh = (tl.program_id(0) // 2).to(tl.int64)
    i_h = i_nh % H
    i_t1, length = chunk_of(chunks, i_nh // H)
    # This program's half.
    i_t, left = i_t1 + BC * i_c, length - BC * i_c
    i_t2 = i_t1 + BC
    if left <= 0:
        return
    dkeys = dscores + M.to(tl.int64) * H * BT
    do_s, s_s = common_scale(do_scale, i_nh, NV), common_scale(states_scale, i_nh, NV)
    c_s, dc_s = common_scale(values_scale, i_nh, NV), common_scale(dvalues_scale, i_nh, NV)
    q_scale, in_scale = do_s * s_s, dc_s * s_s * (1.0 / DY_SHIFT)
    out_scale = c_s * common_scale(dstates_scale, i_nh, NV)
    score_scale = tl.maximum(do_s, dc_s) * c_s * (1.0 / SCORE_SHIFT)
    q_rstd, k_rstd = read_scalars(q_rstds, i_t, i_h, left, M, BC), read_scalars(k_rstds, i_t, i_h, left, M, BC)
    q_dot, k_dot = read_scalars(q_dots, i_t, i_h, left, M, BC), read_scalars(k_dots, i_t, i_h, left, M, BC)
    own = read_scalars(own_scores, i_t, i_h, left, M, BC)
    b_beta = tl.sigmoid(load_scalars(beta, i_t, i_h, left, H, BC))
    SCALE: tl.constexpr = K**-0.5
    for i_k in tl.range(0, K, BK, disable_licm=True):
        total1, total2 = half_totals(sums, i_t1, i_h, length, M, K, i_k, BK)
        before, after = tl.where(i_c == 0, 0.0, total1), tl.where(i_c == 0, total2, 0.0)
        b_c = read_rows(sums, i_t, i_h, left, M, K, i_k, BC, BK)
        row, column, start, end = factors(b_c, tl.where(i_c == 0, total1, total2), NARROW)
        b_k = load_rows(k, i_t, i_h, left, H, K, i_k, BC, BK) * k_rstd[:, None]

        # As rows; those of the second half also meet the first.
        dqk = read_tile(dscores, i_t, i_h, left, M, BT, BC * i_c, BC, BC)
        dkk = read_tile(dkeys, i_t, i_h, left, M, BT, BC * i_c, BC, BC)
        b_dq, b_drow = row_gradients(dqk, dkk, b_k, b_c, row, column, NARROW, EXACT)
        if i_c == 1:
            k_other = load_rows(k, i_t1, i_h, BC, H, K, i_k, BC, BK)
            k_other *= read_scalars(k_rstds, i_t1, i_h, BC, M, BC)[:, None]
            k_other *= exp2(total1[None, :] - read_rows(sums, i_t1, i_h, BC, M, K, i_k, BC, BK))
            dqk = read_tile(dscores, i_t, i_h, left, M, BT, 0, BC, BC)
            dkk = read_tile(dkeys, i_t, i_h, left, M, BT, 0, BC, BC)
            dq_across, drow_across = split_dots(dqk, dkk, k_other, EXACT)
            b_dq += start * dq_across
            b_drow += start * drow_across
        start *= exp2(before)[None, :]
        b_dq = b_dq * score_scale + start * (read_rows(dq_in, i_t, i_h, left, M, K, i_k, BC, BK) * q_scale)
        b_q = load_rows(q, i_t, i_h, left, H, K, i_k, BC, BK) * (q_rstd * SCALE)[:, None]
        b_dlater = b_q * b_dq
        # b_q is of length SCALE, and q_dot that q's product with its gradient.
        b_dq = (b_dq + own[:, None] * b_k) * SCALE - b_q * (q_dot * (1.0 / SCALE))[:, None]
        store_rows(dq, b_dq * q_rstd[:, None], i_t, i_h, left, H, K, i_k, BC, BK)
        b_drow = b_drow * score_scale - start * (read_rows(dk_in, i_t, i_h, left, M, K, i_k, BC, BK) * in_scale)
        b_drow *= b_beta[:, None]

        # As columns; those of the first half also meet the second.
        dqk = tl.trans(read_tile(dscores, i_t, i_h, left, M, BT, BC * i_c, BC, BC))
        dkk = tl.trans(read_tile(dkeys, i_t, i_h, left, M, BT, BC * i_c, BC, BC))
        b_dcolumn = column_gradients(dqk, dkk, b_q, b_k * b_beta[:, None], b_c, row, column, NARROW, EXACT)
        if i_c == 0:
            fade = exp2(read_rows(sums, i_t2, i_h, length - BC, M, K, i_k, BC, BK))
            q_other = load_rows(q, i_t2, i_h, length - BC, H, K, i_k, BC, BK) * fade
            q_other *= (read_scalars(q_rstds, i_t2, i_h, length - BC, M, BC) * SCALE)[:, None]
            k_other = load_rows(k, i_t2, i_h, length - BC, H, K, i_k, BC, BK) * fade
            k_other *= read_scalars(k_rstds, i_t2, i_h, length - BC, M, BC)[:, None]
            k_other *= tl.sigmoid(load_scalars(beta, i_t2, i_h, length - BC, H, BC))[:, None]
            dqk = tl.trans(read_tile(dscores, i_t2, i_h, length - BC, M, BT, 0, BC, BC))
            dkk = tl.trans(read_tile(dkeys, i_t2, i_h, length - BC, M, BT, 0, BC, BC))
            b_dcolumn += end * split_dots_sum(dqk, dkk, q_other, k_other, EXACT)
        b_dcolumn *= score_scale
        end *= exp2(after)[None, :]
        b_dwrite = read_rows(dk_out, i_t, i_h, left, M, K, i_k, BC, BK) * out_scale
        b_dwrite *= end
        write_rows(dlater, b_dlater + b_k * (b_drow - b_dcolumn), i_t, i_h, left, M, K, i_k, BC, BK)
        write_rows(dearlier, in_bf16(b_k * b_dwrite, EXACT), i_t, i_h, left, M, K, i_k, BC, BK)
        b_dk = b_drow + b_dcolumn + b_dwrite + own[:, None] * b_q
        store_rows(dk, (b_dk - b_k * k_dot[:, None]) * k_rstd[:, None], i_t, i_h, left, H, K, i_k, BC, BK)
