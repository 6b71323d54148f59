"""Gradients inside the chunks, for all chunks at once, from the states and their gradients at the chunks' borders.

`value_gradients_kernel` takes every product over the value width; `key_gradients_kernel` goes on, channel by channel
of the keys, through scores, decays and norms to q, k and the gate's inputs. Between the two go tensors in fp16 and bf16
whose scales are products of those of the operands they come from: nothing has to be measured.

With S the state at a chunk's start, y = beta (v - k exp(G) S), c = T y the corrected values with T = (1 + a)^-1, and
dS, dc and dy = T^T dc their gradients:

    da = -dy c^T,   dv = beta dy,   d(k exp(G)) = -beta dy S^T,   d attend = do c^T,
    d q_in = do S^T,   d k_out = c dS^T,   d(log decay of the chunk) = sum_v S dS exp(G_end)

Legend: M tokens, N chunks of BT tokens in halves of BC, H heads, K key width, V value width, T tokens of a chunk.
"""

import triton
import triton.language as tl

from .gate import decay_gradient, decay_rate, gate_inputs
from .prepare import half_decays
from .scores import (
    INTERPRETED,
    LIFT,
    column_gradients,
    factors,
    one_dot,
    one_part,
    product,
    rounded,
    row_gradients,
    split,
    split_dot,
)
from .tiles import (
    BC,
    BT,
    chunk_of,
    first_row,
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

# Operands are at most 16 and have 128 terms: products are at most 2^15. Gradients of scores meet factors of up to 2^115
# and down to 2^-115: what is usual in them is to be near 1, and what is possible with fast decays below 2^11.
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
def _common_scale(p_scale, i_nh, V: tl.constexpr, EXACT: tl.constexpr):
    """The largest of the values' scales, and [V] by how much each one's is smaller: a power of two."""
    scales = tl.load(p_scale + i_nh * V + tl.arange(0, V))
    largest = tl.max(scales, 0)
    return largest, (scales / largest).to(tl.float32 if EXACT else tl.float16)


@triton.jit
def score_units(do_s, dy_s, ds_s, c_s, s_s):
    """Scales of the gradients of both kinds of scores: of do or dy, and of c.

    Products with the states and their gradients become multiples of these: they are kept from being far smaller.
    """
    return tl.maximum(tl.maximum(do_s, dy_s), ds_s * 2.0**-60), tl.maximum(c_s, s_s * 2.0**-60)


@triton.jit
def store_ratios(p, do_s, dy_s, ds_s, c_s, s_s):
    """The unit of the scores' gradients and, in such units, those of dq_in, dk_in and dk_out."""
    larger, unit_s = score_units(do_s, dy_s, ds_s, c_s, s_s)
    tl.store(p, larger * unit_s * (1.0 / SCORE_SHIFT))
    tl.store(p + 1, (do_s / larger) * (s_s / unit_s) * SCORE_SHIFT)
    tl.store(p + 2, (dy_s / larger) * (s_s / unit_s) * SCORE_SHIFT)
    tl.store(p + 3, c_s / unit_s * (ds_s / larger) * SCORE_SHIFT)


@triton.jit(do_not_specialize=["M"])
def value_gradients_kernel(
    do,
    v,
    beta,
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
    ratios,
    M,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    EXACT: tl.constexpr,
):
    """dv, dbeta, dtotal; the gradients of attend and of the keys' scores; those of q_in and k_out in their places, and
    in dk_in that of -k_in before beta. The last five are not scaled back: ratios [N, H, 4] are the unit of the scores'
    gradients and, in such units, those of dq_in, dk_in and dk_out.

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
    do_s, _ = _common_scale(do_scale, i_nh, V, EXACT)
    s_s, s_ratio = _common_scale(states_scale, i_nh, V, EXACT)
    ds_s, ds_ratio = _common_scale(dstates_scale, i_nh, V, EXACT)
    c_s, c_ratio = _common_scale(values_scale, i_nh, V, EXACT)
    dy_s, dy_ratio = _common_scale(dvalues_scale, i_nh, V, EXACT)
    larger, unit_s = score_units(do_s, dy_s, ds_s, c_s, s_s)
    store_ratios(ratios + 4 * i_nh, do_s, dy_s, ds_s, c_s, s_s)

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
    b_dqk = tl.where(same, 0.0, b_da) * (SCORE_SHIFT * (do_s / larger) * (c_s / unit_s))
    write_rows(dscores, in_bf16(b_dqk, EXACT), i_t, i_h, length, M, BT, 0, BT, BT)
    b_da *= read_rows(attend, i_t, i_h, length, M, BT, 0, BT, BT)
    write_scalars(q_dots, q_dot + tl.sum(b_da, 1) * (do_s * c_s), i_t, i_h, length, M, BT)
    k_dot += tl.sum(b_da, 0) * (do_s * c_s)

    b_dy = read_tile(dvalues, i_t, i_h, length, M, V, 0, BT, V) * dy_ratio[None, :]
    wide_dy = b_dy.to(tl.float32)
    b_beta = read_scalars(beta, i_t, i_h, length, M, BT)
    store_rows(dv, wide_dy * (b_beta * dy_s)[:, None], i_t, i_h, length, H, V, 0, BT, V)
    # From (1 + a) c = beta (v - k exp(G) S): beta times its gradient, of which nothing cancels.
    dbeta_own = tl.sum(wide_dy * b_c.to(tl.float32), 1) * (dy_s * c_s)
    store_scalars(dbeta, dbeta_own * (1.0 - b_beta), i_t, i_h, length, H, BT)
    b_v = load_rows(v, i_t, i_h, length, H, V, 0, BT, V)
    k_dot += dbeta_own - b_beta * dy_s * tl.sum(wide_dy * b_v, 1)

    write_rows(dk_in, product(b_dy, b_s, EXACT), i_t, i_h, length, M, K, 0, BT, K)
    b_da = tl.where(o_t[:, None] > o_t[None, :], product(b_dy, tl.trans(b_c), EXACT), 0.0)
    b_dkk = in_bf16(b_da * (-SCORE_SHIFT * (dy_s / larger) * (c_s / unit_s)), EXACT)
    write_rows(dscores + span, b_dkk, i_t, i_h, length, M, BT, 0, BT, BT)
    b_da *= read_rows(keys, i_t, i_h, length, M, BT, 0, BT, BT)
    k_dot -= tl.sum(b_da * b_beta[:, None], 0) * (dy_s * c_s)
    write_scalars(k_dots, k_dot, i_t, i_h, length, M, BT)


@triton.jit
def _decay_sums(high_1, low_1, earlier_1, high_2, low_2, earlier_2, unit, EXACT: tl.constexpr):
    """Of a chunk in two halves, [BC, BK] each, multiples of unit: sums of `later`, in two parts, from each token to the
    end, and of `earlier` up to the token before.

    Products with triangles of units, which are powers of two. What `later` holds cancels, pair by pair of tokens: it
    has as many parts as the operands that it comes from.
    """
    o_i, o_j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    units, zeros = one_part(tl.zeros([BC, BC], tl.float32) + unit, EXACT), tl.zeros(high_1.shape, tl.float32)
    from_here = one_part(tl.where(o_i <= o_j, unit, 0.0), EXACT)
    before = one_part(tl.where(o_i > o_j, unit, 0.0), EXACT)
    sums_1 = split_dot(from_here, high_1, low_1, split_dot(units, high_2, low_2, zeros, EXACT), EXACT)
    sums_2 = one_dot(units, earlier_1, split_dot(from_here, high_2, low_2, zeros, EXACT), EXACT)
    return one_dot(before, earlier_1, sums_1, EXACT), one_dot(before, earlier_2, sums_2, EXACT)


@triton.jit
def _unit_rows(p, p_rstds, i_t, i_h, length, M, H, K: tl.constexpr, i_k, BK: tl.constexpr):
    """Rows of unit length, [BC, BK]."""
    b_x = load_rows(p, i_t, i_h, length, H, K, i_k, BC, BK)
    return b_x * read_scalars(p_rstds, i_t, i_h, length, M, BC)[:, None]


@triton.jit(do_not_specialize=["M"])
def key_gradients_kernel(
    q,
    k,
    f,
    sums,
    quarters,
    A_log,
    dt_bias,
    dq_in,
    dk_in,
    dk_out,
    dscores,
    beta,
    chunks,
    ratios,
    q_rstds,
    k_rstds,
    own_scores,
    q_dots,
    k_dots,
    dtotal,
    dq,
    dk,
    df,
    ddt_bias,
    dA_log,
    lower_bound,
    M,
    H,
    K: tl.constexpr,
    BK: tl.constexpr,
    BOUNDED: tl.constexpr,
    NARROW: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Of BK channels of a chunk: dq, dk, df, and its share of d dt_bias [N, H, K] and d A_log [N, H, K / BK].

    What depends on the decay of several tokens has one gradient for all of them: `later` is, token by token, what
    depends on the decay of the chunk up to that token, `earlier` on that of all tokens behind it, and `dtotal`
    [N, H, K] on that of the whole chunk. Sums of their own, from both ends, are of what is large only where the result
    is: taking one from a total would leave the digits that cancel.
    """
    i_k = tl.program_id(0) % (K // BK) * BK
    i_nh = (tl.program_id(0) // (K // BK)).to(tl.int64)
    i_h = i_nh % H
    i_t1, length = chunk_of(chunks, i_nh // H)
    o_k = i_k + tl.arange(0, BK)
    if length == 0:
        tl.store(ddt_bias + i_nh * K + o_k, tl.zeros([BK], tl.float32))
        tl.store(dA_log + tl.program_id(0), 0.0)
        return
    dkeys = dscores + M.to(tl.int64) * H * BT
    # Gradients are multiples of that of the scores.
    unit, q_ratio = tl.load(ratios + 4 * i_nh), tl.load(ratios + 4 * i_nh + 1)
    in_ratio, out_ratio = tl.load(ratios + 4 * i_nh + 2), tl.load(ratios + 4 * i_nh + 3)
    SCALE: tl.constexpr = K**-0.5
    first1, second1, total1 = half_decays(quarters, i_nh, 0, K, i_k, BK, NARROW)
    first2, second2, total2 = half_decays(quarters, i_nh, 1, K, i_k, BK, NARROW)

    across = tl.zeros([BC, BK], tl.float32)
    for i_c in tl.static_range(1, -1, -1):
        i_t, left = i_t1 + BC * i_c, length - BC * i_c
        if i_c == 1:
            # Rows of the second half meet columns of the first.
            b_c = read_rows(sums, i_t1, i_h, length, M, K, i_k, BC, BK)
            row, column, into, out = factors(b_c, first1, second1, NARROW)
            high, low = split(_unit_rows(k, k_rstds, i_t1, i_h, length, M, H, K, i_k, BK) * column, EXACT)
            dqk = read_tile(dscores, i_t, i_h, left, M, BT, 0, BC, BC)
            dkk = read_tile(dkeys, i_t, i_h, left, M, BT, 0, BC, BC)
            b_dq = split_dot(dqk, high, low, across, EXACT) * out[None, :]
            b_drow = split_dot(dkk, high, low, across, EXACT) * out[None, :]
            b_dq += read_rows(dq_in, i_t, i_h, left, M, K, i_k, BC, BK) * (q_ratio * total1)[None, :]
            b_drow -= read_rows(dk_in, i_t, i_h, left, M, K, i_k, BC, BK) * (in_ratio * total1)[None, :]
        else:
            b_dq = read_rows(dq_in, i_t, i_h, left, M, K, i_k, BC, BK) * q_ratio
            b_drow = read_rows(dk_in, i_t, i_h, left, M, K, i_k, BC, BK) * -in_ratio
        first, second = (first1, second1) if i_c == 0 else (first2, second2)
        q_rstd, k_rstd = read_scalars(q_rstds, i_t, i_h, left, M, BC), read_scalars(k_rstds, i_t, i_h, left, M, BC)
        own = read_scalars(own_scores, i_t, i_h, left, M, BC)
        b_beta = tl.sigmoid(load_scalars(beta, i_t, i_h, left, H, BC))
        b_k = load_rows(k, i_t, i_h, left, H, K, i_k, BC, BK) * k_rstd[:, None]
        b_c = read_rows(sums, i_t, i_h, left, M, K, i_k, BC, BK)
        row, column, into, out = factors(b_c, first, second, NARROW)

        # As rows.
        start = row * into[None, :]
        high, low = split(b_k * column, EXACT)
        dqk = read_tile(dscores, i_t, i_h, left, M, BT, BC * i_c, BC, BC)
        dkk = read_tile(dkeys, i_t, i_h, left, M, BT, BC * i_c, BC, BC)
        p_sums = first_row(sums, i_t, i_h, M, K, i_k, BK)
        dq_inside, drow_inside = row_gradients(
            dqk, dkk, b_k, b_c, row, high, low, p_sums, left, K, NARROW, EXACT
        )  # fmt: skip
        b_dq = start * b_dq + dq_inside
        b_drow = (start * b_drow + drow_inside) * b_beta[:, None]
        b_q = load_rows(q, i_t, i_h, left, H, K, i_k, BC, BK) * (q_rstd * SCALE)[:, None]
        b_dlater = b_q * b_dq
        # b_q is of length SCALE, and q_dot that q's product with its gradient.
        b_dq = b_dq * (unit * SCALE * q_rstd)[:, None] + b_k * (own * SCALE * q_rstd)[:, None]
        q_dot = read_scalars(q_dots, i_t, i_h, left, M, BC)
        b_dq -= b_q * (q_dot * q_rstd * (1.0 / SCALE))[:, None]
        store_rows(dq, b_dq, i_t, i_h, left, H, K, i_k, BC, BK)

        # As columns; those of the first half also meet rows of the second.
        b_kb = b_k * b_beta[:, None]
        q_high, q_low = split(b_q * row, EXACT)
        k_high, k_low = split(b_kb * row, EXACT)
        dqk = tl.trans(read_tile(dscores, i_t, i_h, left, M, BT, BC * i_c, BC, BC))
        dkk = tl.trans(read_tile(dkeys, i_t, i_h, left, M, BT, BC * i_c, BC, BC))
        b_dk = column_gradients(
            dqk, dkk, b_q, b_kb, b_c, column, q_high, q_low, k_high, k_low, p_sums, left, K, NARROW, EXACT
        )  # fmt: skip
        end = column * out[None, :]
        b_dwrite = read_rows(dk_out, i_t, i_h, left, M, K, i_k, BC, BK)
        if i_c == 1:
            dqk = tl.trans(read_tile(dscores, i_t, i_h, left, M, BT, 0, BC, BC))
            dkk = tl.trans(read_tile(dkeys, i_t, i_h, left, M, BT, 0, BC, BC))
            across = split_dot(dqk, q_high, q_low, across, EXACT)
            across = split_dot(dkk, k_high, k_low, across, EXACT) * into[None, :]
            b_dwrite *= end * out_ratio
        else:
            b_dk += end * across
            b_dwrite *= end * (out_ratio * total2)[None, :]
        b_dlater += b_k * (b_drow - b_dk)
        b_dearlier = b_k * b_dwrite
        b_dk += b_drow + b_dwrite
        k_dot = read_scalars(k_dots, i_t, i_h, left, M, BC)
        b_dk = b_dk * (unit * k_rstd)[:, None] + b_q * (own * k_rstd)[:, None] - b_k * (k_dot * k_rstd)[:, None]
        store_rows(dk, b_dk, i_t, i_h, left, H, K, i_k, BC, BK)
        later_high, later_low = split(b_dlater, EXACT)
        earlier = one_part(in_bf16(b_dearlier, EXACT), EXACT)
        if i_c == 1:
            later_high2, later_low2, earlier2 = later_high, later_low, earlier

    rate = decay_rate(A_log, i_h)
    dg_1, dg_2 = _decay_sums(later_high, later_low, earlier, later_high2, later_low2, earlier2, unit, EXACT)
    b_total = tl.load(dtotal + i_nh * K + o_k)
    b_bias, b_A = tl.zeros([BK], tl.float32), tl.zeros([BC], tl.float32)
    for i_c in tl.static_range(2):
        i_t, left = i_t1 + BC * i_c, length - BC * i_c
        dg = (dg_1 if i_c == 0 else dg_2) + b_total[None, :]
        b_z = gate_inputs(f, dt_bias, i_t, i_h, left, H, K, i_k, BK)
        dz, dA = decay_gradient(dg, b_z, rate, lower_bound, tl.arange(0, BC) < left, BOUNDED)
        store_rows(df, dz, i_t, i_h, left, H, K, i_k, BC, BK)
        b_bias += tl.sum(dz, 0)
        b_A += tl.sum(dA, 1)
    tl.store(ddt_bias + i_nh * K + o_k, b_bias)
    tl.store(dA_log + tl.program_id(0), tl.sum(b_A))
