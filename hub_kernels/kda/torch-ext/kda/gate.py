"""The gate: log decays in base 2 from raw inputs, their running sums, and its gradients.

Legend: M tokens of all documents, N chunks of BT tokens in halves of BC, H heads, K key width.
"""

import triton
import triton.language as tl

from .tiles import BC, BT, chunk_of, load_rows, read_rows, store_rows, write_rows

L2_EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with all its digits also where it is small."""
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y
    # log(1 + y): the logarithm of u is that of a rounded sum, by whose error y / (u - 1) scales it.
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, y, tl.log(u) * (y / (u - 1.0)))


@triton.jit
def log2_decay(z_RK, rate, lower_bound, m_r, BOUNDED: tl.constexpr, NARROW: tl.constexpr):
    """Base-2 log decay of each token and channel, from z = f + dt_bias and rate = exp(A_log); 0 where masked.

    Nothing is left of a state after exp2(-1000), so decays end there.
    """
    if BOUNDED:
        g = (lower_bound * LOG2_E) * tl.sigmoid(rate * z_RK)
    else:
        g = (-rate * LOG2_E) * softplus(z_RK)
    if not NARROW:
        g = tl.maximum(g, -1000.0)
    return tl.where(m_r[:, None], g, 0.0)


@triton.jit
def decay_gradient(dg_RK, z_RK, rate, lower_bound, BOUNDED: tl.constexpr):
    """Gradients for z and, elementwise, for A_log from that of the natural log decay."""
    if BOUNDED:
        # 1 - sigmoid(x) is sigmoid(-x), of which nothing cancels.
        dz = dg_RK * (lower_bound * rate) * tl.sigmoid(rate * z_RK) * tl.sigmoid(-rate * z_RK)
        return dz, dz * z_RK
    else:
        return dg_RK * -rate * tl.sigmoid(z_RK), dg_RK * -rate * softplus(z_RK)


@triton.jit
def _inputs(f, dt_bias, i_t, i_h, length, H, K: tl.constexpr, i_k, BK: tl.constexpr):
    """z = f + dt_bias, [BC, BK]."""
    bias = tl.load(dt_bias + i_h * K + i_k + tl.arange(0, BK)).to(tl.float32)
    return load_rows(f, i_t, i_h, length, H, K, i_k, BC, BK) + bias[None, :]


@triton.jit(do_not_specialize=["M"])
def gate_kernel(
    f,
    A_log,
    dt_bias,
    chunks,
    sums,
    lower_bound,
    M,
    H,
    K: tl.constexpr,
    BK: tl.constexpr,
    BOUNDED: tl.constexpr,
    NARROW: tl.constexpr,
):
    """sums: of the log decay within half a chunk, up to and including each token."""
    i_k = tl.program_id(0) % (K // BK) * BK
    i_nh = tl.program_id(0) // (K // BK)
    i_h = i_nh % H
    i_t, length = chunk_of(chunks, i_nh // H)
    rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    for i_c in tl.static_range(0, BT, BC):
        m_r = tl.arange(0, BC) < length - i_c
        b_z = _inputs(f, dt_bias, i_t + i_c, i_h, length - i_c, H, K, i_k, BK)
        b_c = tl.cumsum(log2_decay(b_z, rate, lower_bound, m_r, BOUNDED, NARROW), 0)
        write_rows(sums, b_c, i_t + i_c, i_h, length - i_c, M, K, i_k, BC, BK)


@triton.jit
def _shifted(p, i_t, i_c, i_h, length, M, K: tl.constexpr, i_k, BK: tl.constexpr):
    """[BC, BK]: of each token from i_c of a chunk on, the row of the token before it; zeros for the first."""
    o_r = i_c - 1 + tl.arange(0, BC)[:, None]
    p_row = p + (tl.cast(i_h, tl.int64) * M + i_t) * K + i_k
    m_r = (o_r >= 0) & (o_r < length)
    return tl.load(p_row + o_r * K + tl.arange(0, BK)[None, :], mask=m_r, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def gate_gradients_kernel(
    f,
    A_log,
    dt_bias,
    chunks,
    dlater,
    dearlier,
    dtotal,
    df,
    ddt_bias,
    dA_log,
    lower_bound,
    M,
    H,
    K: tl.constexpr,
    BK: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """df, and every chunk's share of d dt_bias [N, H, K] and d A_log [N, H, K / BK].

    What depends on the decay of several tokens has one gradient for all of them: `dlater` is, token by token, what
    depends on the decay of the chunk up to that token, `dearlier` on that of all tokens behind it, and `dtotal`
    [N, H, K] on that of the whole chunk. Sums of their own, from both ends, are of what is large only where the result
    is: taking one from a total would leave the digits that cancel.
    """
    i_k = tl.program_id(0) % (K // BK) * BK
    i_nh = (tl.program_id(0) // (K // BK)).to(tl.int64)
    i_h = i_nh % H
    i_t, length = chunk_of(chunks, i_nh // H)
    rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    b_later = tl.load(dtotal + i_nh * K + i_k + tl.arange(0, BK))
    b_bias = tl.zeros([BK], tl.float32)
    b_A = tl.zeros([BK], tl.float32)
    for i in tl.static_range(BT // BC):
        i_c = BT - BC * (i + 1)
        left = length - i_c
        b_d = read_rows(dlater, i_t + i_c, i_h, left, M, K, i_k, BC, BK)
        dg = tl.cumsum(b_d, 0, reverse=True) + b_later[None, :]
        b_later += tl.sum(b_d, 0)
        dg += tl.cumsum(_shifted(dearlier, i_t, i_c, i_h, length, M, K, i_k, BK), 0)
        if i_c > 0:
            dg += tl.sum(_shifted(dearlier, i_t, 0, i_h, length, M, K, i_k, BK), 0)[None, :]
        dg = tl.where((tl.arange(0, BC) < left)[:, None], dg, 0.0)
        b_z = _inputs(f, dt_bias, i_t + i_c, i_h, left, H, K, i_k, BK)
        dz, dA = decay_gradient(dg, b_z, rate, lower_bound, BOUNDED)
        store_rows(df, dz, i_t + i_c, i_h, left, H, K, i_k, BC, BK)
        b_bias += tl.sum(dz, 0)
        b_A += tl.sum(dA, 0)
    tl.store(ddt_bias + i_nh * K + i_k + tl.arange(0, BK), b_bias)
    tl.store(dA_log + tl.program_id(0), tl.sum(b_A))
