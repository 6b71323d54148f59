"""The gated activations alone against their definition: values, gradients, strided rows, refusals, compilation."""

import pytest
import torch
from latent_moe import glu, situ_glu, swiglu
from latent_moe.reference import activation_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# A GPU's exponential errs by two units in the last place and by the rounding of its argument, up to 6e-7 for exp(-10).
EXPONENTIALS = 2e-6
CASES = {
    "situ": (lambda g, u: situ_glu(g, u, 4.0, 25.0), lambda g, u: activation_reference(g, u, "situ", 4.0, 25.0)),
    "up as it is": (lambda g, u: situ_glu(g, u), lambda g, u: activation_reference(g, u, "situ", 1.0, None)),
    "silu": (swiglu, lambda g, u: activation_reference(g, u, "silu", None, None)),
}


@pytest.fixture(autouse=True)
def poisoned():
    """New memory holds NaN until something is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs_of(shape, dtype, device):
    generator = torch.Generator(device).manual_seed(shape[-1])
    return [(4 * torch.randn(*shape, generator=generator, device=device)).to(dtype) for _ in range(2)]


def results(function, inputs, dout):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out, *torch.autograd.grad(out, leaves, dout)


def check(case, inputs, dout):
    """Errors against float64 are at most twice those of the definition in the same dtype."""
    function, definition = CASES[case]
    ours, plain = results(function, inputs, dout), results(definition, inputs, dout)
    truth = results(definition, [x.double() for x in inputs], dout.double())
    for got, other, true in zip(ours, plain, truth, strict=True):
        assert got.shape == other.shape and got.dtype == other.dtype
        errors = [((x.double() - true).norm() / true.norm().clamp_min(1e-30)).item() for x in (got, other)]
        # The interpreter truncates to bfloat16 where the GPU rounds: up to one unit in the last place.
        truncated = not torch.cuda.is_available() and got.dtype == BF16
        assert errors[0] <= 2 * errors[1] + (2**-7 if truncated else 1e-6), errors


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (2, 3, 100), (3, 1500), (40,)])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(device, case, shape, dtype):
    check(case, inputs_of(shape, dtype, device), torch.randn(shape, device=device).to(dtype))


def test_halves_of_one_tensor_are_not_copied(device, monkeypatch):
    both = inputs_of((2, 7, 96), FP32, device)[0]
    seen, launch = [], glu._launch

    def spy(kernel, *arguments):
        seen.append([x.data_ptr() for x in arguments[:2]])
        launch(kernel, *arguments)

    monkeypatch.setattr(glu, "_launch", spy)
    halves = both.chunk(2, dim=-1)
    check("situ", halves, torch.randn(2, 7, 48, device=device))
    assert seen == [[half.data_ptr() for half in halves]] * 2


def test_other_strides(device):
    gate, up = inputs_of((12, 40), FP32, device)
    check("situ", (gate[:, ::2], up.T[:20].T), torch.randn(1, 1, device=device).expand(12, 20))


def test_ends(device):
    gate = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4]], device=device)
    inputs, dout = (gate, gate.flip(1)), torch.ones_like(gate)
    function, definition = CASES["situ"]
    truth = results(definition, [x.double() for x in inputs], dout.double())
    for got, true in zip(results(function, inputs, dout), truth, strict=True):
        # Absolutely: where tanh is 1, its derivative of 1e-19 is zero in the definition even in float64.
        torch.testing.assert_close(got.double(), true, rtol=EXPONENTIALS, atol=1e-15)


def test_small_derivatives_are_exact(device):
    """One gate, so that nothing hides its error; 1 - tanh(g)^2 would lose two digits."""
    gate = torch.tensor([5.0], device=device)
    _, got, _ = results(CASES["up as it is"][0], (gate, torch.ones_like(gate)), torch.ones_like(gate))
    s, t = gate.double().sigmoid(), gate.double().tanh()
    truth = gate.double().cosh() ** -2 * s + t * s * (-gate.double()).sigmoid()
    torch.testing.assert_close(got.double(), truth, rtol=EXPONENTIALS, atol=0)


def test_no_rows(device):
    empty = torch.empty(0, 8, device=device, requires_grad=True)
    assert torch.autograd.grad(swiglu(empty, empty).sum(), empty)[0].shape == (0, 8)


def test_refusals_name_the_argument(device):
    x = torch.ones(3, 8, device=device)
    for inputs, message in [
        ((x.double(), x), "gate: dtype torch.float64"),
        ((x[:, :0], x[:, :0]), r"gate: shape \(3, 0\)"),
        ((x, x[:2]), r"up: torch.float32 \(2, 8\) should be torch.float32 \(3, 8\)"),
        ((x, x.half()), "up: torch.float16"),
    ]:
        with pytest.raises(ValueError, match=message):
            situ_glu(*inputs)


def test_operators_are_well_formed(device):
    gate, up = (x.requires_grad_() for x in inputs_of((7, 24), FP32, device))
    for linear_beta in (None, 25.0):
        torch.library.opcheck(glu.glu_fwd, (gate, up, "situ", 4.0, linear_beta))
    torch.library.opcheck(glu.glu_bwd, (gate.detach(), gate.detach(), up.detach(), "silu", 1.0, None))


def compiled_equals_eager(backend, inputs):
    function = CASES["situ"][0]
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    first, second = (results(f, inputs, torch.ones_like(inputs[0])) for f in (compiled, function))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_compiled_whole(device):
    compiled_equals_eager("aot_eager", inputs_of((3, 24), FP32, device))


@pytest.mark.gpu
def test_compiled_by_inductor():
    compiled_equals_eager("inductor", inputs_of((2, 65, 3072), BF16, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [(8192, 3072), (1001, 33792), (515, 1407)])
@pytest.mark.parametrize("case", CASES)
def test_large(case, shape, dtype):
    check(case, inputs_of(shape, dtype, "cuda"), torch.randn(shape, device="cuda").to(dtype))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    gate, up = (torch.randn(700_001, 3072, device="cuda", dtype=BF16) for _ in range(2))
    out, dgate, dup = results(CASES["situ"][0], (gate, up), gate)
    tail = results(CASES["situ"][0], (gate[-8:].clone(), up[-8:].clone()), gate[-8:].clone())
    assert all(torch.equal(a[-8:], b) for a, b in zip((out, dgate, dup), tail, strict=True))
