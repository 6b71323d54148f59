"""Attention over selected keys against its definition: values, gradients, short rows, refusals, determinism.

Off a GPU kernels are interpreted, where bfloat16 is cut off instead of rounded: there float16 tells the same.

Legend: T queries, N heads, S keys, L columns of a key, V of them values, k selected keys per query.
"""

import pytest
import torch
from sparse_attention import (
    attention,
    head_probabilities,
    head_probabilities_reference,
    layers,
    sparse_attention,
    sparse_attention_reference,
)
from sparse_attention.attention import _backward, _forward
from sparse_attention.tiles import head_tiles
from torch import nn

RESULTS = ("out", "lse", "dq", "dkv", "dsink")


def selection(T, S, k, device, lengths):
    """int32 [T, k]: ascending random keys, `lengths` of them in turn, then -1."""
    generator = torch.Generator(device).manual_seed(T)
    keys = torch.rand(T, S, generator=generator, device=device).argsort(1)[:, :k]
    keys = torch.cat([keys, keys.new_full((T, k - keys.shape[1]), S)], 1)
    length = torch.tensor(lengths, device=device).repeat(T)[:T].clamp_max(S)
    keys = torch.where(torch.arange(k, device=device) < length[:, None], keys, S).sort(1).values
    return torch.where(keys < S, keys, -1).int()


def inputs(T, N, S, k, L, V, dtype, device, sink=True, lengths=None):
    """(q, kv, sink or None), the selection, and an upstream gradient."""
    generator = torch.Generator(device).manual_seed(N)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    tensors = draw(T, N, L).to(dtype), draw(S, L).to(dtype), draw(N) if sink else None
    index = selection(T, S, k, device, lengths or [k, k // 2 + 1, 0, 1, k])
    return tensors, index, draw(T, N, V).to(dtype)


def run(function, tensors, index, dout, scale, V):
    """out, lse and the gradients of q, kv and the sink if there is one."""
    q, kv, sink = (None if x is None else x.detach().requires_grad_() for x in tensors)
    out, lse = function(q, kv, index, scale, V, sink)
    wanted = [x for x in (q, kv, sink) if x is not None]
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, wanted, dout)]


def agree(as_accurate, within, tensors, index, dout):
    """Values, gradients and probabilities err at most twice as much as the definition's."""
    V, scale = dout.shape[-1], tensors[0].shape[-1] ** -0.5
    ours = run(sparse_attention, tensors, index, dout, scale, V)
    plain = run(sparse_attention_reference, tensors, index, dout, scale, V)
    wide = [None if x is None else x.double() for x in tensors]
    truth = run(sparse_attention_reference, wide, index, dout.double(), scale, V)
    for results, (q, kv, _) in ((ours, tensors), (plain, tensors), (truth, wide)):
        function = head_probabilities if results is ours else head_probabilities_reference
        results.append(function(q, kv, index, results[1], scale))
    finite = truth[1].isfinite()
    assert torch.equal(ours[1].isneginf(), ~finite)
    for results in (ours, plain, truth):
        results[1] = torch.where(finite, results[1], 0.0)
    names = [*RESULTS[: len(ours) - 1], "probabilities"]
    for name, x, p, t in zip(names, ours, plain, truth, strict=True):
        if x.dtype == dout.dtype:
            as_accurate(name, x, p, t)
        else:
            # fp32 sums of products of rounded operands: right to a rounding of the inputs' dtype.
            within(name, x, t, torch.finfo(dout.dtype).eps)
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("T", "N", "S", "k", "L", "V", "sink"),
    [
        (5, 3, 40, 20, 48, 32, True),
        (2, 24, 30, 40, 80, 48, False),
        (1, 1, 9, 1, 16, 16, True),
        (2, 40, 300, 260, 32, 32, False),
    ],
)
def test_values_and_gradients(as_accurate, within, device, dtype, T, N, S, k, L, V, sink):
    agree(as_accurate, within, *inputs(T, N, S, k, L, V, dtype, device, sink))


def test_96_heads_are_two_tiles(as_accurate, within, device):
    assert head_tiles(96) == (64, 32)
    agree(as_accurate, within, *inputs(2, 96, 40, 17, 48, 32, torch.float16, device))


def test_tiles_hold_all_heads():
    """Two tiles are used where they hold fewer heads that do not exist than one would."""
    for N in range(1, 129):
        first, second = head_tiles(N)
        assert N <= first + second < 2 * max(N, 16)
        assert second == 0 or (first < N and first + second < 2 * first)
    assert [head_tiles(N) for N in (1, 48, 64, 96, 128)] == [(16, 0), (32, 16), (64, 0), (64, 32), (128, 0)]


def test_rows_without_keys(device):
    (q, kv, sink), index, dout = inputs(4, 5, 20, 6, 32, 16, torch.float32, device, lengths=[0])
    out, lse, dq, dkv, dsink = run(sparse_attention, (q, kv, sink), index, dout, 0.1, 16)
    torch.testing.assert_close(lse, sink.expand(4, 5))
    out_bare, lse_bare, dq_bare, dkv_bare = run(sparse_attention, (q, kv, None), index, dout, 0.1, 16)
    assert (lse_bare == -torch.inf).all()
    for x in (out, dq, dkv, dsink, out_bare, dq_bare, dkv_bare):
        assert (x == 0).all()
    assert (head_probabilities(q, kv, index, lse_bare, 0.1) == 0).all()


def test_an_absent_sink_is_minus_infinity(device):
    (q, kv, _), index, dout = inputs(4, 5, 20, 6, 32, 16, torch.float32, device, sink=False)
    sink = torch.full((5,), -torch.inf, device=device)
    with_sink = run(sparse_attention, (q, kv, sink), index, dout, 0.1, 16)
    for x, y in zip(run(sparse_attention, (q, kv, None), index, dout, 0.1, 16), with_sink, strict=False):
        torch.testing.assert_close(x, y)


def test_no_queries_and_no_keys(device):
    for T, S in ((0, 5), (3, 0), (0, 0)):
        q = torch.randn(T, 4, 32, device=device, requires_grad=True)
        kv = torch.randn(S, 32, device=device, requires_grad=True)
        sink = torch.zeros(4, device=device, requires_grad=True)
        index = torch.full((T, 3), -1 if S == 0 else 0, dtype=torch.int32, device=device)
        out, lse = sparse_attention(q, kv, index, 1.0, 16, sink)
        assert out.shape == (T, 4, 16) and (out == 0).all() and (lse == 0).all()
        for x in torch.autograd.grad(out.sum(), (q, kv, sink)):
            assert (x == 0).all()
        assert head_probabilities(q, kv, index, lse, 1.0).shape == (T, 3)


def test_keys_of_others_stay_out(device):
    """What a query did not select, of another document for example, may be anything."""
    (q, kv, sink), index, dout = inputs(5, 3, 12, 4, 32, 16, torch.float32, device, lengths=[4, 1, 0])
    index = torch.where(index >= 0, index % 6 + 6, -1).sort(1, descending=True).values
    kv[:6] = torch.nan
    out, lse, dq, dkv, dsink = run(sparse_attention, (q, kv, sink), index, dout, 0.1, 16)
    for x in (out, lse, dq, dkv, dsink, head_probabilities(q, kv, index, lse, 0.1)):
        assert x.isfinite().all()
    assert (dkv[:6] == 0).all()


@pytest.mark.slow
def test_large_scores(within, device):
    """Scores of hundreds, sinks above and below: nothing overflows; fp32 keeps 5 digits after a point behind three."""
    (q, kv, sink), index, dout = inputs(2, 3, 400, 300, 32, 16, torch.float32, device)
    tensors = q * 30, kv, sink * 100
    ours = run(sparse_attention, tensors, index, dout, 32**-0.5, 16)
    truth = run(sparse_attention_reference, [x.double() for x in tensors], index, dout.double(), 32**-0.5, 16)
    for name, x, t in zip(RESULTS, ours, truth, strict=True):
        within(name, x, t, 1e-4)


def test_probabilities_sum_to_the_heads(device):
    (q, kv, _), index, _ = inputs(4, 7, 30, 11, 32, 16, torch.float32, device, lengths=[11, 5])
    _, lse = sparse_attention(q, kv, index, 0.2, 16)
    torch.testing.assert_close(head_probabilities(q, kv, index, lse, 0.2).sum(1), torch.full((4,), 7.0, device=device))


def test_queries_in_parts(device, monkeypatch):
    """With little room a few queries go at a time: the same bits, but for rounding in sums over queries."""
    tensors, index, dout = inputs(5, 3, 20, 15, 48, 32, torch.float32, device)
    whole = run(sparse_attention, tensors, index, dout, 0.1, 32)
    monkeypatch.setattr(attention, "SCRATCH_BYTES", 2 * 16 * (3 + 48) * 4)
    parts = run(sparse_attention, tensors, index, dout, 0.1, 32)
    for name, x, y in zip(RESULTS, whole, parts, strict=True):
        if name == "dkv":
            torch.testing.assert_close(x, y)
        else:
            assert torch.equal(x, y), name


def test_one_query_at_a_time(device):
    """A decoding step gives what the whole sequence gave."""
    (q, kv, sink), index, _ = inputs(5, 3, 40, 20, 48, 32, torch.float32, device)
    out, lse = sparse_attention(q, kv, index, 0.1, 32, sink)
    for t in range(5):
        out_t, lse_t = sparse_attention(q[t : t + 1], kv, index[t : t + 1], 0.1, 32, sink)
        torch.testing.assert_close(out_t, out[t : t + 1])
        torch.testing.assert_close(lse_t, lse[t : t + 1])


def test_same_bits_every_run(device):
    tensors, index, dout = inputs(4, 5, 30, 20, 48, 32, torch.float16, device)
    first = run(sparse_attention, tensors, index, dout, 0.1, 32)
    for x, y in zip(first, run(sparse_attention, tensors, index, dout, 0.1, 32), strict=True):
        assert torch.equal(x, y)


def test_strided_inputs(device):
    (q, kv, sink), index, dout = inputs(4, 5, 30, 12, 48, 32, torch.float32, device)
    whole = run(sparse_attention, (q, kv, sink), index, dout, 0.1, 32)
    q_strided, kv_strided = q.transpose(0, 1).contiguous().transpose(0, 1), torch.cat([kv, kv], 1)[:, :48]
    index_strided = index.t().contiguous().t()
    strided = run(sparse_attention, (q_strided, kv_strided, sink), index_strided, dout, 0.1, 32)
    for x, y in zip(whole, strided, strict=True):
        assert torch.equal(x, y)
    same = dout[:1, :1].expand(4, 5, 32)
    expanded = run(sparse_attention, (q, kv, sink), index, same, 0.1, 32)
    for x, y in zip(expanded, run(sparse_attention, (q, kv, sink), index, same.contiguous(), 0.1, 32), strict=True):
        assert torch.equal(x, y)


def test_refusals_name_the_argument(device):
    q, kv = torch.randn(3, 4, 32, device=device), torch.randn(9, 32, device=device)
    index = torch.zeros(3, 5, dtype=torch.int32, device=device)
    sink = torch.zeros(4, device=device)
    for arguments, name in [
        ((q.double(), kv.double(), index, 1.0, 16), "q_TNL"),
        ((q[0], kv, index, 1.0, 16), "q_TNL"),
        ((q.new_zeros(3, 129, 32), kv, index, 1.0, 16), "q_TNL"),
        ((q[..., :24], kv[:, :24], index, 1.0, 16), "q_TNL"),
        ((q, kv[:, :16], index, 1.0, 16), "kv_SL"),
        ((q, kv.half(), index, 1.0, 16), "kv_SL"),
        ((q, kv, index.long(), 1.0, 16), "index_Tk"),
        ((q, kv, index[:2], 1.0, 16), "index_Tk"),
        ((q, kv, index[:, :0], 1.0, 16), "index_Tk"),
        ((q, kv, index, 1.0, 40), "value_width"),
        ((q, kv, index, 1.0, 64), "value_width"),
        ((q, kv, index, 1.0, 16, sink[:3]), "sink_N"),
        ((q, kv, index, 1.0, 16, sink.half()), "sink_N"),
    ]:
        with pytest.raises(ValueError, match=name):
            sparse_attention(*arguments)
    with pytest.raises(ValueError, match="lse_TN"):
        head_probabilities(q, kv, index, torch.zeros(3, 5, device=device), 1.0)


def test_operators_are_well_formed(device):
    (q, kv, sink), index, dout = inputs(2, 3, 10, 4, 32, 16, torch.float32, device)
    q, kv, sink = (x.requires_grad_() for x in (q, kv, sink))
    torch.library.opcheck(_forward, (q, kv, index, sink, 0.1, 16))
    out, lse = (x.detach() for x in _forward(q, kv, index, sink, 0.1, 16))
    torch.library.opcheck(_backward, (dout, q.detach(), kv.detach(), index, out, lse, 0.1))
    q, kv = q.detach().transpose(0, 1).contiguous().transpose(0, 1), kv.detach().T.contiguous().T
    torch.library.opcheck(_backward, (dout, q, kv, index, out, lse, 0.1), test_utils="test_faketensor")


def test_a_sink_of_minus_infinity_beside_no_keys_has_no_gradient(device):
    (q, kv, _), index, dout = inputs(2, 3, 10, 4, 32, 16, torch.float32, device)
    sink = torch.full((3,), -torch.inf, device=device, requires_grad=True)
    out, _ = sparse_attention(q, kv, torch.full_like(index, -1), 0.1, 16, sink)
    out.backward(dout)
    assert torch.equal(sink.grad, torch.zeros_like(sink))


def compiled_equals_eager(backend, tensors, index, dout):
    V = dout.shape[-1]
    compiled = torch.compile(sparse_attention, fullgraph=True, backend=backend)
    eager = run(sparse_attention, tensors, index, dout, 0.1, V)
    for x, y in zip(run(compiled, tensors, index, dout, 0.1, V), eager, strict=True):
        assert torch.equal(x, y)


def test_compiled_whole(device):
    compiled_equals_eager("aot_eager", *inputs(2, 3, 10, 4, 32, 16, torch.float32, device, lengths=[4, 2]))


def test_layer(device):
    """It uses what the layer that it replaces holds, and holds nothing of its own."""
    (q, kv, sink), index, _ = inputs(3, 4, 12, 5, 32, 16, torch.float32, device)
    host = nn.Module()
    host.scale, host.latent_dim, host.sinks = 0.1, 16, nn.Parameter(sink)
    out, lse = layers.SparseLatentAttention.forward(host, q, kv, index)
    expected = sparse_attention(q, kv, index, 0.1, 16, host.sinks)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    layer = layers.SparseLatentAttention
    assert "__init__" not in vars(layer) and not [*layer().parameters(), *layer().buffers()]
    assert layer.has_backward and layer.can_torch_compile
