"""Expert parallelism: each rank of a group holds a share of the experts of every layer, and tokens travel to them.

Legend: T tokens of this rank, S chosen experts of a token, E experts of the layer, N ranks of the group, L latent
        width, C parts of the tokens, t tokens of a part, R rows: one per token and rank that holds an expert which the
        token chose. A assignments (token and chosen expert).

A row carries a token's latents and the ids and routing weights of its experts; the rank that gets it sends back the
weighted sum over the experts it holds. Every layer takes, on every rank, the same collectives: one for the counts, and
for each part of the tokens two for the rows forward and one for the sums; in the backward pass one for their gradients
and two for those of the rows. That also holds for a rank without tokens and one whose loss depends on none of its rows,
as long as all ranks call the model, and then backward, equally often. A recomputed forward takes those of a forward
again, or none if their results were saved (`RECEIVED`). In `generate`, ranks end their answers at different lengths:
`synced_gpus=True` keeps them all stepping until the last one is done.

The host waits for the device once a layer, for the counts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from modeling_latentmoe.moe import Dispatched
from modeling_latentmoe.training.journeys import Finish, Homeward, Outward, Start, StartAndFinish, make_anchor
from modeling_latentmoe.training.links import Direct, Nodes, Sizes, make_nodes
from modeling_latentmoe.training.mesh import owned_experts
from modeling_latentmoe.training.payload import Form
from modeling_latentmoe.training.transfers import (
    Plan,
    exchange_counts,
    finish_transfer,
    make_plan,
    number_of,
    start_transfer,
)


class Travel(NamedTuple):
    """How rows travel; all of it is off by default. The switches have the names of the fields, after "ep_".

    chunks: above 0, tokens travel in so many parts, one of them while the experts work on another. rows: form of the
    tokens' latents; sums: of the sums that travel back, by default as they are summed, fp32 or wider. Gradients travel
    as they are. node_size: so many ranks are a node, and rows go within nodes, then between them.
    """

    chunks: int = 0
    rows: Form | None = None
    sums: Form | None = None
    node_size: int = 0


PLAIN = Travel()
# What a recomputed forward needs of other ranks: with these saved it does not communicate.
RECEIVED = [exchange_counts, start_transfer, finish_transfer]


def check_travel(travel: Travel, ep_degree: int) -> None:
    """ValueError, which names the switch, for what cannot be with `ep_degree` ranks."""
    for name, value in travel._asdict().items():
        if value and ep_degree == 1:
            raise ValueError(f"--ep_{name} {value}: at --ep 1 nothing travels")
    if travel.chunks < 0:
        raise ValueError(f"--ep_chunks {travel.chunks} must be at least 0")
    if travel.rows == "bf16":
        raise ValueError("--ep_rows bf16: rows travel in the dtype of the model, choose fp8 or int8")
    size = travel.node_size
    if size and (not 1 < size < ep_degree or ep_degree % size):
        raise ValueError(f"--ep_node_size {size} must divide --ep {ep_degree}, and be above 1 and below it")


def expert_parallel(
    model: nn.Module, mesh: DeviceMesh, capacity_factor: float | None = None, travel: Travel = PLAIN
) -> None:
    """Let the tokens of all MoE layers of `model` travel over the "ep" axis of `mesh`, whose ranks hold the experts.

    capacity_factor: a rank sends an expert at most this many times the tokens it would get if all got equally many;
    where gradients are recorded the rest is dropped, see `count_drops`. Every rank calls this: `travel` may need new
    groups of processes. Raises ValueError unless `model` was loaded with this rank's share of the experts.
    """
    ranks, rank = mesh["ep"].size(), mesh.get_local_rank("ep")
    check_travel(travel, ranks)
    if capacity_factor is not None and not capacity_factor > 0:
        raise ValueError(f"--capacity_factor {capacity_factor} must be above 0")
    link = make_nodes(mesh, travel.node_size) if travel.node_size else Direct(mesh.get_group("ep"))
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
            kind = Overlapped if travel.chunks else AllToAll
            module.exchange = kind(link, module.config.num_experts, capacity_factor, travel)
            if travel.chunks:
                (experts,) = (inner for inner in module.modules() if "logical_shapes" in inner.__dict__)
                module.exchange.run_on_parts(experts)


def rows_per_token(experts: int, chosen: int, ranks: int) -> float:
    """On how many of `ranks`, which share the experts equally, a token's are expected, if all choices are as likely."""
    return ranks * (1 - math.comb(experts - experts // ranks, chosen) / math.comb(experts, chosen))


def saving_line(experts: int, chosen: int, ranks: int) -> str:
    """What it saves to send a token once to a rank that holds several of its experts."""
    rows = rows_per_token(experts, chosen, ranks)
    return (
        f"tokens travel as {rows:.2f} rows each, not {chosen}: {chosen / rows:.1f}x less, if experts are equally likely"
    )


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


@dataclass
class Part:
    """A part of the tokens under way. slots: the most experts of this rank that one row chose, at least 1."""

    plan: Plan
    slots: int
    journey: Outward | Homeward
    ticket: Tensor


class AllToAll:
    """The exchange (see moe.py) over the ranks of `link`, which hold equal shares of the experts, in order."""

    def __init__(
        self, link: Direct | Nodes, experts: int, capacity_factor: float | None = None, travel: Travel = PLAIN
    ) -> None:
        self.link, self.experts, self.capacity_factor, self.travel = link, experts, capacity_factor, travel

    def dispatch(self, x_TL: Tensor, ids_TS: Tensor, weights_TS: Tensor) -> Dispatched:
        """The rows of all ranks' tokens that chose an expert of this rank, in the order of ranks.

        Of a row's slots only those for experts of this rank remain, and padding where it has fewer than others.
        """
        ids_TS = self._kept(ids_TS)
        ((plan, slots),) = self._plans(ids_TS)
        journey, anchor = Outward(plan, self.travel.rows), make_anchor(x_TL)
        return self._dispatched(plan, slots, *StartAndFinish.apply(journey, anchor, x_TL, weights_TS, ids_TS))

    def combine(self, sum_RL: Tensor, dispatched: Dispatched) -> Tensor:
        journey = Homeward(dispatched.plan, self.travel.sums, dispatched.x_RL.dtype)
        (sum_TL,) = StartAndFinish.apply(journey, None, sum_RL)
        return sum_TL

    def _kept(self, ids_TS: Tensor) -> Tensor:
        # not in evaluation: there all tokens count, and a token's answer must not depend on its neighbours
        if self.capacity_factor is None or not torch.is_grad_enabled():
            return ids_TS
        return drop_excess(ids_TS, self.experts, self.capacity_factor)

    def _dispatched(self, plan: Plan, slots: int, x_RL: Tensor, weights_RS: Tensor, ids_RS: Tensor) -> Dispatched:
        elsewhere_RS = ids_RS // (self.experts // self.link.ranks) != self.link.rank
        # bytes: not every backend sorts bools
        order_RS = elsewhere_RS.view(torch.int8).argsort(dim=1, stable=True)[:, :slots]
        return Dispatched(x_RL, ids_RS.gather(1, order_RS), weights_RS.gather(1, order_RS), plan)

    @torch.no_grad()
    def _plans(self, ids_TS: Tensor) -> list[tuple[Plan, int]]:
        """For every part of the tokens its plan, and the most experts of this rank that one row chose, at least 1.

        Ids below 0 are dropped; there are some only with a capacity factor.
        """
        ranks, parts, tokens = self.link.ranks, max(1, self.travel.chunks), len(ids_TS)
        # at least one, which chose nothing: there is no most of none
        size = max(1, -(-tokens // parts))
        rank_TS = ids_TS // (self.experts // ranks)
        if self.capacity_factor is not None:
            # dropped ones, at -1, go to a column behind the others
            rank_TS = rank_TS % (ranks + 1)
        one = ids_TS.new_ones(()).expand_as(rank_TS)
        chosen = ids_TS.new_zeros(parts * size, ranks + 1).scatter_add_(1, rank_TS, one)
        chosen_CtN = chosen[:, :ranks].unflatten(0, (parts, size))
        # in both orders, as `make_plan` wants them
        wanted_C2A = chosen.new_empty(parts, 2, size * ranks)
        wanted_CtN, wanted_CNt = wanted_C2A[:, 0].view_as(chosen_CtN), wanted_C2A[:, 1].view(parts, ranks, size)
        torch.clamp(chosen_CtN, max=1, out=wanted_CtN)
        wanted_CNt.copy_(wanted_CtN.transpose(1, 2))
        sent_NC2 = chosen.new_empty(ranks, parts, 2)
        torch.sum(wanted_CNt, 2, out=sent_NC2[..., 0].T)
        torch.amax(chosen_CtN, 1, out=sent_NC2[..., 1].T)
        sent = sent_NC2.flatten(1)
        # the host waits for the device here
        figures = torch.cat([sent, exchange_counts(sent, number_of(self.link))]).tolist()
        plans = []
        for part in range(parts):
            rows = [row[2 * part] for row in figures]
            sizes = Sizes(sent=rows[:ranks], received=rows[ranks : 2 * ranks], passed=rows[2 * ranks :])
            slots = max(1, *(row[2 * part + 1] for row in figures[ranks : 2 * ranks]))
            length = min(size, max(0, tokens - part * size))
            plans.append((make_plan(self.link, sizes, wanted_C2A[part], length), slots))
        return plans


class Overlapped(AllToAll):
    """Tokens travel in parts, all on their way at once: the experts work on one while others come and sums go back.

    moe.py hands on what it gets, and need not know: `dispatch` returns parts in place of rows, and the experts, after
    `run_on_parts`, a ticket in place of sums.
    """

    def run_on_parts(self, experts: nn.Module) -> None:
        """Let `experts` take parts, each of which goes through their own forward."""
        # weak: a module that holds its own method is not freed with the model, but whenever Python looks for cycles
        forward = WeakMethod(experts.forward)
        experts.forward = lambda *inputs: self.experts_on_parts(forward(), *inputs)

    def dispatch(self, x_TL: Tensor, ids_TS: Tensor, weights_TS: Tensor) -> Dispatched:
        ids_TS = self._kept(ids_TS)
        plans, anchor, parts = self._plans(ids_TS), make_anchor(x_TL), []
        sizes = [len(plan.first_T) for plan, _ in plans]
        pieces = zip(*(value.split(sizes) for value in (x_TL, weights_TS, ids_TS)), strict=True)
        for (plan, slots), piece in zip(plans, pieces, strict=True):
            journey = Outward(plan, self.travel.rows)
            parts.append(Part(plan, slots, journey, Start.apply(journey, anchor, *piece)))
        return Dispatched(parts, ids_TS, weights_TS, parts)

    def experts_on_parts(self, forward: Callable, parts: list[Part], _: Tensor, __: Tensor, adapters: dict) -> Tensor:
        for part in parts:
            rows = self._dispatched(part.plan, part.slots, *Finish.apply(part.journey, part.ticket))
            sum_RL = forward(rows.x_RL, rows.ids_RS, rows.weights_RS, adapters)
            part.journey = Homeward(part.plan, self.travel.sums, rows.x_RL.dtype)
            part.ticket = Start.apply(part.journey, sum_RL.new_empty(0), sum_RL)
        # one tensor: a hook on the gradient of the experts' result runs before that of any part
        return torch.cat([part.ticket for part in parts])

    def combine(self, sum_RL: Tensor, dispatched: Dispatched) -> Tensor:
        tickets = sum_RL.tensor_split(len(dispatched.plan))
        arrived = [Finish.apply(part.journey, ticket) for part, ticket in zip(dispatched.plan, tickets, strict=True)]
        return torch.cat([sum_tL for (sum_tL,) in arrived])
