"""Small parts that every block uses: normalisation, the gated MLP, and parameters that stay fp32.

Legend: T tokens, D model width, E outputs of a matrix (experts of a router, heads of an indexer).
"""

from functools import partial

import torch
from torch import nn

from .configuration_latentmoe import LatentMoETextConfig
from .ops import glu, rms_norm
from .recompute import recomputed


class RMSNorm(nn.Module):
    """Root-mean-square norm: the normalised value is rounded to the input dtype before the weight multiplies it."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In fp32 inside; torch's own weight would multiply before the rounding.
        return self.weight * rms_norm(x, self.eps)


class MLP(nn.Module):
    """W_down(act(W_gate x, W_up x)): the dense feed-forward and the shared experts."""

    def __init__(self, hidden_size: int, intermediate_size: int, config: LatentMoETextConfig):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs, activate = (self.gate_proj(x), self.up_proj(x)), partial(glu, config=self.config)
        h = activate(*inputs)
        with recomputed(h, activate, *inputs):
            return self.down_proj(h)


class Float32Parameters(nn.Module):
    """A module whose parameters named in `float32_parameters` never go below fp32.

    `module.to(torch.bfloat16)` would round them, and rounded decay rates or router biases change the model.
    """

    float32_parameters: tuple[str, ...] = ()

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


class WideProduct(torch.autograd.Function):
    """x_TD @ weight_ED^T in fp32 (or wider), whatever the dtypes of both.

    The gradient of a bf16 x is rounded to bf16 anyway: it is taken from two bf16 parts of the output's gradient, which
    hold 16 of its bits, on tensor cores and not as a product in fp32.
    """

    @staticmethod
    def forward(ctx, x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        ctx.save_for_backward(x_TD if ctx.needs_input_grad[1] else None, weight_ED)
        ctx.dtype = x_TD.dtype
        # Autocast would round the products.
        with torch.autocast(x_TD.device.type, enabled=False):
            return x_TD.to(wide) @ weight_ED.to(wide).T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_TE: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        grad_TD = grad_ED = None
        with torch.autocast(grad_TE.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                if ctx.dtype == weight_ED.dtype == torch.bfloat16:
                    first_TE = grad_TE.bfloat16()
                    second_TE = (grad_TE - first_TE).bfloat16()
                    grad_TD = torch.cat([first_TE, second_TE], dim=1) @ torch.cat([weight_ED, weight_ED])
                else:
                    grad_TD = (grad_TE @ weight_ED.to(grad_TE.dtype)).to(ctx.dtype)
            if ctx.needs_input_grad[1]:
                grad_ED = (grad_TE.T @ x_TD.to(grad_TE.dtype)).to(weight_ED.dtype)
        return grad_TD, grad_ED
