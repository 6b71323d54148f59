"""The gate: log decays in base 2 from raw inputs, and its gradients.

Legend: T tokens of a chunk, K key width.
"""

import triton
import triton.language as tl

L2_EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def log2_decay(z_TK, rate, lower_bound, m_t, BOUNDED: tl.constexpr, NARROW: tl.constexpr):
    """Base-2 log decay of each token and channel, from z = f + dt_bias and rate = exp(A_log); 0 where masked.

    Nothing is left of a state after exp2(-1000), so decays end there.
    """
    if BOUNDED:
        g = (lower_bound * LOG2_E) * tl.sigmoid(rate * z_TK)
    else:
        g = (-rate * LOG2_E) * softplus(z_TK)
    if not NARROW:
        g = tl.maximum(g, -1000.0)
    return tl.where(m_t[:, None], g, 0.0)


@triton.jit
def decay_gradient(dg_TK, z_TK, rate, lower_bound, BOUNDED: tl.constexpr):
    """Gradients for z and, elementwise, for A_log from that of the natural log decay."""
    if BOUNDED:
        s = tl.sigmoid(rate * z_TK)
        dz = dg_TK * (lower_bound * rate) * s * (1.0 - s)
        return dz, dz * z_TK
    else:
        return dg_TK * -rate * tl.sigmoid(z_TK), dg_TK * -rate * softplus(z_TK)
