"""Layers for `kernels.kernelize`: they use the parameters of the layer they replace."""

import torch
from torch import nn

from .update import add_low_rank


class LowRankUpdate(nn.Module):
    """Takes the forward of a layer with `a` [r, I], `b` [O, r] and `scaling`: y + scaling * (x a^T) b^T."""

    has_backward = True
    can_torch_compile = True

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return add_low_rank(y, x, self.a, self.b, self.scaling)
