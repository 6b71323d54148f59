"""The indexer's loss as plain torch, exact in float64.

Legend: T queries, S keys, I index heads, K width of an index head, k selected keys of a query.
"""

import torch

from .index_reference import _wide


def indexer_loss_reference(
    q_TIK: torch.Tensor,
    k_SK: torch.Tensor,
    weight_TI: torch.Tensor,
    index_Tk: torch.Tensor,
    target_Tk: torch.Tensor,
) -> torch.Tensor:
    """[T] in fp32 or wider: KL(p || softmax of the scores) over a query's selected keys, see `indexer_loss`."""
    selected_Tk = index_Tk >= 0
    key_TkK = _wide(k_SK)[torch.where(selected_Tk, index_Tk, 0).long()]
    dot_TIk = torch.einsum("tik,tsk->tis", _wide(q_TIK), key_TkK) * q_TIK.shape[-1] ** -0.5
    score_Tk = torch.einsum("tis,ti->ts", dot_TIk.relu(), _wide(weight_TI))
    # Finite also where nothing is selected, so that gradients are zeros there.
    log_q_Tk = score_Tk.masked_fill(~selected_Tk, -1e30).log_softmax(1)
    target_Tk = _wide(target_Tk.detach()).masked_fill(~selected_Tk, 0).to(score_Tk.dtype)
    total_T1 = target_Tk.sum(1, keepdim=True)
    p_Tk = target_Tk / torch.where(total_T1 > 0, total_T1, 1)
    return (torch.xlogy(p_Tk, p_Tk) - p_Tk * log_q_Tk).sum(1)
