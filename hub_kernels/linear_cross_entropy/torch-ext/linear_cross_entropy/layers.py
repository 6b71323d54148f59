"""The layer that `kernels.kernelize` puts in place of a model's own."""

import torch
from torch import nn

from .autograd import linear_cross_entropy


class LinearCrossEntropy(nn.Module):
    """Loss of every token under a frozen head; arguments and errors are those of `linear_cross_entropy`."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int = -100
    ) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, target, ignore_index=ignore_index)
