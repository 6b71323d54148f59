"""The forward pass on Hopper: one program per query and group of 64 or 96 heads, which gathers every selected key once.

Scores have heads as their rows, so that sums and maxima over keys stay within few threads. 96 heads are [128 heads,
64 keys], of which the last 32 rows read what lies behind the queries and are never looked at. Outputs are held
transposed, 512 values x heads, since the tensor cores take any multiple of 8 columns but only multiples of 64 rows.

All shared memory is one array of blocks of 32 rows x 64 columns, which the tensor cores read as taller tiles:

    27 of queries, 3 for each 64 columns | 3 of probabilities | 2 of the last 64 columns of keys | 3 slots of 8

A slot holds 256 columns of 64 keys, half of what are values too. The two of a tile of keys are used in order and given
to the tile after it: the third one when this tile has scores, the first one when the values in it have been multiplied.

Legend: T queries, N heads, S keys, L columns of a key, V of them values, KS selected keys per query; BK selected keys
        of a tile; GROUP heads of a program, 64 or 96, ROWS of them in scores, 64 or 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .tiles import LOG2E

BK = gl.constexpr(64)
PROBABILITIES, EXTRA, SLOTS, BLOCKS = gl.constexpr(27), gl.constexpr(30), gl.constexpr(32), gl.constexpr(56)
# References of exponentials move only when they fall behind by more than this, in base 2.
SLACK = gl.constexpr(8.0)
# Of copies, as threads make them: 16 bytes each, 8 threads per row of 64 columns, 32 rows at a time.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SHARED_32 = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# One vote of each warp, all of them in every thread.
VOTES = gl.constexpr(gl.BlockedLayout([8], [32], [8], [0]))
SCORES_64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
SCORES_96 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
OUT_REST = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 16]))


@gluon.jit
def _rows(index, i_k, keys, first, L: gl.constexpr):
    """Offsets in kv of the selected keys from i_k on; behind the last the query's first key."""
    o_k = gl.arange(0, BK, gl.SliceLayout(1, COPY))
    return gl.load(index + i_k + o_k, mask=o_k < keys - i_k, other=first) * L


@gluon.jit
def _copy(blocks, i_block, kv, b_rows, i_c, wanted, BC: gl.constexpr):
    """Start to copy BC columns from i_c on of keys into the blocks from i_block on, as a group of copies of its own."""
    tile = blocks.index(i_block)._reinterpret(kv.dtype.element_ty, [BK, BC], SHARED)
    o_c = i_c + gl.arange(0, BC, gl.SliceLayout(0, COPY))
    p_k = kv + gl.expand_dims(b_rows, 1) + gl.expand_dims(o_c, 0)
    if wanted:
        async_copy.async_copy_global_to_shared(tile, p_k)
    async_copy.commit_group()


@gluon.jit
def _copy_queries(blocks, i_block, p_q, i_n, i_c: gl.constexpr, N: gl.constexpr, L: gl.constexpr, WHOLE: gl.constexpr,
                  BN: gl.constexpr):  # fmt: skip
    """Start to copy 64 columns from i_c on of BN heads from i_n on; WHOLE: all of them exist."""
    tile = blocks.index(i_block)._reinterpret(blocks.dtype, [BN, 64], SHARED)
    o_n = i_n + gl.arange(0, BN, gl.SliceLayout(1, COPY))
    o_c = i_c + gl.arange(0, 64, gl.SliceLayout(0, COPY))
    p_x = p_q + gl.expand_dims(o_n, 1) * L + gl.expand_dims(o_c, 0)
    if WHOLE:
        async_copy.async_copy_global_to_shared(tile, p_x)
    else:
        async_copy.async_copy_global_to_shared(tile, p_x, mask=gl.expand_dims(o_n < N, 1))


@gluon.jit
def _add_scores(s, blocks, i_block, base, i_c: gl.constexpr, ROWS: gl.constexpr, use_acc=True):
    """s plus the products of 64 columns, those from 64 * i_c on, of queries and of the keys from i_block on."""
    b_q = blocks.index(base + 3 * i_c)._reinterpret(blocks.dtype, [ROWS, 64], SHARED)
    b_k = blocks.index(i_block)._reinterpret(blocks.dtype, [BK, 64], SHARED)
    return warpgroup_mma(b_q, b_k.permute((1, 0)), s, use_acc=use_acc, is_async=True)


@gluon.jit
def _probabilities(blocks, i_k: gl.constexpr, i_n: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr):
    """[HEADS, KEYS] of the probabilities, from head i_n and key i_k on; keys lie in parts of KEYS, 32 or all."""
    if KEYS == BK:
        return blocks.index(PROBABILITIES + i_n // 32)._reinterpret(blocks.dtype, [HEADS, BK], SHARED)
    else:
        # Half a block for every 32 heads; the rows of no heads of one part fall onto the next part.
        halves = blocks._reinterpret(blocks.dtype, [2 * BLOCKS, 32, KEYS], SHARED_32)
        return halves.index(2 * PROBABILITIES + i_k // KEYS * 3 + i_n // 32)._reinterpret(
            blocks.dtype, [HEADS, KEYS], SHARED_32
        )


@gluon.jit
def _add_values(acc, blocks, i_block, i_k: gl.constexpr, i_n: gl.constexpr, KEYS: gl.constexpr):
    """acc [128 values, heads] plus products of KEYS keys' values and probabilities, from key i_k and head i_n on."""
    b_v = blocks.index(i_block)._reinterpret(blocks.dtype, [BK, 128], SHARED).slice(i_k, KEYS).permute((1, 0))
    b_p = _probabilities(blocks, i_k, i_n, 64 if i_n == 0 else 32, KEYS)
    return warpgroup_mma(b_v, b_p.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _above(s, b_limit, votes):
    """Whether a score is above its head's limit.

    Threads look at their own scores only, and warps vote: maxima of heads are needed when references move.
    """
    ROWS: gl.constexpr = s.shape[0]
    # Columns are warps or registers, registers, lanes, registers; rows are warps, registers, lanes.
    b_top = gl.max(gl.max(s.reshape([ROWS, 2, 4, 4, 2]), 4), 2)
    b_limit = gl.convert_layout(b_limit, gl.SliceLayout(1, gl.SliceLayout(2, b_top.type.layout)), assert_trivial=True)
    b_vote = b_top > gl.expand_dims(gl.expand_dims(b_limit, 1), 2)
    b_vote = gl.max(b_vote.to(gl.int32).reshape([ROWS // 16, 2, 8, 2, 4]), 1)
    if ROWS == 128:
        b_vote = gl.max(b_vote, 2).reshape([8, 32])
    else:
        b_vote = b_vote.permute((0, 2, 1, 3)).reshape([8, 32])
    votes.store(gl.max(b_vote, 1))
    return gl.max(votes.load(VOTES), 0) > 0


@gluon.jit
def _exponentials(s, b_m, unit):
    """2 to the power of scores [heads, keys] in their unit less their references."""
    b_m = gl.convert_layout(b_m, gl.SliceLayout(1, s.type.layout), assert_trivial=True)
    return gl.exp2(s * unit - gl.expand_dims(b_m, 1))


@gluon.jit
def _scale(x, vector, i_n: gl.constexpr):
    """x [values, heads] times the vector's entries from i_n on, one for each head."""
    b_x = vector.slice(i_n, x.shape[1]).load(gl.SliceLayout(0, x.type.layout))
    return x * gl.expand_dims(b_x, 0)


@gluon.jit
def _store(x, blocks, i_block, p_out, i_n, i_v: gl.constexpr, N: gl.constexpr, V: gl.constexpr):
    """Write x [128 values, heads] through the blocks to out [N, V], from head i_n and value i_v on."""
    BN: gl.constexpr = x.shape[1]
    tile = blocks.index(i_block)._reinterpret(blocks.dtype, [BN, 128], SHARED)
    tile.permute((1, 0)).store(x.to(blocks.dtype))
    o_n = i_n + gl.arange(0, BN, gl.SliceLayout(1, COPY))
    o_v = i_v + gl.arange(0, 128, gl.SliceLayout(0, COPY))
    p_o = p_out + gl.expand_dims(o_n, 1) * V + gl.expand_dims(o_v, 0)
    gl.store(p_o, tile.load(COPY), mask=gl.expand_dims(o_n < N, 1))


@gluon.jit
def attention_kernel(
    q, kv, index, count, sink, out, lse, scale,
    N: gl.constexpr, L: gl.constexpr, V: gl.constexpr, KS: gl.constexpr, GROUP: gl.constexpr, HAS_SINK: gl.constexpr,
):  # fmt: skip
    """Per query and group of heads: out [T, N, V] and lse [T, N]; L is 576, V 512; the scale is positive."""
    GROUPS: gl.constexpr = (N + GROUP - 1) // GROUP
    REST: gl.constexpr = GROUP == 96
    ROWS: gl.constexpr = 128 if REST else 64
    SCORES: gl.constexpr = SCORES_96 if REST else SCORES_64
    i_t, i_n = (gl.program_id(0) // GROUPS).to(gl.int64), gl.program_id(0) % GROUPS * GROUP
    keys = gl.load(count + i_t)
    p_s = index + i_t * KS
    first = gl.maximum(gl.load(p_s), 0)
    dtype: gl.constexpr = kv.dtype.element_ty
    blocks = gl.allocate_shared_memory(dtype, [BLOCKS, 32, 64], SHARED)
    vector = gl.allocate_shared_memory(gl.float32, [ROWS], VECTOR)
    votes = gl.allocate_shared_memory(gl.int32, [8], VECTOR)

    rows = _rows(p_s, 0, keys, first, L)
    # The queries go with the first group.
    for i in gl.static_range(9):
        _copy_queries(blocks, 3 * i, q + i_t * (N * L), i_n, i * 64, N, L, N % GROUP == 0, 64)
        if REST:
            _copy_queries(blocks, 3 * i + 2, q + i_t * (N * L), i_n + 64, i * 64, N, L, N % GROUP == 0, 32)
    _copy(blocks, SLOTS, kv, rows, 0, keys > 0, 256)
    _copy(blocks, EXTRA, kv, rows, V, keys > 0, 64)
    _copy(blocks, SLOTS + 8, kv, rows, 256, keys > 0, 256)
    rows = _rows(p_s, BK, keys, first, L)

    acc0 = gl.zeros([128, 64], gl.float32, OUT)
    acc1 = gl.zeros([128, 64], gl.float32, OUT)
    acc2 = gl.zeros([128, 64], gl.float32, OUT)
    acc3 = gl.zeros([128, 64], gl.float32, OUT)
    if REST:
        rest0 = gl.zeros([128, 32], gl.float32, OUT_REST)
        rest1 = gl.zeros([128, 32], gl.float32, OUT_REST)
        rest2 = gl.zeros([128, 32], gl.float32, OUT_REST)
        rest3 = gl.zeros([128, 32], gl.float32, OUT_REST)
    o_h = i_n + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    m_h = (o_h < N) & (o_h < i_n + GROUP)
    o_k = gl.arange(0, BK, gl.SliceLayout(0, SCORES))
    b_m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    b_l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    # Of scores, in base 2: b_m is in it, scores are not.
    unit = scale * LOG2E
    per_unit = 1.0 / unit
    slot = SLOTS
    async_copy.wait_group(1)
    gl.thread_barrier()
    for i_k in range(0, keys, BK):
        # 0, which the compiler does not know: it would compute all descriptors of queries ahead of the loop, and spill
        # them.
        base = i_k >> 30
        # First blocks of slots: of this tile's other one, and of the next tile's first one.
        later, free = SLOTS + (slot - SLOTS + 8) % 24, SLOTS + (slot - SLOTS + 16) % 24
        s = gl.zeros([ROWS, BK], gl.float32, SCORES)
        s = _add_scores(s, blocks, slot, base, 0, ROWS, False)
        s = _add_scores(s, blocks, slot + 2, base, 1, ROWS)
        s = _add_scores(s, blocks, slot + 4, base, 2, ROWS)
        s = _add_scores(s, blocks, slot + 6, base, 3, ROWS)
        s = _add_scores(s, blocks, EXTRA, base, 8, ROWS)
        async_copy.wait_group(0)
        s = _add_scores(s, blocks, later, base, 4, ROWS)
        s = _add_scores(s, blocks, later + 2, base, 5, ROWS)
        s = _add_scores(s, blocks, later + 4, base, 6, ROWS)
        s = _add_scores(s, blocks, later + 6, base, 7, ROWS)
        _copy(blocks, free, kv, rows, 0, i_k + BK < keys, 256)
        s = warpgroup_mma_wait(0, deps=(s,))

        if i_k + BK > keys:
            s = gl.where(gl.expand_dims(o_k < keys - i_k, 0), s, float("-inf"))
        if _above(s, gl.where(m_h, (b_m + SLACK) * per_unit, float("inf")), votes):
            b_new = gl.maximum(b_m, gl.max(s, 1) * unit)
            b_a = gl.exp2(b_m - b_new)
            b_m = b_new
            b_l *= b_a
            vector.store(b_a)
            acc0, acc1 = _scale(acc0, vector, 0), _scale(acc1, vector, 0)
            acc2, acc3 = _scale(acc2, vector, 0), _scale(acc3, vector, 0)
            if REST:
                rest0, rest1 = _scale(rest0, vector, 64), _scale(rest1, vector, 64)
                rest2, rest3 = _scale(rest2, vector, 64), _scale(rest3, vector, 64)
        # The rows of no heads fall onto the keys' last columns, which have been multiplied and are copied anew next.
        if REST:
            # Exponentials of the second half of the keys while the first half is multiplied.
            s0, s1 = s.reshape([ROWS, 2, 32]).permute((0, 2, 1)).split()
            p0 = _exponentials(s0, b_m, unit)
            _probabilities(blocks, 0, 0, ROWS, 32).store(p0.to(dtype))
            fence_async_shared()
            acc0 = _add_values(acc0, blocks, slot, 0, 0, 32)
            acc1 = _add_values(acc1, blocks, slot + 4, 0, 0, 32)
            rest0 = _add_values(rest0, blocks, slot, 0, 64, 32)
            rest1 = _add_values(rest1, blocks, slot + 4, 0, 64, 32)
            acc2 = _add_values(acc2, blocks, later, 0, 0, 32)
            acc3 = _add_values(acc3, blocks, later + 4, 0, 0, 32)
            rest2 = _add_values(rest2, blocks, later, 0, 64, 32)
            rest3 = _add_values(rest3, blocks, later + 4, 0, 64, 32)
            p1 = _exponentials(s1, b_m, unit)
            _probabilities(blocks, 32, 0, ROWS, 32).store(p1.to(dtype))
            fence_async_shared()
            acc0 = _add_values(acc0, blocks, slot, 32, 0, 32)
            acc1 = _add_values(acc1, blocks, slot + 4, 32, 0, 32)
            rest0 = _add_values(rest0, blocks, slot, 32, 64, 32)
            rest1 = _add_values(rest1, blocks, slot + 4, 32, 64, 32)
            acc2 = _add_values(acc2, blocks, later, 32, 0, 32)
            acc3 = _add_values(acc3, blocks, later + 4, 32, 0, 32)
            rest2 = _add_values(rest2, blocks, later, 32, 64, 32)
            rest3 = _add_values(rest3, blocks, later + 4, 32, 64, 32)
            b_l += gl.convert_layout(gl.sum(p0 + p1, 1), gl.SliceLayout(1, SCORES), assert_trivial=True)
        else:
            s = _exponentials(s, b_m, unit)
            _probabilities(blocks, 0, 0, ROWS, BK).store(s.to(dtype))
            fence_async_shared()
            acc0 = _add_values(acc0, blocks, slot, 0, 0, BK)
            acc1 = _add_values(acc1, blocks, slot + 4, 0, 0, BK)
            acc2 = _add_values(acc2, blocks, later, 0, 0, BK)
            acc3 = _add_values(acc3, blocks, later + 4, 0, 0, BK)
            b_l += gl.sum(s, 1)
        _copy(blocks, EXTRA, kv, rows, V, i_k + BK < keys, 64)
        # The second half of the values may still be multiplied when the slot of the first one is given away.
        if REST:
            acc0, acc1, rest0, rest1 = warpgroup_mma_wait(4, deps=(acc0, acc1, rest0, rest1))
        else:
            acc0, acc1 = warpgroup_mma_wait(2, deps=(acc0, acc1))
        gl.thread_barrier()
        _copy(blocks, slot, kv, rows, 256, i_k + BK < keys, 256)
        rows = _rows(p_s, i_k + 2 * BK, keys, first, L)
        # Here and not where they are read, so that the next scores follow these products at once.
        async_copy.wait_group(1)
        gl.thread_barrier()
        if REST:
            acc2, acc3, rest2, rest3 = warpgroup_mma_wait(0, deps=(acc2, acc3, rest2, rest3))
        else:
            acc2, acc3 = warpgroup_mma_wait(0, deps=(acc2, acc3))
        slot = free

    async_copy.wait_group(0)
    if HAS_SINK:
        b_sink = gl.load(sink + o_h, mask=m_h, other=float("-inf")) * LOG2E
        b_new = gl.maximum(b_m, b_sink)
        b_base = gl.where(b_new > float("-inf"), b_new, 0.0)
        b_a = gl.exp2(b_m - b_base)
        b_l = b_l * b_a + gl.exp2(b_sink - b_base)
    else:
        b_new = b_m
        b_a = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
    # Without a key and a sink the sum is 0, and so is the output.
    vector.store(b_a / gl.where(b_l > 0, b_l, 1.0))
    b_lse = gl.where(b_l > 0, (b_new + gl.log2(b_l)) / LOG2E, float("-inf"))
    gl.store(lse + i_t * N + o_h, b_lse, mask=m_h)
    p_out = out + i_t * (N * V)
    _store(_scale(acc0, vector, 0), blocks, SLOTS, p_out, i_n, 0, N, V)
    _store(_scale(acc1, vector, 0), blocks, SLOTS + 4, p_out, i_n, 128, N, V)
    _store(_scale(acc2, vector, 0), blocks, SLOTS + 8, p_out, i_n, 256, N, V)
    _store(_scale(acc3, vector, 0), blocks, SLOTS + 12, p_out, i_n, 384, N, V)
    if REST:
        _store(_scale(rest0, vector, 64), blocks, SLOTS + 16, p_out, i_n + 64, 0, N, V)
        _store(_scale(rest1, vector, 64), blocks, SLOTS + 18, p_out, i_n + 64, 128, N, V)
        _store(_scale(rest2, vector, 64), blocks, SLOTS + 20, p_out, i_n + 64, 256, N, V)
        _store(_scale(rest3, vector, 64), blocks, SLOTS + 22, p_out, i_n + 64, 384, N, V)
