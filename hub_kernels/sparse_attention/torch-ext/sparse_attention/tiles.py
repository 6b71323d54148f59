"""Tiles of heads and of selected keys, and the dot products between them.

The heads of a query are one or two tiles whose sizes are powers of two, 96 = 64 + 32, so that no arithmetic is spent
on heads which do not exist; both meet the same gathered keys. Keys are the left operand: their number, not that of the
heads, has to fill the tensor cores' rows.

Legend: N heads, L columns of a key, V of them values; BK selected keys, BC columns of a step, BN0 and BN1 heads of the
        two tiles; BN1 is 0 where one tile holds all heads.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


def head_tiles(N: int) -> tuple[int, int]:
    """Sizes of the two tiles: the largest power of two that fits and what holds the rest, or one tile."""
    whole = max(16, triton.next_power_of_2(N))
    first = max(16, whole // 2)
    second = max(16, triton.next_power_of_2(max(N - first, 1)))
    return (first, second) if first < N and first + second < whole else (whole, 0)


@triton.jit
def first_selected(index, i_t, KS: tl.constexpr):
    """Position of the first key that query i_t selected, 0 where it selected none: some key that exists."""
    return tl.maximum(tl.load(index + i_t.to(tl.int64) * KS), 0)


@triton.jit
def selected(index, i_t, i_k, first, KS: tl.constexpr, BK: tl.constexpr):
    """Positions [BK] of the selected keys i_k .. i_k + BK of query i_t, and which of them exist.

    In place of those that do not, the query's first one: whatever is multiplied by zero is something it may see.
    """
    o_k = i_k + tl.arange(0, BK)
    b_s = tl.load(index + i_t.to(tl.int64) * KS + o_k, mask=o_k < KS, other=-1)
    return tl.where(b_s >= 0, b_s, first), b_s >= 0


@triton.jit
def gathered(kv, b_s, i_c, L: tl.constexpr, BC: tl.constexpr):
    """[BK, BC] of kv [S, L]: columns from i_c on of the keys at b_s, zero behind the last."""
    o_c = i_c + tl.arange(0, BC)
    p_k = kv + b_s[:, None] * L + o_c[None, :]
    if L % BC == 0:
        return tl.load(p_k)
    else:
        return tl.load(p_k, mask=(o_c < L)[None, :], other=0.0)


@triton.jit
def heads(x, i_t, i_n: tl.constexpr, i_c, N: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):
    """[BN, BC] of x [T, N, D]: heads from i_n and columns from i_c on, zero where there are none."""
    o_n, o_c = i_n + tl.arange(0, BN), i_c + tl.arange(0, BC)
    p_x = x + (i_t.to(tl.int64) * N + o_n[:, None]) * D + o_c[None, :]
    if i_n + BN <= N and D % BC == 0:
        return tl.load(p_x)
    else:
        return tl.load(p_x, mask=(o_n < N)[:, None] & (o_c < D)[None, :], other=0.0)


@triton.jit
def heads_of_keys(x, i_t, i_k, i_n: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, BP: tl.constexpr,
                  BN: tl.constexpr):  # fmt: skip
    """[BP, BN] of x [T, KP, N]: selected keys from i_k and heads from i_n on, zero where there are no heads."""
    o_k, o_n = i_k + tl.arange(0, BP), i_n + tl.arange(0, BN)
    p_x = x + (i_t.to(tl.int64) * KP + o_k[:, None]) * N + o_n[None, :]
    if i_n + BN <= N:
        return tl.load(p_x)
    else:
        return tl.load(p_x, mask=(o_n < N)[None, :], other=0.0)


@triton.jit
def per_head(x, i_row, i_n: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, other):
    """fp32 [BN] of x [rows, N]: heads from i_n on."""
    o_n = i_n + tl.arange(0, BN)
    return tl.load(x + i_row.to(tl.int64) * N + o_n, mask=o_n < N, other=other)


@triton.jit
def add_scores(s0, s1, q, b_k, i_t, i_c, N: tl.constexpr, D: tl.constexpr, BC: tl.constexpr, BN0: tl.constexpr,
               BN1: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """s0 [BK, BN0] and s1 [BK, BN1] plus the products of keys b_k [BK, BC] with columns from i_c on of q [T, N, D]."""
    b_q = heads(q, i_t, 0, i_c, N, D, BN0, BC)
    s0 = tl.dot(b_k, tl.trans(b_q), s0, input_precision=PRECISION)
    if BN1 > 0:
        b_q = heads(q, i_t, BN0, i_c, N, D, BN1, BC)
        s1 = tl.dot(b_k, tl.trans(b_q), s1, input_precision=PRECISION)
    return s0, s1


@triton.jit
def scores(q, kv, i_t, b_s, N: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
           BN0: tl.constexpr, BN1: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """fp32 [BK, BN0] and [BK, BN1]: dot products of the keys at b_s with the heads of query i_t."""
    s0 = tl.zeros([BK, BN0], tl.float32)
    s1 = tl.zeros([BK, BN1 if BN1 > 0 else 1], tl.float32)
    for i_c in range(0, L, BC):
        b_k = gathered(kv, b_s, i_c, L, BC)
        s0, s1 = add_scores(s0, s1, q, b_k, i_t, i_c, N, L, BC, BN0, BN1, PRECISION)
    return s0, s1
