"""Layers for `kernels.kernelize`: they use the parameters of the layer they replace.

Legend: B batch, T tokens, M tokens of all documents in order, H heads, K key width, V value width, D documents,
        W convolution width, P channels.
"""

import torch
from torch import nn

from .chunk import chunk_kda
from .conv import short_conv


class ShortConvolution(nn.Module):
    """Takes the forward of a layer with `weight` [P, 1, W]: causal depthwise convolution of [M, P], and SiLU."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, tail: torch.Tensor | None = None
    ) -> torch.Tensor:
        return short_conv((x,), (self.weight.squeeze(1),), cu_seqlens, None if tail is None else (tail,))[0]


class KimiDeltaRule(nn.Module):
    """Takes the forward of a layer with `A_log` [H or more], `dt_bias` [H * K] and `gate_lower_bound`.

    From convolved q, k, v, raw decay inputs f and beta logits to (o [B, T, H, V], final states or None).
    """

    has_backward = True
    can_torch_compile = True

    A_log: torch.Tensor
    dt_bias: torch.Tensor
    gate_lower_bound: float | None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        f: torch.Tensor,
        beta: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        heads, width = q.shape[-2:]
        return chunk_kda(
            q,
            k,
            v,
            f,
            beta,
            # Released checkpoints pad it with heads that do not exist.
            self.A_log[:heads],
            self.dt_bias.view(heads, width),
            lower_bound=self.gate_lower_bound,
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
            output_final_state=output_final_state,
        )
