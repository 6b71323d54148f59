"""The definitions in plain torch; statistics run in `promote_types(dtype, float32)`, so float64 works too.

Legend: D model width, K head width; leading axes are free.
"""

from collections.abc import Sequence

import torch


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attn_residual(sources: Sequence[torch.Tensor], score_D: torch.Tensor, eps: float) -> torch.Tensor:
    """sum_j a_j V_j over sources V_j [..., D], where a = softmax_j(rms_norm(V_j) . score); the dtype of the sources.

    Block attention residuals of the Kimi-K3 report: what is normalised only chooses, the raw sources are mixed.
    """
    rows = [_wide(source) for source in sources]
    logits = [(row * score_D).sum(-1) * torch.rsqrt(row.square().mean(-1) + eps) for row in rows]
    weights = torch.stack(logits).softmax(0).unsqueeze(-1)
    mixed = weights[0] * rows[0]
    for weight, row in zip(weights[1:], rows[1:], strict=True):
        mixed = mixed + weight * row
    return mixed.to(sources[0].dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm(x) * weight * sigmoid(gate) over the last axis of x and gate [..., K]; the dtype of x."""
    row = _wide(x)
    normed = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    return (normed * _wide(weight_K) * torch.sigmoid(_wide(gate))).to(x.dtype)
