"""Rows on their way to experts and back: started, then finished where they are needed, with other work in between.

Legend: T tokens of this rank, N ranks of the group, A = T * N pairs of them, K figures about the rows of two ranks,
        R rows, W bytes or values of a row, L width of a row.

Starting, finishing and the exchange of counts are operators, so that activation checkpointing can keep what they
return. Operators take tensors and numbers, so objects go by a number (`number_of`). The sums are taken inside: a
token's is one row, what it is summed from is a row of every rank that holds an expert of the token.
"""

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling_latentmoe.training.links import Direct, Nodes, Sizes
from modeling_latentmoe.training.payload import Form, decode

_objects: WeakValueDictionary[int, object] = WeakValueDictionary()


def number_of(thing: object) -> int:
    """What stands for `thing` among the arguments of an operator while the caller holds it."""
    _objects[id(thing)] = thing
    return id(thing)


class Plan(NamedTuple):
    """Which rows this rank sends and gets: sorted by the other rank, those of one rank in the order of its tokens.

    token_R: the token of every row that is sent; order_R: those rows by token, and of a token by rank; first_T: where
    in `order_R` the rows of every token begin.
    """

    link: Direct | Nodes
    sizes: Sizes
    token_R: Tensor
    order_R: Tensor
    first_T: Tensor


def make_plan(link: Direct | Nodes, sizes: Sizes, wanted_2A: Tensor, tokens: int) -> Plan:
    """Of the first `tokens` of T tokens; of those behind them nothing is wanted.

    wanted_2A: int64, 1 where a rank gets a row of a token, else 0, in the order [T, N] and again in the order [N, T].
    The sizes are known, so that nothing waits for the device. What launches cost is most of this: one for both orders.
    """
    rows, ranks = sum(sizes.sent), link.ranks
    # places from 1 on, those by rank behind all those by token
    place_2A = wanted_2A.view(-1).cumsum(0).view_as(wanted_2A)
    place_TN, place_NT = place_2A[0].view(-1, ranks), place_2A[1].view(ranks, -1)
    row_2A = torch.empty_like(place_2A)
    torch.sub(place_NT.T, rows + 1, out=row_2A[0].view_as(place_TN))
    row_2A[1].view_as(place_NT).copy_(torch.arange(place_NT.shape[1], device=row_2A.device))
    # place 0 is for all that is no row
    found = row_2A.new_empty(1 + 2 * rows).scatter_(0, (place_2A * wanted_2A).view(-1), row_2A.view(-1))
    _, order_R, token_R = found.split([1, rows, rows])
    first_T = place_TN[:tokens, 0] - wanted_2A[0].view_as(place_TN)[:tokens, 0]
    return Plan(link, sizes, token_R, order_R, first_T)


class There:
    """Values of this rank's tokens, on their way to become rows elsewhere."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.arriving: list[tuple[Tensor, Callable[[], object]]] = []

    def start(self, values_T: list[Tensor]) -> None:
        for value_TW in values_T:
            out = value_TW.new_empty(sum(self.plan.sizes.received), value_TW.shape[1])
            self.arriving.append((out, self.plan.link.there(out, value_TW[self.plan.token_R], self.plan.sizes)))

    def finish(self) -> list[Tensor]:
        """Matrices of the rows that this rank gets."""
        return _finished(self.arriving)


class Back:
    """Values of the rows that this rank got, on their way back to become sums over the rows of each token.

    form: in which they were encoded, width: before that; dtype: of the sums, which are taken in fp32 or wider.
    """

    def __init__(self, plan: Plan, form: Form | None, width: int, dtype: torch.dtype) -> None:
        self.plan, self.form, self.width, self.dtype = plan, form, width, dtype
        self.arriving: list[tuple[Tensor, Callable[[], object]]] = []

    def start(self, values_R: list[Tensor]) -> None:
        for value_RW in values_R:
            out = value_RW.new_empty(sum(self.plan.sizes.sent), value_RW.shape[1])
            self.arriving.append((out, self.plan.link.back(out, value_RW, self.plan.sizes)))

    def finish(self) -> list[Tensor]:
        """One sum per token, [T, width] each: in the order of ranks, so it does not change from run to run."""
        return [self._sum(rows_RW) for rows_RW in _finished(self.arriving)]

    def _sum(self, rows_RW: Tensor) -> Tensor:
        wide = torch.promote_types(rows_RW.dtype, self.dtype) if self.form in (None, "bf16") else torch.float32
        if rows_RW.device.type == "cpu":
            # there sums of bf16 are rounded another way
            wide = torch.promote_types(wide, torch.float32)
        rows_RL = decode(rows_RW, self.form, self.width, wide)
        return F.embedding_bag(self.plan.order_R, rows_RL, self.plan.first_T, mode="sum").to(self.dtype)


def _finished(arriving: list[tuple[Tensor, Callable[[], object]]]) -> list[Tensor]:
    for _, wait in arriving:
        wait()
    found = [out for out, _ in arriving]
    arriving.clear()
    return found


# Not `torch.library.custom_op`: what that does around every call takes the host longer than most of these do.
_library = torch.library.Library("latentmoe", "FRAGMENT")


def _operator(schema: str, function: Callable) -> Callable:
    name = _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.latentmoe, name).default


# `counts` of a link.
exchange_counts = _operator(
    "exchange_counts(Tensor sent_NK, int link) -> Tensor", lambda sent_NK, link: _objects[link].counts(sent_NK)
)
start_transfer = _operator(
    "start_transfer(Tensor[] values, int transfer) -> ()", lambda values, transfer: _objects[transfer].start(values)
)
# token_R: of its plan, on the device of what comes.
finish_transfer = _operator(
    "finish_transfer(Tensor token_R, int transfer) -> Tensor[]", lambda _, transfer: _objects[transfer].finish()
)
