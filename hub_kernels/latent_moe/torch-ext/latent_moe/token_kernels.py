"""From rows back to tokens: sums over the slots of a token, in their order.

Sizes: T tokens, S slots per token, R rows, D width. Tiles: BD columns, BS >= S slots, BT tokens.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def sum_kernel(y, row_of_slot, weights, out, R, S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """out [T, D] = sum over slots of weight * y [R, D] of the slot's row, in fp32; a row from R on makes it NaN."""
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    acc = tl.zeros([BD], tl.float32)
    # Unrolled and without branches: the rows of all slots are on their way at once.
    for i_s in tl.static_range(S):
        row = tl.load(row_of_slot + i_t * S + i_s)
        b_y = tl.load(y + row.to(tl.int64) * D + o_d, mask=m_d & (row >= 0) & (row < R), other=0.0).to(tl.float32)
        if weights is not None:
            b_y *= tl.load(weights + i_t * S + i_s).to(tl.float32)
        acc += tl.where(row < R, b_y, float("nan"))
    tl.store(out + i_t * D + o_d, acc.to(out.dtype.element_ty), mask=m_d)


@triton.jit
def weight_gradient_kernel(dots, row_of_slot, dweights, R, SLOTS, BS: tl.constexpr):
    """dweights of every slot: the dot of its row; zero without a row, NaN for a row from R on."""
    o_s = tl.program_id(0).to(tl.int64) * BS + tl.arange(0, BS)
    row = tl.load(row_of_slot + o_s, mask=o_s < SLOTS, other=-1)
    b_d = tl.load(dots + row, mask=(row >= 0) & (row < R), other=0.0)
    b_d = tl.where(row < R, b_d, float("nan"))
    tl.store(dweights + o_s, b_d.to(dweights.dtype.element_ty), mask=o_s < SLOTS)


def sum_slots(
    y_RD: torch.Tensor, row_TS: torch.Tensor, weights_TS: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """[T, D] in `dtype`: of every token, the sum of its rows, weighted if weights are given."""
    (T, S), (R, D) = row_TS.shape, y_RD.shape
    out_TD, BD = y_RD.new_empty(T, D, dtype=dtype), min(1024, triton.next_power_of_2(D))
    sum_kernel[(T, triton.cdiv(D, BD))](y_RD, row_TS, weights_TS, out_TD, R, S, D, BD, num_warps=max(1, BD // 256))
    return out_TD


def weight_gradient(dots_R: torch.Tensor, row_TS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, S]: the gradient of every slot's weight, from the dots of the rows."""
    slots, BS = row_TS.numel(), 256
    dweights_TS = torch.empty_like(row_TS, dtype=dtype)
    weight_gradient_kernel[(triton.cdiv(slots, BS),)](dots_R, row_TS, dweights_TS, len(dots_R), slots, BS, num_warps=4)
    return dweights_TS
