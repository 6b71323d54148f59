"""KDA: linear attention whose state forgets per channel and corrects itself by the delta rule (Kimi Linear report).

Legend: B batch, T tokens, D model width, M real tokens, X documents, H heads, K key width, W convolution width,
        P = H * K projection width.
"""

import math
from typing import ClassVar

import torch
from torch import nn

from .cache import LayerCache
from .configuration_latentmoe import LatentMoETextConfig
from .documents import Documents
from .layers import Float32Parameters
from .ops import gated_rms_norm, kda_chunk, kda_gate, kda_step, short_conv

# The released checkpoint stores A_log with its head axis zero-padded to a multiple of this.
A_LOG_PADDING = 128


class ShortConvolution(Float32Parameters):
    """Depthwise causal convolution weight [P, 1, W], fp32; tap W - 1 multiplies the current token."""

    float32_parameters: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=torch.float32))

    def forward(self, x_MP: torch.Tensor, index_MW: torch.Tensor, tail_XP: torch.Tensor) -> torch.Tensor:
        return short_conv(x_MP, self.weight.squeeze(1), index_MW, tail_XP)


class GatedHeadNorm(Float32Parameters):
    """Weight [K] of the norm that every head's output passes before its sigmoid gate, fp32."""

    float32_parameters: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps)


class KimiDeltaAttention(Float32Parameters):
    """KDA mixer [B, T, D] -> [B, T, D]; padding gives zeros and changes no state.

    Chunked over whole documents for training and prefill, one recurrent step for a cached single token.
    """

    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")

    def __init__(self, config: LatentMoETextConfig):
        super().__init__()
        linear = config.linear_attn_config
        self.num_heads, self.head_dim = linear["num_heads"], linear["head_dim"]
        self.conv_width, self.gate_lower_bound = linear["short_conv_kernel_size"], config.gate_lower_bound
        D, K, P = config.hidden_size, self.head_dim, self.num_heads * self.head_dim
        self.q_proj = nn.Linear(D, P, bias=False)
        self.k_proj = nn.Linear(D, P, bias=False)
        self.v_proj = nn.Linear(D, P, bias=False)
        self.q_conv1d = ShortConvolution(P, self.conv_width)
        self.k_conv1d = ShortConvolution(P, self.conv_width)
        self.v_conv1d = ShortConvolution(P, self.conv_width)
        self.f_a_proj = nn.Linear(D, K, bias=False)
        self.f_b_proj = nn.Linear(K, P, bias=False)
        self.b_proj = nn.Linear(D, self.num_heads, bias=False)
        stored_heads = math.ceil(self.num_heads / A_LOG_PADDING) * A_LOG_PADDING
        self.A_log = nn.Parameter(torch.zeros(stored_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(P, dtype=torch.float32))
        self.g_proj = nn.Linear(D, P, bias=False)
        self.o_norm = GatedHeadNorm(K, config.rms_norm_eps)
        self.o_proj = nn.Linear(P, D, bias=False)

    def forward(self, x_BTD: torch.Tensor, documents: Documents, cache: LayerCache | None = None) -> torch.Tensor:
        x_MD = documents.pack(x_BTD)
        q, k, v = self._convolve(x_MD, documents, cache)
        z = self._heads(self.f_b_proj(self.f_a_proj(x_MD)))
        g = kda_gate(z, self.A_log[: self.num_heads], self.dt_bias.view(self.num_heads, -1), self.gate_lower_bound)
        wide = torch.promote_types(x_MD.dtype, torch.float32)
        beta = torch.sigmoid(self.b_proj(x_MD).to(wide))
        o = self._recur(q, k, v, g, beta, documents, cache)
        o = self.o_norm(o, self._heads(self.g_proj(x_MD)))
        return documents.unpack(self.o_proj(o.flatten(1)))

    def _heads(self, x_MP: torch.Tensor) -> torch.Tensor:
        return x_MP.unflatten(-1, (self.num_heads, self.head_dim))

    def _convolve(self, x_MD, documents: Documents, cache: LayerCache | None) -> list[torch.Tensor]:
        """Projections of q, k, v, each through its short convolution; the cache keeps the last inputs of each."""
        index_MW, tail_XW = documents.window(self.conv_width)
        out = []
        for name in "qkv":
            projected = getattr(self, f"{name}_proj")(x_MD)
            old = cache.get(f"{name}_conv") if cache is not None else None
            if old is None:
                tail = projected.new_zeros(len(documents.length_D), self.conv_width - 1, projected.shape[-1])
            else:
                tail = old[documents.row_D]
            tail = tail.flatten(0, 1)
            out.append(self._heads(getattr(self, f"{name}_conv1d")(projected, index_MW, tail)))
            if cache is not None:
                new = torch.cat([projected, tail.to(projected.dtype)])[tail_XW]
                cache.set(f"{name}_conv", _put_rows(old, new, documents))
        return out

    def _recur(self, q, k, v, g, beta, documents: Documents, cache: LayerCache | None) -> torch.Tensor:
        old = cache.get("state") if cache is not None else None
        one_token_a_row = documents.ids_BT.shape[1] == 1 and documents.valid_BT is None
        if old is not None and one_token_a_row:
            o, state = kda_step(q, k, v, g, beta, old)
        else:
            o, state = kda_chunk(q, k, v, g, beta, documents, None if old is None else old[documents.row_D])
        if cache is not None:
            cache.set("state", _put_rows(old, state, documents))
        return o


def _put_rows(old_B: torch.Tensor | None, new_X: torch.Tensor, documents: Documents) -> torch.Tensor:
    """Per-row memory with the rows that had tokens replaced (a row of padding keeps what it had)."""
    rows = documents.ids_BT.shape[0]
    base = new_X.new_zeros(rows, *new_X.shape[1:]) if old_B is None else old_B.to(new_X.dtype)
    return base.index_copy(0, documents.row_D, new_X)
