"""Layers for `kernels.kernelize`: they use the parameters of the layer they replace."""

import torch
from torch import nn

from .attention import sparse_attention


class SparseLatentAttention(nn.Module):
    """Takes the forward of a layer with `scale`, `latent_dim` (the values' width) and `sinks` [N] fp32 or None.

    From q [T, N, L], latents [S, L] and selected keys [T, k] to (out [T, N, V], lse [T, N]): see `sparse_attention`.
    """

    has_backward = True
    can_torch_compile = True

    scale: float
    latent_dim: int
    sinks: torch.Tensor | None

    def forward(
        self, q_TNL: torch.Tensor, kv_SL: torch.Tensor, index_Tk: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sparse_attention(q_TNL, kv_SL, index_Tk, self.scale, self.latent_dim, self.sinks)
