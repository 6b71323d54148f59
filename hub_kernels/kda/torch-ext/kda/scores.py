"""Scores between the tokens of a chunk, and their gradients, for decays that differ per channel.

The score of tokens i >= j is sum_k a_ik b_jk exp(G_ik - G_jk), where G is the running sum of the log decay. It becomes
a matrix product once exp(G_i - G_j) is split into a factor per row and a factor per column around a reference R:
exp(G_i - R) exp(R - G_j). Rows of the chunk's second half meet columns of the first at the boundary between them:
neither factor can exceed 1. Inside a half, where decays are NARROW, at most exp(-5) per token, one reference halfway
keeps both factors of its 32 tokens within float32 (16 tokens give exp(80)). Elsewhere halves are halved again and
again, and the factors stay below 1 whatever the decays.

Legend: T the BT tokens of a chunk, K key width; c is the running sum within each half, and decays are in base 2.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Tokens per chunk, tokens per half, both powers of two.
BT = tl.constexpr(64)
BC = tl.constexpr(32)
# Halvings from a chunk down to one token.
LEVELS = tl.constexpr(6)


@triton.jit
def small_dot(a, b, EXACT: tl.constexpr):
    """Product of operands that cannot exceed the range of fp16."""
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a.to(tl.float16), b.to(tl.float16))


@triton.jit
def _round_tf32(x):
    """Nearest value with ten bits of mantissa: the matrix units would cut the rest off, which is a bias."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def wide_dot(a, b, EXACT: tl.constexpr):
    """Product of operands that need the range of fp32."""
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(_round_tf32(a), _round_tf32(b), input_precision="tf32")


@triton.jit
def sum_rows(weights_TT, x_TK, EXACT: tl.constexpr):
    """weights @ x for weights of 0 and 1, and x > -1000: in two fp16 parts that hold 22 bits."""
    if EXACT:
        return tl.dot(weights_TT, x_TK, input_precision="ieee")
    weights = weights_TT.to(tl.float16)
    high = x_TK.to(tl.float16)
    return tl.dot(weights, high) + tl.dot(weights, (x_TK - high.to(tl.float32)).to(tl.float16))


@triton.jit
def running_sums(g_TK, EXACT: tl.constexpr):
    """Sums within each half up to and including every token."""
    o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    return sum_rows(tl.where((o_i >= o_j) & (o_i // BC == o_j // BC), 1.0, 0.0), g_TK, EXACT)


@triton.jit
def sums_to_end(x_TK, EXACT: tl.constexpr):
    """Sums over the chunk from every token on, for x of any range."""
    if EXACT:
        return tl.cumsum(x_TK, 0, reverse=True)
    o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    scale = tl.maximum(tl.max(tl.abs(x_TK), 0), 1e-30)[None, :]
    return sum_rows(tl.where(o_i <= o_j, 1.0, 0.0), x_TK / scale, EXACT) * scale


@triton.jit
def _level(c_TK, level: tl.constexpr, EXACT: tl.constexpr):
    """Row and column factors inside halves cut into blocks of BT >> level + 1 tokens, and which scores they make."""
    S: tl.constexpr = BT >> (level + 1)
    o_t = tl.arange(0, BT)
    o_i, o_j = o_t[:, None], o_t[None, :]
    boundary = sum_rows(tl.where(o_j == o_i // (2 * S) * 2 * S + S - 1, 1.0, 0.0), c_TK, EXACT)
    second = (o_i // S) % 2 == 1
    row = tl.where(second, tl.exp2(tl.minimum(c_TK - boundary, 0.0)), 0.0)
    column = tl.where(second, 0.0, tl.exp2(tl.minimum(boundary - c_TK, 0.0)))
    return row, column, o_i // (2 * S) == o_j // (2 * S)


@triton.jit
def add_scores(across, inside, a_TK, a_in, b_TK, b_out, c_TK, total_TK, NARROW: tl.constexpr, EXACT: tl.constexpr):
    """Add the scores a . b of some channels: those between the halves to `across`, those inside them to `inside`.

    total: the sum of a token's half; a_in: a exp2(c); b_out: b exp2(total - c). What lies outside the two kinds of
    places is not a score, may be infinite, and has to be masked.
    """
    across += small_dot(a_in, tl.trans(b_out), EXACT)
    if NARROW:
        a = a_TK * tl.exp2(c_TK - total_TK * 0.5)
        b = b_TK * tl.exp2(total_TK * 0.5 - c_TK)
        inside += wide_dot(a, tl.trans(b), EXACT)
    else:
        o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
        inside += tl.where(o_i == o_j, tl.sum(a_TK * b_TK, 1)[:, None], 0.0)
        for level in tl.static_range(1, LEVELS):
            row, column, here = _level(c_TK, level, EXACT)
            inside += tl.where(here, small_dot(a_TK * row, tl.trans(b_TK * column), EXACT), 0.0)
    return across, inside


@triton.jit
def scaled_rows(x_RC, EXACT: tl.constexpr):
    """x as a matrix operand: rows divided by their largest magnitude for fp16, and that magnitude."""
    if EXACT:
        return x_RC, tl.full([x_RC.shape[0]], 1.0, tl.float32)
    else:
        scale = tl.maximum(tl.max(tl.abs(x_RC), 1), 1e-30)
        return (x_RC * (1.0 / scale)[:, None]).to(tl.float16), scale


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """Product of operands as `scaled_rows` makes them."""
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def split(x, EXACT: tl.constexpr):
    """x as the sum of two bf16 parts, which hold 16 bits of any range; exact: x and zero."""
    if EXACT:
        return x, tl.zeros_like(x)
    else:
        high = x.to(tl.bfloat16)
        return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _bf16_dot(a, b):
    if INTERPRETED:
        # The interpreter's products of bfloat16 are wrong.
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


@triton.jit
def split_dot(a_high, a_low, b, EXACT: tl.constexpr):
    """a @ b for fp32 b, and a given by its two parts."""
    if EXACT:
        return tl.dot(a_high, b, input_precision="ieee")
    else:
        b_high, b_low = split(b, EXACT)
        return _bf16_dot(a_high, b_high) + _bf16_dot(a_high, b_low) + _bf16_dot(a_low, b_high)


@triton.jit
def score_gradients(
    dqk_high, dqk_low, dkk_high, dkk_low, beta_T, q_TK, k_TK, c_TK, total_0, total_1,
    NARROW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores for some channels of q, of k as row (before beta) and of k as column, [BT, BK] each.

    dqk and dkk, each in two parts, are zero where there is no score.
    """
    o_t = tl.arange(0, BT)
    o_i, o_j = o_t[:, None], o_t[None, :]
    second = o_i >= BC
    if NARROW:
        # Within a half the reference is its middle; across, the boundary: the same factors but for one per channel.
        middle = tl.where(second, total_1[None, :], total_0[None, :]) * 0.5
        row, column = tl.exp2(c_TK - middle), tl.exp2(middle - c_TK)
        across = tl.exp2((total_0 + total_1) * 0.5)[None, :]
        bridge = tl.where(second, across, 1.0)
        b_x = tl.where(second, 0.0, k_TK * column)
        dq = bridge * split_dot(dqk_high, dqk_low, b_x, EXACT)
        drow = bridge * split_dot(dkk_high, dkk_low, b_x, EXACT)
        b_x = tl.where(second, k_TK * column, 0.0)
        dq = row * (dq + split_dot(dqk_high, dqk_low, b_x, EXACT))
        drow = row * (drow + split_dot(dkk_high, dkk_low, b_x, EXACT))
        dqk_high, dqk_low = tl.trans(dqk_high), tl.trans(dqk_low)
        dkk_high, dkk_low = tl.trans(dkk_high), tl.trans(dkk_low)
        b_q, b_k = q_TK * row, k_TK * row * beta_T[:, None]
        dcolumn = split_dot(dqk_high, dqk_low, tl.where(second, b_q, 0.0), EXACT)
        dcolumn += split_dot(dkk_high, dkk_low, tl.where(second, b_k, 0.0), EXACT)
        dcolumn *= tl.where(second, 1.0, across)
        dcolumn += split_dot(dqk_high, dqk_low, tl.where(second, 0.0, b_q), EXACT)
        dcolumn += split_dot(dkk_high, dkk_low, tl.where(second, 0.0, b_k), EXACT)
        return dq, drow, dcolumn * column
    else:
        diagonal = tl.sum(tl.where(o_i == o_j, dqk_high.to(tl.float32) + dqk_low.to(tl.float32), 0.0), 1)[:, None]
        dq = diagonal * k_TK
        drow = tl.zeros_like(k_TK)
        dcolumn = diagonal * q_TK
        for level in tl.static_range(LEVELS):
            row, column, here = _level(c_TK + tl.where(second, total_0[None, :], 0.0), level, EXACT)
            qk_high, qk_low = tl.where(here, dqk_high, 0.0), tl.where(here, dqk_low, 0.0)
            kk_high, kk_low = tl.where(here, dkk_high, 0.0), tl.where(here, dkk_low, 0.0)
            dq += row * split_dot(qk_high, qk_low, k_TK * column, EXACT)
            drow += row * split_dot(kk_high, kk_low, k_TK * column, EXACT)
            dlevel = split_dot(tl.trans(qk_high), tl.trans(qk_low), q_TK * row, EXACT)
            dlevel += split_dot(tl.trans(kk_high), tl.trans(kk_low), k_TK * row * beta_T[:, None], EXACT)
            dcolumn += column * dlevel
        return dq, drow, dcolumn


@triton.jit
def unit_lower_inverse(a_TT, EXACT: tl.constexpr):
    """(1 + a)^-1 of a strictly lower triangular chunk: inverses of ever larger diagonal blocks, each from two halves.

    This is block forward substitution. Powers of the triangle, which also give the inverse, lose all accuracy when
    keys repeat and decays are slow.
    """
    o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    inverse = tl.where(o_i == o_j, 1.0, 0.0) - tl.where(o_i // 2 == o_j // 2, a_TT, 0.0)
    for level in tl.static_range(1, LEVELS):
        between = tl.where((o_i >> (level + 1) == o_j >> (level + 1)) & (o_i >> level != o_j >> level), a_TT, 0.0)
        inverse -= small_dot(small_dot(inverse, between, EXACT), inverse, EXACT)
    return inverse
