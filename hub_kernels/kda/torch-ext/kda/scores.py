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
def rounded(x, BITS: tl.constexpr):
    """Nearest fp32 value whose last BITS bits are zero; what is not a number stays so."""
    bits = x.to(tl.int32, bitcast=True) + (1 << (BITS - 1))
    return tl.where(x == x, (bits & -(1 << BITS)).to(tl.float32, bitcast=True), x)


@triton.jit
def wide_dot(a, b, EXACT: tl.constexpr):
    """Product of operands that need the range of fp32."""
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    else:
        # To the ten bits of tf32: the matrix units would cut the others off, which is a bias.
        return tl.dot(rounded(a, 13), rounded(b, 13), input_precision="tf32")


@triton.jit
def split(x, EXACT: tl.constexpr):
    """x as the sum of two bf16 parts, which hold 16 bits of any range; exact: x and zero."""
    if EXACT:
        return x, tl.zeros_like(x)
    else:
        # Cutting the mantissa off leaves a float32 that needs no conversion back.
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _bf16_dot(a, b):
    if INTERPRETED:
        # The interpreter's products of bfloat16 are wrong.
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


@triton.jit
def sum_rows(weights_TT, x_TK, EXACT: tl.constexpr):
    """weights @ x for weights of 0 and 1, and x > -1000: in two fp16 parts that hold 22 bits."""
    if EXACT:
        return tl.dot(weights_TT, x_TK, input_precision="ieee")
    else:
        weights = weights_TT.to(tl.float16)
        high = x_TK.to(tl.float16)
        return tl.dot(weights, high) + tl.dot(weights, (x_TK - high.to(tl.float32)).to(tl.float16))


@triton.jit
def sums_in_halves(g_TK, EXACT: tl.constexpr):
    """Sums within each half up to and including every token, over all of its half, and over the other half.

    All as products, which leave every token its sums without an exchange between threads.
    """
    o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    same = o_i // BC == o_j // BC
    running = sum_rows(tl.where(same & (o_i >= o_j), 1.0, 0.0), g_TK, EXACT)
    total = sum_rows(tl.where(same, 1.0, 0.0), g_TK, EXACT)
    return running, total, sum_rows(tl.where(same, 0.0, 1.0), g_TK, EXACT)


@triton.jit
def sums_to_end(x_TK, y_TK, EXACT: tl.constexpr):
    """Sums of x over the chunk from every token on, plus the sum of y over the chunk; any range."""
    o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    x_high, x_low = split(x_TK, EXACT)
    y_high, y_low = split(y_TK, EXACT)
    later = tl.where(o_i <= o_j, 1.0, 0.0).to(x_high.dtype)
    every = tl.full([BT, BT], 1.0, tl.float32).to(x_high.dtype)
    if EXACT:
        return tl.dot(later, x_TK, input_precision="ieee") + tl.dot(every, y_TK, input_precision="ieee")
    else:
        return _bf16_dot(later, x_high) + _bf16_dot(later, x_low) + _bf16_dot(every, y_high) + _bf16_dot(every, y_low)


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
def split_dot(a, b, EXACT: tl.constexpr):
    """a @ b for a in bf16 and b in two parts."""
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    else:
        b_high, b_low = split(b, EXACT)
        return _bf16_dot(a, b_high) + _bf16_dot(a, b_low)


@triton.jit
def row_gradients(dqk, dkk, k_TK, c_TK, total_TK, other_TK, NARROW: tl.constexpr, EXACT: tl.constexpr):
    """Gradients of the scores for some channels of q and of k as row, before beta, [BT, BK] each.

    dqk and dkk [BT, BT] are zero where there is no score, and dqk on its diagonal. They may be rounded to bf16: what a
    pair of tokens gives one of them for its decay it takes from the other, and both see the same rounding. The other
    factors may not.
    """
    second = (tl.arange(0, BT) >= BC)[:, None]
    if NARROW:
        # Within a half the reference is its middle; across, the boundary: the same factors but for one per channel.
        b_x = k_TK * tl.exp2(total_TK * 0.5 - c_TK)
        # One after the other: the product of the two leaves the range of float32.
        enter, leave = tl.exp2(other_TK * 0.5), tl.exp2(total_TK * 0.5)
        dq = split_dot(dqk, tl.where(second, 0.0, b_x), EXACT)
        dq = tl.where(second, dq * enter * leave, dq) + split_dot(dqk, tl.where(second, b_x, 0.0), EXACT)
        drow = split_dot(dkk, tl.where(second, 0.0, b_x), EXACT)
        drow = tl.where(second, drow * enter * leave, drow) + split_dot(dkk, tl.where(second, b_x, 0.0), EXACT)
        row = tl.exp2(c_TK - total_TK * 0.5)
        return row * dq, row * drow
    else:
        dq = tl.zeros_like(k_TK)
        drow = tl.zeros_like(k_TK)
        for level in tl.static_range(LEVELS):
            row, column, here = _level(c_TK + tl.where(second, other_TK, 0.0), level, EXACT)
            dq += row * split_dot(tl.where(here, dqk, 0.0), k_TK * column, EXACT)
            drow += row * split_dot(tl.where(here, dkk, 0.0), k_TK * column, EXACT)
        return dq, drow


@triton.jit
def column_gradients(dqk, dkk, q_TK, k_TK, c_TK, total_TK, other_TK, NARROW: tl.constexpr, EXACT: tl.constexpr):
    """Gradients of the scores for some channels of k as column; k_TK as row has beta in it."""
    second = (tl.arange(0, BT) >= BC)[:, None]
    if NARROW:
        row = tl.exp2(c_TK - total_TK * 0.5)
        b_q, b_k = q_TK * row, k_TK * row
        dqk, dkk = tl.trans(dqk), tl.trans(dkk)
        dcolumn = split_dot(dqk, tl.where(second, b_q, 0.0), EXACT)
        dcolumn += split_dot(dkk, tl.where(second, b_k, 0.0), EXACT)
        enter, leave = tl.exp2(other_TK * 0.5), tl.exp2(total_TK * 0.5)
        dcolumn = tl.where(second, dcolumn, dcolumn * enter * leave)
        dcolumn += split_dot(dqk, tl.where(second, 0.0, b_q), EXACT)
        dcolumn += split_dot(dkk, tl.where(second, 0.0, b_k), EXACT)
        return dcolumn * tl.exp2(total_TK * 0.5 - c_TK)
    else:
        dcolumn = tl.zeros_like(k_TK)
        for level in tl.static_range(LEVELS):
            row, column, here = _level(c_TK + tl.where(second, other_TK, 0.0), level, EXACT)
            dlevel = split_dot(tl.trans(tl.where(here, dqk, 0.0)), q_TK * row, EXACT)
            dlevel += split_dot(tl.trans(tl.where(here, dkk, 0.0)), k_TK * row, EXACT)
            dcolumn += column * dlevel
        return dcolumn


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
