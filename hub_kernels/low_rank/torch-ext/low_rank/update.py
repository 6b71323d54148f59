"""The low-rank update: checks, operators and autograd.

Legend: T rows, I and O widths of a layer's input and output, r rank, R rank up to a power of two, P parts of a number.
"""

import torch

from ._ops import op
from .products import added_rows, factor_gradient, low_rows, padded, parts_of, split_factors

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HIGHEST_RANK = 128


def add_low_rank(
    y: torch.Tensor, x: torch.Tensor, a_rI: torch.Tensor, b_Or: torch.Tensor, scaling: float
) -> torch.Tensor:
    """y + scaling * (x a^T) b^T, products and sum as exact as in fp32, rounded once to the dtype of y.

    x: [..., I] and y: [..., O], of one dtype bf16, fp16 or fp32; a: [r, I] and b: [O, r], each of these dtypes, r up
    to 128. Gradients flow to all four, to the factors through fp32 sums of fixed order; beside its inputs it keeps the
    low rows x a^T. Raises ValueError naming the argument. LoRA (Hu et al., 2021) on a layer with output y.
    """
    _check("y", y, y.dtype, y.shape[-1:], y)
    _check("x", x, y.dtype, x.shape[-1:], y)
    if x.shape[:-1] != y.shape[:-1]:
        raise ValueError(f"x: shape {tuple(x.shape)} should be {(*y.shape[:-1], x.shape[-1])}, the rows of y")
    if a_rI.dim() != 2 or not 1 <= len(a_rI) <= HIGHEST_RANK:
        raise ValueError(f"a_rI: shape {tuple(a_rI.shape)} needs two axes, the first 1 to {HIGHEST_RANK}")
    _check("a_rI", a_rI, a_rI.dtype, (len(a_rI), x.shape[-1]), y)
    _check("b_Or", b_Or, b_Or.dtype, (y.shape[-1], len(a_rI)), y)
    out, _ = update_fwd(y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), a_rI, b_Or, scaling)
    return out.view(y.shape)


def _check(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], y: torch.Tensor) -> None:
    """x ends in this shape, has this dtype, which is one of those supported, and is where y is."""
    if x.dtype not in DTYPES:
        raise ValueError(f"{name}: dtype {x.dtype} is not supported, use bfloat16, float16 or float32")
    if x.dtype != dtype:
        raise ValueError(f"{name}: dtype {x.dtype} should be {dtype}, that of y")
    if x.dim() == 0:
        raise ValueError(f"{name}: shape () needs a last axis")
    if x.dim() < len(shape) or x.shape[x.dim() - len(shape) :] != shape or 0 in shape:
        raise ValueError(f"{name}: shape {tuple(x.shape)} should end in {tuple(shape)}, none of them 0")
    if x.device != y.device:
        raise ValueError(f"{name}: on {x.device}, but y is on {y.device}")


@torch.library.custom_op(op("update_fwd"), mutates_args=())
def update_fwd(
    y_TO: torch.Tensor, x_TI: torch.Tensor, a_rI: torch.Tensor, b_Or: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The update, and for the backward pass the low rows as parts [P, T, R]."""
    with torch.cuda.device_of(x_TI):
        a_PRI, b_PRO = split_factors(a_rI, b_Or, x_TI.dtype)
        low_PTR = low_rows(x_TI, a_PRI)
        return added_rows(y_TO, low_PTR, b_PRO, scaling, y_TO.dtype), low_PTR


@torch.library.custom_op(op("update_bwd"), mutates_args=())
def update_bwd(
    dout_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_rI: torch.Tensor,
    b_Or: torch.Tensor,
    low_PTR: torch.Tensor,
    scaling: float,
    needs_x: bool,
    needs_a: bool,
    needs_b: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, a and b, empty ones where they are not needed."""
    dx_TI, da_rI, db_Or = (like.new_empty(0) for like in (x_TI, a_rI, b_Or))
    with torch.cuda.device_of(x_TI):
        if needs_x or needs_a:
            a_PRI, b_PRO = split_factors(a_rI, b_Or, x_TI.dtype)
            dlow_PTR = low_rows(dout_TO, b_PRO)
        if needs_x:
            dx_TI = added_rows(None, dlow_PTR, a_PRI, scaling, x_TI.dtype)
        if needs_a:
            da_rI = factor_gradient(dlow_PTR, x_TI, len(a_rI), scaling, a_rI.dtype, transposed=False)
        if needs_b:
            db_Or = factor_gradient(low_PTR, dout_TO, len(a_rI), scaling, b_Or.dtype, transposed=True)
    return dx_TI, da_rI, db_Or


@update_fwd.register_fake
def _(y_TO, x_TI, a_rI, b_Or, scaling):
    P, dtype = parts_of(x_TI.dtype)
    return y_TO.new_empty(y_TO.shape), x_TI.new_empty(P, len(x_TI), padded(len(a_rI)), dtype=dtype)


@update_bwd.register_fake
def _(dout_TO, x_TI, a_rI, b_Or, low_PTR, scaling, needs_x, needs_a, needs_b):
    needed = zip((x_TI, a_rI, b_Or), (needs_x, needs_a, needs_b), strict=True)
    return tuple(like.new_empty(like.shape if needs else 0) for like, needs in needed)


def _save(ctx, inputs, output):
    _, x_TI, a_rI, b_Or, ctx.scaling = inputs
    _, low_PTR = output
    ctx.mark_non_differentiable(low_PTR)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_TI, a_rI, b_Or, low_PTR)


def _backward(ctx, dout_TO, _):
    needed = ctx.needs_input_grad[1:4]
    gradients = update_bwd(dout_TO, *ctx.saved_tensors, ctx.scaling, *needed)
    return dout_TO, *(gradient if needs else None for gradient, needs in zip(gradients, needed, strict=True)), None


update_fwd.register_autograd(_backward, setup_context=_save)
