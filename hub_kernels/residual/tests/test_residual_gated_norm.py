"""Gated RMSNorm against its definition: values, gradients, odd shapes, refusals, determinism, compilation, layer."""

import pytest
import torch
from residual import gated_rms_norm, layers, reference
from residual.gated_norm import gated_norm_bwd, gated_norm_fwd
from torch import nn

EPS = 1e-5


def normed(x, gate, weight):
    return gated_rms_norm(x, gate, weight, EPS)


def defined(x, gate, weight):
    return reference.gated_rms_norm(x, gate, weight, EPS)


def inputs_of(shape, dtype, device, gate_dtype=None, weight_dtype=torch.float32):
    torch.manual_seed(shape[-1])
    x = torch.randn(shape, device=device).to(dtype)
    gate = (4 * torch.randn(shape, device=device)).to(gate_dtype or dtype)
    return [x, gate, (1 + torch.randn(shape[-1], device=device) / 4).to(weight_dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 128), (2, 35, 3, 128), (67, 64), (5, 33), (3, 1), (2, 3, 1000)])
def test_values_and_gradients(agree, device, dtype, shape):
    agree(normed, defined, inputs_of(shape, dtype, device), torch.randn(shape, device=device).to(dtype))


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.float16])
def test_mixed_dtypes(agree, device, gate_dtype):
    inputs = inputs_of((9, 48), torch.bfloat16, device, gate_dtype, torch.bfloat16)
    agree(normed, defined, inputs, torch.randn(9, 48, device=device).bfloat16())


def test_gates_at_their_ends_and_zero_rows(agree, device):
    x, gate, weight = inputs_of((6, 64), torch.float32, device)
    gate[0], gate[1], gate[2], gate[3], x[4] = 90, -90, 30, -30, 0
    agree(normed, defined, [x, gate, weight], torch.randn(6, 64, device=device))


def test_strided_inputs_and_gradient(agree, device):
    x, gate, weight = inputs_of((12, 80), torch.float32, device)
    dout = torch.randn(1, 1, device=device).expand(12, 40)
    agree(normed, defined, [x[:, ::2], gate.T[3:43].T, weight[::2]], dout)


def test_no_rows(device):
    x = torch.empty(0, 16, device=device)
    weight = torch.ones(16, device=device, requires_grad=True)
    out = normed(x, x, weight)
    assert out.shape == (0, 16)
    assert torch.equal(torch.autograd.grad(out.sum(), weight)[0], torch.zeros_like(weight))


def test_refusals_name_the_argument(device):
    x, weight = torch.ones(3, 8, device=device), torch.ones(8, device=device)
    for inputs, message in [
        ((x.double(), x, weight), "x: dtype torch.float64"),
        ((x, x.long(), weight), "gate: dtype torch.int64"),
        ((x, x[:2], weight), r"gate: shape \(2, 8\)"),
        ((x, x, weight[:7]), r"weight_K: shape \(7,\)"),
        ((x.repeat(1, 2048), x, weight), r"x: shape \(3, 16384\)"),
        ((x, x, weight.double()), "weight_K: dtype torch.float64"),
    ]:
        with pytest.raises(ValueError, match=message):
            normed(*inputs)


def test_operators_are_well_formed(device):
    inputs = inputs_of((7, 24), torch.float32, device)
    torch.library.opcheck(gated_norm_fwd, (*(x.requires_grad_() for x in inputs), EPS))
    x, gate, weight = (x.detach() for x in inputs)
    torch.library.opcheck(gated_norm_bwd, (x, x, gate, weight, EPS))


def compiled_equals_eager(backend, shape, dtype, device):
    inputs = [x.requires_grad_() for x in inputs_of(shape, dtype, device)]
    compiled = torch.compile(normed, fullgraph=True, backend=backend)
    for f in (compiled, normed):
        out = f(*inputs)
        results = (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))
        if f is compiled:
            first = results
    assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


def test_compiled_whole(device):
    compiled_equals_eager("aot_eager", (7, 24), torch.float32, device)


class HeadNorm(nn.Module):
    """The layer of a model, as `kernelize` finds it."""

    def __init__(self, K):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, K))
        self.eps = EPS

    def forward(self, x, gate):
        return defined(x, gate, self.weight)


def test_layer_takes_the_place_of_a_forward(device):
    norm = HeadNorm(32).to(device)
    x, gate, _ = inputs_of((5, 32), torch.float32, device)
    wanted = norm(x, gate)
    taken = layers.GatedHeadNorm.forward(norm, x, gate)
    torch.testing.assert_close(taken, wanted)
    wanted.sum().backward()
    plain = norm.weight.grad.clone()
    norm.weight.grad = None
    taken.sum().backward()
    torch.testing.assert_close(norm.weight.grad, plain)
    assert layers.GatedHeadNorm.has_backward and layers.GatedHeadNorm.can_torch_compile


@pytest.mark.gpu
def test_compiled_by_inductor():
    compiled_equals_eager("inductor", (65, 96, 128), torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(8192, 96, 128), (1000, 24, 64), (15, 7, 127), (515, 7168), (65, 8192)])
def test_large(agree, dtype, shape):
    agree(normed, defined, inputs_of(shape, dtype, "cuda"), torch.randn(shape, device="cuda").to(dtype))


@pytest.mark.gpu
def test_same_bits_every_run():
    inputs = [x.requires_grad_() for x in inputs_of((3001, 96, 128), torch.bfloat16, "cuda")]
    dout = torch.randn(3001, 96, 128, device="cuda").bfloat16()
    first = None
    for _ in range(30):
        out = normed(*inputs)
        results = (out, *torch.autograd.grad(out, inputs, dout))
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    x, gate, weight = inputs_of((180_000, 96, 128), torch.bfloat16, "cuda")
    tail = [y[-8:].clone().requires_grad_() for y in (x, gate)]
    inputs = [y.requires_grad_() for y in (x, gate)]
    out = normed(*inputs, weight)
    gradients = torch.autograd.grad(out, inputs, out.detach())
    # Rows are independent: the last ones alone give the same bits.
    out_tail = normed(*tail, weight)
    gradients_tail = torch.autograd.grad(out_tail, tail, out_tail.detach())
    assert torch.equal(out[-8:], out_tail)
    assert all(torch.equal(a[-8:], b) for a, b in zip(gradients, gradients_tail, strict=True))
