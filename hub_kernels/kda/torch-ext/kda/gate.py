"""The gate: log decays in base 2 from raw inputs, their running sums, and its gradients.

Legend: M tokens of all documents, N chunks of BT tokens in halves of BC and quarters of BQ, H heads, K key width.
"""

import triton
import triton.language as tl

from .scores import exp2, reciprocal
from .tiles import BC, BQ, BT, chunk_of, load_rows

L2_EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def decay_rate(A_log, i_h):
    """exp(A_log) of a head: an error here is that of every token, so that it is taken in float64."""
    return tl.exp(tl.load(A_log + i_h).to(tl.float64)).to(tl.float32)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with all its digits also where it is small."""
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y
    # log(1 + y): the logarithm of u is that of a rounded sum, by whose error y / (u - 1) scales it.
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, y, tl.log(u) * (y / (u - 1.0)))


@triton.jit
def log2_decay(z, rate, lower_bound, m, BOUNDED: tl.constexpr, NARROW: tl.constexpr):
    """Base-2 log decay of each channel, from z = f + dt_bias and rate = exp(A_log); 0 where masked.

    Nothing is left of a state after exp2(-1000), so decays end there.
    """
    if BOUNDED:
        g = (lower_bound * LOG2_E) * reciprocal(1.0 + exp2(rate * z * -LOG2_E))
    else:
        g = (-rate * LOG2_E) * softplus(z)
    if not NARROW:
        g = tl.maximum(g, -1000.0)
    return tl.where(m, g, 0.0)


@triton.jit
def decay_gradient(dg_RK, z_RK, rate, lower_bound, m_r, BOUNDED: tl.constexpr):
    """Gradients for z and, elementwise, for A_log from that of the natural log decay; 0 where masked."""
    if BOUNDED:
        # sigmoid(x) (1 - sigmoid(x)), of which nothing cancels, and which is the same for x and -x.
        y = exp2(tl.abs(z_RK) * (-LOG2_E * rate))
        s = reciprocal(1.0 + y)
        dz = dg_RK * tl.where(m_r, lower_bound * rate, 0.0)[:, None] * (y * s * s)
        return dz, dz * z_RK
    else:
        dg_RK *= tl.where(m_r, -rate, 0.0)[:, None]
        return dg_RK * tl.sigmoid(z_RK), dg_RK * softplus(z_RK)


@triton.jit
def gate_inputs(f, dt_bias, i_t, i_h, length, H, K: tl.constexpr, i_k, BK: tl.constexpr):
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
    quarters,
    lower_bound,
    M,
    H,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
    NARROW: tl.constexpr,
):
    """sums: of the log decay between the middle of half a chunk and each token, up to and including the token: what
    decays behind the middle, minus what decays before it. quarters [N, H, BT / BQ, K]: the decay over each quarter, or
    where it is not NARROW its logarithm.

    From the middle sums stay half as large as from the start, and so are their roundings.
    """
    i_nh = tl.program_id(0).to(tl.int64)
    i_h = i_nh % H
    i_t, length = chunk_of(chunks, i_nh // H)
    o_k = tl.arange(0, K)
    rate = decay_rate(A_log, i_h)
    bias = tl.load(dt_bias + i_h * K + o_k).to(tl.float32)
    # Beside fp32 inputs the roundings of each addition would be seen.
    sum_dtype: tl.constexpr = tl.float64 if f.dtype.element_ty == tl.float32 else tl.float32
    p_f = f + (i_t * H + i_h) * K + o_k
    p_sums = sums + (i_h * M + i_t) * K + o_k
    for i in tl.static_range(BT // BQ):
        # Away from the middle of the half; loads do not wait for the stores of other tokens.
        rows = ()
        for j in tl.static_range(BQ):
            o_t = BQ * i + (j if i % 2 == 1 else BQ - 1 - j)
            rows += (tl.load(p_f + o_t * (H * K), mask=o_t < length, other=0.0),)
        b_c = tl.zeros([K], sum_dtype)
        for j in tl.static_range(BQ):
            o_t = BQ * i + (j if i % 2 == 1 else BQ - 1 - j)
            b_g = log2_decay(rows[j].to(tl.float32) + bias, rate, lower_bound, o_t < length, BOUNDED, NARROW)
            if i % 2 == 1:
                b_c += b_g
                tl.store(p_sums + o_t * K, b_c.to(tl.float32), mask=o_t < length)
            else:
                tl.store(p_sums + o_t * K, -b_c.to(tl.float32), mask=o_t < length)
                b_c += b_g
        total = b_c.to(tl.float32)
        tl.store(quarters + (i_nh * (BT // BQ) + i) * K + o_k, exp2(total) if NARROW else total)
