"""Rows on their way to experts and back: started, then finished where they are needed, with other work in between.

Legend: T tokens of this rank, N ranks of the group, R rows, W bytes or values of a row.

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


def make_plan(link: Direct | Nodes, sizes: Sizes, wanted_NT: Tensor) -> Plan:
    """wanted_NT: whether a rank gets a row of a token. The sizes are known, so that nothing waits for the device."""
    rows = sum(sizes.sent)
    # the place of every row, by rank and by token; all else has a place behind them
    by_rank_NT, by_token_TN = _places(wanted_NT), _places(wanted_NT.T)
    token_NT = torch.arange(wanted_NT.shape[1], device=wanted_NT.device).expand_as(wanted_NT)
    token_R, order_R = (
        by_rank_NT.new_empty(rows + 1).scatter_(0, torch.where(wanted_NT, place, rows).flatten(), row.flatten())[:rows]
        for place, row in ((by_rank_NT, token_NT), (by_token_TN.T, by_rank_NT))
    )
    return Plan(link, sizes, token_R, order_R, by_token_TN[:, 0] + 1 - wanted_NT[0].to(torch.int64))


def _places(wanted: Tensor) -> Tensor:
    return wanted.flatten().cumsum(0).view_as(wanted) - 1


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


@torch.library.custom_op("latentmoe::exchange_counts", mutates_args=())
def exchange_counts(sent_NK: Tensor, link: int) -> Tensor:
    """`counts` of a link."""
    return _objects[link].counts(sent_NK)


@torch.library.custom_op("latentmoe::start_transfer", mutates_args=())
def start_transfer(values: list[Tensor], transfer: int) -> None:
    _objects[transfer].start(values)


@torch.library.custom_op("latentmoe::finish_transfer", mutates_args=())
def finish_transfer(token_R: Tensor, transfer: int) -> list[Tensor]:
    """token_R: of its plan, on the device of what comes."""
    return _objects[transfer].finish()
