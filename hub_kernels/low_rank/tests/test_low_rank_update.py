"""The update against its definition: values, gradients, odd shapes, refusals, what is kept, compilation, layer."""

import pytest
import torch
from low_rank import add_low_rank, layers, products, reference, update
from torch import nn
from torch.utils.checkpoint import checkpoint

SCALING = 0.7
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def updated(y, x, a, b):
    return add_low_rank(y, x, a, b, SCALING)


def defined(y, x, a, b):
    return reference.add_low_rank(y, x, a, b, SCALING)


def inputs_of(rows, K, N, r, dtype, device, factors=FP32):
    """y, x, a, b for a layer of K inputs and N outputs; the update is as large as y."""
    generator = torch.Generator(device).manual_seed(K + N + r)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    a, b = normal(r, K) * K**-0.5, normal(N, r) * r**-0.5
    return [normal(*rows, N).to(dtype), normal(*rows, K).to(dtype), a.to(factors), b.to(factors)]


def check(agree, inputs):
    agree(updated, defined, inputs, torch.randn_like(inputs[0]))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(
    ("rows", "K", "N", "r"),
    [((1,), 16, 32, 1), ((2, 35), 48, 24, 16), ((67,), 33, 71, 5), ((3,), 1, 130, 17), ((), 40, 8, 3)],
)
def test_values_and_gradients(agree, device, dtype, rows, K, N, r):
    check(agree, inputs_of(rows, K, N, r, dtype, device))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("r", [32, 40, 128])
def test_higher_ranks(agree, device, dtype, r):
    check(agree, inputs_of((9,), 72, 40, r, dtype, device))


@pytest.mark.parametrize("dtype", [pytest.param(FP32, marks=pytest.mark.slow), BF16])
def test_sums_in_several_programs(agree, device, dtype, monkeypatch):
    """Columns of a product and rows of a gradient are split where there would be few programs."""
    monkeypatch.setattr(products, "LEAST_COLUMNS", 70)
    monkeypatch.setattr(products, "LEAST_ROWS", 40)
    check(agree, inputs_of((150,), 300, 260, 4, dtype, device))


@pytest.mark.parametrize("factors", [BF16, FP16])
def test_factors_of_other_dtypes(agree, device, factors):
    check(agree, inputs_of((7,), 24, 48, 4, BF16, device, factors))


def test_masters_are_not_rounded(device):
    """What bf16 factors would make of a sum that cancels."""
    x = torch.ones(2, 64, dtype=BF16, device=device)
    a = torch.full((1, 64), 1.0, device=device)
    a[:, 1::2] = -1 + 2.0**-20
    out = add_low_rank(torch.zeros(2, 8, dtype=BF16, device=device), x, a, torch.ones(8, 1, device=device), 2.0**15)
    torch.testing.assert_close(out, torch.ones_like(out))


def test_rows_stay_apart(device):
    y, x, a, b = inputs_of((5,), 24, 16, 3, FP32, device)
    x[2] = torch.nan
    out = updated(y, x, a, b)
    assert out[2].isnan().all() and not out[[0, 1, 3, 4]].isnan().any()


def test_strided_tensors(agree, device):
    y, x, a, b = inputs_of((12,), 80, 64, 4, FP32, device)
    agree(
        updated,
        defined,
        [y[:, 3:35], x.T[:40].T, a[:, ::2], b[::2]],
        torch.randn(1, 1, device=device).expand(12, 32),
    )


@pytest.mark.parametrize("frozen", [(0,), (1,), (2, 3), (1, 2), (0, 1, 2)])
def test_frozen_inputs(device, frozen):
    results = []
    for function in (updated, defined):
        inputs = inputs_of((6,), 24, 32, 4, FP32, device)
        trained = [x.requires_grad_() for i, x in enumerate(inputs) if i not in frozen]
        results.append(torch.autograd.grad(function(*inputs).square().sum(), trained))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_y_is_left_as_it_is_and_its_gradient_not_copied(device):
    y, x, a, b = (x.requires_grad_() for x in inputs_of((6,), 24, 32, 4, FP32, device))
    before, dout = y.detach().clone(), torch.randn(6, 32, device=device)
    out = updated(y, x, a, b)
    assert torch.equal(y, before)
    assert torch.autograd.grad(out, y, dout)[0].data_ptr() == dout.data_ptr()


def test_little_is_kept(device):
    """Of 16-bit rows no fp32 copy: x itself, the factors, and the low rows."""
    inputs = [x.requires_grad_() for x in inputs_of((200,), 96, 128, 4, BF16, device)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        updated(*inputs)
    new = [x for x in kept if all(x.data_ptr() != y.data_ptr() for y in inputs)]
    assert [x.shape for x in new] == [(3, 200, 16)] and len(kept) == 4


def test_recomputed_in_a_checkpoint(device):
    inputs = [x.requires_grad_() for x in inputs_of((6,), 24, 32, 4, FP32, device)]
    wanted = torch.autograd.grad(updated(*inputs).square().sum(), inputs)
    got = torch.autograd.grad(checkpoint(updated, *inputs, use_reentrant=False).square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_no_rows(device):
    y, x, a, b = (x.requires_grad_() for x in inputs_of((0,), 24, 32, 4, FP32, device))
    out = updated(y, x, a, b)
    assert out.shape == (0, 32)
    for gradient, factor in zip(torch.autograd.grad(out.sum(), (a, b)), (a, b), strict=True):
        assert torch.equal(gradient, torch.zeros_like(factor))


def test_refusals_name_the_argument(device):
    y, x, a, b = inputs_of((3,), 16, 24, 4, FP32, device)
    for inputs, message in [
        ((y.double(), x, a, b), "y: dtype torch.float64 is not"),
        ((y, x.bfloat16(), a, b), "x: dtype torch.bfloat16 should be torch.float32"),
        ((y, x[:2], a, b), r"x: shape \(2, 16\) should be \(3, 16\)"),
        ((y, x, a[:, :15], b), r"a_rI: shape \(4, 15\) should end in \(4, 16\)"),
        ((y, x, a[0], b), r"a_rI: shape \(16,\) needs two axes"),
        ((y, x, a.repeat(33, 1), b), r"a_rI: shape \(132, 16\) needs two axes, the first 1 to 128"),
        ((y, x, a, b[:, :3]), r"b_Or: shape \(24, 3\)"),
        ((y, x, a.double(), b), "a_rI: dtype torch.float64"),
        ((y, x, a, b.int()), "b_Or: dtype torch.int32"),
        ((y[0, 0], x, a, b), r"y: shape \(\) needs a last axis"),
        ((y, x[0, 0], a, b), r"x: shape \(\) needs a last axis"),
    ]:
        with pytest.raises(ValueError, match=message):
            updated(*inputs)


def test_operators_are_well_formed(device):
    y, x, a, b = inputs_of((7,), 24, 32, 4, FP32, device)
    torch.library.opcheck(update.update_fwd, (*(t.clone().requires_grad_() for t in (y, x, a, b)), SCALING))
    _, low = update.update_fwd(y, x, a, b, SCALING)
    for needs in [(True, True, True), (False, False, True), (True, False, False)]:
        torch.library.opcheck(update.update_bwd, (y, x, a, b, low, SCALING, *needs))


def compiled_equals_eager(backend, inputs):
    inputs = [x.requires_grad_() for x in inputs]
    compiled = torch.compile(updated, fullgraph=True, backend=backend)
    results = []
    for function in (compiled, updated):
        out = function(*inputs)
        results.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiled_whole(device):
    compiled_equals_eager("aot_eager", inputs_of((2, 7), 24, 32, 4, FP32, device))


class Update(nn.Module):
    """The layer of a model, as `kernelize` finds it."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b, self.scaling = nn.Parameter(a), nn.Parameter(b), SCALING


def test_layer_takes_the_place_of_a_forward(device):
    y, x, a, b = inputs_of((5,), 24, 32, 4, FP32, device)
    taken = layers.LowRankUpdate.forward(Update(a, b), y, x)
    torch.testing.assert_close(taken, defined(y, x, a, b))
    assert layers.LowRankUpdate.has_backward and layers.LowRankUpdate.can_torch_compile


@pytest.mark.gpu
def test_compiled_by_inductor():
    compiled_equals_eager("inductor", inputs_of((2, 65), 7168, 1536, 16, BF16, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "K", "N", "r", "dtype"),
    [
        (1, 7168, 12288, 16, BF16),
        (8192, 7168, 12288, 16, BF16),
        (8193, 12288, 7168, 8, BF16),
        (2049, 7168, 33792, 32, BF16),
        (1000, 7168, 1536, 128, BF16),
        (515, 7167, 1535, 64, BF16),
        (20000, 3584, 7168, 16, BF16),
        (1000, 7168, 1536, 16, FP32),
        (515, 7168, 1535, 128, FP32),
        (1000, 7168, 1536, 16, FP16),
    ],
)
def test_large(agree, T, K, N, r, dtype):
    check(agree, inputs_of((T,), K, N, r, dtype, "cuda"))


@pytest.mark.gpu
def test_same_bits_every_run():
    inputs = [x.requires_grad_() for x in inputs_of((3001,), 7168, 1536, 16, BF16, "cuda")]
    dout = torch.randn_like(inputs[0])
    first = None
    for _ in range(30):
        out = updated(*inputs)
        results = (out, *torch.autograd.grad(out, inputs, dout))
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count(agree):
    inputs = inputs_of((1_000_003,), 2304, 2176, 16, BF16, "cuda")
    y, x = (t.requires_grad_() for t in inputs[:2])
    out = updated(y, x, *inputs[2:])
    dx = torch.autograd.grad(out, x, out.detach())[0]
    tail = [y.detach()[-70:].clone(), x.detach()[-70:].clone().requires_grad_(), *inputs[2:]]
    out_tail = defined(*tail)
    dx_tail = torch.autograd.grad(out_tail, tail[1], out[-70:].detach())[0]
    torch.testing.assert_close(out[-70:], out_tail)
    torch.testing.assert_close(dx[-70:], dx_tail)
