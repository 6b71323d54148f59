"""What the kernels compute, as plain torch: one token after the other, differentiable, and exact in float64.

Statistics, states and sums are kept in `promote_types(dtype, float32)`; results are rounded once.

Legend: B batch, T tokens, H heads, K key width, V value width, D documents, M tokens of all documents in order,
        W convolution width, P channels of one convolved stream (H * K or H * V), N rows of a pool of states.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

L2_EPS = 1e-6


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _l2_normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _log_decay(f: torch.Tensor, A_log_H: torch.Tensor, dt_bias_HK: torch.Tensor, lower_bound: float | None):
    """lower_bound * sigmoid(exp(A_log) (f + dt_bias)), or with None -exp(A_log) * softplus(f + dt_bias)."""
    rate_H1, z = _wide(A_log_H).exp().unsqueeze(-1), f + _wide(dt_bias_HK)
    if lower_bound is None:
        return -rate_H1 * F.softplus(z)
    return lower_bound * torch.sigmoid(rate_H1 * z)


def _step(q, k, v, g, beta, state):
    """One token of [B, H, ...] in wide dtypes, g being the log decay and beta in (0, 1).

    S <- diag(exp g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.   Returns (o, new state).
    """
    q, k = _l2_normalised(q) * q.shape[-1] ** -0.5, _l2_normalised(k)
    state = state * g.exp().unsqueeze(-1)
    read = (state * k.unsqueeze(-1)).sum(-2)
    state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * (v - read)).unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state


def step_kda_reference(q, k, v, f, beta, A_log, dt_bias, state, lower_bound: float | None):
    """One token: q, k, f [B, H, K], v [B, H, V], logits beta [B, H], state [B, H, K, V] -> (o [B, H, V], new state)."""
    q32, k32, v32, f32, beta32 = (_wide(x) for x in (q, k, v, f, beta))
    g = _log_decay(f32, A_log, dt_bias, lower_bound)
    o, state = _step(q32, k32, v32, g, beta32.sigmoid(), state.to(g.dtype))
    return o.to(v.dtype), state


def chunk_kda_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    lower_bound: float | None,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """KDA over whole documents, token by token.

    q, k, f [B, T, H, K] and v [B, T, H, V] are raw (q and k are l2-normalised here, f becomes the log decay), beta
    [B, T, H] are logits; A_log [H], dt_bias [H, K]. With `cu_seqlens` [D + 1] (B == 1) document d is tokens
    cu_seqlens[d] to cu_seqlens[d + 1], otherwise each batch row is one. States are [D, H, K, V].
    Returns (o [B, T, H, V] in v's dtype, final states in at least fp32, or None); an empty document keeps its state.
    """
    q32, k32, v32, f32, beta32 = (_wide(x) for x in (q, k, v, f, beta))
    g = _log_decay(f32, A_log, dt_bias, lower_bound)
    streams = (q32, k32, v32, g, beta32.sigmoid())
    if cu_seqlens is None:
        documents = [tuple(x[b : b + 1] for x in streams) for b in range(len(q))]
    else:
        if len(q) != 1:
            raise ValueError(f"cu_seqlens needs a batch of one row; q has {len(q)}")
        bounds = cu_seqlens.tolist()
        documents = [tuple(x[:, a:b] for x in streams) for a, b in pairwise(bounds)]
    if initial_state is None:
        state_DHKV = g.new_zeros(len(documents), g.shape[-2], g.shape[-1], v.shape[-1])
    else:
        state_DHKV = initial_state.to(g.dtype)

    outputs, finals = [], []
    for document, state in zip(documents, state_DHKV.split(1), strict=True):
        for token in zip(*(x.unbind(1) for x in document), strict=True):
            o, state = _step(*token, state)
            outputs.append(o)
        finals.append(state)
    o = torch.stack(outputs).view(*v.shape) if outputs else torch.zeros_like(v32)
    return o.to(v.dtype), torch.cat(finals) if output_final_state else None


def short_conv_reference(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor | None = None,
    tails: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """SiLU of a causal depthwise convolution of each stream x [M, P] with its weight [P, W] (tap W - 1 is now).

    Taps before the start of document d take tails[stream][d] [W - 1, P], the raw inputs before it, or zeros.
    """
    M = len(xs[0])
    bounds = [0, M] if cu_seqlens is None else cu_seqlens.tolist()
    outputs = []
    for stream, (x_MP, w_PW) in enumerate(zip(xs, weights, strict=True)):
        P, W = w_PW.shape
        wide = torch.promote_types(x_MP.dtype, torch.float32)
        parts = []
        for d, (a, b) in enumerate(pairwise(bounds)):
            tail = x_MP.new_zeros(W - 1, P) if tails is None else tails[stream][d]
            padded = torch.cat([tail.to(wide), x_MP[a:b].to(wide)])
            parts.append(sum(padded[j : j + b - a] * w_PW[:, j] for j in range(W)))
        outputs.append(F.silu(torch.cat(parts)).to(x_MP.dtype))
    return tuple(outputs)


def decode_kda_reference(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    conv_states: Sequence[torch.Tensor],
    f: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    lower_bound: float | None,
    eps: float,
    slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """One token per sequence from raw projections to the gated, normalised output of the heads.

    xs are q, k [B, H * K] and v [B, H * V] before their convolutions (weights [P, W]), conv_states [N, W - 1, P] their
    last inputs, state [N, H, K, V]; sequence b uses row slots[b], or row b. f [B, H, K], gate [B, H, V], logits beta
    [B, H]. Returns (o [B, H * V], new conv_states, new state); nothing is changed in place.
    """
    B, H, _ = f.shape
    rows = torch.arange(B, device=f.device) if slots is None else slots.long()
    wide = torch.promote_types(f.dtype, torch.float32)
    convolved, new_conv_states = [], []
    for x_BP, w_PW, pool_NRP in zip(xs, weights, conv_states, strict=True):
        window_BWP = torch.cat([pool_NRP[rows], x_BP.unsqueeze(1).to(pool_NRP.dtype)], dim=1)
        y_BP = F.silu((window_BWP.to(wide) * w_PW.t()).sum(1))
        convolved.append(y_BP.unflatten(-1, (H, -1)))
        new_conv_states.append(pool_NRP.index_copy(0, rows, window_BWP[:, 1:]))
    g = _log_decay(_wide(f), A_log, dt_bias, lower_bound)
    o, new = _step(*convolved, g, _wide(beta).sigmoid(), state[rows].to(wide))
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * norm_weight * torch.sigmoid(_wide(gate))
    return o.flatten(1).to(xs[2].dtype), tuple(new_conv_states), state.index_copy(0, rows, new.to(state.dtype))
