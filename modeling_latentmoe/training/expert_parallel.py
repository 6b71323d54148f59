"""Expert parallelism: each rank of a group holds a share of the experts of every layer, and tokens travel to them.

Legend: T tokens of this rank, S chosen experts of a token, E experts of the layer, N ranks of the group, L latent
        width, R rows: one per token and rank that holds an expert which the token chose.

A row carries a token's latents and the ids and routing weights of its experts; the rank that gets it sends back the
weighted sum over the experts it holds. Every layer takes, on every rank, the same collectives: one for the counts and
one for the rows forward, one for the sums; in the backward pass one for their gradients and one for those of the rows.
That also holds for a rank without tokens and one whose loss depends on none of its rows, as long as all ranks call the
model, and then backward, equally often. A recomputed forward takes those of a forward again, or none if their results
were saved (`RECEIVED`). In `generate`, ranks end their answers at different lengths: `synced_gpus=True` keeps them all
stepping until the last one is done.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from modeling_latentmoe.moe import Dispatched
from modeling_latentmoe.training.mesh import owned_experts


def expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    capacity_factor: float | None = None,
    partial_dtype: torch.dtype | None = None,
) -> None:
    """Let the tokens of all MoE layers of `model` travel over the "ep" axis of `mesh`, whose ranks hold the experts.

    capacity_factor: a rank sends an expert at most this many times the tokens it would get if all got equally many;
    where gradients are recorded the rest is dropped, see `count_drops`. partial_dtype: of the sums that travel back, by
    default as they are summed, fp32 or wider. Raises ValueError unless `model` was loaded with this rank's share of the
    experts.
    """
    group, ranks, rank = mesh.get_group("ep"), mesh["ep"].size(), mesh.get_local_rank("ep")
    if capacity_factor is not None and not capacity_factor > 0:
        raise ValueError(f"--capacity_factor {capacity_factor} must be above 0")
    for name, module in model.named_modules():
        # by attributes: the classes may come from the installed package or from remote code
        if "logical_shapes" in module.__dict__:
            share = owned_experts(rank, ranks, module.config.num_experts)
            if module.owned != share:
                raise ValueError(
                    f"{name} holds experts {module.owned.start} to {module.owned.stop - 1}, but rank {rank} of "
                    f"--ep {ranks} holds {share.start} to {share.stop - 1}: load the model with this rank and degree"
                )
        elif "exchange" in module.__dict__ and (ranks > 1 or capacity_factor is not None):
            module.exchange = AllToAll(group, module.config.num_experts, capacity_factor, partial_dtype)


def capacity(assignments: int, experts: int, factor: float) -> int:
    """How many of a rank's `assignments` (token and chosen expert) one expert takes."""
    return math.ceil(factor * assignments / experts)


def count_drops(load_LE: Tensor, factor: float) -> int:
    """Assignments that one forward of this rank dropped, from its expert loads [MoE layers, E]."""
    limits = [capacity(total, load_LE.shape[1], factor) for total in load_LE.sum(1).tolist()]
    limit_L1 = torch.tensor(limits, dtype=load_LE.dtype, device=load_LE.device).unsqueeze(1)
    return int((load_LE - limit_L1).clamp(min=0).sum())


def drop_excess(ids_TS: Tensor, experts: int, factor: float) -> Tensor:
    """`ids_TS` with -1 where an expert has more tokens than its capacity: earlier tokens come first.

    Depends on the ids alone, which are saved and not recomputed: a weight, off by a rounding, could decide otherwise.
    """
    ids_A = ids_TS.flatten()
    order_A = ids_A.argsort(stable=True)
    first_E = torch.bincount(ids_A, minlength=experts).cumsum(0).roll(1)
    first_E[0] = 0
    place_A = torch.arange(len(ids_A), device=ids_A.device) - first_E[ids_A[order_A]]
    excess_A = order_A[place_A >= capacity(len(ids_A), experts, factor)]
    return ids_A.index_fill(0, excess_A, -1).view_as(ids_TS)


# The collectives are operators, so that activation checkpointing can keep what they return. The sums are taken inside:
# a token's is one row, what it is summed from is a row of every rank that holds an expert of the token.


@torch.library.custom_op("latentmoe::exchange_counts", mutates_args=())
def exchange_counts(sent_N2: Tensor, group_name: str) -> Tensor:
    """A row for every rank -> the rows that all ranks have for this one."""
    received_N2 = torch.empty_like(sent_N2)
    dist.all_to_all_single(received_N2, sent_N2, group=_resolve_process_group(group_name))
    return received_N2


@torch.library.custom_op("latentmoe::exchange_rows", mutates_args=())
def exchange_rows(values_R: list[Tensor], sent: list[int], received: list[int], group_name: str) -> list[Tensor]:
    """Matrices with `sum(sent)` rows, sorted by destination -> their rows from all ranks. One collective, of bytes."""
    packed = torch.cat([value.contiguous().view(torch.uint8) for value in values_R], dim=1)
    result = packed.new_empty(sum(received), packed.shape[1])
    dist.all_to_all_single(result, packed, received, sent, group=_resolve_process_group(group_name))
    widths = [value.shape[1] * value.itemsize for value in values_R]
    # Copies: only those are sure to be aligned.
    parts = [part.clone(memory_format=torch.contiguous_format) for part in result.split(widths, dim=1)]
    return [part.view(value.dtype) for part, value in zip(parts, values_R, strict=True)]


@torch.library.custom_op("latentmoe::return_sums", mutates_args=())
def return_sums(
    values_R: list[Tensor], sent: list[int], received: list[int], group_name: str, token_R: Tensor, tokens: int
) -> list[Tensor]:
    """`exchange_rows`, then sums over the rows of each token, in fp32 or wider. token_R: of the rows that come.

    In the order of ranks, on every device: a sum does not change from run to run.
    """
    sums = []
    for rows in exchange_rows(values_R, sent, received, group_name):
        sum_T = rows.new_zeros(tokens, rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
        # a token has at most one row in each part
        for token, part in zip(token_R.split(received), rows.split(received), strict=True):
            sum_T.index_add_(0, token, part.to(sum_T.dtype))
        sums.append(sum_T)
    return sums


# What a recomputed forward needs of other ranks: with these saved it does not communicate.
RECEIVED = [
    torch.ops.latentmoe.exchange_counts.default,
    torch.ops.latentmoe.exchange_rows.default,
    torch.ops.latentmoe.return_sums.default,
]


class Plan(NamedTuple):
    """Which rows this rank sends and gets: sorted by the other rank, those of one rank in the order of its tokens.

    token_R: the token of every row that is sent; sent, received: number of rows, by rank; tokens: T.
    """

    group_name: str
    token_R: Tensor
    sent: list[int]
    received: list[int]
    tokens: int

    def there(self, *values_T: Tensor) -> list[Tensor]:
        """Values of this rank's tokens -> values of the rows that this rank gets."""
        return exchange_rows([value[self.token_R] for value in values_T], self.sent, self.received, self.group_name)

    def back(self, *values_R: Tensor) -> list[Tensor]:
        """Values of the rows that this rank got -> sums over the rows of each of its tokens, in fp32 or wider."""
        return return_sums(list(values_R), self.received, self.sent, self.group_name, self.token_R, self.tokens)


class Dispatch(torch.autograd.Function):
    """Tokens to rows at their experts. `anchor` requires grad, so that backward, a collective, runs on every rank.

    Without it a rank whose tokens have no gradient, such as one without images, would let the others wait.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TL: Tensor, weights_TS: Tensor, ids_TS: Tensor, anchor: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.plan, ctx.dtypes = plan, (x_TL.dtype, weights_TS.dtype)
        x_RL, weights_RS, ids_RS = plan.there(x_TL, weights_TS, ids_TS)
        ctx.mark_non_differentiable(ids_RS)
        return x_RL, weights_RS, ids_RS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RL: Tensor, grad_RS: Tensor, _: Tensor):
        grads = ctx.plan.back(grad_RL, grad_RS)
        grad_TL, grad_TS = (grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True))
        return grad_TL, grad_TS, None, None, None


class Combine(torch.autograd.Function):
    """Sums at the experts to sums per token, which are rounded to `dtype` once. They travel in `partial_dtype`."""

    @staticmethod
    def forward(ctx: Any, sum_RL: Tensor, plan: Plan, dtype: torch.dtype, partial_dtype: torch.dtype) -> Tensor:
        ctx.plan, ctx.dtype = plan, sum_RL.dtype
        (sum_TL,) = plan.back(sum_RL.to(partial_dtype))
        return sum_TL.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TL: Tensor):
        (grad_RL,) = ctx.plan.there(grad_TL)
        return grad_RL.to(ctx.dtype), None, None, None


class AllToAll:
    """The exchange (see moe.py) over a group whose ranks hold equal shares of the experts, in order."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        experts: int,
        capacity_factor: float | None = None,
        partial_dtype: torch.dtype | None = None,
    ) -> None:
        self.group, self.experts = group, experts
        self.capacity_factor, self.partial_dtype = capacity_factor, partial_dtype
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def dispatch(self, x_TL: Tensor, ids_TS: Tensor, weights_TS: Tensor) -> Dispatched:
        """The rows of all ranks' tokens that chose an expert of this rank, in the order of ranks.

        Of a row's slots only those for experts of this rank remain, and padding where it has fewer than others.
        """
        # not in evaluation: there all tokens count, and a token's answer must not depend on its neighbours
        if self.capacity_factor is not None and torch.is_grad_enabled():
            ids_TS = drop_excess(ids_TS, self.experts, self.capacity_factor)
        plan, slots = self._plan(ids_TS)
        anchor = x_TL.new_empty(0, requires_grad=torch.is_grad_enabled())
        x_RL, weights_RS, ids_RS = Dispatch.apply(x_TL, weights_TS, ids_TS, anchor, plan)
        owned = owned_experts(self.rank, self.ranks, self.experts)
        elsewhere_RS = (ids_RS < owned.start) | (ids_RS >= owned.stop)
        order_RS = elsewhere_RS.int().argsort(dim=1, stable=True)[:, :slots]
        return Dispatched(x_RL, ids_RS.gather(1, order_RS), weights_RS.gather(1, order_RS), plan)

    def combine(self, sum_RL: Tensor, dispatched: Dispatched) -> Tensor:
        dtype, partial_dtype = dispatched.x_RL.dtype, self.partial_dtype or sum_RL.dtype
        return Combine.apply(sum_RL, dispatched.plan, dtype, partial_dtype)

    @torch.no_grad()
    def _plan(self, ids_TS: Tensor) -> tuple[Plan, int]:
        """The plan of these choices, and the most experts of this rank that one row chose, at least 1.

        Ids below 0 are dropped.
        """
        share = self.experts // self.ranks
        rank_TS = torch.where(ids_TS < 0, self.ranks, ids_TS // share)
        chosen_TN = ids_TS.new_zeros(len(ids_TS), self.ranks + 1).scatter_add_(1, rank_TS, torch.ones_like(ids_TS))
        chosen_NT = chosen_TN[:, : self.ranks].T
        token_R = (chosen_NT > 0).nonzero()[:, 1]
        most_N = torch.cat([chosen_NT, chosen_NT.new_zeros(self.ranks, 1)], dim=1).amax(1)
        sent_N2 = torch.stack([(chosen_NT > 0).sum(1), most_N], dim=1)
        received_N2 = exchange_counts(sent_N2, self.group.group_name)
        sent, received, slots = torch.stack([sent_N2[:, 0], *received_N2.unbind(1)]).tolist()
        return Plan(self.group.group_name, token_R, sent, received, len(ids_TS)), max(1, *slots)
