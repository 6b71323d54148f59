"""Forms in which rows travel between processes.

"bf16" rounds. "fp8" (e4m3) and "int8" keep a scale of fp32 for every row, so that its largest value is the largest one
of the form: a row of width L becomes bytes, L values, the scale at the end, between them what fills a multiple of 16.

Legend: R rows, L width of a row, W bytes of a row as it travels.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Form = Literal["bf16", "fp8", "int8"]

# dtype and largest value
SCALED = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}


def encode(values_RL: Tensor, form: Form | None) -> Tensor:
    """Floats [R, L] as they travel. A row with a value that is not finite comes out with NaN, not with wrong values."""
    if form is None:
        return values_RL
    if form == "bf16":
        return values_RL.to(torch.bfloat16)
    dtype, largest = SCALED[form]
    rows, width = values_RL.shape
    wide = torch.promote_types(values_RL.dtype, torch.float32)
    scale_R1 = torch.linalg.vector_norm(values_RL, math.inf, dim=1, keepdim=True, dtype=wide).float() / largest
    # a row of zeros divides by something
    scaled_RL = values_RL / scale_R1.clamp_(min=torch.finfo(torch.float32).tiny)
    bytes_RW = values_RL.new_empty(rows, (width + 4 + 15) // 16 * 16, dtype=torch.uint8)
    bytes_RW[:, :width].view(dtype).copy_(scaled_RL.round_() if form == "int8" else scaled_RL)
    bytes_RW[:, -4:].view(torch.float32).copy_(scale_R1)
    return bytes_RW


def decode(rows_RW: Tensor, form: Form | None, width: int, dtype: torch.dtype) -> Tensor:
    """What `encode` made of rows of this width -> [R, L] in `dtype`."""
    if form not in SCALED:
        return rows_RW.to(dtype)
    # bf16 holds every value of both forms: only the product is rounded
    values_RL = rows_RW[:, :width].view(SCALED[form][0]).to(dtype)
    return values_RL.mul_(rows_RW[:, -4:].view(torch.float32))
