"""The value gradients on Hopper, for 16-bit inputs and K = V = 128: `value_gradients_kernel` of gradients.py.

Tokens are the rows of all products, and their left operands come from registers. Every value has a scale of its own in
each tensor: the product of two, over the product of the largest, is a power of two that the left operand's columns are
multiplied by, so that right operands stay as the copy engine brings them. `factors_kernel` has these ready.

Legend: M tokens, N chunks of BT tokens, H heads, D = K = V. Tiles lie as [BT, D] or [D, D] in memory.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gradients import SCORE_SHIFT, score_units, store_ratios
from .hopper_recurrence import TILE, D
from .scores import LIFT
from .tiles import BT

# Accumulators [BT, D] and [BT, BT], left operands of such, and rows as they are stored.
BY_KEY = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
BY_TOKEN = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, BY_KEY, 2))
LEFT_OF_TOKENS = gl.constexpr(gl.DotOperandLayout(0, BY_TOKEN, 2))
WIDE_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@triton.jit
def _largest(p, i_nh, D: tl.constexpr):
    """The largest of the values' scales, and [D] by how much each one's is smaller."""
    scales = tl.load(p + i_nh * D + tl.arange(0, D))
    largest = tl.max(scales, 0)
    return largest, scales * (1.0 / largest)


@triton.jit
def factors_kernel(
    do_scale, states_scale, dstates_scale, values_scale, dvalues_scale, factors, largest, ratios, D: tl.constexpr
):
    """factors fp16 [N, H, 6, D]: values in dstates, states in dstates, do and dvalues in values and in states; do as
    it is over its largest scale.

    largest [N, H, 8]: the largest scales in the order of the arguments; ratios as in gradients.py.
    """
    i_nh = tl.program_id(0).to(tl.int64)
    do_s, _ = _largest(do_scale, i_nh, D)
    s_s, s_ratio = _largest(states_scale, i_nh, D)
    ds_s, ds_ratio = _largest(dstates_scale, i_nh, D)
    c_s, c_ratio = _largest(values_scale, i_nh, D)
    dy_s, dy_ratio = _largest(dvalues_scale, i_nh, D)
    p_f, p_l, p_r = factors + i_nh * (6 * D) + tl.arange(0, D), largest + i_nh * 8, ratios + i_nh * 4
    tl.store(p_f, c_ratio * ds_ratio)
    tl.store(p_f + D, s_ratio * ds_ratio)
    tl.store(p_f + 2 * D, c_ratio)
    tl.store(p_f + 3 * D, s_ratio)
    tl.store(p_f + 4 * D, dy_ratio * c_ratio)
    tl.store(p_f + 5 * D, dy_ratio * s_ratio)
    tl.store(p_l, do_s)
    tl.store(p_l + 1, s_s)
    tl.store(p_l + 2, ds_s)
    tl.store(p_l + 3, c_s)
    tl.store(p_l + 4, dy_s)
    store_ratios(p_r, do_s, dy_s, ds_s, c_s, s_s)


@gluon.jit
def _clear(place, length):
    """Zeros for what is behind the end of the document."""
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, WIDE_ROWS))
    x = place.load(WIDE_ROWS)
    place.store(gl.where(gl.expand_dims(o_t < length, 1), x, gl.zeros_like(x)))


@gluon.jit
def _factors(p, LAYOUT: gl.constexpr):
    return gl.expand_dims(gl.load(p + gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))), 0)


@gluon.jit
def _product(left, right, acc, LAYOUT: gl.constexpr):
    """acc + left times right, and the operand, to be kept."""
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return warpgroup_mma(left, right, acc, is_async=True), left


@gluon.jit
def _diagonal(x):
    """[BT] of [BT, BT]."""
    o_i = gl.expand_dims(gl.arange(0, BT, layout=gl.SliceLayout(1, BY_TOKEN)), 1)
    o_j = gl.expand_dims(gl.arange(0, BT, layout=gl.SliceLayout(0, BY_TOKEN)), 0)
    return gl.sum(gl.where(o_i == o_j, x, 0.0), 1)


@gluon.jit
def _store(p, x, place, i_t, length, stride, LAYOUT: gl.constexpr):
    """x [BT, ...] by way of `place` to rows from i_t on of p, stride apart."""
    place.store(x.to(place.dtype))
    x = place.load(LAYOUT)
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, LAYOUT))
    o_d = gl.arange(0, place.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    p += gl.cast(i_t, gl.int64) * stride + gl.expand_dims(o_t * stride, 1) + gl.expand_dims(o_d, 0)
    gl.store(p, x, mask=gl.expand_dims(o_t < length, 1))


@gluon.jit
def _store_scalars(p, x_T, i_t, length, stride):
    o_t = gl.arange(0, BT, layout=x_T.type.layout)
    gl.store(p + gl.cast(i_t, gl.int64) * stride + o_t * stride, x_T.to(p.dtype.element_ty), mask=o_t < length)


@gluon.jit
def _score_places(length):
    """(rows, columns, places of [BT, BT] as an accumulator has it, which of them exist)."""
    o_i = gl.expand_dims(gl.arange(0, BT, layout=gl.SliceLayout(1, BY_TOKEN)), 1)
    o_j = gl.expand_dims(gl.arange(0, BT, layout=gl.SliceLayout(0, BY_TOKEN)), 0)
    return o_i, o_j, o_i * BT + o_j, o_i < length


@gluon.jit(do_not_specialize=["M"])
def value_gradients_kernel(
    do, v, states, dstates, values, dvalues, q_in, beta, chunks, attend, keys, decay,
    dvalues_scale, factors, largest,
    dq_in, dk_in, dk_out, dv, dbeta, dtotal, dscores, own_scores, q_dots, k_dots, M, H,
):  # fmt: skip
    """See gradients.py; do to q_in are descriptors, and dq_in and dk_out are where q_in and k_out are."""
    i_n, i_h = gl.program_id(0) // H, gl.program_id(0) % H
    i_t, length = gl.load(chunks + 2 * i_n), gl.load(chunks + 2 * i_n + 1)
    if length == 0:
        return
    i_nh = gl.cast(i_n, gl.int64) * H + i_h
    i_hm = gl.cast(i_h, gl.int64) * M + i_t
    i_row, i_state, i_col = i_h * M + i_t, (i_n * H + i_h) * D, i_h * D
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=1)
    b_ds = gl.allocate_shared_memory(gl.float16, [D, D], TILE)
    b_c = gl.allocate_shared_memory(gl.float16, [BT, D], TILE)
    b_s = gl.allocate_shared_memory(gl.float16, [D, D], TILE)
    b_do = gl.allocate_shared_memory(do.dtype, [BT, D], TILE)
    # The copy engine must see the barriers.
    fence_async_shared()
    mbarrier.expect(full.index(0), 2 * D * (D + BT))
    tma.async_copy_global_to_shared(dstates, [i_state, 0], full.index(0), b_ds)
    tma.async_copy_global_to_shared(values, [i_row, 0], full.index(0), b_c)
    mbarrier.expect(full.index(1), 2 * D * (D + BT))
    tma.async_copy_global_to_shared(states, [i_state, 0], full.index(1), b_s)
    tma.async_copy_global_to_shared(do, [i_t, i_col], full.index(1), b_do)

    p_f, p_l = factors + i_nh * (6 * D), largest + i_nh * 8
    do_s, s_s, ds_s, c_s, dy_s = gl.load(p_l), gl.load(p_l + 1), gl.load(p_l + 2), gl.load(p_l + 3), gl.load(p_l + 4)
    larger, unit_s = score_units(do_s, dy_s, ds_s, c_s, s_s)
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, BY_KEY))
    b_beta = gl.load(beta + i_hm + o_t, mask=o_t < length, other=0.0)
    o_k = gl.arange(0, BT, layout=gl.SliceLayout(1, BY_TOKEN))
    p_total, p_fade = dtotal + i_nh * D + o_k, decay + i_nh * D + o_k
    fade_1, fade_2 = gl.load(p_fade), gl.load(p_fade + BT)
    zeros = gl.zeros([BT, D], gl.float32, layout=BY_KEY)
    zeros_T = gl.zeros([BT, BT], gl.float32, layout=BY_TOKEN)

    o_i, o_j, o_ij, m_i = _score_places(length)
    attend += i_hm * BT
    keys += i_hm * BT

    factor = _factors(p_f, LEFT)
    o_k = gl.arange(0, D, layout=gl.SliceLayout(0, BY_KEY))
    p_k = dk_out + i_hm * D + gl.expand_dims(o_t * D, 1) + gl.expand_dims(o_k, 0)
    b_k = gl.load(p_k, mask=gl.expand_dims(o_t < length, 1), other=0.0)
    mbarrier.wait(full.index(0), 0)
    if length < BT:
        _clear(b_c, length)
        fence_async_shared()
        gl.thread_barrier()
    b_dx, left = _product(b_c.load(LEFT) * factor, b_ds, zeros, LEFT)
    factor = _factors(p_f + D, LEFT_OF_TOKENS)
    b_dx, left = warpgroup_mma_wait(0, deps=(b_dx, left))
    # The decay of the whole chunk: half by half, the diagonal of a product.
    mbarrier.wait(full.index(1), 0)
    for i in gl.static_range(2):
        b_half = b_s.slice(BT * i, BT, dim=1).permute((1, 0)).load(LEFT_OF_TOKENS)
        total, left = _product(b_half * factor, b_ds.slice(BT * i, BT, dim=1), zeros_T, LEFT_OF_TOKENS)
        total, left = warpgroup_mma_wait(0, deps=(total, left))
        gl.store(p_total + BT * i, _diagonal(total) * (fade_1 if i == 0 else fade_2) * (s_s * ds_s))
    k_dot = gl.sum(b_dx * b_k.to(gl.float32), 1) * (c_s * ds_s * (1.0 / LIFT))
    # From here on in the place of dstates.
    b_x = gl.allocate_shared_memory(gl.float16, [BT, D], TILE)
    _store(dk_out, b_dx, b_x, i_hm, length, D, WIDE_ROWS)

    # All have read dstates.
    gl.thread_barrier()
    b_q = gl.allocate_shared_memory(gl.float16, [BT, D], TILE)
    b_dy = gl.allocate_shared_memory(gl.float16, [BT, D], TILE)
    b_v = b_x._reinterpret(v.dtype, [BT, D], TILE)
    mbarrier.expect(full.index(2), 6 * BT * D)
    tma.async_copy_global_to_shared(q_in, [i_row, 0], full.index(2), b_q)
    tma.async_copy_global_to_shared(dvalues, [i_row, 0], full.index(2), b_dy)
    tma.async_copy_global_to_shared(v, [i_t, i_col], full.index(2), b_v)
    b_attend = gl.load(attend + o_ij, mask=m_i, other=0.0)
    factor = _factors(p_f + 2 * D, LEFT)
    if length < BT:
        _clear(b_do, length)
        gl.thread_barrier()
    left = (b_do.load(LEFT).to(gl.float32) * (1.0 / do_s)).to(gl.float16)
    b_da, left = _product(left * factor, b_c.permute((1, 0)), zeros_T, LEFT_OF_TOKENS)
    factor = _factors(p_f + 3 * D, LEFT)
    b_da, left = warpgroup_mma_wait(0, deps=(b_da, left))
    left = (b_do.load(LEFT).to(gl.float32) * (1.0 / do_s)).to(gl.float16)
    b_dx, left = _product(left * factor, b_s, zeros, LEFT)
    b_da = gl.where(o_i >= o_j, b_da, 0.0)
    # A token's score with itself does not decay: kept apart, it need not cancel in the decay's gradient.
    _store_scalars(own_scores, _diagonal(b_da) * (do_s * c_s), i_hm, length, 1)
    b_dqk = gl.where(o_i == o_j, 0.0, b_da) * (SCORE_SHIFT * (do_s / larger) * (c_s / unit_s))
    dscores += i_hm * BT
    gl.store(dscores + o_ij, b_dqk.to(gl.bfloat16), mask=m_i)
    b_da *= b_attend.to(gl.float32)
    q_dot = gl.convert_layout(gl.sum(b_da, 1) * (do_s * c_s), gl.SliceLayout(1, BY_KEY))
    k_dot += gl.convert_layout(gl.sum(b_da, 0) * (do_s * c_s), gl.SliceLayout(1, BY_KEY))
    mbarrier.wait(full.index(2), 0)
    b_dx, left = warpgroup_mma_wait(0, deps=(b_dx, left))
    q_dot += gl.sum(b_dx * b_q.load(BY_KEY).to(gl.float32), 1) * (do_s * s_s * (1.0 / LIFT))
    _store_scalars(q_dots, q_dot, i_hm, length, 1)
    _store(dq_in, b_dx, b_q, i_hm, length, D, WIDE_ROWS)

    b_keys = gl.load(keys + o_ij, mask=m_i, other=0.0)
    if length < BT:
        _clear(b_dy, length)
        gl.thread_barrier()
    wide = b_dy.load(BY_KEY).to(gl.float32) * _factors(dvalues_scale + i_nh * D, BY_KEY)
    k_dot -= gl.sum(wide * b_v.load(BY_KEY).to(gl.float32), 1) * b_beta
    _store(dv + i_col, wide * gl.expand_dims(b_beta, 1), b_v, i_t, length, H * D, WIDE_ROWS)
    factor = _factors(p_f + 4 * D, LEFT)
    b_da, left = _product(b_dy.load(LEFT) * factor, b_c.permute((1, 0)), zeros_T, LEFT_OF_TOKENS)
    factor = _factors(p_f + 5 * D, LEFT)
    b_da, left = warpgroup_mma_wait(0, deps=(b_da, left))
    b_dx, left = _product(b_dy.load(LEFT) * factor, b_s, zeros, LEFT)
    # From (1 + a) c = beta (v - k exp(G) S): beta times its gradient, of which nothing cancels.
    own = _diagonal(b_da) * (dy_s * c_s)
    beta_T = gl.convert_layout(b_beta, gl.SliceLayout(1, BY_TOKEN))
    _store_scalars(dbeta + i_h, own * (1.0 - beta_T), i_t, length, H)
    b_da = gl.where(o_i > o_j, b_da, 0.0)
    b_dkk = b_da * (-SCORE_SHIFT * (dy_s / larger) * (c_s / unit_s))
    gl.store(dscores + gl.cast(M, gl.int64) * H * BT + o_ij, b_dkk.to(gl.bfloat16), mask=m_i)
    b_da *= b_keys.to(gl.float32)
    own -= gl.convert_layout(gl.sum(b_da * gl.expand_dims(beta_T, 1), 0) * (dy_s * c_s), gl.SliceLayout(1, BY_TOKEN))
    k_dot += gl.convert_layout(own, gl.SliceLayout(1, BY_KEY))
    _store_scalars(k_dots, k_dot, i_hm, length, 1)
    b_dx, left = warpgroup_mma_wait(0, deps=(b_dx, left))
    _store(dk_in, b_dx, b_dy, i_hm, length, D, WIDE_ROWS)
