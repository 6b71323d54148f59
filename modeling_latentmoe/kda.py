"""KDA: linear attention whose state forgets per channel and corrects itself by the delta rule (Kimi Linear report).

Legend: B batch, T tokens, D model width, M real tokens, X documents (D in documents.py), H heads, K key width,
        W convolution width, P = H * K projection width.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from .cache import LayerCache
from .configuration_latentmoe import LatentMoETextConfig
from .documents import Documents
from .layers import Float32Parameters
from .ops import gated_rms_norm, kda_chunk, kda_step, short_conv
from .recompute import recomputed

# The released checkpoint stores A_log with its head axis zero-padded to a multiple of this.
A_LOG_PADDING = 128


class ShortConvolution(Float32Parameters):
    """Depthwise causal convolution weight [P, 1, W], fp32; tap W - 1 multiplies the current token."""

    float32_parameters: tuple[str, ...] = ("weight",)

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=torch.float32))

    def forward(self) -> torch.Tensor:
        """The taps [P, W]: those of q, k and v are applied together."""
        return self.weight.squeeze(1)


class GatedHeadNorm(Float32Parameters):
    """Weight [K] of the norm that every head's output passes before its sigmoid gate, fp32."""

    float32_parameters: tuple[str, ...] = ("weight",)

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor, kernels: str) -> torch.Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps, kernels)


class KimiDeltaAttention(Float32Parameters):
    """KDA mixer [B, T, D] -> [B, T, D]; padding gives zeros and changes no state.

    Chunked over whole documents for training and prefill, one recurrent step for a cached single token.
    """

    float32_parameters: tuple[str, ...] = ("A_log", "dt_bias")

    def __init__(self, config: LatentMoETextConfig):
        super().__init__()
        self.config = config
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
        projected, convolve = self._project(x_MD, documents, cache)
        z, beta = self._heads(self.f_b_proj(self.f_a_proj(x_MD))), self.b_proj(x_MD)
        qkv = convolve(*projected)
        with recomputed(qkv, convolve, *projected):
            o = self._recur(*map(self._heads, qkv), z, beta, documents, cache)
        gated, norm = (o, self._heads(self.g_proj(x_MD))), partial(self.o_norm, kernels=self.config.kernels)
        o = norm(*gated)
        with recomputed(o, norm, *gated):
            return documents.unpack(self.o_proj(o.flatten(1)))

    def _heads(self, x_MP: torch.Tensor) -> torch.Tensor:
        return x_MP.unflatten(-1, (self.num_heads, self.head_dim))

    def _project(
        self, x_MD: torch.Tensor, documents: Documents, cache: LayerCache | None
    ) -> tuple[tuple[torch.Tensor, ...], Callable[..., tuple[torch.Tensor, ...]]]:
        """Projections of q, k, v, and their short convolutions; the cache keeps the last inputs of each."""
        projected = tuple(proj(x_MD) for proj in (self.q_proj, self.k_proj, self.v_proj))
        taps = tuple(conv() for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d))
        names = ("q_conv", "k_conv", "v_conv")
        tails = None
        if cache is not None and cache.get("q_conv") is not None:
            tails = tuple(cache.get(name)[documents.row_D] for name in names)
        if cache is not None:
            self._remember(names, projected, tails, documents, cache)

        def convolve(*projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return short_conv(projected, taps, documents, tails, self.config.kernels)

        return projected, convolve

    def _remember(
        self,
        names: tuple[str, ...],
        projected: tuple[torch.Tensor, ...],
        tails: tuple[torch.Tensor, ...] | None,
        documents: Documents,
        cache: LayerCache,
    ) -> None:
        _, tail_XW = documents.window(self.conv_width)
        for i, (name, new_MP) in enumerate(zip(names, projected, strict=True)):
            old_XP = new_MP.new_zeros(tail_XW.numel(), new_MP.shape[1]) if tails is None else tails[i].flatten(0, 1)
            kept_XWP = torch.cat([new_MP, old_XP.to(new_MP.dtype)])[tail_XW]
            cache.set(name, _put_rows(cache.get(name), kept_XWP, documents))

    def _recur(self, q, k, v, z, beta, documents: Documents, cache: LayerCache | None) -> torch.Tensor:
        old = cache.get("state") if cache is not None else None
        gate = self.A_log[: self.num_heads], self.dt_bias.view(self.num_heads, -1), self.gate_lower_bound
        kernels = self.config.kernels
        one_token_a_row = documents.ids_BT.shape[1] == 1 and documents.valid_BT is None
        if old is not None and one_token_a_row:
            o, state = kda_step(q, k, v, z, beta, *gate, old, kernels)
        else:
            past = None if old is None else old[documents.row_D]
            o, state = kda_chunk(q, k, v, z, beta, *gate, documents, past, cache is not None, kernels)
        if cache is not None:
            cache.set("state", _put_rows(old, state, documents))
        return o


def _put_rows(old_B: torch.Tensor | None, new_X: torch.Tensor, documents: Documents) -> torch.Tensor:
    """Per-row memory with the rows that had tokens replaced (a row of padding keeps what it had)."""
    rows = documents.ids_BT.shape[0]
    base = new_X.new_zeros(rows, *new_X.shape[1:]) if old_B is None else old_B.to(new_X.dtype)
    return base.index_copy(0, documents.row_D, new_X)
