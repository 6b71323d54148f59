"""Small parts that every block uses: normalisation, the gated MLP, and parameters that stay fp32.

Legend: D model width, F hidden width.
"""

from typing import ClassVar

import torch
from torch import nn

from .configuration_latentmoe import LatentMoETextConfig
from .ops import glu


class RMSNorm(nn.Module):
    """Root-mean-square norm: the normalised value is rounded to the input dtype before the weight multiplies it."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.to(torch.promote_types(x.dtype, torch.float32))
        y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class MLP(nn.Module):
    """W_down(act(W_gate x, W_up x)): the dense feed-forward and the shared experts."""

    def __init__(self, hidden_size: int, intermediate_size: int, config: LatentMoETextConfig):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x), self.config))


class Float32Parameters(nn.Module):
    """A module whose parameters named in `float32_parameters` never go below fp32.

    `module.to(torch.bfloat16)` would round them, and rounded decay rates or router biases change the model.
    """

    float32_parameters: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn, recurse=True):
        # `.data` is an alias of the values before the conversion, which replaces the parameter's own in place.
        before = {name: self._parameters[name].data for name in self.float32_parameters}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._parameters[name]
            wide = torch.promote_types(new.dtype, torch.float32)
            if new.dtype != wide:
                exact = new.data.to(wide) if old.is_meta or new.is_meta else old.to(device=new.device, dtype=wide)
                new.data = exact
        return self
