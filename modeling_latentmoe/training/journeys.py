"""What tokens go through between router and sum: to the ranks of their experts and back, with gradients.

Legend: T tokens of this rank, S chosen experts of a token, L latent width, R rows at the experts (expert_parallel.py).

A journey out and one home each have a start and a finish, with other work in between. The backward pass mirrors them:
it starts the gradients where the forward pass finished, and finishes them where that started. Autograd runs what is
ready in the reverse order of the forward pass, so every rank takes the collectives in the same order.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from modeling_latentmoe.training.payload import Form, decode, encode
from modeling_latentmoe.training.transfers import Back, Plan, There, finish_transfer, number_of, start_transfer

# Routing weights are of these.
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


class Journey(Protocol):
    """One way, with gradients the other way."""

    def start(self, *values: Tensor) -> None: ...

    def finish(self) -> tuple[Tensor, ...]: ...

    def start_gradients(self, *gradients: Tensor) -> None:
        """Of those that `finish` returned that are no ids."""
        ...

    def finish_gradients(self) -> tuple[Tensor | None, ...]:
        """Of what `start` was given."""
        ...


def make_anchor(like: Tensor) -> Tensor:
    """With it a journey has gradients wherever they are recorded: its backward pass, a collective, runs on every rank.

    One whose tokens have no gradient, such as one without images, would otherwise let the others wait.
    """
    return like.new_empty(0, requires_grad=torch.is_grad_enabled())


class Start(torch.autograd.Function):
    """Returns a ticket for `Finish`: an empty tensor, by which gradients come. It requires grad if `anchor` or a value
    does."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, anchor: Tensor, *values: Tensor) -> Tensor:
        ctx.journey = journey
        journey.start(*values)
        return anchor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor):
        return None, None, *ctx.journey.finish_gradients()


class Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, journey: Journey, ticket: Tensor) -> tuple[Tensor, ...]:
        ctx.journey, ctx.ticket = journey, (ticket.dtype, ticket.device)
        return _finished(ctx, journey)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None):
        ctx.journey.start_gradients(*_whole(ctx, gradients))
        dtype, device = ctx.ticket
        return None, torch.empty(0, dtype=dtype, device=device)


class StartAndFinish(torch.autograd.Function):
    """Both, where there is nothing to do in between. What it returns requires grad if `anchor` or a value does."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, anchor: Tensor | None, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.journey = journey
        journey.start(*values)
        return _finished(ctx, journey)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None):
        ctx.journey.start_gradients(*_whole(ctx, gradients))
        return None, None, *ctx.journey.finish_gradients()


def _finished(ctx: Any, journey: Journey) -> tuple[Tensor, ...]:
    values = journey.finish()
    ctx.mark_non_differentiable(*(value for value in values if not value.is_floating_point()))
    # not by torch, which makes zeros for ids as well
    ctx.set_materialize_grads(False)
    ctx.like = [(value.shape, value.dtype, value.device) for value in values if value.is_floating_point()]
    return values


def _whole(ctx: Any, gradients: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Zeros where there is no gradient, without those of ids, which come last."""
    return [
        torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
        for gradient, (shape, dtype, device) in zip(gradients, ctx.like, strict=False)
    ]


class Outward:
    """Latents, routing weights and ids of tokens to the rows at their experts. form: in which latents travel."""

    def __init__(self, plan: Plan, form: Form | None) -> None:
        self.plan, self.form = plan, form

    def start(self, x_TL: Tensor, weights_TS: Tensor, ids_TS: Tensor) -> None:
        self.dtypes, self.widths = (x_TL.dtype, weights_TS.dtype), (x_TL.shape[1], weights_TS.shape[1])
        # together: both are small; ids as wide as weights, so that both can be seen where they lie
        integer = INTEGERS[weights_TS.dtype]
        chosen = torch.cat([weights_TS.view(integer), ids_TS.to(integer)], dim=1)
        self.transfer = There(self.plan)
        # what decides where rows go at the experts comes first
        start_transfer([chosen, encode(x_TL, self.form)], number_of(self.transfer))

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """(x_RL, weights_RS, ids_RS)"""
        chosen, rows = finish_transfer(self.plan.token_R, number_of(self.transfer))
        weights, ids_RS = chosen.chunk(2, dim=1)
        x_RL = rows if self.form is None else decode(rows, self.form, self.widths[0], self.dtypes[0])
        return x_RL, weights.view(self.dtypes[1]), ids_RS.to(torch.int64)

    def start_gradients(self, grad_RL: Tensor, grad_RS: Tensor) -> None:
        self.returning = [Back(self.plan, None, *of) for of in zip(self.widths, self.dtypes, strict=True)]
        for transfer, gradient in zip(self.returning, (grad_RL, grad_RS), strict=True):
            transfer.start([gradient])

    def finish_gradients(self) -> tuple[Tensor, Tensor, None]:
        (grad_TL,), (grad_TS,) = (transfer.finish() for transfer in self.returning)
        return grad_TL, grad_TS, None


class Homeward:
    """Sums at the experts to sums per token, which are rounded to `dtype` once. form: in which the former travel."""

    def __init__(self, plan: Plan, form: Form | None, dtype: torch.dtype) -> None:
        self.plan, self.form, self.dtype = plan, form, dtype

    def start(self, sum_RL: Tensor) -> None:
        self.rows_dtype = sum_RL.dtype
        self.transfer = Back(self.plan, self.form, sum_RL.shape[1], self.dtype)
        start_transfer([encode(sum_RL, self.form)], number_of(self.transfer))

    def finish(self) -> tuple[Tensor]:
        return tuple(finish_transfer(self.plan.token_R, number_of(self.transfer)))

    def start_gradients(self, grad_TL: Tensor) -> None:
        self.returning = There(self.plan)
        self.returning.start([grad_TL])

    def finish_gradients(self) -> tuple[Tensor]:
        (grad_RL,) = self.returning.finish()
        return (grad_RL.to(self.rows_dtype),)
