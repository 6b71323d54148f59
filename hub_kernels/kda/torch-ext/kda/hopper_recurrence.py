"""The serial part on Hopper, for 16-bit inputs and K = V = 128: recurrence.py with the state in registers.

Three roles run side by side: a warp has the copy engine bring the next chunks into a ring of shared memory, and two
warpgroups have BV = 64 values each, which never meet. Left operands are tiles [BV, ...] that come from the registers in
which the product before left them, so that nothing of the way from one state to the next goes through shared memory.

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

# K and V, and values of a warpgroup.
D = gl.constexpr(128)
BV = gl.constexpr(64)
# Chunks in shared memory at a time.
STAGES = gl.constexpr(2)
# Accumulators [BV, BT] and [BV, K], left operands of such, and [BT, ...] as it is stored, eight values at a time.
BY_TOKEN = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
BY_KEY = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
LEFT_OF_TOKENS = gl.constexpr(gl.DotOperandLayout(0, BY_TOKEN, 2))
LEFT_OF_KEYS = gl.constexpr(gl.DotOperandLayout(0, BY_KEY, 2))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
APART = gl.constexpr(2.0**-60)
# The least scale of a state, as in recurrence.py: in units of values that are zero it would underflow.
LEAST = gl.constexpr(2.0**-94)


@gluon.jit
def _load_chunks(wide, tiles, ring, full, empty, count, i_t, i_h, M, STEP: gl.constexpr):
    """The role that loads: chunks from token i_t on, STEP tokens apart, of `wide` [M, H D] and tiles [H M, ...]."""
    BYTES: gl.constexpr = wide.block_type.nbytes + _bytes(tiles)
    for i in range(count):
        i_s = i % STAGES
        b_full = full.index(i_s)
        mbarrier.wait(empty.index(i_s), i // STAGES % 2 ^ 1)
        mbarrier.expect(b_full, BYTES)
        tma.async_copy_global_to_shared(wide, [i_t, i_h * D], b_full, ring[0].index(i_s))
        for j in gl.static_range(len(tiles)):
            tma.async_copy_global_to_shared(tiles[j], [i_h * M + i_t, 0], b_full, ring[j + 1].index(i_s))
        i_t += STEP


@gluon.jit
def _clear(stages, cleared, length, i_w: gl.constexpr):
    """Zeros for what is behind the end of the document: another one's, or nothing's. Each warpgroup has half to do."""
    for j in gl.static_range(len(stages)):
        if j % 2 == i_w:
            o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, ROWS))
            x = stages[j].load(ROWS)
            stages[j].store(gl.where(gl.expand_dims(o_t < length, 1), x, gl.zeros_like(x)))
    # Products read what other threads have written.
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(cleared)
    mbarrier.wait(cleared, 0)


@gluon.constexpr_function
def _bytes(tiles):
    return sum(tile.block_type.nbytes for tile in tiles)


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
def _store_values(p, x_VT, place, i_t, i_v, length, stride):
    """x [BV, BT] by way of `place` to rows i_t ... of p, stride apart, from column i_v on."""
    place.permute((1, 0)).store(x_VT.to(place.dtype))
    x = place.load(ROWS)
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, ROWS))
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, ROWS))
    places = gl.expand_dims(o_t * stride, 1) + gl.expand_dims(o_v, 0)
    gl.store(p + (i_t.to(gl.int64) * stride + i_v) + places, x, mask=gl.expand_dims(o_t < length, 1))


@gluon.jit
def _state_places(i_xh, i_w: gl.constexpr):
    """Of a state [K, V] in memory as [BV, K] in registers."""
    o_v = BV * i_w + gl.arange(0, BV, layout=gl.SliceLayout(1, BY_KEY))
    o_k = gl.arange(0, D, layout=gl.SliceLayout(0, BY_KEY))
    return i_xh.to(gl.int64) * (D * D) + gl.expand_dims(o_k * D, 0) + gl.expand_dims(o_v, 1)


@gluon.jit
def _save_state(states, state, states_scale, scale, i_nhv, place):
    """A state as an operand, and its scales, to where others read them."""
    tma.store_wait(0)
    place.store(state)
    fence_async_shared()
    tma.async_copy_shared_to_global(states, [i_nhv, 0], place)
    gl.store(states_scale + i_nhv + gl.arange(0, BV, layout=gl.SliceLayout(1, BY_KEY)), scale)


@gluon.jit
def _forward(
    decay, documents, initial, final, o, states, states_scale, values, values_scale, places, stored, ring, barriers,
    i_x, i_h, M, H, i_w: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """The role that multiplies: warpgroup i_w has the values from 64 i_w on."""
    full, empty, cleared = barriers
    i_n, count = gl.load(documents + 4 * i_x), gl.load(documents + 4 * i_x + 1)
    i_t, length = gl.load(documents + 4 * i_x + 2), gl.load(documents + 4 * i_x + 3)
    unit = gl.full([BV], 1.0, gl.float32, layout=gl.SliceLayout(1, BY_KEY))
    if HAS_INITIAL:
        b_s = gl.load(initial + _state_places(i_x * H + i_h, i_w))
    else:
        b_s = gl.zeros([BV, D], gl.float32, layout=BY_KEY)
    zeros = gl.zeros([BV, BT], gl.float32, layout=BY_TOKEN)
    o_k = gl.arange(0, D, layout=gl.SliceLayout(0, BY_KEY))
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(1, BY_TOKEN))
    for i in range(count):
        i_nh = i_n * H + i_h
        i_nhv = i_nh * D + BV * i_w
        b_decay = gl.load(decay + i_nh.to(gl.int64) * D + o_k)
        scale = gl.maximum(_scale(b_s, LARGEST), LEAST / unit)
        s_scale = scale * unit
        b_s16 = _times(b_s, 1.0 / scale).to(gl.float16)
        left = gl.convert_layout(b_s16, LEFT_OF_TOKENS, assert_trivial=True)
        mbarrier.wait(full.index(i % STAGES), i // STAGES % 2)
        stages = _stages(ring, i % STAGES)
        if length < BT:
            _clear(stages, cleared, length, i_w)
        # v, k_in, solve, k_out, q_in, attend
        b_z = warpgroup_mma(left, stages[1].permute((1, 0)), zeros, is_async=True)
        if BACKWARD:
            _save_state(states, b_s16, states_scale, s_scale, i_nhv, places.index(i_w))
        else:
            b_o = warpgroup_mma(left, stages[4].permute((1, 0)), zeros, is_async=True)
        b_v = stages[0].slice(BV * i_w, BV, dim=1).permute((1, 0)).load(BY_TOKEN).to(gl.float32)
        b_s = b_s * gl.expand_dims(b_decay, 0)
        b_z = warpgroup_mma_wait(0 if BACKWARD else 1, deps=(b_z,))
        # What the values are to be less what their keys read of the state; then less what they read of each other.
        b_z = b_v - _times(b_z, s_scale * (1.0 / LIFT))
        z_scale = _scale(b_z, LARGEST_SOLVED)
        z_scale = gl.maximum(z_scale, gl.convert_layout(s_scale, gl.SliceLayout(1, BY_TOKEN)) * APART)
        left_z = _left(_times(b_z, 1.0 / z_scale), LEFT_OF_TOKENS)
        b_c = warpgroup_mma(left_z, stages[2].permute((1, 0)), zeros, is_async=True)
        new_unit = gl.convert_layout(z_scale, gl.SliceLayout(1, BY_KEY)) * (1.0 / LIFT)
        b_s = _times(b_s, unit / new_unit)
        unit = new_unit
        if BACKWARD:
            b_c, left, left_z = warpgroup_mma_wait(0, deps=(b_c, left, left_z))
        else:
            b_c, b_o, left, left_z = warpgroup_mma_wait(0, deps=(b_c, b_o, left, left_z))
        b_c = b_c.to(gl.float16)
        left = gl.convert_layout(b_c, LEFT_OF_KEYS, assert_trivial=True)
        b_s = warpgroup_mma(left, stages[3], b_s, is_async=True)
        if BACKWARD:
            _store_values(values, b_c, stored.index(i_w), gl.cast(i_h, gl.int64) * M + i_t, BV * i_w, length, D)
            gl.store(values_scale + i_nhv + o_v, z_scale)
        else:
            b_o = _times(b_o, s_scale / unit * (1.0 / (LIFT * LIFT)))
            left_o = gl.convert_layout(b_c, LEFT_OF_TOKENS, assert_trivial=True)
            b_o = warpgroup_mma(left_o, stages[5].permute((1, 0)), b_o, is_async=True)
            b_o, left_o = warpgroup_mma_wait(0, deps=(b_o, left_o))
            _store_values(o, _times(b_o, z_scale), stored.index(i_w), i_t, i_h * D + BV * i_w, length, H * D)
        b_s, left = warpgroup_mma_wait(0, deps=(b_s, left))
        mbarrier.arrive(empty.index(i % STAGES))
        i_n += 1
        i_t += BT
        length -= BT
    if HAS_FINAL:
        gl.store(final + _state_places(i_x * H + i_h, i_w), _times(b_s, unit))
    if BACKWARD:
        tma.store_wait(0)


@gluon.jit
def _backward(
    beta, decay, documents, dfinal, dinitial, do_scale, dstates, dstates_scale, dvalues, dvalues_scale, places, stored,
    ring, barriers, i_x, i_h, M, H, i_w: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr,
):  # fmt: skip
    """The role that multiplies: warpgroup i_w has the values from 64 i_w on."""
    full, empty, cleared = barriers
    count = gl.load(documents + 4 * i_x + 1)
    i_n = gl.load(documents + 4 * i_x) + count - 1
    i_t = gl.load(documents + 4 * i_x + 2) + (count - 1) * BT
    length = gl.load(documents + 4 * i_x + 3) - (count - 1) * BT
    unit = gl.full([BV], 1.0, gl.float32, layout=gl.SliceLayout(1, BY_KEY))
    if HAS_FINAL:
        b_ds = gl.load(dfinal + _state_places(i_x * H + i_h, i_w))
    else:
        b_ds = gl.zeros([BV, D], gl.float32, layout=BY_KEY)
    zeros = gl.zeros([BV, BT], gl.float32, layout=BY_TOKEN)
    o_k = gl.arange(0, D, layout=gl.SliceLayout(0, BY_KEY))
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(1, BY_TOKEN))
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(0, BY_TOKEN))
    for i in range(count):
        i_nh, i_hm = i_n * H + i_h, gl.cast(i_h, gl.int64) * M + i_t
        i_nhv = i_nh * D + BV * i_w
        b_decay = gl.load(decay + i_nh.to(gl.int64) * D + o_k)
        b_beta = gl.load(beta + i_hm + o_t, mask=o_t < length, other=0.0)
        scale = gl.maximum(_scale(b_ds, LARGEST), LEAST / unit)
        ds_scale = scale * unit
        b_s16 = _times(b_ds, 1.0 / scale).to(gl.float16)
        left = gl.convert_layout(b_s16, LEFT_OF_TOKENS, assert_trivial=True)
        mbarrier.wait(full.index(i % STAGES), i // STAGES % 2)
        stages = _stages(ring, i % STAGES)
        if length < BT:
            _clear(stages, cleared, length, i_w)
        # do, attend, k_out, q_in, inverse, k_in
        b_dc = warpgroup_mma(left, stages[2].permute((1, 0)), zeros, is_async=True)
        _save_state(dstates, b_s16, dstates_scale, ds_scale, i_nhv, places.index(i_w))
        ds_scale_c = gl.convert_layout(ds_scale, gl.SliceLayout(1, BY_TOKEN))
        b_do = stages[0].slice(BV * i_w, BV, dim=1).permute((1, 0)).load(BY_TOKEN).to(gl.float32)
        scale_do = gl.maximum(_scale(b_do, LARGEST), ds_scale_c * APART)
        gl.store(do_scale + i_nhv + o_v, scale_do)
        b_do = _times(b_do, 1.0 / scale_do).to(gl.float16)
        left_do = gl.convert_layout(b_do, LEFT_OF_TOKENS, assert_trivial=True)
        b_da = warpgroup_mma(left_do, stages[1], zeros, is_async=True)
        new_unit = gl.convert_layout(scale_do, gl.SliceLayout(1, BY_KEY)) * (1.0 / LIFT)
        b_ds = _times(b_ds * gl.expand_dims(b_decay, 0), unit / new_unit)
        left_ds = gl.convert_layout(b_do, LEFT_OF_KEYS, assert_trivial=True)
        b_dc, b_da, left, left_do = warpgroup_mma_wait(0, deps=(b_dc, b_da, left, left_do))
        b_ds = warpgroup_mma(left_ds, stages[3], b_ds, is_async=True)
        b_dc = _times(b_dc, ds_scale * (1.0 / LIFT)) + _times(b_da, scale_do)
        dc_scale = gl.maximum(_scale(b_dc, LARGEST_SOLVED), gl.maximum(scale_do, ds_scale_c) * APART)
        left = _left(_times(b_dc, 1.0 / dc_scale), LEFT_OF_TOKENS)
        b_dy = warpgroup_mma(left, stages[4], zeros, is_async=True)
        b_dy, b_ds, left, left_ds = warpgroup_mma_wait(0, deps=(b_dy, b_ds, left, left_ds))
        unit = gl.convert_layout(dc_scale, gl.SliceLayout(1, BY_KEY)) * (1.0 / LIFT)
        b_ds = _times(b_ds, new_unit / unit)
        left = _left(b_dy * gl.expand_dims(-b_beta, 0), LEFT_OF_KEYS)
        b_ds = warpgroup_mma(left, stages[5], b_ds, is_async=True)
        _store_values(dvalues, b_dy, stored.index(i_w), i_hm, BV * i_w, length, D)
        gl.store(dvalues_scale + i_nhv + o_v, dc_scale)
        b_ds, left = warpgroup_mma_wait(0, deps=(b_ds, left))
        mbarrier.arrive(empty.index(i % STAGES))
        i_n -= 1
        i_t -= BT
        length += BT
    if HAS_INITIAL:
        gl.store(dinitial + _state_places(i_x * H + i_h, i_w), _times(b_ds, unit))
    tma.store_wait(0)


@gluon.jit
def _ring(wide, tiles):
    """(places for the tiles of STAGES chunks, (full, empty, cleared) barriers)."""
    ring = (gl.allocate_shared_memory(wide.dtype, [STAGES, BT, D], TILE),)
    for j in gl.static_range(len(tiles)):
        ring = ring + (gl.allocate_shared_memory(gl.float16, [STAGES, BT, tiles[j].block_shape[1]], TILE),)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for j in gl.static_range(STAGES):
        mbarrier.init(full.index(j), count=1)
        mbarrier.init(empty.index(j), count=2)
    mbarrier.init(cleared, count=2)
    # The copy engine must see the barriers.
    fence_async_shared()
    return ring, (full, empty, cleared)


@gluon.jit(do_not_specialize=["M"])
def forward_kernel(
    v, k_in, solve, k_out, q_in, attend, decay, documents, initial, final, o, states, states_scale, values,
    values_scale, M, H, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """See recurrence.py; v to attend, and states, are descriptors."""
    i_h, i_x = gl.program_id(0) % H, gl.program_id(0) // H
    if BACKWARD:
        tiles = (k_in, solve, k_out)
        places = gl.allocate_shared_memory(gl.float16, [2, BV, D], TILE)
        stored = gl.allocate_shared_memory(gl.float16, [2, BT, BV], TILE)
    else:
        tiles = (k_in, solve, k_out, q_in, attend)
        places = gl.to_tensor(0)
        stored = gl.allocate_shared_memory(o.dtype.element_ty, [2, BT, BV], TILE)
    ring, barriers = _ring(v, tiles)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    count, i_t = gl.load(documents + 4 * i_x + 1), gl.load(documents + 4 * i_x + 2)
    gl.warp_specialize(
        [
            (
                _forward,
                (
                    decay, documents, initial, final, o, states, states_scale, values, values_scale, places, stored,
                    ring, barriers, i_x, i_h, M, H, FIRST, HAS_INITIAL, HAS_FINAL, BACKWARD,
                ),
            ),
            (
                _forward,
                (
                    decay, documents, initial, final, o, states, states_scale, values, values_scale, places, stored,
                    ring, barriers, i_x, i_h, M, H, SECOND, HAS_INITIAL, HAS_FINAL, BACKWARD,
                ),
            ),
            (_load_chunks, (v, tiles, ring, barriers[0], barriers[1], count, i_t, i_h, M, BT)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def backward_kernel(
    do, attend, k_out, q_in, inverse, k_in, beta, decay, documents, dfinal, dinitial, do_scale, dstates, dstates_scale,
    dvalues, dvalues_scale, M, H, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr,
):  # fmt: skip
    """See recurrence.py; do to k_in, and dstates, are descriptors."""
    i_h, i_x = gl.program_id(0) % H, gl.program_id(0) // H
    tiles = (attend, k_out, q_in, inverse, k_in)
    places = gl.allocate_shared_memory(gl.float16, [2, BV, D], TILE)
    stored = gl.allocate_shared_memory(gl.float16, [2, BT, BV], TILE)
    ring, barriers = _ring(do, tiles)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    BACK: gl.constexpr = -BT
    count = gl.load(documents + 4 * i_x + 1)
    i_t = gl.load(documents + 4 * i_x + 2) + (count - 1) * BT
    gl.warp_specialize(
        [
            (
                _backward,
                (
                    beta, decay, documents, dfinal, dinitial, do_scale, dstates, dstates_scale, dvalues, dvalues_scale,
                    places, stored, ring, barriers, i_x, i_h, M, H, FIRST, HAS_INITIAL, HAS_FINAL,
                ),
            ),
            (
                _backward,
                (
                    beta, decay, documents, dfinal, dinitial, do_scale, dstates, dstates_scale, dvalues, dvalues_scale,
                    places, stored, ring, barriers, i_x, i_h, M, H, SECOND, HAS_INITIAL, HAS_FINAL,
                ),
            ),
            (_load_chunks, (do, tiles, ring, barriers[0], barriers[1], count, i_t, i_h, M, BACK)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
