"""Gated multi-head latent attention, dense or sparse: one class, the lightning indexer is optional.

Dense (gated MLA, Kimi-K3): queries and keys come from low-rank latents, nothing is rotated, the 64 extra key
dimensions are shared by all heads, a sigmoid gate computed from the layer input multiplies the output.
Sparse (gated DSA, DeepSeek-V3.2 report section 2.1): an indexer scores all keys cheaply and attention sees the best
`index_topk` (indexer.py, sparse.py). With `learnable_sink` every head has a logit of its own beside those of its keys,
to which it can give probability that no value gets.

Legend: B batch, T tokens, P tokens cached before, S keys, D model width, Q query latent, N heads, H head width,
        V value width, L width of what is kept of a key; M real tokens of all documents in order, k chosen keys.
"""

from functools import partial

import torch
from torch import nn

from .cache import LayerCache
from .configuration_latentmoe import LatentMoETextConfig
from .documents import Documents
from .indexer import Choice, LightningIndexer, divergence
from .layers import Float32Parameters, RMSNorm
from .ops import Heads, attention, causal_attention, sparse_attention
from .recompute import recomputed
from .sparse import Teacher

# The released model builds these two norms without passing rms_norm_eps, so their class default holds.
LATENT_NORM_EPS = 1e-6


class GatedLatentAttention(Float32Parameters):
    """Gated MLA / gated DSA mixer. forward returns (output [B, T, D], what indexed layers hand on, or None).

    The cache keeps kv_lora_rank normed and qk_rope_head_dim raw numbers per token, and index keys where there is an
    indexer. Selection starts as soon as a document has more than index_topk keys; below that every key is selected
    anyway and the computation is the dense one, bit for bit. Dense attention expands latents into keys and values of
    every head; sparse attention takes the latents themselves, the expansion absorbed into queries and outputs.
    """

    def __init__(self, config: LatentMoETextConfig, indexer_type: str):
        super().__init__()
        N, D = config.num_attention_heads, config.hidden_size
        self.num_heads = N
        self.nope_dim, self.shared_dim, self.value_dim = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        self.latent_dim = config.kv_lora_rank
        self.scale = (self.nope_dim + self.shared_dim) ** -0.5
        self.config, self.indexer_type = config, indexer_type
        self.q_a_proj = nn.Linear(D, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = nn.Linear(config.q_lora_rank, N * (self.nope_dim + self.shared_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(D, self.latent_dim + self.shared_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(self.latent_dim, N * (self.nope_dim + self.value_dim), bias=False)
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(D, N * self.value_dim, bias=False)
        self.o_proj = nn.Linear(N * self.value_dim, D, bias=False)
        # Without one a sink is minus infinity.
        self.learnable_sink_param = None
        if config.learnable_sink:
            self.learnable_sink_param = nn.Parameter(torch.zeros(N))
            self.float32_parameters = ("learnable_sink_param",)
        if indexer_type == "full":
            self.indexer = LightningIndexer(config)

    def forward(
        self,
        x_BTD: torch.Tensor,
        documents: Documents,
        cache: LayerCache | None = None,
        choice: Choice | None = None,
    ) -> tuple[torch.Tensor, Choice | None]:
        c_BTQ, q_BTNH, latent_BTL = self.project(x_BTD)
        latent_BSL = latent_BTL if cache is None else cache.append("latent", latent_BTL)
        if self.indexer_type == "none":
            choice = None
        elif self.indexer_type == "full":
            before = () if choice is None else choice.losses
            choice = self.indexer(x_BTD, c_BTQ, documents, cache)
            choice = choice and choice._replace(losses=before)

        if choice is None:
            out = self._dense(q_BTNH, latent_BSL, documents)
        else:
            out, choice = self._indexed(q_BTNH, latent_BSL, documents, choice)
        if not self.config.mla_use_output_gate:
            return self.o_proj(out), choice
        factors = out, torch.sigmoid(self.g_proj(x_BTD))
        gated = torch.mul(*factors)
        with recomputed(gated, torch.mul, *factors):
            return self.o_proj(gated), choice

    def project(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query latent [B, T, Q], queries [B, T, N, H] and what the cache keeps of keys and values [B, T, L]."""
        c_BTQ = self.q_a_layernorm(self.q_a_proj(x_BTD))
        q_BTNH = self.q_b_proj(c_BTQ).unflatten(-1, (self.num_heads, -1))
        latent, extra = self.kv_a_proj_with_mqa(x_BTD).split([self.latent_dim, self.shared_dim], dim=-1)
        return c_BTQ, q_BTNH, torch.cat([self.kv_a_layernorm(latent), extra], dim=-1)

    def absorb(
        self, q_BTNH: torch.Tensor, latent_BSL: torch.Tensor, documents: Documents
    ) -> tuple[Teacher, torch.Tensor]:
        """Attention over the packed latents, and what turns its outputs into values of every head, [L, N, V]."""
        # The layer's answer to the identity is its weight, with all that an adapter adds and the gradients of that.
        unit = torch.eye(self.latent_dim, dtype=latent_BSL.dtype, device=latent_BSL.device)
        weight = self.kv_b_proj(unit).unflatten(-1, (self.num_heads, -1))
        key_LNH, value_LNV = weight.split([self.nope_dim, self.value_dim], dim=-1)
        own, shared = documents.pack(q_BTNH).split([self.nope_dim, self.shared_dim], dim=-1)
        q_MNL = torch.cat([torch.einsum("mnh,lnh->mnl", own, key_LNH), shared], dim=-1)
        return Teacher(q_MNL, documents.pack_keys(latent_BSL), self.scale, self.learnable_sink_param), value_LNV

    def _indexed(
        self, q_BTNH: torch.Tensor, latent_BSL: torch.Tensor, documents: Documents, choice: Choice
    ) -> tuple[torch.Tensor, Choice]:
        """Attention to the chosen keys, if any were; the choice then has the loss of an indexer that learns."""
        teacher, value_LNV = self.absorb(q_BTNH, latent_BSL, documents)
        if choice.index_Mk is None:
            out, lse_MN = self._dense(q_BTNH, latent_BSL, documents), None
        else:
            q_MNL, kv_SL, scale, sink_N = teacher
            index_Mk, kernels = choice.index_Mk, self.config.kernels
            short = [length <= self.config.index_topk for length in documents.lengths]
            # To documents that fit into index_topk dense attention gives the same, faster; a student learns from all.
            split = choice.student is None and documents.past_ids_BP is None and any(short)
            if split:
                short_M = torch.repeat_interleave(documents.length_D <= self.config.index_topk, documents.length_D)
                index_Mk = index_Mk.masked_fill(short_M.unsqueeze(1), -1)
            # The lists of a pooled indexer are not the best keys of a range.
            ranges = documents.key_ranges if self.config.index_kpool == 1 else None
            out_MNL, lse_MN = sparse_attention(q_MNL, kv_SL, index_Mk, scale, self.latent_dim, sink_N, kernels, ranges)
            out = documents.unpack(torch.einsum("mnl,lnv->mnv", out_MNL, value_LNV).flatten(1))
            if split:
                dense = self._dense(q_BTNH, latent_BSL, documents, short)
                out = torch.where(documents.unpack(short_M).unsqueeze(-1), dense, out)
        if choice.student is not None:
            heads = partial(self._heads, q_BTNH, latent_BSL, documents)
            loss = divergence(choice, teacher, lse_MN, self.latent_dim, documents, self.config, heads)
            choice = choice._replace(losses=(*choice.losses, loss))
        return out, choice

    def _dense(
        self,
        q_BTNH: torch.Tensor,
        latent_BSL: torch.Tensor,
        documents: Documents,
        chosen: list[bool] | None = None,
    ) -> torch.Tensor:
        """Attention to all visible keys, [B, T, N * V]; chosen: in which documents, zeros elsewhere."""
        own_BNSH, extra_BNSH, v_BNSH = self._expand(latent_BSL)
        k_BNSH = _join(own_BNSH, extra_BNSH)
        qkv = q_BTNH.transpose(1, 2), k_BNSH, v_BNSH
        fused, sink_N = self.config._attn_implementation == "sdpa", self.learnable_sink_param
        with recomputed(k_BNSH, _join, own_BNSH, extra_BNSH):
            if documents.past_ids_BP is None:
                kernels = self.config.kernels
                out_BNTV = causal_attention(*qkv, documents, self.scale, fused, sink_N, chosen, kernels)
            else:
                out_BNTV = attention(*qkv, documents.attention_mask_BTS, self.scale, fused, sink_N)
        return out_BNTV.transpose(1, 2).flatten(2)

    @torch.no_grad()
    def _heads(self, q_BTNH: torch.Tensor, latent_BSL: torch.Tensor, documents: Documents) -> Heads:
        """Dense attention over the packed tokens, as a teacher."""
        *parts, v_BNSH = self._expand(latent_BSL)
        expanded = (documents.pack_keys(x.transpose(1, 2)) for x in (_join(*parts), v_BNSH))
        return Heads(documents.pack(q_BTNH), *expanded)

    def _expand(self, latent_BSL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Latents -> both parts of keys, their own and the one that all heads share, and values, [B, N, S, H] each."""
        latent, extra = latent_BSL.split([self.latent_dim, self.shared_dim], dim=-1)
        kv = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = kv.split([self.nope_dim, self.value_dim], dim=-1)
        return k, extra.unsqueeze(1).expand(-1, self.num_heads, -1, -1), v


def _join(own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    return torch.cat([own, shared], dim=-1)
