"""Gradients inside the chunks, for all chunks at once, from the states and their gradients at the chunks' borders.

`value_gradients_kernel` takes every product over the value width; `key_gradients_kernel` goes on, channel by channel
of the keys, through scores, decays, gate and norms to the raw inputs. Between the two go [M, H, K] tensors in fp16
with a scale per row.

With S the state at a chunk's start, c = u - w S its corrected values, dS and dc their gradients, y = beta (v - k
exp(G) S) and T = (1 + a)^-1, so that c = T y:

    dy = T^T dc,   da = -dy c^T,   dv = beta dy,   d(k exp(G)) = -beta dy S^T,   d attend = do c^T,
    d q_in = do S^T,   d k_out = c dS^T,   d decay = sum_v S dS

Legend: M tokens, N chunks of BT tokens, H heads, K key width, V value width, T tokens of a chunk.
"""

import triton
import triton.language as tl

from .gate import decay_gradient
from .prepare import chunk_of, decays, load_rows, load_scalars, load_tile, offsets, store_rows, store_scalars
from .scores import BC, BT, column_gradients, product, rounded, row_gradients, scaled_rows, sums_to_end


@triton.jit
def _score(x_TT, EXACT: tl.constexpr):
    """x, rounded to the 8 bits of bf16 unless exact (Triton's interpreter would cut the others off)."""
    if EXACT:
        return x_TT
    else:
        return rounded(x_TT, 16)


@triton.jit
def replace_scaled(p, p_scale, x_TD, i_t, i_h, length, H, D: tl.constexpr, EXACT: tl.constexpr):
    """Store rows with a scale each over what this program has read there."""
    tl.debug_barrier()
    b_x, scale = scaled_rows(x_TD, EXACT)
    store_rows(p, b_x, i_t, i_h, length, H, D, 0, D)
    store_scalars(p_scale, scale, i_t, i_h, length, H)


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
    ddecay,
    row_scales,
    dscores,
    own_scores,
    q_dots,
    k_dots,
    M,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    EXACT: tl.constexpr,
):
    """dv, dbeta; the gradients of attend and of the keys' scores; those of q_in and k_out in their places, and
    in dk_in that of -k_in before beta.

    q_dots, k_dots: products of q and k, of unit length, with their gradients, which the norms' gradients need. They
    are known here, from every product that q or k enters: x . dx = sum y dy if all y are linear in x.
    """
    i_n, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_t, length = chunk_of(chunks, i_n)
    if length == 0:
        return
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, V)
    i_nh = i_n.to(tl.int64) * H + i_h
    span = M.to(tl.int64) * H
    o_vk = o_v[:, None] * K + o_k[None, :]

    b_c = load_tile(values, i_t, i_h, length, H, V, 0, V)
    c_scale = tl.load(values_scale + i_nh * V + o_v)
    b_s = tl.load(states + i_nh * (K * V) + o_vk)
    s_scale = tl.load(states_scale + i_nh * V + o_v)
    b_ds = tl.load(dstates + i_nh * (K * V) + o_vk)
    ds_scale = tl.load(dstates_scale + i_nh * V + o_v)
    ddecay_K = tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32) * (s_scale * ds_scale)[:, None], 0)
    tl.store(ddecay + i_nh * K + o_k, ddecay_K)

    x, x_scale = scaled_rows(b_c.to(tl.float32) * (c_scale * ds_scale)[None, :], EXACT)
    b_dx = product(x, b_ds, EXACT) * x_scale[:, None]
    k_dot = tl.sum(b_dx * load_rows(k_out, i_t, i_h, length, H, K, 0, K), 1)
    replace_scaled(k_out, row_scales, b_dx, i_t, i_h, length, H, K, EXACT)

    b_do = load_rows(do, i_t, i_h, length, H, V, 0, V)
    x, x_scale = scaled_rows(b_do * s_scale[None, :], EXACT)
    b_dx = product(x, b_s, EXACT) * x_scale[:, None]
    q_dot = tl.sum(b_dx * load_rows(q_in, i_t, i_h, length, H, K, 0, K), 1)
    replace_scaled(q_in, row_scales + span, b_dx, i_t, i_h, length, H, K, EXACT)

    x, x_scale = scaled_rows(b_do * c_scale[None, :], EXACT)
    b_da = tl.where(o_t[:, None] >= o_t[None, :], product(x, tl.trans(b_c), EXACT) * x_scale[:, None], 0.0)
    # A token's score with itself does not decay: kept apart, it need not cancel in the decay's gradient.
    same = o_t[:, None] == o_t[None, :]
    store_scalars(own_scores, tl.sum(tl.where(same, b_da, 0.0), 1), i_t, i_h, length, H)
    store_rows(dscores, _score(tl.where(same, 0.0, b_da), EXACT), i_t, i_h, length, H, BT, 0, BT)
    b_da *= load_rows(attend, i_t, i_h, length, H, BT, 0, BT)
    store_scalars(q_dots, q_dot + tl.sum(b_da, 1), i_t, i_h, length, H)
    k_dot += tl.sum(b_da, 0)

    b_dc = load_tile(dvalues, i_t, i_h, length, H, V, 0, V)
    dc_scale = tl.load(dvalues_scale + i_nh * V + o_v)
    b_inverse = load_tile(inverse, i_t, i_h, length, H, BT, 0, BT)
    b_dy = product(tl.trans(b_inverse), b_dc, EXACT) * dc_scale[None, :]
    b_beta = tl.sigmoid(load_scalars(beta, i_t, i_h, length, H))
    store_rows(dv, b_dy * b_beta[:, None], i_t, i_h, length, H, V, 0, V)
    # From (1 + a) c = beta (v - k exp(G) S): beta times its gradient, of which nothing cancels.
    dbeta_own = tl.sum(b_dy * c_scale[None, :] * b_c.to(tl.float32), 1)
    store_scalars(dbeta, dbeta_own * (1.0 - b_beta), i_t, i_h, length, H)
    k_dot += dbeta_own - b_beta * tl.sum(b_dy * load_rows(v, i_t, i_h, length, H, V, 0, V), 1)

    x, x_scale = scaled_rows(b_dy * s_scale[None, :], EXACT)
    b_dx = product(x, b_s, EXACT) * x_scale[:, None]
    replace_scaled(dk_in, row_scales + 2 * span, b_dx, i_t, i_h, length, H, K, EXACT)

    x, x_scale = scaled_rows(b_dy * c_scale[None, :], EXACT)
    b_da = tl.where(o_t[:, None] > o_t[None, :], product(x, tl.trans(b_c), EXACT) * -x_scale[:, None], 0.0)
    store_rows(dscores + span * BT, _score(b_da, EXACT), i_t, i_h, length, H, BT, 0, BT)
    b_da *= load_rows(keys, i_t, i_h, length, H, BT, 0, BT)
    k_dot += tl.sum(b_da * b_beta[:, None], 0)
    store_scalars(k_dots, k_dot, i_t, i_h, length, H)


@triton.jit
def reload_tile(p, i_t, i_h, length, H, D: tl.constexpr, i_d, BD: tl.constexpr):
    """`load_tile` that the compiler cannot merge with an earlier one, nor what is computed from it.

    What is held across the products does not fit the registers; working it out again is cheaper than spilling it.
    """
    o_td, m_t = offsets(length, H, D, BD)
    return tl.load(p + ((i_t * H + i_h) * D + i_d) + o_td, mask=m_t, other=0.0, volatile=True)


@triton.jit
def reload_rows(p, i_t, i_h, length, H, D: tl.constexpr, i_d, BD: tl.constexpr):
    """The same in fp32."""
    return reload_tile(p, i_t, i_h, length, H, D, i_d, BD).to(tl.float32)


@triton.jit
def unit_gradient(dy_TK, unit_TK, dot_T, rstd_T, factor: tl.constexpr):
    """Gradient for x of y = factor x / |x|, given dy, x / |x| and y . dy."""
    return (dy_TK * factor - unit_TK * dot_T[:, None]) * rstd_T[:, None]


@triton.jit(do_not_specialize=["M"])
def key_gradients_kernel(
    q,
    k,
    f,
    dq_in,
    dk_in,
    dk_out,
    dscores,
    beta,
    A_log,
    dt_bias,
    chunks,
    ddecay,
    row_scales,
    q_rstds,
    k_rstds,
    own_scores,
    q_dots,
    k_dots,
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
    """dq, dk, df, and every chunk's share of d dt_bias [N, H, K] and d A_log [N, H]."""
    i_n, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_t, length = chunk_of(chunks, i_n)
    i_nh = i_n.to(tl.int64) * H + i_h
    if length == 0:
        tl.store(ddt_bias + i_nh * K + tl.arange(0, K), tl.zeros([K], tl.float32))
        tl.store(dA_log + i_nh, 0.0)
        return
    o_t = tl.arange(0, BT)
    second = (o_t >= BC)[:, None]
    span = M.to(tl.int64) * H
    rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    q_rstd = load_scalars(q_rstds, i_t, i_h, length, H)
    k_rstd = load_scalars(k_rstds, i_t, i_h, length, H)
    q_dot = load_scalars(q_dots, i_t, i_h, length, H)
    k_dot = load_scalars(k_dots, i_t, i_h, length, H)
    own = load_scalars(own_scores, i_t, i_h, length, H)[:, None]
    out_scale = load_scalars(row_scales, i_t, i_h, length, H)[:, None]
    q_scale = load_scalars(row_scales + span, i_t, i_h, length, H)[:, None]
    in_scale = load_scalars(row_scales + 2 * span, i_t, i_h, length, H)[:, None]
    b_beta = tl.sigmoid(load_scalars(beta, i_t, i_h, length, H))[:, None]
    scale: tl.constexpr = K**-0.5
    b_dA = tl.zeros([BT], tl.float32)
    for i_k in tl.range(0, K, BK, disable_licm=True):
        b_c, total, other = decays(
            load_rows(f, i_t, i_h, length, H, K, i_k, BK), dt_bias, rate, i_h, length, lower_bound, K, i_k, BK,
            BOUNDED, NARROW, EXACT,
        )  # fmt: skip
        b_k = load_rows(k, i_t, i_h, length, H, K, i_k, BK) * k_rstd[:, None]
        dqk = load_tile(dscores, i_t, i_h, length, H, BT, 0, BT)
        dkk = load_tile(dscores + span * BT, i_t, i_h, length, H, BT, 0, BT)
        b_dq, b_drow = row_gradients(dqk, dkk, b_k, b_c, total, other, NARROW, EXACT)
        b_in = tl.exp2(b_c + tl.where(second, other, 0.0))
        b_dq += b_in * (load_rows(dq_in, i_t, i_h, length, H, K, i_k, BK) * q_scale)
        b_drow -= b_in * (load_rows(dk_in, i_t, i_h, length, H, K, i_k, BK) * in_scale)
        b_drow *= b_beta
        b_q = load_rows(q, i_t, i_h, length, H, K, i_k, BK) * q_rstd[:, None]
        dG = b_q * scale * b_dq + b_k * b_drow
        b_dq += own * b_k
        store_rows(dq, unit_gradient(b_dq, b_q, q_dot, q_rstd, scale), i_t, i_h, length, H, K, i_k, BK)

        b_c, total, other = decays(
            reload_rows(f, i_t, i_h, length, H, K, i_k, BK), dt_bias, rate, i_h, length, lower_bound, K, i_k, BK,
            BOUNDED, NARROW, EXACT,
        )  # fmt: skip
        b_q = reload_rows(q, i_t, i_h, length, H, K, i_k, BK) * (q_rstd * scale)[:, None]
        b_k = reload_rows(k, i_t, i_h, length, H, K, i_k, BK) * k_rstd[:, None] * b_beta
        dqk = reload_tile(dscores, i_t, i_h, length, H, BT, 0, BT)
        dkk = reload_tile(dscores + span * BT, i_t, i_h, length, H, BT, 0, BT)
        b_dcolumn = column_gradients(dqk, dkk, b_q, b_k, b_c, total, other, NARROW, EXACT)
        b_dwrite = tl.exp2(total - b_c + tl.where(second, 0.0, other))
        b_dwrite *= reload_rows(dk_out, i_t, i_h, length, H, K, i_k, BK) * out_scale
        b_dcolumn += b_dwrite
        b_k = reload_rows(k, i_t, i_h, length, H, K, i_k, BK) * k_rstd[:, None]
        b_dk = unit_gradient(b_drow + b_dcolumn + own * b_q, b_k, k_dot, k_rstd, 1.0)
        store_rows(dk, b_dk, i_t, i_h, length, H, K, i_k, BK)
        # What the decay of the whole chunk gains reaches the log decay of every token in it.
        i_nhk = i_nh * K + i_k + tl.arange(0, BK)
        dg = sums_to_end(dG - b_k * b_dcolumn, b_k * b_dwrite, EXACT)
        dg += tl.load(ddecay + i_nhk)[None, :] * tl.exp2(total + other)
        b_z = reload_rows(f, i_t, i_h, length, H, K, i_k, BK)
        b_z += tl.load(dt_bias + i_h * K + i_k + tl.arange(0, BK)).to(tl.float32)[None, :]
        dz, dA = decay_gradient(tl.where((o_t < length)[:, None], dg, 0.0), b_z, rate, lower_bound, BOUNDED)
        b_dA += tl.sum(dA, 1)
        store_rows(df, dz, i_t, i_h, length, H, K, i_k, BK)
        tl.store(ddt_bias + i_nhk, tl.sum(dz, 0))
    tl.store(dA_log + i_nh, tl.sum(b_dA))
