"""The definitions against loops over queries that say the same in other words.

Legend: T queries, N heads, S keys, L columns of a key, V of them values, k selected keys per query, I index heads,
        K index width.
"""

import torch
from sparse_attention import (
    head_probabilities_reference,
    index_scores_reference,
    index_topk_reference,
    indexer_loss_reference,
    sparse_attention_reference,
)

T, N, S, L, V, k, SCALE = 4, 3, 11, 8, 6, 5, 0.4
INDEX = torch.tensor([[0, 3, 4, 9, 10], [2, -1, -1, -1, -1], [-1] * 5, [1, 2, 5, -1, -1]], dtype=torch.int32)


def drawn(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_attention_by_gathering():
    q, kv, sink = drawn((T, N, L), (S, L), (N,))
    out, lse = sparse_attention_reference(q, kv, INDEX, SCALE, V, sink)
    sums = head_probabilities_reference(q, kv, INDEX, lse, SCALE)
    for t in range(T):
        chosen = kv[INDEX[t][INDEX[t] >= 0].long()]
        logits = torch.cat([q[t] @ chosen.T * SCALE, sink[:, None]], 1)
        p = logits.softmax(1)[:, :-1]
        torch.testing.assert_close(out[t], p @ chosen[:, :V])
        torch.testing.assert_close(lse[t], logits.logsumexp(1))
        torch.testing.assert_close(sums[t, : len(chosen)], p.sum(0))
        assert (sums[t, len(chosen) :] == 0).all()


def test_gradients_of_short_rows():
    q, kv, sink = (x.requires_grad_() for x in drawn((T, N, L), (S, L), (N,)))
    assert torch.autograd.gradcheck(
        lambda q, kv, sink: sparse_attention_reference(q, kv, INDEX, SCALE, V, sink)[0], (q, kv, sink)
    )
    out, lse = sparse_attention_reference(q, kv, INDEX, SCALE, V)
    assert (out[2] == 0).all() and (lse[2] == -torch.inf).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, kv)))


def test_selection_within_a_range():
    """Of equal scores, here zeros, the earlier key wins; rows are ascending, -1 at the end."""
    q, keys = drawn((3, 2, 4), (6, 4))
    weight = torch.ones(3, 2, dtype=torch.float64)
    keys[1:4] = -q[0].sum(0)
    first, end = torch.tensor([0, 2, 5]), torch.tensor([6, 4, 5])
    index = index_topk_reference(q, keys, weight, first, end, 3)
    assert index.dtype == torch.int32
    assert index[1].tolist() == [2, 3, -1] and index[2].tolist() == [-1, -1, -1]
    score = index_scores_reference(q, keys, weight)[0]
    best = sorted(range(6), key=lambda s: (-score[s].item(), s))[:3]
    assert index[0].tolist() == sorted(best)


def test_loss_is_a_divergence():
    q, keys, weight, target = drawn((T, 2, 4), (S, 4), (T, 2), (T, k))
    q, keys, weight = (x.requires_grad_() for x in (q, keys, weight))
    target = target.abs()
    loss = indexer_loss_reference(q, keys, weight, INDEX, target)
    scores = index_scores_reference(q, keys, weight)
    for t in range(T):
        chosen = INDEX[t][INDEX[t] >= 0].long()
        p = target[t, : len(chosen)] / target[t, : len(chosen)].sum()
        expected = (p * (p.log() - scores[t, chosen].log_softmax(0))).sum()
        torch.testing.assert_close(loss[t], expected)
    assert loss[2] == 0 and (loss >= 0).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(loss.sum(), (q, keys, weight)))
