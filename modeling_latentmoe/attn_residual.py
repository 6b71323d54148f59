"""Attention residuals: each sub-layer reads a learned mixture of earlier block outputs (Kimi-K3 report, block form).

Legend: B batch, T tokens, D model width.
"""

import torch
from torch import nn

from .layers import RMSNorm
from .ops import attn_residual


class ResidualProjection(nn.Linear):
    """Weight [1, D] that scores a source; its forward gives the row [D] in fp32 (or wider)."""

    def __init__(self, dim: int):
        super().__init__(dim, 1, bias=False)

    def forward(self) -> torch.Tensor:
        return self.weight[0].to(torch.promote_types(self.weight.dtype, torch.float32))


class ResidualNorm(RMSNorm):
    """Weight [D] of the norm before a score; its forward multiplies a score row [D] by it."""

    def forward(self, row_D: torch.Tensor) -> torch.Tensor:
        return self.weight.to(row_D.dtype) * row_D


def mix(
    sources: tuple[torch.Tensor, ...], proj: ResidualProjection, norm: ResidualNorm, kernels: str = "torch"
) -> torch.Tensor:
    """Mix the snapshots and the running stream (last) [B, T, D] into the input of a sub-layer.

    The product of both weights scores the un-rounded normalised sources, while the raw sources are what is mixed. A
    single source is returned as it is.
    """
    if len(sources) == 1:
        return sources[0]
    return attn_residual(sources, norm(proj()), norm.eps, kernels)
