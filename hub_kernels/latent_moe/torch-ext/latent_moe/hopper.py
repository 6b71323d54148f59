"""Launches of the grouped products on Hopper: descriptors of what the copy engine loads, and tiles of rows.

Shapes: R rows sorted by expert, E experts, N and K rows and columns of a matrix, S slots per token.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper_kernels import BK, BO, BR, BX, lane_factors_kernel, product_kernel, row_tiles_kernel
from .integers import cdiv, next_power_of_2
from .mxfp4 import contraction_order

# Rows of the largest tiles.
BM = 256
# Tiles in shared memory at a time: what fits.
STAGES = {True: 5, False: 4}


@triton.jit
def gather_kernel(
    x, slots, offsets, y, E: tl.constexpr, S: tl.constexpr, K: tl.constexpr, ORDERED: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Row r of y is the token of slot r, in contraction order if ORDERED."""
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)[None, :]
    m_m = o_m < tl.load(offsets + E)
    p_x = x + (tl.load(slots + o_m, mask=m_m, other=0) // S).to(tl.int64)[:, None] * K + o_k
    b_x = tl.load(p_x, mask=m_m[:, None] & (o_k < K), other=0.0)
    if ORDERED:
        b_x = contraction_order(b_x, BM, BK)
    tl.store(y + o_m.to(tl.int64)[:, None] * K + o_k, b_x, mask=m_m[:, None] & (o_k < K))


def gathered(x_TK: torch.Tensor, slot_R: torch.Tensor, offset: torch.Tensor, slots: int, ordered: bool) -> torch.Tensor:
    """[R, K]: the tokens of the sorted slots, in contraction order if asked for."""
    R, K, BR, BC = len(slot_R), x_TK.shape[1], 16, 512
    y_RK = x_TK.new_empty(R, K)
    gather_kernel[(cdiv(R, BR), cdiv(K, BC))](
        x_TK, slot_R, offset, y_RK, len(offset) - 1, slots, K, ordered, BR, BC, num_warps=4
    )
    return y_RK


def row_tiles(offset: torch.Tensor, rows: int) -> torch.Tensor:
    """int32 [tiles + 1, 4]: see row_tiles_kernel."""
    E, BT = len(offset) - 1, 32
    count = cdiv(rows, BM) + E
    tiles = offset.new_empty(count + 1, 4)
    row_tiles_kernel[(cdiv(count, BT),)](offset, tiles, count, E, BM, next_power_of_2(E), BT, num_warps=4)
    return tiles


def lane_factors(scale: torch.Tensor) -> torch.Tensor:
    """int32 [E, G, N / 64, 32]: pairs of factors of scales [E, N, G] as W^T x loads them, see lane_factors_kernel."""
    (E, N, G), BG = scale.shape, 32
    y = scale.new_empty(E, G, N // 64, 64, dtype=torch.int16)
    lane_factors_kernel[(E, N // 64, cdiv(G, BG))](scale, y, N, G, BG, num_warps=4)
    return y.view(torch.int32)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _layout(swizzle: int, bits: int, dimensions: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle, bits, dimensions)


def _described(
    x: torch.Tensor, shape: list[int], strides: list[int], block: list[int], swizzle: int
) -> TensorDescriptor:
    return TensorDescriptor(x, shape, strides, block, _layout(swizzle, 8 * x.dtype.itemsize, len(block)))


def _weights(weight: torch.Tensor, packed: bool, forward: bool, gated: bool) -> TensorDescriptor:
    """A warpgroup's tile: forward [64 rows, 64 columns], rows of gates and ups in turns of eight, else transposed."""
    swizzle = 32 if packed else 128
    if packed:
        weight = weight.view(torch.int32 if forward else torch.int16)
    word = {torch.int32: 8, torch.int16: 4}.get(weight.dtype, 1)
    (E, N, K), block = weight.shape, BK.value // word
    if not forward:
        return _described(weight, [E, N, K], [N * K, K, 1], [1, BK.value, BO.value // word], swizzle)
    # [E, rows / 16, 2, 8, K]
    strides = [N * K, 8 * K, N // 2 * K, K, 1] if gated else [N * K, 16 * K, 8 * K, K, 1]
    return _described(weight, [E, N // 16, 2, 8, K], strides, [1, BO.value // 16, 2, 8, block], swizzle)


def product(
    x_RK: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    tiles: torch.Tensor,
    forward: bool,
    y: torch.Tensor | None,
    h: torch.Tensor | None = None,
    ordered: bool = False,
    low: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    stride: int = 0,
    scaling: float = 1.0,
    beta: float = 1.0,
    linear_beta: float = 1.0,
    ACTIVATION: int = 0,
) -> None:
    """y [R, N] = W x of every row of x [R, K], or W^T x; plus scaling * factor^T low, see products.add_low_rank.

    tiles are those of `row_tiles`. With h [R, N / 2], y are gates and ups, or None, and h their activation, in
    contraction order if `ordered`.
    """
    (R, K), packed, gated = x_RK.shape, scale is not None, h is not None
    N = 2 * h.shape[1] if gated else y.shape[1]
    rank, steps = 0, 0
    if low is not None:
        rank, steps = factor.shape[1], cdiv(factor.shape[1], BR.value)
        low = _described(low, list(low.shape), list(low.stride()), [BX.value, BR.value], 128)
    x, weights = _described(x_RK, [R, K], [K, 1], [BX.value, BK.value], 128), _weights(weight, packed, forward, gated)
    if packed and not forward:
        scale = lane_factors(scale)
    product_kernel[(multiprocessors(x_RK.device),)](
        x, weights, scale, low, factor, rank, y, h, tiles, stride, scaling, beta, linear_beta, N, K,
        forward, packed, gated, ordered, ACTIVATION, steps, BM, STAGES[packed], num_warps=4,
    )  # fmt: skip
