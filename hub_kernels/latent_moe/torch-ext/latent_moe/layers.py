"""The layer that `kernels.kernelize` puts in place of a model's own.

Legend: T tokens, S slots per token, L latent width.
"""

from typing import Any

import torch
from torch import nn

from .experts import expert_mlp
from .reference import ExpertMatrices, LowRank
from .sorting import sort_slots


class RoutedExperts(nn.Module):
    """Takes the forward of a layer that holds stacked experts, float or packed.

    Such a layer has `gate_up_proj` and `down_proj` and, beside packed ones, `gate_up_scale` and `down_scale`; `owned`,
    the range of expert ids that it holds; `config`, which names the activation: `hidden_act` "situ" with
    `activation_situ_beta` and `activation_situ_linear_beta`, or "silu".
    """

    has_backward = True
    can_torch_compile = True

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    owned: range
    config: Any

    def forward(
        self,
        x_TL: torch.Tensor,
        ids_TS: torch.Tensor,
        weights_TS: torch.Tensor,
        adapters: dict[str, tuple[LowRank, ...]],
    ) -> torch.Tensor:
        gate_up, down = (
            ExpertMatrices(
                getattr(self, f"{stem}_proj"), getattr(self, f"{stem}_scale", None), tuple(adapters.get(stem, ()))
            )
            for stem in ("gate_up", "down")
        )
        situ = self.config.hidden_act == "situ"
        return expert_mlp(
            x_TL,
            sort_slots(ids_TS - self.owned.start, len(gate_up.weight)),
            weights_TS,
            gate_up,
            down,
            activation="situ" if situ else "silu",
            beta=self.config.activation_situ_beta if situ else None,
            linear_beta=self.config.activation_situ_linear_beta if situ else None,
        )
