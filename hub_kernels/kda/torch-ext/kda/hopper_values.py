"""The value gradients on Hopper, for 16-bit inputs and K = V = 128: `value_gradients_kernel` of gradients.py.

Tokens are the rows of all products, and their left operands come from registers. Every value has a scale of its own in
each tensor: the product of two, over the largest such product, is a power of two that the left operand's columns are
multiplied by, so that right operands stay as the copy engine brings them.

Legend: M tokens, N chunks of BT tokens, H heads, D = K = V. Tiles lie as [BT, D] or [D, D] in memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gradients import SCORE_SHIFT
from .hopper_recurrence import TILE, D
from .scores import LIFT
from .tiles import BT

WARPS = gl.constexpr(4)
# Accumulators [BT, D] and [BT, BT], left operands, and what is stored or summed: eight channels of a row at a time.
BY_KEY = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
BY_TOKEN = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, BY_KEY, 2))
LEFT_OF_TOKENS = gl.constexpr(gl.DotOperandLayout(0, BY_TOKEN, 2))
WIDE_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# A vector [D], the same in every warp.
EVERYWHERE = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _clear(place, length):
    """Zeros for what is behind the end of the document."""
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, WIDE_ROWS))
    x = place.load(WIDE_ROWS)
    place.store(gl.where(gl.expand_dims(o_t < length, 1), x, gl.zeros_like(x)))


@gluon.jit
def _scales(p_scale, i_nh):
    """The largest of the values' scales, and [D] by how much each one's is smaller."""
    scales = gl.load(p_scale + i_nh * D + gl.arange(0, D, layout=EVERYWHERE))
    largest = gl.max(scales, 0)
    return largest, scales * (1.0 / largest)


@gluon.jit
def _product(left, ratios, right, acc, LAYOUT: gl.constexpr):
    """acc + left times right, columns of left times ratios, which lie in shared memory; and the operand, to be kept."""
    left *= gl.expand_dims(ratios.load(gl.SliceLayout(0, left.type.layout)), 0)
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
def _load_scores(p, i_hm, length):
    """[BT, BT] as an accumulator has it."""
    o_i = gl.expand_dims(gl.arange(0, BT, layout=gl.SliceLayout(1, BY_TOKEN)), 1)
    o_j = gl.expand_dims(gl.arange(0, BT, layout=gl.SliceLayout(0, BY_TOKEN)), 0)
    return gl.load(p + i_hm * BT + o_i * BT + o_j, mask=o_i < length, other=0.0)


@gluon.jit(do_not_specialize=["M"])
def value_gradients_kernel(
    do, v, states, dstates, values, dvalues, q_in, k_out, beta, chunks, attend, keys, decay,
    do_scale, states_scale, dstates_scale, values_scale, dvalues_scale,
    dq_in, dk_in, dk_out, dv, dbeta, dtotal, dscores, own_scores, q_dots, k_dots, ratios, M, H,
):  # fmt: skip
    """See gradients.py; do to k_out are descriptors, dq_in and dk_out where q_in and k_out are."""
    i_n, i_h = gl.program_id(0) // H, gl.program_id(0) % H
    i_t, length = gl.load(chunks + 2 * i_n), gl.load(chunks + 2 * i_n + 1)
    if length == 0:
        return
    i_nh = gl.cast(i_n, gl.int64) * H + i_h
    i_hm = gl.cast(i_h, gl.int64) * M + i_t
    i_row, i_state, i_col = i_h * M + i_t, (i_n * H + i_h) * D, i_h * D
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=1)
    b_ds = gl.allocate_shared_memory(gl.float16, [D, D], TILE)
    b_c = gl.allocate_shared_memory(gl.float16, [BT, D], TILE)
    b_x = gl.allocate_shared_memory(gl.float16, [BT, D], TILE)
    b_s = gl.allocate_shared_memory(gl.float16, [D, D], TILE)
    b_do = gl.allocate_shared_memory(do.dtype, [BT, D], TILE)
    # The copy engine must see the barriers.
    fence_async_shared()
    mbarrier.expect(full.index(0), 4 * D * (D // 2 + BT))
    tma.async_copy_global_to_shared(dstates, [i_state, 0], full.index(0), b_ds)
    tma.async_copy_global_to_shared(values, [i_row, 0], full.index(0), b_c)
    tma.async_copy_global_to_shared(k_out, [i_row, 0], full.index(0), b_x)
    mbarrier.expect(full.index(1), 2 * D * (D + BT))
    tma.async_copy_global_to_shared(states, [i_state, 0], full.index(1), b_s)
    tma.async_copy_global_to_shared(do, [i_t, i_col], full.index(1), b_do)

    do_s, do_ratio = _scales(do_scale, i_nh)
    s_s, s_ratio = _scales(states_scale, i_nh)
    ds_s, ds_ratio = _scales(dstates_scale, i_nh)
    c_s, c_ratio = _scales(values_scale, i_nh)
    dy_s, dy_ratio = _scales(dvalues_scale, i_nh)
    larger = gl.maximum(gl.maximum(do_s, dy_s), ds_s * 2.0**-60)
    unit_s = gl.maximum(c_s, s_s * 2.0**-60)
    p_ratios = ratios + 4 * i_nh
    gl.store(p_ratios, larger * unit_s * (1.0 / SCORE_SHIFT))
    gl.store(p_ratios + 1, (do_s / larger) * (s_s / unit_s) * SCORE_SHIFT)
    gl.store(p_ratios + 2, (dy_s / larger) * (s_s / unit_s) * SCORE_SHIFT)
    gl.store(p_ratios + 3, c_s / unit_s * (ds_s / larger) * SCORE_SHIFT)
    # What left operands are multiplied by: values in dstates, states in dstates.
    first = gl.allocate_shared_memory(gl.float16, [2, D], VECTOR)
    first.index(0).store((c_ratio * ds_ratio).to(gl.float16))
    first.index(1).store((s_ratio * ds_ratio).to(gl.float16))
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, LEFT))
    b_beta = gl.load(beta + i_hm + o_t, mask=o_t < length, other=0.0)
    zeros = gl.zeros([BT, D], gl.float32, layout=BY_KEY)
    zeros_T = gl.zeros([BT, BT], gl.float32, layout=BY_TOKEN)

    mbarrier.wait(full.index(0), 0)
    if length < BT:
        _clear(b_c, length)
        fence_async_shared()
        gl.thread_barrier()
    b_dx, left = _product(b_c.load(LEFT), first.index(0), b_ds, zeros, LEFT)
    mbarrier.wait(full.index(1), 0)
    b_dx, left = warpgroup_mma_wait(0, deps=(b_dx, left))
    # The decay of the whole chunk: half by half, the diagonal of a product.
    o_k = gl.arange(0, BT, layout=gl.SliceLayout(1, BY_TOKEN))
    for i in gl.static_range(2):
        b_half = b_s.slice(BT * i, BT, dim=1).permute((1, 0)).load(LEFT_OF_TOKENS)
        total, left = _product(b_half, first.index(1), b_ds.slice(BT * i, BT, dim=1), zeros_T, LEFT_OF_TOKENS)
        total, left = warpgroup_mma_wait(0, deps=(total, left))
        p_k = i_nh * D + BT * i + o_k
        gl.store(dtotal + p_k, _diagonal(total) * gl.load(decay + p_k) * (s_s * ds_s))
    k_dot = gl.sum(b_dx * b_x.load(BY_KEY).to(gl.float32), 1) * (c_s * ds_s * (1.0 / LIFT))
    _store(dk_out, b_dx, b_x, i_hm, length, D, WIDE_ROWS)

    # Gradients of outputs in states and values, gradients of values in both.
    second = gl.allocate_shared_memory(gl.float16, [4, D], VECTOR)
    second.index(0).store((do_ratio * s_ratio).to(gl.float16))
    second.index(1).store((do_ratio * c_ratio).to(gl.float16))
    second.index(2).store((dy_ratio * s_ratio).to(gl.float16))
    second.index(3).store((dy_ratio * c_ratio).to(gl.float16))
    # In the place of dstates, which all have read.
    gl.thread_barrier()
    b_q = gl.allocate_shared_memory(gl.float16, [BT, D], TILE)
    b_dy = gl.allocate_shared_memory(gl.float16, [BT, D], TILE)
    mbarrier.expect(full.index(2), 4 * BT * D)
    tma.async_copy_global_to_shared(q_in, [i_row, 0], full.index(2), b_q)
    tma.async_copy_global_to_shared(dvalues, [i_row, 0], full.index(2), b_dy)
    if length < BT:
        _clear(b_do, length)
        gl.thread_barrier()
    p_scale = i_nh * D + gl.arange(0, D, layout=gl.SliceLayout(0, LEFT))
    left = (b_do.load(LEFT).to(gl.float32) * gl.expand_dims(1.0 / gl.load(do_scale + p_scale), 0)).to(gl.float16)
    b_dx, left_1 = _product(left, second.index(0), b_s, zeros, LEFT)
    b_da, left_2 = _product(left, second.index(1), b_c.permute((1, 0)), zeros_T, LEFT_OF_TOKENS)
    b_attend = _load_scores(attend, i_hm, length)
    mbarrier.wait(full.index(2), 0)
    b_dx, b_da, left_1, left_2 = warpgroup_mma_wait(0, deps=(b_dx, b_da, left_1, left_2))
    q_dot = gl.sum(b_dx * b_q.load(BY_KEY).to(gl.float32), 1) * (do_s * s_s * (1.0 / LIFT))
    _store(dq_in, b_dx, b_q, i_hm, length, D, WIDE_ROWS)

    o_i = gl.expand_dims(gl.arange(0, BT, layout=gl.SliceLayout(1, BY_TOKEN)), 1)
    o_j = gl.expand_dims(gl.arange(0, BT, layout=gl.SliceLayout(0, BY_TOKEN)), 0)
    b_da = gl.where(o_i >= o_j, b_da, 0.0)
    # A token's score with itself does not decay: kept apart, it need not cancel in the decay's gradient.
    own = _diagonal(b_da) * (do_s * c_s)
    _store_scalars(own_scores, own, i_hm, length, 1)
    b_dqk = gl.where(o_i == o_j, 0.0, b_da) * (SCORE_SHIFT * (do_s / larger) * (c_s / unit_s))
    place = gl.allocate_shared_memory(gl.bfloat16, [BT, BT], TILE)
    _store(dscores, b_dqk, place, i_hm, length, BT, ROWS)
    b_da *= b_attend.to(gl.float32)
    q_dot += gl.convert_layout(gl.sum(b_da, 1) * (do_s * c_s), gl.SliceLayout(1, BY_KEY))
    _store_scalars(q_dots, q_dot, i_hm, length, 1)
    k_dot += gl.convert_layout(gl.sum(b_da, 0) * (do_s * c_s), gl.SliceLayout(1, BY_KEY))

    # In the place of do.
    gl.thread_barrier()
    b_v = gl.allocate_shared_memory(v.dtype, [BT, D], TILE)
    mbarrier.expect(full.index(3), 2 * BT * D)
    tma.async_copy_global_to_shared(v, [i_t, i_col], full.index(3), b_v)
    if length < BT:
        _clear(b_dy, length)
        gl.thread_barrier()
    left = b_dy.load(LEFT)
    b_keys = _load_scores(keys, i_hm, length)
    b_da, left_1 = _product(left, second.index(3), b_c.permute((1, 0)), zeros_T, LEFT_OF_TOKENS)
    b_da, left_1 = warpgroup_mma_wait(0, deps=(b_da, left_1))
    b_dx, left_1 = _product(left, second.index(2), b_s, zeros, LEFT)
    wide = left.to(gl.float32) * gl.expand_dims(gl.load(dvalues_scale + p_scale), 0)
    mbarrier.wait(full.index(3), 0)
    v_dot = gl.sum(wide * b_v.load(LEFT).to(gl.float32), 1) * b_beta
    _store(dv + i_col, wide * gl.expand_dims(b_beta, 1), b_v, i_t, length, H * D, WIDE_ROWS)
    b_dx, left_1 = warpgroup_mma_wait(0, deps=(b_dx, left_1))
    _store(dk_in, b_dx, b_dy, i_hm, length, D, WIDE_ROWS)
    # From (1 + a) c = beta (v - k exp(G) S): beta times its gradient, of which nothing cancels.
    own = _diagonal(b_da) * (dy_s * c_s)
    beta_T = gl.convert_layout(b_beta, gl.SliceLayout(1, BY_TOKEN))
    _store_scalars(dbeta + i_h, own * (1.0 - beta_T), i_t, length, H)
    k_dot += gl.convert_layout(own, gl.SliceLayout(1, BY_KEY)) - gl.convert_layout(v_dot, gl.SliceLayout(1, BY_KEY))
    b_da = gl.where(o_i > o_j, b_da, 0.0)
    place = gl.allocate_shared_memory(gl.bfloat16, [BT, BT], TILE)
    b_dkk = b_da * (-SCORE_SHIFT * (dy_s / larger) * (c_s / unit_s))
    _store(dscores + gl.cast(M, gl.int64) * H * BT, b_dkk, place, i_hm, length, BT, ROWS)
    b_da *= b_keys.to(gl.float32)
    k_dot -= gl.convert_layout(gl.sum(b_da * gl.expand_dims(beta_T, 1), 0) * (dy_s * c_s), gl.SliceLayout(1, BY_KEY))
    _store_scalars(k_dots, k_dot, i_hm, length, 1)
