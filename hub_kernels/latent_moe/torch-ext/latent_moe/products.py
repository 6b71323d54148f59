"""The grouped matrix products: rows sorted by expert times the matrix of their expert, in float or packed.

Weights are the left operand and rows the right one: [BN, BK] x [BK, BM]. The tensor cores take a left operand from
registers, so that packed weights are decoded there and never written back to shared memory; rows go there as they are.

`forward_product` contracts over the columns of the weights, y = W x; `backward_product` over their rows, y = W^T x.
Packed weights fix the order in which their decoded values lie in registers. Over columns, that is an order of the
contraction, which the rows share (mxfp4.contraction_order); over rows, it is an order of the outputs (output_order).

Sizes: R rows of all experts, E experts, N rows and K columns of a matrix. Tiles: BM rows of one expert, BN outputs, BK
of the contraction.
"""

import triton
import triton.language as tl

from .mxfp4 import decode_words, factors

# Tiles of rows that meet one tile of weights before the next one: what both read stays in cache.
ROW_TILES_TOGETHER = tl.constexpr(8)


@triton.jit
def find_tile(offsets, R, E: tl.constexpr, NB: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr):
    """(expert, its first row in this tile, its last row + 1, tile of outputs) of a program; expert E: no such tile.

    A grid of `row_tiles(R, E, BM) * NB` programs covers every distribution of rows.
    """
    i_p = tl.program_id(0)
    tiles = tl.cdiv(R, BM) + E
    together = ROW_TILES_TOGETHER * NB
    first = i_p // together * ROW_TILES_TOGETHER
    size = tl.minimum(tiles - first, ROW_TILES_TOGETHER)
    i_t = first + i_p % together % size
    i_n = i_p % together // size
    o_e = tl.arange(0, BE)
    b_start = tl.load(offsets + o_e, mask=o_e < E, other=0)
    b_tiles = tl.cdiv(tl.load(offsets + o_e + 1, mask=o_e < E, other=0) - b_start, BM)
    i_e = tl.sum((tl.cumsum(b_tiles, 0) <= i_t).to(tl.int32))
    i_e = tl.minimum(i_e, E)
    i_m = tl.sum(tl.where(o_e < i_e, 0, tl.where(o_e == i_e, b_start, 0)))
    i_m += (i_t - tl.sum(tl.where(o_e < i_e, b_tiles, 0))) * BM
    end = tl.sum(tl.where(o_e == i_e, tl.load(offsets + o_e + 1, mask=o_e < E, other=0), 0))
    return i_e, i_m, end, i_n


@triton.jit
def row_offsets(rows, slots, i_m, end, S: tl.constexpr, K: tl.constexpr, BM: tl.constexpr):
    """Where the rows of a tile start: row r, or with slots (S of them per token) the token of its slot.

    Rows behind the end are the last one once more; they are computed and not stored.
    """
    o_m = tl.minimum(i_m + tl.arange(0, BM), end - 1)
    if slots is not None:
        o_m = tl.load(slots + o_m) // S
    return rows + o_m.to(tl.int64)[:, None] * K


@triton.jit
def after_products(b_w, PTX: tl.constexpr):
    """b_w, once all products under way are done.

    A product reads its left operand from registers while the program goes on. Three of them may still be under way when
    the next words are decoded, and the compiler gives those the same registers: seen as NaN on an H200.
    """
    if PTX:
        b_w = tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;", "=r,r", [b_w], dtype=tl.uint32, is_pure=False, pack=1
        )
    return b_w


@triton.jit
def add_product(acc, b_l, b_r, PRECISION: tl.constexpr):
    """acc + b_l b_r. Exact products of fp32 are summed up before acc is added: as one chain over the whole contraction
    they would err with the root of its length."""
    if PRECISION == "ieee":
        # The compiler would make one chain of it, but not where a product is said to be imprecise.
        return acc + tl.dot(b_l, b_r, input_precision=PRECISION, max_num_imprecise_acc=16)
    else:
        return tl.dot(b_l, b_r, acc, input_precision=PRECISION)


@triton.jit
def forward_product(
    p_x, weight, scale, i_e, o_n, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BM]: rows o_n of the expert's matrix times rows p_x."""
    dtype: tl.constexpr = p_x.dtype.element_ty
    acc = tl.zeros([BN, BM], tl.float32)
    o_k = tl.arange(0, BK)
    p_x += o_k[None, :]
    if PACKED:
        # Groups of four words: a scale belongs to each. The compiler gives loads the layout in which the tensor cores
        # take what is decoded from them, as long as nothing but loads, constants and arithmetic takes part.
        o_g, o_w = tl.arange(0, BK // 32)[None, :, None], tl.arange(0, 4)[None, None, :]
        row = o_n[:, None, None].to(tl.int64) + i_e.to(tl.int64) * N
        p_w = weight + row * (K // 8) + o_g * 4 + o_w
        # Once per word, so that it can be copied asynchronously if BK is 128.
        p_s = scale + row * (K // 32) + o_g + 0 * o_w
        for i_k in range(tl.cdiv(K, BK)):
            if K % BK == 0:
                b_x = tl.load(p_x + i_k * BK)
                b_w = tl.load(p_w + i_k * (BK // 8))
                b_s = tl.load(p_s + i_k * (BK // 32))
            else:
                m_g = i_k * (BK // 32) + o_g < K // 32
                b_x = tl.load(p_x + i_k * BK, mask=(i_k * BK + o_k < K)[None, :], other=0.0)
                b_w = tl.load(p_w + i_k * (BK // 8), mask=m_g, other=0)
                b_s = tl.load(p_s + i_k * (BK // 32), mask=m_g, other=0)
            b_w = after_products(b_w.to(tl.uint32, bitcast=True), PTX)
            b_v = decode_words(b_w, factors(b_s, b_s, PTX), dtype, PTX)
            # A word is [j] of its group, its nibbles are [c, i0, i1].
            b_v = tl.reshape(tl.permute(b_v, (0, 1, 5, 4, 2, 3)), [BN, BK])
            acc = add_product(acc, b_v, tl.trans(b_x), PRECISION)
    else:
        p_w = weight + (o_n[:, None].to(tl.int64) + i_e.to(tl.int64) * N) * K + o_k[None, :]
        for i_k in range(tl.cdiv(K, BK)):
            if K % BK == 0:
                b_x = tl.load(p_x + i_k * BK)
                b_w = tl.load(p_w + i_k * BK)
            else:
                m_k = (i_k * BK + o_k < K)[None, :]
                b_x = tl.load(p_x + i_k * BK, mask=m_k, other=0.0)
                b_w = tl.load(p_w + i_k * BK, mask=m_k, other=0.0)
            acc = add_product(acc, b_w.to(dtype), tl.trans(b_x), PRECISION)
    return acc


@triton.jit
def backward_product(
    p_x, weight, scale, i_e, i_o, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BM]: columns i_o .. i_o + BN of the expert's matrix, if PACKED in `output_order`, times rows p_x."""
    dtype: tl.constexpr = p_x.dtype.element_ty
    acc = tl.zeros([BN, BM], tl.float32)
    o_k = tl.arange(0, BK)
    p_x += o_k[None, :]
    if PACKED:
        # Half a word of each of two neighbouring rows make a word whose pairs lie along the contraction; eight halves
        # have the same scales. On layouts and scales see above.
        o_r = tl.arange(0, BK // 2)[:, None, None]
        o_g, o_h = tl.arange(0, BN // 32)[None, :, None], tl.arange(0, 8)[None, None, :]
        row = i_e.to(tl.int64) * N + 2 * o_r
        p_w = weight + row * (K // 4) + (i_o // 4 + o_g * 8 + o_h)
        p_s = scale + row * (K // 32) + (i_o // 32 + o_g) + 0 * o_h
        for i_k in range(tl.cdiv(N, BK)):
            p_wk, p_sk = p_w + i_k * (BK * (K // 4)), p_s + i_k * (BK * (K // 32))
            if N % BK == 0 and K % BN == 0:
                b_x = tl.load(p_x + i_k * BK)
                b_0, b_1 = tl.load(p_wk), tl.load(p_wk + K // 4)
                b_s0, b_s1 = tl.load(p_sk), tl.load(p_sk + K // 32)
            else:
                # 0 * o_h: masks of the same shape as the pointers
                m_0 = (i_o // 32 + o_g + 0 * o_h < K // 32) & (i_k * BK + 2 * o_r < N)
                m_1 = m_0 & (i_k * BK + 2 * o_r + 1 < N)
                b_x = tl.load(p_x + i_k * BK, mask=(i_k * BK + o_k < N)[None, :], other=0.0)
                b_0, b_1 = tl.load(p_wk, mask=m_0, other=0), tl.load(p_wk + K // 4, mask=m_1, other=0)
                b_s0, b_s1 = tl.load(p_sk, mask=m_0, other=0), tl.load(p_sk + K // 32, mask=m_1, other=0)
            b_0, b_1 = b_0.to(tl.uint16, bitcast=True).to(tl.uint32), b_1.to(tl.uint16, bitcast=True).to(tl.uint32)
            b_w = after_products(b_0 | (b_1 << 16), PTX)
            b_v = decode_words(b_w, factors(b_s0, b_s1, PTX), dtype, PTX)
            # [r, w, q, c, i0, i1] -> [i1, w, i0, q, r, c]
            b_v = tl.reshape(tl.permute(b_v, (5, 1, 4, 2, 0, 3)), [BN, BK])
            acc = add_product(acc, b_v, tl.trans(b_x), PRECISION)
    else:
        o_n = i_o + tl.arange(0, BN)
        p_w = weight + (i_e.to(tl.int64) * N + o_k[:, None]) * K + o_n[None, :]
        for i_k in range(tl.cdiv(N, BK)):
            m_n = (o_n < K)[None, :]
            if N % BK == 0:
                b_x = tl.load(p_x + i_k * BK)
            else:
                b_x = tl.load(p_x + i_k * BK, mask=(i_k * BK + o_k < N)[None, :], other=0.0)
                m_n = m_n & (i_k * BK + o_k < N)[:, None]
            b_w = tl.load(p_w + i_k * (BK * K), mask=m_n, other=0.0).to(dtype)
            acc = add_product(acc, tl.trans(b_w), tl.trans(b_x), PRECISION)
    return acc


@triton.jit
def output_order(i_o, BN: tl.constexpr, PACKED: tl.constexpr):
    """Columns of the weights that the results of `backward_product` belong to."""
    o_n = tl.arange(0, BN)
    if PACKED:
        # place [i1, w, i0, q] holds column [w, q, i1, i0]
        i_1, w, i_0, q = o_n // (BN // 2), o_n // 16 % (BN // 32), o_n // 8 % 2, o_n % 8
        o_n = w * 32 + q * 4 + i_1 * 2 + i_0
    return i_o + o_n


@triton.jit
def rows_in_order(acc, BM: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr):
    """[BN, BM] of `backward_product` -> [BM, BN], outputs in their natural order."""
    if PACKED:
        acc = tl.permute(tl.reshape(acc, [2, BN // 32, 2, 8, BM]), (4, 1, 3, 0, 2))
        return tl.reshape(acc, [BM, BN])
    else:
        return tl.trans(acc)


@triton.jit
def add_low_rank(
    acc, low, factor, stride, i_e, i_m, end, o_n, scaling, N: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr,
    BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [BN, BM] + scaling * factor^T low^T: low-rank rows, see low_rank.py, and factor [RANK, N] of every expert,
    `stride` apart."""
    o_m, o_r = i_m + tl.arange(0, BM), tl.arange(0, BR)
    m_r = (o_r < RANK)[None, :]
    P: tl.constexpr = tl.cdiv(RANK, 4) * 4
    b_l = tl.load(low + o_m.to(tl.int64)[:, None] * P + o_r[None, :], mask=m_r & (o_m < end)[:, None], other=0.0)
    p_f = factor + i_e.to(tl.int64) * stride + o_r[None, :] * N + o_n[:, None]
    b_f = tl.load(p_f, mask=m_r & (o_n < N)[:, None], other=0.0).to(tl.float32)
    return add_product(acc, b_f * scaling, tl.trans(b_l), PRECISION)
