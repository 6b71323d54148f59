"""Routed experts on Ascend (npu.py): tokens sorted by expert and grouped products, by operators of torch-npu.

MXFP4 weights are decoded into a workspace of bounded size, as many experts at a time as fit, in forward and again in
backward; only their bytes are kept. Ascend 950 multiplies MXFP4 itself, but by activations in eight bits, and not for
the gradient of the input: that is another function, and it is not used.

Legend: T tokens, S chosen experts per token, L latent width, E experts, R routed rows sorted by expert, I and O input
        and output width of a matrix, F expert hidden width, N = T * S slots, e experts of a block, r adapter rank.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from .mxfp4 import decode
from .npu import FLOATS, dtype_problem, serves

# Decoded weights held at a time; the released Kimi-K3 has 44 MB for the larger matrix of an expert.
WORKSPACE_BYTES = 2**30
# Limits of the operators: groups, the length of a row, elements of the routing, choices of a token.
GROUPS, ROW_WIDTH, SLOTS, CHOICES = 1024, 65_536, 16_777_215, 512


OPERATORS = (
    "npu_grouped_matmul",
    "npu_moe_token_permute",
    "npu_moe_token_permute_grad_v2",
    "npu_moe_token_unpermute",
)


class Block(NamedTuple):
    """The rows of some neighbouring experts, their matrices [e, O, I], and where each one's rows end."""

    rows: slice
    weight_eOI: torch.Tensor
    ends_e: torch.Tensor


def _expert_problem(x_TL: torch.Tensor, ids_TS: torch.Tensor, *stacks: Any) -> str | None:
    slots, choices, experts = ids_TS.numel(), ids_TS.shape[1], len(stacks[0].weight)
    if experts > GROUPS:
        return f"there are {experts} experts"
    if slots >= SLOTS or choices > CHOICES:
        return f"{len(ids_TS)} tokens choose {choices} experts each"
    widths = [width * (1 if stack.scale is None else 2) for stack in stacks for width in stack.weight.shape[1:]]
    if max(widths) >= ROW_WIDTH:
        return f"the experts' matrices are {max(widths)} wide"
    return dtype_problem(x_TL, dtypes=FLOATS)


def _product(x_RI: torch.Tensor, weight_eIO: torch.Tensor, ends_e: torch.Tensor) -> torch.Tensor:
    # Ends, and not numbers of rows: lists of numbers may not have a single entry, as for one expert.
    return torch.ops.npu.npu_grouped_matmul(
        [x_RI], [weight_eIO], group_list=ends_e, split_item=3, group_type=0, group_list_type=0
    )[0]


def _weight_gradient(grad_RO: torch.Tensor, x_RI: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """grad^T x of every expert, [E, O, I]."""
    counts_E = torch.tensor(counts, device=x_RI.device)
    found = torch.ops.npu.npu_grouped_matmul(
        [grad_RO.T], [x_RI], group_list=counts_E.cumsum(0), split_item=3, group_type=2, group_list_type=0
    )[0]
    # What a group without rows is left with is not documented.
    return torch.where((counts_E > 0)[:, None, None], found, 0)


def _blocks(
    weight_EOI: torch.Tensor, scale: torch.Tensor | None, counts: list[int], dtype: torch.dtype
) -> Iterator[Block]:
    """All rows, in blocks of as many experts as the workspace holds; float weights are one block."""
    E, device = len(counts), weight_EOI.device
    ends = [0, *accumulate(counts)]
    if scale is None:
        yield Block(slice(0, ends[-1]), weight_EOI.to(dtype).contiguous(), torch.tensor(ends[1:], device=device))
        return
    shape = weight_EOI.shape[1], 2 * weight_EOI.shape[2]
    size = max(1, WORKSPACE_BYTES // (shape[0] * shape[1] * dtype.itemsize))
    workspace = torch.empty(min(size, E), *shape, dtype=dtype, device=device)
    for first in range(0, E, size):
        last = min(first + size, E)
        if ends[first] == ends[last]:
            continue
        for expert in range(first, last):
            if counts[expert]:
                workspace[expert - first] = decode(weight_EOI[expert], scale[expert], dtype)
        own = torch.tensor([end - ends[first] for end in ends[first + 1 : last + 1]], device=device)
        yield Block(slice(ends[first], ends[last]), workspace[: last - first], own)


class GroupedMatmul(torch.autograd.Function):
    """`ops.GroupedMatmul` for at least one row."""

    @staticmethod
    def forward(ctx, x_RI: torch.Tensor, weight_EOI: torch.Tensor, scale: torch.Tensor | None, counts: list[int]):
        ctx.save_for_backward(x_RI if ctx.needs_input_grad[1] else None, weight_EOI, scale)
        ctx.counts = counts
        blocks = _blocks(weight_EOI, scale, counts, x_RI.dtype)
        return torch.cat([_product(x_RI[rows], weight.transpose(1, 2), ends) for rows, weight, ends in blocks])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RO: torch.Tensor):
        x_RI, weight_EOI, scale = ctx.saved_tensors
        grad_RO = grad_RO.contiguous()
        grad_RI = grad_EOI = None
        if ctx.needs_input_grad[0]:
            blocks = _blocks(weight_EOI, scale, ctx.counts, grad_RO.dtype)
            grad_RI = torch.cat([_product(grad_RO[rows], weight, ends) for rows, weight, ends in blocks])
        if ctx.needs_input_grad[1]:
            grad_EOI = _weight_gradient(grad_RO, x_RI, ctx.counts).to(weight_EOI.dtype)
        return grad_RI, grad_EOI, None, None


class Combine(torch.autograd.Function):
    """Sum of the rows of every token [T, L]: what the operator that sorts tokens has for a gradient, and the other way
    round. Unlike its counterpart it knows slots without a row."""

    @staticmethod
    def forward(ctx, y_RL: torch.Tensor, place_N: torch.Tensor, ids_TS: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids_TS)
        ctx.rows = len(y_RL)
        tokens, slots = ids_TS.shape
        return torch.ops.npu.npu_moe_token_permute_grad_v2(y_RL, place_N, tokens, y_RL.dtype, slots)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_TL: torch.Tensor):
        (ids_TS,) = ctx.saved_tensors
        return torch.ops.npu.npu_moe_token_permute(grad_TL.contiguous(), ids_TS, ctx.rows)[0], None, None


def grouped_linear(x_RI: torch.Tensor, matrices: Any, counts: list[int]) -> torch.Tensor:
    """`ops.grouped_linear`."""
    y_RO = GroupedMatmul.apply(x_RI, matrices.weight, matrices.scale, counts)
    for a_ErI, b_EOr, scaling in matrices.adapters:
        wide = torch.promote_types(x_RI.dtype, a_ErI.dtype)
        low_Rr = GroupedMatmul.apply(x_RI.to(wide), a_ErI.to(wide), None, counts)
        y_RO = y_RO + scaling * GroupedMatmul.apply(low_Rr, b_EOr.to(wide), None, counts)
    return y_RO.to(x_RI.dtype)


def expert_mlp(
    x_TL: torch.Tensor,
    ids_TS: torch.Tensor,
    weights_TS: torch.Tensor,
    gate_up: Any,
    down: Any,
    activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    choice: str,
) -> torch.Tensor | None:
    """`ops.expert_mlp`; gate_up, down: `ops.ExpertMatrices`; activation: of gate and up."""
    if not serves("expert_mlp", choice, x_TL, OPERATORS, lambda: _expert_problem(x_TL, ids_TS, gate_up, down)):
        return None
    experts = len(gate_up.weight)
    held_TS = (ids_TS >= 0) & (ids_TS < experts)
    # Slots of experts that are not held here sort behind all others and are cut off.
    ids_TS = torch.where(held_TS, ids_TS, experts)
    weights_TS = weights_TS.float().masked_fill(~held_TS, 0)
    counts = torch.bincount(ids_TS.flatten(), minlength=experts + 1)[:experts].tolist()
    if not sum(counts):
        # No rows would mean all rows: some expert gets one, whose weight is 0.
        counts[-1] = 1
    rows = sum(counts)
    x_RL, place_N = torch.ops.npu.npu_moe_token_permute(x_TL.contiguous(), ids_TS, rows)
    gate_RF, up_RF = grouped_linear(x_RL, gate_up, counts).chunk(2, dim=-1)
    y_RL = grouped_linear(activation(gate_RF, up_RF), down, counts).float()
    if rows == ids_TS.numel():
        return torch.ops.npu.npu_moe_token_unpermute(y_RL, place_N, probs=weights_TS)
    slot_R = place_N.argsort()[:rows]
    return Combine.apply(y_RL * weights_TS.flatten().gather(0, slot_R).unsqueeze(1), place_N, ids_TS)
