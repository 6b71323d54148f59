"""The definition in plain torch; products run in `promote_types(dtype, float32)`, so float64 works too.

Legend: r rank, I and O widths of a layer's input and output; leading axes are free.
"""

import torch
import torch.nn.functional as F


def add_low_rank(
    y: torch.Tensor, x: torch.Tensor, a_rI: torch.Tensor, b_Or: torch.Tensor, scaling: float
) -> torch.Tensor:
    """y + scaling * (x a^T) b^T for x [..., I] and y [..., O], in the widest dtype of all and fp32, rounded to y's.

    The low-rank adaptation of a layer with output y (Hu et al., "LoRA", 2021).
    """
    wide = torch.promote_types(torch.promote_types(x.dtype, a_rI.dtype), torch.float32)
    low = F.linear(x.to(wide), a_rI.to(wide))
    return (y + F.linear(low, b_Or.to(wide)) * scaling).to(y.dtype)
