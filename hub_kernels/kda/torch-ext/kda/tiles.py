"""Tiles: where the tokens of a chunk or half a chunk and one head lie.

`load_` and `store_` are for inputs and outputs, [M, H, D]. `read_` and `write_` are for what the kernels hand each
other, [H, M, D]: there the tokens of a head follow each other, a tile is one piece of memory, and the places in it are
constants.

Legend: M tokens of all documents, H heads, D channels of a token and head; BD of them, and BR tokens, in a tile.
"""

import triton
import triton.language as tl

# Tokens per chunk, per half and per quarter, powers of two.
BT = tl.constexpr(64)
BC = tl.constexpr(32)
BQ = tl.constexpr(16)


@triton.jit
def chunk_of(p_chunks, i_n):
    """First token and number of tokens (0: no such chunk) of chunk i_n."""
    return tl.load(p_chunks + 2 * i_n).to(tl.int64), tl.load(p_chunks + 2 * i_n + 1)


@triton.jit
def _places(stride, BR: tl.constexpr, BD: tl.constexpr):
    return tl.arange(0, BR)[:, None] * stride + tl.arange(0, BD)[None, :]


@triton.jit
def load_rows(p, i_t, i_h, length, H, D: tl.constexpr, i_d, BR: tl.constexpr, BD: tl.constexpr):
    """[BR, BD] in fp32 from token i_t and channel i_d on, zero behind the end of the document."""
    m_r = (tl.arange(0, BR) < length)[:, None]
    return tl.load(p + ((i_t * H + i_h) * D + i_d) + _places(H * D, BR, BD), mask=m_r, other=0.0).to(tl.float32)


@triton.jit
def store_rows(p, x_RD, i_t, i_h, length, H, D: tl.constexpr, i_d, BR: tl.constexpr, BD: tl.constexpr):
    m_r = (tl.arange(0, BR) < length)[:, None]
    tl.store(p + ((i_t * H + i_h) * D + i_d) + _places(H * D, BR, BD), x_RD.to(p.dtype.element_ty), mask=m_r)


@triton.jit
def load_scalars(p, i_t, i_h, length, H, BR: tl.constexpr):
    """[BR] of a [M, H] tensor in fp32, zero behind the end of the document."""
    o_r = tl.arange(0, BR)
    return tl.load(p + (i_t * H + i_h) + o_r * H, mask=o_r < length, other=0.0).to(tl.float32)


@triton.jit
def store_scalars(p, x_R, i_t, i_h, length, H, BR: tl.constexpr):
    o_r = tl.arange(0, BR)
    tl.store(p + (i_t * H + i_h) + o_r * H, x_R.to(p.dtype.element_ty), mask=o_r < length)


@triton.jit
def _row(i_t, i_h, M):
    return tl.cast(i_h, tl.int64) * M + i_t


@triton.jit
def first_row(p, i_t, i_h, M, K: tl.constexpr, i_k, BK: tl.constexpr):
    """Where [1, BK] of token i_t is; the tokens behind it follow K apart."""
    return p + (_row(i_t, i_h, M) * K + i_k) + tl.arange(0, BK)[None, :]


@triton.jit
def read_tile(p, i_t, i_h, length, M, D: tl.constexpr, i_d, BR: tl.constexpr, BD: tl.constexpr):
    """[BR, BD] as it is, zero behind the end of the document."""
    m_r = (tl.arange(0, BR) < length)[:, None]
    return tl.load(p + (_row(i_t, i_h, M) * D + i_d) + _places(D, BR, BD), mask=m_r, other=0.0)


@triton.jit
def read_rows(p, i_t, i_h, length, M, D: tl.constexpr, i_d, BR: tl.constexpr, BD: tl.constexpr):
    """The same in fp32."""
    return read_tile(p, i_t, i_h, length, M, D, i_d, BR, BD).to(tl.float32)


@triton.jit
def write_rows(p, x_RD, i_t, i_h, length, M, D: tl.constexpr, i_d, BR: tl.constexpr, BD: tl.constexpr):
    m_r = (tl.arange(0, BR) < length)[:, None]
    tl.store(p + (_row(i_t, i_h, M) * D + i_d) + _places(D, BR, BD), x_RD.to(p.dtype.element_ty), mask=m_r)


@triton.jit
def read_scalars(p, i_t, i_h, length, M, BR: tl.constexpr):
    """[BR] of a [H, M] tensor in fp32, zero behind the end of the document."""
    o_r = tl.arange(0, BR)
    return tl.load(p + _row(i_t, i_h, M) + o_r, mask=o_r < length, other=0.0)


@triton.jit
def write_scalars(p, x_R, i_t, i_h, length, M, BR: tl.constexpr):
    o_r = tl.arange(0, BR)
    tl.store(p + _row(i_t, i_h, M) + o_r, x_R, mask=o_r < length)


@triton.jit
def read_block(p, i_t, i_h, length, M, i_r: tl.constexpr, i_c: tl.constexpr):
    """Block (i_r, i_c), [BC, BC], of a chunk's [BT, BT]."""
    return read_tile(p, i_t + BC * i_r, i_h, length - BC * i_r, M, BT, BC * i_c, BC, BC)


@triton.jit
def write_block(p, x_CC, i_t, i_h, length, M, i_r: tl.constexpr, i_c: tl.constexpr):
    write_rows(p, x_CC, i_t + BC * i_r, i_h, length - BC * i_r, M, BT, BC * i_c, BC, BC)
