"""Scores between the tokens of a chunk, and their gradients, for decays that differ per channel.

The score of tokens i >= j is sum_k a_ik b_jk exp(G_ik - G_jk), where G is the running sum of the log decay. It becomes
a matrix product once exp(G_i - G_j) is split into a factor per row and a factor per column around a reference R:
exp(G_i - R) exp(R - G_j). Rows of the chunk's second half meet columns of the first at the boundary between them:
neither factor can exceed 1. Inside a half, where decays are NARROW, at most exp(-5) per token, its middle as the one
reference keeps both factors of its 32 tokens within float32 (16 tokens give exp(80)). Elsewhere halves are halved again
and again, and the factors stay below 1 whatever the decays.

Legend: C the BC tokens of half a chunk, K key width; c is the running sum from the middle of the half, and decays are
in base 2.
"""

import os

import triton
import triton.language as tl

from .tiles import BC

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Halvings from half a chunk down to one token.
LEVELS = tl.constexpr(5)


@triton.jit
def once(x):
    """x. Without this the compiler works an operand out anew for each place in a product that a thread needs it at."""
    if INTERPRETED:
        return x
    elif x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@triton.jit
def exp2(x):
    """2^x, zero below 2^-126: without that the compiler adds three instructions to this one."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """1 / x, zero beyond 2^126: a division takes five more instructions."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def small(x, EXACT: tl.constexpr):
    """x as an operand of `small_dot`: it cannot exceed the range of fp16."""
    if EXACT:
        return x
    else:
        return once(x.to(tl.float16))


@triton.jit
def small_dot(a, b, acc, EXACT: tl.constexpr):
    """acc + a @ b, operands as `small` makes them."""
    if EXACT:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def rounded(x, BITS: tl.constexpr):
    """Nearest fp32 value whose last BITS bits are zero; what is not a number stays so."""
    bits = x.to(tl.int32, bitcast=True) + (1 << (BITS - 1))
    return tl.where(x == x, (bits & -(1 << BITS)).to(tl.float32, bitcast=True), x)


@triton.jit
def _tf32(x, EXACT: tl.constexpr):
    """x so that cutting off its last 13 bits, as the matrix units do, rounds it: no bias is left.

    What is not a number may become one here, but reaches the outputs through q_in and k_in.
    """
    if EXACT:
        return x
    else:
        return once((x.to(tl.int32, bitcast=True) + (1 << 12)).to(tl.float32, bitcast=True))


@triton.jit
def _wide_dot(a, b, acc, EXACT: tl.constexpr):
    """acc + a @ b for operands that need the range of fp32."""
    if EXACT:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="tf32")


@triton.jit
def split(x, EXACT: tl.constexpr):
    """x as the sum of two bf16 parts, which hold 16 bits of any range; exact: x and zero."""
    if EXACT:
        return x, tl.zeros_like(x)
    else:
        # Cutting the mantissa off leaves a float32 that needs no conversion back.
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        return once(high.to(tl.bfloat16)), once((x - high).to(tl.bfloat16))


@triton.jit
def _bf16_dot(a, b, acc):
    if INTERPRETED:
        # The interpreter's products of bfloat16 are wrong.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def one_part(x, EXACT: tl.constexpr):
    """x as one bf16 part; exact: x."""
    if EXACT:
        return x
    else:
        return once(x.to(tl.bfloat16))


@triton.jit
def one_dot(a, b, acc, EXACT: tl.constexpr):
    """acc + a @ b for both in bf16."""
    if EXACT:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return _bf16_dot(a, b, acc)


@triton.jit
def split_dot(a, high, low, acc, EXACT: tl.constexpr):
    """acc + a @ b for a in bf16 and b in two parts."""
    if EXACT:
        return tl.dot(a, high, acc, input_precision="ieee")
    else:
        return _bf16_dot(a, high, _bf16_dot(a, low, acc))


@triton.jit
def factors(c_CK, first_K, second_K, NARROW: tl.constexpr):
    """Of a half, given the decays of its quarters, or, where they are not NARROW, their logarithms: (row, column, into,
    out).

    The decay from its start is row * into, that to its end column * out, into and out being [K]. Where decays are
    NARROW row and column are those around the middle, elsewhere into and out are 1.
    """
    if NARROW:
        return exp2(c_CK), exp2(-c_CK), first_K, second_K
    else:
        one = tl.full(first_K.shape, 1.0, tl.float32)
        return exp2(c_CK + first_K[None, :]), exp2(second_K[None, :] - c_CK), one, one


@triton.jit
def _level(c_CK, p_sums, length, K: tl.constexpr, level: tl.constexpr):
    """Row and column factors of a half cut into blocks of BC >> level + 1 tokens, and which scores they make.

    p_sums [1, BK] is where the first row of c is read from.
    """
    S: tl.constexpr = BC >> (level + 1)
    o_i, o_j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    o_boundary = o_i // (2 * S) * 2 * S + S - 1
    boundary = tl.load(p_sums + o_boundary * K, mask=o_boundary < length, other=0.0)
    second = (o_i // S) % 2 == 1
    row = tl.where(second, exp2(tl.minimum(c_CK - boundary, 0.0)), 0.0)
    column = tl.where(second, 0.0, exp2(tl.minimum(boundary - c_CK, 0.0)))
    return row, column, o_i // (2 * S) == o_j // (2 * S)


@triton.jit
def inside_scores(
    q_CK,
    k_CK,
    c_CK,
    row_CK,
    column_CK,
    qk,
    kk,
    p_sums,
    length,
    K: tl.constexpr,
    NARROW: tl.constexpr,
    EXACT: tl.constexpr,
):
    """qk and kk with the scores q . k and k . k of some channels between the tokens of a half added.

    Places above the diagonal, and of k . k on it, are no scores, may be infinite, and have to be masked.
    """
    if NARROW:
        columns = tl.trans(_tf32(k_CK * column_CK, EXACT))
        qk = _wide_dot(_tf32(q_CK * row_CK, EXACT), columns, qk, EXACT)
        return qk, _wide_dot(_tf32(k_CK * row_CK, EXACT), columns, kk, EXACT)
    else:
        o_i, o_j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
        zeros = tl.zeros([BC, BC], tl.float32)
        qk += tl.where(o_i == o_j, tl.sum(q_CK * k_CK, 1)[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            row, column, here = _level(c_CK, p_sums, length, K, level)
            columns = tl.trans(small(k_CK * column, EXACT))
            qk += tl.where(here, small_dot(small(q_CK * row, EXACT), columns, zeros, EXACT), 0.0)
            kk += tl.where(here, small_dot(small(k_CK * row, EXACT), columns, zeros, EXACT), 0.0)
        return qk, kk


@triton.jit
def row_gradients(
    dqk,
    dkk,
    k_CK,
    c_CK,
    row_CK,
    high,
    low,
    p_sums,
    length,
    K: tl.constexpr,
    NARROW: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Gradients of the scores inside a half for some channels of q and of k as row, before beta.

    dqk and dkk [BC, BC] are zero where there is no score, and dqk on its diagonal. They may be rounded to bf16: what a
    pair of tokens gives one of them for its decay it takes from the other, and both see the same rounding. The other
    factors may not: high and low are the two parts of k times its column factor.
    """
    zeros = tl.zeros_like(k_CK)
    if NARROW:
        return row_CK * split_dot(dqk, high, low, zeros, EXACT), row_CK * split_dot(dkk, high, low, zeros, EXACT)
    else:
        dq = tl.zeros_like(k_CK)
        dk = tl.zeros_like(k_CK)
        for level in tl.static_range(LEVELS):
            row, column, here = _level(c_CK, p_sums, length, K, level)
            high, low = split(k_CK * column, EXACT)
            dq += row * split_dot(tl.where(here, dqk, 0.0), high, low, zeros, EXACT)
            dk += row * split_dot(tl.where(here, dkk, 0.0), high, low, zeros, EXACT)
        return dq, dk


@triton.jit
def column_gradients(
    dqk,
    dkk,
    q_CK,
    k_CK,
    c_CK,
    column_CK,
    q_high,
    q_low,
    k_high,
    k_low,
    p_sums,
    length,
    K: tl.constexpr,
    NARROW: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Gradients of the scores inside a half for some channels of k as column: dqk and dkk transposed, k with beta; high
    and low are the two parts of q and k times their row factor."""
    if NARROW:
        dk = split_dot(dqk, q_high, q_low, tl.zeros_like(k_CK), EXACT)
        return column_CK * split_dot(dkk, k_high, k_low, dk, EXACT)
    else:
        dk = tl.zeros_like(k_CK)
        for level in tl.static_range(LEVELS):
            row, column, here = _level(c_CK, p_sums, length, K, level)
            high, low = split(q_CK * row, EXACT)
            x = split_dot(tl.where(here, dqk, 0.0), high, low, tl.zeros_like(k_CK), EXACT)
            high, low = split(k_CK * row, EXACT)
            dk += column * split_dot(tl.where(here, dkk, 0.0), high, low, x, EXACT)
        return dk


@triton.jit
def unit_lower_inverse(a_CC, EXACT: tl.constexpr):
    """(1 + a)^-1 of a strictly lower triangle: inverses of ever larger diagonal blocks, each from two halves.

    This is block forward substitution. Powers of the triangle, which also give the inverse, lose all accuracy when
    keys repeat and decays are slow.
    """
    o_i, o_j = tl.arange(0, BC)[:, None], tl.arange(0, BC)[None, :]
    inverse = tl.where(o_i == o_j, 1.0, 0.0) - tl.where(o_i // 2 == o_j // 2, a_CC, 0.0)
    for level in tl.static_range(1, LEVELS):
        between = tl.where((o_i >> (level + 1) == o_j >> (level + 1)) & (o_i >> level != o_j >> level), a_CC, 0.0)
        x = small(inverse, EXACT)
        zeros = tl.zeros_like(inverse)
        y = small_dot(x, small(between, EXACT), zeros, EXACT)
        inverse -= small_dot(small(y, EXACT), x, zeros, EXACT)
    return inverse


# The largest magnitude of an operand. Products of two over 128 terms stay within fp16, and an operand's elements keep
# all of fp16's bits down to 2^-18 of the largest.
LARGEST = tl.constexpr(16.0)
# The largest of what meets the inverse, none of whose elements exceeds 1: products over 64 tokens are operands again.
LARGEST_SOLVED = tl.constexpr(0.25)
# Of q_in, k_in and k_out, whose rows have at most unit length: fast decays leave little of them, and fp16 loses
# digits below 2^-14.
LIFT = tl.constexpr(4096.0)


@triton.jit
def scale_of(largest, most, EXACT: tl.constexpr):
    """A scale that brings the magnitude `largest` to at most `most`: fp16 for inputs of any range.

    It is a power of two: it adds no rounding, and operands can change from one to another.
    """
    if EXACT:
        return tl.full(largest.shape, 1.0, tl.float32)
    else:
        # At most 2^127, which is the next power of two for all but the largest numbers.
        above = tl.minimum((largest.to(tl.int32, bitcast=True) & 0x7F800000) + 0x800000, 0x7F000000)
        return tl.minimum(tl.maximum(above.to(tl.float32, bitcast=True), 2.0**-90) * (1.0 / most), 2.0**127)


@triton.jit
def scaled(x_VD, most, EXACT: tl.constexpr):
    """(x / scale as a matrix operand, scale [V]): each value has its own, as its row meets no other."""
    scale = scale_of(tl.max(tl.abs(x_VD), 1), most, EXACT)
    return operand(x_VD * (1.0 / scale)[:, None], EXACT), scale


@triton.jit
def operand(x, EXACT: tl.constexpr):
    return x if EXACT else x.to(tl.float16)


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """Product of operands as `operand` makes them."""
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)
