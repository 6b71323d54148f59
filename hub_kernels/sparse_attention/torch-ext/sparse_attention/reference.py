"""The definitions of attention in plain torch, in any floating dtype; softmax and sums are fp32, or fp64 for fp64.

Legend: T queries, N heads, S keys, L columns of a key, V of them values, k selected keys per query.
"""

import torch


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _selected_mask(index_Tk: torch.Tensor, S: int) -> torch.Tensor:
    """bool [T, S]: the keys in the rows of index; -1 is none."""
    mask = torch.zeros(len(index_Tk), S + 1, dtype=torch.bool, device=index_Tk.device)
    return mask.scatter_(1, torch.where(index_Tk < 0, S, index_Tk).long(), True)[:, :S]


def _selected_scores(q_TNL, kv_SL, index_Tk, scale: float) -> torch.Tensor:
    """Scores [T, N, S] of all keys, minus infinity where not selected."""
    score_TNS = _wide(torch.einsum("tnl,sl->tns", q_TNL, kv_SL)) * scale
    return score_TNS.masked_fill(~_selected_mask(index_Tk, len(kv_SL)).unsqueeze(1), -torch.inf)


def sparse_attention_reference(
    q_TNL: torch.Tensor,
    kv_SL: torch.Tensor,
    index_Tk: torch.Tensor,
    scale: float,
    value_width: int = 512,
    sink_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, N, V], lse [T, N]) by a mask over all keys; probabilities are rounded to the dtype of q."""
    score_TNS = _selected_scores(q_TNL, kv_SL, index_Tk, scale)
    lse_TN = score_TNS.logsumexp(-1)
    if sink_N is not None:
        lse_TN = torch.logaddexp(lse_TN, sink_N.to(lse_TN.dtype))
    # A row without keys has nothing to be relative to.
    base_TN = torch.where(lse_TN == -torch.inf, 0.0, lse_TN)
    p_TNS = torch.exp(score_TNS - base_TN.unsqueeze(-1)).to(q_TNL.dtype)
    return torch.einsum("tns,sv->tnv", p_TNS, kv_SL[:, :value_width]), lse_TN


def head_probabilities_reference(
    q_TNL: torch.Tensor, kv_SL: torch.Tensor, index_Tk: torch.Tensor, lse_TN: torch.Tensor, scale: float
) -> torch.Tensor:
    """[T, k]: probabilities of the selected keys, summed over heads; 0 where the index is -1."""
    score_TNS = _selected_scores(q_TNL, kv_SL, index_Tk, scale)
    p_TS = torch.exp(score_TNS - lse_TN.unsqueeze(-1)).nan_to_num(0.0).sum(1)
    return p_TS.gather(1, index_Tk.clamp_min(0).long()).masked_fill(index_Tk < 0, 0.0)
