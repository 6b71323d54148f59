"""Triton kernels: the indexer's loss over the selected keys, and its gradients.

Forward, and backward for queries and weights: a program has a query and gathers its keys. Backward for keys: a program
has a tile of keys and walks along the queries; what the selected scores' gradients are it reads from a dense block, in
which they are zero at keys that were not selected. No sum depends on the order in which programs run.

Products that add up keep what was computed, rounded to 16 bits, as their right operand, which lies in shared memory:
the compiler lets the next round begin while such a product is under way, and a left operand would be in registers.

Sizes: T queries, S keys, P places for selected keys of a query, H heads, K their width, R queries whose dense gradients
exist at a time. Tiles: BH heads (H up to a power of two), BS keys, BR queries of a program of `key_gradients_kernel`.
"""

import triton
import triton.language as tl

from .index_scores import wide_dot

# Places counted at a time.
COUNTED = tl.constexpr(1024)


@triton.jit
def _operand(x, dtype: tl.constexpr, EXACT: tl.constexpr):
    """x as an operand of a product beside operands of this dtype."""
    if EXACT:
        return x
    else:
        return x.to(dtype)


@triton.jit
def _selected(index, i_t, P):
    """How many keys a query has selected, and behind the last of them."""
    o_p = tl.arange(0, COUNTED)
    b_n, b_last = tl.zeros([COUNTED], tl.int32), tl.zeros([COUNTED], tl.int32)
    for i_p in range(0, P, COUNTED):
        b_index = tl.load(index + i_t * P + i_p + o_p, mask=i_p + o_p < P, other=-1)
        b_n += (b_index >= 0).to(tl.int32)
        b_last = tl.maximum(b_last, b_index + 1)
    return tl.sum(b_n), tl.max(b_last)


@triton.jit
def _heads(q, weight, i_t, H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr):
    """Query [BH, K], and weights [BH] in fp32."""
    o_i, o_k = tl.arange(0, BH), tl.arange(0, K)
    row = i_t * H + o_i
    b_q = tl.load(q + row[:, None] * K + o_k[None, :], mask=(o_i < H)[:, None], other=0.0)
    return b_q, tl.load(weight + row, mask=o_i < H, other=0.0).to(tl.float32)


@triton.jit
def _keys(k, index, target, i_t, i_p, n, P, K: tl.constexpr, BS: tl.constexpr):
    """(mask, positions, keys [BS, K], target) of places i_p on."""
    o_p = i_p + tl.arange(0, BS)
    m_p = o_p < n
    b_index = tl.load(index + i_t * P + o_p, mask=m_p, other=0)
    p_k = k + b_index.to(tl.int64)[:, None] * K + tl.arange(0, K)[None, :]
    b_k = tl.load(p_k, mask=m_p[:, None], other=0.0)
    return m_p, b_index, b_k, tl.load(target + i_t * P + o_p, mask=m_p, other=0.0)


@triton.jit(do_not_specialize=["P"])
def loss_kernel(
    q,
    k,
    weight,
    index,
    target,
    loss,
    lse,
    total,
    P,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Loss, log-sum-exp of the scores and sum of the target of a query; 0, -inf and 0 where it has selected nothing."""
    i_t = tl.program_id(0).to(tl.int64)
    n = _selected(index, i_t, P)[0]
    b_q, b_w = _heads(q, weight, i_t, H, K, BH)
    # relu(x) = (x + |x|) / 2
    b_w *= 0.5 * scale
    b_max = tl.full([BS], -1e30, tl.float32)
    b_sum, b_total, b_cross = tl.zeros_like(b_max), tl.zeros_like(b_max), tl.zeros_like(b_max)
    for i_p in range(0, n, BS):
        m_p, _, b_k, b_target = _keys(k, index, target, i_t, i_p, n, P, K, BS)
        b_x = wide_dot(b_k, tl.trans(b_q), EXACT)
        b_score = tl.sum((b_x + tl.abs(b_x)) * b_w[None, :], axis=1)
        b_masked = tl.where(m_p, b_score, -1e30)
        b_new = tl.maximum(b_max, b_masked)
        b_sum = b_sum * tl.exp(b_max - b_new) + tl.where(m_p, tl.exp(b_masked - b_new), 0.0)
        b_max = b_new
        b_total += b_target
        b_log = tl.log(tl.where(b_target > 0, b_target, 1.0))
        b_cross += b_target * (b_log - b_score)
    m = tl.max(b_max)
    s_lse = m + tl.log(tl.sum(b_sum * tl.exp(b_max - m)))
    s_total = tl.sum(b_total)
    safe = tl.where(s_total > 0, s_total, 1.0)
    s_loss = tl.sum(b_cross) / safe - tl.log(safe) + s_lse
    tl.store(loss + i_t, tl.where(s_total > 0, s_loss, 0.0))
    tl.store(lse + i_t, s_lse)
    tl.store(total + i_t, s_total)


@triton.jit(do_not_specialize=["i_0", "P", "S"])
def query_gradients_kernel(
    q,
    k,
    weight,
    index,
    target,
    lse,
    total,
    dloss,
    dq,
    dweight,
    dscores,
    low,
    high,
    i_0,
    P,
    S,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Gradients of query i_0 + r and of its weights; of its scores in row r of dscores, zero before.

    low, high: the first key that row r has, and behind the last.
    """
    i_r = tl.program_id(0).to(tl.int64)
    i_t = i_0 + i_r
    n, last = _selected(index, i_t, P)
    b_q, b_w = _heads(q, weight, i_t, H, K, BH)
    s_lse, s_total, s_dloss = tl.load(lse + i_t), tl.load(total + i_t), tl.load(dloss + i_t)
    s_dloss = tl.where(s_total > 0, s_dloss, 0.0)
    s_total = tl.where(s_total > 0, s_total, 1.0)
    b_half = b_w * (0.5 * scale)
    b_dq = tl.zeros([K, BH], tl.float32)
    b_dw = tl.zeros([BS, BH], tl.float32)
    for i_p in range(0, n, BS):
        m_p, b_index, b_k, b_target = _keys(k, index, target, i_t, i_p, n, P, K, BS)
        b_x = wide_dot(b_k, tl.trans(b_q), EXACT)
        b_relu = b_x + tl.abs(b_x)
        b_score = tl.sum(b_relu * b_half[None, :], axis=1)
        b_ds = tl.where(m_p, (tl.exp(b_score - s_lse) - b_target / s_total) * s_dloss, 0.0)
        tl.store(dscores + i_r * S + b_index, b_ds, mask=m_p)
        b_dw += b_relu * b_ds[:, None]
        b_dx = tl.where(b_x > 0, _operand(b_ds, q.dtype.element_ty, EXACT)[:, None], 0.0)
        b_dq += wide_dot(tl.trans(b_k), b_dx, EXACT)
    o_i, o_k = tl.arange(0, BH), tl.arange(0, K)
    row = i_t * H + o_i
    b_dq = tl.trans(b_dq * (2.0 * b_half)[None, :])
    tl.store(dq + row[:, None] * K + o_k[None, :], b_dq.to(dq.dtype.element_ty), mask=(o_i < H)[:, None])
    b_dw_H = tl.sum(b_dw, axis=0) * (0.5 * scale)
    tl.store(dweight + row, b_dw_H.to(dweight.dtype.element_ty), mask=o_i < H)
    tl.store(low + i_r, tl.where(n > 0, tl.load(index + i_t * P), 0))
    tl.store(high + i_r, last)


@triton.jit(do_not_specialize=["i_0", "R", "S"])
def key_gradients_kernel(
    q,
    k,
    weight,
    dscores,
    low,
    high,
    partial,
    i_0,
    R,
    S,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    BR: tl.constexpr,
    EXACT: tl.constexpr,
):
    """partial [part, S, K] in fp32: what queries i_0 + BR * part on, BR of them, add to the gradients of the keys."""
    i_s, i_b = tl.program_id(0) * BS, tl.program_id(1)
    o_r = i_b * BR + tl.arange(0, BR)
    b_low = tl.load(low + o_r, mask=o_r < R, other=0)
    b_high = tl.load(high + o_r, mask=o_r < R, other=0)
    m_r = (b_low < i_s + BS) & (b_high > i_s)
    i_first, i_end = tl.min(tl.where(m_r, o_r, R)), tl.max(tl.where(m_r, o_r + 1, 0))
    o_s, o_k = i_s + tl.arange(0, BS), tl.arange(0, K)
    m_s = o_s < S
    o_x = o_s.to(tl.int64)[:, None] * K + o_k[None, :]
    b_k = tl.load(k + o_x, mask=m_s[:, None], other=0.0)
    b_dk = tl.zeros([K, BS], tl.float32)
    for i_r in range(i_first, i_end):
        b_q, b_w = _heads(q, weight, tl.cast(i_0 + i_r, tl.int64), H, K, BH)
        b_ds = tl.load(dscores + tl.cast(i_r, tl.int64) * S + o_s, mask=m_s, other=0.0)
        b_x = wide_dot(b_k, tl.trans(b_q), EXACT)
        b_dx = tl.where(b_x > 0, (b_w * scale)[None, :] * b_ds[:, None], 0.0)
        b_dk += wide_dot(tl.trans(b_q), tl.trans(_operand(b_dx, q.dtype.element_ty, EXACT)), EXACT)
    tl.store(partial + i_b.to(tl.int64) * S * K + o_x, tl.trans(b_dk), mask=m_s[:, None])
