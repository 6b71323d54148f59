"""Cross-entropy of a frozen linear head, without the logits of all tokens."""

from . import layers
from .autograd import linear_cross_entropy
from .reference import linear_cross_entropy_reference

__all__ = ["layers", "linear_cross_entropy", "linear_cross_entropy_reference"]
