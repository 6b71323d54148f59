"""What even loads are steered by: sums of scores for an auxiliary loss, counts of biases for Quantile Balancing.

Scores are summed over a run of tokens in registers, the partial sums in a fixed order. Counts are integers: the order
of their atomic additions cannot show.

Legend: T tokens, E experts, P programs, H bins. BE experts of a block.
"""

import torch
import triton
import triton.language as tl

from ._ops import op
from .route import check_logits, sigmoid

# Partial sums: eight programs of four warps on each of 132 multiprocessors. A constant, so that sums are the same on
# every device.
PROGRAMS, WARPS = 1056, 4


@triton.jit
def _shares(logits, o_x, m_e, counts):
    """Logits of a token, and its scores divided by their sum; zeros where it does not count."""
    b_x = tl.load(logits + o_x, mask=m_e & counts, other=0.0)
    # From logarithms: all scores of a token may be too small for fp32.
    b_log = tl.minimum(b_x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(b_x)))
    b_log = tl.where(m_e, b_log, -float("inf"))
    b_p = tl.exp(b_log - tl.max(b_log, axis=0))
    return b_x, tl.where(counts, b_p / tl.sum(b_p, axis=0), 0.0)


@triton.jit(do_not_specialize=["T"])
def shares_fwd_kernel(logits, mask, partial, T, E: tl.constexpr, BE: tl.constexpr):
    i_p = tl.program_id(0)
    o_e = tl.arange(0, BE)
    m_e = o_e < E
    b_sum = tl.zeros([BE], tl.float32)
    for i_t in range(i_p, T, tl.num_programs(0)):
        o_t = tl.full([], 0, tl.int64) + i_t
        counts = True
        if mask is not None:
            counts = tl.load(mask + o_t) != 0
        _, b_p = _shares(logits, o_t * E + o_e, m_e, counts)
        b_sum += b_p
    tl.store(partial + i_p * E + o_e, b_sum, mask=m_e)


@triton.jit
def shares_bwd_kernel(dshares, logits, mask, dlogits, E: tl.constexpr, BE: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BE)
    m_e = o_e < E
    counts = True
    if mask is not None:
        counts = tl.load(mask + i_t) != 0
    b_x, b_p = _shares(logits, i_t * E + o_e, m_e, counts)
    b_d = tl.load(dshares + o_e, mask=m_e, other=0.0)
    # The derivative of log(sigmoid(x)) is sigmoid(-x).
    b_dx = b_p * (b_d - tl.sum(b_p * b_d, axis=0)) * sigmoid(-b_x)
    tl.store(dlogits + i_t * E + o_e, b_dx, mask=m_e)


@triton.jit
def bias_counts_kernel(logits, cutoff, low, width, counts, E: tl.constexpr, H: tl.constexpr, BE: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BE)
    b_cut = tl.broadcast_to(tl.load(cutoff + i_t), [BE])
    m_e = (o_e < E) & (b_cut > -float("inf"))
    b_need = b_cut - sigmoid(tl.load(logits + i_t * E + o_e, mask=m_e, other=0.0))
    b_h = tl.div_rn(b_need - tl.load(low), tl.broadcast_to(tl.load(width), [BE]))
    b_h = tl.minimum(tl.maximum(b_h, 0.0), H - 1.0).to(tl.int32)
    tl.atomic_add(counts + o_e * H + b_h, tl.full([BE], 1, tl.int32), mask=m_e, sem="relaxed")


@torch.library.custom_op(op("score_shares"), mutates_args=())
def _score_shares(logits_TE: torch.Tensor, mask_T: torch.Tensor | None) -> torch.Tensor:
    logits_TE = logits_TE.contiguous()
    T, E = logits_TE.shape
    partial_PE = logits_TE.new_empty(min(T, PROGRAMS), E)
    with torch.cuda.device_of(logits_TE):
        shares_fwd_kernel[(len(partial_PE),)](
            logits_TE,
            None if mask_T is None else mask_T.contiguous(),
            partial_PE,
            T,
            E=E,
            BE=triton.next_power_of_2(E),
            num_warps=WARPS,
        )
    return partial_PE.sum(0)


@_score_shares.register_fake
def _(logits_TE, mask_T):
    return logits_TE.new_empty(logits_TE.shape[1])


@torch.library.custom_op(op("score_shares_bwd"), mutates_args=())
def _score_shares_bwd(dshares_E: torch.Tensor, logits_TE: torch.Tensor, mask_T: torch.Tensor | None) -> torch.Tensor:
    logits_TE = logits_TE.contiguous()
    T, E = logits_TE.shape
    dlogits_TE = torch.empty_like(logits_TE)
    with torch.cuda.device_of(logits_TE):
        shares_bwd_kernel[(T,)](
            dshares_E.contiguous(),
            logits_TE,
            None if mask_T is None else mask_T.contiguous(),
            dlogits_TE,
            E=E,
            BE=triton.next_power_of_2(E),
            num_warps=WARPS,
        )
    return dlogits_TE


@_score_shares_bwd.register_fake
def _(dshares_E, logits_TE, mask_T):
    return torch.empty_like(logits_TE, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dshares_E):
    return _score_shares_bwd(dshares_E, *ctx.saved_tensors), None


_score_shares.register_autograd(_backward, setup_context=_save)


def score_shares(logits_TE: torch.Tensor, mask_T: torch.Tensor | None = None) -> torch.Tensor:
    """Sum over tokens of sigmoid(logits), each token's divided by their sum over the experts: fp32 [E].

    logits_TE: fp32, 1 to 1024 experts; tokens where bool mask_T is False are left out. E * (these * loads).sum(), with
    loads that add up to 1, is the load-balancing loss summed over tokens. Gradients flow to the logits. Raises
    ValueError naming the argument.
    """
    check_logits(logits_TE, mask_T)
    return _score_shares(logits_TE, mask_T)


@torch.library.custom_op(op("count_biases"), mutates_args=("counts_EH",))
def _count_biases(
    counts_EH: torch.Tensor, logits_TE: torch.Tensor, cutoff_T: torch.Tensor, low: torch.Tensor, width: torch.Tensor
) -> None:
    (T, E), H = logits_TE.shape, counts_EH.shape[1]
    with torch.cuda.device_of(logits_TE):
        bias_counts_kernel[(T,)](
            logits_TE.contiguous(),
            cutoff_T.contiguous(),
            low,
            width,
            counts_EH,
            E=E,
            H=H,
            BE=triton.next_power_of_2(E),
            num_warps=WARPS,
        )


def count_biases(
    counts_EH: torch.Tensor, logits_TE: torch.Tensor, cutoff_T: torch.Tensor, low: torch.Tensor, width: torch.Tensor
) -> None:
    """Add to int32 counts_EH, for every token and expert, the bin of the bias at which the token would choose it.

    That bias is cutoff - sigmoid(logit), its bin floor((bias - low) / width), at least 0 and at most H - 1. logits_TE
    and the cutoffs of their tokens are what `route` got and gave: tokens with a cutoff of -inf do not count. low,
    width: fp32 scalars on the device. Raises ValueError naming the argument. The histogram of Quantile Balancing, from
    the Kimi-K3 report.
    """
    check_logits(logits_TE, None)
    T, E = logits_TE.shape
    if cutoff_T.shape != (T,) or cutoff_T.dtype != torch.float32:
        raise ValueError(f"cutoff_T: expected float32 [{T}], got {cutoff_T.dtype} {list(cutoff_T.shape)}")
    if counts_EH.dim() != 2 or len(counts_EH) != E or counts_EH.dtype != torch.int32:
        raise ValueError(f"counts_EH: expected int32 [{E}, bins], got {counts_EH.dtype} {list(counts_EH.shape)}")
    if not counts_EH.is_contiguous():
        raise ValueError("counts_EH: expected a contiguous matrix")
    for name, scalar in (("low", low), ("width", width)):
        if scalar.numel() != 1 or scalar.dtype != torch.float32:
            raise ValueError(f"{name}: expected a float32 scalar, got {scalar.dtype} {list(scalar.shape)}")
    _count_biases(counts_EH, logits_TE.detach(), cutoff_T, low, width)
