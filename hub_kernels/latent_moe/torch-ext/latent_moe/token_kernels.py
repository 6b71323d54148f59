"""From rows back to tokens: sums over the slots of a token, in their order.

Sizes: T tokens, S slots per token, R rows, D width. Tiles: BD columns, BS >= S slots, BT tokens.
"""

import torch
import triton
import triton.language as tl

from .integers import cdiv, next_power_of_2


@triton.jit
def sum_kernel(
    y, row_of_slot, weights, out, dots, dweights, R, S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """out [T, D] = sum over slots of weight * y [R, D] of the slot's row, in fp32; a row from R on makes it NaN.

    Also dweights [T, S], if there are dots [R]: the dot of the slot's row; zero without a row, NaN for a row from R on.
    """
    i_t, i_d = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < D
    acc = tl.zeros([BD], tl.float32)
    # Unrolled and without branches: the rows of all slots are on their way at once.
    for i_s in tl.static_range(S):
        row = tl.load(row_of_slot + i_t * S + i_s)
        held = (row >= 0) & (row < R)
        b_y = tl.load(y + row.to(tl.int64) * D + o_d, mask=m_d & held, other=0.0).to(tl.float32)
        if weights is not None:
            b_y *= tl.load(weights + i_t * S + i_s).to(tl.float32)
        acc += tl.where(row < R, b_y, float("nan"))
        if dots is not None:
            b_d = tl.load(dots + row, mask=held & (i_d == 0), other=0.0)
            b_d = tl.where(row < R, b_d, float("nan")).to(dweights.dtype.element_ty)
            tl.store(dweights + i_t * S + i_s, b_d, mask=i_d == 0)
    tl.store(out + i_t * D + o_d, acc.to(out.dtype.element_ty), mask=m_d)


def sum_slots(
    y_RD: torch.Tensor,
    row_TS: torch.Tensor,
    weights_TS: torch.Tensor | None,
    dtype: torch.dtype,
    dots_R: torch.Tensor | None = None,
    dots_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[T, D] in `dtype`: of every token, the sum of its rows, weighted if weights are given.

    With dots, also [T, S] in `dots_dtype`: of every slot, the dot of its row.
    """
    (T, S), (R, D) = row_TS.shape, y_RD.shape
    out_TD, BD = y_RD.new_empty(T, D, dtype=dtype), min(1024, next_power_of_2(D))
    dots_TS = None if dots_R is None else torch.empty_like(row_TS, dtype=dots_dtype)
    sum_kernel[(T, cdiv(D, BD))](
        y_RD, row_TS, weights_TS, out_TD, dots_R, dots_TS, R, S, D, BD, num_warps=max(1, BD // 256)
    )
    return out_TD, dots_TS
