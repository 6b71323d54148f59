"""Triton kernel: rows in 8 bits, each with a scale of its own.

Sizes: R rows of width K. Tiles: BR rows.
"""

import torch
import triton
import triton.language as tl

# What the largest number of a row becomes.
LIMITS = {"fp8": 448.0, "int8": 127.0}
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
ROWS, WARPS = 32, 4


@triton.jit(do_not_specialize=["R"])
def quantise_kernel(x, weight, y, scale, R, LIMIT: tl.constexpr, K: tl.constexpr, BR: tl.constexpr):
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    m_r = o_r < R
    o_x = o_r[:, None] * K + tl.arange(0, K)[None, :]
    b_x = tl.load(x + o_x, mask=m_r[:, None], other=0.0).to(tl.float32)
    b_s = tl.max(tl.abs(b_x), axis=1) / LIMIT
    b_y = b_x / tl.where(b_s > 0, b_s, 1.0)[:, None]
    if y.dtype.element_ty == tl.int8:
        # To the nearest integer: numbers of this size have no bits for fractions.
        b_y = (b_y + 12582912.0) - 12582912.0
    tl.store(y + o_x, b_y.to(y.dtype.element_ty), mask=m_r[:, None])
    if weight is not None:
        b_s *= tl.load(weight + o_r, mask=m_r, other=0.0).to(tl.float32)
    tl.store(scale + o_r, b_s, mask=m_r)


def quantise(x: torch.Tensor, weight: torch.Tensor | None, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] in 8 bits, and what to multiply its products by: scales fp32 [...], times the weight if there is one.

    precision: "fp8" (e4m3) or "int8".
    """
    y = torch.empty_like(x, dtype=DTYPES[precision])
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    quantise_kernel[(triton.cdiv(scale.numel(), ROWS),)](
        x, weight, y, scale, scale.numel(), LIMIT=LIMITS[precision], K=x.shape[-1], BR=ROWS, num_warps=WARPS
    )
    return y, scale
