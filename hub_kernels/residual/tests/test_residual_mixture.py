"""Attention residual against its definition: values, gradients, odd shapes, refusals, determinism, compilation."""

import pytest
import torch
from residual import attn_residual, reference
from residual.mixture import mixture_bwd, mixture_fwd

EPS = 1e-5


def sources_and_score(J, shape, dtype, device, scale=1.0):
    torch.manual_seed(J)
    # Sources of different sizes: the norm must matter.
    sources = [(torch.randn(shape, device=device) * 2.0 ** (j % 5 - 2)).to(dtype) for j in range(J)]
    return sources, torch.randn(shape[-1], device=device) * scale * shape[-1] ** -0.5


def mixed(*inputs):
    return attn_residual(inputs[:-1], inputs[-1], EPS)


def defined(*inputs):
    return reference.attn_residual(inputs[:-1], inputs[-1], EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("J", "shape"),
    [(1, (3, 16)), (2, (1, 1)), (3, (1, 5, 40)), (5, (2, 3, 33)), (8, (7, 64)), (9, (1, 1, 129)), (32, (2, 9))],
)
def test_values_and_gradients(agree, device, dtype, J, shape):
    sources, score = sources_and_score(J, shape, dtype, device)
    agree(mixed, defined, [*sources, score], torch.randn(shape, device=device).to(dtype))


def test_weights_that_saturate(agree, device):
    sources, score = sources_and_score(4, (6, 32), torch.float32, device, scale=1e3)
    agree(mixed, defined, [*sources, score], torch.randn(6, 32, device=device))


def test_equal_sources_and_zero_rows(agree, device):
    source, score = torch.randn(5, 48, device=device), torch.randn(48, device=device)
    source[2] = 0
    sources = [source, source.clone(), source.clone()]
    agree(
        lambda *sources: mixed(*sources, score.to(sources[0].dtype)),
        lambda *sources: defined(*sources, score.to(sources[0].dtype)),
        sources,
        torch.ones_like(source),
    )
    # Whatever the scores, the mixture of equal sources is the same: their gradient is zero but for rounding.
    score.requires_grad_()
    dscore = torch.autograd.grad(mixed(*sources, score), score, torch.ones_like(source))[0]
    assert dscore.norm() <= 1e-6 * source.norm()


def test_an_overflowed_row_stays_alone(device):
    sources, score = sources_and_score(3, (9, 32), torch.float32, device)
    sources[1][4] = torch.inf
    inputs = [x.requires_grad_() for x in (*sources, score)]
    out = mixed(*inputs)
    dsources = torch.autograd.grad(out, inputs[:-1], torch.ones_like(out))
    for rows in (out, *dsources):
        assert rows[4].isnan().any() and not rows[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()


def test_strided_sources_and_gradient(agree, device):
    wide, score = sources_and_score(3, (6, 80), torch.float32, device)
    sources = [wide[0][:, ::2], wide[1].T[:40, :6].T, wide[2][:, 3:43]]
    agree(mixed, defined, [*sources, score[:40]], torch.randn(1, 1, device=device).expand(6, 40))


def test_one_tensor_twice_and_a_frozen_source(device):
    sources, score = sources_and_score(2, (5, 24), torch.float32, device)
    sources[0].requires_grad_()
    got, wanted = (
        torch.autograd.grad(f(sources[0], sources[1], sources[0], score).square().sum(), sources[0])[0]
        for f in (mixed, defined)
    )
    torch.testing.assert_close(got, wanted)


def test_no_rows(device):
    source = torch.empty(0, 16, device=device, requires_grad=True)
    score = torch.ones(16, device=device, requires_grad=True)
    out = mixed(source, source, score)
    assert out.shape == (0, 16)
    assert torch.equal(torch.autograd.grad(out.sum(), score)[0], torch.zeros_like(score))


def test_refusals_name_the_argument(device):
    x, score = torch.ones(3, 8, device=device), torch.ones(8, device=device)
    for sources, c, message in [
        ([], score, "sources: at least one"),
        ([x, x[:2]], score, r"sources\[1\]: shape \(2, 8\)"),
        ([x, x.half()], score, r"sources\[1\]: dtype torch.float16"),
        ([x.double()], score, r"sources\[0\]: dtype torch.float64"),
        ([x], score[:7], r"score_D: shape \(7,\)"),
        ([x], score.half(), "score_D: dtype torch.float16"),
        ([x.repeat(1, 4096)], score, r"sources\[0\]: shape \(3, 32768\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            attn_residual(sources, c, EPS)


def test_operators_are_well_formed(device):
    sources, score = sources_and_score(3, (4, 24), torch.float32, device)
    inputs = [x.requires_grad_() for x in sources]
    torch.library.opcheck(mixture_fwd, (inputs, score.requires_grad_(), EPS))
    out, stats = mixture_fwd(sources, score, EPS)
    torch.library.opcheck(mixture_bwd, (out.detach(), [x.detach() for x in sources], score.detach(), stats))


def compiled_equals_eager(backend, shape, dtype, device):
    sources, score = sources_and_score(3, shape, dtype, device)
    inputs = [x.requires_grad_() for x in (*sources, score)]
    compiled = torch.compile(mixed, fullgraph=True, backend=backend)
    for f in (compiled, mixed):
        out = f(*inputs)
        results = (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))
        if f is compiled:
            first = results
    assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


def test_compiled_whole(device):
    compiled_equals_eager("aot_eager", (4, 24), torch.float32, device)


@pytest.mark.gpu
def test_compiled_by_inductor():
    compiled_equals_eager("inductor", (2, 65, 7168), torch.bfloat16, "cuda")


# Every case compiles its own kernels, so that few of the combinations are run.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("J", "T", "D", "dtype"),
    [
        (2, 1, 7168, torch.bfloat16),
        (8, 8192, 7168, torch.bfloat16),
        (9, 2049, 7168, torch.bfloat16),
        (8, 1000, 7168, torch.float16),
        (8, 1000, 7168, torch.float32),
        (3, 515, 7167, torch.bfloat16),
        (3, 515, 4096, torch.bfloat16),
        (3, 5000, 2304, torch.bfloat16),
        (3, 5000, 100, torch.bfloat16),
        (3, 515, 16384, torch.bfloat16),
        (3, 515, 16384, torch.float32),
    ],
)
def test_large(agree, J, T, D, dtype):
    sources, score = sources_and_score(J, (T, D), dtype, "cuda", scale=3.0)
    agree(mixed, defined, [*sources, score], torch.randn(T, D, device="cuda").to(dtype))


@pytest.mark.gpu
def test_many_sources(agree):
    sources, score = sources_and_score(32, (515, 7168), torch.bfloat16, "cuda")
    agree(mixed, defined, [*sources, score], torch.randn(515, 7168, device="cuda").bfloat16())


@pytest.mark.gpu
def test_same_bits_every_run():
    sources, score = sources_and_score(8, (3001, 7168), torch.bfloat16, "cuda")
    inputs = [x.requires_grad_() for x in (*sources, score)]
    dout = torch.randn(3001, 7168, device="cuda").bfloat16()
    first = None
    for _ in range(30):
        out = mixed(*inputs)
        results = (out, *torch.autograd.grad(out, inputs, dout))
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


@pytest.mark.gpu
def test_captured_in_a_graph():
    sources, score = sources_and_score(5, (300, 7168), torch.bfloat16, "cuda")
    mixed(*sources, score)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixed(*sources, score)
    for source in sources:
        source.copy_(torch.randn_like(source))
    graph.replay()
    assert torch.equal(out, mixed(*sources, score))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count(agree):
    T, D = 300_100, 7168
    sources = [torch.randn(T, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    score = torch.randn(D, device="cuda") * D**-0.5
    inputs = [x.requires_grad_() for x in sources]
    out = mixed(*inputs, score)
    gradients = torch.autograd.grad(out, inputs, out.detach())
    # Rows are independent: the last ones alone give the same bits.
    tail = [x.detach()[-64:].clone().requires_grad_() for x in sources]
    out_tail = mixed(*tail, score)
    gradients_tail = torch.autograd.grad(out_tail, tail, out_tail.detach())
    assert torch.equal(out[-64:], out_tail)
    assert all(torch.equal(a[-64:], b) for a, b in zip(gradients, gradients_tail, strict=True))
    agree(mixed, defined, [*(x.detach() for x in tail), score], out_tail.detach())
