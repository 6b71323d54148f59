"""The serial part: the state runs through the chunks of a document, in one program per document, head and values.

The state is held transposed, [BV, K]: its rows never mix. Products are taken in fp16 of rows divided by their largest
magnitude and scaled back, and so keep 11 bits for inputs of any range: see `scaled`. `hopper_recurrence.py` has the
same for Hopper.

Legend: M tokens, N chunks of BT tokens, X documents, H heads, K key width, V value width, BV values of a program.
"""

import triton
import triton.language as tl

from .scores import LARGEST, LARGEST_SOLVED, LIFT, operand, product, scaled
from .tiles import BT, read_tile


@triton.jit(do_not_specialize=["M"])
def forward_kernel(
    q_in,
    k_in,
    k_out,
    v,
    solve,
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
    M,
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
    # Places of [BV, BT] in inputs and outputs, and in what the kernels hand each other: see tiles.py.
    o_vt = o_t[None, :] * (H * V) + o_v[:, None]
    o_work = o_t[None, :] * V + o_v[:, None]

    if HAS_INITIAL:
        b_s = tl.load(initial + o_state).to(tl.float32)
    else:
        b_s = tl.zeros([BV, K], tl.float32)
    for _ in range(count):
        m_t = o_t < length
        i_mh, i_hm = i_t * H + i_h, tl.cast(i_h, tl.int64) * M + i_t
        i_nh = i_n * H + i_h
        b_v = tl.load(v + i_mh * V + o_vt, mask=m_t[None, :], other=0.0).to(tl.float32)
        b_k = read_tile(k_in, i_t, i_h, length, M, K, 0, BT, K)
        b_solve = read_tile(solve, i_t, i_h, length, M, BT, 0, BT, BT)
        b_write = read_tile(k_out, i_t, i_h, length, M, K, 0, BT, K)
        b_decay = tl.load(decay + i_nh * K + o_k)
        s_operand, s_scale = scaled(b_s, LARGEST, EXACT)
        # What the values are to be less what their keys read of the state; then less what they read of each other.
        b_z = b_v - product(s_operand, tl.trans(b_k), EXACT) * (s_scale / LIFT)[:, None]
        z_operand, scale = scaled(b_z, LARGEST_SOLVED, EXACT)
        b_c = operand(product(z_operand, tl.trans(b_solve), EXACT), EXACT)
        if BACKWARD:
            tl.store(states + i_nh * (K * V) + o_v[:, None] * K + o_k[None, :], s_operand)
            tl.store(states_scale + i_nh * V + o_v, s_scale)
            tl.store(values + i_hm * V + o_work, b_c, mask=m_t[None, :])
            tl.store(values_scale + i_nh * V + o_v, scale)
        else:
            b_q = read_tile(q_in, i_t, i_h, length, M, K, 0, BT, K)
            b_a = read_tile(attend, i_t, i_h, length, M, BT, 0, BT, BT)
            b_o = product(s_operand, tl.trans(b_q), EXACT) * (s_scale / LIFT)[:, None]
            b_o += product(b_c, tl.trans(b_a), EXACT) * scale[:, None]
            tl.store(o + i_mh * V + o_vt, b_o.to(o.dtype.element_ty), mask=m_t[None, :])
        b_s = b_s * b_decay[None, :] + product(b_c, b_write, EXACT) * (scale / LIFT)[:, None]
        i_n += 1
        i_t += BT
        length -= BT
    if HAS_FINAL:
        tl.store(final + o_state, b_s)


@triton.jit(do_not_specialize=["M"])
def backward_kernel(
    do,
    q_in,
    k_in,
    k_out,
    inverse,
    beta,
    attend,
    decay,
    documents,
    dfinal,
    dinitial,
    do_scale,
    dstates,
    dstates_scale,
    dvalues,
    dvalues_scale,
    M,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Gradients of the state at each chunk's end, of the values before the solve (dvalues; before beta), and of the
    initial states; chunks in reverse."""
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
    # Places of [BV, BT] in inputs and outputs, and in what the kernels hand each other: see tiles.py.
    o_vt = o_t[None, :] * (H * V) + o_v[:, None]
    o_work = o_t[None, :] * V + o_v[:, None]

    if HAS_FINAL:
        b_ds = tl.load(dfinal + o_state).to(tl.float32)
    else:
        b_ds = tl.zeros([BV, K], tl.float32)
    for _ in range(count):
        m_t = o_t < length
        i_mh, i_hm = i_t * H + i_h, tl.cast(i_h, tl.int64) * M + i_t
        i_nh = i_n * H + i_h
        b_do = tl.load(do + i_mh * V + o_vt, mask=m_t[None, :], other=0.0).to(tl.float32)
        b_a = read_tile(attend, i_t, i_h, length, M, BT, 0, BT, BT)
        b_write = read_tile(k_out, i_t, i_h, length, M, K, 0, BT, K)
        b_inverse = read_tile(inverse, i_t, i_h, length, M, BT, 0, BT, BT)
        b_q = read_tile(q_in, i_t, i_h, length, M, K, 0, BT, K)
        b_k = read_tile(k_in, i_t, i_h, length, M, K, 0, BT, K)
        b_beta = tl.load(beta + i_hm + o_t, mask=m_t, other=0.0)
        b_decay = tl.load(decay + i_nh * K + o_k)
        do_operand, scale = scaled(b_do, LARGEST, EXACT)
        tl.store(do_scale + i_nh * V + o_v, scale)
        ds_operand, ds_scale = scaled(b_ds, LARGEST, EXACT)
        tl.store(dstates + i_nh * (K * V) + o_v[:, None] * K + o_k[None, :], ds_operand)
        tl.store(dstates_scale + i_nh * V + o_v, ds_scale)
        b_dc = product(do_operand, b_a, EXACT) * scale[:, None]
        b_dc += product(ds_operand, tl.trans(b_write), EXACT) * (ds_scale / LIFT)[:, None]
        b_ds = b_ds * b_decay[None, :] + product(do_operand, b_q, EXACT) * (scale / LIFT)[:, None]
        dc_operand, scale = scaled(b_dc, LARGEST_SOLVED, EXACT)
        b_dz = product(dc_operand, b_inverse, EXACT)
        tl.store(dvalues + i_hm * V + o_work, operand(b_dz, EXACT), mask=m_t[None, :])
        tl.store(dvalues_scale + i_nh * V + o_v, scale)
        b_ds -= product(operand(b_dz * b_beta[None, :], EXACT), b_k, EXACT) * (scale / LIFT)[:, None]
        i_n -= 1
        i_t -= BT
        length += BT
    if HAS_INITIAL:
        tl.store(dinitial + o_state, b_ds)
