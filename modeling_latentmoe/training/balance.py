"""Even loads of the routed experts: an auxiliary loss, or Quantile Balancing of the routers' selection biases.

Both work on the router logits that the model returns with `output_router_logits=True`, outside of the model: a layer
that is recomputed in the backward pass counts once, and evaluation, which does not call them, changes nothing.

Legend: M MoE layers, T tokens (rows of the logits, padding included), E experts, k chosen experts per token,
        H bins of a histogram.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from modeling_latentmoe.training.router_bias import full_bias, routers, set_bias

BINS = 1000


class Balancing(Protocol):
    """What a training loop does for even loads."""

    def observe(self, router_logits: Sequence[Tensor], valid_T: Tensor | None = None) -> Tensor:
        """See a micro-batch, logits [T, E] of every MoE layer, valid_T False at padding; returns a loss, summed over
        its tokens, to be added to theirs."""
        ...

    def update(self, load_ME: Tensor) -> None:
        """End a step in which all processes together sent load_ME to the experts; every process calls it."""
        ...

    def forget(self) -> None:
        """What was seen since the last update was of a step that is done again."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a later step depends on, the same on every process, for `load`."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state`."""
        ...

    def biases(self) -> dict[str, Tensor]:
        """What was learned for the routers, for `router_bias.set_biases`."""
        ...


class AuxiliaryLoss:
    """`auxiliary_loss` times a coefficient, with the shares of the step before."""

    def __init__(self, config: PreTrainedConfig, coefficient: float) -> None:
        """config: of the text model."""
        if not config.num_experts:
            raise ValueError("--balance auxiliary: the model has no routed experts (num_experts in its config)")
        self.config, self.coefficient = config, coefficient
        layers = sum(map(config.is_moe_layer, range(config.num_hidden_layers)))
        self.shares_ME = torch.full((layers, config.num_experts), 1 / config.num_experts)

    def observe(self, router_logits: Sequence[Tensor], valid_T: Tensor | None = None) -> Tensor:
        return self.coefficient * auxiliary_loss(router_logits, self.shares_ME, self.config, valid_T)

    def update(self, load_ME: Tensor) -> None:
        self.shares_ME = expert_shares(load_ME)

    def forget(self) -> None:
        """Nothing was kept."""

    def state(self) -> dict[str, Tensor]:
        return {"shares": self.shares_ME}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.shares_ME = state["shares"]

    def biases(self) -> dict[str, Tensor]:
        return {}


def expert_shares(load_ME: Tensor) -> Tensor:
    """The share of a layer's assignments that each expert got, fp32 [M, E]; all the same where there were none.

    load_ME: assignments of all processes together, int64.
    """
    total_M1 = load_ME.sum(-1, keepdim=True)
    shares_ME = (load_ME.double() / total_M1.clamp(min=1)).float()
    return torch.where(total_M1 > 0, shares_ME, 1 / load_ME.shape[-1])


def auxiliary_loss(
    router_logits: Sequence[Tensor],
    shares_ME: Tensor,
    config: PreTrainedConfig,
    valid_T: Tensor | None = None,
) -> Tensor:
    """Load-balancing loss of a micro-batch, summed over its tokens: mean over layers of E * sum_e f_e p_te.

    p_te are a token's scores, divided by their sum; f_e the shares of all processes' assignments in the PREVIOUS
    step, a constant (`expert_shares`; uniform in the first step, where the loss is 1 per token and has no gradient).
    The shares of the step itself are known only after its last micro-batch, and with those of each micro-batch the
    loss would depend on how tokens are spread over micro-batches and processes. This one is a sum over tokens: the
    sum over all processes and micro-batches, divided by the number of all their tokens, is the same however they
    are laid out, and the rule of loss.py holds for it.

    router_logits: [T, E] of every MoE layer. valid_T: False at padding, None where there is none.
    config: of the text model, its `moe_router_activation_func` is "sigmoid" or "softmax".
    """
    total = router_logits[0].new_zeros(())
    for logits_TE, share_E in zip(router_logits, shares_ME.to(router_logits[0]), strict=True):
        logits_TE = logits_TE if valid_T is None else logits_TE[valid_T]
        # Sigmoids divided by their sum, from their logarithms: all of them may be too small for fp32.
        log_score_TE = F.logsigmoid(logits_TE) if config.moe_router_activation_func == "sigmoid" else logits_TE
        total = total + (log_score_TE.softmax(-1) * share_E).sum()
    return total * shares_ME.shape[1] / len(router_logits)


class QuantileBalancing:
    """Sets the selection bias of every expert, once a step, to where a share k / E of all tokens would choose it.

    Token t chooses expert e if its score s_te plus the bias b_e is above what the best expert that it does not choose
    has, c_t. The bias that e needs to be chosen by t is therefore c_t - s_te, and the new bias is the k / E quantile of
    it over all tokens of the step, on all processes; then the mean over the experts is taken off, which changes no
    choice. The cutoffs c_t move with the biases, so even loads take a few steps.

        balancing = QuantileBalancing(base)                             # after the model is sharded and on its device
        balancing.observe(output.router_logits, valid_T)                # every micro-batch of training
        balancing.update(load_ME)                                       # after the step; a collective

    The tokens are not kept but counted, in BINS bins between the smallest and largest bias that can be needed: counts
    int32 [M, E, BINS] (a step has less than 2 billion tokens), and a quantile is exact to the width of a bin, (2 +
    largest - smallest bias) / BINS. Every process holds all counts and sums them with the others once a step: 330 MB
    for the 92 layers and 896 experts of the released model. `observe` needs memory for a few copies of one layer's
    logits, one of them in int64.

    model: the base model, see `router_bias.routers`. Biases stay parameters without gradient, and the same fp32 values
    on every process. Raises ValueError for a model whose routers choose in another way.
    """

    def __init__(self, model: nn.Module) -> None:
        config = model.config.get_text_config()
        check_router(config)
        self.routers = routers(model)
        self.top_k = config.num_experts_per_token
        self._read()

    @torch.no_grad()
    def observe(self, router_logits: Sequence[Tensor], valid_T: Tensor | None = None) -> Tensor:
        """Count the tokens of a micro-batch: logits [T, E] of every MoE layer; valid_T False at padding. No loss."""
        for logits_TE, bias_E, counts_EH in zip(router_logits, self.bias_ME, self.counts_MEH, strict=True):
            score_TE = (logits_TE if valid_T is None else logits_TE[valid_T]).sigmoid()
            cutoff_T1 = (score_TE + bias_E).topk(self.top_k + 1, dim=-1).values[:, -1:]
            low, width = bin_range(bias_E)
            bin_TE = ((cutoff_T1 - score_TE - low) / width).long().clamp_(0, BINS - 1)
            one = counts_EH.new_ones(())
            counts_EH.scatter_add_(1, bin_TE.T, one.expand(bin_TE.T.shape))
        return router_logits[0].new_zeros(())

    @torch.no_grad()
    def update(self, load_ME: Tensor) -> None:
        """Give every router its new bias, from all that was observed on all processes since the last update.

        A collective: every process calls it once a step, those that observed nothing too.
        """
        if dist.is_initialized():
            dist.all_reduce(self.counts_MEH)
        # in float64, from integers: the same bits on every process
        for bias_E, counts_EH, router in zip(self.bias_ME, self.counts_MEH, self.routers.values(), strict=True):
            new_E = solve(counts_EH, *bin_range(bias_E), self.top_k)
            bias_E.copy_(new_E - new_E.mean())
            set_bias(router, bias_E)
        self.counts_MEH.zero_()

    def forget(self) -> None:
        self.counts_MEH.zero_()

    def biases(self) -> dict[str, Tensor]:
        """A copy of all biases, fp32 [E] by their names in a checkpoint."""
        return {name: bias_E.cpu().clone() for name, bias_E in zip(self.routers, self.bias_ME, strict=True)}

    def state(self) -> dict[str, Tensor]:
        return self.biases()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from these biases, in the model too; what was observed before is forgotten."""
        for name, router in self.routers.items():
            set_bias(router, state[name])
        self._read()

    def _read(self) -> None:
        self.bias_ME = torch.stack([full_bias(router) for router in self.routers.values()])
        self.counts_MEH = torch.zeros(*self.bias_ME.shape, BINS, dtype=torch.int32, device=self.bias_ME.device)


def check_router(config: PreTrainedConfig) -> None:
    """ValueError unless Quantile Balancing is defined for the routers of a text model of this config."""
    if not config.num_experts:
        raise ValueError("--balance quantile: the model has no routed experts (num_experts in its config)")
    if config.moe_router_activation_func != "sigmoid":
        raise ValueError(
            f"--balance quantile needs sigmoid scores, but moe_router_activation_func is "
            f"{config.moe_router_activation_func} in the model's config"
        )
    if config.num_expert_group != 1:
        raise ValueError(
            f"--balance quantile needs experts without groups, but num_expert_group is {config.num_expert_group} in "
            "the model's config"
        )
    if config.num_experts_per_token == config.num_experts:
        raise ValueError(
            f"--balance quantile: every token goes to all experts, num_experts_per_token and num_experts are both "
            f"{config.num_experts} in the model's config"
        )


def bin_range(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Lower end of the first bin and width of the bins, for the bias that experts may need where they have bias_E.

    A cutoff lies between the smallest bias and the largest one plus 1, a score between 0 and 1.
    """
    low, high = bias_E.amin() - 1, bias_E.amax() + 1
    return low, (high - low) / BINS


def solve(counts_EH: Tensor, low: Tensor, width: Tensor, top_k: int) -> Tensor:
    """The quantiles at top_k / E, float64 [E], of what was counted in bins of `width` from `low` upwards.

    Every expert has the same number of counts, at least one. Inside a bin they are taken to be spread evenly.
    """
    below_EH = counts_EH.cumsum(-1).double()
    wanted_E1 = below_EH[:, -1:] * top_k / len(counts_EH)
    assert (wanted_E1 > 0).all(), "update without any token observed"
    bin_E1 = (below_EH < wanted_E1.ceil()).sum(-1, keepdim=True)
    inside_E1 = counts_EH.gather(-1, bin_E1)
    fraction_E1 = (wanted_E1 - (below_EH.gather(-1, bin_E1) - inside_E1)) / inside_E1
    return (low.double() + (bin_E1 + fraction_E1) * width.double()).squeeze(-1)
