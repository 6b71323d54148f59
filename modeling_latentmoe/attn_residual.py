"""Attention residuals: each sub-layer reads a learned mixture of earlier block outputs (Kimi-K3 report, block form).

Legend: B batch, T tokens, D model width.
"""

import torch
from torch import nn

from .layers import RMSNorm
from .ops import attn_residual


def mix(sources: tuple[torch.Tensor, ...], proj: nn.Linear, norm: RMSNorm) -> torch.Tensor:
    """Mix the snapshots and the running stream (last) [B, T, D] into the input of a sub-layer.

    `proj` [1, D] and `norm` are read, not called: their product scores the un-rounded normalised sources, while the
    raw sources are what is mixed. A single source is returned as it is.
    """
    if len(sources) == 1:
        return sources[0]
    wide = torch.promote_types(norm.weight.dtype, torch.float32)
    score_D = norm.weight.to(wide) * proj.weight[0].to(wide)
    return attn_residual(sources, score_D, norm.eps)
