"""MXFP4 in registers: words of eight 4-bit values and their scales -> weights, exactly.

A value is s e e m: put into a wider float as sign, two lowest exponent bits and highest mantissa bit, it is 2^126 times
too small, subnormals included; a multiplication by 2^126 makes it right, another one applies the scale. Both are exact.

Sizes: N rows and K columns of a matrix.
"""

import torch
import triton
import triton.language as tl

from .integers import cdiv

# Columns that share a scale, inside which the products over packed weights reorder the contraction.
GROUP = tl.constexpr(32)

# A word is eight nibbles, n0 lowest. Results: n0 n4, n1 n5, n2 n6, n3 n7 as pairs of bf16 without their scales.
_PAIRS_OF_BF16 = tl.constexpr("""{
.reg .b32 a, b, m;
mov.b32 m, 0x7E807E80;
shl.b32 a, $4, 12;
shl.b32 b, $4, 6;
and.b32 a, a, 0x80008000;
and.b32 b, b, 0x01C001C0;
or.b32 a, a, b;
mul.rn.bf16x2 $0, a, m;
shl.b32 a, $4, 8;
shl.b32 b, $4, 2;
and.b32 a, a, 0x80008000;
and.b32 b, b, 0x01C001C0;
or.b32 a, a, b;
mul.rn.bf16x2 $1, a, m;
shl.b32 a, $4, 4;
shr.u32 b, $4, 2;
and.b32 a, a, 0x80008000;
and.b32 b, b, 0x01C001C0;
or.b32 a, a, b;
mul.rn.bf16x2 $2, a, m;
shr.u32 b, $4, 6;
and.b32 a, $4, 0x80008000;
and.b32 b, b, 0x01C001C0;
or.b32 a, a, b;
mul.rn.bf16x2 $3, a, m;
}""")

# Zero times infinity makes 255 NaN; the maximum makes 0 a subnormal.
_PAIR_OF_FACTORS = tl.constexpr("""{
.reg .b32 f, z, m;
mov.b32 z, 0;
mov.b32 m, 0x00400040;
shl.b32 f, $1, 7;
fma.rn.bf16x2 f, f, z, f;
max.NaN.bf16x2 $0, f, m;
}""")


@triton.jit
def factors(b_low, b_high, PTX: tl.constexpr):
    """Scale bytes of low and high nibbles -> two bf16 in a word, 2^(s - 127): a subnormal for 0, NaN for 255."""
    b_w = b_low.to(tl.uint32) | (b_high.to(tl.uint32) << 16)
    if PTX:
        return tl.inline_asm_elementwise(_PAIR_OF_FACTORS, "=r,r", [b_w], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        b_low, b_high = b_w & 255, b_w >> 16
        b_w = (b_low << 7) | tl.where(((b_low + 1) & 255) < 2, 0x40, 0).to(tl.uint32)
        return b_w | (((b_high << 7) | tl.where(((b_high + 1) & 255) < 2, 0x40, 0).to(tl.uint32)) << 16)


@triton.jit
def _value(b_w, i: tl.constexpr, factor):
    """Nibble i of every word times its factor, fp32."""
    n = (b_w >> (4 * i)) & 15
    bits = ((n & 8) << 28) | ((n & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * factor


@triton.jit
def _two(b_w, i: tl.constexpr, low, high):
    return tl.join(_value(b_w, i, low), _value(b_w, i + 4, high))


@triton.jit
def pairs(b_w, PURE: tl.constexpr):
    """Nibbles n0 n4, n1 n5, n2 n6, n3 n7 of uint32 words, each as two bf16 in a word, without their scales.

    Not PURE: here, in the order of the program.
    """
    return tl.inline_asm_elementwise(
        _PAIRS_OF_BF16,
        "=r,=r,=r,=r,r",
        [b_w],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=PURE,
        pack=1,
    )


@triton.jit
def scaled(b_p, b_f, PURE: tl.constexpr):
    """Pairs times `factors`. Not PURE: here, in the order of the program."""
    return tl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [b_p, b_f], dtype=tl.uint32, is_pure=PURE, pack=1
    )


@triton.jit
def two_values(v):
    """Both halves of 32-bit words as bf16, the lower one first, in a new last axis."""
    low = (v & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (v >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def decode_words(b_w, b_f, dtype: tl.constexpr, PTX: tl.constexpr):
    """uint32 words [...] and the `factors` of their low and high four nibbles -> [..., 2, 2, 2] in `dtype`.

    Index [c, i0, i1] is nibble i0 + 2 i1 + 4 c. PTX: bf16 by packed arithmetic.
    """
    if PTX:
        b_0, b_1, b_2, b_3 = pairs(b_w, True)
        b_0, b_1 = two_values(scaled(b_0, b_f, True)), two_values(scaled(b_1, b_f, True))
        b_2, b_3 = two_values(scaled(b_2, b_f, True)), two_values(scaled(b_3, b_f, True))
        return tl.join(tl.join(b_0, b_1), tl.join(b_2, b_3))
    else:
        low = (b_f << 16).to(tl.float32, bitcast=True)
        high = (b_f & 0xFFFF0000).to(tl.float32, bitcast=True)
        lower = tl.join(_two(b_w, 0, low, high), _two(b_w, 1, low, high))
        upper = tl.join(_two(b_w, 2, low, high), _two(b_w, 3, low, high))
        return tl.join(lower, upper).to(dtype)


@triton.jit
def contraction_order(b_x, BM: tl.constexpr, BK: tl.constexpr):
    """[BM, BK]: columns in the order in which a product takes the nibbles of packed weights.

    A lane of the tensor cores then finds its weights of 32 columns in one word: column 8 j + 4 c + i comes to place
    8 i + 2 j + c.
    """
    b_x = tl.reshape(b_x, [BM, BK // 32, 4, 2, 4])
    return tl.reshape(tl.permute(b_x, (0, 1, 4, 2, 3)), [BM, BK])


@triton.jit
def order_kernel(x, y, R, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Rows [R, K] in the order of `contraction_order`."""
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)[None, :]
    m_x = (o_m < R) & (o_k < K)
    b_x = tl.load(x + o_m * K + o_k, mask=m_x, other=0.0)
    tl.store(y + o_m * K + o_k, contraction_order(b_x, BM, BK), mask=m_x)


@triton.jit
def decode_kernel(packed, scale, y, words, BW: tl.constexpr, PTX: tl.constexpr):
    """uint32 words and one scale byte per four of them -> weights in the dtype of y."""
    o_w = tl.program_id(0).to(tl.int64) * BW + tl.arange(0, BW)
    m_w = o_w < words
    b_w = tl.load(packed + o_w, mask=m_w, other=0)
    b_s = tl.load(scale + o_w // 4, mask=m_w, other=127)
    b_y = decode_words(b_w.to(tl.uint32, bitcast=True), factors(b_s, b_s, PTX), y.dtype.element_ty, PTX)
    b_y = tl.reshape(tl.permute(b_y, (0, 1, 3, 2)), [BW, 8])
    tl.store(y + o_w[:, None] * 8 + tl.arange(0, 8)[None, :], b_y, mask=m_w[:, None])


def packed_arithmetic(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are decoded by PTX, which the interpreter does not read."""
    return dtype == torch.bfloat16 and not triton.knobs.runtime.interpret


def in_contraction_order(x_RK: torch.Tensor) -> torch.Tensor:
    """What `forward_product` takes as rows where weights are packed, K a multiple of 32."""
    (R, K), BM, BK = x_RK.shape, 16, 128
    y_RK = torch.empty_like(x_RK)
    order_kernel[(cdiv(R, BM), cdiv(K, BK))](x_RK, y_RK, R, K, BM, BK)
    return y_RK


def decode(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """uint8 [E, N, K / 2] and [E, N, K / 32], contiguous -> `out` [E, N, K], in its dtype."""
    words, BW = packed.numel() // 4, 512
    decode_kernel[(cdiv(words, BW),)](
        packed.view(torch.int32), scale, out, words, BW, packed_arithmetic(out.dtype), num_warps=4
    )
