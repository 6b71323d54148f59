"""What queries add to their keys on Hopper: one program per query, whose up to 96 heads stay in shared memory.

Queries and gradients of outputs take 204 KB of it, which leaves no room for keys. These go from memory into registers,
as the left operand of the scores, 64 keys for each of the two groups of four warps; and as probabilities and gradients
of scores then lie in registers as a left operand does, nothing in the loop over keys meets in shared memory. So there
are no barriers in it: one group of warps takes exponentials while the other one multiplies.

A thread holds 8 columns of a key that follow each other, 16 bytes of memory; the tensor cores take those to be four
pairs out of 32. Columns of queries and of gradients of outputs are exchanged in the same way when they are put into
shared memory, which leaves sums over columns as they are, and puts 8 columns of a share that follow each other back
into a thread. Rows of shared memory, the heads, are exchanged alike for the gradients of scores.

Legend: T queries, N heads, S keys, L columns of a key, V of them values, KS selected keys per query, KP of them with
        padding; BK selected keys of a tile, BC columns of a step, BN heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .tiles import LOG2E

BK, BC = gl.constexpr(128), gl.constexpr(64)
# What is written is read once, much later: it leaves L2 before the keys do, which all queries read.
STREAM = gl.constexpr(".cs")
# Step of the shares in which the first columns of the next tile's keys are asked for, and in the two steps after it.
AHEAD = gl.constexpr(2)
# Of what threads read and write, 8 columns each: keys like the rows of products, heads as they lie in memory.
KEYS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]],
        [],
        [128, 64],
    )
)
KEYS_32 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]],
        [],
        [128, 32],
    )
)
HEADS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ENTRIES = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
ACC_32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC, 2))
LEFT_32 = gl.constexpr(gl.DotOperandLayout(0, ACC_32, 2))


@gluon.jit
def _hold(x):
    """Loads and stores stay on their side of this; x: any int32.

    ptxas moves a load down to what needs it, behind the products that are to hide it, and stores down until registers
    run out. It moves neither across a barrier of a warp, which is no instruction where the warp is together.
    """
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def _exchanged(x):
    """x [rows, columns], in every 32 columns (c, n, e) of 4, 4 and 2 in the order (n, c, e); twice is once not."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    return x.reshape([R, C // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([R, C])


@gluon.jit
def _exchanged_places(o):
    """The places that _exchanged brings to places o."""
    return o // 32 * 32 + o // 2 % 4 * 8 + o // 8 % 4 * 2 + o % 2


@gluon.jit
def _rows(index, i_k, keys, first, L: gl.constexpr):
    """Offsets in kv of the selected keys from i_k on; behind the last the query's first key."""
    o_k = i_k + gl.arange(0, BK, gl.SliceLayout(1, KEYS))
    return gl.load(index + o_k, mask=o_k < keys, other=first) * L


@gluon.jit
def _columns(kv, b_rows, i_c: gl.constexpr):
    """Columns i_c .. i_c + BC of keys."""
    o_c = i_c + gl.arange(0, BC, gl.SliceLayout(0, KEYS))
    return gl.load(kv + gl.expand_dims(b_rows, 1) + gl.expand_dims(o_c, 0))


@gluon.jit
def _heads(p_x, i_n: gl.constexpr, i_c: gl.constexpr, N: gl.constexpr, D: gl.constexpr, BN: gl.constexpr):
    """[BN, BC] of x [N, D], heads from i_n and columns from i_c on, both exchanged; zero where there are no heads."""
    o_n = i_n + _exchanged_places(gl.arange(0, BN, gl.SliceLayout(1, HEADS)))
    o_c = i_c + gl.arange(0, BC, gl.SliceLayout(0, HEADS))
    return _exchanged(gl.load(p_x + gl.expand_dims(o_n, 1) * D + gl.expand_dims(o_c, 0),
                              mask=gl.expand_dims(o_n < N, 1), other=0.0))  # fmt: skip


@gluon.jit
def _fill(blocks, p_x, i_n: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """Heads from i_n on of x [N, D] into blocks [D / BC, heads, BC]."""
    BN: gl.constexpr = blocks.shape[1]
    loaded = ()
    for i in gl.static_range(D // BC):
        loaded += (_heads(p_x, i_n, i * BC, N, D, BN),)
    _hold(N)
    for i in gl.static_range(D // BC):
        blocks.index(i).store(loaded[i])


@gluon.jit
def _fill_vector(vector, p_x, N: gl.constexpr, other):
    """x [N] into a vector of 128, exchanged like rows of blocks, `other` where there are no heads."""
    o_n = _exchanged_places(gl.arange(0, 128, ENTRIES))
    vector.store(gl.load(p_x + o_n, mask=o_n < N, other=other))


@gluon.jit
def _score_gradients(s, dp, lse, delta, scale, left, i_n: gl.constexpr):
    """Probabilities and gradients of scores [BK, heads from i_n on], of which the first `left` keys exist."""
    ACCUMULATED: gl.constexpr = s.type.layout
    m_k = gl.arange(0, BK, gl.SliceLayout(1, ACCUMULATED)) < left
    b_lse = lse.slice(i_n, s.shape[1]).load(gl.SliceLayout(0, ACCUMULATED))
    b_delta = delta.slice(i_n, s.shape[1]).load(gl.SliceLayout(0, ACCUMULATED))
    # The difference first: near 0, it has all its digits where scores are large.
    b_p = gl.exp2((s * scale - gl.expand_dims(b_lse, 0)) * LOG2E)
    b_p = gl.where(gl.expand_dims(m_k, 1), b_p, 0.0)
    return b_p, b_p * (dp - gl.expand_dims(b_delta, 0)) * scale


@gluon.jit
def _store_ds(b_ds, p_ds, i_k, i_n: gl.constexpr, N: gl.constexpr, KP: gl.constexpr, LAYOUT: gl.constexpr):
    o_k = i_k + gl.arange(0, BK, gl.SliceLayout(1, LAYOUT))
    o_n = i_n + gl.arange(0, b_ds.shape[1], gl.SliceLayout(0, LAYOUT))
    b_ds = gl.convert_layout(_exchanged(b_ds), LAYOUT, assert_trivial=True)
    p_ds = p_ds + gl.expand_dims(o_k, 1) * N + gl.expand_dims(o_n, 0)
    gl.store(p_ds, b_ds, mask=gl.expand_dims(o_k < KP, 1) & gl.expand_dims(o_n < N, 0), cache_modifier=STREAM)


@gluon.jit
def _store_share(acc, shares, b_place, m_k, i_c: gl.constexpr):
    o_c = i_c + gl.arange(0, BC, gl.SliceLayout(0, KEYS))
    b_share = gl.convert_layout(_exchanged(acc.to(shares.dtype.element_ty)), KEYS, assert_trivial=True)
    p_share = shares + gl.expand_dims(b_place, 1) + gl.expand_dims(o_c, 0)
    gl.store(p_share, b_share, mask=gl.expand_dims(m_k, 1), cache_modifier=STREAM)


@gluon.jit
def shares_kernel(
    q, dout, kv, index, place, lse, delta, ds, shares, scale, count,
    N: gl.constexpr, L: gl.constexpr, V: gl.constexpr, KS: gl.constexpr, KP: gl.constexpr,
):  # fmt: skip
    """Per query: ds [T, KP, N], and shares [T * KS, L] of the gradients of its keys, at the rows `place` [T, KS]."""
    REST: gl.constexpr = N > 64
    PRODUCTS: gl.constexpr = 4 if REST else 2
    STEPS: gl.constexpr = L // BC
    VALUES: gl.constexpr = V // BC
    i_t = gl.program_id(0).to(gl.int64)
    keys = gl.load(count + i_t)
    p_s, p_place, p_ds = index + i_t * KS, place + i_t * KS, ds + i_t * (KP * N)
    first = gl.maximum(gl.load(p_s), 0)
    dtype: gl.constexpr = kv.dtype.element_ty
    rows = _rows(p_s, 0, keys, first, L)
    key0, key1, key2 = _columns(kv, rows, 0), _columns(kv, rows, BC), _columns(kv, rows, 2 * BC)

    q0 = gl.allocate_shared_memory(dtype, [STEPS, 64, BC], SHARED)
    d0 = gl.allocate_shared_memory(dtype, [VALUES, 64, BC], SHARED)
    _fill(q0, q + i_t * (N * L), 0, N, L)
    _fill(d0, dout + i_t * (N * V), 0, N, V)
    if REST:
        q1 = gl.allocate_shared_memory(dtype, [STEPS, 32, BC], SHARED)
        d1 = gl.allocate_shared_memory(dtype, [VALUES, 32, BC], SHARED)
        _fill(q1, q + i_t * (N * L), 64, N, L)
        _fill(d1, dout + i_t * (N * V), 64, N, V)
    # Beside the keys that pass through it, the first cache would not keep them from one tile to the next.
    b_lse = gl.allocate_shared_memory(gl.float32, [128], VECTOR)
    b_delta = gl.allocate_shared_memory(gl.float32, [128], VECTOR)
    _fill_vector(b_lse, lse + i_t * N, N, float("inf"))
    _fill_vector(b_delta, delta + i_t * N, N, 0.0)
    fence_async_shared()
    gl.thread_barrier()

    o_k = gl.arange(0, BK, gl.SliceLayout(1, KEYS))
    for i_k in range(0, keys, BK):
        # 0, which the compiler does not know: it would compute all descriptors of operands ahead of the loop, and spill
        # them.
        base = i_k >> 30
        next_rows = _rows(p_s, i_k + BK, keys, first, L)
        b_place = gl.load(p_place + i_k + o_k, mask=i_k + o_k < keys, other=0) * L
        s0, dp0 = gl.zeros([BK, 64], gl.float32, ACC), gl.zeros([BK, 64], gl.float32, ACC)
        if REST:
            s1, dp1 = gl.zeros([BK, 32], gl.float32, ACC_32), gl.zeros([BK, 32], gl.float32, ACC_32)
        before = s0
        for i in gl.static_range(STEPS):
            key = gl.convert_layout(_exchanged(key0), LEFT, assert_trivial=True)
            key0, key1 = key1, key2
            if i + 3 < STEPS:
                key2 = _columns(kv, rows, (i + 3) * BC)
            _hold(i_k)
            s0 = warpgroup_mma(key, q0.index(base + i).permute((1, 0)), s0, use_acc=i > 0, is_async=True)
            if REST:
                key_32 = gl.convert_layout(key, LEFT_32, assert_trivial=True)
                s1 = warpgroup_mma(key_32, q1.index(base + i).permute((1, 0)), s1, use_acc=i > 0, is_async=True)
            if i < VALUES:
                dp0 = warpgroup_mma(key, d0.index(base + i).permute((1, 0)), dp0, use_acc=i > 0, is_async=True)
                if REST:
                    dp1 = warpgroup_mma(key_32, d1.index(base + i).permute((1, 0)), dp1, use_acc=i > 0, is_async=True)
            # Registers of a left operand are free when what reads them is done.
            if i > 0:
                warpgroup_mma_wait(PRODUCTS if i < VALUES else PRODUCTS // 2, deps=(before,))
            before = key
        if REST:
            s0, s1, dp0, dp1, before = warpgroup_mma_wait(0, deps=(s0, s1, dp0, dp1, before))
        else:
            s0, dp0, before = warpgroup_mma_wait(0, deps=(s0, dp0, before))

        rows = next_rows
        p0, ds0 = _score_gradients(s0, dp0, b_lse, b_delta, scale, keys - i_k, 0)
        p0, ds0 = p0.to(dtype), ds0.to(dtype)
        _store_ds(ds0, p_ds, i_k, 0, N, KP, KEYS)
        p0 = gl.convert_layout(p0, LEFT, assert_trivial=True)
        ds0 = gl.convert_layout(ds0, LEFT, assert_trivial=True)
        if REST:
            p1, ds1 = _score_gradients(s1, dp1, b_lse, b_delta, scale, keys - i_k, 64)
            p1, ds1 = p1.to(dtype), ds1.to(dtype)
            _store_ds(ds1, p_ds, i_k, 64, N, KP, KEYS_32)
            p1 = gl.convert_layout(p1, LEFT, assert_trivial=True)
            ds1 = gl.convert_layout(ds1, LEFT, assert_trivial=True)
        m_k = i_k + o_k < keys
        again = i_k >> 29
        share = ds0
        for i in gl.static_range(STEPS):
            acc = gl.zeros([BK, BC], gl.float32, ACC)
            acc = warpgroup_mma(ds0, q0.index(again + i), acc, use_acc=False, is_async=True)
            if REST:
                acc = warpgroup_mma(ds1, q1.index(again + i), acc, is_async=True)
            if i < VALUES:
                acc = warpgroup_mma(p0, d0.index(again + i), acc, is_async=True)
                if REST:
                    acc = warpgroup_mma(p1, d1.index(again + i), acc, is_async=True)
            if i > 0:
                share = warpgroup_mma_wait(PRODUCTS if i < VALUES else PRODUCTS // 2, deps=(share,))
                _store_share(share, shares, b_place, m_k, (i - 1) * BC)
            if i == AHEAD:
                key0 = _columns(kv, rows, 0)
            if i == AHEAD + 1:
                key1 = _columns(kv, rows, BC)
            if i == AHEAD + 2:
                key2 = _columns(kv, rows, 2 * BC)
            _hold(i_k)
            share = acc
        if REST:
            share, ds0, ds1, p0, p1 = warpgroup_mma_wait(0, deps=(share, ds0, ds1, p0, p1))
        else:
            share, ds0, p0 = warpgroup_mma_wait(0, deps=(share, ds0, p0))
        _store_share(share, shares, b_place, m_k, (STEPS - 1) * BC)
