"""Probabilities of the selected keys, summed over heads: the target of the indexer's loss.

Legend: T queries, N heads, S keys, L columns of a key, k selected keys per query; kernels: see forward.py.
"""

import torch
import triton
import triton.language as tl

from ._ops import op
from .attention import PROBABILITIES, Launch, some_keys
from .checks import check_lse, check_selection
from .tiles import LOG2E, first_selected, per_head, scores, selected


@triton.jit
def _sum_over_heads(s, lse, i_t, i_n: tl.constexpr, N: tl.constexpr, BN: tl.constexpr):
    """[BK] sums of exponentials of s [BK, BN] relative to lse."""
    b_lse = per_head(lse, i_t, i_n, N, BN, float("inf"))
    return tl.sum(tl.exp2((s - b_lse[None, :]) * LOG2E), 1)


@triton.jit
def head_probabilities_kernel(
    q, kv, index, lse, y, scale,
    N: tl.constexpr, L: tl.constexpr, KS: tl.constexpr, KT: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per query and tile of selected keys: y [T, KS]."""
    i_t, i_k = tl.program_id(0) // KT, tl.program_id(0) % KT
    b_s, m_k = selected(index, i_t, i_k * BK, first_selected(index, i_t, KS), KS, BK)
    b_y = tl.zeros([BK], tl.float32)
    if tl.max(m_k.to(tl.int32), 0) > 0:
        s0, s1 = scores(q, kv, i_t, b_s, N, L, BK, BC, BN0, BN1, PRECISION)
        b_y = _sum_over_heads(s0 * scale, lse, i_t, 0, N, BN0)
        if BN1 > 0:
            b_y += _sum_over_heads(s1 * scale, lse, i_t, BN0, N, BN1)
        b_y = tl.where(m_k, b_y, 0.0)
    o_k = i_k * BK + tl.arange(0, BK)
    tl.store(y + i_t.to(tl.int64) * KS + o_k, b_y, mask=o_k < KS)


@torch.library.custom_op(op("head_probabilities"), mutates_args=())
def _head_probabilities(
    q_TNL: torch.Tensor, kv_SL: torch.Tensor, index_Tk: torch.Tensor, lse_TN: torch.Tensor, scale: float
) -> torch.Tensor:
    y_Tk = q_TNL.new_empty(index_Tk.shape, dtype=torch.float32)
    if y_Tk.numel():
        launch = Launch(q_TNL, index_Tk, q_TNL.shape[-1], 1)
        with torch.cuda.device_of(q_TNL):
            head_probabilities_kernel[(launch.T * launch.KT,)](
                q_TNL.contiguous(), some_keys(kv_SL), index_Tk.contiguous(), lse_TN.contiguous(), y_Tk, scale,
                **launch.scores, **PROBABILITIES,
            )  # fmt: skip
    return y_Tk


@_head_probabilities.register_fake
def _(q_TNL, kv_SL, index_Tk, lse_TN, scale):
    return q_TNL.new_empty(index_Tk.shape, dtype=torch.float32)


@torch.no_grad()
def head_probabilities(
    q_TNL: torch.Tensor, kv_SL: torch.Tensor, index_Tk: torch.Tensor, lse_TN: torch.Tensor, scale: float
) -> torch.Tensor:
    """Sums over heads of the attention probabilities of the selected keys: fp32 [T, k], 0 where there is no key.

    Arguments as for `sparse_attention`, whose second result is lse_TN; with a sink the probabilities of a head sum to
    less than 1. Carries no gradient. ValueError names the argument that does not fit.
    """
    check_selection(q_TNL, kv_SL, index_Tk)
    check_lse(lse_TN, *q_TNL.shape[:2], q_TNL.device)
    return _head_probabilities(q_TNL, kv_SL, index_Tk, lse_TN, scale)
