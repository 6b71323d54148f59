"""What the routing kernels compute, as plain torch: differentiable, and exact in float64.

Legend: T tokens, E experts, S chosen experts (slots) per token, R = T * S rows.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Rows(NamedTuple):
    """Slots sorted by expert; those of an expert are in the order of their tokens.

    A slot's number is token * S + its place among the token's choices. Slots without a row (of tokens that do not
    count, of experts that are not held here, beyond the capacity) leave the end of `slot_R` empty: -1.
    """

    load_E: torch.Tensor  # int64: tokens that chose each expert, those beyond the capacity too
    offset: torch.Tensor  # int32 [E + 1]: expert e has the rows offset[e] to offset[e + 1]
    slot_R: torch.Tensor  # int32: the slot of each row
    row_TS: torch.Tensor  # int32: the row of each slot, or -1
    dropped: torch.Tensor  # int64 scalar: slots beyond the capacity


class Routing(NamedTuple):
    """Chosen experts, best first; ids are -1 and weights 0 for tokens that do not count."""

    ids_TS: torch.Tensor  # int64
    weights_TS: torch.Tensor  # in the dtype of the logits
    cutoff_T: torch.Tensor  # the largest biased score that was not chosen, -inf if there is none
    rows: Rows


def sort_slots_reference(ids_TS: torch.Tensor, experts: int, capacity_factor: float | None = None) -> Rows:
    """Sort slots by expert, see `Rows`; ids outside of 0 to experts - 1 have no row.

    With a capacity factor, an expert has at most ceil(factor * slots with an expert / experts) rows, of the first
    tokens that chose it.
    """
    id_R = torch.where((ids_TS >= 0) & (ids_TS < experts), ids_TS, experts).flatten().long()
    load_E = torch.bincount(id_R, minlength=experts + 1)[:experts]
    total = int(load_E.sum())
    kept_E = load_E
    if capacity_factor is not None:
        kept_E = load_E.clamp(max=math.ceil(capacity_factor * total / experts))
    sorted_R = id_R.argsort(stable=True)[:total]
    first_E = load_E.cumsum(0) - load_E
    place_R = torch.arange(total, device=id_R.device) - first_E[id_R[sorted_R]]
    sorted_R = sorted_R[place_R < kept_E[id_R[sorted_R]]]
    slot_R, row_R = torch.full_like(id_R, -1, dtype=torch.int32), torch.full_like(id_R, -1, dtype=torch.int32)
    slot_R[: len(sorted_R)] = sorted_R.int()
    row_R[sorted_R] = torch.arange(len(sorted_R), dtype=torch.int32, device=id_R.device)
    offset = F.pad(kept_E.cumsum(0), (1, 0)).int()
    return Rows(load_E, offset, slot_R, row_R.view(ids_TS.shape), load_E.sum() - kept_E.sum())


def route_reference(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor,
    top_k: int,
    *,
    mask_T: torch.Tensor | None = None,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    capacity_factor: float | None = None,
) -> Routing:
    """Choose the experts with the largest sigmoid(logits) + bias; of equal ones the first.

    Weights are the scores without the bias, divided by their sum where `renormalize`, times `scaling_factor`. Tokens
    where bool mask_T is False do not count.
    """
    score_TE = logits_TE.sigmoid()
    choice_TE = score_TE.detach() + bias_E.detach()
    value_TE, id_TE = choice_TE.sort(dim=-1, descending=True, stable=True)
    ids_TS = id_TE[:, :top_k]
    weights_TS = score_TE.gather(-1, ids_TS)
    if renormalize:
        weights_TS = weights_TS / (weights_TS.sum(-1, keepdim=True) + 1e-20)
    weights_TS = weights_TS * scaling_factor
    cutoff_T = F.pad(value_TE, (0, 1), value=-torch.inf)[:, top_k]
    if mask_T is not None:
        out_T1 = ~mask_T.unsqueeze(1)
        ids_TS, weights_TS = ids_TS.masked_fill(out_T1, -1), weights_TS.masked_fill(out_T1, 0)
        cutoff_T = cutoff_T.masked_fill(~mask_T, -torch.inf)
    rows = sort_slots_reference(ids_TS, logits_TE.shape[1], capacity_factor)
    return Routing(ids_TS, weights_TS, cutoff_T, rows)


def score_shares_reference(logits_TE: torch.Tensor, mask_T: torch.Tensor | None = None) -> torch.Tensor:
    """Sum over the tokens that count of their scores divided by the sum of these over all experts, [E]."""
    # From logarithms: all scores of a token may be too small for fp32.
    share_TE = F.logsigmoid(logits_TE).softmax(-1)
    if mask_T is not None:
        share_TE = share_TE.masked_fill(~mask_T.unsqueeze(1), 0)
    return share_TE.sum(0)


def count_biases_reference(
    counts_EH: torch.Tensor, logits_TE: torch.Tensor, cutoff_T: torch.Tensor, low: torch.Tensor, width: torch.Tensor
) -> None:
    """Add to int32 counts_EH, for every token and expert, the bin of the bias at which the token would choose it.

    That bias is cutoff - sigmoid(logit), its bin floor((bias - low) / width), at least 0 and at most H - 1; tokens with
    a cutoff of -inf do not count.
    """
    counts_T = cutoff_T > -torch.inf
    need_TE = cutoff_T[counts_T].unsqueeze(1) - logits_TE[counts_T].sigmoid()
    bin_TE = ((need_TE - low) / width).long().clamp(0, counts_EH.shape[1] - 1)
    counts_EH.scatter_add_(1, bin_TE.T, counts_EH.new_ones(()).expand(bin_TE.T.shape))
