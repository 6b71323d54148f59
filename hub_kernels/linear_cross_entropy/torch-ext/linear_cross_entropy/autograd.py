"""The operators, and the function that users call.

Shapes: N tokens, D model width, V vocabulary.

A token's loss depends on its own hidden state alone, so d hidden_n = g_n u_n: g_n is the gradient that arrives at the
loss, u_n that of the loss itself. u is computed in forward, while the logits exist; backward scales its rows.
"""

import torch

from . import chunks
from ._ops import op
from .reference import linear_cross_entropy_reference


@torch.library.custom_op(op("loss"), mutates_args=())
def _loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return chunks.loss(hidden, weight, target, ignore_index)


@_loss.register_fake
def _(hidden, weight, target, ignore_index):
    return hidden.new_empty(hidden.shape[0], dtype=torch.float32)


@torch.library.custom_op(op("loss_and_gradient"), mutates_args=())
def _loss_and_gradient(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast(hidden.device.type, enabled=False):
        return chunks.loss_and_gradient(hidden, weight, target, ignore_index)


@_loss_and_gradient.register_fake
def _(hidden, weight, target, ignore_index):
    return hidden.new_empty(hidden.shape[0], dtype=torch.float32), torch.empty_like(hidden)


@torch.library.custom_op(op("scale_rows"), mutates_args=())
def _scale_rows(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # In fp32 and rounded once, without an fp32 copy of the rows.
    return torch.mul(rows, scale.unsqueeze(1), out=torch.empty_like(rows))


@_scale_rows.register_fake
def _(rows, scale):
    return torch.empty_like(rows)


def _keep_gradient(ctx, inputs, output):
    # Not marked as non-differentiable: a second derivative is then an error, not one without the part through hidden.
    # The gradient's own gradient, which nobody asks for, would otherwise be zeros of its size.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _backward(ctx, loss_gradient, _):
    (gradient_ND,) = ctx.saved_tensors
    hidden_gradient = None if loss_gradient is None else _scale_rows(gradient_ND, loss_gradient)
    return hidden_gradient, None, None, None


_loss_and_gradient.register_autograd(_backward, setup_context=_keep_gradient)


def _check(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> None:
    if hidden.dim() != 2:
        raise ValueError(f"hidden: expected [tokens, width], got {list(hidden.shape)}")
    if hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"hidden: expected a floating-point dtype of 16, 32 or 64 bits, got {hidden.dtype}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or weight.numel() == 0:
        raise ValueError(f"weight: expected [vocabulary, {hidden.shape[1]}], got {list(weight.shape)}")
    if weight.dtype != hidden.dtype:
        raise ValueError(f"weight: expected {hidden.dtype} like hidden, got {weight.dtype}")
    if not weight.is_contiguous():
        raise ValueError("weight: expected a contiguous matrix; a copy of it would cost more than the kernel saves")
    if torch.is_grad_enabled() and weight.requires_grad:
        raise ValueError(
            "weight: requires a gradient, which is never computed here; freeze it with requires_grad_(False)"
        )
    if target.shape != hidden.shape[:1] or target.dtype != torch.int64:
        raise ValueError(f"target: expected int64 [{hidden.shape[0]}], got {target.dtype} {list(target.shape)}")
    for name, x in {"weight": weight, "target": target}.items():
        if x.device != hidden.device:
            raise ValueError(f"{name}: on {x.device}, but hidden is on {hidden.device}")


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100
) -> torch.Tensor:
    """Cross-entropy of each token under a frozen head, logits = hidden @ weight^T, never held for all tokens.

    hidden [N, D] in bf16, fp16, fp32 or fp64; weight [V, D] of the same dtype, contiguous; target int64 [N]. Returns
    losses [N] in fp32 (fp64 for fp64, which runs the reference): zero where target is `ignore_index`, NaN where it is
    neither that nor in [0, V). Gradients reach hidden only, are exactly zero for ignored tokens, and are computed
    together with the losses; without a gradient to compute, only the losses are. Runs outside of autocast.

    ValueError names an argument of the wrong shape or dtype, and a weight that requires a gradient in grad mode.
    """
    _check(hidden, weight, target)
    if hidden.dtype == torch.float64:
        return linear_cross_entropy_reference(hidden, weight, target, ignore_index=ignore_index)
    hidden, target = hidden.contiguous(), target.contiguous()
    if torch.is_grad_enabled() and hidden.requires_grad:
        return _loss_and_gradient(hidden, weight, target, ignore_index)[0]
    return _loss(hidden, weight, target, ignore_index)
