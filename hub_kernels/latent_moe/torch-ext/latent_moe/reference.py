"""What the kernels compute, as plain torch: differentiable, and exact in float64.

Legend: T tokens, S slots per token, R rows sorted by expert, E experts, L latent width, F hidden width, N and K rows
        and columns of a matrix, r adapter rank.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .route_reference import Rows

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class LowRank(NamedTuple):
    """One adapter on a stack of matrices: adds `scaling * b a`. A factor with one matrix is shared by all experts."""

    a_ErK: torch.Tensor
    b_ENr: torch.Tensor
    scaling: float


class ExpertMatrices(NamedTuple):
    """One matrix per expert and the adapters on it.

    weight: float [E, N, K], or MXFP4 bytes uint8 [E, N, K / 2] with `scale` uint8 [E, N, K / 32].
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    adapters: tuple[LowRank, ...] = ()


def decode_reference(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """MXFP4 -> [..., K] in `dtype`: two values per byte, the lower nibble first, and 2^(s - 127) per 32 of them.

    A nibble is a sign bit and an index into MAGNITUDES; a scale of 255 is NaN.
    """
    wide = torch.promote_types(dtype, torch.float32)
    values = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=wide, device=packed.device)
    powers = torch.tensor([2.0 ** (s - 127) for s in range(255)] + [torch.nan], dtype=wide, device=packed.device)
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    groups = values[nibbles.int()].unflatten(-1, (-1, 32)) * powers[scale.int()].unsqueeze(-1)
    return groups.flatten(-2).to(dtype)


def activation_reference(
    gate: torch.Tensor, up: torch.Tensor, activation: str, beta: float | None, linear_beta: float | None
) -> torch.Tensor:
    """silu(g) u, or "situ": beta tanh(g / beta) sigmoid(g) times linear_beta tanh(u / linear_beta), rounded once.

    beta None is 1; linear_beta None leaves u as it is.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    if activation == "silu":
        return (F.silu(g) * u).to(gate.dtype)
    beta = 1.0 if beta is None else beta
    y = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return (y * (u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


def _linear(x_RK: torch.Tensor, matrices: ExpertMatrices, e: int) -> torch.Tensor:
    weight_NK = matrices.weight[e]
    if matrices.scale is not None:
        weight_NK = decode_reference(weight_NK, matrices.scale[e], x_RK.dtype)
    y_RN = F.linear(x_RK, weight_NK.to(x_RK.dtype))
    for a_ErK, b_ENr, scaling in matrices.adapters:
        wide = torch.promote_types(x_RK.dtype, a_ErK.dtype)
        a_rK, b_Nr = (f[e if len(f) > 1 else 0].to(wide) for f in (a_ErK, b_ENr))
        y_RN = y_RN + scaling * F.linear(F.linear(x_RK.to(wide), a_rK), b_Nr)
    return y_RN.to(x_RK.dtype)


def expert_mlp_reference(
    x_TL: torch.Tensor,
    rows: Rows,
    weights_TS: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    *,
    activation: str = "situ",
    beta: float | None = None,
    linear_beta: float | None = None,
) -> torch.Tensor:
    """Sum over a token's slots of weight * W_down act(W_gate x, W_up x): [T, L] in promote_types(dtype, float32).

    gate_up [E, 2F, L], gate rows first; down [E, L, F]. Results of matrices are rounded to the dtype of x, as
    `F.linear` does. Slots without a row add zero.
    """
    slots, wide = weights_TS.shape[1], torch.promote_types(x_TL.dtype, torch.float32)
    borders = rows.offset.tolist()
    token_R = rows.slot_R[: borders[-1]] // slots
    parts = [x_TL.new_empty(0, x_TL.shape[1])]
    for e, (start, end) in enumerate(pairwise(borders)):
        if end > start:
            gate, up = _linear(x_TL[token_R[start:end]], gate_up, e).chunk(2, dim=-1)
            parts.append(_linear(activation_reference(gate, up, activation, beta, linear_beta), down, e))
    # Behind the rows of all experts, one of zeros.
    y_RL = F.pad(torch.cat(parts).to(wide), (0, 0, 0, 1))
    y_TSL = y_RL[torch.where(rows.row_TS < 0, borders[-1], rows.row_TS)]
    return (y_TSL * weights_TS.to(wide).unsqueeze(-1)).sum(1)
