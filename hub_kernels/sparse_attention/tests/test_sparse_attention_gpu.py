"""Attention over selected keys at the released model's sizes: both forward paths, determinism, memory, compilation.

Legend: T queries, N heads, S keys, L columns of a key, V of them values, k selected keys per query.
"""

import pytest
import torch
from sparse_attention import attention, head_probabilities, sparse_attention, sparse_attention_reference

pytestmark = pytest.mark.gpu
L, V = 576, 512


def inputs(T, N, S, k, dtype=torch.bfloat16, lengths=None):
    torch.manual_seed(T)
    q = torch.randn(T, N, L, device="cuda").to(dtype)
    kv = torch.randn(S, L, device="cuda").to(dtype)
    keys = torch.rand(T, S, device="cuda").argsort(1)[:, :k]
    length = torch.tensor(lengths or [k], device="cuda").repeat(T)[:T]
    keys = torch.where(torch.arange(k, device="cuda") < length[:, None], keys, S).sort(1).values
    return q, kv, torch.where(keys < S, keys, -1).int(), torch.randn(N, device="cuda")


def run(function, q, kv, index, sink, dout):
    q, kv, sink = (x.detach().requires_grad_() for x in (q, kv, sink))
    out, lse = function(q, kv, index, L**-0.5, V, sink)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, kv, sink), dout)]


# Every case compiles its own kernels, so that few of the combinations are run.
@pytest.mark.parametrize(
    ("T", "N", "S", "k", "dtype"),
    [
        (130, 96, 4096, 2048, torch.bfloat16),
        (130, 96, 1000, 777, torch.float16),
        (140, 72, 300, 65, torch.bfloat16),
        (20, 96, 4096, 2048, torch.bfloat16),
        (20, 128, 2500, 2047, torch.bfloat16),
        (20, 64, 2500, 2049, torch.bfloat16),
        (5, 16, 500, 300, torch.bfloat16),
        (3, 96, 500, 300, torch.float32),
    ],
)
def test_values_and_gradients(as_accurate, within, T, N, S, k, dtype):
    q, kv, index, sink = inputs(T, N, S, k, dtype, [k, k - 1, 0, 1, k // 2, 65])
    dout = torch.randn(T, N, V, device="cuda").to(dtype)
    ours = run(sparse_attention, q, kv, index, sink, dout)
    plain = run(sparse_attention_reference, q, kv, index, sink, dout)
    truth = run(sparse_attention_reference, q.double(), kv.double(), index, sink.double(), dout.double())
    for name, x, p, t in zip(("out", "lse", "dq", "dkv", "dsink"), ours, plain, truth, strict=True):
        if x.dtype == dtype:
            as_accurate(name, x, p, t)
        else:
            within(name, x, t, torch.finfo(dtype).eps)


def test_same_bits_every_run():
    q, kv, index, sink = inputs(1000, 96, 3000, 2048)
    dout = torch.randn(1000, 96, V, device="cuda", dtype=torch.bfloat16)
    first = run(sparse_attention, q, kv, index, sink, dout)
    for _ in range(29):
        again = run(sparse_attention, q, kv, index, sink, dout)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_both_forward_paths_agree(within, monkeypatch):
    q, kv, index, sink = inputs(300, 96, 3000, 2048, lengths=[2048, 100, 0])
    fused = sparse_attention(q, kv, index, 0.05, V, sink)
    monkeypatch.setattr(attention, "FEWEST", 1 << 30)
    for name, x, y in zip(("out", "lse"), fused, sparse_attention(q, kv, index, 0.05, V, sink), strict=True):
        within(name, x, y, torch.finfo(torch.bfloat16).eps)


def test_negative_scale(within):
    q, kv, index, sink = inputs(130, 96, 1000, 300)
    out, lse = sparse_attention(q, kv, index, -0.05, V, sink)
    wide = sparse_attention_reference(q.double(), kv.double(), index, -0.05, V, sink.double())
    for name, x, t in zip(("out", "lse"), (out, lse), wide, strict=True):
        within(name, x, t, torch.finfo(torch.bfloat16).eps)


def test_memory_grows_with_queries_only():
    """Public report basetenlabs/ml-cookbook#116: a matrix of queries and keys ran out of memory above 16k."""
    peaks = []
    for T in (4096, 8192, 16384):
        q, kv, _, _ = inputs(T, 16, T, 1)
        q, kv = q.requires_grad_(), kv.requires_grad_()
        index = torch.arange(T, device="cuda")[:, None] - torch.arange(1023, -1, -1, device="cuda")
        index = index.int().clamp_min(-1).sort(1, descending=True).values
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, _ = sparse_attention(q, kv, index, 0.05, V)
        torch.autograd.grad(out, (q, kv), torch.ones_like(out))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del out
    slopes = (peaks[1] - peaks[0]) / 4096, (peaks[2] - peaks[1]) / 8192
    assert abs(slopes[1] / slopes[0] - 1) < 0.1


def test_compiled_by_inductor():
    q, kv, index, sink = inputs(200, 96, 600, 300)
    dout = torch.randn(200, 96, V, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(sparse_attention, fullgraph=True)
    for x, y in zip(
        run(compiled, q, kv, index, sink, dout), run(sparse_attention, q, kv, index, sink, dout), strict=True
    ):
        assert torch.equal(x, y)


def test_captured_in_a_graph():
    q, kv, index, sink = inputs(8, 96, 600, 300)
    out, lse = sparse_attention(q, kv, index, 0.05, V, sink)
    head_probabilities(q, kv, index, lse, 0.05)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = sparse_attention(q, kv, index, 0.05, V, sink)
        sums = head_probabilities(q, kv, index, lse, 0.05)
    q.copy_(torch.randn_like(q))
    graph.replay()
    expected, lse = sparse_attention(q, kv, index, 0.05, V, sink)
    assert torch.equal(out, expected) and torch.equal(sums, head_probabilities(q, kv, index, lse, 0.05))


def test_more_elements_than_32_bits_count():
    """Queries are independent: the last ones alone give the same bits."""
    q, kv, index, sink = inputs(40_000, 96, 64, 64)
    out, lse = sparse_attention(q, kv, index, 0.05, V, sink)
    tail = sparse_attention(q[-200:], kv, index[-200:], 0.05, V, sink)
    assert torch.equal(out[-200:], tail[0]) and torch.equal(lse[-200:], tail[1])
