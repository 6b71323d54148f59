"""Sparse attention and its indexer on Ascend (npu.py): flat queries and keys as sparse.py has them, by torch-npu.

Its operators take documents as batches of layout TND: prefix sums of their queries and keys, key positions counted from
the document's first key, and a causal mask aligned to the last query and the last key. Main attention is absorbed:
512 latent numbers and 64 more, which the operators call rotary and which here are what the model put there.

What no operator takes at once is taken in parts. Heads come in powers of two, so 96 are 64 and 32: outputs lie side by
side, and gradients of the shared keys add up. The loss of an indexer has the gradient softmax(score) - p, linear in the
teacher p, which is a mean over heads: gradients of the parts are averaged by their numbers of heads. The loss itself is
not linear; its value is taken from the torch definition. Losses take 8192 queries at a time.

Legend: T queries, t queries of a block, S keys, G keys or pools of them, k listed keys, I index heads, K index width,
        N heads, n heads of a part, L width of a latent, E its extra numbers, H head width and V value width of dense
        attention.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from .npu import causal_statistics, dtype_problem, is_950, serves
from .sparse import Student, Teacher, query_blocks, wide

LATENT, EXTRA = 512, 64
INDEX_WIDTH, INDEX_HEADS, INDEX_HEADS_950 = 128, 64, (8, 16, 24, 32, 64)
INDEX_KEYS, MORE_INDEX_KEYS = 2048, (3072, 4096, 5120, 6144, 7168, 8192)
ATTENTION_HEADS = (128, 64, 32, 16, 8, 4, 2, 1)
# Losses: heads of attention, heads of an indexer, listed keys, queries and keys of a call, documents of a call.
LOSS_HEADS, LOSS_INDEX_HEADS, LOSS_INDEX_HEADS_950 = (128, 64, 32), (8, 16, 32, 64), (32, 64)
LOSS_KEYS = (1024, INDEX_KEYS, *MORE_INDEX_KEYS)
LOSS_QUERIES, LOSS_CONTEXT, LOSS_DOCUMENTS = 8192, 131_072, 128
DENSE_WIDTH = 128

Ranges = tuple[torch.Tensor, torch.Tensor]


class Run(NamedTuple):
    """The queries start .. stop - 1 of a document: the last of them sees its keys first .. end - 1, each earlier one a
    key less."""

    start: int
    stop: int
    first: int
    end: int


class Piece(NamedTuple):
    """Queries and keys of one call, and the ends of its documents among them."""

    rows: slice
    keys: slice
    query_ends: list[int]
    key_ends: list[int]


# Every layer of a forward asks for the same documents, and to ask is to wait for the device.
_RUNS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def runs(ranges: Ranges) -> list[Run] | None:
    """The documents of all queries in order; None where what queries see does not grow by a key each, as with pools.

    ranges: first_T and end_T, the keys first <= s < end that a query sees (documents.py).
    """
    if ranges[0] not in _RUNS:
        _RUNS[ranges[0]] = _runs(*torch.stack(ranges).long().cpu())
    return _RUNS[ranges[0]]


def _runs(first_T: torch.Tensor, end_T: torch.Tensor) -> list[Run] | None:
    T = len(first_T)
    borders = [0, *((first_T.diff() != 0).nonzero().flatten() + 1).tolist(), T]
    step_T = end_T.diff()
    inside_T = first_T.diff() == 0
    if bool((step_T[inside_T] != 1).any()) or bool((end_T <= first_T).any()):
        return None
    first, end = first_T.tolist(), end_T.tolist()
    return [Run(start, stop, first[start], end[stop - 1]) for start, stop in pairwise(borders)]


def pieces(ranges: Ranges, queries: int | None = None, documents: int | None = None) -> Iterator[Piece]:
    """The calls that together take all queries, each at most so many of them and so many documents."""
    todo = list(reversed(runs(ranges)))
    while todo:
        start, low = todo[-1].start, todo[-1].first
        query_ends, key_ends = [0], [0]
        while todo and (queries is None or query_ends[-1] < queries):
            if documents is not None and len(query_ends) + 1 > documents:
                break
            run = todo.pop()
            if run.first - low > key_ends[-1]:
                # Remembered keys of a document without queries.
                query_ends.append(query_ends[-1])
                key_ends.append(run.first - low)
            room = run.stop - run.start if queries is None else queries - query_ends[-1]
            if run.stop - run.start > room:
                todo.append(run._replace(start=run.start + room))
                run = run._replace(stop=run.start + room, end=run.end - (run.stop - run.start - room))
            query_ends.append(run.stop - start)
            key_ends.append(run.end - low)
        rows, keys = slice(start, start + query_ends[-1]), slice(low, low + key_ends[-1])
        yield Piece(rows, keys, query_ends[1:], key_ends[1:])


def head_parts(heads: int, sizes: tuple[int, ...]) -> list[slice] | None:
    """Heads in parts of these sizes, the largest first; None where some are left."""
    parts, start = [], 0
    for size in sizes:
        while heads - start >= size:
            parts.append(slice(start, start + size))
            start += size
    return parts if start == heads else None


def _attention_parts(heads: int) -> list[slice]:
    sizes = tuple(range(128, 0, -1)) if is_950() else ATTENTION_HEADS
    return head_parts(heads, sizes)


def _ranges_problem(ranges: Ranges | None) -> str | None:
    if ranges is None or runs(ranges) is None:
        return "keys are chosen in pools"
    return None


def _lengths(ends: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _index_weights(weight_TI: torch.Tensor, q_TIK: torch.Tensor) -> torch.Tensor:
    """The operators do not scale q . k, and relu(s x) = s relu(x) for positive s: the scale goes to the weights."""
    weight_TI = weight_TI * q_TIK.shape[-1] ** -0.5
    return (weight_TI.to(q_TIK.dtype) if is_950() else weight_TI.float()).contiguous()


def _local_lists(index_Tk: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """Listed keys counted from the first of their document, int32 [T, 1, k]. A query without keys gets the first ones
    that it sees, and what is computed for it is thrown away."""
    first_T1, end_T1 = (x.unsqueeze(1) for x in ranges)
    place_k = torch.arange(index_Tk.shape[1], dtype=torch.int32, device=index_Tk.device)
    seen_Tk = torch.where(place_k < end_T1 - first_T1, place_k, -1)
    listed_Tk = torch.where(index_Tk >= 0, index_Tk - first_T1, -1)
    return torch.where(index_Tk[:, :1] >= 0, listed_Tk, seen_Tk).int().unsqueeze(1).contiguous()


def _split(x_TNL: torch.Tensor, heads: slice = slice(None)) -> list[torch.Tensor]:
    """The latent and the other numbers of these heads, each on its own."""
    return [part.contiguous() for part in x_TNL[:, heads].split([x_TNL.shape[-1] - EXTRA, EXTRA], dim=-1)]


def _index_problem(q_TIK: torch.Tensor, k_SK: torch.Tensor, k: int, relu: bool, ranges: Ranges | None) -> str | None:
    _, heads, width = q_TIK.shape
    if width != INDEX_WIDTH or heads > INDEX_HEADS or (is_950() and heads not in INDEX_HEADS_950):
        return f"the indexer has {heads} heads of {width}"
    if k > INDEX_KEYS and k not in MORE_INDEX_KEYS:
        return f"the indexer chooses {k} keys"
    if not relu:
        return "the indexer has no ReLU"
    return dtype_problem(q_TIK, k_SK) or _ranges_problem(ranges)


def index_topk(
    q_TIK: torch.Tensor,
    k_SK: torch.Tensor,
    weight_TI: torch.Tensor,
    first_T: torch.Tensor,
    end_T: torch.Tensor,
    k: int,
    relu: bool,
    choice: str,
) -> torch.Tensor | None:
    """`ops.index_topk`. Which of equal scores wins is the operator's choice."""

    def problem() -> str | None:
        return _index_problem(q_TIK, k_SK, k, relu, (first_T, end_T))

    if not serves("index_topk", choice, q_TIK, ("npu_lightning_indexer",), problem):
        return None
    (piece,) = pieces((first_T, end_T))
    local_T1k, _ = torch.ops.npu.npu_lightning_indexer(
        q_TIK.contiguous(),
        k_SK[piece.keys].unsqueeze(1).contiguous(),
        _index_weights(weight_TI, q_TIK),
        actual_seq_lengths_query=_lengths(piece.query_ends, q_TIK.device),
        actual_seq_lengths_key=_lengths(piece.key_ends, q_TIK.device),
        layout_query="TND",
        layout_key="TND",
        sparse_count=k,
        sparse_mode=3,
    )
    first_T1, end_T1 = first_T.unsqueeze(1), end_T.unsqueeze(1)
    # Best first, and what lies behind the last visible key is not said to be -1.
    none = torch.iinfo(torch.int32).max
    place_k = torch.arange(k, dtype=torch.int32, device=q_TIK.device)
    index_Tk = torch.where(place_k < end_T1 - first_T1, local_T1k.squeeze(1) + first_T1, none).sort(dim=1).values
    return torch.where(index_Tk == none, -1, index_Tk).int()


def _latent_problem(q_TNL: torch.Tensor, value_width: int, sink_N: torch.Tensor | None) -> str | None:
    if (q_TNL.shape[-1], value_width) != (LATENT + EXTRA, LATENT):
        return f"heads attend to {q_TNL.shape[-1]} numbers, {value_width} of them values"
    return None if sink_N is None else "heads have sinks, for which there is no gradient"


class SparseAttention(torch.autograd.Function):
    """Output [T, N, 512] and log-sum-exp [T, N] of `sparse.sparse_attention`."""

    @staticmethod
    def forward(
        ctx,
        q_TNL: torch.Tensor,
        kv_SL: torch.Tensor,
        index_Tk: torch.Tensor,
        scale: float,
        first_T: torch.Tensor,
        end_T: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (piece,) = pieces((first_T, end_T))
        listed_T1k = _local_lists(index_Tk, (first_T, end_T))
        latent_S1L, extra_S1E = _split(kv_SL[piece.keys].unsqueeze(1))
        found = []
        for heads in _attention_parts(q_TNL.shape[1]):
            q_TnL, extra_TnE = _split(q_TNL, heads)
            found.append(
                torch.ops.npu.npu_sparse_flash_attention(
                    q_TnL,
                    latent_S1L,
                    latent_S1L,
                    listed_T1k,
                    scale,
                    actual_seq_lengths_query=_lengths(piece.query_ends, q_TNL.device),
                    actual_seq_lengths_kv=_lengths(piece.key_ends, q_TNL.device),
                    query_rope=extra_TnE,
                    key_rope=extra_S1E,
                    layout_query="TND",
                    layout_kv="TND",
                    sparse_mode=3,
                    # keys and values are the same latents
                    attention_mode=2,
                    return_softmax_lse=True,
                )
            )
        outs, largest, totals = zip(*found, strict=True)
        none_T11 = index_Tk[:, :1, None] < 0
        out_TNL = torch.cat(outs, dim=1).masked_fill(none_T11, 0)
        max_1TN, sum_1TN = torch.cat(largest, dim=-1), torch.cat(totals, dim=-1)
        lse_TN = (max_1TN + sum_1TN.log()).squeeze(0).masked_fill(none_T11[..., 0], -torch.inf)
        ctx.save_for_backward(q_TNL, kv_SL, index_Tk, out_TNL, max_1TN, sum_1TN, first_T, end_T)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse_TN)
        return out_TNL, lse_TN

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_TNL: torch.Tensor, _):
        q_TNL, kv_SL, index_Tk, out_TNL, max_1TN, sum_1TN, first_T, end_T = ctx.saved_tensors
        (piece,) = pieces((first_T, end_T))
        listed_T1k = _local_lists(index_Tk, (first_T, end_T))
        latent_S1L, extra_S1E = _split(kv_SL[piece.keys].unsqueeze(1))
        grad_TNL = grad_TNL.masked_fill(index_Tk[:, :1, None] < 0, 0)
        dq_TNL = torch.empty_like(q_TNL)
        dkv_SL = torch.zeros_like(kv_SL, dtype=torch.float32)
        for heads in _attention_parts(q_TNL.shape[1]):
            q_TnL, extra_TnE = _split(q_TNL, heads)
            dq, dk, dv, dq_extra, dk_extra = torch.ops.npu.npu_sparse_flash_attention_grad(
                q_TnL,
                latent_S1L,
                latent_S1L,
                listed_T1k,
                *(x[:, heads].contiguous() for x in (grad_TNL, out_TNL)),
                *(x[..., heads].contiguous() for x in (max_1TN, sum_1TN)),
                ctx.scale,
                1,
                query_rope=extra_TnE,
                key_rope=extra_S1E,
                actual_seq_qlen=_lengths(piece.query_ends, q_TNL.device),
                actual_seq_kvlen=_lengths(piece.key_ends, q_TNL.device),
                layout="TND",
                sparse_mode=3,
                attention_mode=2,
            )
            dq_TNL[:, heads] = torch.cat([dq, dq_extra], dim=-1)
            # Two gradients of the one tensor that was key and value (scripts/check_npu.py tells if a card adds them).
            dkv_SL[piece.keys] += torch.cat([dk.float() + dv.float(), dk_extra.float()], dim=-1).squeeze(1)
        return dq_TNL, dkv_SL.to(kv_SL.dtype), None, None, None, None


def sparse_attention(
    q_TNL: torch.Tensor,
    kv_SL: torch.Tensor,
    index_Tk: torch.Tensor,
    scale: float,
    value_width: int,
    sink_N: torch.Tensor | None,
    ranges: Ranges | None,
    choice: str,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`ops.sparse_attention`."""

    def problem() -> str | None:
        return _latent_problem(q_TNL, value_width, sink_N) or dtype_problem(q_TNL, kv_SL) or _ranges_problem(ranges)

    operators = "npu_sparse_flash_attention", "npu_sparse_flash_attention_grad"
    if not serves("sparse_attention", choice, q_TNL, operators, problem):
        return None
    return SparseAttention.apply(q_TNL, kv_SL, index_Tk, scale, *ranges)


class IndexerLoss(torch.autograd.Function):
    """`sparse.indexer_loss` [T] whose gradients are the operator's: those of a query's listed scores, given them."""

    @staticmethod
    def forward(
        ctx,
        q_TIK: torch.Tensor,
        k_SK: torch.Tensor,
        weight_TI: torch.Tensor,
        index_Tk: torch.Tensor,
        target_Tk: torch.Tensor,
        first_T: torch.Tensor,
        end_T: torch.Tensor,
    ) -> torch.Tensor:
        T, heads, width = q_TIK.shape
        grad_Tk = torch.empty_like(target_Tk)
        loss_T = target_Tk.new_empty(T)
        for rows in query_blocks(T, index_Tk.shape[1] * (heads + width)):
            listed_tk, key_tkK = index_Tk[rows] >= 0, wide(k_SK[index_Tk[rows].clamp(min=0)])
            dots_tIk = torch.einsum("tic,tkc->tik", wide(q_TIK[rows]), key_tkK) * width**-0.5
            score_tk = torch.einsum("tik,ti->tk", F.relu(dots_tIk), wide(weight_TI[rows]))
            student_tk = score_tk.masked_fill(~listed_tk, torch.finfo(score_tk.dtype).min).log_softmax(-1)
            target_tk = target_Tk[rows].masked_fill(~listed_tk, 0)
            teacher_tk = target_tk / target_tk.sum(-1, keepdim=True).clamp(min=torch.finfo(target_tk.dtype).tiny)
            student_tk = student_tk.masked_fill(~listed_tk, 0)
            loss_T[rows] = (torch.xlogy(teacher_tk, teacher_tk) - teacher_tk * student_tk).sum(-1)
            mass_t1 = teacher_tk.sum(-1, keepdim=True)
            grad_Tk[rows] = (mass_t1 * student_tk.exp() - teacher_tk).masked_fill(~listed_tk, 0)
        ctx.save_for_backward(q_TIK, k_SK, weight_TI, index_Tk, grad_Tk, first_T, end_T)
        return loss_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_T: torch.Tensor):
        q_TIK, k_SK, weight_TI, index_Tk, grad_Tk, first_T, end_T = ctx.saved_tensors
        (piece,) = pieces((first_T, end_T))
        dq_TIK, dk_S1K, dweight_TI = torch.ops.npu.npu_lightning_indexer_grad(
            q_TIK.contiguous(),
            k_SK[piece.keys].unsqueeze(1).contiguous(),
            (grad_T.unsqueeze(1) * grad_Tk).to(q_TIK.dtype),
            _local_lists(index_Tk, (first_T, end_T)).squeeze(1),
            _index_weights(weight_TI, q_TIK).to(q_TIK.dtype),
            actual_seq_lengths_query=_lengths(piece.query_ends, q_TIK.device),
            actual_seq_lengths_key=_lengths(piece.key_ends, q_TIK.device),
            layout="TND",
            sparse_mode=3,
        )
        dk_SK = torch.zeros_like(k_SK)
        dk_SK[piece.keys] = dk_S1K.squeeze(1)
        dweight_TI = (dweight_TI.float() * q_TIK.shape[-1] ** -0.5).to(weight_TI.dtype)
        return dq_TIK, dk_SK, dweight_TI, None, None, None, None


def indexer_loss(
    q_TIK: torch.Tensor,
    k_SK: torch.Tensor,
    weight_TI: torch.Tensor,
    index_Tk: torch.Tensor,
    target_Tk: torch.Tensor,
    relu: bool,
    ranges: Ranges | None,
    choice: str,
) -> torch.Tensor | None:
    """`ops.indexer_loss`."""

    def problem() -> str | None:
        if is_950():
            return "Ascend 950 has no gradient of the scores"
        return _index_problem(q_TIK, k_SK, index_Tk.shape[1], relu, ranges)

    if not serves("indexer_loss", choice, q_TIK, ("npu_lightning_indexer_grad",), problem):
        return None
    return IndexerLoss.apply(q_TIK, k_SK, weight_TI, index_Tk, target_Tk, *ranges)


def _student_problem(heads: int, student: Student, relu: bool, ranges: Ranges | None) -> str | None:
    index_heads, width = student.q_TIK.shape[1:]
    if head_parts(heads, LOSS_HEADS) is None:
        return f"{heads} heads of attention are no sum of 32, 64 and 128"
    if width != INDEX_WIDTH or index_heads not in (LOSS_INDEX_HEADS_950 if is_950() else LOSS_INDEX_HEADS):
        return f"the indexer has {index_heads} heads of {width}"
    if not relu:
        return "the indexer has no ReLU"
    if problem := _ranges_problem(ranges):
        return problem
    most = max(run.end - run.first for run in runs(ranges))
    return f"a document has {most} keys" if most > LOSS_CONTEXT else None


class Heads(NamedTuple):
    """Packed queries, keys and values of every head, as dense attention has them."""

    q_TNH: torch.Tensor
    k_SNH: torch.Tensor
    v_SNV: torch.Tensor


class _Gradients:
    """The indexer's gradients, summed over calls: each is that of a share of the teacher."""

    def __init__(self, student: Student):
        self.dq_TIK, self.dk_SK, self.dweight_TI = (torch.zeros_like(x, dtype=torch.float32) for x in student)
        self.loss = self.dq_TIK.new_zeros(())
        self.scale = student.q_TIK.shape[-1] ** -0.5

    def add(self, piece: Piece, share: float, found: tuple[torch.Tensor, ...]) -> None:
        dq, dk, dweight, loss = (x.float() for x in found)
        self.dq_TIK[piece.rows] += share * dq
        self.dk_SK[piece.keys] += share * dk.squeeze(1)
        self.dweight_TI[piece.rows] += share * self.scale * dweight
        self.loss += share * loss.squeeze(0)

    def save(self, ctx, student: Student) -> torch.Tensor:
        found = self.dq_TIK, self.dk_SK, self.dweight_TI
        ctx.save_for_backward(*(x.to(y.dtype) for x, y in zip(found, student, strict=True)))
        return self.loss


class FusedIndexerLoss(torch.autograd.Function):
    """Sum over queries of the loss over listed keys; its gradients are made in forward. With several parts of heads the
    value is an upper bound and the gradients are exact."""

    @staticmethod
    def forward(ctx, q_TIK, k_SK, weight_TI, q_TNL, kv_SL, index_Tk, lse_TN, scale, first_T, end_T) -> torch.Tensor:
        student = Student(q_TIK, k_SK, weight_TI)
        gradients, N = _Gradients(student), q_TNL.shape[1]
        weight, listed_T1k = _index_weights(weight_TI, q_TIK), _local_lists(index_Tk, (first_T, end_T))
        for piece in pieces((first_T, end_T), LOSS_QUERIES, LOSS_DOCUMENTS):
            rows, keys = piece.rows, piece.keys
            latent_S1L, extra_S1E = _split(kv_SL[keys].unsqueeze(1))
            for heads in head_parts(N, LOSS_HEADS):
                q_TnL, extra_TnE = _split(q_TNL[rows], heads)
                lse_1Tn = lse_TN[rows, heads].unsqueeze(0).contiguous()
                found = torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss(
                    q_TnL,
                    latent_S1L,
                    q_TIK[rows].contiguous(),
                    k_SK[keys].unsqueeze(1).contiguous(),
                    weight[rows],
                    listed_T1k[rows],
                    # exp(x - lse) / 1 is the same probability as exp(x - max) / sum
                    lse_1Tn,
                    torch.ones_like(lse_1Tn),
                    scale,
                    query_rope=extra_TnE,
                    key_rope=extra_S1E,
                    actual_seq_qlen=piece.query_ends,
                    actual_seq_klen=piece.key_ends,
                    layout="TND",
                    sparse_mode=3,
                )
                gradients.add(piece, (heads.stop - heads.start) / N, found)
        return gradients.save(ctx, student)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: torch.Tensor):
        return *(grad * x for x in ctx.saved_tensors), *(None,) * 7


class DenseIndexerLoss(torch.autograd.Function):
    """As `FusedIndexerLoss`, over all visible keys."""

    @staticmethod
    def forward(ctx, q_TIK, k_SK, weight_TI, q_TNH, k_SNH, v_SNV, scale, first_T, end_T) -> torch.Tensor:
        student = Student(q_TIK, k_SK, weight_TI)
        gradients, N = _Gradients(student), q_TNH.shape[1]
        weight = _index_weights(weight_TI, q_TIK)
        for piece in pieces((first_T, end_T), LOSS_QUERIES, LOSS_DOCUMENTS):
            rows, keys = piece.rows, piece.keys
            ends = piece.query_ends, piece.key_ends
            layout = {"actual_seq_qlen": ends[0], "actual_seq_klen": ends[1], "layout": "TND", "sparse_mode": 3}
            index = q_TIK[rows].contiguous(), k_SK[keys].unsqueeze(1).contiguous(), weight[rows]
            scores = torch.ops.npu.npu_dense_lightning_indexer_softmax_lse(*index, **layout)
            max_NT1, sum_NT1 = causal_statistics(q_TNH[rows], k_SNH[keys], v_SNV[keys], *ends, scale)
            for heads in head_parts(N, LOSS_HEADS):
                q_TnH, q_extra = _split(q_TNH[rows], heads)
                k_SnH, k_extra = _split(k_SNH[keys], heads)
                found = torch.ops.npu.npu_dense_lightning_indexer_grad_kl_loss(
                    q_TnH,
                    k_SnH,
                    *index,
                    max_NT1[heads],
                    sum_NT1[heads],
                    *scores,
                    scale,
                    query_rope=q_extra,
                    key_rope=k_extra,
                    **layout,
                )
                gradients.add(piece, (heads.stop - heads.start) / N, found)
        return gradients.save(ctx, student)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: torch.Tensor):
        return *(grad * x for x in ctx.saved_tensors), *(None,) * 6


def fused_indexer_loss(
    teacher: Teacher,
    student: Student,
    index_Tk: torch.Tensor,
    lse_TN: torch.Tensor,
    value_width: int,
    relu: bool,
    ranges: Ranges,
    choice: str,
) -> torch.Tensor | None:
    """The sum over queries of `ops.indexer_loss` against what `teacher` gives to the listed keys; lse_TN from
    `sparse_attention`. See `FusedIndexerLoss` for its value."""
    q_TNL, kv_SL, scale, sink_N = teacher

    def problem() -> str | None:
        if index_Tk.shape[1] not in LOSS_KEYS:
            return f"the indexer chooses {index_Tk.shape[1]} keys"
        odd = _latent_problem(q_TNL, value_width, sink_N) or dtype_problem(q_TNL, kv_SL, student.q_TIK, student.k_GK)
        return odd or _student_problem(q_TNL.shape[1], student, relu, ranges)

    operators = ("npu_sparse_lightning_indexer_grad_kl_loss",)
    if not serves("indexer_loss with its teacher", choice, q_TNL, operators, problem):
        return None
    return FusedIndexerLoss.apply(*student, q_TNL, kv_SL, index_Tk, lse_TN, scale, *ranges)


def dense_indexer_loss(
    teacher: Teacher, heads: Heads, student: Student, pooled: bool, relu: bool, ranges: Ranges, choice: str
) -> torch.Tensor | None:
    """The sum over queries of `ops.dense_indexer_loss`; heads: the attention that `teacher` is, not absorbed. See
    `FusedIndexerLoss` for its value."""

    def problem() -> str | None:
        widths = heads.q_TNH.shape[-1], heads.v_SNV.shape[-1]
        if is_950():
            return "Ascend 950 has no operator for it"
        if pooled:
            return "keys are chosen in pools"
        if widths != (DENSE_WIDTH + EXTRA, DENSE_WIDTH):
            return f"heads are {widths[0]} and {widths[1]} wide"
        if teacher.sink_N is not None:
            return "heads have sinks"
        odd = dtype_problem(*heads, student.q_TIK, student.k_GK)
        return odd or _student_problem(heads.q_TNH.shape[1], student, relu, ranges)

    operators = "npu_dense_lightning_indexer_softmax_lse", "npu_dense_lightning_indexer_grad_kl_loss"
    if not serves("dense_indexer_loss", choice, heads.q_TNH, (*operators, "npu_fusion_attention"), problem):
        return None
    return DenseIndexerLoss.apply(*student, *heads, teacher.scale, *ranges)


def several_parts(heads: int) -> bool:
    """Whether losses come in parts of heads, so that their mean is not the loss."""
    return len(head_parts(heads, LOSS_HEADS)) > 1
