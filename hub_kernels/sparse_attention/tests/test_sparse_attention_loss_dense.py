"""The loss over all visible keys, some queries at a time, against its definition over all of them."""

import torch
from sparse_attention import dense_indexer_loss, loss_dense
from sparse_attention.index_reference import index_scores_reference, visible_keys


def definition(q, k, weight, first, end, probability_TS):
    """KL over all visible keys, from scores of all queries with all keys."""
    visible_TS = visible_keys(first, end, len(k))
    log_q_TS = index_scores_reference(q, k, weight).masked_fill(~visible_TS, -1e30).log_softmax(1)
    p_TS = probability_TS.to(log_q_TS.dtype) * visible_TS
    p_TS = p_TS / p_TS.sum(1, keepdim=True).clamp_min(1e-30)
    return (torch.xlogy(p_TS, p_TS) - p_TS * log_q_TS).sum(1)


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm()).item()


def test_values(monkeypatch, device):
    T, S = 7, 40
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    leaves = normal(T, 4, 64), normal(S, 64), normal(T, 4)
    probability_TS, dloss_T = normal(T, S).exp(), normal(T)
    end = torch.arange(S - T + 1, S + 1, dtype=torch.int32, device=device)
    first = (end - 20).clamp(min=5)
    first[2] = end[2]
    # Three queries at a time.
    monkeypatch.setattr(loss_dense, "INDEX_BYTES", 3 * 4 * S)
    asked = []

    def probabilities(queries, index_RS):
        asked.append(queries)
        return probability_TS[queries].gather(1, index_RS.clamp(min=0).long()) * (index_RS >= 0)

    def results(function, dtype, last):
        inputs = [x.to(dtype).requires_grad_() for x in leaves]
        losses = function(*inputs, first, end, last)
        return losses.detach(), *torch.autograd.grad(losses, inputs, dloss_T.to(dtype))

    ours = results(dense_indexer_loss, torch.float32, probabilities)
    plain, truth = (results(definition, dtype, probability_TS) for dtype in (torch.float32, torch.float64))
    assert [x.start for x in asked] == [0, 3, 6, 0, 3, 6]
    assert ours[0][2] == 0
    for x, p, t in zip(ours, plain, truth, strict=True):
        assert error(x, t) <= 2 * error(p, t) + 8 * torch.finfo(torch.float32).eps
