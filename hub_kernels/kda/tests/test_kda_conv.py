"""The short convolution of q, k and v against its definition, with gradients."""

import pytest
import torch
from kda.conv import short_conv
from kda.reference import short_conv_reference

BOUNDS = {
    "one document": None,
    "packed": [0, 5, 5, 6, 31, 38, 38],
    "single tokens": [0, 1, 2, 3, 4],
    "ends in an empty one": [0, 0, 9, 9],
}


@pytest.fixture(autouse=True)
def few_programs(device, monkeypatch):
    """The interpreter takes milliseconds per program and token; on a GPU the tiles stay as they are."""
    if device == "cpu":
        monkeypatch.setattr("kda.conv.FORWARD_WAVE", 2)
        monkeypatch.setattr("kda.conv.BACKWARD_WAVE", 2)


def inputs(M, widths, W, dtype, device, documents=None, seed=0):
    """Streams whose widths differ, weights, upstream gradients and, for `documents`, tails."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    xs, dys = ([draw(M, P) for P in widths] for _ in range(2))
    weights = [draw(P, W, dtype=torch.float32) / W**0.5 for P in widths]
    tails = None if documents is None else [draw(documents, W - 1, P) for P in widths]
    return xs, weights, tails, dys


def run(function, xs, weights, tails, dys, cu_seqlens, dtype=None):
    """Outputs, and gradients of streams, weights and tails; all in `dtype` if one is given."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in [*xs, *weights, *(tails or [])]]
    n = len(xs)
    ys = function(leaves[:n], leaves[n : 2 * n], cu_seqlens, leaves[2 * n :] if tails else None)
    gradients = torch.autograd.grad(ys, leaves, [dy.to(dtype or dy.dtype) for dy in dys])
    return [*ys, *gradients]


def compare(as_accurate, xs, weights, tails, dys, cu_seqlens):
    ours = run(short_conv, xs, weights, tails, dys, cu_seqlens)
    plain = run(short_conv_reference, xs, weights, tails, dys, cu_seqlens)
    truth = run(short_conv_reference, xs, weights, tails, dys, cu_seqlens, torch.float64)
    for i, three in enumerate(zip(ours, plain, truth, strict=True)):
        as_accurate(f"result {i}", *three)


@pytest.mark.parametrize("with_tails", [False, True])
@pytest.mark.parametrize("case", BOUNDS)
def test_documents(as_accurate, device, case, with_tails):
    bounds = BOUNDS[case]
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=device, dtype=torch.int32)
    M, documents = (23, 1) if bounds is None else (bounds[-1], len(bounds) - 1)
    xs, weights, tails, dys = inputs(M, (40, 24, 17), 4, torch.float32, device, documents if with_tails else None)
    compare(as_accurate, xs, weights, tails, dys, cu_seqlens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("M", [1, 2, 3, 33])
def test_lengths_and_dtypes(as_accurate, device, M, dtype):
    compare(as_accurate, *inputs(M, (48, 40), 4, dtype, device), None)


@pytest.mark.parametrize("W", [2, 3, 5, 8])
def test_widths_of_the_window(as_accurate, device, W):
    cu_seqlens = torch.tensor([0, 2, 19, 31], device=device)
    compare(as_accurate, *inputs(31, (16,), W, torch.float32, device, documents=3), cu_seqlens)


@pytest.mark.slow
def test_many_tiles_and_blocks_of_channels(as_accurate, device, monkeypatch):
    """Tiles of one step, so that every boundary between tiles is crossed by taps and their gradients."""
    monkeypatch.setattr("kda.conv.LONGEST_TILE", 8)
    cu_seqlens = torch.tensor([0, 7, 8, 10, 27], device=device)
    xs, weights, tails, dys = inputs(27, (1030, 520), 4, torch.float32, device, documents=4)
    compare(as_accurate, xs, weights, tails, dys, cu_seqlens)
    compare(as_accurate, xs, weights, None, dys, None)


def test_strided_rows_and_expanded_gradients(as_accurate, device):
    """Slices of one projection are taken as they are; gradients of a plain sum are expanded numbers."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(21, 96, generator=generator).to(device)
    xs = whole.split([32, 48, 16], dim=1)
    weights = [torch.randn(x.shape[1], 4, generator=generator).to(device) for x in xs]
    dys = [torch.ones((), device=device).expand(x.shape) for x in xs]
    compare(as_accurate, xs, weights, None, dys, None)
    columns = [x.t().contiguous().t() for x in xs]
    compare(as_accurate, columns, weights, None, dys, None)


def test_documents_do_not_see_each_other(device):
    """NaN in one document, and in the tail of an empty one, stays there."""
    xs, weights, tails, dys = inputs(20, (16, 16), 4, torch.float32, device, documents=4)
    for x, tail in zip(xs, tails, strict=True):
        x[6:13] = torch.nan
        tail[2] = torch.nan
    cu_seqlens = torch.tensor([0, 6, 13, 13, 20], device=device)
    results = run(short_conv, xs, weights, tails, dys, cu_seqlens)
    for streams in (results[:2], results[2:4]):
        for result in streams:
            assert result[:6].isfinite().all() and result[13:].isfinite().all()
            assert result[6:13].isnan().all()
    for dtail in results[6:]:
        assert dtail[[0, 3]].isfinite().all() and (dtail[2] == 0).all()


def test_every_output_is_written(device, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
    cu_seqlens = torch.tensor([0, 7, 7, 37], device=device)
    for result in run(short_conv, *inputs(37, (33, 20, 7), 4, torch.float32, device, documents=3), cu_seqlens):
        assert result.isfinite().all()


def test_no_tokens(device):
    xs, weights, _, dys = inputs(0, (8, 8), 4, torch.float32, device)
    y_0, y_1, dx_0, dx_1, dw_0, dw_1 = run(short_conv, xs, weights, None, dys, None)
    assert all(x.shape == (0, 8) for x in (y_0, y_1, dx_0, dx_1))
    assert (dw_0 == 0).all() and (dw_1 == 0).all()


def test_one_output_used(as_accurate, device):
    """Gradients of the unused streams are zero."""
    xs, weights, _, dys = inputs(9, (8, 8), 4, torch.float32, device)
    xs = [x.requires_grad_() for x in xs]
    y_0, _ = short_conv(xs, weights)
    dx_0, dx_1 = torch.autograd.grad(y_0, xs, dys[0])
    assert (dx_0 != 0).all() and (dx_1 == 0).all()


def test_prefix_and_rest(device):
    """A document in two pieces, the second with the first's last inputs as its tail, gives the same outputs."""
    xs, weights, _, _ = inputs(17, (24, 8), 4, torch.float32, device)
    whole = short_conv(xs, weights)
    rest = short_conv([x[6:] for x in xs], weights, None, [x[None, 3:6] for x in xs])
    for y, y_rest in zip(whole, rest, strict=True):
        torch.testing.assert_close(y[6:], y_rest, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("xs", lambda a: a.update(xs=a["xs"] * 2)),
        ("xs", lambda a: a.update(xs=[a["xs"][0], a["xs"][1][:5]])),
        ("xs", lambda a: a.update(xs=[a["xs"][0], a["xs"][1].half()])),
        ("xs", lambda a: a.update(xs=[x.double() for x in a["xs"]])),
        ("weights", lambda a: a.update(weights=a["weights"][:1])),
        ("weights", lambda a: a.update(weights=[w.bfloat16() for w in a["weights"]])),
        ("weights", lambda a: a.update(weights=[w[:, :1] for w in a["weights"]])),
        ("cu_seqlens", lambda a: a.update(cu_seqlens=torch.zeros(1, dtype=torch.int32))),
        ("cu_seqlens", lambda a: a.update(cu_seqlens=torch.tensor([0.0, 7.0]))),
        ("tails", lambda a: a.update(tails=a["tails"][:1])),
        ("tails", lambda a: a.update(tails=[tail[:1] for tail in a["tails"]])),
        ("tails must be where", lambda a: a["tails"].__setitem__(1, a["tails"][1].to("meta"))),
        ("cu_seqlens must be where", lambda a: a.update(cu_seqlens=a["cu_seqlens"].to("meta"))),
    ],
)
def test_bad_arguments(device, name, change):
    xs, weights, tails, _ = inputs(7, (8, 16), 4, torch.float32, device, documents=2)
    arguments = {"xs": xs, "weights": weights, "tails": list(tails)}
    arguments["cu_seqlens"] = torch.tensor([0, 3, 7], device=device)
    change(arguments)
    with pytest.raises(ValueError, match=name):
        short_conv(**arguments)


@pytest.mark.gpu
def test_same_bits(device):
    cu_seqlens = torch.tensor([0, 700, 700, 701, 3000], device=device)
    arguments = inputs(3000, (1536, 1536, 1024), 4, torch.bfloat16, device, documents=4)
    first = run(short_conv, *arguments, cu_seqlens)
    for _ in range(29):
        for x, y in zip(first, run(short_conv, *arguments, cu_seqlens), strict=True):
            assert torch.equal(x, y)


def test_launches_on_the_gpu_of_the_inputs(device, monkeypatch):
    """The current GPU may be another one, as where a model is spread over the GPUs of one process."""
    entered, device_of = [], torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: entered.append(x.shape) or device_of(x))
    run(short_conv, *inputs(9, (8,), 4, torch.float32, device), None)
    assert entered == [(9, 8), (9, 8)]


@pytest.mark.gpu
def test_compiles_as_one_graph(device):
    cu_seqlens = torch.tensor([0, 700, 700, 701, 1000], device=device)
    arguments = inputs(1000, (512, 512, 256), 4, torch.bfloat16, device, documents=4)
    eager = run(short_conv, *arguments, cu_seqlens)
    compiled = run(torch.compile(short_conv, fullgraph=True), *arguments, cu_seqlens)
    for x, y in zip(eager, compiled, strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 2, 3, 15, 63, 64, 65, 513])
def test_lengths_in_bf16(as_accurate, device, M):
    """The interpreter rounds to bf16 by cutting off; errors show on a GPU only."""
    compare(as_accurate, *inputs(M, (768, 640), 4, torch.bfloat16, device), None)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1000, 8192])
def test_model_width(as_accurate, device, M):
    cu_seqlens = torch.tensor([0, 1, 400, 400, M], device=device)
    xs, weights, tails, dys = inputs(M, (12288,) * 3, 4, torch.bfloat16, device, documents=4)
    compare(as_accurate, xs, weights, tails, dys, cu_seqlens)
    compare(as_accurate, xs, weights, None, dys, None)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device):
    """1M tokens of 24 heads: the last tokens agree with a short run of their own."""
    M, P = 2**20, 24 * 128
    x = torch.randn(M, P, device=device, dtype=torch.bfloat16)
    weight = torch.randn(P, 4, device=device)
    (y,) = short_conv([x], [weight])
    (last,) = short_conv([x[-40:].clone()], [weight])
    assert torch.equal(y[-37:], last[3:])
