"""Gradients of q, k and the gate inside the chunks, for Hopper: what `gradients.key_gradients_kernel` computes.

For half precision, bounded NARROW decays and keys of 128 channels. A program of four warps takes BK channels of a
chunk. Every product has a tile of BK channels by BC tokens as its left operand, in registers, and a block of the
gradients of the scores as its right one, in shared memory. So operands, sums and everything else lie the same: a thread
has two neighbouring channels of eight tokens in a row. Only the blocks have to be brought into another order; sums over
tokens run within threads, in fp32, and factors of tokens come from shared memory in vectors.

What comes from outside of a half is brought to its reference, the middle, and is what the sums of the half's own
products begin with.

16 warps on a multiprocessor leave a thread 128 registers: what is not needed for a while waits in shared memory or is
loaded again.

Legend: M tokens, N chunks of BT tokens in halves of BC, H heads, K key width.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gate import LOG2_E, decay_rate
from .scores import exp2, once, reciprocal
from .tiles import BC, BT, chunk_of

# 16 warps on a multiprocessor.
SETTINGS = {"num_warps": 4, "maxnreg": 128}
# Channels of a program.
BK = gl.constexpr(64)
# [BK, 4, 8]: thread [g, q] of warp w has channels 16 w + 2 g + r and tokens 8 q + 2 j + e of a half. To the matrix
# units they are rows 16 w + 8 r + g and columns 8 j + 2 q + e, and so are the tokens of a block of scores.
ELEMENTS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, 8],
    )
)
# [BK, 4], [BK], [4, 8] and [8].
THREADS = gl.constexpr(gl.SliceLayout(2, ELEMENTS.value))
CHANNELS = gl.constexpr(gl.SliceLayout(1, THREADS.value))
TOKENS = gl.constexpr(gl.SliceLayout(0, ELEMENTS.value))
# What a thread keeps in shared memory: 16 bytes, those of the other threads, and the next ones.
KEPT = gl.constexpr(
    gl.SharedLinearLayout(
        [
            [0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 2, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0], [16, 0, 0], [32, 0, 0],
            [0, 0, 2], [0, 0, 4],
        ],
        alignment=16,
    )
)  # fmt: skip
KEPT_BF16 = gl.constexpr(
    gl.SharedLinearLayout(
        [
            [0, 0, 1], [1, 0, 0], [0, 0, 2], [0, 1, 0], [0, 2, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0], [16, 0, 0],
            [32, 0, 0], [0, 0, 4],
        ],
        alignment=16,
    )
)  # fmt: skip
# [BC], as TOKENS.
TOKEN_LINE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [4]],
        lane_bases=[[8], [16], [0], [0], [0]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[32],
    )
)
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
# Blocks of the gradients of scores come as rows of 64 bytes.
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
BLOCKS = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Factors of tokens, by their places in shared memory.
Q_NORM = gl.constexpr(0)
K_NORM = gl.constexpr(1)
BETA = gl.constexpr(2)
DQ_OWN = gl.constexpr(3)
DQ_K = gl.constexpr(4)
DQ_Q = gl.constexpr(5)
DK_OWN = gl.constexpr(6)
DK_Q = gl.constexpr(7)
DK_K = gl.constexpr(8)


@gluon.jit
def _as_rows_and_columns(x):
    """x [BK, BC] in the order of the matrix units."""
    x = gl.permute(gl.reshape(x, [BK // 16, 8, 2, 4, 4, 2]), (0, 2, 1, 4, 3, 5))
    return gl.reshape(x, [BK, BC])


@gluon.jit
def to_sums(x):
    """x, to which products will be added."""
    return gl.convert_layout(_as_rows_and_columns(x), SUMS, assert_trivial=True)


@gluon.jit
def elements(x):
    """Sums of products, [BK, 4, 8], in the order of channels and tokens."""
    x = gl.permute(gl.reshape(x, [BK // 16, 2, 8, 4, 4, 2]), (0, 2, 1, 4, 3, 5))
    return gl.convert_layout(gl.reshape(x, [BK, 4, 8]), ELEMENTS, assert_trivial=True)


@gluon.jit
def split(x):
    """x as the sum of two bf16 parts, which hold 16 bits of any range: see scores.split."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def left(parts):
    """Both parts as left operands."""
    high, low = parts
    return (
        once(gl.convert_layout(_as_rows_and_columns(high), LEFT, assert_trivial=True)),
        once(gl.convert_layout(_as_rows_and_columns(low), LEFT, assert_trivial=True)),
    )


@gluon.jit
def keep(x, KEPT: gl.constexpr):
    return gl.allocate_shared_memory(x.dtype, [BK, 4, 8], KEPT, x)


@gluon.jit
def add_product(parts, block, acc, use_acc=True):
    """Has to be waited for."""
    high, low = parts
    acc = warpgroup_mma(low, block, acc, use_acc=use_acc, is_async=True)
    return warpgroup_mma(high, block, acc, is_async=True)


@gluon.jit
def load_block(p, block, rows):
    """[BC, BC] gradients of scores, of which `rows` rows exist, in the order of the matrix units."""
    o_t = gl.arange(0, BC, layout=gl.SliceLayout(1, ROWS))
    o_j = gl.arange(0, BC, layout=gl.SliceLayout(0, ROWS))
    x = gl.load(p + o_t[:, None] * BT + o_j[None, :], mask=(o_t < rows)[:, None], other=0.0)
    x = gl.permute(gl.reshape(x, [4, 4, 2, 4, 4, 2]), (1, 0, 2, 4, 3, 5))
    block.store(gl.reshape(x, [BC, BC]))


@gluon.jit
def load_blocks(p, blocks, length):
    """The three blocks of a chunk that hold scores: first half, second half with the first, second half."""
    load_block(p, blocks[0], length)
    load_block(p + BC * BT, blocks[1], length - BC)
    load_block(p + (BC * BT + BC), blocks[2], length - BC)


@gluon.jit
def place():
    return gl.allocate_shared_memory(gl.float32, [BT], LINE)


@gluon.jit
def block():
    return gl.allocate_shared_memory(gl.bfloat16, [BC, BC], BLOCKS)


@gluon.jit
def store_factors(factors, beta, of_tokens, unit, i_t, i_h, length, M, H, K: gl.constexpr):
    """Factors of a chunk's tokens, zero for those that do not exist."""
    q_rstds, k_rstds, own_scores, q_dots, k_dots = of_tokens
    SCALE: gl.constexpr = K**-0.5
    o_t = gl.arange(0, BT, layout=ONE_EACH)
    m_t = o_t < length
    p = i_h * M + i_t
    q_rstd = gl.load(q_rstds + p + o_t, mask=m_t, other=0.0)
    k_rstd = gl.load(k_rstds + p + o_t, mask=m_t, other=0.0)
    own = gl.load(own_scores + p + o_t, mask=m_t, other=0.0)
    q_dot = gl.load(q_dots + p + o_t, mask=m_t, other=0.0)
    k_dot = gl.load(k_dots + p + o_t, mask=m_t, other=0.0)
    b_beta = gl.load(beta + i_t * H + i_h + o_t * H, mask=m_t, other=0.0).to(gl.float32)
    factors[Q_NORM].store(q_rstd * SCALE)
    factors[K_NORM].store(k_rstd)
    factors[BETA].store(reciprocal(1.0 + exp2(b_beta * -LOG2_E)))
    factors[DQ_OWN].store(unit * SCALE * q_rstd)
    factors[DQ_K].store(own * SCALE * q_rstd)
    # Normalised q is of length SCALE, and q_dot its product with its gradient.
    factors[DQ_Q].store(q_dot * q_rstd * (1.0 / SCALE))
    factors[DK_OWN].store(unit * k_rstd)
    # For q as it is.
    factors[DK_Q].store(own * k_rstd * (q_rstd * SCALE))
    factors[DK_K].store(k_dot * k_rstd)


@gluon.jit
def factor(factors, i: gl.constexpr, i_c: gl.constexpr):
    """[1, 4, 8]: a factor of the tokens of a half."""
    x = gl.reshape(factors[i].slice(i_c * BC, BC).load(TOKEN_LINE), [4, 8])
    return gl.convert_layout(x, TOKENS, assert_trivial=True)[None, :, :]


@gluon.jit
def of_channels(x):
    """[BK] -> [BK, 1, 1]."""
    return gl.expand_dims(gl.expand_dims(x, 1), 2)


@gluon.jit
def tokens(x):
    """The eight tokens of each thread, [BK, 4] each."""
    x0, x1 = gl.split(gl.reshape(x, [BK, 4, 4, 2]))
    x00, x01 = gl.split(gl.reshape(x0, [BK, 4, 2, 2]))
    x10, x11 = gl.split(gl.reshape(x1, [BK, 4, 2, 2]))
    x0, x4 = gl.split(x00)
    x2, x6 = gl.split(x01)
    x1, x5 = gl.split(x10)
    x3, x7 = gl.split(x11)
    return x0, x1, x2, x3, x4, x5, x6, x7


@gluon.jit
def joined(x0, x1, x2, x3, x4, x5, x6, x7):
    x0, x1 = gl.join(gl.join(x0, x4), gl.join(x2, x6)), gl.join(gl.join(x1, x5), gl.join(x3, x7))
    x = gl.join(gl.reshape(x0, [BK, 4, 4]), gl.reshape(x1, [BK, 4, 4]))
    return gl.convert_layout(gl.reshape(x, [BK, 4, 8]), ELEMENTS, assert_trivial=True)


@gluon.jit
def from_others(later, earlier):
    """[BK, 4] sums of each thread's tokens -> those of `later` in the threads behind plus those of `earlier` in the
    threads before, and both sums over all.
    """
    o_q = gl.arange(0, 4, layout=gl.SliceLayout(0, later.type.layout))[None, :]
    i_1 = (gl.zeros_like(later, dtype=gl.int32) + o_q) ^ 1
    i_2 = (gl.zeros_like(later, dtype=gl.int32) + o_q) ^ 2
    later_1, earlier_1 = gl.gather(later, i_1, 1), gl.gather(earlier, i_1, 1)
    later, earlier = later + later_1, earlier + earlier_1
    later_2, earlier_2 = gl.gather(later, i_2, 1), gl.gather(earlier, i_2, 1)
    others = gl.where(o_q % 2 == 0, later_1, earlier_1) + gl.where(o_q < 2, later_2, earlier_2)
    return others, later + later_2, earlier + earlier_2


@gluon.jit
def decay_sums(later, earlier):
    """Of a half: sums of `later` from each token on and of `earlier` up to the token before, and both over all.

    Eight tensors [BK, 4] of what lies in the same thread, [BK, 4] of the rest, and twice [BK, 4].
    """
    l0, l1, l2, l3, l4, l5, l6, l7 = tokens(later)
    e0, e1, e2, e3, e4, e5, e6, e7 = tokens(earlier)
    l6 += l7
    l5 += l6
    l4 += l5
    l3 += l4
    l2 += l3
    l1 += l2
    l0 += l1
    e1 += e0
    e2 += e1
    e3 += e2
    e4 += e3
    e5 += e4
    e6 += e5
    e7 += e6
    others, later_total, earlier_total = from_others(l0, e7)
    return (l0, l1 + e0, l2 + e1, l3 + e2, l4 + e3, l5 + e4, l6 + e5, l7 + e6), others, later_total, earlier_total


@gluon.jit
def like(x, y):
    """x [BK], as [BK, 4] y lies."""
    return gl.zeros_like(y) + gl.convert_layout(x, gl.SliceLayout(1, y.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def decay_gradients(inside, rest, unit):
    """[BK, 4, 8]: unit * inside + rest."""
    x0, x1, x2, x3, x4, x5, x6, x7 = inside
    return joined(
        x0 * unit + rest, x1 * unit + rest, x2 * unit + rest, x3 * unit + rest,
        x4 * unit + rest, x5 * unit + rest, x6 * unit + rest, x7 * unit + rest,
    )  # fmt: skip


@gluon.jit
def wide(x):
    """x in fp32. Of bf16, pairs at a time: taken one by one the upper ones cost two instructions."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], gl.float32, is_pure=True, pack=2
        )
    return x.to(gl.float32)


@gluon.jit
def read(p, m):
    """Zero where m is false. m is None where all tokens exist."""
    if m is None:
        return gl.load(p)
    else:
        return gl.load(p, mask=m, other=0.0)


@gluon.jit
def write(p, x, m):
    x = x.to(p.dtype.element_ty)
    if m is None:
        gl.store(p, x)
    else:
        gl.store(p, x, mask=m)


@gluon.jit
def gate_gradients(dg, b_f, p_df, m, bias, rate):
    """Stores df of a half, and returns its sums over each thread's tokens, and those of df times z, [BK, 4].

    dg: gradients of what the sigmoid's derivative is multiplied with.
    """
    z = wide(b_f) + of_channels(bias)
    # sigmoid(x) (1 - sigmoid(x)), of which nothing cancels, and which is the same for x and -x.
    y = exp2(gl.abs(z) * (-LOG2_E * rate))
    s = reciprocal(1.0 + y)
    dz = dg * (y * s * s)
    if m is not None:
        dz = gl.where(m, dz, 0.0)
    write(p_df, dz, m)
    return gl.sum(dz, 2), gl.sum(dz * z, 2)


@gluon.jit
def tile(p, o, STRIDE: gl.constexpr, i_c: gl.constexpr):
    """[BK, 4, 8] places of a half: o [BK, 4, 1] is where each thread's tokens begin, the rest are constants."""
    o_8 = gl.arange(0, 8, layout=gl.SliceLayout(0, TOKENS))[None, :][None, :, :]
    return p + o + (o_8 + i_c * BC) * STRIDE


@gluon.jit
def inverse_exp2(x):
    """2^-x, zero below 2^-126."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 y; neg.f32 y, $1; ex2.approx.ftz.f32 $0, y; }", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def half(
    p_q, p_dk_out, p_dq, p_dk, factors, dqks, dkks, row, b_k, b_dq, b_dk, across, p_quarters, ratios, m,
    i_c: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Stores dq and dk of a half, and returns `across` and what its decays are `later` and `earlier`: see
    gradients.key_gradients_kernel.

    row: factors of rows. b_dq, b_dk: gradients as rows, before that factor and beta. across: sums of products of the
    second half's rows that are gradients of the first as columns; for the first half these, at its reference, in shared
    memory.
    """
    b_q = wide(read(p_q, m)) * factor(factors, Q_NORM, i_c)
    rows = b_q * row
    b_dq = b_dq * row
    kept_later = keep(b_q * b_dq, KEPT)
    b_dq = b_dq * factor(factors, DQ_OWN, i_c) + b_k * factor(factors, DQ_K, i_c) - b_q * factor(factors, DQ_Q, i_c)
    write(p_dq, b_dq, m)
    parts = left(split(rows))
    if i_c == 1:
        across = add_product(parts, dqks[1], across, False)
        acc = add_product(parts, dqks[2], across, False)
    else:
        acc = add_product(parts, dqks[0], to_sums(across.load(ELEMENTS)))
    rowb = row * factor(factors, BETA, i_c)
    rows = b_k * rowb
    b_dk *= rowb
    if i_c == 1:
        acc, across = warpgroup_mma_wait(0, deps=[acc, across])
        parts = left(split(rows))
        across = add_product(parts, dkks[1], across)
        acc = add_product(parts, dkks[2], acc)
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
        parts = left(split(rows))
        acc = add_product(parts, dkks[0], acc)
    # Beside the products.
    dwrite = read(p_dk_out, m)
    out = gl.load(p_quarters + 3 * K) * gl.load(ratios + 3)
    if i_c == 0:
        # What becomes subnormal is met by factors of columns of at most 2^115: nothing is left of it.
        out *= gl.load(p_quarters + K) * gl.load(p_quarters + 2 * K)
    if i_c == 1:
        acc, across = warpgroup_mma_wait(0, deps=[acc, across])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    acc = elements(acc)
    column = reciprocal(row)
    columns = b_k * column
    later = kept_later.load(ELEMENTS) + b_k * b_dk - columns * acc
    dwrite = wide(dwrite) * of_channels(out)
    earlier = columns * dwrite
    b_dk += column * (acc + dwrite)
    b_dk = b_dk * factor(factors, DK_OWN, i_c) - b_k * factor(factors, DK_K, i_c)
    b_dk += wide(read(p_q, m)) * factor(factors, DK_Q, i_c)
    write(p_dk, b_dk, m)
    return across, later, earlier


@gluon.jit
def key_gradients(
    inputs, of_tokens, of_decays, outputs, lower_bound, i_nh, i_h, i_k, i_t, length, M,
    H: gl.constexpr, K: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Of a chunk with tokens; RAGGED: with less than BT."""
    q, k, dq_in, dk_in, dk_out, dscores, beta, ratios = inputs
    f, sums, quarters, A_log, dt_bias, dtotal = of_decays
    dq, dk, df, ddt_bias, dA_log = outputs
    row = i_h * M + i_t
    # Places in inputs and outputs, and in what kernels hand each other.
    o_c, o_q = i_k + gl.arange(0, BK, layout=CHANNELS), gl.arange(0, 4, layout=gl.SliceLayout(0, THREADS))
    o_x = gl.expand_dims(o_q[None, :] * (8 * H * K) + o_c[:, None], 2)
    o_y = gl.expand_dims(o_q[None, :] * (8 * K) + o_c[:, None], 2)
    X: gl.constexpr = H * K
    x, y = (i_t * H + i_h) * K, row * K
    if RAGGED:
        o_4 = gl.arange(0, 4, layout=gl.SliceLayout(1, TOKENS))
        o_8 = gl.arange(0, 8, layout=gl.SliceLayout(0, TOKENS))
        m_1 = (o_8[None, :] < length - 8 * o_4[:, None])[None, :, :]
        m_2 = (o_8[None, :] < length - BC - 8 * o_4[:, None])[None, :, :]
    else:
        m_1: gl.constexpr = None
        m_2: gl.constexpr = None
    c = wide(read(tile(sums + y, o_y, K, 0), m_1))
    b_k = wide(read(tile(k + x, o_x, X, 0), m_1))

    factors = (place(), place(), place(), place(), place(), place(), place(), place(), place())
    dqks, dkks = (block(), block(), block()), (block(), block(), block())
    ratios += i_nh * 4
    unit, q_ratio, in_ratio = gl.load(ratios), gl.load(ratios + 1), gl.load(ratios + 2)
    load_blocks(dscores + row * BT, dqks, length)
    load_blocks(dscores + M.to(gl.int64) * H * BT + row * BT, dkks, length)
    store_factors(factors, beta, of_tokens, unit, i_t, i_h, length, M, H, K)
    fence_async_shared()
    gl.thread_barrier()

    # Columns of the first half, with rows of the second.
    high, low = split(b_k * factor(factors, K_NORM, 0) * inverse_exp2(c))
    kept_high, kept_low = keep(high, KEPT_BF16), keep(low, KEPT_BF16)
    parts = left((high, low))
    acc_q = gl.zeros([BK, BC], gl.float32, layout=SUMS)
    acc_k = acc_q
    acc_q = add_product(parts, dqks[1].permute((1, 0)), acc_q, False)
    acc_k = add_product(parts, dkks[1].permute((1, 0)), acc_k, False)
    p_quarters = quarters + i_nh * (4 * K) + o_c
    into1, out1 = gl.load(p_quarters), gl.load(p_quarters + K)
    into2 = gl.load(p_quarters + 2 * K)
    acc_q, acc_k = warpgroup_mma_wait(0, deps=[acc_q, acc_k])

    # The second half.
    first = into1 * out1
    b_dq = wide(read(tile(dq_in + y, o_y, K, 1), m_2)) * of_channels(q_ratio * first)
    b_dk = wide(read(tile(dk_in + y, o_y, K, 1), m_2)) * of_channels(-in_ratio * first)
    b_dq = (elements(acc_q) * of_channels(out1) + b_dq) * of_channels(into2)
    b_dk = (elements(acc_k) * of_channels(out1) + b_dk) * of_channels(into2)
    c = wide(read(tile(sums + y, o_y, K, 1), m_2))
    b_k = wide(read(tile(k + x, o_x, X, 1), m_2)) * factor(factors, K_NORM, 1)
    parts = left(split(b_k * inverse_exp2(c)))
    acc_q = add_product(parts, dqks[2].permute((1, 0)), to_sums(b_dq))
    acc_k = add_product(parts, dkks[2].permute((1, 0)), to_sums(b_dk))
    acc_q, acc_k = warpgroup_mma_wait(0, deps=[acc_q, acc_k])
    across = gl.zeros([BK, BC], gl.float32, layout=SUMS)
    across, later, earlier = half(
        tile(q + x, o_x, X, 1), tile(dk_out + y, o_y, K, 1), tile(dq + x, o_x, X, 1), tile(dk + x, o_x, X, 1),
        factors, dqks, dkks, exp2(c), b_k, elements(acc_q), elements(acc_k), across, p_quarters, ratios, m_2, 1, K,
    )  # fmt: skip
    inside2, rest2, later_2, _ = decay_sums(later, earlier)
    kept_inside2 = keep(joined(*inside2), KEPT)
    # Again, which costs less than registers until here.
    into2, out1 = gl.load(p_quarters + 2 * K), gl.load(p_quarters + K)
    across = keep(elements(across) * of_channels(into2) * of_channels(out1), KEPT)

    # The first half.
    into1 = gl.load(p_quarters)
    b_dq = wide(read(tile(dq_in + y, o_y, K, 0), m_1)) * of_channels(q_ratio * into1)
    b_dk = wide(read(tile(dk_in + y, o_y, K, 0), m_1)) * of_channels(-in_ratio * into1)
    parts = left((kept_high.load(ELEMENTS), kept_low.load(ELEMENTS)))
    acc_q = add_product(parts, dqks[0].permute((1, 0)), to_sums(b_dq))
    acc_k = add_product(parts, dkks[0].permute((1, 0)), to_sums(b_dk))
    acc_q, acc_k = warpgroup_mma_wait(0, deps=[acc_q, acc_k])
    c = wide(read(tile(sums + y, o_y, K, 0), m_1))
    b_k = wide(read(tile(k + x, o_x, X, 0), m_1)) * factor(factors, K_NORM, 0)
    across, later, earlier = half(
        tile(q + x, o_x, X, 0), tile(dk_out + y, o_y, K, 0), tile(dq + x, o_x, X, 0), tile(dk + x, o_x, X, 0),
        factors, dqks, dkks, exp2(c), b_k, elements(acc_q), elements(acc_k), across, p_quarters, ratios, m_1, 0, K,
    )  # fmt: skip
    f_1, f_2 = read(tile(f + x, o_x, X, 0), m_1), read(tile(f + x, o_x, X, 1), m_2)
    inside1, rest1, _, earlier_1 = decay_sums(later, earlier)

    bias = gl.load(dt_bias + i_h * K + o_c).to(gl.float32)
    rate = decay_rate(A_log, i_h)
    # Of what the sigmoid's derivative multiplies.
    slope, unit = lower_bound * rate, gl.load(ratios)
    total = like(gl.load(dtotal + i_nh * K + o_c) * slope, rest1)
    slope *= unit
    dg = decay_gradients(inside1, (rest1 + later_2) * slope + total, slope)
    bias_1, A_1 = gate_gradients(dg, f_1, tile(df + x, o_x, X, 0), m_1, bias, rate)
    dg = decay_gradients(tokens(kept_inside2.load(ELEMENTS)), (rest2 + earlier_1) * slope + total, slope)
    bias_2, A_2 = gate_gradients(dg, f_2, tile(df + x, o_x, X, 1), m_2, bias, rate)
    gl.store(ddt_bias + i_nh * K + o_c, gl.sum(bias_1 + bias_2, 1))
    gl.store(dA_log + i_nh * (K // BK) + i_k // BK, gl.sum(gl.sum(A_1 + A_2, 1), 0))


@gluon.jit(do_not_specialize=["M"])
def key_gradients_kernel(
    q, k, f, sums, quarters, A_log, dt_bias, dq_in, dk_in, dk_out, dscores, beta, chunks, ratios, q_rstds, k_rstds,
    own_scores, q_dots, k_dots, dtotal, dq, dk, df, ddt_bias, dA_log, lower_bound, M,
    H: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Of BK channels of a chunk: dq, dk, df, and its share of d dt_bias [N, H, K] and d A_log [N, H, K / BK]."""
    i_k = gl.program_id(0) % (K // BK) * BK
    i_nh = gl.program_id(0) // (K // BK)
    i_n, i_h = i_nh // H, (i_nh % H).to(gl.int64)
    i_nh = i_nh.to(gl.int64)
    i_t, length = chunk_of(chunks, i_n)
    inputs = (q, k, dq_in, dk_in, dk_out, dscores, beta, ratios)
    of_tokens = (q_rstds, k_rstds, own_scores, q_dots, k_dots)
    of_decays, outputs = (f, sums, quarters, A_log, dt_bias, dtotal), (dq, dk, df, ddt_bias, dA_log)
    if length == 0:
        o_c = i_k + gl.arange(0, BK, layout=CHANNELS)
        gl.store(ddt_bias + i_nh * K + o_c, gl.zeros([BK], gl.float32, layout=CHANNELS))
        gl.store(dA_log + i_nh * (K // BK) + i_k // BK, 0.0)
    elif length == BT:
        key_gradients(
            inputs, of_tokens, of_decays, outputs, lower_bound, i_nh, i_h, i_k, i_t, length, M, H, K, False
        )  # fmt: skip
    else:
        key_gradients(
            inputs, of_tokens, of_decays, outputs, lower_bound, i_nh, i_h, i_k, i_t, length, M, H, K, True
        )  # fmt: skip


def key_gradients_on_hopper(
    q, k, f, sums, quarters, A_log, dt_bias, dq_in, dk_in, dk_out, dscores, beta, chunks, ratios, q_rstds, k_rstds,
    own_scores, q_dots, k_dots, dtotal, dq, dk, df, lower_bound,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Writes dq, dk and df, and returns shares of ddt_bias [N, H, K] and dA_log [N, H, K / BK], fp32.

    q, k, f and their gradients: [B, T, H, 128] or [M, H, 128], bf16 or fp16. sums: [H, M, 128] and quarters
    [N, H, 4, 128], of gate_kernel. dq_in, dk_in, dk_out [H, M, 128] in fp16, dscores [2, H, M, 64] in bf16 and
    own_scores, q_dots, k_dots [H, M], of value_gradients_kernel. beta: logits [M, H]. chunks: int32 [N, 2]. ratios:
    fp32 [N, H, 4], what a unit of the scores' gradients is worth, and powers of two that dq_in, dk_in and dk_out are
    multiplied with to have that unit. lower_bound: at least -5. What is not said to be of another dtype is fp32.
    """
    N, (H, K) = len(chunks), q.shape[-2:]
    ddt_bias, dA_log = sums.new_empty(N, H, K), sums.new_empty(N, H, K // BK.value)
    key_gradients_kernel[(N * H * K // BK.value,)](
        q, k, f, sums, quarters, A_log, dt_bias, dq_in, dk_in, dk_out, dscores, beta, chunks, ratios, q_rstds, k_rstds,
        own_scores, q_dots, k_dots, dtotal, dq, dk, df, ddt_bias, dA_log, lower_bound, sums.shape[1], H, K, **SETTINGS,
    )  # fmt: skip
    return ddt_bias, dA_log
