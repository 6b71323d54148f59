"""Torch definitions of sparse attention: brute force in float64, gradients, blocks, memory that is linear in tokens.

Legend: letters of sparse.py.
"""

import math

import pytest
import torch
from recorder import Recorder
from torch.autograd import gradcheck

from modeling_latentmoe import ops, sparse
from modeling_latentmoe.configuration_latentmoe import LatentMoETextConfig
from modeling_latentmoe.documents import Documents
from modeling_latentmoe.mla import GatedLatentAttention

CPU = torch.device("cpu")
N, L, V, HEADS, K, SCALE = 3, 7, 5, 2, 4, 0.3
# Queries see these keys; one of them none.
FIRST, END = torch.tensor([0, 0, 0, 3, 3, 3]).int(), torch.tensor([1, 2, 3, 4, 3, 9]).int()
S = 9


@pytest.fixture(params=[2**26, 1], ids=["one-block", "a-block-a-query"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "BLOCK_BYTES", request.param)


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    T = len(FIRST)
    shapes = {"q": (T, N, L), "kv": (S, L), "sink": (N,), "qi": (T, HEADS, K), "ki": (S, K), "weight": (T, HEADS)}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def chosen(k: int = 3) -> torch.Tensor:
    x = inputs()
    return ops.index_topk(x["qi"], x["ki"], x["weight"], FIRST, END, k)


def true_scores(x: dict[str, torch.Tensor], t: int, s: int) -> float:
    """One number at a time."""
    dots = [sum(a * b for a, b in zip(x["qi"][t, i].tolist(), x["ki"][s].tolist(), strict=True)) for i in range(HEADS)]
    return sum(w * max(d * K**-0.5, 0.0) for w, d in zip(x["weight"][t].tolist(), dots, strict=True))


@pytest.mark.parametrize("k", [1, 3, 20])
def test_selection_equals_brute_force(k: int, blocks: None) -> None:
    x, got = inputs(), chosen(k)
    assert got.dtype == torch.int32 and got.shape == (len(FIRST), k)
    for t, row in enumerate(got.tolist()):
        order = sorted((-true_scores(x, t, s), s) for s in range(int(FIRST[t]), int(END[t])))
        want = sorted(s for _, s in order[:k])
        assert row == want + [-1] * (k - len(want))


def true_attention(x: dict[str, torch.Tensor], keys: list[int], t: int, n: int, sink: bool):
    """Output, log-sum-exp and probabilities of one head of one query."""
    logits = [SCALE * float(x["q"][t, n] @ x["kv"][s]) for s in keys]
    total = sum(map(math.exp, logits)) + (math.exp(float(x["sink"][n])) if sink else 0)
    share = [math.exp(z) / total for z in logits]
    out = sum((p * x["kv"][s, :V] for p, s in zip(share, keys, strict=True)), torch.zeros(V, dtype=torch.float64))
    return out, math.log(total) if total else -math.inf, share


@pytest.mark.parametrize("sink", [False, True])
def test_attention_equals_brute_force(sink: bool, blocks: None) -> None:
    x, index = inputs(), chosen()
    out, lse = ops.sparse_attention(x["q"], x["kv"], index, SCALE, V, x["sink"] if sink else None)
    shares = ops.head_probabilities(x["q"], x["kv"], index, lse, SCALE, V)
    for t, row in enumerate(index.tolist()):
        keys = [s for s in row if s >= 0]
        want_shares = torch.zeros(index.shape[1], dtype=torch.float64)
        for n in range(N):
            want, want_lse, share = true_attention(x, keys, t, n, sink)
            torch.testing.assert_close(out[t, n], want, rtol=1e-12, atol=1e-12)
            assert float(lse[t, n]) == pytest.approx(want_lse, rel=1e-12)
            want_shares[: len(keys)] += torch.tensor(share, dtype=torch.float64)
        torch.testing.assert_close(shares[t], want_shares, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sink", [False, True])
def test_attention_gradients(sink: bool) -> None:
    x, index = inputs(), chosen()
    leaves = [x[name].requires_grad_() for name in ("q", "kv", *(["sink"] if sink else []))]

    def run(q, kv, sink_N=None):
        out, lse = ops.sparse_attention(q, kv, index, SCALE, V, sink_N)
        # Without keys and sink nothing is summed.
        return out, lse[lse.isfinite()]

    assert gradcheck(run, leaves)


def test_gradients_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for block in (2**26, 1):
        monkeypatch.setattr(sparse, "BLOCK_BYTES", block)
        x, index = inputs(), chosen()
        leaves = [x[name].requires_grad_() for name in ("q", "kv", "sink", "qi", "ki", "weight")]
        teacher, student = sparse.Teacher(x["q"], x["kv"], SCALE, x["sink"]), sparse.Student(*leaves[3:])
        out, lse = ops.sparse_attention(*teacher[:2], index, SCALE, V, x["sink"])
        target = ops.head_probabilities(*teacher[:2], index, lse, SCALE, V)
        total = out.square().sum() + lse.sum() + ops.indexer_loss(*student, index, target).sum()
        total = total + ops.dense_indexer_loss(teacher, student, FIRST, END).sum()
        found.append(torch.autograd.grad(total, leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def true_divergence(target: list[float], scores: list[float]) -> float:
    if not sum(target):
        return 0.0
    total = sum(map(math.exp, scores))
    p, q = [x / sum(target) for x in target], [math.exp(z) / total for z in scores]
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def test_losses_equal_brute_force(blocks: None) -> None:
    x, index = inputs(), chosen()
    student = sparse.Student(x["qi"], x["ki"], x["weight"])
    target = torch.rand(index.shape, dtype=torch.float64)
    listed = ops.indexer_loss(*student, index, target)
    dense = ops.dense_indexer_loss(sparse.Teacher(x["q"], x["kv"], SCALE, x["sink"]), student, FIRST, END)
    for t, row in enumerate(index.tolist()):
        keys = [s for s in row if s >= 0]
        want = true_divergence(target[t, : len(keys)].tolist(), [true_scores(x, t, s) for s in keys])
        assert float(listed[t]) == pytest.approx(want, abs=1e-12)
        keys = list(range(int(FIRST[t]), int(END[t])))
        shares = [true_attention(x, keys, t, n, sink=True)[2] for n in range(N)]
        mass = [sum(share[i] for share in shares) for i in range(len(keys))]
        assert float(dense[t]) == pytest.approx(true_divergence(mass, [true_scores(x, t, s) for s in keys]), abs=1e-12)


def test_losses_over_all_keys_agree(blocks: None) -> None:
    """With every visible key listed, the two stages have one loss."""
    x, index = inputs(), chosen(k=S)
    student = sparse.Student(x["qi"], x["ki"], x["weight"])
    _, lse = ops.sparse_attention(x["q"], x["kv"], index, SCALE, V, x["sink"])
    target = ops.head_probabilities(x["q"], x["kv"], index, lse, SCALE, V)
    dense = ops.dense_indexer_loss(sparse.Teacher(x["q"], x["kv"], SCALE, x["sink"]), student, FIRST, END)
    torch.testing.assert_close(ops.indexer_loss(*student, index, target), dense)


@pytest.mark.parametrize("relu", [True, False])
def test_losses_reach_the_student_alone(relu: bool) -> None:
    x, index = inputs(), chosen()
    leaves = [x[name].requires_grad_() for name in ("qi", "ki", "weight")]
    target = torch.rand(index.shape, dtype=torch.float64, requires_grad=True)
    teacher = sparse.Teacher(x["q"].requires_grad_(), x["kv"].requires_grad_(), SCALE)
    assert gradcheck(lambda *student: ops.indexer_loss(*student, index, target, relu), leaves)
    assert gradcheck(
        lambda *student: ops.dense_indexer_loss(teacher, sparse.Student(*student), FIRST, END, None, relu), leaves
    )
    total = ops.indexer_loss(*leaves, index, target, relu).sum()
    total = total + ops.dense_indexer_loss(teacher, sparse.Student(*leaves), FIRST, END, None, relu).sum()
    total.backward()
    assert target.grad is None and x["q"].grad is None and x["kv"].grad is None


def test_nothing_to_compute() -> None:
    x = {name: value[:0] if len(value) == len(FIRST) else value for name, value in inputs().items()}
    first, index = FIRST[:0], torch.zeros(0, 3, dtype=torch.int32)
    assert ops.index_topk(x["qi"], x["ki"], x["weight"], first, first, 3).shape == (0, 3)
    assert ops.sparse_attention(x["q"], x["kv"], index, SCALE, V)[0].shape == (0, N, V)
    student = sparse.Student(x["qi"].requires_grad_(), x["ki"], x["weight"])
    for loss in (
        ops.indexer_loss(*student, index, index.double()),
        ops.dense_indexer_loss(sparse.Teacher(x["q"], x["kv"], SCALE), student, first, first),
    ):
        assert loss.shape == (0,)
        # A process without tokens takes part in the backward pass.
        loss.sum().backward()


def test_bf16_is_computed_in_fp32() -> None:
    x, index = {name: value.bfloat16() for name, value in inputs().items()}, chosen()
    true = {name: value.double() for name, value in x.items()}
    out, lse = ops.sparse_attention(x["q"], x["kv"], index, SCALE, V, x["sink"])
    want, want_lse = ops.sparse_attention(true["q"], true["kv"], index, SCALE, V, true["sink"])
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, want.bfloat16())
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


# Memory.


def layer(**changes) -> GatedLatentAttention:
    config = LatentMoETextConfig(
        num_hidden_layers=1,
        linear_attn_config=None,
        num_experts=0,
        hidden_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        q_lora_rank=4,
        kv_lora_rank=4,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
        index_topk=16,
        index_n_heads=1,
        index_head_dim=4,
        **changes,
    )
    torch.manual_seed(0)
    return GatedLatentAttention(config, "full")


@pytest.mark.parametrize("learns", [pytest.param(False, marks=pytest.mark.slow), True])
def test_memory_grows_linearly(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public report 83: a score matrix of all queries and keys. Peak of forward and backward of a layer."""
    # What a block takes is the same for all lengths.
    monkeypatch.setattr(sparse, "BLOCK_BYTES", 2**18)
    module, peaks = layer().train(), []
    module.config.indexer_loss = learns
    for T in (512, 1024, 2048):
        x_BTD = torch.randn(1, T, 8, requires_grad=True)
        documents = Documents.of_batch((1, T), CPU)
        with Recorder() as recorder:
            out, choice = module(x_BTD, documents)
            (out.sum() + sum(choice.losses)).backward()
            peaks.append(recorder.peak_bytes)
    slopes = [(peaks[1] - peaks[0]) / 512, (peaks[2] - peaks[1]) / 1024]
    assert abs(slopes[1] / slopes[0] - 1) < 0.1, peaks
