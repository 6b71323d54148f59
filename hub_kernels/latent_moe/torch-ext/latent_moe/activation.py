"""Gated activations and their derivatives.

"silu": silu(g) u. "situ": beta tanh(g / beta) sigmoid(g) times linear_beta tanh(u / linear_beta), or times u.

Sizes: R rows, F hidden width, BF >= F.
"""

import torch
import triton
import triton.language as tl

SILU, SITU, SITU_LINEAR = 0, 1, 2
_SILU, _SITU = tl.constexpr(SILU), tl.constexpr(SITU)


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    """tanh x and its derivative, to the precision of fp32 where it is small, as 1 - tanh(x)^2 is not."""
    if FAST:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return t, 1.0 - t * t
    else:
        # The quotient cancels near zero, where five terms of the series are exact to fp32.
        e = tl.exp(-2.0 * tl.abs(x))
        r = 1.0 / (1.0 + e)
        far = tl.where(x < 0, -1.0, 1.0) * (1.0 - e) * r
        s = x * x
        near = x * (1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
        return tl.where(s < 0.0625, near, far), 4.0 * e * r * r


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    """sigmoid x and sigmoid -x, which are 1 together."""
    if FAST:
        d = 1.0 + tl.exp2(x * -1.4426950408889634)
        s = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)
        return s, 1.0 - s
    else:
        e = tl.exp(-tl.abs(x))
        r = 1.0 / (1.0 + e)
        return tl.where(x < 0, e * r, r), tl.where(x < 0, r, e * r)


@triton.jit
def activate(g, u, beta, linear_beta, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """fp32. FAST: functions of the hardware, exact to 11 bits, for results in 16 bits."""
    s, _ = _sigmoid(g, FAST)
    if ACTIVATION == _SILU:
        return g * s * u
    t, _ = _tanh(g * (1.0 / beta), FAST)
    y = beta * t * s
    if ACTIVATION == _SITU:
        return y * u
    t, _ = _tanh(u * (1.0 / linear_beta), FAST)
    return y * (linear_beta * t)


@triton.jit
def activate_backward(g, u, dh, beta, linear_beta, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """The activation h, and the gradients of g and u from that of h."""
    s, s_minus = _sigmoid(g, FAST)
    if ACTIVATION == _SILU:
        a, d_a = g * s, s + g * s * s_minus
    else:
        t, d_t = _tanh(g * (1.0 / beta), FAST)
        a, d_a = beta * t * s, d_t * s + beta * t * s * s_minus
    b, d_b = u, tl.full(u.shape, 1.0, tl.float32)
    if ACTIVATION != _SILU and ACTIVATION != _SITU:
        t, d_b = _tanh(u * (1.0 / linear_beta), FAST)
        b = linear_beta * t
    return a * b, dh * d_a * b, dh * a * d_b


@triton.jit(do_not_specialize=["R"])
def activation_backward_kernel(
    gate_up, dh, slots, weights, offsets, dots, R, beta, linear_beta,
    E: tl.constexpr, F: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr, FAST: tl.constexpr,
    BF: tl.constexpr,
):  # fmt: skip
    """Of every row: dots = dh . h, the gradient of its weight w. In place, an element after it was read: the gradients
    of gates and ups, from w dh, and if KEEP h instead of dh."""
    i_r = tl.program_id(0).to(tl.int64)
    if i_r >= tl.load(offsets + E):
        return
    b_w = tl.load(weights + tl.load(slots + i_r)).to(tl.float32)
    b_dot = tl.zeros([BF], tl.float32)
    for i_f in range(0, F, BF):
        o_f = i_f + tl.arange(0, BF)
        m_f = o_f < F
        b_g = tl.load(gate_up + i_r * (2 * F) + o_f, mask=m_f, other=0.0).to(tl.float32)
        b_u = tl.load(gate_up + i_r * (2 * F) + F + o_f, mask=m_f, other=0.0).to(tl.float32)
        b_dh = tl.load(dh + i_r * F + o_f, mask=m_f, other=0.0).to(tl.float32)
        b_h, b_dg, b_du = activate_backward(b_g, b_u, b_dh, beta, linear_beta, ACTIVATION, FAST)
        b_dot += b_dh * b_h
        p_d = gate_up + i_r * (2 * F) + o_f
        tl.store(p_d, (b_w * b_dg).to(gate_up.dtype.element_ty), mask=m_f)
        tl.store(p_d + F, (b_w * b_du).to(gate_up.dtype.element_ty), mask=m_f)
        if KEEP:
            tl.store(dh + i_r * F + o_f, b_h.to(dh.dtype.element_ty), mask=m_f)
    tl.store(dots + i_r, tl.sum(b_dot, 0))


def activation_code(name: str, linear_beta: float | None) -> int:
    if name == "silu":
        return SILU
    return SITU if linear_beta is None else SITU_LINEAR


def fast(dtype: torch.dtype) -> bool:
    """Whether the hardware's functions are exact enough; the interpreter has none."""
    return dtype != torch.float32 and not triton.knobs.runtime.interpret
