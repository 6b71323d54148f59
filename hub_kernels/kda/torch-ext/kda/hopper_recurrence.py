"""The serial part on Hopper, for 16-bit inputs and K = V = 128: recurrence.py with the state in registers.

The copy engine brings the next chunks while one is worked on. Left operands are tiles [V, ...] that come from the
registers in which the product before left them, so that nothing of the way from one state to the next goes through
shared memory: a warp has 16 values of the state, and their products with all keys and tokens.

Sums of terms with different scales are taken in units of one of them, by value: powers of two, by which exact products
change. No unit is smaller than 2^-60 of the others, where fp16 has nothing left of their terms.

Legend: M tokens, N chunks of BT tokens, X documents, H heads, K key width, V value width; tiles lie as [BT, D] in
memory and shared memory.
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

from .scores import LARGEST, LARGEST_SOLVED, LIFT, scale_of
from .tiles import BT

# K and V.
D = gl.constexpr(128)
WARPS = gl.constexpr(8)
# Chunks in shared memory at a time.
STAGES = gl.constexpr(2)
# Accumulators [V, BT] and [V, K], left operands of such, and [V, BT] as it is stored, eight values at a time.
BY_TOKEN = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
BY_KEY = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))
LEFT_OF_TOKENS = gl.constexpr(gl.DotOperandLayout(0, BY_TOKEN, 2))
LEFT_OF_KEYS = gl.constexpr(gl.DotOperandLayout(0, BY_KEY, 2))
STORED = gl.constexpr(gl.BlockedLayout([8, 1], [16, 2], [1, 8], [0, 1]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
APART = gl.constexpr(2.0**-60)


@gluon.jit
def _load(wide, tiles, wide_stage, stages, full, i_t, i_h, M, there, BYTES: gl.constexpr):
    """Bring the chunk from token i_t on into a stage: of `wide` [M, H D], and of tiles [H M, ...]."""
    mbarrier.expect(full, BYTES, pred=there)
    tma.async_copy_global_to_shared(wide, [i_t, i_h * D], full, wide_stage, pred=there)
    for i in gl.static_range(len(tiles)):
        tma.async_copy_global_to_shared(tiles[i], [i_h * M + i_t, 0], full, stages[i], pred=there)


@gluon.jit
def _clear(stage, length):
    """Zeros for what is behind the end of the document: another one's, or nothing's."""
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, ROWS))
    x = stage.load(ROWS)
    stage.store(gl.where(gl.expand_dims(o_t < length, 1), x, gl.zeros_like(x)))


@gluon.jit
def _stages(ring, i_s):
    """The tiles of a stage."""
    stages = ()
    for i in gl.static_range(len(ring)):
        stages = stages + (ring[i].index(i_s),)  # noqa: RUF005
    return stages


@gluon.jit
def _scale(x, most: gl.constexpr):
    return scale_of(gl.max(gl.abs(x), 1), most, False)


@gluon.jit
def _times(x, factor_V):
    """Rows of x times factors, which may come from another accumulator."""
    return x * gl.expand_dims(gl.convert_layout(factor_V, gl.SliceLayout(1, x.type.layout)), 1)


@gluon.jit
def _left(x, LAYOUT: gl.constexpr):
    """A left operand: its places are those of an accumulator."""
    return gl.convert_layout(x.to(gl.float16), LAYOUT, assert_trivial=True)


@gluon.jit
def _store_values(p, x_VT, i_t, i_h, length, stride):
    """x [V, BT] to rows i_t ... of p, stride apart, from column 128 i_h on."""
    x = gl.convert_layout(x_VT.to(p.dtype.element_ty), STORED)
    o_v = gl.arange(0, D, layout=gl.SliceLayout(1, STORED))
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(0, STORED))
    places = gl.expand_dims(o_t * stride, 0) + gl.expand_dims(o_v, 1)
    gl.store(p + (i_t.to(gl.int64) * stride + i_h * D) + places, x, mask=gl.expand_dims(o_t < length, 0))


@gluon.jit
def _state_places(i_xh):
    """Of a state [K, V] in memory as [V, K] in registers."""
    o_v = gl.arange(0, D, layout=gl.SliceLayout(1, BY_KEY))
    o_k = gl.arange(0, D, layout=gl.SliceLayout(0, BY_KEY))
    return i_xh.to(gl.int64) * (D * D) + gl.expand_dims(o_k * D, 0) + gl.expand_dims(o_v, 1)


@gluon.jit
def _save_state(states, state, states_scale, scale, i_nh, place):
    """A state as an operand, and its scales, to where others read them."""
    tma.store_wait(0)
    place.store(state)
    fence_async_shared()
    tma.async_copy_shared_to_global(states, [i_nh * D, 0], place)
    o_v = gl.arange(0, D, layout=gl.SliceLayout(1, BY_KEY))
    gl.store(states_scale + i_nh.to(gl.int64) * D + o_v, scale)


@gluon.jit(do_not_specialize=["M"])
def forward_kernel(
    v, k_in, solve, k_out, q_in, attend, decay, documents, initial, final, o, states, states_scale, values,
    values_scale, M, H, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """See recurrence.py; v to attend, and states, are descriptors."""
    i_h, i_x = gl.program_id(0) % H, gl.program_id(0) // H
    i_n, count = gl.load(documents + 4 * i_x), gl.load(documents + 4 * i_x + 1)
    i_t, length = gl.load(documents + 4 * i_x + 2), gl.load(documents + 4 * i_x + 3)
    if BACKWARD:
        tiles = (k_in, solve, k_out)
    else:
        tiles = (k_in, solve, k_out, q_in, attend)
    BYTES: gl.constexpr = 2 * BT * ((3 * D + BT) if BACKWARD else (4 * D + 2 * BT))
    ring_v = gl.allocate_shared_memory(v.dtype, [STAGES, BT, D], TILE)
    ring = ()
    for i in gl.static_range(len(tiles)):
        ring = ring + (gl.allocate_shared_memory(gl.float16, [STAGES, BT, tiles[i].block_shape[1]], TILE),)  # noqa: RUF005
    if BACKWARD:
        place = gl.allocate_shared_memory(gl.float16, [D, D], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_a in gl.static_range(STAGES):
        mbarrier.init(full.index(i_a), count=1)
    # The copy engine must see the barriers.
    fence_async_shared()
    for i_a in gl.static_range(STAGES):
        _load(
            v, tiles, ring_v.index(i_a), _stages(ring, i_a), full.index(i_a), i_t + i_a * BT, i_h, M, i_a < count, BYTES
        )

    unit = gl.full([D], 1.0, gl.float32, layout=gl.SliceLayout(1, BY_KEY))
    if HAS_INITIAL:
        b_s = gl.load(initial + _state_places(i_x * H + i_h))
    else:
        b_s = gl.zeros([D, D], gl.float32, layout=BY_KEY)
    o_k = gl.arange(0, D, layout=gl.SliceLayout(0, BY_KEY))
    o_v = gl.arange(0, D, layout=gl.SliceLayout(1, BY_TOKEN))
    for i in range(count):
        i_s = i % STAGES
        i_nh = i_n * H + i_h
        b_decay = gl.load(decay + i_nh.to(gl.int64) * D + o_k)
        mbarrier.wait(full.index(i_s), i // STAGES % 2)
        stages = _stages(ring, i_s)
        if length < BT:
            _clear(ring_v.index(i_s), length)
            for j in gl.static_range(len(tiles)):
                _clear(stages[j], length)
            # Products read what other threads have written.
            fence_async_shared()
            gl.thread_barrier()
        b_k, b_solve, b_write = stages[0], stages[1], stages[2]

        scale = _scale(b_s, LARGEST)
        s_scale = scale * unit
        b_s16 = _times(b_s, 1.0 / scale).to(gl.float16)
        left = gl.convert_layout(b_s16, LEFT_OF_TOKENS, assert_trivial=True)
        zeros = gl.zeros([D, BT], gl.float32, layout=BY_TOKEN)
        b_z = warpgroup_mma(left, b_k.permute((1, 0)), zeros, is_async=True)
        if not BACKWARD:
            b_o = warpgroup_mma(left, stages[3].permute((1, 0)), zeros, is_async=True)
        else:
            _save_state(states, b_s16, states_scale, s_scale, i_nh, place)
        b_v = ring_v.index(i_s).permute((1, 0)).load(BY_TOKEN).to(gl.float32)
        b_s = b_s * gl.expand_dims(b_decay, 0)
        if BACKWARD:
            b_z, left = warpgroup_mma_wait(0, deps=(b_z, left))
        else:
            b_z, b_o, left = warpgroup_mma_wait(0, deps=(b_z, b_o, left))
        b_z = b_v - _times(b_z, s_scale * (1.0 / LIFT))
        z_scale = gl.maximum(
            _scale(b_z, LARGEST_SOLVED), gl.convert_layout(s_scale, gl.SliceLayout(1, BY_TOKEN)) * APART
        )
        left = _left(_times(b_z, 1.0 / z_scale), LEFT_OF_TOKENS)
        b_c = warpgroup_mma(left, b_solve.permute((1, 0)), zeros, is_async=True)
        new_unit = gl.convert_layout(z_scale, gl.SliceLayout(1, BY_KEY)) * (1.0 / LIFT)
        b_s = _times(b_s, unit / new_unit)
        unit = new_unit
        if not BACKWARD:
            b_o = _times(b_o, s_scale / unit * (1.0 / (LIFT * LIFT)))
        b_c, left = warpgroup_mma_wait(0, deps=(b_c, left))
        b_c = b_c.to(gl.float16)
        left = gl.convert_layout(b_c, LEFT_OF_KEYS, assert_trivial=True)
        b_s = warpgroup_mma(left, b_write, b_s, is_async=True)
        if BACKWARD:
            i_hm = gl.cast(i_h, gl.int64) * M + i_t
            _store_values(values, b_c, i_hm, 0, length, D)
            gl.store(values_scale + i_nh.to(gl.int64) * D + o_v, z_scale)
        else:
            left_o = gl.convert_layout(b_c, LEFT_OF_TOKENS, assert_trivial=True)
            b_o = warpgroup_mma(left_o, stages[4].permute((1, 0)), b_o, is_async=True)
            b_o, left_o = warpgroup_mma_wait(0, deps=(b_o, left_o))
            _store_values(o, _times(b_o, z_scale), i_t, i_h, length, H * D)
        b_s, left = warpgroup_mma_wait(0, deps=(b_s, left))
        # All have read this chunk.
        gl.thread_barrier()
        _load(
            v, tiles, ring_v.index(i_s), stages, full.index(i_s), i_t + STAGES * BT, i_h, M, i + STAGES < count, BYTES
        )
        i_n += 1
        i_t += BT
        length -= BT
    if HAS_FINAL:
        gl.store(final + _state_places(i_x * H + i_h), _times(b_s, unit))
    if BACKWARD:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def backward_kernel(
    do, attend, k_out, q_in, inverse, k_in, beta, decay, documents, dfinal, dinitial, do_scale, dstates, dstates_scale,
    dvalues, dvalues_scale, M, H, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr,
):  # fmt: skip
    """See recurrence.py; do to k_in, and dstates, are descriptors."""
    i_h, i_x = gl.program_id(0) % H, gl.program_id(0) // H
    count = gl.load(documents + 4 * i_x + 1)
    i_n = gl.load(documents + 4 * i_x) + count - 1
    i_t = gl.load(documents + 4 * i_x + 2) + (count - 1) * BT
    length = gl.load(documents + 4 * i_x + 3) - (count - 1) * BT
    tiles = (attend, k_out, q_in, inverse, k_in)
    BYTES: gl.constexpr = 2 * BT * (4 * D + 2 * BT)
    ring_do = gl.allocate_shared_memory(do.dtype, [STAGES, BT, D], TILE)
    ring = ()
    for i in gl.static_range(len(tiles)):
        ring = ring + (gl.allocate_shared_memory(gl.float16, [STAGES, BT, tiles[i].block_shape[1]], TILE),)  # noqa: RUF005
    place = gl.allocate_shared_memory(gl.float16, [D, D], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_a in gl.static_range(STAGES):
        mbarrier.init(full.index(i_a), count=1)
    # The copy engine must see the barriers.
    fence_async_shared()
    for i_a in gl.static_range(STAGES):
        _load(
            do, tiles, ring_do.index(i_a), _stages(ring, i_a), full.index(i_a), i_t - i_a * BT, i_h, M, i_a < count,
            BYTES,
        )  # fmt: skip

    unit = gl.full([D], 1.0, gl.float32, layout=gl.SliceLayout(1, BY_KEY))
    if HAS_FINAL:
        b_ds = gl.load(dfinal + _state_places(i_x * H + i_h))
    else:
        b_ds = gl.zeros([D, D], gl.float32, layout=BY_KEY)
    o_k = gl.arange(0, D, layout=gl.SliceLayout(0, BY_KEY))
    o_v = gl.arange(0, D, layout=gl.SliceLayout(1, BY_TOKEN))
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(0, BY_TOKEN))
    for i in range(count):
        i_s = i % STAGES
        i_nh, i_hm = i_n * H + i_h, gl.cast(i_h, gl.int64) * M + i_t
        b_decay = gl.load(decay + i_nh.to(gl.int64) * D + o_k)
        b_beta = gl.load(beta + i_hm + o_t, mask=o_t < length, other=0.0)
        mbarrier.wait(full.index(i_s), i // STAGES % 2)
        stages = _stages(ring, i_s)
        if length < BT:
            _clear(ring_do.index(i_s), length)
            for j in gl.static_range(len(tiles)):
                _clear(stages[j], length)
            # Products read what other threads have written.
            fence_async_shared()
            gl.thread_barrier()
        b_a, b_write, b_q, b_inverse, b_k = stages[0], stages[1], stages[2], stages[3], stages[4]

        scale = _scale(b_ds, LARGEST)
        ds_scale = scale * unit
        b_s16 = _times(b_ds, 1.0 / scale).to(gl.float16)
        left = gl.convert_layout(b_s16, LEFT_OF_TOKENS, assert_trivial=True)
        zeros = gl.zeros([D, BT], gl.float32, layout=BY_TOKEN)
        b_dc = warpgroup_mma(left, b_write.permute((1, 0)), zeros, is_async=True)
        _save_state(dstates, b_s16, dstates_scale, ds_scale, i_nh, place)
        ds_scale_c = gl.convert_layout(ds_scale, gl.SliceLayout(1, BY_TOKEN))
        b_do = ring_do.index(i_s).permute((1, 0)).load(BY_TOKEN).to(gl.float32)
        scale_do = gl.maximum(_scale(b_do, LARGEST), ds_scale_c * APART)
        gl.store(do_scale + i_nh.to(gl.int64) * D + o_v, scale_do)
        b_do = _times(b_do, 1.0 / scale_do).to(gl.float16)
        left_do = gl.convert_layout(b_do, LEFT_OF_TOKENS, assert_trivial=True)
        b_da = warpgroup_mma(left_do, b_a, zeros, is_async=True)
        new_unit = gl.convert_layout(scale_do, gl.SliceLayout(1, BY_KEY)) * (1.0 / LIFT)
        b_ds = _times(b_ds * gl.expand_dims(b_decay, 0), unit / new_unit)
        left_ds = gl.convert_layout(b_do, LEFT_OF_KEYS, assert_trivial=True)
        b_dc, b_da, left, left_do = warpgroup_mma_wait(0, deps=(b_dc, b_da, left, left_do))
        b_ds = warpgroup_mma(left_ds, b_q, b_ds, is_async=True)
        b_dc = _times(b_dc, ds_scale * (1.0 / LIFT)) + _times(b_da, scale_do)
        dc_scale = gl.maximum(_scale(b_dc, LARGEST_SOLVED), gl.maximum(scale_do, ds_scale_c) * APART)
        left = _left(_times(b_dc, 1.0 / dc_scale), LEFT_OF_TOKENS)
        b_dz = warpgroup_mma(left, b_inverse, zeros, is_async=True)
        b_dz, b_ds, left, left_ds = warpgroup_mma_wait(0, deps=(b_dz, b_ds, left, left_ds))
        unit = gl.convert_layout(dc_scale, gl.SliceLayout(1, BY_KEY)) * (1.0 / LIFT)
        b_ds = _times(b_ds, new_unit / unit)
        left = _left(b_dz * gl.expand_dims(-b_beta, 0), LEFT_OF_KEYS)
        b_ds = warpgroup_mma(left, b_k, b_ds, is_async=True)
        _store_values(dvalues, b_dz, i_hm, 0, length, D)
        gl.store(dvalues_scale + i_nh.to(gl.int64) * D + o_v, dc_scale)
        b_ds, left = warpgroup_mma_wait(0, deps=(b_ds, left))
        # All have read this chunk.
        gl.thread_barrier()
        _load(
            do, tiles, ring_do.index(i_s), stages, full.index(i_s), i_t - STAGES * BT, i_h, M, i + STAGES < count, BYTES
        )
        i_n -= 1
        i_t -= BT
        length += BT
    if HAS_INITIAL:
        gl.store(dinitial + _state_places(i_x * H + i_h), _times(b_ds, unit))
    tma.store_wait(0)
