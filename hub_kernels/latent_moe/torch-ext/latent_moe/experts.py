"""The operators, and the function that users call.

Shapes: T tokens, S slots per token, R rows sorted by expert, E experts, L latent width, F hidden width, r adapter rank.
"""

import torch

from . import mlp
from ._ops import op
from .low_rank import low_width
from .mlp import Kept, Matrices, Plan
from .reference import ExpertMatrices, expert_mlp_reference
from .route_reference import Rows

ACTIVATIONS = ("situ", "silu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The highest rank of all adapters of a matrix together.
MOST_RANK = 64


def _adapter_or_none(x: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor | None:
    return None if like is None else x


@torch.library.custom_op(op("expert_mlp"), mutates_args=())
def _expert_mlp(
    x_TL: torch.Tensor,
    weights_TS: torch.Tensor,
    slot_R: torch.Tensor,
    row_TS: torch.Tensor,
    offset: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    gate_up_a: torch.Tensor | None,
    gate_up_b: torch.Tensor | None,
    gate_up_scaling: float,
    down: torch.Tensor,
    down_scale: torch.Tensor | None,
    down_a: torch.Tensor | None,
    down_b: torch.Tensor | None,
    down_scaling: float,
    activation: str,
    beta: float,
    linear_beta: float | None,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    first = Matrices(gate_up, gate_up_scale, gate_up_a, gate_up_b, gate_up_scaling)
    second = Matrices(down, down_scale, down_a, down_b, down_scaling)
    plan = Plan(slot_R, row_TS, offset, activation, beta, linear_beta)
    with torch.cuda.device_of(x_TL):
        out_TL, kept = mlp.forward(x_TL, weights_TS, first, second, plan, keep)
    return out_TL, *(x_TL.new_empty(0) if x is None else x for x in kept)


@_expert_mlp.register_fake
def _(
    x_TL, weights_TS, slot_R, row_TS, offset, gate_up, gate_up_scale, gate_up_a, gate_up_b, gate_up_scaling,
    down, down_scale, down_a, down_b, down_scaling, activation, beta, linear_beta, keep,
):  # fmt: skip
    def low(a):
        return (
            x_TL.new_empty(0) if a is None else x_TL.new_empty(len(slot_R), low_width(a.shape[1]), dtype=torch.float32)
        )

    gate_up_RF = x_TL.new_empty(len(slot_R), gate_up.shape[1]) if keep else x_TL.new_empty(0)
    return torch.empty_like(x_TL, dtype=torch.float32), gate_up_RF, low(gate_up_a), low(down_a)


# The largest tensor of all serves twice: gates and ups become their gradients.
@torch.library.custom_op(op("expert_mlp_backward"), mutates_args=("gate_up_RF",))
def _expert_mlp_backward(
    dout_TL: torch.Tensor,
    x_TL: torch.Tensor,
    weights_TS: torch.Tensor,
    slot_R: torch.Tensor,
    row_TS: torch.Tensor,
    offset: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    gate_up_a: torch.Tensor | None,
    gate_up_b: torch.Tensor | None,
    gate_up_scaling: float,
    down: torch.Tensor,
    down_scale: torch.Tensor | None,
    down_a: torch.Tensor | None,
    down_b: torch.Tensor | None,
    down_scaling: float,
    activation: str,
    beta: float,
    linear_beta: float | None,
    keep: bool,
    gate_up_RF: torch.Tensor,
    low_gate_up_RP: torch.Tensor,
    low_down_RP: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mlp.Gradients`, those of absent factors empty: torch.compile knows no lists of an operator that overwrites."""
    first = Matrices(gate_up, gate_up_scale, gate_up_a, gate_up_b, gate_up_scaling)
    second = Matrices(down, down_scale, down_a, down_b, down_scaling)
    plan = Plan(slot_R, row_TS, offset, activation, beta, linear_beta)
    kept = Kept(
        gate_up_RF if keep else None,
        _adapter_or_none(low_gate_up_RP, gate_up_a),
        _adapter_or_none(low_down_RP, down_a),
    )
    with torch.cuda.device_of(x_TL):
        gradients = mlp.backward(dout_TL.contiguous(), x_TL, weights_TS, first, second, plan, kept)
    return tuple(x_TL.new_empty(0) if x is None else x for x in gradients)


@_expert_mlp_backward.register_fake
def _(
    dout_TL, x_TL, weights_TS, slot_R, row_TS, offset, gate_up, gate_up_scale, gate_up_a, gate_up_b, gate_up_scaling,
    down, down_scale, down_a, down_b, down_scaling, activation, beta, linear_beta, keep, gate_up_RF, low_gate_up_RP,
    low_down_RP,
):  # fmt: skip
    factors = (gate_up_a, gate_up_b, down_a, down_b)
    factors = (x_TL.new_empty(0) if x is None else x.new_empty(x.shape) for x in factors)
    return torch.empty_like(x_TL), torch.empty_like(weights_TS), *factors


# Where the differentiable inputs of the operator are, in the order of `mlp.Gradients`.
_DIFFERENTIABLE = (0, 1, 7, 8, 12, 13)


def _save(ctx, inputs, output):
    _, *kept = output
    ctx.mark_non_differentiable(*kept)
    # Gradients of what is kept, which nobody asks for, would otherwise be zeros of its size.
    ctx.set_materialize_grads(False)
    tensors = [x if isinstance(x, torch.Tensor) else None for x in inputs]
    ctx.save_for_backward(*tensors, *kept)
    ctx.others = [None if isinstance(x, torch.Tensor) else x for x in inputs]
    ctx.spent = False


def _backward(ctx, dout_TL, *_):
    results = [None] * len(ctx.others)
    if dout_TL is None:
        return tuple(results)
    # Read once: activation checkpointing refuses to give them twice.
    saved = ctx.saved_tensors
    tensors, kept = saved[: len(ctx.others)], saved[len(ctx.others) :]
    *inputs, keep = (other if x is None else x for x, other in zip(tensors, ctx.others, strict=True))
    gate_up_RF, *low = kept
    # Backward overwrites gates and ups, which the saved tensor may not know: a second one through the same graph (of
    # retain_graph) computes them again.
    gradients = _expert_mlp_backward(dout_TL, *inputs, keep and not ctx.spent, gate_up_RF.data, *low)
    ctx.spent = True
    for place, gradient in zip(_DIFFERENTIABLE, gradients, strict=True):
        results[place] = gradient if ctx.needs_input_grad[place] else None
    return tuple(results)


_expert_mlp.register_autograd(_backward, setup_context=_save)


def _check_matrices(name: str, matrices: ExpertMatrices, experts: int | None, rows: int | None, width: int | None):
    """ValueError unless these are matrices [experts, rows, width]; None is any number."""
    weight, scale, adapters = matrices
    if weight.dim() != 3 or not weight.is_contiguous():
        raise ValueError(f"{name}: expected contiguous [experts, rows, columns], got {list(weight.shape)}")
    E, N, K = weight.shape
    if scale is None:
        if not weight.is_floating_point():
            raise ValueError(f"{name}: expected a float weight, or uint8 beside a scale, got {weight.dtype}")
    else:
        K *= 2
        if weight.dtype != torch.uint8 or scale.dtype != torch.uint8:
            raise ValueError(f"{name}: expected uint8 weight and scale, got {weight.dtype} and {scale.dtype}")
        if K % 32 or list(scale.shape) != [E, N, K // 32] or not scale.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous scale {[E, N, K // 32]}, got {list(scale.shape)}")
    wanted = [n if want is None else want for n, want in zip((E, N, K), (experts, rows, width), strict=True)]
    if wanted != [E, N, K]:
        raise ValueError(f"{name}: expected matrices {wanted}, got {[E, N, K]}")
    if torch.is_grad_enabled() and weight.requires_grad:
        raise ValueError(f"{name}: the weight requires a gradient, which is never computed here")
    for a, b, _ in adapters:
        fits = a.dim() == b.dim() == 3 and a.shape[2] == K and b.shape[1] == N and a.shape[1] == b.shape[2]
        if not fits or a.shape[0] not in (1, E) or b.shape[0] not in (1, E):
            raise ValueError(f"{name}: adapters {list(a.shape)} and {list(b.shape)} do not fit {[E, N, K]}")
        if not a.is_floating_point() or not b.is_floating_point():
            raise ValueError(f"{name}: expected float adapters, got {a.dtype} and {b.dtype}")
    rank = sum(a.shape[1] for a, _, _ in adapters)
    if rank > MOST_RANK:
        raise ValueError(f"{name}: adapters of rank {rank} in all, expected at most {MOST_RANK}")
    return E, N, K


def _check(
    x_TL, rows: Rows, weights_TS, gate_up, down, activation: str, beta, linear_beta, max_rows: int | None
) -> None:
    if x_TL.dim() != 2 or x_TL.dtype not in (*DTYPES, torch.float64):
        raise ValueError(f"x_TL: expected float [tokens, width], got {x_TL.dtype} {list(x_TL.shape)}")
    if weights_TS.shape != rows.row_TS.shape or len(weights_TS) != len(x_TL) or not weights_TS.is_floating_point():
        raise ValueError(
            f"weights_TS: expected float {list(rows.row_TS.shape)} for {len(x_TL)} tokens, "
            f"got {weights_TS.dtype} {list(weights_TS.shape)}"
        )
    E, N, _ = _check_matrices("gate_up", gate_up, len(rows.offset) - 1, None, x_TL.shape[1])
    if N % 2:
        raise ValueError(f"gate_up: expected an even number of rows, got {N}")
    _check_matrices("down", down, E, x_TL.shape[1], N // 2)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}")
    for name, bound in {"beta": beta, "linear_beta": linear_beta}.items():
        if bound is not None and not bound > 0:
            raise ValueError(f"{name}: {bound} should be above 0")
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows: {max_rows}, expected at least 1")
    tensors = {"rows": [rows.row_TS, rows.slot_R, rows.offset], "weights_TS": [weights_TS]}
    for name, (weight, scale, adapters) in {"gate_up": gate_up, "down": down}.items():
        tensors[name] = [weight, scale, *(factor for a, b, _ in adapters for factor in (a, b))]
    for name, group in tensors.items():
        if places := [x.device for x in group if x is not None and x.device != x_TL.device]:
            raise ValueError(f"{name}: on {places[0]}, but x_TL is on {x_TL.device}")


def _operands(matrices: ExpertMatrices) -> tuple[torch.Tensor | None, ...]:
    """weight, scale, a [E, r, K], b [E, r, N], scaling: all adapters as one."""
    weight, scale, adapters = matrices
    if not adapters:
        return weight, scale, None, None, 1.0
    E, scaling = len(weight), 1.0
    if len(adapters) == 1:
        ((a_ErK, b_ENr, scaling),) = adapters
    else:
        a_ErK = torch.cat([a.expand(E, -1, -1) for a, _, _ in adapters], dim=1)
        b_ENr = torch.cat([s * b.expand(E, -1, -1) for _, b, s in adapters], dim=2)
    a_ErK, b_ErN = a_ErK.contiguous(), b_ENr.transpose(1, 2).contiguous()
    # A shared factor has a stride of 0 over experts.
    a_ErK, b_ErN = (f if len(f) == E else f.expand(E, -1, -1) for f in (a_ErK, b_ErN))
    return weight, scale, a_ErK, b_ErN, float(scaling)


def expert_mlp(
    x_TL: torch.Tensor,
    rows: Rows,
    weights_TS: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    *,
    activation: str = "situ",
    beta: float | None = None,
    linear_beta: float | None = None,
    save_activations: bool = True,
    max_rows: int | None = None,
) -> torch.Tensor:
    """Sum over a token's slots of weight * W_down act(W_gate x, W_up x), fp32 [T, L], differentiable.

    x_TL: tokens in bf16, fp16 or fp32; fp64 runs the reference. rows: of `sort_slots` or `route`; slots without a row
    add zero. weights_TS: float. gate_up: matrices [E, 2F, L], gate rows first; down: [E, L, F]; both frozen, float of
    any kind or packed MXFP4 bytes with scales (widths that are multiples of 32), decoded exactly and never kept
    decoded. Their adapters, of rank 64 in all, are [E, r, in] and [E, out, r]; a factor with one matrix is shared by
    all experts. activation: "situ" with beta and linear_beta, or "silu", see `activation_reference`.

    Gradients: x, weights, adapters. save_activations: keep gates and ups [R, 2F] for backward instead of computing them
    again. max_rows: how many slots have a row at most, where that is known to be less than all of them; tokens whose
    rows lie behind that become NaN. Deterministic; waits nowhere for the device.

    ValueError names an argument of the wrong shape, dtype or layout.
    """
    _check(x_TL, rows, weights_TS, gate_up, down, activation, beta, linear_beta, max_rows)
    if x_TL.dtype == torch.float64:
        return expert_mlp_reference(
            x_TL, rows, weights_TS, gate_up, down, activation=activation, beta=beta, linear_beta=linear_beta
        )
    if rows.row_TS.numel() == 0:
        return (x_TL * weights_TS.sum(1, keepdim=True)).float()
    slot_R, offset = rows.slot_R, rows.offset
    if max_rows is not None and max_rows < len(slot_R):
        slot_R, offset = slot_R[:max_rows], offset.clamp(max=max_rows)
    first, second = _operands(gate_up), _operands(down)
    inputs = x_TL, weights_TS, first[2], first[3], second[2], second[3]
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    with torch.autocast(x_TL.device.type, enabled=False):
        return _expert_mlp(
            x_TL.contiguous(),
            weights_TS.contiguous(),
            slot_R,
            rows.row_TS,
            offset,
            *first,
            *second,
            activation,
            1.0 if beta is None else float(beta),
            linear_beta,
            trains and save_activations,
        )[0]
