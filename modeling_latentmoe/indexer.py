"""The lightning indexer of sparse attention: what it chooses, and what it learns from (DeepSeek-V3.2 report, 2.1).

A "full" layer owns an indexer; the "shared" layers behind it reuse its choice, through whatever lies between
(IndexCache). With `index_kpool` above 1 keys are chosen in pools of so many tokens, and the last, incomplete pool of a
query is always attended to (GLM-5.3-Flash).

An indexer learns from its own loss alone: the divergence of its scores from the attention that it serves, over all
visible keys while attention is dense (warm-up), over the chosen ones after. `config.indexer_loss` turns it on in
training; inputs of the indexer and the attention that it learns from are detached.

Legend: B batch, T tokens, S keys, D model width, Q query latent, I index heads, K index width; M, k, G, P, N, L as in
        documents.py and sparse.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .cache import LayerCache
from .configuration_latentmoe import LatentMoETextConfig
from .documents import Documents
from .layers import WideProduct
from .ops import (
    Heads,
    dense_indexer_loss,
    fused_dense_indexer_loss,
    fused_indexer_loss,
    head_probabilities,
    index_topk,
    indexer_loss,
)
from .sparse import Student, Teacher, keys_of_pools, pool_keys, with_tail

INDEX_NORM_EPS = 1e-6


class Choice(NamedTuple):
    """What a full layer hands to the shared layers behind it.

    index_Mk: chosen keys of every real token, int32, ascending, -1 behind the last one (documents.py has the
    positions); None while every document fits into index_topk, or attention is dense. candidates_Mk: the pools among
    them, or the same. student: what the scores come from, where the indexer learns. losses: of every layer so far that
    has a student, summed over tokens.
    """

    index_Mk: torch.Tensor | None
    candidates_Mk: torch.Tensor | None = None
    student: Student | None = None
    losses: tuple[torch.Tensor, ...] = ()


class WideLinear(nn.Linear):
    """A linear layer that multiplies in fp32 (or wider), whatever the dtype of input and weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WideProduct.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class LightningIndexer(nn.Module):
    """Scores every key for every query with a few cheap heads."""

    def __init__(self, config: LatentMoETextConfig):
        super().__init__()
        self.config = config
        self.heads, self.head_dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.pool = config.index_kpool
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=INDEX_NORM_EPS)
        self.weights_proj = WideLinear(config.hidden_size, self.heads, bias=False)
        if self.pool > 1:
            self.index_kpool_compress_gate = nn.Parameter(torch.zeros(self.head_dim, config.hidden_size))
            self.index_kpool_compress_ape = nn.Parameter(torch.zeros(self.pool, self.head_dim))

    def keys(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """One key per token, shared by all index heads, [B, T, K]; with pools the logits of its mixture behind it,
        [B, T, 2 K]."""
        # While an indexer learns it is fp32 in a model that may be bf16.
        x = x_BTD.to(self.wk.weight.dtype)
        k = self.k_norm(self.wk(x))
        if self.pool > 1:
            k = torch.cat([k, F.linear(x, self.index_kpool_compress_gate)], dim=-1)
        return k.to(x_BTD.dtype)

    def queries(self, x_BTD: torch.Tensor, c_BTQ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [B, T, I, K] and fp32 weights of the heads [B, T, I] from the layer input and the query latent."""
        q_BTIK = self.wq_b(c_BTQ.to(self.wq_b.weight.dtype)).unflatten(-1, (self.heads, self.head_dim))
        return q_BTIK.to(x_BTD.dtype), self.weights_proj(x_BTD) * self.heads**-0.5

    def forward(
        self, x_BTD: torch.Tensor, c_BTQ: torch.Tensor, documents: Documents, cache: LayerCache | None = None
    ) -> Choice | None:
        """The choice for a layer input and its query latent, which get no gradient; None where there is neither a
        choice to make nor anything to learn."""
        x_BTD, c_BTQ = x_BTD.detach(), c_BTQ.detach()
        learns = self.config.indexer_loss and self.training
        chooses = documents.longest > self.topk and not self.config.dense_attention
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            # Keys are remembered from the first token on: a later call may need them.
            keys_BSK = self.keys(x_BTD)
            if cache is not None:
                keys_BSK = cache.append("index_keys", keys_BSK)
            if not (learns or chooses):
                return None
            student = self.student(x_BTD, c_BTQ, keys_BSK, documents)
        choice = self.choose(student, documents) if chooses else Choice(None)
        return choice._replace(student=student if learns else None)

    def student(
        self, x_BTD: torch.Tensor, c_BTQ: torch.Tensor, keys_BSK: torch.Tensor, documents: Documents
    ) -> Student:
        """What the scores of packed tokens come from."""
        q_MIK, weight_MI = (documents.pack(y) for y in self.queries(x_BTD, c_BTQ))
        k_GK = documents.pack_keys(keys_BSK)
        if self.pool > 1:
            k_SK, logit_SK = k_GK.chunk(2, dim=-1)
            k_GK = pool_keys(k_SK, logit_SK, self.index_kpool_compress_ape, documents.pools(self.pool))
        return Student(q_MIK, k_GK, weight_MI)

    def choose(self, student: Student, documents: Documents) -> Choice:
        """The best keys of every packed token, or the keys of its best pools and those behind the last pool."""
        config, (first_M, end_M) = self.config, documents.key_ranges
        if self.pool == 1:
            index_Mk = index_topk(*student, first_M, end_M, self.topk, config.index_relu, config.kernels)
            return Choice(index_Mk, index_Mk)
        pools = documents.pools(self.pool)
        most, ranges = self.topk // self.pool, (pools.first_T, pools.end_T)
        chosen_Mk = index_topk(*student, *ranges, most, config.index_relu, config.kernels)
        return Choice(with_tail(keys_of_pools(chosen_Mk, pools), pools, first_M, end_M), chosen_Mk)


def divergence(
    choice: Choice,
    teacher: Teacher,
    lse_MN: torch.Tensor | None,
    value_width: int,
    documents: Documents,
    config: LatentMoETextConfig,
    heads: Callable[[], Heads],
) -> torch.Tensor:
    """KL(attention || indexer) of a layer, summed over the real tokens: over the chosen keys where there is a choice,
    whose log-sum-exp is lse_MN, and over all visible ones else. The teacher is detached; heads: makes
    its queries, keys and values as they were before they were absorbed."""
    teacher = Teacher(*(x.detach() if isinstance(x, torch.Tensor) else x for x in teacher))
    pools = documents.pools(config.index_kpool) if config.index_kpool > 1 else None
    ranges, relu, kernels = documents.key_ranges, config.index_relu, config.kernels
    if choice.index_Mk is None:
        fused = fused_dense_indexer_loss(teacher, heads, choice.student, ranges, pools, relu, kernels)
        return dense_indexer_loss(teacher, choice.student, *ranges, pools, relu).sum() if fused is None else fused
    if pools is None:
        listed = choice.index_Mk, lse_MN, value_width
        if (fused := fused_indexer_loss(teacher, choice.student, *listed, relu, ranges, kernels)) is not None:
            return fused
    listed_Mk = choice.candidates_Mk if pools is None else keys_of_pools(choice.candidates_Mk, pools)
    target_Mk = head_probabilities(*teacher[:2], listed_Mk, lse_MN, teacher.scale, value_width, kernels)
    # The keys of a pool together; the tail is not chosen.
    target_Mk = target_Mk.unflatten(1, (choice.candidates_Mk.shape[1], -1)).sum(-1)
    ranges = ranges if pools is None else None
    loss_M = indexer_loss(*choice.student, choice.candidates_Mk, target_Mk, relu, kernels, ranges)
    return loss_M.sum()


def mean_loss(losses: tuple[torch.Tensor, ...], indexer_types: list[str]) -> torch.Tensor:
    """The losses of all layers with a student, in order, averaged over those that an indexer serves, and over indexers:
    as much as one loss against the mean attention of the layers that share an indexer."""
    groups: list[list[torch.Tensor]] = []
    for loss, kind in zip(losses, (kind for kind in indexer_types if kind != "none"), strict=True):
        if kind == "full":
            groups.append([])
        groups[-1].append(loss)
    return torch.stack([torch.stack(group).mean() for group in groups]).mean()
