"""Sparse latent attention for Hopper: an indexer that selects keys and learns, and attention to what it selects."""

from . import layers
from .attention import sparse_attention
from .index import index_topk
from .index_reference import index_scores_reference, index_topk_reference
from .loss import indexer_loss
from .loss_dense import dense_indexer_loss
from .loss_reference import indexer_loss_reference
from .probabilities import head_probabilities
from .reference import head_probabilities_reference, sparse_attention_reference

__all__ = [
    "dense_indexer_loss",
    "head_probabilities",
    "head_probabilities_reference",
    "index_scores_reference",
    "index_topk",
    "index_topk_reference",
    "indexer_loss",
    "indexer_loss_reference",
    "layers",
    "sparse_attention",
    "sparse_attention_reference",
]
