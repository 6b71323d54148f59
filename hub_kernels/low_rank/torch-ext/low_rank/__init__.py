"""Low-rank updates (LoRA) of dense layers for Hopper: fp32 factors beside 16-bit rows, nothing of the rows copied."""

from . import layers, reference
from .update import add_low_rank

__all__ = ["add_low_rank", "layers", "reference"]
