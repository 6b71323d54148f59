"""First pass over the chunks: everything of a chunk that needs no state, for all chunks at once.

With G the running sum of the log decay in the chunk, q and k of unit length, a the triangle beta_i k_i.k_j
exp(G_i - G_j) and T = (1 + a)^-1, the recurrence over chunks needs only products with the state S:

    u - w S        the corrected values, u = T (beta v), w = T (beta k exp(G))
    q_in           q K^-1/2 exp(G), reads the state at the chunk's start
    attend         q_i.k_j K^-1/2 exp(G_i - G_j), reads the chunk's own values
    k_out, decay   k exp(G_end - G) writes the values, exp(G_end) fades the state

Legend: M tokens of all documents, N chunks of BT tokens, H heads, K key width, V value width, T tokens of a chunk.
"""

import triton
import triton.language as tl

from .gate import L2_EPS, log2_decay
from .scores import BC, BT, add_scores, product, scaled_rows, small_dot, sums_in_halves, unit_lower_inverse


@triton.jit
def chunk_of(p_chunks, i_n):
    """First token and number of tokens (0: no such chunk) of chunk i_n."""
    return tl.load(p_chunks + 2 * i_n).to(tl.int64), tl.load(p_chunks + 2 * i_n + 1)


@triton.jit
def offsets(length, H, D: tl.constexpr, BD: tl.constexpr):
    """Places of [BT, BD] in a [M, H, D] tensor relative to the first, and which rows exist."""
    o_t = tl.arange(0, BT)[:, None]
    return o_t * (H * D) + tl.arange(0, BD)[None, :], o_t < length


@triton.jit
def load_tile(p, i_t, i_h, length, H, D: tl.constexpr, i_d, BD: tl.constexpr):
    """[BT, BD] of a [M, H, D] tensor, zero behind the end of the document."""
    o_td, m_t = offsets(length, H, D, BD)
    return tl.load(p + ((i_t * H + i_h) * D + i_d) + o_td, mask=m_t, other=0.0)


@triton.jit
def load_rows(p, i_t, i_h, length, H, D: tl.constexpr, i_d, BD: tl.constexpr):
    """The same in fp32."""
    return load_tile(p, i_t, i_h, length, H, D, i_d, BD).to(tl.float32)


@triton.jit
def store_rows(p, x_TD, i_t, i_h, length, H, D: tl.constexpr, i_d, BD: tl.constexpr):
    o_td, m_t = offsets(length, H, D, BD)
    tl.store(p + ((i_t * H + i_h) * D + i_d) + o_td, x_TD.to(p.dtype.element_ty), mask=m_t)


@triton.jit
def load_scalars(p, i_t, i_h, length, H):
    """[BT] of a [M, H] tensor in fp32, zero behind the end of the document."""
    o_t = tl.arange(0, BT)
    return tl.load(p + (i_t * H + i_h) + o_t * H, mask=o_t < length, other=0.0).to(tl.float32)


@triton.jit
def store_scalars(p, x_T, i_t, i_h, length, H):
    o_t = tl.arange(0, BT)
    tl.store(p + (i_t * H + i_h) + o_t * H, x_T.to(p.dtype.element_ty), mask=o_t < length)


@triton.jit
def rstd_rows(p, i_t, i_h, length, H, K: tl.constexpr):
    """1 / sqrt(sum x^2 + eps) of every row; 0 for rows that do not exist."""
    b_x = load_rows(p, i_t, i_h, length, H, K, 0, K)
    return tl.where(tl.arange(0, BT) < length, tl.rsqrt(tl.sum(b_x * b_x, 1) + L2_EPS), 0.0)


@triton.jit
def decays(
    b_f, dt_bias, rate, i_h, length, lower_bound, K: tl.constexpr, i_k, BK: tl.constexpr,
    BOUNDED: tl.constexpr, NARROW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Sums of the base-2 log decay: in a token's half up to it, in its half, in the other half; [BT, BK] each."""
    b_z = b_f + tl.load(dt_bias + i_h * K + i_k + tl.arange(0, BK)).to(tl.float32)[None, :]
    return sums_in_halves(log2_decay(b_z, rate, lower_bound, tl.arange(0, BT) < length, BOUNDED, NARROW), EXACT)


@triton.jit
def scores_kernel(
    q,
    k,
    f,
    A_log,
    dt_bias,
    chunks,
    q_in,
    k_in,
    k_out,
    attend,
    keys,
    decay,
    q_rstds,
    k_rstds,
    lower_bound,
    H,
    K: tl.constexpr,
    BK: tl.constexpr,
    BOUNDED: tl.constexpr,
    NARROW: tl.constexpr,
    EXACT: tl.constexpr,
):
    """q_in, k_in, k_out, attend, decay, the scores of keys (before beta) and the factors of unit length."""
    i_n, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_t, length = chunk_of(chunks, i_n)
    if length == 0:
        return
    o_t = tl.arange(0, BT)
    o_i, o_j = o_t[:, None], o_t[None, :]
    second = o_i >= BC
    rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    q_rstd = rstd_rows(q, i_t, i_h, length, H, K)
    k_rstd = rstd_rows(k, i_t, i_h, length, H, K)
    store_scalars(q_rstds, q_rstd, i_t, i_h, length, H)
    store_scalars(k_rstds, k_rstd, i_t, i_h, length, H)
    q_rstd *= K**-0.5
    p_decay = decay + (i_n.to(tl.int64) * H + i_h) * K
    qk_across = tl.zeros([BT, BT], tl.float32)
    qk_inside = tl.zeros([BT, BT], tl.float32)
    kk_across = tl.zeros([BT, BT], tl.float32)
    kk_inside = tl.zeros([BT, BT], tl.float32)
    for i_k in tl.range(0, K, BK, disable_licm=True):
        b_c, total, other = decays(
            load_rows(f, i_t, i_h, length, H, K, i_k, BK), dt_bias, rate, i_h, length, lower_bound, K, i_k, BK,
            BOUNDED, NARROW, EXACT,
        )  # fmt: skip
        o_k = i_k + tl.arange(0, BK)[None, :]
        tl.store(p_decay + o_k + tl.zeros_like(o_i), tl.exp2(total + other), mask=o_i == 0)
        b_in = tl.exp2(b_c)
        fade = tl.exp2(other)
        b_k = load_rows(k, i_t, i_h, length, H, K, i_k, BK) * k_rstd[:, None]
        b_kin = b_k * b_in
        store_rows(k_in, tl.where(second, b_kin * fade, b_kin), i_t, i_h, length, H, K, i_k, BK)
        b_kout = b_k * tl.exp2(total - b_c)
        kk_across, kk_inside = add_scores(kk_across, kk_inside, b_k, b_kin, b_k, b_kout, b_c, total, NARROW, EXACT)
        b_q = load_rows(q, i_t, i_h, length, H, K, i_k, BK) * q_rstd[:, None]
        b_qin = b_q * b_in
        store_rows(q_in, tl.where(second, b_qin * fade, b_qin), i_t, i_h, length, H, K, i_k, BK)
        qk_across, qk_inside = add_scores(qk_across, qk_inside, b_q, b_qin, b_k, b_kout, b_c, total, NARROW, EXACT)
        store_rows(k_out, tl.where(second, b_kout, b_kout * fade), i_t, i_h, length, H, K, i_k, BK)
    inside = o_i // BC == o_j // BC
    qk = tl.where(o_i >= o_j, tl.where(inside, qk_inside, qk_across), 0.0)
    kk = tl.where(o_i > o_j, tl.where(inside, kk_inside, kk_across), 0.0)
    store_rows(attend, qk, i_t, i_h, length, H, BT, 0, BT)
    store_rows(keys, kk, i_t, i_h, length, H, BT, 0, BT)


@triton.jit
def solve_kernel(
    v,
    beta,
    chunks,
    k_in,
    keys,
    w,
    u,
    u_scale,
    inverse,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BACKWARD: tl.constexpr,
    EXACT: tl.constexpr,
):
    i_n, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_t, length = chunk_of(chunks, i_n)
    if length == 0:
        return
    b_beta = tl.sigmoid(load_scalars(beta, i_t, i_h, length, H))
    b_inverse = unit_lower_inverse(load_rows(keys, i_t, i_h, length, H, BT, 0, BT) * b_beta[:, None], EXACT)
    if BACKWARD:
        store_rows(inverse, b_inverse, i_t, i_h, length, H, BT, 0, BT)
    # Beta multiplies the columns of the inverse instead of the rows of k and v.
    b_inverse *= b_beta[None, :]
    b_w = small_dot(b_inverse, load_rows(k_in, i_t, i_h, length, H, K, 0, K), EXACT)
    store_rows(w, b_w, i_t, i_h, length, H, K, 0, K)
    b_v, v_scale = scaled_rows(load_rows(v, i_t, i_h, length, H, V, 0, V), EXACT)
    x, x_scale = scaled_rows(b_inverse * v_scale[None, :], EXACT)
    b_u, scale = scaled_rows(product(x, b_v, EXACT), EXACT)
    store_rows(u, b_u, i_t, i_h, length, H, V, 0, V)
    store_scalars(u_scale, scale * x_scale, i_t, i_h, length, H)
