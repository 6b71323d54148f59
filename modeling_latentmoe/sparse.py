"""Torch definitions of gated DSA: choose keys, attend to them, and what the indexer learns from (DeepSeek-V3.2 report).

Everything is flat (documents.py): T queries are the real tokens of a batch, S keys those of the cache and of the batch,
and query t sees the keys first_T[t] <= s < end_T[t], which may be none. Lists of keys, index_Tk, are int32, ascending,
with -1 behind the last one. Queries are taken in blocks, in forward and again in backward, so that memory grows with T
and never with T x S. `ops.py` puts kernels in front of these functions.

Legend: T queries, t queries of a block, S keys, s keys that a block sees, k listed keys, I index heads, K index width,
        N heads, L width of a latent, V width of its part that is the value, G pools of P keys, g pools that a block
        sees.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# What the largest temporary of a block of queries may take.
BLOCK_BYTES = 64 * 2**20


class Teacher(NamedTuple):
    """The attention that an indexer serves: absorbed queries, latents, scale and sinks (None: without)."""

    q_TNL: torch.Tensor
    kv_SL: torch.Tensor
    scale: float
    sink_N: torch.Tensor | None = None


class Student(NamedTuple):
    """What an indexer scores with, its gradients attached: queries, keys (of tokens or pools), weights of its heads."""

    q_TIK: torch.Tensor
    k_GK: torch.Tensor
    weight_TI: torch.Tensor


class Pools(NamedTuple):
    """Runs of `size` keys that are chosen together: where each starts in the S keys, and which ones a query sees,
    first_T[t] <= g < end_T[t]."""

    size: int
    start_G: torch.Tensor
    first_T: torch.Tensor
    end_T: torch.Tensor

    def members(self, pools: torch.Tensor) -> torch.Tensor:
        """Positions of the keys of pools [...]: [..., P]."""
        return self.start_G[pools].unsqueeze(-1) + torch.arange(self.size, device=pools.device)


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def query_blocks(T: int, row_numbers: int) -> Iterator[slice]:
    """Blocks of queries, each of which needs a temporary of `row_numbers` numbers."""
    rows = max(1, BLOCK_BYTES // (8 * max(1, row_numbers)))
    # One block, though empty, where there is no query.
    return (slice(start, min(start + rows, T)) for start in range(0, max(T, 1), rows))


def _recomputed(function: Callable, *args):
    """The result of one block, whose temporaries are made again in backward."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def _seen(first_t: torch.Tensor, end_t: torch.Tensor) -> slice:
    """The keys that any query of a block sees."""
    some = first_t < end_t
    if not bool(some.any()):
        return slice(0, 0)
    return slice(int(first_t[some].min()), int(end_t[some].max()))


def _visible(first_t: torch.Tensor, end_t: torch.Tensor, keys: slice) -> torch.Tensor:
    """bool [t, s]"""
    place_s = torch.arange(keys.start, keys.stop, device=first_t.device)
    return (place_s >= first_t[:, None]) & (place_s < end_t[:, None])


def index_scores(q_TIK: torch.Tensor, k_SK: torch.Tensor, weight_TI: torch.Tensor, relu: bool = True) -> torch.Tensor:
    """Lightning-indexer scores [T, S] in fp32: sum over index heads of weight * relu(K ** -0.5 q . k); axes in front
    are those of a batch."""
    dots = torch.einsum("...tik,...sk->...tis", wide(q_TIK), wide(k_SK)) * q_TIK.shape[-1] ** -0.5
    return torch.einsum("...tis,...ti->...ts", F.relu(dots) if relu else dots, wide(weight_TI))


@torch.no_grad()
def best_keys(score_TS: torch.Tensor, visible_TS: torch.Tensor, k: int) -> torch.Tensor:
    """The k best visible keys of every query, ascending; -1 where fewer are visible. int64 [T, min(k, S)].

    Of equal scores (ReLU makes many zeros) the earlier key wins, so that the choice does not depend on how the
    sequence was cut into calls.
    """
    S = score_TS.shape[-1]
    k = min(k, S)
    score = score_TS.masked_fill(~visible_TS, -torch.inf)
    threshold = score.topk(k, dim=-1).values[..., -1:]
    above = score > threshold
    tied = (score == threshold) & visible_TS
    chosen = above | (tied & (tied.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
    # The largest of S - position are the earliest chosen positions, in ascending order.
    place = S - torch.arange(S, device=score.device)
    first = torch.where(chosen, place, 0).topk(k, dim=-1).values
    return torch.where(first > 0, S - first, -1)


@torch.no_grad()
def index_topk(
    q_TIK: torch.Tensor,
    k_SK: torch.Tensor,
    weight_TI: torch.Tensor,
    first_T: torch.Tensor,
    end_T: torch.Tensor,
    k: int,
    relu: bool = True,
) -> torch.Tensor:
    """`best_keys` by `index_scores`, int32 [T, k]."""
    T, heads, _ = q_TIK.shape
    index_Tk = torch.full((T, k), -1, dtype=torch.int32, device=q_TIK.device)
    for rows in query_blocks(T, (heads + 4) * len(k_SK)):
        keys = _seen(first_T[rows], end_T[rows])
        if keys.start < keys.stop:
            score_ts = index_scores(q_TIK[rows], k_SK[keys], weight_TI[rows], relu)
            best = best_keys(score_ts, _visible(first_T[rows], end_T[rows], keys), k)
            index_Tk[rows, : best.shape[1]] = torch.where(best < 0, -1, best + keys.start).int()
    return index_Tk


def sparse_attention(
    q_TNL: torch.Tensor,
    kv_SL: torch.Tensor,
    index_Tk: torch.Tensor,
    scale: float,
    value_width: int,
    sink_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of every query to the keys listed for it, in fp32, rounded once: [T, N, V].

    A key is all of a latent, its value the first V = value_width numbers. sink_N: one more logit per head, not scaled,
    whose probability is dropped. Also returns the log-sum-exp of the logits, the sink included, [T, N] in fp32: -inf
    for a query without keys and sink, whose output is zero.
    """
    T, N, L = q_TNL.shape
    # Once: gradients of all blocks are then added in fp32.
    kv_SL = wide(kv_SL)
    parts = [
        _recomputed(_attend, q_TNL[rows], kv_SL, index_Tk[rows], scale, value_width, sink_N)
        for rows in query_blocks(T, index_Tk.shape[1] * (L + N))
    ]
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out.to(q_TNL.dtype), lse


def _attend(q_tNL, kv_SL, index_tk, scale, value_width, sink_N):
    kv_tkL = kv_SL[index_tk.clamp(min=0)]
    listed_t1k = (index_tk >= 0).unsqueeze(1)
    score_tNk = torch.einsum("tnl,tkl->tnk", wide(q_tNL), kv_tkL) * scale
    lse_tN = _log_sum(score_tNk, listed_t1k, sink_N)
    out_tNV = torch.einsum("tnk,tkv->tnv", _probabilities(score_tNk, listed_t1k, lse_tN), kv_tkL[..., :value_width])
    return out_tNV, lse_tN


def _log_sum(score_tNS: torch.Tensor, visible_t1S: torch.Tensor, sink_N: torch.Tensor | None) -> torch.Tensor:
    """Log-sum-exp [t, N] of the visible scores and the sink."""
    score = score_tNS.masked_fill(~visible_t1S, -torch.inf)
    if sink_N is not None:
        sink_tN1 = wide(sink_N).to(score.dtype)[None, :, None].expand(*score.shape[:2], 1)
        return torch.cat([score, sink_tN1], dim=-1).logsumexp(-1)
    some_t11 = visible_t1S.any(-1, keepdim=True)
    # Nothing but -inf has no gradient.
    lse = score.masked_fill(~some_t11, 0).logsumexp(-1)
    return lse.masked_fill(~some_t11.squeeze(-1), -torch.inf)


def _probabilities(score_tNS: torch.Tensor, visible_t1S: torch.Tensor, lse_tN: torch.Tensor) -> torch.Tensor:
    lse_tN1 = lse_tN.masked_fill(lse_tN == -torch.inf, 0).unsqueeze(-1)
    return (score_tNS - lse_tN1).masked_fill(~visible_t1S, -torch.inf).exp()


@torch.no_grad()
def head_probabilities(
    q_TNL: torch.Tensor, kv_SL: torch.Tensor, index_Tk: torch.Tensor, lse_TN: torch.Tensor, scale: float
) -> torch.Tensor:
    """Sum over heads of the probabilities of the listed keys, fp32 [T, k]; lse_TN from `sparse_attention`."""
    T, N, L = q_TNL.shape
    parts = []
    for rows in query_blocks(T, index_Tk.shape[1] * (L + N)):
        kv_tkL = wide(kv_SL[index_Tk[rows].clamp(min=0)])
        score_tNk = torch.einsum("tnl,tkl->tnk", wide(q_TNL[rows]), kv_tkL) * scale
        parts.append(_probabilities(score_tNk, (index_Tk[rows] >= 0).unsqueeze(1), lse_TN[rows]).sum(1))
    return torch.cat(parts)


def indexer_loss(
    q_TIK: torch.Tensor,
    k_SK: torch.Tensor,
    weight_TI: torch.Tensor,
    index_Tk: torch.Tensor,
    target_Tk: torch.Tensor,
    relu: bool = True,
) -> torch.Tensor:
    """KL(p || softmax of the scores of the listed keys) of every query, fp32 [T].

    p is the target divided by its sum, and has no gradient; a query without keys, or whose target is zero, gives 0.
    """
    T, heads, width = q_TIK.shape
    k_SK = wide(k_SK)
    parts = [
        _recomputed(_listed_loss, q_TIK[rows], k_SK, weight_TI[rows], index_Tk[rows], target_Tk[rows].detach(), relu)
        for rows in query_blocks(T, index_Tk.shape[1] * (heads + width))
    ]
    return torch.cat(parts)


def _listed_loss(q_tIK, k_SK, weight_tI, index_tk, target_tk, relu):
    dots_tIk = torch.einsum("tic,tkc->tik", wide(q_tIK), k_SK[index_tk.clamp(min=0)]) * q_tIK.shape[-1] ** -0.5
    score_tk = torch.einsum("tik,ti->tk", F.relu(dots_tIk) if relu else dots_tIk, wide(weight_tI))
    return _divergence(target_tk, score_tk, index_tk >= 0)


def _divergence(target_tS: torch.Tensor, score_tS: torch.Tensor, visible_tS: torch.Tensor) -> torch.Tensor:
    """KL(visible target / its sum || softmax of the visible scores), [t]."""
    # A finite number, and not -inf: a query without keys has a gradient too, zero.
    lowest = torch.finfo(score_tS.dtype).min
    student = score_tS.masked_fill(~visible_tS, lowest).log_softmax(-1)
    # Of a pool that a query does not choose from, it may see some keys.
    target_tS = target_tS.masked_fill(~visible_tS, 0)
    teacher = target_tS / target_tS.sum(-1, keepdim=True).clamp(min=torch.finfo(target_tS.dtype).tiny)
    return (torch.xlogy(teacher, teacher) - teacher * student.masked_fill(~visible_tS, 0)).sum(-1)


def dense_probabilities(
    q_tNL: torch.Tensor,
    kv_SL: torch.Tensor,
    first_t: torch.Tensor,
    end_t: torch.Tensor,
    scale: float,
    sink_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, slice]:
    """Sum over heads of the probabilities of all visible keys [t, s], for a block of queries; and which they are."""
    keys = _seen(first_t, end_t)
    visible_t1s = _visible(first_t, end_t, keys).unsqueeze(1)
    score_tNs = torch.einsum("tnl,sl->tns", wide(q_tNL), wide(kv_SL[keys])) * scale
    return _probabilities(score_tNs, visible_t1s, _log_sum(score_tNs, visible_t1s, sink_N)).sum(1), keys


def dense_indexer_loss(
    teacher: Teacher,
    student: Student,
    first_T: torch.Tensor,
    end_T: torch.Tensor,
    pools: Pools | None = None,
    relu: bool = True,
) -> torch.Tensor:
    """KL(p || softmax of the scores) over all visible keys of every query, fp32 [T]; p and what it means as in
    `indexer_loss`. With pools, p is the share that a pool's keys have together."""
    q_TNL, kv_SL, scale, sink_N = teacher
    T, row = len(q_TNL), len(kv_SL) * (q_TNL.shape[1] + student.q_TIK.shape[1] + 4)
    student = student._replace(k_GK=wide(student.k_GK))
    first_G, end_G = (first_T, end_T) if pools is None else (pools.first_T, pools.end_T)

    def loss(q_tIK, k_GK, weight_tI, rows):
        with torch.no_grad():
            target, keys = dense_probabilities(q_TNL[rows], kv_SL, first_T[rows], end_T[rows], scale, sink_N)
            seen = _seen(first_G[rows], end_G[rows])
            if pools is not None:
                members_gP = pools.members(torch.arange(seen.start, seen.stop, device=target.device))
                target = target[:, members_gP - keys.start].sum(-1)
        score = index_scores(q_tIK, k_GK[seen], weight_tI, relu)
        return _divergence(target, score, _visible(first_G[rows], end_G[rows], seen))

    blocks = query_blocks(T, row)
    q_TIK, k_GK, weight_TI = student
    return torch.cat([_recomputed(loss, q_TIK[rows], k_GK, weight_TI[rows], rows) for rows in blocks])


def pool_keys(k_SK: torch.Tensor, logit_SK: torch.Tensor, place_PK: torch.Tensor, pools: Pools) -> torch.Tensor:
    """One key for every pool, [G, K]: channel by channel a mixture of its keys by softmax of logit + place, in fp32."""
    members_GP = pools.members(torch.arange(len(pools.start_G), device=k_SK.device))
    share_GPK = torch.softmax(wide(logit_SK[members_GP]) + wide(place_PK), dim=1)
    return (share_GPK * wide(k_SK[members_GP])).sum(1).to(k_SK.dtype)


def keys_of_pools(chosen_Tk: torch.Tensor, pools: Pools) -> torch.Tensor:
    """The keys of the listed pools, int32 [T, k * P], -1 where a pool is."""
    keys_TkP = pools.members(chosen_Tk.clamp(min=0).long())
    return keys_TkP.masked_fill(chosen_Tk.unsqueeze(-1) < 0, -1).flatten(1).int()


def with_tail(index_Tk: torch.Tensor, pools: Pools, first_T: torch.Tensor, end_T: torch.Tensor) -> torch.Tensor:
    """The listed keys and those behind the last whole pool that a query sees, at most P - 1; in the order of lists."""
    tail_T = first_T + (pools.end_T - pools.first_T) * pools.size
    tail_TP = tail_T.unsqueeze(1) + torch.arange(pools.size - 1, dtype=torch.int32, device=index_Tk.device)
    tail_TP = torch.where(tail_TP < end_T.unsqueeze(1), tail_TP, -1)
    last = torch.iinfo(torch.int32).max
    index = torch.cat([index_Tk, tail_TP], dim=1)
    index = torch.where(index < 0, last, index).sort(dim=1).values
    return torch.where(index == last, -1, index)
