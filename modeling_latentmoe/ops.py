"""The one seam between the model and its kernels: every fused operation is named here once.

Each function is the readable torch definition, which is also what kernels are tested against (sparse.py has those of
sparse attention). Statistics and accumulations run in `promote_types(dtype, float32)`, so everything also runs in
float64. Those that take `kernels`, the caller's choice "auto", "torch" or "hub" (`config.kernels`), first ask for a
kernel (kernel_loading.py).

Legend: B batch, T tokens, S keys, D model width (of states and tails: documents), J sources of a mixture, M real tokens
        of all documents in order, N chunks (heads in attention, predicted tokens in a loss), C tokens per chunk,
        H heads, K key width, V value width (or vocabulary, in a loss), W convolution width, P convolution channels,
        F hidden width; t and n are a block of T and of N.
        In the mixture of experts: E experts, S chosen experts per token, G groups of e experts, L latent width,
        R routed rows sorted by expert. I and O input and output width of a matrix, r adapter rank.
        In sparse attention the letters of sparse.py, such as k listed keys.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from .documents import Documents
from .kernel_loading import DTYPES, kernel_for
from .mxfp4 import decode
from .npu import causal_attention as causal_attention_npu
from .npu import cross_entropy as cross_entropy_npu
from .npu import delta_chunk as delta_chunk_npu
from .npu import delta_step as delta_step_npu
from .npu import on_npu
from .npu import rms_norm as rms_norm_npu
from .npu import route as route_npu
from .npu_experts import expert_mlp as expert_mlp_npu
from .npu_kernels import activations as activation_kernels_npu
from .npu_kernels import mixture as mixture_kernels_npu
from .npu_kernels import norm as norm_kernels_npu
from .npu_sparse import Heads, Ranges, several_parts
from .npu_sparse import dense_indexer_loss as dense_indexer_loss_npu
from .npu_sparse import fused_indexer_loss as fused_indexer_loss_npu
from .npu_sparse import index_topk as index_topk_npu
from .npu_sparse import indexer_loss as indexer_loss_npu
from .npu_sparse import sparse_attention as sparse_attention_npu
from .sparse import Pools, Student, Teacher
from .sparse import dense_indexer_loss as dense_indexer_loss_torch
from .sparse import head_probabilities as head_probabilities_torch
from .sparse import index_topk as index_topk_torch
from .sparse import indexer_loss as indexer_loss_torch
from .sparse import sparse_attention as sparse_attention_torch
from .sparse import wide as _wide

# Tokens per KDA chunk. Decays are formed as exponents of differences inside a chunk, a [C, C, K] tensor per head.
KDA_CHUNK = 16
L2_EPS = 1e-6
# Widths of keys and values, and of convolutions, for which there are kernels.
KDA_KERNEL_WIDTHS = ((128, 128), (64, 64))
CONV_KERNEL_WIDTHS = range(2, 9)
# The longest rows that the kernels of a mixture and of a gated norm hold.
MIXTURE_KERNEL_WIDTH, NORM_KERNEL_WIDTH = 16384, 8192
# What the kernels of the experts hold of a token's choices, of experts, and of the ranks of a matrix's adapters.
EXPERT_KERNEL_SLOTS, EXPERT_KERNEL_EXPERTS, EXPERT_KERNEL_RANK = 32, 1024, 64
# Indexers, and heads and latents (all of one, and its part that is the value), for which there are kernels.
INDEX_KERNEL_HEADS, INDEX_KERNEL_WIDTHS, INDEX_KERNEL_KEYS = 64, (128, 64), 8192
SPARSE_KERNEL_HEADS, SPARSE_KERNEL_WIDTHS = 128, (576, 512)
# The highest rank of an adapter that its kernel holds.
LOW_RANK_KERNEL_RANK = 128
# Logits held at a time by `linear_cross_entropy`, and rows in fp32 by `add_low_rank`.
LOGIT_BYTES, LOW_RANK_BYTES = 256 * 2**20, 64 * 2**20
# Torch's kernels of attention, the one to take first in front, and what documents' lengths are padded to a multiple of.
SDPA_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
PLANNED_LENGTH = 256
# CPU matrix products round a row differently when the number of rows changes, but not (as measured, in fp32, bf16 and
# fp64) among multiples of this: a token's result does not depend on how many other tokens its expert got.
ROW_TILE = 16
# Decoded expert weights held at a time; one expert of the released Kimi-K3 takes 88 MB in fp32.
DECODED_BYTES = 128 * 2**20


def full_precision(function: Callable) -> Callable:
    """An operation that chooses its own precision: autocast would round the products inside it."""

    @wraps(function)
    def run(*args, **kwargs):
        first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        with torch.autocast(first.device.type, enabled=False):
            return function(*args, **kwargs)

    return run


def situ_glu(gate: torch.Tensor, up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """SiTU-GLU: beta * tanh(g / beta) * sigmoid(g) times linear_beta * tanh(u / linear_beta), rounded once.

    The sigmoid sees the uncapped gate. `linear_beta=None` leaves `up` as it is; `beta=None` means 1.
    """
    g, u = _wide(gate), _wide(up)
    beta = 1.0 if beta is None else beta
    y = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    y = y * (u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta))
    return y.to(gate.dtype)


def glu(gate: torch.Tensor, up: torch.Tensor, config) -> torch.Tensor:
    """The gated activation that `config.hidden_act` names: "situ" or "silu" (SwiGLU)."""
    kernel = kernel_for("latent_moe", config.kernels, gate, up) or activation_kernels_npu(gate, up, config.kernels)
    if config.hidden_act == "situ":
        betas = config.activation_situ_beta, config.activation_situ_linear_beta
        return kernel.situ_glu(gate, up, *betas) if kernel else situ_glu(gate, up, *betas)
    return kernel.swiglu(gate, up) if kernel else F.silu(gate) * up


class AddLowRank(torch.autograd.Function):
    """`add_low_rank` on rows y [T, O] and x [T, I], a block of them in the wider dtype at a time.

    Only x as it is, the low rows and the factors are kept for backward, where autograd would keep a wide copy of x.
    """

    @staticmethod
    def forward(
        ctx, y_TO: torch.Tensor, x_TI: torch.Tensor, a_rI: torch.Tensor, b_Or: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        wide = torch.promote_types(_wide(x_TI[:0]).dtype, a_rI.dtype)
        low_Tr = x_TI.new_empty(len(x_TI), len(a_rI), dtype=wide)
        out_TO = torch.empty_like(y_TO)
        for rows in _row_blocks(x_TI, b_Or):
            low_Tr[rows] = F.linear(x_TI[rows].to(wide), a_rI.to(wide))
            out_TO[rows] = y_TO[rows] + F.linear(low_Tr[rows], b_Or.to(wide)) * scaling
        ctx.save_for_backward(x_TI, low_Tr, a_rI, b_Or)
        ctx.scaling = scaling
        return out_TO

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_TO: torch.Tensor):
        x_TI, low_Tr, a_rI, b_Or = ctx.saved_tensors
        wide = low_Tr.dtype
        dx_TI = torch.empty_like(x_TI) if ctx.needs_input_grad[1] else None
        da_rI, db_Or = (torch.zeros_like(factor, dtype=wide) for factor in (a_rI, b_Or))
        # Backward may be called where autocast would round the products.
        with torch.autocast(grad_TO.device.type, enabled=False):
            for rows in _row_blocks(x_TI, b_Or):
                dproduct_tO = grad_TO[rows].to(wide) * ctx.scaling
                dlow_tr = dproduct_tO @ b_Or.to(wide)
                da_rI += dlow_tr.T @ x_TI[rows].to(wide)
                db_Or += dproduct_tO.T @ low_Tr[rows]
                if dx_TI is not None:
                    dx_TI[rows] = (dlow_tr @ a_rI.to(wide)).to(x_TI.dtype)
        return grad_TO, dx_TI, da_rI.to(a_rI.dtype), db_Or.to(b_Or.dtype), None


def _row_blocks(x_TI: torch.Tensor, b_Or: torch.Tensor) -> Iterator[slice]:
    """Rows of which input and output take LOW_RANK_BYTES in fp32."""
    row_bytes = 4 * (x_TI.shape[1] + len(b_Or))
    size = max(ROW_TILE, LOW_RANK_BYTES // row_bytes // ROW_TILE * ROW_TILE)
    return (slice(first, first + size) for first in range(0, len(x_TI), size))


def _low_rank_problem(a_rI: torch.Tensor, b_Or: torch.Tensor) -> str | None:
    """Why the kernels cannot add this product, if so."""
    if len(a_rI) > LOW_RANK_KERNEL_RANK:
        return f"the rank is {len(a_rI)}, over {LOW_RANK_KERNEL_RANK}"
    odd = [factor.dtype for factor in (a_rI, b_Or) if factor.dtype not in DTYPES]
    return f"there are no kernels for factors in {odd[0]}" if odd else None


@full_precision
def add_low_rank(
    y: torch.Tensor,
    x: torch.Tensor,
    a_rI: torch.Tensor,
    b_Or: torch.Tensor,
    scaling: float,
    kernels: str = "torch",
) -> torch.Tensor:
    """y + scaling * (x a^T) b^T for x [..., I] and y [..., O]: a low-rank adapter beside a layer with output y.

    Products are taken in the wider of fp32 and the dtypes of x and of the factors (masters are not rounded), added to
    y there, and rounded once to the dtype of y.
    """
    if kernel := kernel_for("low_rank", kernels, y, x, problem=_low_rank_problem(a_rI, b_Or)):
        return kernel.add_low_rank(y, x, a_rI, b_Or, scaling)
    rows = y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
    return AddLowRank.apply(*rows, a_rI, b_Or, scaling).view(y.shape)


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, in fp32 inside and rounded to x.dtype."""
    found = rms_norm_npu(x, eps)
    return F.rms_norm(x, x.shape[-1:], eps=eps) if found is None else found


def _row_problem(x: torch.Tensor, widest: int) -> str | None:
    return None if x.shape[-1] <= widest else f"rows are {x.shape[-1]} wide, over {widest}"


@full_precision
def attn_residual(
    sources: Sequence[torch.Tensor], score_D: torch.Tensor, eps: float, kernels: str = "torch"
) -> torch.Tensor:
    """softmax_j(rms_norm(V_j) . score) mixture of the raw sources V_j [B, T, D], in fp32, rounded once."""
    kernel = kernel_for("residual", kernels, *sources, problem=_row_problem(sources[0], MIXTURE_KERNEL_WIDTH))
    if kernel := kernel or mixture_kernels_npu(sources, kernels):
        return kernel.attn_residual(sources, score_D, eps)
    wide = [_wide(v) for v in sources]
    normed = [v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) for v in wide]
    score_JBT = torch.stack([(k * score_D).sum(-1) for k in normed])
    weight_JBT = torch.softmax(score_JBT, dim=0)
    mixed = sum(w.unsqueeze(-1) * v for w, v in zip(weight_JBT, wide, strict=True))
    return mixed.to(sources[-1].dtype)


@full_precision
def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, kernels: str = "torch"
) -> torch.Tensor:
    """rms_norm(x) * weight * sigmoid(gate) over the last axis, all in fp32, rounded once to x.dtype."""
    kernel = kernel_for("residual", kernels, x, gate, problem=_row_problem(x, NORM_KERNEL_WIDTH))
    if kernel := kernel or norm_kernels_npu(x, gate, kernels):
        return kernel.gated_rms_norm(x, gate, weight, eps)
    x32 = _wide(x)
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight
    return (y * torch.sigmoid(_wide(gate))).to(x.dtype)


@full_precision
def short_conv(
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    documents: Documents,
    tails: tuple[torch.Tensor, ...] | None = None,
    kernels: str = "torch",
) -> tuple[torch.Tensor, ...]:
    """Causal depthwise convolution and SiLU of each input [M, P] with its weight [P, W], fp32 inside.

    Tap W - 1 meets the current token, and windows never leave a document: before its first token they read its tail
    [D, W - 1, P], the last inputs of earlier calls, or zeros where there are no tails.
    """
    W = weights[0].shape[1]
    problem = None if W in CONV_KERNEL_WIDTHS else f"the convolution is {W} wide, not 2 to 8"
    if kernel := kernel_for("kda", kernels, *inputs, *(tails or ()), problem=problem):
        return kernel.short_conv(inputs, weights, cu_seqlens=documents.cu_seqlens, tails=tails)
    index_MW, _ = documents.window(W)
    if tails is None:
        tails = tuple(x_MP.new_zeros(len(documents.length_D), W - 1, x_MP.shape[1]) for x_MP in inputs)
    outputs = []
    for x_MP, weight_PW, tail_DWP in zip(inputs, weights, tails, strict=True):
        source = torch.cat([x_MP, tail_DWP.flatten(0, 1).to(x_MP.dtype)])
        wide = torch.promote_types(x_MP.dtype, torch.float32)
        y = sum(source[index_M].to(wide) * weight_PW[:, tap] for tap, index_M in enumerate(index_MW.unbind(1)))
        outputs.append(F.silu(y).to(x_MP.dtype))
    return tuple(outputs)


def kda_gate(
    z_MHK: torch.Tensor, A_log_H: torch.Tensor, dt_bias_HK: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Log decay of KDA in fp32: lower_bound * sigmoid(exp(A_log) (z + dt_bias)), or with lower_bound None
    the unbounded form -exp(A_log) * softplus(z + dt_bias)."""
    rate_H1 = A_log_H.exp().unsqueeze(-1)
    z = _wide(z_MHK) + dt_bias_HK
    if lower_bound is None:
        return -rate_H1 * F.softplus(z)
    return lower_bound * torch.sigmoid(rate_H1 * z)


def _kda_inputs(q, k, v, g, beta):
    """l2-normalised q (scaled by K ** -0.5) and k, and everything in fp32."""
    q, k, v, g, beta = (_wide(x) for x in (q, k, v, g, beta))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    return q, k, v, g, beta


def _kda_problem(k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why the kernels cannot compute heads of this width, if so."""
    widths = k.shape[-1], v.shape[-1]
    return None if widths in KDA_KERNEL_WIDTHS else f"heads are {widths[0]} and {widths[1]} wide, not 128 or 64"


@full_precision
def kda_step(
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    z_BHK: torch.Tensor,
    beta_BH: torch.Tensor,
    A_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor,
    lower_bound: float | None,
    state_BHKV: torch.Tensor,
    kernels: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of KDA from what its projections give: raw q, k (normalised here), z (see `kda_gate`) and beta logits.

    Returns (o [B, H, V], new state); the state is fp32.
    """
    token = q_BHK, k_BHK, v_BHV, z_BHK, beta_BH
    problem = _kda_problem(k_BHK, v_BHV)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*token, A_log_H, dt_bias_HK, state_BHKV)):
        problem = "a single token after a cache has no gradients"
    if kernel := kernel_for("kda", kernels, *token, problem=problem):
        return kernel.step_kda(*token, A_log_H, dt_bias_HK, state_BHKV, lower_bound)
    parts = q_BHK, k_BHK, v_BHV, kda_gate(z_BHK, A_log_H, dt_bias_HK, lower_bound), torch.sigmoid(_wide(beta_BH))
    if (found := delta_step_npu(*parts, state_BHKV, kernels)) is not None:
        return found
    return delta_step(*parts, state_BHKV)


@full_precision
def kda_chunk(
    q_MHK: torch.Tensor,
    k_MHK: torch.Tensor,
    v_MHV: torch.Tensor,
    z_MHK: torch.Tensor,
    beta_MH: torch.Tensor,
    A_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor,
    lower_bound: float | None,
    documents: Documents,
    state_DHKV: torch.Tensor | None = None,
    keep_state: bool = True,
    kernels: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`kda_step` over whole documents. Returns (o [M, H, V], final states, or None unless `keep_state`)."""
    tokens = q_MHK, k_MHK, v_MHV, z_MHK, beta_MH
    if kernel := kernel_for("kda", kernels, *tokens, problem=_kda_problem(k_MHK, v_MHV)):
        o_1MHV, state_DHKV = kernel.chunk_kda(
            *(x.unsqueeze(0) for x in tokens),
            A_log_H,
            dt_bias_HK,
            lower_bound=lower_bound,
            cu_seqlens=documents.cu_seqlens,
            initial_state=state_DHKV,
            output_final_state=keep_state,
        )
        return o_1MHV.squeeze(0), state_DHKV
    parts = q_MHK, k_MHK, v_MHV, kda_gate(z_MHK, A_log_H, dt_bias_HK, lower_bound), torch.sigmoid(_wide(beta_MH))
    if (found := delta_chunk_npu(*parts, lower_bound, documents, state_DHKV, keep_state, kernels)) is not None:
        return found
    o_MHV, state_DHKV = delta_chunk(*parts, documents, state_DHKV)
    return o_MHV, state_DHKV if keep_state else None


def delta_step(
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    g_BHK: torch.Tensor,
    beta_BH: torch.Tensor,
    state_BHKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the KDA recurrence. q and k are raw (normalised here); g is the log decay; the state is fp32.

    S <- diag(exp g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.   Returns (o [B, H, V], new state).
    """
    dtype = q_BHK.dtype
    q, k, v, g, beta = _kda_inputs(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH)
    state = state_BHKV.to(g.dtype) * g.exp().unsqueeze(-1)
    read = torch.einsum("bhkv,bhk->bhv", state, k)
    state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * (v - read)).unsqueeze(-2)
    return torch.einsum("bhkv,bhk->bhv", state, q).to(dtype), state


def delta_chunk(
    q_MHK: torch.Tensor,
    k_MHK: torch.Tensor,
    v_MHV: torch.Tensor,
    g_MHK: torch.Tensor,
    beta_MH: torch.Tensor,
    documents: Documents,
    state_DHKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of `delta_step` over whole documents, chunk by chunk. Returns (o [M, H, V], final states).

    Inside a chunk the updates solve a unit lower triangular system (WY form), by forward substitution: powers of the
    triangle lose all accuracy at real decays. Every decay is the exponential of a difference that is never positive.
    """
    dtype = q_MHK.dtype
    chunks = documents.chunks(KDA_CHUNK)
    q, k, v, g, beta = _kda_inputs(q_MHK, k_MHK, v_MHV, g_MHK, beta_MH)

    def cut(x: torch.Tensor) -> torch.Tensor:
        """[M, H, ...] -> [N, H, C, ...]; zeros behind a document's end leave the state as it is."""
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[chunks.index_NC].transpose(1, 2)

    q, k, v, g, beta = (cut(x) for x in (q, k, v, g, beta))
    beta = beta.unsqueeze(-1)
    G = g.cumsum(2)
    lower = torch.ones(KDA_CHUNK, KDA_CHUNK, dtype=torch.bool, device=q.device).tril()
    decay_NHCCK = (G.unsqueeze(3) - G.unsqueeze(2)).masked_fill(~lower[..., None], -torch.inf).exp()
    # Rows i of both score matrices in one product: sum_K (beta k | q)_i exp(G_i - G_j) k_j.
    pair_NHCK2 = torch.stack([beta * k, q], dim=-1)
    scores = (decay_NHCCK * k.unsqueeze(2)) @ pair_NHCK2
    triangle, attend = scores[..., 0].tril(-1), scores[..., 1]
    right = torch.cat([beta * k * G.exp(), beta * v], dim=-1)
    # solve_triangular takes the unit diagonal as given.
    WU = torch.linalg.solve_triangular(triangle, right, upper=False, unitriangular=True)
    W, U = WU.split([k.shape[-1], v.shape[-1]], dim=-1)
    last = G[:, :, -1:]
    q_in, k_out, decay_out = q * G.exp(), k * (last - G).exp(), last.exp().transpose(2, 3)

    D = len(documents.length_D)
    state = q.new_zeros(D, *q.shape[1:2], k.shape[-1], v.shape[-1])
    if state_DHKV is not None:
        state = state_DHKV.to(q.dtype)[chunks.rank_D]
    outputs = []
    parts = (x.split(chunks.active) for x in (W, U, q_in, attend, k_out, decay_out))
    for W_s, U_s, q_s, attend_s, k_s, decay_s in zip(*parts, strict=True):
        now, done = state.split([len(W_s), D - len(W_s)])
        update = U_s - W_s @ now
        outputs.append(q_s @ now + attend_s @ update)
        state = torch.cat([decay_s * now + k_s.transpose(2, 3) @ update, done])
    # The empty part keeps a batch of padding alone in the graph.
    o_NCHV = torch.cat([U[:0], *outputs]).transpose(1, 2)
    inside = chunks.index_NC < len(q_MHK)
    o_MHV = v_MHV.new_zeros(v_MHV.shape, dtype=q.dtype).index_copy(0, chunks.index_NC[inside], o_NCHV[inside])
    return o_MHV.to(dtype), torch.empty_like(state).index_copy(0, chunks.rank_D, state)


def _index_problem(q_TIK: torch.Tensor, k: int, relu: bool) -> str | None:
    """Why the kernels cannot score keys and choose k of them this way, if so."""
    _, heads, width = q_TIK.shape
    if heads > INDEX_KERNEL_HEADS or width not in INDEX_KERNEL_WIDTHS:
        return f"the indexer has {heads} heads of {width}, not up to {INDEX_KERNEL_HEADS} of 128 or 64"
    if k > INDEX_KERNEL_KEYS:
        return f"the indexer chooses {k} keys, over {INDEX_KERNEL_KEYS}"
    return None if relu else "the indexer has no ReLU"


def _sparse_problem(q_TNL: torch.Tensor, value_width: int) -> str | None:
    """Why the kernels cannot attend to latents of this shape, if so."""
    _, heads, width = q_TNL.shape
    if heads > SPARSE_KERNEL_HEADS or (width, value_width) != SPARSE_KERNEL_WIDTHS:
        return f"{heads} heads attend to {width} numbers, {value_width} of them values; kernels take 128, 576, 512"
    return None


@full_precision
@torch.no_grad()
def index_topk(
    q_TIK: torch.Tensor,
    k_SK: torch.Tensor,
    weight_TI: torch.Tensor,
    first_T: torch.Tensor,
    end_T: torch.Tensor,
    k: int,
    relu: bool = True,
    kernels: str = "torch",
) -> torch.Tensor:
    """The k best keys of every query by the scores of the indexer (sparse.py): int32 [T, k]."""
    if kernel := kernel_for("sparse_attention", kernels, q_TIK, k_SK, problem=_index_problem(q_TIK, k, relu)):
        return kernel.index_topk(q_TIK, k_SK, weight_TI, first_T, end_T, k)
    if (found := index_topk_npu(q_TIK, k_SK, weight_TI, first_T, end_T, k, relu, kernels)) is not None:
        return found
    return index_topk_torch(q_TIK, k_SK, weight_TI, first_T, end_T, k, relu)


@full_precision
def sparse_attention(
    q_TNL: torch.Tensor,
    kv_SL: torch.Tensor,
    index_Tk: torch.Tensor,
    scale: float,
    value_width: int,
    sink_N: torch.Tensor | None = None,
    kernels: str = "torch",
    ranges: Ranges | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the listed keys (sparse.py): output [T, N, V] and fp32 log-sum-exp [T, N].

    ranges: the keys that each query sees, first_T and end_T, where the lists are of single keys among them.
    """
    problem = _sparse_problem(q_TNL, value_width)
    if kernel := kernel_for("sparse_attention", kernels, q_TNL, kv_SL, problem=problem):
        return kernel.sparse_attention(q_TNL, kv_SL, index_Tk, scale, value_width=value_width, sink_N=sink_N)
    found = sparse_attention_npu(q_TNL, kv_SL, index_Tk, scale, value_width, sink_N, ranges, kernels)
    if found is not None:
        return found
    return sparse_attention_torch(q_TNL, kv_SL, index_Tk, scale, value_width, sink_N)


@full_precision
@torch.no_grad()
def head_probabilities(
    q_TNL: torch.Tensor,
    kv_SL: torch.Tensor,
    index_Tk: torch.Tensor,
    lse_TN: torch.Tensor,
    scale: float,
    value_width: int,
    kernels: str = "torch",
) -> torch.Tensor:
    """What all heads of `sparse_attention` together give to each listed key (sparse.py): fp32 [T, k]."""
    problem = _sparse_problem(q_TNL, value_width)
    if kernel := kernel_for("sparse_attention", kernels, q_TNL, kv_SL, problem=problem):
        return kernel.head_probabilities(q_TNL, kv_SL, index_Tk, lse_TN, scale)
    return head_probabilities_torch(q_TNL, kv_SL, index_Tk, lse_TN, scale)


@full_precision
def indexer_loss(
    q_TIK: torch.Tensor,
    k_SK: torch.Tensor,
    weight_TI: torch.Tensor,
    index_Tk: torch.Tensor,
    target_Tk: torch.Tensor,
    relu: bool = True,
    kernels: str = "torch",
    ranges: Ranges | None = None,
) -> torch.Tensor:
    """Divergence of the indexer's choice among the listed keys from the target (sparse.py): fp32 [T]. ranges: as in
    `sparse_attention`."""
    problem = _index_problem(q_TIK, index_Tk.shape[1], relu)
    if q_TIK.dtype == torch.float16:
        problem = "gradients of the indexer's scores leave the range of torch.float16"
    if kernel := kernel_for("sparse_attention", kernels, q_TIK, k_SK, problem=problem):
        return kernel.indexer_loss(q_TIK, k_SK, weight_TI, index_Tk, target_Tk)
    found = indexer_loss_npu(q_TIK, k_SK, weight_TI, index_Tk, target_Tk, relu, ranges, kernels)
    if found is not None:
        return found
    return indexer_loss_torch(q_TIK, k_SK, weight_TI, index_Tk, target_Tk, relu)


@full_precision
def fused_indexer_loss(
    teacher: Teacher,
    student: Student,
    index_Tk: torch.Tensor,
    lse_TN: torch.Tensor,
    value_width: int,
    relu: bool,
    ranges: Ranges,
    kernels: str,
) -> torch.Tensor | None:
    """`indexer_loss` against `head_probabilities` in one, summed over queries; None where there is no operator for it.
    It exists on Ascend."""
    fused = fused_indexer_loss_npu(teacher, student, index_Tk, lse_TN, value_width, relu, ranges, kernels)
    if fused is None or not several_parts(teacher.q_TNL.shape[1]):
        return fused
    with torch.no_grad():
        target_Tk = head_probabilities_torch(*teacher[:2], index_Tk, lse_TN, teacher.scale)
        loss_T = indexer_loss_torch(*student, index_Tk, target_Tk, relu)
    return fused + (loss_T.sum() - fused.detach())


@full_precision
def dense_indexer_loss(
    teacher: Teacher,
    student: Student,
    first_T: torch.Tensor,
    end_T: torch.Tensor,
    pools: Pools | None = None,
    relu: bool = True,
) -> torch.Tensor:
    """Divergence of the indexer's scores from attention to all visible keys (sparse.py): fp32 [T]. No kernel."""
    return dense_indexer_loss_torch(teacher, student, first_T, end_T, pools, relu)


@full_precision
def fused_dense_indexer_loss(
    teacher: Teacher,
    heads: Callable[[], Heads],
    student: Student,
    ranges: Ranges,
    pools: Pools | None,
    relu: bool,
    kernels: str,
) -> torch.Tensor | None:
    """`dense_indexer_loss` of operators that do not take the teacher absorbed, summed over queries; None where there
    are none. heads: makes the teacher's queries, keys and values. It exists on Ascend."""
    if not on_npu(teacher.q_TNL, kernels):
        return None
    fused = dense_indexer_loss_npu(teacher, heads(), student, pools is not None, relu, ranges, kernels)
    if fused is None or not several_parts(teacher.q_TNL.shape[1]):
        return fused
    with torch.no_grad():
        loss_T = dense_indexer_loss_torch(teacher, student, *ranges, pools, relu)
    return fused + (loss_T.sum() - fused.detach())


def attention(
    q_BNTK: torch.Tensor,
    k_BNSK: torch.Tensor,
    v_BNSV: torch.Tensor,
    mask_BTS: torch.Tensor,
    scale: float,
    fused: bool,
    sink_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Masked softmax attention [B, N, T, V]: softmax in fp32, probabilities rounded to the query dtype.

    fused: torch's scaled_dot_product_attention instead of the explicit product (same mathematics, less memory), where
    there are no sinks. sink_N: one more logit per head, not scaled, whose probability is dropped.
    """
    if fused and sink_N is None:
        return F.scaled_dot_product_attention(q_BNTK, k_BNSK, v_BNSV, attn_mask=mask_BTS.unsqueeze(1), scale=scale)
    score = (q_BNTK @ k_BNSK.transpose(2, 3)) * scale
    score = _wide(score.masked_fill(~mask_BTS.unsqueeze(1), -torch.inf))
    if sink_N is None:
        return torch.softmax(score, dim=-1).to(q_BNTK.dtype) @ v_BNSV
    sink_BNT1 = _wide(sink_N).to(score.dtype)[:, None, None].expand(*score.shape[:-1], 1)
    share = torch.softmax(torch.cat([score, sink_BNT1], dim=-1), dim=-1)[..., :-1]
    return share.to(q_BNTK.dtype) @ v_BNSV


def causal_attention(
    q_BNTK: torch.Tensor,
    k_BNTK: torch.Tensor,
    v_BNTV: torch.Tensor,
    documents: Documents,
    scale: float,
    fused: bool,
    sink_N: torch.Tensor | None = None,
    chosen: Sequence[bool] | None = None,
    kernels: str = "torch",
) -> torch.Tensor:
    """`attention` of tokens to the earlier ones of their document, [B, N, T, V], document by document: a mask over the
    whole batch would rule out torch's fast kernels. Zeros at padding, and in documents that are not `chosen`."""
    found = causal_attention_npu(q_BNTK, k_BNTK, v_BNTV, documents, scale, fused, sink_N, chosen, kernels)
    if found is not None:
        return found
    if not documents.packed and documents.valid_BT is None and chosen is None:
        return _causal(q_BNTK, k_BNTK, v_BNTV, scale, fused, sink_N)
    lengths = documents.lengths
    chosen = [True] * len(lengths) if chosen is None else chosen
    parts = [documents.pack(x.transpose(1, 2)).transpose(0, 1).split(lengths, dim=1) for x in (q_BNTK, k_BNTK, v_BNTV)]
    # The empty part keeps a batch of padding alone in the graph.
    outputs_NtV = [torch.cat([x[0, :, :0] for x in (q_BNTK, k_BNTK, v_BNTV)], dim=-1)[..., -v_BNTV.shape[-1] :]]
    for length, computed, *qkv_NtK in zip(lengths, chosen, *parts, strict=True):
        if computed:
            # A kernel is planned for every length; no real token looks at zeros behind the end.
            padded = F.pad(torch.cat(qkv_NtK, dim=-1), (0, 0, 0, -length % PLANNED_LENGTH if fused else 0))
            q, k, v = padded.unsqueeze(0).split([x.shape[-1] for x in qkv_NtK], dim=-1)
            outputs_NtV.append(_causal(q, k, v, scale, fused, sink_N)[0, :, :length])
        else:
            outputs_NtV.append(torch.zeros_like(qkv_NtK[2]))
    return documents.unpack(torch.cat(outputs_NtV, dim=1).transpose(0, 1)).transpose(1, 2)


def _causal(
    q_BNTK: torch.Tensor,
    k_BNTK: torch.Tensor,
    v_BNTV: torch.Tensor,
    scale: float,
    fused: bool,
    sink_N: torch.Tensor | None,
) -> torch.Tensor:
    if fused and sink_N is None:
        # Torch's own order tries cuDNN late, which is the fastest by far where keys are wider than values.
        with sdpa_kernel(SDPA_ORDER, set_priority=True):
            return F.scaled_dot_product_attention(q_BNTK, k_BNTK, v_BNTV, is_causal=True, scale=scale)
    T = q_BNTK.shape[2]
    mask_1TT = torch.ones(1, T, T, dtype=torch.bool, device=q_BNTK.device).tril()
    return attention(q_BNTK, k_BNTK, v_BNTV, mask_1TT, scale, fused, sink_N)


def route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor,
    top_k: int,
    *,
    activation: str = "sigmoid",
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    kernels: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts per token: ids_TS int64 and weights_TS in the dtype of the logits (fp32 or wider).

    Scores are the sigmoid or softmax of the logits. The bias takes part in the choice only: weights are the plain
    scores, divided by their sum when `renormalize`, times `scaling_factor`. With groups > 1, experts can be chosen
    only from the `top_groups` groups whose two best biased scores have the largest sum (noaux_tc of DeepSeek-V3).
    """
    options = activation, renormalize, scaling_factor, groups, top_groups
    if (found := route_npu(logits_TE, bias_E, top_k, *options, kernels)) is not None:
        return found
    score_TE = logits_TE.sigmoid() if activation == "sigmoid" else logits_TE.softmax(-1)
    choice_TE = score_TE.detach() + bias_E.detach()
    if groups > 1:
        choice_TGe = choice_TE.unflatten(-1, (groups, -1))
        group_TG = choice_TGe.topk(min(2, choice_TGe.shape[-1]), dim=-1).values.sum(-1)
        kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
        kept_TG.scatter_(-1, group_TG.topk(top_groups, dim=-1).indices, True)
        choice_TE = choice_TGe.masked_fill(~kept_TG.unsqueeze(-1), -torch.inf).flatten(-2)
    ids_TS = choice_TE.topk(top_k, dim=-1).indices
    weights_TS = score_TE.gather(-1, ids_TS)
    if renormalize:
        weights_TS = weights_TS / (weights_TS.sum(-1, keepdim=True) + 1e-20)
    return ids_TS, weights_TS * scaling_factor


class LowRank(NamedTuple):
    """One adapter on a stack of matrices: adds `scaling * B_e A_e` to the matrix of expert e."""

    a_ErI: torch.Tensor
    b_EOr: torch.Tensor
    scaling: float


class ExpertMatrices(NamedTuple):
    """One matrix per expert and the adapters on it.

    weight: float [E, O, I], or MXFP4 bytes uint8 [E, O, I / 2] with `scale` uint8 [E, O, I / 32].
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    adapters: tuple[LowRank, ...] = ()


class GroupedMatmul(torch.autograd.Function):
    """y_RO[r] = W_e x_RI[r]: rows are sorted by expert, `counts[e]` of them belong to expert e.

    Float weights are cast to the dtype of x and get a gradient if they require one. MXFP4 weights are decoded to
    that dtype, a bounded number of experts at a time, in forward and again in backward: only their bytes are saved,
    as the caller's own tensors and not as views of them. The same bytes may be in other memory by then.
    """

    @staticmethod
    def forward(
        ctx, x_RI: torch.Tensor, weight_EOI: torch.Tensor, scale: torch.Tensor | None, counts: list[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(x_RI if ctx.needs_input_grad[1] else None, weight_EOI, scale)
        ctx.counts = counts
        y_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
        for rows, weight_OI in _matrices_with_rows(weight_EOI, scale, counts, x_RI.dtype):
            torch.mm(x_RI[rows], weight_OI.T, out=y_RO[rows])
        return y_RO

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RO: torch.Tensor):
        x_RI, weight_EOI, scale = ctx.saved_tensors
        grad_RI = grad_EOI = None
        if ctx.needs_input_grad[0]:
            width = weight_EOI.shape[2] * (1 if scale is None else 2)
            grad_RI = grad_RO.new_empty(grad_RO.shape[0], width)
            for rows, weight_OI in _matrices_with_rows(weight_EOI, scale, ctx.counts, grad_RO.dtype):
                torch.mm(grad_RO[rows], weight_OI, out=grad_RI[rows])
        if ctx.needs_input_grad[1]:
            grad_EOI = torch.zeros_like(weight_EOI, memory_format=torch.contiguous_format)
            for expert, rows in _row_ranges(ctx.counts):
                grad_EOI[expert] = grad_RO[rows].T @ x_RI[rows]
        return grad_RI, grad_EOI, None, None


def _row_ranges(counts: list[int]) -> list[tuple[int, slice]]:
    """(expert, its rows) of every expert that has rows."""
    ends = accumulate(counts)
    return [(expert, slice(end - n, end)) for expert, (n, end) in enumerate(zip(counts, ends, strict=True)) if n]


def _matrices_with_rows(
    weight_EOI: torch.Tensor, scale: torch.Tensor | None, counts: list[int], dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, float matrix [O, I]) of every expert that has rows."""
    ranges = _row_ranges(counts)
    if scale is None:
        for expert, rows in ranges:
            yield rows, weight_EOI[expert].to(dtype)
        return
    matrix_bytes = weight_EOI[0].numel() * 2 * torch.promote_types(dtype, torch.float32).itemsize
    chunk = max(1, DECODED_BYTES // matrix_bytes)
    for first in range(0, len(ranges), chunk):
        experts, rows = zip(*ranges[first : first + chunk], strict=True)
        decoded = decode(weight_EOI[list(experts)], scale[list(experts)], dtype)
        yield from zip(rows, decoded, strict=True)


def grouped_linear(x_RI: torch.Tensor, matrices: ExpertMatrices, counts: list[int]) -> torch.Tensor:
    """Rows sorted by expert times each expert's matrix, adapters included: [R, O] in the dtype of x.

    Adapter products are taken in the wider of the dtypes of x and of the adapter (fp32 masters are not rounded),
    added to the base product there, and rounded once.
    """
    y_RO = GroupedMatmul.apply(x_RI, matrices.weight, matrices.scale, counts)
    for a_ErI, b_EOr, scaling in matrices.adapters:
        wide = torch.promote_types(x_RI.dtype, a_ErI.dtype)
        low_Rr = GroupedMatmul.apply(x_RI.to(wide), a_ErI.to(wide), None, counts)
        y_RO = y_RO + scaling * GroupedMatmul.apply(low_Rr, b_EOr.to(wide), None, counts)
    return y_RO.to(x_RI.dtype)


def _expert_problem(ids_TS: torch.Tensor, *stacks: ExpertMatrices) -> str | None:
    """Why the kernels cannot compute this MLP, if so."""
    experts, slots = len(stacks[0].weight), ids_TS.shape[1]
    if experts > EXPERT_KERNEL_EXPERTS:
        return f"there are {experts} experts, over {EXPERT_KERNEL_EXPERTS}"
    if slots > EXPERT_KERNEL_SLOTS:
        return f"tokens choose {slots} experts, over {EXPERT_KERNEL_SLOTS}"
    for matrices in stacks:
        if matrices.weight.requires_grad and torch.is_grad_enabled():
            return "the expert weights are trained"
        rank = sum(a_ErI.shape[1] for a_ErI, _, _ in matrices.adapters)
        if rank > EXPERT_KERNEL_RANK:
            return f"the adapters of a matrix have rank {rank} in all, over {EXPERT_KERNEL_RANK}"
    return None


@full_precision
def expert_mlp(
    x_TL: torch.Tensor,
    ids_TS: torch.Tensor,
    weights_TS: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    config,
) -> torch.Tensor:
    """Weighted sum over the chosen experts of W_down,e act(W_gate,e x, W_up,e x): [T, L] in fp32, or wider if x is.

    gate_up: [E, 2F, L], gate rows first; down: [E, L, F]; `config` names the activation. Every expert's output is
    rounded to the dtype of x; the sum over the slots S is taken in fp32 in their order, so it does not change from
    run to run. Rounding it is left to the caller: other processes may hold further terms. A slot whose id is not in
    0 .. E - 1 chose an expert that is not held here: it adds zero, and no gradient flows to it. Kernels
    (`config.kernels`) need the ids of a token to be distinct, and make other tokens NaN.
    """
    tokens, slots = ids_TS.shape
    experts = gate_up.weight.shape[0]
    if kernel := kernel_for("latent_moe", config.kernels, x_TL, problem=_expert_problem(ids_TS, gate_up, down)):
        rows = kernel.sort_slots(ids_TS, experts)
        situ = config.hidden_act == "situ"
        return kernel.expert_mlp(
            x_TL,
            rows,
            weights_TS,
            gate_up,
            down,
            activation="situ" if situ else "silu",
            beta=config.activation_situ_beta if situ else None,
            linear_beta=config.activation_situ_linear_beta if situ else None,
            # Where other processes hold experts, most slots may have no row: waiting for the number saves memory.
            max_rows=max(1, int(rows.offset[-1])) if experts < config.num_experts else None,
        )
    found = expert_mlp_npu(x_TL, ids_TS, weights_TS, gate_up, down, partial(glu, config=config), config.kernels)
    if found is not None:
        return found
    # Slots of experts that are not held here sort behind all others and are cut off.
    ids_R = torch.where((ids_TS >= 0) & (ids_TS < experts), ids_TS, experts).flatten()
    counts_E = torch.bincount(ids_R, minlength=experts + 1)[:experts]
    # Every expert's rows start at a multiple of ROW_TILE, zeros between: see there.
    tiled_E = (counts_E + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    gap_E = (tiled_E - counts_E).cumsum(0) - (tiled_E - counts_E)
    counts, rows = tiled_E.tolist(), int(counts_E.sum())
    order_R = ids_R.argsort(stable=True)[:rows]
    place_R = torch.arange(rows, device=order_R.device) + gap_E[ids_R[order_R]]
    # Indexing a view with one row per slot: its backward writes every row once and sums over the slots in fp32.
    # Indexing tokens would add up the slots of a token in the activation dtype, on GPUs in any order.
    x_RL = x_TL.unsqueeze(1).expand(-1, slots, -1)[order_R // slots, order_R % slots]
    x_RL = x_RL.new_zeros(sum(counts), x_RL.shape[1]).index_copy(0, place_R, x_RL)
    gate_RF, up_RF = grouped_linear(x_RL, gate_up, counts).chunk(2, dim=-1)
    y_RL = grouped_linear(glu(gate_RF, up_RF, config), down, counts)
    y_TSL = y_RL.new_zeros(tokens * slots, y_RL.shape[1]).index_copy_(0, order_R, y_RL[place_R])
    y_TSL = y_TSL.unflatten(0, (tokens, slots))
    return (_wide(y_TSL) * _wide(weights_TS).unsqueeze(-1)).sum(1)


def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    ignore_index: int = -100,
    kernels: str = "torch",
) -> torch.Tensor:
    """Cross-entropy of softmax(hidden @ weight^T) with the target of every row, [N] in fp32; 0 where it is ignored.

    Logits are rounded to the dtype of `hidden`, as those of a linear layer are. A bounded number of rows has them at a
    time, in forward and again in backward, so neither all logits nor their gradients are ever held.
    """
    problem = "the language-model head is trained" if weight_VD.requires_grad and torch.is_grad_enabled() else None
    if kernel := kernel_for("linear_cross_entropy", kernels, hidden_ND, weight_VD, problem=problem):
        return kernel.linear_cross_entropy(hidden_ND, weight_VD, target_N, ignore_index=ignore_index)

    def losses(hidden_nD: torch.Tensor, target_n: torch.Tensor) -> torch.Tensor:
        logits_nV = _wide(F.linear(hidden_nD, weight_VD))
        if (found := cross_entropy_npu(logits_nV, target_n, ignore_index, kernels)) is not None:
            return found
        return F.cross_entropy(logits_nV, target_n, ignore_index=ignore_index, reduction="none")

    row_bytes = len(weight_VD) * torch.promote_types(hidden_ND.dtype, torch.float32).itemsize
    rows = max(ROW_TILE, LOGIT_BYTES // row_bytes // ROW_TILE * ROW_TILE)
    parts = zip(hidden_ND.split(rows), target_N.split(rows), strict=True)
    return torch.cat([checkpoint(losses, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])
