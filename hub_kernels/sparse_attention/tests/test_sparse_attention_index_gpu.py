"""The indexer at sizes that only a GPU computes: selections, errors, equal runs, compilation, memory."""

import pytest
import torch
from sparse_attention import index_topk, indexer_loss
from sparse_attention.index_reference import index_scores_reference, select_reference
from sparse_attention.loss_reference import indexer_loss_reference

gpu = pytest.mark.gpu


def inputs_of(T: int, S: int, heads: int, dtype: torch.dtype, device: str, document: int = 10**9):
    """q, k, weight, first, end: the queries are the last of the keys, documents are of so many keys."""
    generator = torch.Generator(device).manual_seed(T + S + heads)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    s = torch.arange(S - T, S, device=device)
    weight = normal(T, heads) * heads**-0.5
    return (
        normal(T, heads, 128).to(dtype),
        normal(S, 128).to(dtype),
        weight,
        (s // document * document).int(),
        (s + 1).int(),
    )


def check_selection(found, q, k, weight, first, end, top: int) -> None:
    for t in torch.linspace(0, len(q) - 1, 16).long().tolist():
        rows = slice(t, t + 1)
        score = index_scores_reference(q[rows].double(), k.double(), weight[rows].double())
        wanted = select_reference(score, first[rows], end[rows], top)
        ours, theirs = (x[0][x[0] >= 0].long() for x in (found[rows], wanted))
        assert len(ours) == len(theirs) and (ours.diff() > 0).all()
        different = torch.tensor(sorted(set(ours.tolist()) ^ set(theirs.tolist())), device=q.device, dtype=torch.long)
        distance = (score[0, different] - score[0, theirs].min()).abs()
        assert (distance <= 1e-5 * score.abs().max()).all()


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (2047, 2047, 64, 2048),
        (2049, 2049, 64, 2048),
        (300, 70000, 64, 2048),
        (5000, 5000, 32, 512),
        (1, 33000, 5, 8192),
    ],
    ids=str,
)
def test_selections(shape, dtype):
    T, S, heads, top = shape
    for document in (10**9, 1500, 18000):
        arguments = inputs_of(T, S, heads, dtype, "cuda", document)
        check_selection(index_topk(*arguments, top), *arguments, top)


@gpu
def test_many_equal_scores():
    q, k, weight, first, end = inputs_of(64, 40000, 2, torch.bfloat16, "cuda")
    # Scores are small integers, which no rounding touches.
    q = torch.zeros_like(q)
    q[:, 0, 0], q[:, 1, 1] = 1, 1
    k = torch.randint(-3, 4, k.shape, device="cuda").to(k.dtype)
    weight = torch.full_like(weight, 128**0.5)
    found = index_topk(q, k, weight, first, end, 2048)
    score = (k[:, 0].clamp(min=0) + k[:, 1].clamp(min=0)).float().expand(64, -1)
    assert torch.equal(found, select_reference(score, first, end, 2048))


def loss_inputs(T: int, S: int, heads: int, top: int, dtype: torch.dtype, device: str):
    q, k, weight, first, end = inputs_of(T, S, heads, dtype, device)
    index = index_topk(q, k, weight, first, end, top)
    generator = torch.Generator(device).manual_seed(1)
    target = torch.randn(index.shape, generator=generator, device=device).exp() * (index >= 0)
    return (q, k, weight), index, target, torch.randn(T, generator=generator, device=device)


def results(function, leaves, index, target, dloss):
    leaves = [x.clone().requires_grad_() for x in leaves]
    losses = function(*leaves, index, target)
    return losses.detach(), *torch.autograd.grad(losses, leaves, dloss.to(losses.dtype))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(300, 3000, 64, 512), (257, 900, 32, 2048), (70, 400, 5, 100)], ids=str)
def test_loss_errors(shape, dtype):
    leaves, index, target, dloss = loss_inputs(*shape, dtype, "cuda")
    ours = results(indexer_loss, leaves, index, target, dloss)
    plain = results(indexer_loss_reference, leaves, index, target, dloss)
    truth = results(indexer_loss_reference, [x.double() for x in leaves], index, target.double(), dloss)
    for x, p, t in zip(ours, plain, truth, strict=True):
        error, allowed = ((y.double() - t).norm() / t.norm() for y in (x, p))
        assert error <= 2 * allowed + 8 * torch.finfo(torch.float32).eps


@gpu
def test_same_bits_every_run():
    arguments = inputs_of(4096, 4096, 64, torch.bfloat16, "cuda")
    leaves, index, target, dloss = loss_inputs(4096, 4096, 64, 1024, torch.bfloat16, "cuda")
    first = None
    for _ in range(30):
        found = index_topk(*arguments, 1024), *results(indexer_loss, leaves, index, target, dloss)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


@gpu
def test_memory_of_scores():
    arguments = inputs_of(32768, 32768, 64, torch.bfloat16, "cuda")
    index_topk(*arguments, 2048)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    index = index_topk(*arguments, 2048)
    # All scores in fp32 would take 4 GiB.
    assert torch.cuda.max_memory_allocated() - before - index.nbytes < 2**28


def compiled_equals_eager(backend: str, T: int, top: int, device: str) -> None:
    q, k, weight, first, end = inputs_of(T, T, 4, torch.float32, device)

    def step(q, k, weight):
        index = index_topk(q, k, weight, first, end, top)
        target = (index >= 0).float()
        return indexer_loss(q * 1.0, k, weight, index, target)

    found = []
    for function in (torch.compile(step, fullgraph=True, backend=backend), step):
        leaves = [x.clone().requires_grad_() for x in (q, k, weight)]
        losses = function(*leaves)
        found.append((losses.detach(), *torch.autograd.grad(losses.sum(), leaves)))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.slow
def test_compiled_whole(device):
    compiled_equals_eager("aot_eager", 5, 3, device)


@gpu
def test_compiled_by_inductor():
    compiled_equals_eager("inductor", 700, 128, "cuda")
