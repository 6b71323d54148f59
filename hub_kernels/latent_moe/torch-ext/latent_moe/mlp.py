"""The plan of the expert MLP: which kernels, in which order, with which tiles.

Shapes: T tokens, S slots per token, R rows sorted by expert, E experts, L latent width, F hidden width, N and K rows
and columns of a matrix, r adapter rank.

Packed weights are decoded where they are multiplied. Elsewhere than on Hopper, where experts have many rows each,
decoding the same weights again for every tile of rows may cost more than decoding them once into memory: then a
workspace takes as many experts at a time as it has room for.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton

from .activation import activation_backward_kernel, activation_code, fast
from .expert_kernels import backward_kernel, forward_kernel, gate_up_kernel
from .integers import cdiv, next_power_of_2
from .low_rank import factor_gradient, low_rank, precision, rank_tile
from .mxfp4 import decode, in_contraction_order, packed_arithmetic
from .token_kernels import sum_slots

try:
    from . import hopper
except ImportError:
    # A Triton without Gluon, or with another one.
    hopper = None

# Rows per expert, on average, from which packed weights are decoded into the workspace first: between measured sizes.
WORKSPACE_ROWS = 600
# Decoded weights held at a time, at least one expert's.
WORKSPACE_BYTES = 2**30
# Rows per expert, on average, below which tiles of 64 rows waste less than tiles of 128: at 146, three of the four
# products were faster in the latter.
SMALL_TILE_ROWS = 96

_PACKED = {
    "gate_up": {"BM": 128, "BN": 128, "BK": 128, "num_warps": 8, "num_stages": 3},
    "forward": {"BM": 64, "BN": 128, "BK": 128, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
    "backward": {"BM": 128, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 3},
}
_FLOAT = {name: {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3} for name in _PACKED}
# Exact products of fp32 hold their operands in registers.
_EXACT = {"BM": 16, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 1}


class Matrices(NamedTuple):
    """Matrices [E, N, K] and one adapter. weight: float, or uint8 [E, N, K / 2] beside scale uint8 [E, N, K / 32].

    a [E, r, K] and b [E, r, N], or both None: adds `scaling` b^T a.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None
    a: torch.Tensor | None
    b: torch.Tensor | None
    scaling: float

    @property
    def shape(self) -> tuple[int, int, int]:
        E, N, K = self.weight.shape
        return E, N, K if self.scale is None else 2 * K

    def experts(self, chosen: slice) -> "Matrices":
        return Matrices(*(x if x is None else x[chosen] for x in self[:4]), self.scaling)


@dataclasses.dataclass
class Plan:
    """Where rows are, and the activation."""

    slot_R: torch.Tensor
    row_TS: torch.Tensor
    offset: torch.Tensor
    activation: str
    beta: float
    linear_beta: float | None

    @property
    def slots(self) -> int:
        return self.row_TS.shape[1]

    @property
    def rows(self) -> int:
        return len(self.slot_R)

    @functools.cached_property
    def tiles(self) -> torch.Tensor:
        """Of the products for Hopper, the same in all of them."""
        return hopper.row_tiles(self.offset, self.rows)

    def act(self) -> dict[str, Any]:
        linear_beta = 1.0 if self.linear_beta is None else self.linear_beta
        code = activation_code(self.activation, self.linear_beta)
        return {"beta": self.beta, "linear_beta": linear_beta, "ACTIVATION": code}


def on_hopper(x: torch.Tensor, matrices: Matrices, rows: int) -> bool:
    """Whether products run in the kernels written for Hopper: bf16, widths in multiples of 64."""
    if hopper is None or x.dtype != torch.bfloat16 or rows == 0 or triton.knobs.runtime.interpret:
        return False
    # The copy engine brings float weights as they are, and the bits of others would be multiplied as bf16.
    if matrices.scale is None and matrices.weight.dtype != torch.bfloat16:
        return False
    _, N, K = matrices.shape
    return N % 64 == K % 64 == 0 and torch.cuda.get_device_capability(x.device)[0] == 9


def decodes_inside(x: torch.Tensor, matrices: Matrices, rows: int) -> bool:
    """Whether the products decode packed weights, and so expect rows in contraction order."""
    if matrices.scale is None:
        return False
    return on_hopper(x, matrices, rows) or rows < WORKSPACE_ROWS * len(matrices.weight)


def _parts(
    x: torch.Tensor, matrices: Matrices, offset: torch.Tensor, rows: int
) -> Iterator[tuple[Matrices, torch.Tensor]]:
    """The experts that are multiplied in one launch, and their offsets."""
    if matrices.scale is None or decodes_inside(x, matrices, rows):
        yield matrices, offset
        return
    E, N, K = matrices.shape
    size = min(E, max(1, WORKSPACE_BYTES // (N * K * x.dtype.itemsize)))
    workspace = x.new_empty(size, N, K)
    for first in range(0, E, size):
        part = matrices.experts(slice(first, first + size))
        decoded = workspace[: len(part.weight)]
        decode(part.weight, part.scale, decoded)
        yield part._replace(weight=decoded, scale=None), offset[first : first + size + 1]


def _tiles(product: str, part: Matrices, rows: int, dtype: torch.dtype) -> dict[str, int]:
    if dtype == torch.float32:
        return _EXACT
    tiles = (_FLOAT if part.scale is None else _PACKED)[product]
    return {**tiles, "BM": 64} if rows < SMALL_TILE_ROWS * len(part.weight) else tiles


def _options(
    product: str, part: Matrices, outputs: int, rows: int, dtype: torch.dtype
) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and keyword arguments that the kernels have in common; `outputs` per tile of BN."""
    tiles = _tiles(product, part, rows, dtype)
    E, packed = len(part.weight), part.scale is not None
    rank = 1 if part.a is None else part.a.shape[1]
    grid = (cdiv(rows, tiles["BM"]) + E) * cdiv(outputs, tiles["BN"])
    return (grid,), {
        **tiles,
        "E": E,
        "RANK": rank,
        "BR": rank_tile(rank),
        "BE": next_power_of_2(E),
        "PACKED": packed,
        "PTX": packed and packed_arithmetic(dtype),
        "PRECISION": precision(dtype),
        "LOW_PRECISION": precision(dtype),
    }


def _adapter(low_RP: torch.Tensor | None, factor_ErN: torch.Tensor | None, scaling: float) -> dict[str, Any]:
    if low_RP is None:
        return {"low": None, "factor": None, "stride": 0, "scaling": 1.0}
    return {"low": low_RP, "factor": factor_ErN, "stride": factor_ErN.stride(0), "scaling": scaling}


def _words(weight: torch.Tensor, packed: bool, dtype: torch.dtype) -> torch.Tensor:
    return weight.view(dtype) if packed else weight


def _gate_up(
    x_TL: torch.Tensor, low_RP: torch.Tensor | None, gate_up: Matrices, plan: Plan, keep: bool, ordered: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h [R, F], or in contraction order, and gates and ups [R, 2F] if kept."""
    (_, N, L), R, F = gate_up.shape, plan.rows, gate_up.shape[1] // 2
    inside = decodes_inside(x_TL, gate_up, R)
    h = x_TL.new_empty(R, F)
    gu_RF = x_TL.new_empty(R, N) if keep else None
    if on_hopper(x_TL, gate_up, R):
        x_RL = hopper.gathered(x_TL, plan.slot_R, plan.offset, plan.slots, inside)
        adapter = _adapter(low_RP, gate_up.b, gate_up.scaling)
        hopper.product(
            x_RL, gate_up.weight, gate_up.scale, plan.tiles, True, gu_RF, h, ordered, **adapter, **plan.act()
        )
        return h, gu_RF
    x = in_contraction_order(x_TL) if inside else x_TL
    for part, offset in _parts(x_TL, gate_up, plan.offset, R):
        packed = part.scale is not None
        grid, options = _options("gate_up", part, N, R, x_TL.dtype)
        gate_up_kernel[grid](
            x, plan.slot_R, offset, _words(part.weight, packed, torch.int32), part.scale,
            gate_up=gu_RF, h=h, R=R, S=plan.slots, L=L, F=F, FAST=fast(x_TL.dtype),
            ORDERED=ordered, **_adapter(low_RP, part.b, part.scaling), **plan.act(), **options,
        )  # fmt: skip
    return h, gu_RF


def _forward(x: torch.Tensor, low_RP: torch.Tensor | None, matrices: Matrices, plan: Plan) -> torch.Tensor:
    (_, N, K), R = matrices.shape, plan.rows
    y_RN = x.new_empty(R, N)
    if on_hopper(x, matrices, R):
        adapter = _adapter(low_RP, matrices.b, matrices.scaling)
        hopper.product(x, matrices.weight, matrices.scale, plan.tiles, True, y_RN, **adapter)
        return y_RN
    for part, offset in _parts(x, matrices, plan.offset, R):
        packed = part.scale is not None
        grid, options = _options("forward", part, N, R, x.dtype)
        forward_kernel[grid](
            x, offset, _words(part.weight, packed, torch.int32), part.scale, y=y_RN, R=R, N=N, K=K,
            **_adapter(low_RP, part.b, part.scaling), **options,
        )  # fmt: skip
    return y_RN


def _backward(
    dy: torch.Tensor, slot_R: torch.Tensor | None, low_RP: torch.Tensor | None, matrices: Matrices, plan: Plan
) -> torch.Tensor:
    (_, N, K), R = matrices.shape, plan.rows
    dx_RK = dy.new_empty(R, K)
    if on_hopper(dy, matrices, R):
        dy_RN = dy if slot_R is None else hopper.gathered(dy, slot_R, plan.offset, plan.slots, False)
        adapter = _adapter(low_RP, matrices.a, matrices.scaling)
        hopper.product(dy_RN, matrices.weight, matrices.scale, plan.tiles, False, dx_RK, **adapter)
        return dx_RK
    for part, offset in _parts(dy, matrices, plan.offset, R):
        packed = part.scale is not None
        grid, options = _options("backward", part, K, R, dy.dtype)
        backward_kernel[grid](
            dy, slot_R, offset, _words(part.weight, packed, torch.int16), part.scale, dx=dx_RK, R=R, S=plan.slots, N=N,
            K=K, **_adapter(low_RP, part.a, part.scaling), **options,
        )  # fmt: skip
    return dx_RK


class Kept(NamedTuple):
    """What forward leaves for backward: gates and ups [R, 2F] or None, and low-rank rows or None, see low_rank.py."""

    gate_up_RF: torch.Tensor | None
    low_gate_up_RP: torch.Tensor | None
    low_down_RP: torch.Tensor | None


def forward(
    x_TL: torch.Tensor, weights_TS: torch.Tensor, gate_up: Matrices, down: Matrices, plan: Plan, keep: bool
) -> tuple[torch.Tensor, Kept]:
    """The sum over the slots of every token, fp32 [T, L]."""
    R = plan.rows
    low_1 = low_2 = None
    if gate_up.a is not None:
        low_1 = low_rank(x_TL, plan.slot_R, plan.offset, gate_up.a, plan.slots, R)
    ordered = decodes_inside(x_TL, down, R)
    h, gu_RF = _gate_up(x_TL, low_1, gate_up, plan, keep, ordered)
    if down.a is not None:
        low_2 = low_rank(h, None, plan.offset, down.a, 1, R, ordered)
    y_RL = _forward(h, low_2, down, plan)
    del h
    out_TL, _ = sum_slots(y_RL, plan.row_TS, weights_TS, torch.float32)
    return out_TL, Kept(gu_RF, low_1, low_2)


class Gradients(NamedTuple):
    """None where there is no such input."""

    x_TL: torch.Tensor
    weights_TS: torch.Tensor
    gate_up_a: torch.Tensor | None
    gate_up_b: torch.Tensor | None
    down_a: torch.Tensor | None
    down_b: torch.Tensor | None


def backward(
    dout_TL: torch.Tensor,
    x_TL: torch.Tensor,
    weights_TS: torch.Tensor,
    gate_up: Matrices,
    down: Matrices,
    plan: Plan,
    kept: Kept,
) -> Gradients:
    """Gates and ups that were kept are lost: their gradients take their place."""
    R, slots, offset, slot_R = plan.rows, plan.slots, plan.offset, plan.slot_R
    E, N, _ = gate_up.shape
    F = N // 2
    dy_TL = dout_TL.to(x_TL.dtype)
    gu_RF = kept.gate_up_RF
    if gu_RF is None:
        _, gu_RF = _gate_up(x_TL, kept.low_gate_up_RP, gate_up, plan, keep=True, ordered=False)
    low_2 = None if down.a is None else low_rank(dy_TL, slot_R, offset, down.b, slots, R)
    dh_RF = _backward(dy_TL, slot_R, low_2, down, plan)
    dots_R = gu_RF.new_empty(R, dtype=torch.float32)
    BF = min(2048, next_power_of_2(F))
    activation_backward_kernel[(R,)](
        gu_RF, dh_RF, slot_R, weights_TS, offset, dots_R, R, **plan.act(), E=E, F=F,
        KEEP=down.a is not None, FAST=fast(x_TL.dtype), BF=BF, num_warps=max(1, BF // 256),
    )  # fmt: skip
    dgu_RF, h_RF = gu_RF, dh_RF
    del gu_RF, dh_RF
    da_1 = db_1 = da_2 = db_2 = low_1 = None
    if down.a is not None:
        da_2 = factor_gradient(low_2, h_RF, slot_R, weights_TS, offset, down.a, down.scaling, slots, False)
        db_2 = factor_gradient(kept.low_down_RP, dy_TL, slot_R, weights_TS, offset, down.b, down.scaling, slots, True)
    del h_RF
    if gate_up.a is not None:
        low_1 = low_rank(dgu_RF, None, offset, gate_up.b, 1, R)
        da_1 = factor_gradient(low_1, x_TL, slot_R, None, offset, gate_up.a, gate_up.scaling, slots, True)
        db_1 = factor_gradient(
            kept.low_gate_up_RP, dgu_RF, None, None, offset, gate_up.b, gate_up.scaling, slots, False
        )
    dx_RL = _backward(dgu_RF, None, low_1, gate_up, plan)
    dx_TL, dweights_TS = sum_slots(dx_RL, plan.row_TS, None, x_TL.dtype, dots_R, weights_TS.dtype)
    return Gradients(dx_TL, dweights_TS, da_1, db_1, da_2, db_2)
