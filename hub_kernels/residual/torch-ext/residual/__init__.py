"""Attention residual and gated RMSNorm for Hopper: fused forward and backward that save nothing but their inputs.

On Ascend, by kernels that Triton-Ascend compiles.
"""

from . import layers, reference
from .gated_norm import gated_rms_norm
from .mixture import attn_residual

__all__ = ["attn_residual", "gated_rms_norm", "layers", "reference"]
