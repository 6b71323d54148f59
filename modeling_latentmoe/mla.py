"""Gated multi-head latent attention, dense or sparse: one class, the lightning indexer is optional.

Dense (gated MLA, Kimi-K3): queries and keys come from low-rank latents, nothing is rotated, the 64 extra key
dimensions are shared by all heads, a sigmoid gate computed from the layer input multiplies the output.
Sparse (gated DSA, DeepSeek-V3.2 report section 2.1): an indexer scores all keys cheaply and attention sees the best
`index_topk`. A "full" layer owns an indexer; a "shared" one reuses the choice of the last full layer (IndexCache).

Legend: B batch, T tokens, S keys, D model width, Q query latent, N heads, H head width, I index heads, K index width.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .cache import LayerCache
from .configuration_latentmoe import LatentMoETextConfig
from .documents import Documents
from .layers import RMSNorm
from .ops import attention, causal_attention, index_scores, index_topk, selection_mask

# The released model builds these two norms without passing rms_norm_eps, so their class default holds.
LATENT_NORM_EPS = 1e-6
INDEX_NORM_EPS = 1e-6


class WideLinear(nn.Linear):
    """A linear layer that multiplies in fp32 (or wider), whatever the dtype of input and weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        # Autocast would round the products.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), self.weight.to(wide))


class LightningIndexer(nn.Module):
    """Scores every key for every query with a few cheap heads; parameters learn from their own loss only.

    Inputs are the layer input x [B, T, D] and the query latent c_q [B, T, Q]; both arrive detached.
    """

    def __init__(self, config: LatentMoETextConfig):
        super().__init__()
        self.heads, self.head_dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=INDEX_NORM_EPS)
        self.weights_proj = WideLinear(config.hidden_size, self.heads, bias=False)

    def keys(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """One key per token, shared by all index heads: [B, T, K]."""
        return self.k_norm(self.wk(x_BTD))

    def scores(self, x_BTD: torch.Tensor, c_BTQ: torch.Tensor, keys_BSK: torch.Tensor) -> torch.Tensor:
        """fp32 scores [B, T, S] of the remembered keys, not masked."""
        q_BTIK = self.wq_b(c_BTQ).unflatten(-1, (self.heads, self.head_dim))
        weight_BTI = self.weights_proj(x_BTD) * self.heads**-0.5
        return index_scores(q_BTIK, keys_BSK, weight_BTI)


class GatedLatentAttention(nn.Module):
    """Gated MLA / gated DSA mixer. forward returns (output [B, T, D], selected keys or None).

    The cache keeps kv_lora_rank normed and qk_rope_head_dim raw numbers per token, and index keys where there is an
    indexer. Selection starts as soon as a document has more than index_topk keys; below that every key is selected
    anyway and the computation is the dense one, bit for bit.
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
        if indexer_type == "full":
            self.indexer = LightningIndexer(config)

    def forward(
        self,
        x_BTD: torch.Tensor,
        documents: Documents,
        cache: LayerCache | None = None,
        shared_index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        c_BTQ = self.q_a_layernorm(self.q_a_proj(x_BTD))
        q_BNTH = self.q_b_proj(c_BTQ).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        latent, extra = self.kv_a_proj_with_mqa(x_BTD).split([self.latent_dim, self.shared_dim], dim=-1)
        latent_BSL = torch.cat([self.kv_a_layernorm(latent), extra], dim=-1)
        if cache is not None:
            latent_BSL = cache.append("latent", latent_BSL)
        k_BNSH, v_BNSH = self._expand(latent_BSL)

        index = None
        if self.indexer_type != "none":
            index = self._select(x_BTD.detach(), c_BTQ.detach(), documents, cache, shared_index)
        fused = self.config._attn_implementation == "sdpa"
        if index is None and cache is None and fused:
            out_BNTH = causal_attention(q_BNTH, k_BNSH, v_BNSH, documents, self.scale)
        else:
            mask_BTS = documents.attention_mask_BTS
            if index is not None:
                mask_BTS = selection_mask(index, mask_BTS)
            out_BNTH = attention(q_BNTH, k_BNSH, v_BNSH, mask_BTS, self.scale, fused)
        out = out_BNTH.transpose(1, 2).flatten(2)
        if self.config.mla_use_output_gate:
            out = out * torch.sigmoid(self.g_proj(x_BTD))
        return self.o_proj(out), index

    def _expand(self, latent_BSL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents -> keys [B, N, S, H] (own part and the part all heads share) and values [B, N, S, H]."""
        latent, extra = latent_BSL.split([self.latent_dim, self.shared_dim], dim=-1)
        kv = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = kv.split([self.nope_dim, self.value_dim], dim=-1)
        extra = extra.unsqueeze(1).expand(-1, self.num_heads, -1, -1)
        return torch.cat([k, extra], dim=-1), v

    @torch.no_grad()
    def _select(self, x_BTD, c_BTQ, documents: Documents, cache, shared_index) -> torch.Tensor | None:
        """Selected keys [B, T, index_topk], or None while every document fits into index_topk."""
        if self.indexer_type == "shared":
            return shared_index
        # Keys are remembered from the first token on: a later call may need them.
        keys_BSK = self.indexer.keys(x_BTD)
        if cache is not None:
            keys_BSK = cache.append("index_keys", keys_BSK)
        if documents.longest <= self.indexer.topk:
            return None
        scores_BTS = self.indexer.scores(x_BTD, c_BTQ, keys_BSK)
        return index_topk(scores_BTS, documents.attention_mask_BTS, self.indexer.topk)
