"""Triton kernel: index scores of a block of queries with a chunk of keys.

A program keeps all heads of BQ queries in shared memory and walks along the keys: a product of BS keys with BQ * BH
(query, head) columns, whose heads lie next to each other and are reduced to one score in registers. Two programs share
a multiprocessor, so that one reduces while the other multiplies.

Sizes: T queries, S keys, H heads, K their width, C keys of a chunk. Tiles: BQ queries, BH heads (H up to a power of
two), BS keys.
"""

import torch
import triton
import triton.language as tl

# Columns of a product, queries in them at most, and stages of the keys' tiles. Two programs of three stages fill the
# shared memory of a multiprocessor to the last byte: more than four queries, or fp32, leave room for two stages only.
COLUMNS, COLUMNS_8_BITS, COLUMNS_FP32, QUERIES = 256, 128, 64, 16
STAGES, STAGES_OF_MORE = 3, 2
KEYS, WARPS = 64, 4
# Keys of a program, for which queries are read once: at most so many, fewer where there would be too few programs.
SPLIT, LEAST_SPLIT, PROGRAMS = 4096, 256, 512


@triton.jit
def wide_dot(a, b, EXACT: tl.constexpr):
    """a b in fp32; EXACT where operands are fp32, or interpreted: the interpreter's products of bfloat16 are wrong.

    Three products of halves of 11 bits each err about as much as fp32 does.
    """
    if EXACT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    else:
        # Sums of products of int8 are integers.
        return tl.dot(a, b).to(tl.float32)


@triton.jit(do_not_specialize=["i_0", "stop", "S", "start", "split"])
def scores_kernel(
    q,
    k,
    weight,
    key_scale,
    first,
    end,
    scores,
    i_0,
    stop,
    S,
    start,
    split,
    scale,
    C: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BQ: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """scores [queries i_0 to stop, keys start to start + C] where a query of the tile sees a key of the tile."""
    i_q, i_c = tl.program_id(0), tl.program_id(1)
    o_q = i_q * BQ + tl.arange(0, BQ)
    m_q = i_0 + o_q < stop
    b_first = tl.load(first + i_0 + o_q, mask=m_q, other=0)
    b_end = tl.load(end + i_0 + o_q, mask=m_q, other=0)
    m_q = m_q & (b_first < b_end)
    low = tl.maximum(tl.min(tl.where(m_q, b_first, S)), start + i_c * split) // BS * BS
    high = tl.minimum(tl.max(tl.where(m_q, b_end, 0)), start + tl.minimum((i_c + 1) * split, C))
    if low < high:
        o_r = i_q * BQ + tl.arange(0, BQ * BH) // BH
        o_i = tl.arange(0, BQ * BH) % BH
        m_r = (i_0 + o_r < stop) & (o_i < H)
        row = (i_0 + o_r).to(tl.int64) * H + o_i
        o_k = tl.arange(0, K)
        b_q = tl.load(q + row[:, None] * K + o_k[None, :], mask=m_r[:, None], other=0.0)
        # relu(x) = (x + |x|) / 2: two instructions at full rate with the weight's, a maximum goes at half.
        b_w = tl.load(weight + row, mask=m_r, other=0.0).to(tl.float32) * (0.5 * scale)
        o_s = tl.arange(0, BS)
        p_k = k + o_s[:, None] * K + o_k[None, :]
        p_s = scores + o_q.to(tl.int64)[None, :] * C + o_s[:, None]
        for i_s in range(low, high, BS):
            m_s = i_s + o_s < S
            b_k = tl.load(p_k + tl.cast(i_s, tl.int64) * K, mask=m_s[:, None], other=0.0)
            b_x = wide_dot(b_k, tl.trans(b_q), EXACT)
            b_x = (b_x + tl.abs(b_x)) * b_w[None, :]
            b_score = tl.sum(tl.reshape(b_x, [BS, BQ, BH]), axis=2)
            if key_scale is not None:
                b_score *= tl.load(key_scale + i_s + o_s, mask=m_s, other=0.0)[:, None]
            tl.store(p_s + (i_s - start), b_score, mask=(i_s + o_s < high)[:, None] & m_q[None, :])


def write_scores(
    q_TIK: torch.Tensor,
    k_SK: torch.Tensor,
    weight_TI: torch.Tensor,
    key_scale_S: torch.Tensor | None,
    first_T: torch.Tensor,
    end_T: torch.Tensor,
    scores_RC: torch.Tensor,
    query: int,
    start: int,
) -> None:
    """Scores of the queries from `query` on with the keys from `start` on, where visible; other places may be junk."""
    (T, heads, K), (S, _), (R, C) = q_TIK.shape, k_SK.shape, scores_RC.shape
    stop = min(query + R, T)
    fp32 = q_TIK.dtype == torch.float32
    BH = triton.next_power_of_2(heads)
    columns = COLUMNS_FP32 if fp32 else COLUMNS if key_scale_S is None else COLUMNS_8_BITS
    BQ = max(1, min(QUERIES, columns // BH))
    groups = triton.cdiv(stop - query, BQ)
    split = min(SPLIT, max(LEAST_SPLIT, triton.cdiv(C * groups // PROGRAMS, KEYS) * KEYS))
    scores_kernel[(groups, triton.cdiv(C, split))](
        q_TIK,
        k_SK,
        weight_TI,
        key_scale_S,
        first_T,
        end_T,
        scores_RC,
        query,
        stop,
        S,
        start,
        split,
        K**-0.5,
        C=C,
        H=heads,
        K=K,
        BQ=BQ,
        BH=BH,
        BS=KEYS,
        EXACT=fp32 or not q_TIK.is_cuda,
        num_warps=WARPS,
        num_stages=STAGES if columns == COLUMNS and BQ <= 4 else STAGES_OF_MORE,
    )
