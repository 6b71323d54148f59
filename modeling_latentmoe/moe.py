"""Latent mixture of experts: router, stacked routed experts (float or MXFP4), latent projections, shared experts.

Legend: B batch, T tokens (of a row, or all valid ones), D model width, L latent width, F expert hidden width,
        E experts, S chosen experts per token, R rows at the experts held here (the tokens, unless an exchange
        brings others).
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from .configuration_latentmoe import MXFP4_GROUP, LatentMoETextConfig
from .expert_lora import LogicalShapes, unwrap_experts
from .layers import MLP, Float32Parameters, RMSNorm, WideProduct
from .mxfp4 import encode
from .ops import ExpertMatrices, LowRank, expert_mlp, route
from .recompute import recomputed


class Router(Float32Parameters):
    """Scores all experts in fp32 and chooses `num_experts_per_token` of them.

    `e_score_correction_bias` takes part in the choice only and is never trained by gradients.
    """

    float32_parameters: tuple[str, ...] = ("e_score_correction_bias",)

    def __init__(self, config: LatentMoETextConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(config.num_experts, dtype=torch.float32), requires_grad=False
        )

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, D] -> (logits_TE, ids_TS int64, weights_TS); logits and weights in fp32, or wider if x is."""
        logits_TE = WideProduct.apply(x_TD, self.weight)
        ids_TS, weights_TS = route(
            logits_TE,
            self.e_score_correction_bias,
            self.config.num_experts_per_token,
            activation=self.config.moe_router_activation_func,
            renormalize=self.config.moe_renormalize,
            scaling_factor=self.config.routed_scaling_factor,
            groups=self.config.num_expert_group,
            top_groups=self.config.topk_group,
            kernels=self.config.kernels,
        )
        return logits_TE, ids_TS, weights_TS


class Experts(LogicalShapes, nn.Module):
    """All routed experts of a layer, stacked: `gate_up_proj` [E, 2F, L] (gate rows first) and `down_proj` [E, L, F].

    With `config.packed_experts` both are frozen MXFP4 bytes, uint8 [..., in / 2], beside `gate_up_scale` and
    `down_scale`, uint8 [..., in / 32].

    `owned`: the ids of the experts that the stacks hold, all of them unless `restrict` was called. The others add
    zero to the result here; the ranks of expert parallelism hold them and the sum over ranks is the whole.
    """

    def __init__(self, config: LatentMoETextConfig):
        super().__init__()
        self.config = config
        experts, width, hidden = config.num_experts, config.expert_hidden_size, config.moe_intermediate_size
        self.owned = range(experts)
        self.logical_shapes = {
            "gate_up": torch.Size((experts, 2 * hidden, width)),
            "down": torch.Size((experts, width, hidden)),
        }
        for stem, shape in self.logical_shapes.items():
            if config.packed_experts:
                setattr(self, f"{stem}_proj", _empty_bytes(*shape[:2], shape[2] // 2))
                setattr(self, f"{stem}_scale", _empty_bytes(*shape[:2], shape[2] // MXFP4_GROUP))
            else:
                setattr(self, f"{stem}_proj", nn.Parameter(torch.empty(shape)))

    def restrict(self, owned: range) -> None:
        """Hold only the experts `owned`, a part of those held now; do this before anything refers to the parameters."""
        here = slice(owned.start - self.owned.start, owned.stop - self.owned.start)
        for stem, shape in self.logical_shapes.items():
            self.logical_shapes[stem] = torch.Size((len(owned), *shape[1:]))
        for name, param in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(param.detach()[here].clone(), requires_grad=param.requires_grad))
        self.owned = owned

    @torch.no_grad()
    def reset_parameters(self, std: float) -> None:
        """Normal weights of standard deviation `std`, rounded to MXFP4 when packed."""
        for stem, shape in self.logical_shapes.items():
            weight = getattr(self, f"{stem}_proj")
            if weight.is_floating_point():
                weight.normal_(std=std)
                continue
            for expert in range(shape[0]):
                packed, scale = encode(torch.randn(shape[1:], device=weight.device) * std)
                weight[expert] = packed
                getattr(self, f"{stem}_scale")[expert] = scale

    def _matrices(self, stem: str, adapters: dict[str, tuple[LowRank, ...]]) -> ExpertMatrices:
        scale = getattr(self, f"{stem}_scale", None)
        return ExpertMatrices(getattr(self, f"{stem}_proj"), scale, adapters.get(stem, ()))

    def forward(
        self,
        x_TL: torch.Tensor,
        ids_TS: torch.Tensor,
        weights_TS: torch.Tensor,
        adapters: dict[str, tuple[LowRank, ...]],
    ) -> torch.Tensor:
        """Weighted sum of the chosen experts that are held here, [T, L] in fp32, or wider if x is.

        adapters: low-rank terms of "gate_up" and "down".
        """
        gate_up, down = self._matrices("gate_up", adapters), self._matrices("down", adapters)
        return expert_mlp(x_TL, ids_TS - self.owned.start, weights_TS, gate_up, down, self.config)


def _empty_bytes(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)


class Dispatched(NamedTuple):
    """Rows that came to the experts held here: latents x_RL, ids_RS and weights_RS of their chosen experts.

    `plan` is what the exchange that made this needs to send the results back.
    """

    x_RL: torch.Tensor
    ids_RS: torch.Tensor
    weights_RS: torch.Tensor
    plan: Any = None


class Exchange(Protocol):
    """Brings tokens to the experts that they chose, and the results back."""

    def dispatch(self, x_TL: torch.Tensor, ids_TS: torch.Tensor, weights_TS: torch.Tensor) -> Dispatched:
        """The rows for the experts held here, of all tokens that chose one."""
        ...

    def combine(self, sum_RL: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Sums over the experts held here, in fp32 or wider -> sums over all chosen experts [T, L], in x's dtype."""
        ...


class LocalExchange:
    """All experts are held here: nothing moves."""

    def dispatch(self, x_TL: torch.Tensor, ids_TS: torch.Tensor, weights_TS: torch.Tensor) -> Dispatched:
        return Dispatched(x_TL, ids_TS, weights_TS)

    def combine(self, sum_RL: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        return sum_RL.to(dispatched.x_RL.dtype)


class LatentMoE(nn.Module):
    """Router, experts in a latent space of width L, norm of their sum, and shared experts at model width.

    y = W_up norm(sum_j w_j expert_j(W_down x)) + shared(x). Without `routed_expert_hidden_size` the experts
    work at model width and the latent projections and norm do not exist; without `num_shared_experts`,
    neither does `shared`.

    `exchange`: how tokens meet their experts; exchanged for another one where experts are held elsewhere too.
    """

    def __init__(self, config: LatentMoETextConfig):
        super().__init__()
        self.config = config
        self.exchange: Exchange = LocalExchange()
        width, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config)
        self.experts = Experts(config)
        self.routed_expert_down_proj = self.routed_expert_norm = self.routed_expert_up_proj = None
        if latent:
            self.routed_expert_down_proj = nn.Linear(width, latent, bias=False)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps)
            self.routed_expert_up_proj = nn.Linear(latent, width, bias=False)
        self.shared_experts = None
        if config.num_shared_experts:
            self.shared_experts = MLP(width, config.num_shared_experts * config.moe_intermediate_size, config)

    def forward(
        self, x_BTD: torch.Tensor, valid_BT: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, T, D] -> (y_BTD, router logits [B * T, E] fp32, load_E int64: rows sent to each expert).

        Tokens where bool valid_BT is False are not routed and not counted; their outputs and logits are zero.
        """
        x_TD = x_BTD.flatten(0, 1) if valid_BT is None else x_BTD[valid_BT]
        logits_TE, ids_TS, weights_TS = self.gate(x_TD)
        # Not bincount, for which the host waits.
        load_E = ids_TS.new_zeros(self.config.num_experts)
        load_E.scatter_add_(0, ids_TS.flatten(), torch.ones_like(ids_TS).flatten())
        x_TL = x_TD if self.routed_expert_down_proj is None else self.routed_expert_down_proj(x_TD)
        dispatched = self.exchange.dispatch(x_TL, ids_TS, weights_TS)
        # Between dispatch and the experts, because the tokens may still be on their way to them.
        shared_TD = None if self.shared_experts is None else self.shared_experts(x_TD)
        y_TD = self._routed(dispatched)
        if shared_TD is not None:
            y_TD = y_TD + shared_TD
        if valid_BT is None:
            return y_TD.view_as(x_BTD), logits_TE, load_E
        valid_T1 = valid_BT.flatten().unsqueeze(-1)
        y_BTD = y_TD.new_zeros(x_BTD.shape).masked_scatter(valid_BT.unsqueeze(-1), y_TD)
        all_logits = logits_TE.new_zeros(valid_T1.shape[0], logits_TE.shape[1]).masked_scatter(valid_T1, logits_TE)
        return y_BTD, all_logits, load_E

    def _routed(self, dispatched: Dispatched) -> torch.Tensor:
        # PEFT may have wrapped the experts: its factors go to the grouped product, its own forward does not run.
        experts, adapters = unwrap_experts(self.experts, Experts)
        sum_RL = experts(dispatched.x_RL, dispatched.ids_RS, dispatched.weights_RS, adapters)
        sum_TL = self.exchange.combine(sum_RL, dispatched)
        if self.routed_expert_norm is None:
            return sum_TL if self.routed_expert_up_proj is None else self.routed_expert_up_proj(sum_TL)
        normed_TL = self.routed_expert_norm(sum_TL)
        with recomputed(normed_TL, self.routed_expert_norm, sum_TL):
            return self.routed_expert_up_proj(normed_TL)
