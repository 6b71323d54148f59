"""The indexer on one GPU, 64 heads of 128: verified against the torch definition, then timed beside it.

Selections are compared with those by float64 scores, for some of the queries; a key may differ only where its score is
within rounding of the last one selected. The definition runs on blocks of queries, as all its scores at once would not
fit. The gradient of the loss is measured with what the loss is learnt from, the probabilities of 96 heads of attention.

Legend: T queries and keys, I index heads, K width of an index head, k selected keys.
"""

from collections.abc import Iterator
from typing import Any

import measure
import torch
from sparse_attention import head_probabilities, index_topk, indexer_loss, indexer_loss_reference, sparse_attention
from sparse_attention.index_reference import index_scores_reference, index_topk_reference, select_reference

I, K, TOP = 64, 128, 2048  # noqa: E741
TOKENS = (8192, 32768)
# Of the attention that the loss is learnt from: heads, columns of a key, of which so many are values, and scale.
N, L, V, SCALE = 96, 576, 512, 192**-0.5
# Of a dense matrix product of 8-bit operands, measured on one H200.
FLOPS_PER_SECOND_8_BITS = 1493e12
# Scores that fp32 cannot tell apart, relative to the largest of their row.
ROUNDING = 1e-5
# Queries whose selection is checked, and queries of a block of the definition.
CHECKED, BLOCK = 32, 128


def inputs(T: int) -> tuple[torch.Tensor, ...]:
    """q, k, weight, first, end of one causal document."""
    q, k = torch.randn(T, I, K, device="cuda").bfloat16(), torch.randn(T, K, device="cuda").bfloat16()
    weight = torch.randn(T, I, device="cuda") * I**-0.5
    end = torch.arange(1, T + 1, dtype=torch.int32, device="cuda")
    return q, k, weight, torch.zeros_like(end), end


def selected(index_Tk: torch.Tensor, keys: int) -> torch.Tensor:
    """bool [T, S]"""
    chosen = torch.zeros(len(index_Tk), keys + 1, dtype=torch.bool, device=index_Tk.device)
    return chosen.scatter_(1, torch.where(index_Tk < 0, keys, index_Tk).long(), True)[:, :keys]


def verify_selection(T: int, index_Tk: torch.Tensor, arguments: tuple[torch.Tensor, ...]) -> int:
    """How many of the checked queries differ by near ties; SystemExit for a wrong result."""
    q, k, weight, first, end = arguments
    differ = 0
    for t in torch.linspace(0, T - 1, CHECKED).long().tolist():
        rows = slice(t, t + 1)
        score = index_scores_reference(q[rows].double(), k.double(), weight[rows].double())
        wanted = select_reference(score, first[rows], end[rows], TOP)
        found = index_Tk[rows]
        other = selected(found, T) ^ selected(wanted, T)
        last = score[0, wanted[wanted >= 0].long()].min()
        distance = ((score - last).abs() / score.abs().max())[other]
        number = (found >= 0).sum()
        ascending = bool((found[0, :number].diff() > 0).all())
        if not (ascending and number == (wanted >= 0).sum() and bool((distance <= ROUNDING).all())):
            raise SystemExit(f"index_topk: query {t} of {T} has a wrong selection")
        differ += int(other.any())
    return differ


def definition(q, k, weight, first, end) -> torch.Tensor:
    blocks = zip(*(x.split(BLOCK) for x in (q, weight, first, end)), strict=True)
    return torch.cat([index_topk_reference(q_b, k, w_b, f_b, e_b, TOP) for q_b, w_b, f_b, e_b in blocks])


def recall(found_Tk: torch.Tensor, wanted_Tk: torch.Tensor) -> float:
    hits = total = 0
    for found, wanted in zip(found_Tk.split(1024), wanted_Tk.split(1024), strict=True):
        hits += int((selected(found, len(found_Tk)) & selected(wanted, len(found_Tk))).sum())
        total += int((wanted >= 0).sum())
    return hits / total


def selection_rows(T: int, quick: bool) -> Iterator[dict[str, Any]]:
    arguments = inputs(T)
    exact = index_topk(*arguments, TOP)
    differ = verify_selection(T, exact, arguments)
    print(f"T={T}: {differ} of {CHECKED} queries differ from float64 by near ties")
    flops, repeats = T * (T + 1) * I * K, 3 if quick else 7
    for precision in ("bf16", "fp8", "int8"):
        floor = measure.floor_ms(flops, 0)
        if precision != "bf16":
            floor *= measure.FLOPS_PER_SECOND / FLOPS_PER_SECOND_8_BITS
        timed = {"ours": lambda precision=precision: index_topk(*arguments, TOP, precision)}
        if precision == "bf16" and T in TOKENS[:1]:
            timed["torch"] = lambda: definition(*arguments)
        peak = measure.peak_gib(timed["ours"])
        share = recall(index_topk(*arguments, TOP, precision), exact)
        row = measure.row(f"index top-k {precision}", f"T={T}", measure.samples_ms(timed, repeats), floor, peak, None)
        print(f"    recall {share:.4f}")
        yield row | {"recall": share}


def gradients(function, leaves, index_Tk, target_Tk, dloss_T) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    loss_T = function(*leaves, index_Tk, target_Tk)
    return loss_T.detach(), *torch.autograd.grad(loss_T, leaves, dloss_T.to(loss_T.dtype))


def loss_error() -> float:
    """Of loss and gradients, the largest error over that of torch in the same dtypes; at a small size."""
    T, top = 512, 128
    q, k, weight, first, end = inputs(T)
    index = index_topk(q, k, weight, first, end, top)
    target = torch.randn(T, top, device="cuda").exp() * (index >= 0)
    dloss = torch.randn(T, device="cuda")
    leaves = q, k, weight
    ours = gradients(indexer_loss, leaves, index, target, dloss)
    plain = gradients(indexer_loss_reference, leaves, index, target, dloss)
    truth = gradients(indexer_loss_reference, [x.double() for x in leaves], index, target.double(), dloss)
    least = 4 * torch.finfo(torch.float32).eps
    errors = ([measure.relative_error(x, t) for x, t in zip(values, truth, strict=True)] for values in (ours, plain))
    worst = max(a / max(b, least) for a, b in zip(*errors, strict=True))
    if not worst <= 2:
        raise SystemExit(f"indexer_loss: error {worst:.2f} times that of torch")
    return worst


def loss_rows_at(T: int, error: float, quick: bool) -> Iterator[dict[str, Any]]:
    q, k, weight, first, end = inputs(T)
    index = index_topk(q, k, weight, first, end, TOP)
    q_TNL, kv_SL = (torch.randn(*shape, L, device="cuda").bfloat16() for shape in ((T, N), (T,)))
    _, lse_TN = sparse_attention(q_TNL, kv_SL, index, SCALE, V)
    dloss = torch.full((T,), 1 / T, device="cuda")

    def probabilities() -> torch.Tensor:
        return head_probabilities(q_TNL, kv_SL, index, lse_TN, SCALE)

    target = probabilities()

    def loss(target_Tk: torch.Tensor = target) -> tuple[torch.Tensor, ...]:
        return gradients(indexer_loss, (q, k, weight), index, target_Tk, dloss)

    pairs, repeats = int((index >= 0).sum()), 3 if quick else 12
    floors = {
        "head probabilities": measure.floor_ms(2 * pairs * N * L, 2 * T * N * L + 8 * T * TOP),
        # Products of the selected pairs: scores in forward and again in backward, gradients of queries and of keys.
        "indexer loss fwd+bwd": measure.floor_ms(4 * 2 * I * K * pairs, 4 * T * I * K + 8 * T * TOP),
    }
    floors["KL gradient, both"] = sum(floors.values())
    functions = {
        "head probabilities": (probabilities, None),
        "indexer loss fwd+bwd": (loss, error),
        "KL gradient, both": (lambda: loss(probabilities()), error),
    }
    for op, (function, err) in functions.items():
        times = measure.samples_ms({"ours": function}, repeats)
        yield measure.row(op, f"T={T}, top-{TOP}", times, floors[op], measure.peak_gib(function), err)


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    for T in TOKENS[:1] if quick else TOKENS:
        yield from selection_rows(T, quick)


def loss_rows(quick: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    error = loss_error()
    for T in TOKENS[:1] if quick else TOKENS:
        yield from loss_rows_at(T, error, quick)
