"""Layers for `kernels.kernelize`: they use the parameters of the layer they replace."""

import torch
from torch import nn

from .gated_norm import gated_rms_norm


class GatedHeadNorm(nn.Module):
    """Takes the forward of a layer with `weight` [K] and `eps`: rms_norm(x) * weight * sigmoid(gate)."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps)
