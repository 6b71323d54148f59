"""The grouped products for Hopper: a persistent program per multiprocessor, of three roles that run side by side.

One warp has the copy engine bring tiles of rows and of weights into a ring of shared memory; two warpgroups multiply
64 outputs each by the same rows. Weights are the left operand, [BO, BK] x [BK, BM], from shared memory if they are
float. Packed ones are decoded into registers, as in products.py: while a warpgroup decodes, the other one's products
run.

Both directions share everything but how weights lie in a tile: `FORWARD` contracts over the columns of the weights,
y = W x, else over their rows, y = W^T x. Orders are those of mxfp4.contraction_order and products.output_order.

Sizes: R rows sorted by expert, E experts, K contraction, N outputs. Tiles: BM rows, BO = 64 outputs of a warpgroup,
BK = 64 of the contraction.
"""

from typing import NamedTuple

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

from .activation import activate
from .low_rank import nearest_tf32
from .mxfp4 import contraction_order, factors, pairs, scaled, two_values

BO = gl.constexpr(64)
BK = gl.constexpr(64)
# Rows that are loaded at a time; tiles have a multiple of them.
BX = gl.constexpr(64)
# Ranks of a step of the contraction over low-rank rows: in fp32, as many bytes as BK columns of bf16.
BR = gl.constexpr(32)
# Tiles of rows that meet one tile of weights before the next one: what both read stays in cache.
ROW_TILES_TOGETHER = gl.constexpr(8)


class Form(NamedTuple):
    """What is fixed about a product: see product_kernel."""

    N: gl.constexpr
    K: gl.constexpr
    FORWARD: gl.constexpr
    PACKED: gl.constexpr
    GATED: gl.constexpr
    ORDERED: gl.constexpr
    ACTIVATION: gl.constexpr
    LOW: gl.constexpr


# A warpgroup's 64 outputs, and the places in which tensor cores expect the left operand: a lane is [g, q], eight rows
# by four pairs of columns, a thread has rows g and g + 8 and columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of every 16.
# Forward, words of weights [output, group, j]: q is j.
FORWARD_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [8, 0, 0]],
        lane_bases=[[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 2, 4],
    )
)
# Backward, halves of words [row, i1, w, g]: rows are 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of every 16; warps [i1, w].
BACKWARD_HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0, 0, 0], [8, 0, 0, 0], [16, 0, 0, 0], [32, 0, 0, 0]],
        lane_bases=[[2, 0, 0, 0], [4, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        warp_bases=[[0, 0, 1, 0], [0, 1, 0, 0]],
        block_bases=[],
        shape=[64, 2, 2, 8],
    )
)
HALVES_IN_MEMORY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0], [16, 0], [32, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 8], [0, 0]],
        block_bases=[],
        shape=[64, 16],
    )
)
# Words [r, i1, w, g] of two rows.
BACKWARD_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[4, 0, 0, 0], [8, 0, 0, 0], [16, 0, 0, 0]],
        lane_bases=[[1, 0, 0, 0], [2, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        warp_bases=[[0, 0, 1, 0], [0, 1, 0, 0]],
        block_bases=[],
        shape=[32, 2, 2, 8],
    )
)
WORDS_IN_MEMORY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 8],
    )
)


# Backward, factors [q, pair of rows, w]: what a thread needs of 64 rows are eight words in a row.
BACKWARD_FACTORS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [0, 2, 0], [0, 4, 0]],
        lane_bases=[[1, 0, 0], [2, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
        warp_bases=[[0, 0, 1], [0, 0, 0]],
        block_bases=[],
        shape=[4, 8, 2],
    )
)


@triton.jit
def lane_factors_kernel(scale, y, N: tl.constexpr, G: tl.constexpr, BG: tl.constexpr):
    """y int16 [E, G, N / 64, 4, 16]: bf16 factors of scales [E, N, G], rows in the order of BACKWARD_FACTORS."""
    i_e, i_r = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_g, o_r = tl.program_id(2) * BG + tl.arange(0, BG), tl.arange(0, 64)
    p_s = scale + (i_e * N + i_r * 64 + o_r[:, None]) * G + o_g[None, :]
    b_s = tl.load(p_s, mask=(o_g < G)[None, :], other=0).to(tl.int32)
    # [block, half, q, i] -> [q, block, half, i]
    b_s = tl.reshape(tl.permute(tl.reshape(b_s, [8, 4, 2, BG]), (3, 1, 0, 2)), [BG, 64])
    b_f = tl.where(b_s == 0, 0x40, tl.where(b_s == 255, 0x7FC0, b_s << 7)).to(tl.int16)
    p_y = y + ((i_e * G + o_g[:, None]) * (N // 64) + i_r) * 64 + o_r[None, :]
    tl.store(p_y, b_f, mask=(o_g < G)[:, None])


@triton.jit(do_not_specialize=["TILES"])
def row_tiles_kernel(offsets, tiles, TILES, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr):
    """tiles int32 [TILES + 1, 4]: how many tiles there are, then expert, first row and end of each."""
    o_e = tl.arange(0, BE)
    b_start = tl.load(offsets + o_e, mask=o_e < E, other=0)
    b_end = tl.load(offsets + o_e + 1, mask=o_e < E, other=0)
    b_last = tl.cumsum(tl.cdiv(b_end - b_start, BM), 0)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    b_e = tl.sum((b_last[None, :] <= o_t[:, None]).to(tl.int32), 1)
    m_e = o_e[None, :] == b_e[:, None]
    b_first = tl.sum(tl.where(m_e, (b_start - (b_last - tl.cdiv(b_end - b_start, BM)) * BM)[None, :], 0), 1) + o_t * BM
    p_t, m_t = tiles + 4 + 4 * o_t, b_e < E
    tl.store(p_t, b_e, mask=m_t)
    tl.store(p_t + 1, b_first, mask=m_t)
    tl.store(p_t + 2, tl.sum(tl.where(m_e, b_end[None, :], 0), 1), mask=m_t)
    tl.store(tiles, tl.max(b_last, 0), mask=tl.program_id(0) == 0)


@gluon.jit
def tile_of(tiles, count, i_p, NB: gl.constexpr):
    """(expert, first row, end, tile of outputs) of a tile."""
    together = ROW_TILES_TOGETHER * NB
    first = i_p // together * ROW_TILES_TOGETHER
    size = gl.minimum(count - first, ROW_TILES_TOGETHER)
    p_t = tiles + 4 + 4 * (first + i_p % together % size)
    return gl.load(p_t), gl.load(p_t + 1), gl.load(p_t + 2), i_p % together // size


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """The next place in the ring."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    return gl.where(stage == STAGES, 0, stage), phase


@gluon.jit
def before(stage, STAGES: gl.constexpr):
    """The place before in the ring.

    Not a variable that is set to `stage` before and inside of a loop: the compiler would not carry it round.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def low_rows(b_x, BM: gl.constexpr):
    """A place of the ring as one for low-rank rows."""
    return b_x._reinterpret(gl.float32, [BM, BR], gl.NVMMASharedLayout(128, 32, 2))


@gluon.jit
def load_rows(x, b_x, b_full, i_m, i_k, boxes, BYTES: gl.constexpr, BM: gl.constexpr):
    """Rows from i_m on, columns from i_k on, of x into b_x [BM, columns]; b_full then waits for them and BYTES more."""
    BYTES_X: gl.constexpr = x.block_type.nbytes
    for i_b in gl.static_range(BM // BX):
        last = i_b == BM // BX - 1
        mbarrier.expect(b_full, BYTES + (i_b + 1) * BYTES_X, pred=(boxes == i_b + 1) | (last & (boxes > i_b)))
    for i_b in gl.static_range(BM // BX):
        at = [i_m + i_b * BX, i_k]
        tma.async_copy_global_to_shared(x, at, b_full, b_x.slice(i_b * BX, BX), pred=boxes > i_b)


@gluon.jit
def load_tiles(
    x, weight, low, tiles, ring, NB: gl.constexpr, KT: gl.constexpr, FORWARD: gl.constexpr, WORD: gl.constexpr,
    LOW: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The role that loads. WORD: values in an element of the weights."""
    ring_x, ring_w, full, empty = ring
    BYTES_W: gl.constexpr = 2 * weight.block_type.nbytes
    count = gl.load(tiles)
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    for i_p in range(gl.program_id(0), count * NB, gl.num_programs(0)):
        i_e, i_m, end, i_n = tile_of(tiles, count, i_p, NB)
        boxes = gl.cdiv(end - i_m, BX)
        for i_k in range(KT):
            b_full = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            load_rows(x, ring_x.index(stage), b_full, i_m, i_k * BK, boxes, BYTES_W, BM)
            for i_w in gl.static_range(2):
                b_w = ring_w.index(2 * stage + i_w)
                if FORWARD:
                    at_w = [i_e, (2 * i_n + i_w) * (BO // 16), 0, 0, i_k * (BK // WORD)]
                    tma.async_copy_global_to_shared(weight, at_w, b_full, b_w)
                else:
                    at_w = [i_e, i_k * BK, (2 * i_n + i_w) * (BO // WORD)]
                    tma.async_copy_global_to_shared(weight, at_w, b_full, b_w)
            stage, phase = after(stage, phase, STAGES)
        for i_r in gl.static_range(LOW):
            mbarrier.wait(empty.index(stage), phase)
            load_rows(low, low_rows(ring_x.index(stage), BM), full.index(stage), i_m, i_r * BR, boxes, 0, BM)
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def scale_pointers(scale, i_e, i_o, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, FORWARD: gl.constexpr):
    """Where the scales of a warpgroup's outputs from i_o on start, as threads that decode expect them.

    Backward, they are pairs of factors, see lane_factors_kernel.
    """
    if FORWARD:
        LAYOUT: gl.constexpr = gl.SliceLayout(2, FORWARD_WORDS)
        o_n = i_o + gl.arange(0, BO, layout=gl.SliceLayout(1, LAYOUT))
        if GATED:
            o_n = o_n // 16 * 8 + o_n % 8 + o_n // 8 % 2 * (N // 2)
        row = i_e.to(gl.int64) * N + gl.minimum(o_n, N - 1)
        o_g = gl.arange(0, 2, layout=gl.SliceLayout(0, LAYOUT))
        return scale + gl.expand_dims(row, 1) * (K // 32) + gl.expand_dims(o_g, 0)
    else:
        o_g = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, BACKWARD_FACTORS)))
        row = i_e.to(gl.int64) * (N // 32) + gl.minimum(i_o // 32 + o_g, N // 32 - 1)
        o_q = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BACKWARD_FACTORS)))
        o_r = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, BACKWARD_FACTORS)))
        o_r = gl.expand_dims(gl.expand_dims(o_q, 1) * 8 + gl.expand_dims(o_r, 0), 2)
        return scale + gl.expand_dims(gl.expand_dims(row, 0), 1) * (K // 2) + o_r


@gluon.jit
def unscaled(b_w, b_s, FORWARD: gl.constexpr):
    """Packed weights in shared memory and their scales -> pairs of bf16, and what to multiply those by.

    Backward, the last two of the four are not used: a warp decodes half of the nibbles of a word.
    """
    if FORWARD:
        b_w = b_w._reinterpret(gl.int32, [64, 8], gl.NVMMASharedLayout(32, 32, 2)).load(WORDS_IN_MEMORY)
        b_w = gl.convert_layout(gl.reshape(b_w, [64, 2, 4]), FORWARD_WORDS, assert_trivial=True)
        b_f = gl.expand_dims(factors(b_s, b_s, True), 2)
        b_0, b_1, b_2, b_3 = pairs(b_w.to(gl.uint32, bitcast=True), False)
        return b_0, b_1, b_2, b_3, b_f
    else:
        b_w = b_w._reinterpret(gl.int16, [64, 16], gl.NVMMASharedLayout(32, 16, 2)).load(HALVES_IN_MEMORY)
        b_w = b_w.to(gl.uint16, bitcast=True).to(gl.uint32)
        b_0, b_1 = gl.split(gl.permute(gl.reshape(b_w, [32, 2, 2, 8]), (0, 2, 3, 1)))
        b_w = gl.convert_layout(b_0 | (b_1 << 16), gl.SliceLayout(1, BACKWARD_WORDS), assert_trivial=True)
        b_f = gl.reshape(gl.permute(b_s, (1, 0, 2)), [32, 2]).to(gl.uint32, bitcast=True)
        b_f = gl.convert_layout(b_f, gl.SliceLayout(1, gl.SliceLayout(3, BACKWARD_WORDS)), assert_trivial=True)
        half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, BACKWARD_WORDS))))
        half = gl.expand_dims(gl.expand_dims(gl.expand_dims(half, 0), 2), 3)
        b_0, b_1, b_2, b_3 = pairs(gl.expand_dims(b_w, 1) >> (half * 8).to(gl.uint32), False)
        return b_0, b_1, b_2, b_3, gl.expand_dims(gl.expand_dims(b_f, 1), 3)


@gluon.jit
def left_operand(b_0, b_1, b_2, b_3, b_f, FORWARD: gl.constexpr, LEFT: gl.constexpr):
    """bf16 [BO, BK] of what `unscaled` leaves."""
    b_0, b_1 = two_values(scaled(b_0, b_f, False)), two_values(scaled(b_1, b_f, False))
    if FORWARD:
        b_2, b_3 = two_values(scaled(b_2, b_f, False)), two_values(scaled(b_3, b_f, False))
        # [output, group, j, c, i0, i1] -> [output, group, i1, i0, j, c]
        b_v = gl.permute(gl.join(gl.join(b_0, b_1), gl.join(b_2, b_3)), (0, 1, 5, 4, 2, 3))
    else:
        # [r, i1, w, g, c, i0] -> [i1, w, i0, g, r, c]
        b_v = gl.permute(gl.join(b_0, b_1), (1, 2, 5, 3, 0, 4))
    return gl.convert_layout(gl.reshape(b_v, [BO, BK]), LEFT, assert_trivial=True)


@gluon.jit
def columns(acc, i_b: gl.constexpr, BM: gl.constexpr, B: gl.constexpr):
    """Columns i_b * B ... of acc [BO, BM], chosen without moving anything."""
    if BM == B:
        return acc
    else:
        left, right = gl.split(gl.permute(gl.reshape(acc, [BO, 2, BM // 2]), (0, 2, 1)))
        if i_b < BM // (2 * B):
            return columns(left, i_b, BM // 2, B)
        else:
            return columns(right, i_b - BM // (2 * B), BM // 2, B)


@gluon.jit
def store_rows(p, place, b_y, i_m, end, i_n, N: gl.constexpr, P: gl.constexpr, BN: gl.constexpr, TWICE: gl.constexpr):
    """b_y [BX or fewer, BN] to rows from i_m on, columns from i_n on, of [R, P], below the row `end` and the column N.

    It goes through `place` in shared memory, so that neighbouring threads have neighbouring columns. TWICE: the second
    half of the columns belongs N columns further on.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [4, 1], [1, 0])
    BM: gl.constexpr = b_y.shape[0]
    place = place.slice(0, BM)
    place.store(b_y)
    b_y = place.load(LAYOUT)
    o_m = i_m + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
    o_n = gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
    if TWICE:
        m_n = i_n + o_n % (BN // 2) < N
        o_n = i_n + o_n % (BN // 2) + o_n // (BN // 2) * N
    else:
        m_n = i_n + o_n < N
        o_n = i_n + o_n
    p += gl.expand_dims(o_m.to(gl.int64), 1) * P + gl.expand_dims(o_n, 0)
    gl.store(p, b_y, mask=gl.expand_dims(o_m < end, 1) & gl.expand_dims(m_n, 0))


@gluon.jit
def products(b_a, b_x, acc, tail, BM: gl.constexpr, TAIL: gl.constexpr):
    """acc += b_a times the first BM rows, tail += b_a times the next TAIL."""
    acc = warpgroup_mma(b_a, b_x.slice(0, BM).permute((1, 0)), acc, is_async=True)
    if TAIL > 0:
        tail = warpgroup_mma(b_a, b_x.slice(BM, TAIL).permute((1, 0)), tail, is_async=True)
    return acc, tail


@gluon.jit
def finished(acc, tail, STEPS: gl.constexpr, TAIL: gl.constexpr):
    """The sums, once all but the products of the last STEPS are done."""
    if TAIL > 0:
        acc, tail = warpgroup_mma_wait(2 * STEPS, deps=(acc, tail))
    else:
        acc = warpgroup_mma_wait(STEPS, deps=(acc,))
    return acc, tail


@gluon.jit
def packed_products(
    p_s, ring, stage, phase, acc, tail, LEFT: gl.constexpr, i_w: gl.constexpr, KT: gl.constexpr, STEP: gl.constexpr,
    FORWARD: gl.constexpr, BM: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sums of a tile over the contraction, packed weights, and the place in the ring behind it."""
    ring_x, ring_w, full, empty = ring
    b_s = gl.load(p_s)
    b_next = gl.load(p_s + min(1, KT - 1) * STEP)
    mbarrier.wait(full.index(stage), phase)
    b_0, b_1, b_2, b_3, b_f = unscaled(ring_w.index(2 * stage + i_w), b_s, FORWARD)
    b_a = left_operand(b_0, b_1, b_2, b_3, b_f, FORWARD, LEFT)
    for i_k in range(KT - 1):
        acc, tail = products(b_a, ring_x.index(stage), acc, tail, BM, TAIL)
        # While these run, most of the work on the next weights.
        b_s = b_next
        b_next = gl.load(p_s + gl.minimum(i_k + 2, KT - 1) * STEP)
        done = empty.index(stage)
        stage, phase = after(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase)
        b_0, b_1, b_2, b_3, b_f = unscaled(ring_w.index(2 * stage + i_w), b_s, FORWARD)
        # Passed already: the assembler moves decoding behind the wait for products, but not behind a branch.
        mbarrier.wait(full.index(stage), phase)
        acc, tail = finished(acc, tail, 0, TAIL)
        mbarrier.arrive(done)
        # Only here: the products read their left operand from registers until they are done.
        b_a = left_operand(b_0, b_1, b_2, b_3, b_f, FORWARD, LEFT)
    acc, tail = products(b_a, ring_x.index(stage), acc, tail, BM, TAIL)
    acc, tail = finished(acc, tail, 0, TAIL)
    mbarrier.arrive(empty.index(stage))
    stage, phase = after(stage, phase, STAGES)
    return acc, tail, stage, phase


@gluon.jit
def float_products(
    ring, stage, phase, acc, tail, i_w: gl.constexpr, KT: gl.constexpr, FORWARD: gl.constexpr, BM: gl.constexpr,
    TAIL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sums of a tile over the contraction, float weights, and the place in the ring behind it."""
    ring_x, ring_w, full, empty = ring
    for i_k in range(KT):
        mbarrier.wait(full.index(stage), phase)
        b_a = ring_w.index(2 * stage + i_w)._reinterpret(gl.bfloat16, [64, 64], gl.NVMMASharedLayout(128, 16, 2))
        if not FORWARD:
            b_a = b_a.permute((1, 0))
        acc, tail = products(b_a, ring_x.index(stage), acc, tail, BM, TAIL)
        acc, tail = finished(acc, tail, 1, TAIL)
        mbarrier.arrive(empty.index(before(stage, STAGES)), pred=i_k > 0)
        stage, phase = after(stage, phase, STAGES)
    acc, tail = finished(acc, tail, 0, TAIL)
    mbarrier.arrive(empty.index(before(stage, STAGES)))
    return acc, tail, stage, phase


@gluon.jit
def factor_values(factor, rank, i_r: gl.constexpr, i_o, form, LEFT: gl.constexpr):
    """fp32 [BO, BR]: ranks from i_r on of the factor, for a warpgroup's outputs from i_o on; zero from `rank` on."""
    N: gl.constexpr = form.N
    o_n = gl.arange(0, BO, layout=gl.SliceLayout(1, LEFT))
    if form.GATED:
        o_n = i_o // 2 + o_n // 16 * 8 + o_n % 8 + o_n // 8 % 2 * (N // 2)
    elif form.PACKED and not form.FORWARD:
        o_n = i_o + o_n // 16 % 2 * 32 + o_n % 8 * 4 + o_n // 32 * 2 + o_n // 8 % 2
    else:
        o_n = i_o + o_n
    o_r = gl.expand_dims(i_r + gl.arange(0, BR, layout=gl.SliceLayout(0, LEFT)), 0)
    p_f = factor + gl.expand_dims(gl.minimum(o_n, N - 1), 1) + o_r * N
    return gl.load(p_f, mask=(o_r < rank) & (gl.expand_dims(o_n, 1) < N), other=0.0).to(gl.float32)


@gluon.jit
def low_rank_products(b_f, scaling, ring, stage, phase, acc, tail, BM: gl.constexpr, TAIL: gl.constexpr, STAGES):
    """acc + scaling * factor^T low^T, a step of the contraction in tf32, and the place in the ring behind it."""
    ring_x, _, full, empty = ring
    b_a = nearest_tf32(b_f * scaling)
    mbarrier.wait(full.index(stage), phase)
    acc, tail = products(b_a, low_rows(ring_x.index(stage), ring_x.shape[1]), acc, tail, BM, TAIL)
    acc, tail = finished(acc, tail, 0, TAIL)
    mbarrier.arrive(empty.index(stage))
    stage, phase = after(stage, phase, STAGES)
    return acc, tail, stage, phase


@gluon.jit
def activate_and_store(acc, y, h, place, place_h, bounds, i_m, end, i_o, form, BM: gl.constexpr):
    """The activation, and the store of acc [BO, BM]: rows from i_m on, outputs from i_o on."""
    beta, linear_beta = bounds
    N: gl.constexpr = form.N
    B: gl.constexpr = min(BM, BX)
    for i_b in gl.static_range(BM // B):
        b_y = columns(acc, i_b, BM, B).to(gl.bfloat16)
        i_r = i_m + i_b * B
        if form.GATED:
            b_y = gl.reshape(b_y, [4, 2, 8, B])
            if y is not None:
                b_gu = gl.reshape(gl.permute(b_y, (3, 1, 0, 2)), [B, BO])
                store_rows(y, place, b_gu, i_r, end, i_o // 2, N // 2, N, BO, True)
            b_g, b_u = gl.split(gl.permute(b_y, (3, 0, 2, 1)))
            b_h = activate(b_g.to(gl.float32), b_u.to(gl.float32), beta, linear_beta, form.ACTIVATION, True)
            b_h = gl.reshape(b_h.to(gl.bfloat16), [B, BO // 2])
            if form.ORDERED:
                b_h = contraction_order(b_h, B, BO // 2)
            store_rows(h, place_h, b_h, i_r, end, i_o // 2, N // 2, N // 2, BO // 2, False)
        else:
            if form.PACKED and not form.FORWARD:
                # [i1, w, i0, g] -> [w, g, i1, i0]
                b_y = gl.reshape(gl.permute(gl.reshape(b_y, [2, 2, 2, 8, B]), (4, 1, 3, 0, 2)), [B, BO])
            else:
                b_y = gl.permute(b_y, (1, 0))
            store_rows(y, place, b_y, i_r, end, i_o, N, N, BO, False)


@gluon.jit
def multiply_tile(
    scale, factor, rank, scaling, y, h, place, place_h, bounds, ring, stage, phase, i_e, i_m, end, i_o, form,
    i_w: gl.constexpr, BM: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's outputs of BM + TAIL rows, and the place in the ring behind the tile."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    KT: gl.constexpr = form.K // BK
    if form.LOW > 0:
        # Long before they are needed: behind the contraction, a warpgroup would wait for them.
        ACC_LOW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 8])
        TAIL_LOW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 8])
        LEFT_LOW: gl.constexpr = gl.DotOperandLayout(0, ACC_LOW, 1)
        b_f = factor_values(factor, rank, 0, i_o, form, LEFT_LOW)
        if form.LOW > 1:
            b_f2 = factor_values(factor, rank, BR, i_o, form, LEFT_LOW)
    acc = gl.zeros([BO, BM], gl.float32, layout=ACC)
    if TAIL > 0:
        tail = gl.zeros([BO, TAIL], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16]))
    else:
        tail = gl.to_tensor(0)
    if form.PACKED:
        p_s = scale_pointers(scale, i_e, i_o, form.N, form.K, form.GATED, form.FORWARD)
        STEP: gl.constexpr = BK // 32 if form.FORWARD else BK // 2
        acc, tail, stage, phase = packed_products(
            p_s, ring, stage, phase, acc, tail, LEFT, i_w, KT, STEP, form.FORWARD, BM, TAIL, STAGES
        )
    else:
        acc, tail, stage, phase = float_products(ring, stage, phase, acc, tail, i_w, KT, form.FORWARD, BM, TAIL, STAGES)
    if form.LOW > 0:
        # Products of fp32 contract over 8 at a time, not 16; sums lie the same.
        acc = gl.convert_layout(acc, ACC_LOW, assert_trivial=True)
        if TAIL > 0:
            tail = gl.convert_layout(tail, TAIL_LOW, assert_trivial=True)
        acc, tail, stage, phase = low_rank_products(b_f, scaling, ring, stage, phase, acc, tail, BM, TAIL, STAGES)
        if form.LOW > 1:
            acc, tail, stage, phase = low_rank_products(b_f2, scaling, ring, stage, phase, acc, tail, BM, TAIL, STAGES)
    activate_and_store(acc, y, h, place, place_h, bounds, i_m, end, i_o, form, BM)
    if TAIL > 0:
        activate_and_store(tail, y, h, place, place_h, bounds, i_m + BM, end, i_o, form, TAIL)
    return stage, phase


@gluon.jit
def multiply_tiles(
    scale, factor, rank, stride, scaling, y, h, places, places_h, bounds, tiles, ring, form,
    i_w: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The role that multiplies: warpgroup i_w has the outputs from 64 i_w on of every 128."""
    NB: gl.constexpr = (form.N + 2 * BO - 1) // (2 * BO)
    count = gl.load(tiles)
    place, place_h = places.index(i_w), places_h.index(i_w)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for i_p in range(gl.program_id(0), count * NB, gl.num_programs(0)):
        i_e, i_m, end, i_n = tile_of(tiles, count, i_p, NB)
        p_f = factor
        if form.LOW > 0:
            p_f += i_e.to(gl.int64) * stride
        i_o = (2 * i_n + i_w) * BO
        rows = end - i_m
        if BM > 192 and rows > 192:
            stage, phase = multiply_tile(
                scale, p_f, rank, scaling, y, h, place, place_h, bounds, ring, stage, phase, i_e, i_m, end, i_o,
                form, i_w, 256, 0, STAGES,
            )  # fmt: skip
        elif BM > 128 and rows > 160:
            stage, phase = multiply_tile(
                scale, p_f, rank, scaling, y, h, place, place_h, bounds, ring, stage, phase, i_e, i_m, end, i_o,
                form, i_w, 128, 64, STAGES,
            )  # fmt: skip
        elif BM > 128 and rows > 128:
            stage, phase = multiply_tile(
                scale, p_f, rank, scaling, y, h, place, place_h, bounds, ring, stage, phase, i_e, i_m, end, i_o,
                form, i_w, 128, 32, STAGES,
            )  # fmt: skip
        elif BM > 64 and rows > 64:
            stage, phase = multiply_tile(
                scale, p_f, rank, scaling, y, h, place, place_h, bounds, ring, stage, phase, i_e, i_m, end, i_o,
                form, i_w, 128, 0, STAGES,
            )  # fmt: skip
        else:
            stage, phase = multiply_tile(
                scale, p_f, rank, scaling, y, h, place, place_h, bounds, ring, stage, phase, i_e, i_m, end, i_o,
                form, i_w, 64, 0, STAGES,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["rank", "stride"])
def product_kernel(
    x, weight, scale, low, factor, rank, y, h, tiles, stride, scaling, beta, linear_beta,
    N: gl.constexpr, K: gl.constexpr, FORWARD: gl.constexpr, PACKED: gl.constexpr, GATED: gl.constexpr,
    ORDERED: gl.constexpr, ACTIVATION: gl.constexpr, LOW: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """y [R, N] = W x of every row of x [R, K]; GATED: y are gates and ups, if asked for, and h their activation, in
    contraction order if ORDERED.
    """
    NB: gl.constexpr = (N + 2 * BO - 1) // (2 * BO)
    WORD: gl.constexpr = (8 if FORWARD else 4) if PACKED else 1
    ring_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], x.layout)
    ring_w = gl.allocate_shared_memory(weight.dtype, [2 * STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    places = gl.allocate_shared_memory(gl.bfloat16, [2, BX, BO], gl.NVMMASharedLayout(128, 16, 2))
    places_h = gl.allocate_shared_memory(gl.bfloat16, [2, BX, BO // 2], gl.NVMMASharedLayout(64, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_s in gl.static_range(STAGES):
        mbarrier.init(full.index(i_s), count=1)
        mbarrier.init(empty.index(i_s), count=2)
    # The copy engine must see the barriers.
    fence_async_shared()
    KT: gl.constexpr = K // BK
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    ring = (ring_x, ring_w, full, empty)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (
                    scale, factor, rank, stride, scaling, y, h, places, places_h, (beta, linear_beta), tiles,
                    ring, Form(N, K, FORWARD, PACKED, GATED, ORDERED, ACTIVATION, LOW), FIRST, BM, STAGES,
                ),
            ),
            (
                multiply_tiles,
                (
                    scale, factor, rank, stride, scaling, y, h, places, places_h, (beta, linear_beta), tiles,
                    ring, Form(N, K, FORWARD, PACKED, GATED, ORDERED, ACTIVATION, LOW), SECOND, BM, STAGES,
                ),
            ),
            (load_tiles, (x, weight, low, tiles, ring, NB, KT, FORWARD, WORD, LOW, BM, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
