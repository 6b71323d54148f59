"""Routing: sigmoid scores, the best experts by biased score, their weights, and the slots sorted by expert.

A warp owns a token. Lane l holds the best key of its 4 BI experts, 128 i + 4 l + j; a round takes the best of 32 lanes,
and only the lane that had it looks for its next best, whose keys the whole warp computes again from the logits in L1.
Keys are exact: equal biased scores fall back on the expert's number, so nothing depends on the order of a reduction.

Legend: T tokens, E experts, S chosen experts (slots) per token, N blocks of 32 tokens, R = T * S rows. BI runs of 128
        experts, BT tokens of a program at a time, BE experts.
"""

import torch
import triton
import triton.language as tl

from ._ops import op
from .route_reference import Routing, Rows
from .sorting import BLOCK, check_capacity, clear_words, empty_rows, new_words, rows_of_words, set_bits

_BLOCK = tl.constexpr(BLOCK)
# Below every key, and behind every expert.
LOWEST, BEHIND = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
# A warp for each of the tokens that a program has at a time.
TOKENS = 16


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), the bits that CUDA's own arithmetic gives: near ties are then decided as torch decides them.

    exp(-x) = 2^n 2^f: n is the integer below 252 t - 126, with t = 1/2 - x / 252 log2(e) rounded to fp32.
    """
    # A NaN stays one: it must show, not become a small score.
    x = tl.maximum(x, -87.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 87.0, propagate_nan=tl.PropagateNan.ALL)
    t = tl.fma(x, -0.0057249800302088261, 0.5)
    # An integer sits in the low bits of a number of this size; what is left over tells whether it was rounded up.
    n = tl.fma(t, 252.0, 12582913.0)
    n = tl.where(tl.fma(t, 252.0, 12582913.0 - n) < 0.0, n - 1.0, n)
    # log2(e) in two parts.
    f = tl.fma(x, -1.4426950216293335, 12583039.0 - n)
    f = tl.fma(x, -1.925963033500011079e-08, f)
    d = 1.0 + tl.exp2(f) * (n.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    # The reciprocal: an approximation, and a step that rounds it to nearest.
    r = tl.rsqrt(d)
    r = r * r
    return tl.fma(tl.fma(-d, r, 1.0), r, r)


@triton.jit
def _flip(bits):
    """Bits of floats to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(logits, bias, o_t, m_t, o_e, E: tl.constexpr):
    """Sortable biased scores of experts o_e for tokens o_t."""
    b_x = tl.load(logits + o_t * E + o_e, mask=m_t & (o_e < E), other=0.0)
    b_c = sigmoid(b_x) + tl.load(bias + o_e, mask=o_e < E, other=0.0)
    return tl.where(o_e < E, _flip(b_c.to(tl.int32, bitcast=True)), LOWEST)


@triton.jit(do_not_specialize=["T"])
def route_kernel(
    logits,
    bias,
    mask,
    ids,
    weights,
    scores,
    cutoff,
    words,
    T,
    scale,
    RENORMALIZE: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    BI: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    clear_words(words, i_n, E, BE)
    o_l = tl.arange(0, 32)[None, :]
    # Lanes, warps (tokens), and the experts of a lane: in this order Triton lays them out like that.
    o_e = tl.arange(0, 32)[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    o_e = tl.broadcast_to(o_e + tl.arange(0, BI)[None, None, :, None] * 128, [32, BT, BI, 4])
    for i_t in range(0, _BLOCK, BT):
        b_j = i_t + tl.arange(0, BT)
        o_t = i_n * _BLOCK + b_j
        m_t = o_t < T
        if mask is not None:
            m_t = m_t & (tl.load(mask + o_t, mask=m_t, other=0) != 0)

        b_key = _keys(logits, bias, o_t[None, :, None, None], m_t[None, :, None, None], o_e, E)
        b_head = tl.max(tl.max(b_key, axis=3), axis=2)
        b_at = tl.min(tl.min(tl.where(b_key == b_head[:, :, None, None], o_e, BEHIND), axis=3), axis=2)
        b_head, b_at = tl.trans(b_head), tl.trans(b_at)
        b_ids = tl.zeros([BT, 32], tl.int32)
        for i_s in range(S):
            b_m = tl.max(b_head, axis=1)[:, None]
            b_e = tl.min(tl.where(b_head == b_m, b_at, BEHIND), axis=1)[:, None]
            b_ids = tl.where(o_l == i_s, b_e, b_ids)
            # The experts of the lane that had the best, one in each lane; those before it have been taken.
            b_lane = (b_e // 4) % 32
            o_x = (o_l // 4) * 128 + b_lane * 4 + o_l % 4
            b_x = _keys(logits, bias, o_t[:, None], m_t[:, None], o_x, E)
            b_x = tl.where((b_x < b_m) | ((b_x == b_m) & (o_x > b_e)), b_x, LOWEST)
            b_next = tl.max(b_x, axis=1)[:, None]
            b_where = tl.min(tl.where(b_x == b_next, o_x, BEHIND), axis=1)[:, None]
            b_head = tl.where(o_l == b_lane, b_next, b_head)
            b_at = tl.where(o_l == b_lane, b_where, b_at)
        b_left = tl.max(b_head, axis=1)
        b_c = tl.where((b_left == LOWEST) | ~m_t, -float("inf"), _flip(b_left).to(tl.float32, bitcast=True))
        tl.store(cutoff + o_t, b_c, mask=o_t < T)

        m_s = (o_l < S) & m_t[:, None]
        b_s = sigmoid(tl.load(logits + o_t[:, None] * E + b_ids, mask=m_s, other=0.0))
        b_s = tl.where(m_s, b_s, 0.0)
        b_w = b_s
        if RENORMALIZE:
            b_w = b_s / (tl.sum(b_s, axis=1)[:, None] + 1e-20)
        o_s = o_t[:, None] * S + o_l
        m_o = (o_l < S) & (o_t < T)[:, None]
        tl.store(ids + o_s, tl.where(m_s, b_ids, -1).to(tl.int64), mask=m_o)
        tl.store(scores + o_s, b_s, mask=m_o)
        tl.store(weights + o_s, b_w * scale, mask=m_o)
        set_bits(words, i_n, b_ids, tl.broadcast_to(b_j[:, None], [BT, 32]), m_s, E)


@triton.jit
def route_bwd_kernel(
    dweights,
    ids,
    scores,
    dlogits,
    scale,
    RENORMALIZE: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    BE: tl.constexpr,
):
    """Gradient of a token's logits: zeros, and behind them those of its chosen experts."""
    i_t = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BE)
    tl.store(dlogits + i_t * E + o_e, tl.zeros([BE], tl.float32), mask=o_e < E)
    o_s = tl.arange(0, 32)
    m_s = o_s < S
    b_e = tl.load(ids + i_t * S + o_s, mask=m_s, other=-1)
    b_s = tl.load(scores + i_t * S + o_s, mask=m_s, other=0.0)
    b_dw = tl.load(dweights + i_t * S + o_s, mask=m_s, other=0.0) * scale
    b_ds = b_dw
    if RENORMALIZE:
        inverse = 1.0 / (tl.sum(b_s, axis=0) + 1e-20)
        b_ds = (b_dw - tl.sum(b_dw * b_s * inverse, axis=0)) * inverse
    # Other threads wrote the zeros in these places.
    tl.debug_barrier()
    tl.store(dlogits + i_t * E + b_e, b_ds * b_s * (1.0 - b_s), mask=m_s & (b_e >= 0))


@torch.library.custom_op(op("route"), mutates_args=())
def _route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor,
    mask_T: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    capacity_factor: float | None,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]:
    """ids, weights, scores of the chosen, cutoff, and the fields of `Rows`."""
    logits_TE = logits_TE.contiguous()
    T, E = logits_TE.shape
    ids_TS = logits_TE.new_empty(T, top_k, dtype=torch.int64)
    weights_TS, scores_TS, cutoff_T = (logits_TE.new_empty(shape) for shape in ((T, top_k), (T, top_k), (T,)))
    words_NE = new_words(ids_TS, E)
    with torch.cuda.device_of(logits_TE):
        route_kernel[(len(words_NE),)](
            logits_TE,
            bias_E.contiguous(),
            None if mask_T is None else mask_T.contiguous(),
            ids_TS,
            weights_TS,
            scores_TS,
            cutoff_T,
            words_NE,
            T,
            scaling_factor,
            RENORMALIZE=renormalize,
            E=E,
            S=top_k,
            BI=triton.next_power_of_2(triton.cdiv(E, 128)),
            BT=TOKENS,
            BE=triton.next_power_of_2(E),
            num_warps=TOKENS,
        )
    return ids_TS, weights_TS, scores_TS, cutoff_T, *rows_of_words(ids_TS, words_NE, capacity_factor)


@_route.register_fake
def _(logits_TE, bias_E, mask_T, top_k, renormalize, scaling_factor, capacity_factor):
    T, E = logits_TE.shape
    ids_TS = logits_TE.new_empty(T, top_k, dtype=torch.int64)
    values = (logits_TE.new_empty(shape) for shape in ((T, top_k), (T, top_k), (T,)))
    return ids_TS, *values, *empty_rows(ids_TS, E)


@torch.library.custom_op(op("route_bwd"), mutates_args=())
def _route_bwd(
    dweights_TS: torch.Tensor,
    ids_TS: torch.Tensor,
    scores_TS: torch.Tensor,
    experts: int,
    renormalize: bool,
    scaling_factor: float,
) -> torch.Tensor:
    T, S = ids_TS.shape
    dlogits_TE = scores_TS.new_empty(T, experts)
    with torch.cuda.device_of(ids_TS):
        route_bwd_kernel[(T,)](
            dweights_TS.contiguous(),
            ids_TS,
            scores_TS,
            dlogits_TE,
            scaling_factor,
            RENORMALIZE=renormalize,
            E=experts,
            S=S,
            BE=triton.next_power_of_2(experts),
            num_warps=1,
        )
    return dlogits_TE


@_route_bwd.register_fake
def _(dweights_TS, ids_TS, scores_TS, experts, renormalize, scaling_factor):
    return scores_TS.new_empty(len(ids_TS), experts)


def _save(ctx, inputs, output):
    logits_TE, _, _, _, ctx.renormalize, ctx.scaling_factor, _ = inputs
    ids_TS, _, scores_TS, *others = output
    ctx.experts = logits_TE.shape[1]
    # Not the scores: a second derivative is then an error, not one without the part through them.
    ctx.mark_non_differentiable(ids_TS, *others)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(ids_TS, scores_TS)


def _backward(ctx, _, dweights_TS, *others):
    dlogits_TE = None
    if dweights_TS is not None:
        dlogits_TE = _route_bwd(dweights_TS, *ctx.saved_tensors, ctx.experts, ctx.renormalize, ctx.scaling_factor)
    return dlogits_TE, None, None, None, None, None, None


_route.register_autograd(_backward, setup_context=_save)


def check_logits(logits_TE: torch.Tensor, mask_T: torch.Tensor | None) -> None:
    if logits_TE.dim() != 2 or logits_TE.dtype != torch.float32:
        raise ValueError(
            f"logits_TE: expected float32 [tokens, experts], got {logits_TE.dtype} {list(logits_TE.shape)}"
        )
    if not 1 <= logits_TE.shape[1] <= 1024:
        raise ValueError(f"logits_TE: {logits_TE.shape[1]} experts, expected 1 to 1024")
    if mask_T is not None and (mask_T.dtype != torch.bool or mask_T.shape != logits_TE.shape[:1]):
        raise ValueError(f"mask_T: expected bool [{len(logits_TE)}], got {mask_T.dtype} {list(mask_T.shape)}")
    if mask_T is not None and mask_T.device != logits_TE.device:
        raise ValueError(f"mask_T: on {mask_T.device}, but logits_TE is on {logits_TE.device}")


def route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor,
    top_k: int,
    *,
    mask_T: torch.Tensor | None = None,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    capacity_factor: float | None = None,
) -> Routing:
    """Choose the `top_k` experts with the largest sigmoid(logits) + bias, of equal ones the first, and sort the slots.

    logits_TE: fp32, 1 to 1024 experts; bias_E: fp32, takes part in the choice only; top_k: 1 to 32, at most E. Weights
    are the scores without the bias, divided by their sum where `renormalize`, times `scaling_factor`; gradients flow
    from them to the logits. Tokens where bool mask_T is False get ids of -1, weights of 0 and no rows, and do not
    count. capacity_factor: see `sort_slots`. Raises ValueError naming the argument. noaux_tc of DeepSeek-V3 without
    groups, as Kimi-K3 has it.
    """
    check_logits(logits_TE, mask_T)
    E = logits_TE.shape[1]
    if bias_E.shape != (E,) or bias_E.dtype != torch.float32:
        raise ValueError(f"bias_E: expected float32 [{E}], got {bias_E.dtype} {list(bias_E.shape)}")
    if bias_E.device != logits_TE.device:
        raise ValueError(f"bias_E: on {bias_E.device}, but logits_TE is on {logits_TE.device}")
    if not 1 <= top_k <= min(32, E):
        raise ValueError(f"top_k: {top_k}, expected 1 to {min(32, E)}")
    if len(logits_TE) * top_k >= 2**31:
        raise ValueError(f"logits_TE: {len(logits_TE)} tokens, expected less than 2 ** 31 slots")
    check_capacity(capacity_factor)
    # The bias is not trained by gradients.
    ids_TS, weights_TS, _, cutoff_T, *rows = _route(
        logits_TE, bias_E.detach(), mask_T, top_k, renormalize, scaling_factor, capacity_factor
    )
    return Routing(ids_TS, weights_TS, cutoff_T, Rows(*rows))
