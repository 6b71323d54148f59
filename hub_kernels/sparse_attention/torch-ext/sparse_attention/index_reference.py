"""What the kernels of the indexer compute, as plain torch, exact in float64.

Legend: T queries, S keys, I index heads, K width of an index head, k selected keys.
"""

import torch


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def index_scores_reference(q_TIK: torch.Tensor, k_SK: torch.Tensor, weight_TI: torch.Tensor) -> torch.Tensor:
    """[T, S] in fp32 or wider: sum over index heads of weight * relu(K ** -0.5 * q . k)."""
    dot_TIS = torch.einsum("tik,sk->tis", _wide(q_TIK), _wide(k_SK)) * q_TIK.shape[-1] ** -0.5
    return torch.einsum("tis,ti->ts", dot_TIS.relu(), _wide(weight_TI))


def visible_keys(first_T: torch.Tensor, end_T: torch.Tensor, keys: int) -> torch.Tensor:
    """bool [T, S]: key s is visible where first <= s < end."""
    s_S = torch.arange(keys, device=first_T.device)
    return (s_S >= first_T.unsqueeze(1)) & (s_S < end_T.unsqueeze(1))


def select_reference(score_TS: torch.Tensor, first_T: torch.Tensor, end_T: torch.Tensor, k: int) -> torch.Tensor:
    """The k best visible keys of every score row, see `index_topk_reference`."""
    visible_TS = visible_keys(first_T, end_T, score_TS.shape[1])
    # A stable sort keeps the earlier of equal scores before the later.
    order_TS = score_TS.masked_fill(~visible_TS, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    chosen_TS = torch.zeros_like(visible_TS).scatter_(1, order_TS[:, :k], True) & visible_TS
    place_TS = torch.where(chosen_TS, chosen_TS.cumsum(1) - 1, k)
    s_TS = torch.arange(score_TS.shape[1], dtype=torch.int32, device=score_TS.device).expand_as(score_TS)
    index_TK = torch.full((len(score_TS), k + 1), -1, dtype=torch.int32, device=score_TS.device)
    return index_TK.scatter_(1, place_TS, s_TS)[:, :k].contiguous()


@torch.no_grad()
def index_topk_reference(
    q_TIK: torch.Tensor,
    k_SK: torch.Tensor,
    weight_TI: torch.Tensor,
    first_T: torch.Tensor,
    end_T: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """int32 [T, k]: the k visible keys of every query with the largest scores, ascending, then -1.

    Of equal scores the earlier key wins.
    """
    return select_reference(index_scores_reference(q_TIK, k_SK, weight_TI), first_T, end_T, k)
