"""Forward in two steps: probabilities of tiles of selected keys, then their products with the values.

Both are matrix products without a chain between tiles, so that few queries fill a GPU as well. What the first step
hands to the second is relative to the maximum of its tile, rounded up to a power of two: the second brings tiles
together by factors that round nothing.

Legend: T queries of this launch, N heads, S keys, L columns of a key, V of them values, KS selected keys per query,
        KT tiles of them; BK selected keys of a tile, BP of a step, BC columns of a step, BV values of a program,
        BN0 and BN1 heads.
"""

import triton
import triton.language as tl

from .tiles import LOG2E, first_selected, gathered, heads_of_keys, per_head, scores, selected


@triton.jit
def _store_tile(s, m_k, p, maxima, sums, i_t, i_k, i_n: tl.constexpr, N: tl.constexpr, KT: tl.constexpr,
                BK: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Exponentials of scores s [BK, BN] (base 2), with their reference and sum per head."""
    o_n = i_n + tl.arange(0, BN)
    s = tl.where(m_k[:, None], s, float("-inf"))
    b_m = tl.ceil(tl.max(s, 0))
    b_p = tl.exp2(s - b_m[None, :])
    o_stats = (i_t.to(tl.int64) * KT + i_k) * N + o_n
    tl.store(maxima + o_stats, b_m, mask=o_n < N)
    tl.store(sums + o_stats, tl.sum(b_p, 0), mask=o_n < N)
    o_p = (i_t.to(tl.int64) * KT + i_k) * BK + tl.arange(0, BK)
    tl.store(p + o_p[:, None] * N + o_n[None, :], b_p.to(p.dtype.element_ty), mask=(o_n < N)[None, :])


@triton.jit
def probabilities_kernel(
    q, kv, index, p, maxima, sums, scale,
    N: tl.constexpr, L: tl.constexpr, KS: tl.constexpr, KT: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per query and tile of keys: p [T, KT * BK, N] = 2 ** (score - maximum), maxima and sums [T, KT, N]."""
    i_t, i_k = tl.program_id(0) // KT, tl.program_id(0) % KT
    b_s, m_k = selected(index, i_t, i_k * BK, first_selected(index, i_t, KS), KS, BK)
    if tl.max(m_k.to(tl.int32), 0) > 0:
        s0, s1 = scores(q, kv, i_t, b_s, N, L, BK, BC, BN0, BN1, PRECISION)
        _store_tile(s0 * (scale * LOG2E), m_k, p, maxima, sums, i_t, i_k, 0, N, KT, BK, BN0)
        if BN1 > 0:
            _store_tile(s1 * (scale * LOG2E), m_k, p, maxima, sums, i_t, i_k, BN0, N, KT, BK, BN1)


@triton.jit
def _totals(maxima, sums, sink, i_t, tiles, i_n: tl.constexpr, N: tl.constexpr, KT: tl.constexpr, BN: tl.constexpr,
            HAS_SINK: tl.constexpr):  # fmt: skip
    """Common reference [BN] of all tiles and the sink (base 2), and the sum of all exponentials relative to it."""
    o_n = i_n + tl.arange(0, BN)
    b_m = tl.full([BN], float("-inf"), tl.float32)
    if HAS_SINK:
        b_sink = tl.load(sink + o_n, mask=o_n < N, other=0.0) * LOG2E
        b_m = tl.ceil(b_sink)
    for i_k in range(tiles):
        b_m = tl.maximum(b_m, per_head(maxima, i_t * KT + i_k, i_n, N, BN, 0.0))
    b_l = tl.zeros([BN], tl.float32)
    for i_k in range(tiles):
        b_x = per_head(maxima, i_t * KT + i_k, i_n, N, BN, 0.0)
        b_l += per_head(sums, i_t * KT + i_k, i_n, N, BN, 0.0) * tl.exp2(b_x - b_m)
    if HAS_SINK:
        b_l += tl.where(b_sink > float("-inf"), tl.exp2(b_sink - b_m), 0.0)
    return b_m, b_l


@triton.jit
def values_kernel(
    p, maxima, sums, kv, index, count, sink, out, lse,
    N: tl.constexpr, L: tl.constexpr, V: tl.constexpr, KS: tl.constexpr, KT: tl.constexpr, BK: tl.constexpr,
    BP: tl.constexpr, BV: tl.constexpr, FIRST: tl.constexpr, BN: tl.constexpr, HAS_SINK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Per query and block of values, for BN heads from FIRST on: out [T, N, V], and lse [T, N]."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_t, i_v = tl.program_id(0) // NV, tl.program_id(0) % NV
    keys, first = tl.load(count + i_t), first_selected(index, i_t, KS)
    b_m, b_l = _totals(maxima, sums, sink, i_t, tl.cdiv(keys, BK), FIRST, N, KT, BN, HAS_SINK)
    acc = tl.zeros([BV, BN], tl.float32)
    # What the next step needs first is loaded by hand, one step ahead: as a copy it would take a stage of the pipeline.
    b_s, _ = selected(index, i_t, 0, first, KS, BP)
    b_x = per_head(maxima, i_t * KT, FIRST, N, BN, 0.0)
    for i_p in range(0, keys, BP):
        b_v = tl.trans(gathered(kv, b_s, i_v * BV, L, BV))
        b_p = heads_of_keys(p, i_t, i_p, FIRST, KT * BK, N, BP, BN).to(tl.float32)
        b_p = (b_p * tl.exp2(b_x - b_m)[None, :]).to(p.dtype.element_ty)
        acc = tl.dot(b_v, b_p, acc, input_precision=PRECISION)
        b_s, _ = selected(index, i_t, i_p + BP, first, KS, BP)
        b_x = per_head(maxima, i_t * KT + tl.minimum(i_p + BP, keys - 1) // BK, FIRST, N, BN, 0.0)
    # Without a key and a sink the sum is 0, and so is the output.
    b_o = tl.trans(acc / tl.where(b_l > 0, b_l, 1.0)[None, :])
    o_n, o_v = FIRST + tl.arange(0, BN), i_v * BV + tl.arange(0, BV)
    o_tn = i_t.to(tl.int64) * N + o_n
    m_nv = (o_n < N)[:, None] & (o_v < V)[None, :]
    tl.store(out + o_tn[:, None] * V + o_v[None, :], b_o.to(out.dtype.element_ty), mask=m_nv)
    if i_v == 0:
        b_lse = tl.where(b_l > 0, (b_m + tl.log2(b_l)) / LOG2E, float("-inf"))
        tl.store(lse + o_tn, b_lse, mask=o_n < N)
