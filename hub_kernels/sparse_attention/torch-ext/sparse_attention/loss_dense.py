"""The indexer's loss over all visible keys, for the time before keys are selected: some queries at a time.

Legend: T queries, S keys, I index heads, K width of an index head; R queries at a time.
"""

from collections.abc import Callable, Iterator

import torch

from .index import check_range
from .loss import _indexer_loss, _indexer_loss_bwd, check_loss

# Bytes of the positions of the keys of the queries at a time; their target takes as many.
INDEX_BYTES = 64 * 2**20

Probabilities = Callable[[slice, torch.Tensor], torch.Tensor]


def _blocks(first_T: torch.Tensor, end_T: torch.Tensor, keys: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Queries at a time, and the positions of all keys that they see, -1 behind the last: int32 [R, S]."""
    rows = max(1, INDEX_BYTES // (4 * keys))
    place_S = torch.arange(keys, dtype=torch.int32, device=first_T.device)
    for start in range(0, len(first_T), rows):
        block = slice(start, min(start + rows, len(first_T)))
        s_RS = first_T[block].unsqueeze(1) + place_S
        yield block, torch.where(s_RS < end_T[block].unsqueeze(1), s_RS, -1)


class _DenseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TIK, k_SK, weight_TI, first_T, end_T, probabilities):
        results = []
        for block, index_RS in _blocks(first_T, end_T, len(k_SK)):
            target_RS = probabilities(block, index_RS)
            check_loss(q_TIK[block], k_SK, weight_TI[block], index_RS, target_RS)
            results.append(_indexer_loss(q_TIK[block], k_SK, weight_TI[block], index_RS, target_RS))
        loss_T, lse_T, total_T = (torch.cat(x) for x in zip(*results, strict=True))
        ctx.probabilities = probabilities
        ctx.save_for_backward(q_TIK, k_SK, weight_TI, first_T, end_T, lse_T, total_T)
        return loss_T

    @staticmethod
    def backward(ctx, dloss_T):
        q_TIK, k_SK, weight_TI, first_T, end_T, lse_T, total_T = ctx.saved_tensors
        dq_TIK, dweight_TI = torch.empty_like(q_TIK), torch.empty_like(weight_TI)
        dk_SK = torch.zeros_like(k_SK, dtype=torch.float32)
        for block, index_RS in _blocks(first_T, end_T, len(k_SK)):
            target_RS = ctx.probabilities(block, index_RS)
            rows = (x[block] for x in (dloss_T, q_TIK, weight_TI, lse_T, total_T))
            dloss_R, q_RIK, weight_RI, lse_R, total_R = rows
            dq_TIK[block], dk, dweight_TI[block] = _indexer_loss_bwd(
                dloss_R, q_RIK, k_SK, weight_RI, index_RS, target_RS, lse_R, total_R
            )
            dk_SK += dk
        return dq_TIK, dk_SK.to(k_SK.dtype), dweight_TI, None, None, None


def dense_indexer_loss(
    q_TIK: torch.Tensor,
    k_SK: torch.Tensor,
    weight_TI: torch.Tensor,
    first_T: torch.Tensor,
    end_T: torch.Tensor,
    probabilities: Probabilities,
) -> torch.Tensor:
    """`indexer_loss` over all visible keys, fp32 [T], in memory linear in T and S.

    q [T, I, K], k [S, K], weight [T, I], first and end int32 [T] as `index_topk` takes them. probabilities(queries,
    index) gives the target fp32 [R, S] of some of the queries, a slice, at the keys that index int32 [R, S] lists (-1:
    none); it is asked in forward and again in backward. There is at least one query and one key.
    """
    check_range("first_T", first_T, q_TIK)
    check_range("end_T", end_T, q_TIK)
    return _DenseLoss.apply(q_TIK, k_SK, weight_TI, first_T, end_T, probabilities)
