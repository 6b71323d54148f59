"""Ascend: operators of torch-npu in place of the torch definitions of `ops.py`, and which calls they take.

`import torch` registers them as torch.ops.npu where torch-npu is installed; nothing here imports it. On an NPU they
are used wherever they apply and `config.kernels` is "auto"; otherwise the torch definition is, and the log says once
which operation it is and why: functions named like those of `ops.py` return None for a call that is not theirs.
Signatures are those of torch-npu 2.14, limits those of its operators' documentation (CANN 9). `npu_sparse.py` has
sparse attention and its indexer, `npu_experts.py` the routed experts.

What takes no gradient here has none by its own definition; the operators that do are those of torch-npu's autograd:
attention, norm, gate and cross-entropy.

Legend: T queries, M real tokens of all documents in order, N heads (tokens, in a loss), K key width, V value width
        (vocabulary, in a loss), E experts, S chosen experts, D documents, H heads of KDA, B batch.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

import torch
from transformers.utils import logging

from .documents import Documents

logger = logging.get_logger(__name__)

DEVICES = ("npu",)
# What the log has been told.
SAID: set[str] = set()
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)
# Dense attention: heads, documents of a call, and the side of the mask that stands for a triangle of any size.
ATTENTION_HEADS, ATTENTION_DOCUMENTS, ATTENTION_MASK = 256, 1024, 2048
ATTENTION_WIDTH, ATTENTION_TOKENS = 768, 2**20
GATE_EXPERTS = 2048
LOSS_ROWS = 200_000
STEP_HEADS, STEP_WIDTH = 256, 256
# The gate of the released model; fla's faster gradient needs decays that are no stronger.
SAFE_LOWER_BOUND = -5.0
CHUNK_WIDTH = 256
L2_EPS = 1e-6


def on_npu(x: torch.Tensor, choice: str) -> bool:
    """Whether operators of torch-npu may compute something of x; choice: `config.kernels`."""
    return x.device.type in DEVICES and choice == "auto" and x.numel() > 0


def serves(
    name: str, choice: str, x: torch.Tensor, operators: Sequence[str], problem: Callable[[], str | None]
) -> bool:
    """Whether torch-npu computes the operation `name` of `ops.py` for a call on x.

    choice: `config.kernels`. operators: what the operation needs of torch-npu. problem: why they cannot make this call,
    if they cannot; only asked on an NPU.
    """
    if not on_npu(x, choice):
        return False
    missing = [operator for operator in operators if not hasattr(torch.ops.npu, operator)]
    reason = f"this torch-npu has no {missing[0]}" if missing else problem()
    if reason is not None:
        line = f"{name}: the torch definition, {reason}"
        if line not in SAID:
            SAID.add(line)
            logger.warning(line)
    return reason is None


def torch_npu_problem() -> str | None:
    """Why no operator of torch-npu can run here, if so."""
    try:
        import torch_npu
    except ModuleNotFoundError as error:
        if error.name == "torch_npu":
            return 'torch-npu is not installed or does not load: pip install -e ".[npu]", source set_env.sh of CANN'
        return f"torch-npu does not load ({error})"
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch-npu does not load ({error}): set the environment of CANN (source set_env.sh)"
    if not hasattr(torch, "npu") or not hasattr(torch.ops.npu, "npu_rms_norm"):
        return f"{torch_npu.__file__ or torch_npu.__path__} is not torch-npu and hides it: rename it"
    return None if torch.npu.is_available() else "torch-npu sees no device"


def device_name() -> str:
    return torch.npu.get_device_name()


def is_950() -> bool:
    """Ascend 950, whose operators have other limits than those of A2 and A3."""
    return "950" in device_name()


def dtype_problem(*tensors: torch.Tensor, dtypes: tuple[torch.dtype, ...] = HALF) -> str | None:
    odd = [x.dtype for x in tensors if x.dtype not in dtypes or x.dtype != tensors[0].dtype]
    return f"the tensors are {', '.join(str(x.dtype) for x in tensors)}" if odd else None


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor | None:
    """x / sqrt(mean(x^2) + eps) over the last axis, rounded to the dtype of x."""
    if not serves("rms_norm", "auto", x, ("npu_rms_norm",), lambda: dtype_problem(x, dtypes=FLOATS)):
        return None
    # A weight of ones: the model multiplies by its own after this rounding.
    return torch.ops.npu.npu_rms_norm(x, x.new_ones(x.shape[-1]), eps)[0]


@cache
def causal_mask(device: torch.device) -> torch.Tensor:
    """What the operators take for a causal mask of any length: True where a key lies behind the query."""
    return torch.ones(ATTENTION_MASK, ATTENTION_MASK, dtype=torch.bool, device=device).triu(1)


def _attention_problem(
    q_BNTK: torch.Tensor, v_BNTV: torch.Tensor, lengths: list[int], fused: bool, sink_N: torch.Tensor | None
) -> str | None:
    _, heads, _, width = q_BNTK.shape
    if not fused:
        return "the attention implementation is eager"
    if sink_N is not None:
        return "heads have sinks"
    if heads > ATTENTION_HEADS or not v_BNTV.shape[-1] <= width <= ATTENTION_WIDTH:
        return f"{heads} heads are {width} and {v_BNTV.shape[-1]} wide"
    if len(lengths) > ATTENTION_DOCUMENTS or sum(lengths) > ATTENTION_TOKENS:
        return f"there are {len(lengths)} documents of {sum(lengths)} tokens"
    return dtype_problem(q_BNTK, v_BNTV, dtypes=FLOATS)


def causal_attention(
    q_BNTK: torch.Tensor,
    k_BNTK: torch.Tensor,
    v_BNTV: torch.Tensor,
    documents: Documents,
    scale: float,
    fused: bool,
    sink_N: torch.Tensor | None,
    chosen: Sequence[bool] | None,
    choice: str,
) -> torch.Tensor | None:
    """`ops.causal_attention`: all documents in one call."""

    def problem() -> str | None:
        return _attention_problem(q_BNTK, v_BNTV, documents.lengths, fused, sink_N)

    if not serves("causal_attention", choice, q_BNTK, ("npu_fusion_attention",), problem):
        return None
    q_MNK, k_MNK, v_MNV = (documents.pack(x.transpose(1, 2)).contiguous() for x in (q_BNTK, k_BNTK, v_BNTV))
    place_M, lengths = None, documents.lengths
    if chosen is not None:
        computed_D = torch.tensor(chosen, device=q_MNK.device)
        place_M = torch.repeat_interleave(computed_D, documents.length_D).nonzero().squeeze(1)
        q_MNK, k_MNK, v_MNV = (x[place_M] for x in (q_MNK, k_MNK, v_MNV))
        lengths = [length for length, computed in zip(lengths, chosen, strict=True) if computed]
    ends = list(accumulate(lengths))
    out_MNV = _dense_attention(q_MNK, k_MNK, v_MNV, ends, ends, scale)[0]
    if place_M is not None:
        everything = out_MNV.new_zeros(len(documents.token_M), *out_MNV.shape[1:])
        out_MNV = everything.index_copy(0, place_M, out_MNV)
    return documents.unpack(out_MNV).transpose(1, 2)


def causal_statistics(
    q_TNK: torch.Tensor,
    k_SNK: torch.Tensor,
    v_SNV: torch.Tensor,
    query_ends: list[int],
    key_ends: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and sum of the exponentials of every query's and head's logits, fp32 [N, T, 1] each."""
    _, largest, total, *_ = _dense_attention(q_TNK, k_SNK, v_SNV, query_ends, key_ends, scale, softmax_layout="TND")
    # Eight equal numbers each.
    return tuple(x[..., :1].transpose(0, 1).contiguous() for x in (largest, total))


def _dense_attention(q_TNK, k_SNK, v_SNV, query_ends: list[int], key_ends: list[int], scale: float, **options: str):
    return torch.ops.npu.npu_fusion_attention(
        *(x.contiguous() for x in (q_TNK, k_SNK, v_SNV)),
        q_TNK.shape[1],
        "TND",
        atten_mask=causal_mask(q_TNK.device),
        scale=scale,
        actual_seq_qlen=query_ends,
        actual_seq_kvlen=key_ends,
        sparse_mode=3,
        **options,
    )


def _route_problem(
    logits_TE: torch.Tensor, top_k: int, activation: str, renormalize: bool, groups: int, top_groups: int
) -> str | None:
    experts = logits_TE.shape[1]
    if activation != "sigmoid" or not renormalize:
        return "scores are not sigmoids divided by their sum"
    if experts % groups or experts // groups <= 2 or -(-experts // groups // 32) * 32 * groups > GATE_EXPERTS:
        return f"there are {experts} experts in {groups} groups"
    if top_k > experts // groups * top_groups:
        return f"{top_k} experts of {top_groups} groups are chosen"
    return dtype_problem(logits_TE, dtypes=FLOATS)


def route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor,
    top_k: int,
    activation: str,
    renormalize: bool,
    scaling_factor: float,
    groups: int,
    top_groups: int,
    choice: str,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`ops.route`."""

    def problem() -> str | None:
        return _route_problem(logits_TE, top_k, activation, renormalize, groups, top_groups)

    if not serves("route", choice, logits_TE, ("npu_moe_gating_top_k",), problem):
        return None
    weights_TS, ids_TS, _ = torch.ops.npu.npu_moe_gating_top_k(
        logits_TE,
        top_k,
        bias=bias_E.detach().to(logits_TE.dtype),
        k_group=top_groups,
        group_count=groups,
        # the two best of a group count
        group_select_mode=1,
        # sigmoid
        norm_type=1,
        # its backward needs the scores
        out_flag=True,
        routed_scaling_factor=scaling_factor,
        eps=1e-20,
    )
    return ids_TS.long(), weights_TS


def cross_entropy(
    logits_NV: torch.Tensor, target_N: torch.Tensor, ignore_index: int, choice: str
) -> torch.Tensor | None:
    """Losses [N] of the rows; 0 where the target is ignored."""

    def problem() -> str | None:
        rows = len(logits_NV)
        return f"there are {rows} tokens" if rows > LOSS_ROWS else dtype_problem(logits_NV, dtypes=FLOATS)

    if not serves("cross_entropy", choice, logits_NV, ("npu_cross_entropy_loss",), problem):
        return None
    ignored_N = target_N == ignore_index
    # The operator knows no ignored targets below 0.
    targets = target_N.masked_fill(ignored_N, 0)
    losses = torch.ops.npu.npu_cross_entropy_loss(logits_NV, targets, reduction="none")[0]
    return losses.masked_fill(ignored_N, 0)


def _step_problem(q_BHK: torch.Tensor, k_BHK: torch.Tensor, v_BHV: torch.Tensor, state: torch.Tensor) -> str | None:
    heads, width = q_BHK.shape[1:]
    if heads > STEP_HEADS or max(width, v_BHV.shape[-1]) > STEP_WIDTH:
        return f"{heads} heads are {width} and {v_BHV.shape[-1]} wide"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q_BHK, k_BHK, v_BHV, state)):
        return "a single token has gradients"
    return dtype_problem(q_BHK, k_BHK, v_BHV, dtypes=(torch.bfloat16,))


def delta_step(
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    g_BHK: torch.Tensor,
    beta_BH: torch.Tensor,
    state_BHKV: torch.Tensor,
    choice: str,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`ops.delta_step`. The operator rounds the state to bf16 after every token; it is returned in fp32 all the
    same."""

    def problem() -> str | None:
        return _step_problem(q_BHK, k_BHK, v_BHV, state_BHKV)

    if not serves("kda_step", choice, q_BHK, ("npu_recurrent_gated_delta_rule_functional",), problem):
        return None
    rows, _, width = q_BHK.shape
    unit = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q_BHK.float(), k_BHK.float()))
    o_BHV, state_BHVK = torch.ops.npu.npu_recurrent_gated_delta_rule_functional(
        *(x.bfloat16().contiguous() for x in (*unit, v_BHV, state_BHKV.transpose(2, 3))),
        beta=beta_BH.bfloat16().contiguous(),
        scale=width**-0.5,
        actual_seq_lengths=torch.ones(rows, dtype=torch.int32, device=q_BHK.device),
        ssm_state_indices=torch.arange(rows, dtype=torch.int32, device=q_BHK.device),
        gk=g_BHK.float().contiguous(),
    )
    return o_BHV, state_BHVK.float().transpose(2, 3)


@cache
def chunk_kernel() -> tuple[Callable | None, str | None]:
    """fla's chunk_kda, which has a Triton-Ascend backend, or why there is none: decided once, before any step."""
    try:
        from fla.ops.kda import chunk_kda
    except ImportError as error:
        return None, f"fla-core with its Triton-Ascend backend does not load ({error})"
    return chunk_kda, None


def _chunk_problem(q_MHK: torch.Tensor, k_MHK: torch.Tensor, v_MHV: torch.Tensor) -> str | None:
    _, missing = chunk_kernel()
    if missing is not None:
        return missing
    width = max(q_MHK.shape[-1], v_MHV.shape[-1])
    return f"heads are {width} wide" if width > CHUNK_WIDTH else dtype_problem(q_MHK, k_MHK, v_MHV, dtypes=FLOATS)


def delta_chunk(
    q_MHK: torch.Tensor,
    k_MHK: torch.Tensor,
    v_MHV: torch.Tensor,
    g_MHK: torch.Tensor,
    beta_MH: torch.Tensor,
    lower_bound: float | None,
    documents: Documents,
    state_DHKV: torch.Tensor | None,
    keep_state: bool,
    choice: str,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """`ops.delta_chunk`; lower_bound: of g, the log decay, which fla's own gate is not trusted to compute."""
    if not serves("kda_chunk", choice, q_MHK, (), lambda: _chunk_problem(q_MHK, k_MHK, v_MHV)):
        return None
    chunk_kda, _ = chunk_kernel()
    borders = documents.cu_seqlens
    o_1MHV, state_DHKV = chunk_kda(
        *(x.unsqueeze(0) for x in (q_MHK, k_MHK, v_MHV, g_MHK, beta_MH)),
        initial_state=state_DHKV,
        output_final_state=keep_state,
        use_qk_l2norm_in_kernel=True,
        safe_gate=lower_bound is not None and lower_bound >= SAFE_LOWER_BOUND,
        cu_seqlens=None if borders is None else borders.long(),
    )
    return o_1MHV.squeeze(0), state_DHKV
