"""Kimi Delta Attention for Hopper: the chunked recurrence with gradients, short convolutions, and one decoding step."""

from . import layers
from .chunk import chunk_kda
from .conv import short_conv
from .decode import decode_kda, step_kda
from .reference import chunk_kda_reference, decode_kda_reference, short_conv_reference, step_kda_reference

__all__ = [
    "chunk_kda",
    "chunk_kda_reference",
    "decode_kda",
    "decode_kda_reference",
    "layers",
    "short_conv",
    "short_conv_reference",
    "step_kda",
    "step_kda_reference",
]
