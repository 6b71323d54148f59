"""Triton kernels of the gated RMSNorm: a program takes BT rows of width K at a time.

Legend: T rows (tokens times heads), K width of a row, BT and BK rows and width of a block, P programs.
"""

import triton
import triton.language as tl


@triton.jit
def _forward(i_t, x, gate, weight, out, T, eps, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    o_t = i_t * BT + tl.arange(0, BT).to(tl.int64)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    o_x = o_t[:, None] * K + o_k[None, :]
    m_x = (o_t < T)[:, None] & m_k[None, :]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_z = tl.load(gate + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / K + eps)
    b_o = b_x * b_r[:, None] * b_w[None, :] * tl.sigmoid(b_z)
    tl.store(out + o_x, b_o.to(out.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["T"])
def gated_norm_fwd_kernel(x, gate, weight, out, T, eps, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    _forward(tl.program_id(0), x, gate, weight, out, T, eps, K, BT, BK)


@triton.jit(do_not_specialize=["T"])
def gated_norm_fwd_cores_kernel(x, gate, weight, out, T, eps, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """The same for as many programs as Ascend has cores."""
    for i_t in tl.range(tl.program_id(0), tl.cdiv(T, BT), tl.num_programs(0)):
        _forward(i_t, x, gate, weight, out, T, eps, K, BT, BK)


@triton.jit(do_not_specialize=["T"])
def gated_norm_bwd_kernel(
    dout,
    x,
    gate,
    weight,
    dx,
    dgate,
    dweight_P,
    T,
    eps,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_p = tl.program_id(0)
    P = tl.num_programs(0)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    b_w = tl.load(weight + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BT, BK], tl.float32)
    for i_t in tl.range(i_p, tl.cdiv(T, BT), P, num_stages=STAGES):
        o_t = i_t * BT + tl.arange(0, BT).to(tl.int64)
        o_x = o_t[:, None] * K + o_k[None, :]
        m_x = (o_t < T)[:, None] & m_k[None, :]
        b_do = tl.load(dout + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_z = tl.load(gate + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / K + eps)[:, None]
        b_n = b_x * b_r
        b_g = tl.sigmoid(b_z)
        # Gradient of (normed row times weight), then of the normed row.
        b_dy = b_do * b_g
        b_dn = b_dy * b_w[None, :]
        b_dx = (b_dn - b_n * (tl.sum(b_dn * b_n, axis=1) / K)[:, None]) * b_r
        b_dz = b_dn * b_n * (1.0 - b_g)
        b_dw += b_dy * b_n
        tl.store(dx + o_x, b_dx.to(dx.dtype.element_ty), mask=m_x)
        tl.store(dgate + o_x, b_dz.to(dgate.dtype.element_ty), mask=m_x)
    tl.store(dweight_P + i_p * K + o_k, tl.sum(b_dw, axis=0), mask=m_k)
