"""The serial part: the state runs through the chunks of a document, in one program per document, head and values.

The state is held transposed, [BV, K]: its rows never mix, so a row can be scaled by its largest magnitude before a
product in fp16 and the result scaled back. Products thus keep 11 bits for inputs of any range.

Legend: M tokens, N chunks of BT tokens, X documents, H heads, K key width, V value width, BV values of a program.
"""

import triton
import triton.language as tl

from .prepare import load_tile
from .scores import BT, product, scaled_rows


@triton.jit
def forward_kernel(
    q_in,
    k_out,
    w,
    u,
    u_scale,
    attend,
    decay,
    documents,
    initial,
    final,
    o,
    states,
    states_scale,
    values,
    values_scale,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    BACKWARD: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Outputs and final states; or with BACKWARD, instead of outputs, each chunk's first state and its values."""
    i_v = tl.program_id(0) % (V // BV)
    i_h = tl.program_id(0) // (V // BV) % H
    i_x = tl.program_id(0) // (V // BV) // H
    i_n = tl.load(documents + 4 * i_x).to(tl.int64)
    count = tl.load(documents + 4 * i_x + 1)
    i_t = tl.load(documents + 4 * i_x + 2).to(tl.int64)
    length = tl.load(documents + 4 * i_x + 3)
    o_t, o_k = tl.arange(0, BT), tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    o_state = (i_x.to(tl.int64) * H + i_h) * K * V + o_k[None, :] * V + o_v[:, None]
    o_vt = o_t[None, :] * (H * V) + o_v[:, None]

    if HAS_INITIAL:
        b_s = tl.load(initial + o_state).to(tl.float32)
    else:
        b_s = tl.zeros([BV, K], tl.float32)
    for _ in range(count):
        m_t = o_t < length
        i_mh = i_t * H + i_h
        i_nh = i_n * H + i_h
        b_w = load_tile(w, i_t, i_h, length, H, K, 0, K)
        b_k = load_tile(k_out, i_t, i_h, length, H, K, 0, K)
        b_u = tl.load(u + i_mh * V + o_vt, mask=m_t[None, :], other=0.0).to(tl.float32)
        b_u *= tl.load(u_scale + i_mh + o_t * H, mask=m_t, other=0.0)[None, :]
        b_decay = tl.load(decay + i_nh * K + o_k)
        s_operand, s_scale = scaled_rows(b_s, EXACT)
        b_u -= product(s_operand, tl.trans(b_w), EXACT) * s_scale[:, None]
        u_operand, v_scale = scaled_rows(b_u, EXACT)
        if BACKWARD:
            tl.store(states + i_nh * (K * V) + o_v[:, None] * K + o_k[None, :], s_operand)
            tl.store(states_scale + i_nh * V + o_v, s_scale)
            tl.store(values + i_mh * V + o_vt, u_operand, mask=m_t[None, :])
            tl.store(values_scale + i_nh * V + o_v, v_scale)
        else:
            b_q = load_tile(q_in, i_t, i_h, length, H, K, 0, K)
            b_a = load_tile(attend, i_t, i_h, length, H, BT, 0, BT)
            b_o = product(s_operand, tl.trans(b_q), EXACT) * s_scale[:, None]
            b_o += product(u_operand, tl.trans(b_a), EXACT) * v_scale[:, None]
            tl.store(o + i_mh * V + o_vt, b_o.to(o.dtype.element_ty), mask=m_t[None, :])
        b_s = b_s * b_decay[None, :] + product(u_operand, b_k, EXACT) * v_scale[:, None]
        i_n += 1
        i_t += BT
        length -= BT
    if HAS_FINAL:
        tl.store(final + o_state, b_s)


@triton.jit
def backward_kernel(
    do,
    q_in,
    k_out,
    w,
    attend,
    decay,
    documents,
    dfinal,
    dinitial,
    dstates,
    dstates_scale,
    dvalues,
    dvalues_scale,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Gradients of the state at each chunk's end, of its values, and of the initial states; chunks in reverse."""
    i_v = tl.program_id(0) % (V // BV)
    i_h = tl.program_id(0) // (V // BV) % H
    i_x = tl.program_id(0) // (V // BV) // H
    count = tl.load(documents + 4 * i_x + 1)
    i_n = tl.load(documents + 4 * i_x).to(tl.int64) + count - 1
    i_t = tl.load(documents + 4 * i_x + 2).to(tl.int64) + (count - 1) * BT
    length = tl.load(documents + 4 * i_x + 3) - (count - 1) * BT
    o_t, o_k = tl.arange(0, BT), tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    o_state = (i_x.to(tl.int64) * H + i_h) * K * V + o_k[None, :] * V + o_v[:, None]
    o_vt = o_t[None, :] * (H * V) + o_v[:, None]

    if HAS_FINAL:
        b_ds = tl.load(dfinal + o_state).to(tl.float32)
    else:
        b_ds = tl.zeros([BV, K], tl.float32)
    for _ in range(count):
        m_t = o_t < length
        i_mh = i_t * H + i_h
        i_nh = i_n * H + i_h
        b_do = tl.load(do + i_mh * V + o_vt, mask=m_t[None, :], other=0.0).to(tl.float32)
        b_a = load_tile(attend, i_t, i_h, length, H, BT, 0, BT)
        b_k = load_tile(k_out, i_t, i_h, length, H, K, 0, K)
        b_q = load_tile(q_in, i_t, i_h, length, H, K, 0, K)
        b_w = load_tile(w, i_t, i_h, length, H, K, 0, K)
        b_decay = tl.load(decay + i_nh * K + o_k)
        do_operand, do_scale = scaled_rows(b_do, EXACT)
        ds_operand, ds_scale = scaled_rows(b_ds, EXACT)
        b_dv = product(do_operand, b_a, EXACT) * do_scale[:, None]
        b_dv += product(ds_operand, tl.trans(b_k), EXACT) * ds_scale[:, None]
        dv_operand, dv_scale = scaled_rows(b_dv, EXACT)
        tl.store(dstates + i_nh * (K * V) + o_v[:, None] * K + o_k[None, :], ds_operand)
        tl.store(dstates_scale + i_nh * V + o_v, ds_scale)
        tl.store(dvalues + i_mh * V + o_vt, dv_operand, mask=m_t[None, :])
        tl.store(dvalues_scale + i_nh * V + o_v, dv_scale)
        b_ds = b_ds * b_decay[None, :] + product(do_operand, b_q, EXACT) * do_scale[:, None]
        b_ds -= product(dv_operand, b_w, EXACT) * dv_scale[:, None]
        i_n -= 1
        i_t -= BT
        length += BT
    if HAS_INITIAL:
        tl.store(dinitial + o_state, b_ds)
