"""Backward: what every query adds to the keys that it selected, its own gradient, and the sums over queries.

Additions of many queries to one key are not made in memory, where their order would change from run to run. A query
writes its share for each of its keys, to a place among all shares of that key in the order of the queries; then each
key's shares are summed in that order.

Legend: T queries of this launch, N heads, S keys, L columns of a key, V of them values, KS selected keys per query,
        KT tiles of them; BK selected keys of a tile, BP of a step, BC columns of a step, BN0 and BN1 heads.
"""

import triton
import triton.language as tl

from .tiles import LOG2E, add_scores, first_selected, gathered, heads, heads_of_keys, per_head, selected


@triton.jit
def delta_kernel(out, dout, delta, R, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr):
    """delta [R] = sum of out * dout [R, V] over the values, R rows of all queries and heads."""
    o_r, o_v = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BV)
    o_rv = o_r[:, None] * V + o_v[None, :]
    m_rv = (o_r < R)[:, None] & (o_v < V)[None, :]
    b_o = tl.load(out + o_rv, mask=m_rv, other=0.0).to(tl.float32)
    b_do = tl.load(dout + o_rv, mask=m_rv, other=0.0).to(tl.float32)
    tl.store(delta + o_r, tl.sum(b_o * b_do, 1), mask=o_r < R)


@triton.jit
def _score_gradients(s, dp, m_k, lse, delta, ds, scale, i_t, i_k, i_n: tl.constexpr, N: tl.constexpr,
                     KT: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Probabilities and gradients of scores [BK, BN], rounded; the latter are stored."""
    o_n = i_n + tl.arange(0, BN)
    # The difference first: near 0, it has all its digits where scores are large.
    b_x = (s * scale - per_head(lse, i_t, i_n, N, BN, 0.0)[None, :]) * LOG2E
    b_p = tl.where(m_k[:, None], tl.exp2(b_x), 0.0)
    b_ds = b_p * (dp - per_head(delta, i_t, i_n, N, BN, 0.0)[None, :]) * scale
    b_ds = b_ds.to(ds.dtype.element_ty)
    o_k = (i_t.to(tl.int64) * KT + i_k) * BK + tl.arange(0, BK)
    tl.store(ds + o_k[:, None] * N + o_n[None, :], b_ds, mask=(o_n < N)[None, :])
    return b_p.to(ds.dtype.element_ty), b_ds


@triton.jit
def shares_kernel(
    q, dout, kv, index, place, lse, delta, ds, shares, scale,
    N: tl.constexpr, L: tl.constexpr, V: tl.constexpr, KS: tl.constexpr, KT: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per query and tile of keys: ds [T, KT * BK, N], and shares [T * KS, L] of the gradients of these keys, at
    the rows `place` [T, KS]."""
    i_t, i_k = tl.program_id(0) // KT, tl.program_id(0) % KT
    b_s, m_k = selected(index, i_t, i_k * BK, first_selected(index, i_t, KS), KS, BK)
    if tl.max(m_k.to(tl.int32), 0) > 0:
        s0, dp0 = tl.zeros([BK, BN0], tl.float32), tl.zeros([BK, BN0], tl.float32)
        s1 = tl.zeros([BK, BN1 if BN1 > 0 else 1], tl.float32)
        dp1 = tl.zeros([BK, BN1 if BN1 > 0 else 1], tl.float32)
        for i_c in range(0, V, BC):
            b_k = gathered(kv, b_s, i_c, L, BC)
            s0, s1 = add_scores(s0, s1, q, b_k, i_t, i_c, N, L, BC, BN0, BN1, PRECISION)
            dp0, dp1 = add_scores(dp0, dp1, dout, b_k, i_t, i_c, N, V, BC, BN0, BN1, PRECISION)
        for i_c in range(V, L, BC):
            b_k = gathered(kv, b_s, i_c, L, BC)
            s0, s1 = add_scores(s0, s1, q, b_k, i_t, i_c, N, L, BC, BN0, BN1, PRECISION)
        p0, ds0 = _score_gradients(s0, dp0, m_k, lse, delta, ds, scale, i_t, i_k, 0, N, KT, BK, BN0)
        if BN1 > 0:
            p1, ds1 = _score_gradients(s1, dp1, m_k, lse, delta, ds, scale, i_t, i_k, BN0, N, KT, BK, BN1)
        o_k = i_k * BK + tl.arange(0, BK)
        b_place = tl.load(place + i_t.to(tl.int64) * KS + o_k, mask=m_k, other=0)
        p_share = shares + b_place.to(tl.int64)[:, None] * L
        for i_c in range(0, V, BC):
            acc = tl.dot(p0, heads(dout, i_t, 0, i_c, N, V, BN0, BC), input_precision=PRECISION)
            acc = tl.dot(ds0, heads(q, i_t, 0, i_c, N, L, BN0, BC), acc, input_precision=PRECISION)
            if BN1 > 0:
                acc = tl.dot(p1, heads(dout, i_t, BN0, i_c, N, V, BN1, BC), acc, input_precision=PRECISION)
                acc = tl.dot(ds1, heads(q, i_t, BN0, i_c, N, L, BN1, BC), acc, input_precision=PRECISION)
            o_c = i_c + tl.arange(0, BC)
            tl.store(p_share + o_c[None, :], acc.to(shares.dtype.element_ty), mask=m_k[:, None])
        for i_c in range(V, L, BC):
            acc = tl.dot(ds0, heads(q, i_t, 0, i_c, N, L, BN0, BC), input_precision=PRECISION)
            if BN1 > 0:
                acc = tl.dot(ds1, heads(q, i_t, BN0, i_c, N, L, BN1, BC), acc, input_precision=PRECISION)
            o_c = i_c + tl.arange(0, BC)
            m_kc = m_k[:, None] & (o_c < L)[None, :]
            tl.store(p_share + o_c[None, :], acc.to(shares.dtype.element_ty), mask=m_kc)


@triton.jit
def _store_dq(acc, dq, i_t, i_n: tl.constexpr, i_c, end: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
              BN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    o_n, o_c = i_n + tl.arange(0, BN), i_c + tl.arange(0, BC)
    p_dq = dq + (i_t.to(tl.int64) * N + o_n[:, None]) * L + o_c[None, :]
    tl.store(p_dq, tl.trans(acc).to(dq.dtype.element_ty), mask=(o_n < N)[:, None] & (o_c < end)[None, :])


@triton.jit
def _query_gradients(ds, kv, index, keys, dq, i_t, i_v, N: tl.constexpr, L: tl.constexpr, V: tl.constexpr,
                     KS: tl.constexpr, KP: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
                     BN0: tl.constexpr, BN1: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dq of BV columns from i_v on, and if BR is not 0 of the columns behind the values."""
    first = first_selected(index, i_t, KS)
    acc0, acc1 = tl.zeros([BV, BN0], tl.float32), tl.zeros([BV, BN1 if BN1 > 0 else 1], tl.float32)
    rest0 = tl.zeros([BR if BR > 0 else 1, BN0], tl.float32)
    rest1 = tl.zeros([BR if BR > 0 else 1, BN1 if BN1 > 0 else 1], tl.float32)
    # Loaded by hand, one step ahead: see values_kernel.
    b_s, _ = selected(index, i_t, 0, first, KS, BP)
    for i_p in range(0, keys, BP):
        b_k = tl.trans(gathered(kv, b_s, i_v, L, BV))
        if BR > 0:
            b_r = tl.trans(gathered(kv, b_s, V, L, BR))
        b_s, _ = selected(index, i_t, i_p + BP, first, KS, BP)
        b_ds = heads_of_keys(ds, i_t, i_p, 0, KP, N, BP, BN0)
        acc0 = tl.dot(b_k, b_ds, acc0, input_precision=PRECISION)
        if BR > 0:
            rest0 = tl.dot(b_r, b_ds, rest0, input_precision=PRECISION)
        if BN1 > 0:
            b_ds = heads_of_keys(ds, i_t, i_p, BN0, KP, N, BP, BN1)
            acc1 = tl.dot(b_k, b_ds, acc1, input_precision=PRECISION)
            if BR > 0:
                rest1 = tl.dot(b_r, b_ds, rest1, input_precision=PRECISION)
    _store_dq(acc0, dq, i_t, 0, i_v, V, N, L, BN0, BV)
    if BN1 > 0:
        _store_dq(acc1, dq, i_t, BN0, i_v, V, N, L, BN1, BV)
    if BR > 0:
        _store_dq(rest0, dq, i_t, 0, V, L, N, L, BN0, BR)
        if BN1 > 0:
            _store_dq(rest1, dq, i_t, BN0, V, L, N, L, BN1, BR)


@triton.jit
def query_gradients_kernel(
    ds, kv, index, count, dq,
    N: tl.constexpr, L: tl.constexpr, V: tl.constexpr, KS: tl.constexpr, KT: tl.constexpr, BK: tl.constexpr,
    BP: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Per query and block of BV values: dq [T, N, L]; that of the BR columns behind the values with the first block."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_t, i_v = tl.program_id(0) // NV, tl.program_id(0) % NV
    keys = tl.load(count + i_t)
    if i_v == 0:
        _query_gradients(ds, kv, index, keys, dq, i_t, 0, N, L, V, KS, KT * BK, BP, BV, BR, BN0, BN1, PRECISION)
    else:
        _query_gradients(ds, kv, index, keys, dq, i_t, i_v * BV, N, L, V, KS, KT * BK, BP, BV, 0, BN0, BN1, PRECISION)


@triton.jit
def _rows(shares, i_r, end, i_c: tl.constexpr, stop: tl.constexpr, L: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr):
    """fp32 [BQ, BC] of shares [rows, L]: rows from i_r on, zero from row `end` and column `stop` on."""
    o_r, o_c = i_r + tl.arange(0, BQ), i_c + tl.arange(0, BC)
    p_x = shares + o_r.to(tl.int64)[:, None] * L + o_c[None, :]
    return tl.load(p_x, mask=(o_r < end)[:, None] & (o_c < stop)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _add(dkv, i_s, acc, i_c: tl.constexpr, stop: tl.constexpr, L: tl.constexpr, BC: tl.constexpr):
    o_c = i_c + tl.arange(0, BC)
    p_dkv, m_c = dkv + i_s.to(tl.int64) * L + o_c, o_c < stop
    tl.store(p_dkv, tl.load(p_dkv, mask=m_c, other=0.0) + tl.sum(acc, 0), mask=m_c)


@triton.jit
def add_shares_kernel(
    shares, start, end, dkv, L: tl.constexpr, V: tl.constexpr, BQ: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dkv [S, L] plus the shares of each key s, rows start[s] to end[s] of shares, in order; BR 0: L is V."""
    i_s = tl.program_id(0)
    first, end = tl.load(start + i_s), tl.load(end + i_s)
    acc, rest = tl.zeros([BQ, BV], tl.float32), tl.zeros([BQ, BR if BR > 0 else 1], tl.float32)
    if end > first:
        for i_r in range(first, end, BQ):
            acc += _rows(shares, i_r, end, 0, V, L, BQ, BV)
            if BR > 0:
                rest += _rows(shares, i_r, end, V, L, L, BQ, BR)
        _add(dkv, i_s, acc, 0, V, L, BV)
        if BR > 0:
            _add(dkv, i_s, rest, V, L, L, BR)
