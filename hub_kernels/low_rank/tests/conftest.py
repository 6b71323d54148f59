"""Errors against float64, on memory that holds nothing useful before."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned():
    """New memory holds NaN until something is written, so that no test passes by what was there before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def relative_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """||x - truth|| / ||truth|| in float64, or ||x|| where the truth is zero; NaN stays NaN."""
    scale = truth.double().norm()
    return ((x.double() - truth.double()).norm() / (scale if scale > 0 else 1)).item()


@pytest.fixture
def agree():
    """check(function, definition, inputs, dout): the output and every gradient err, against the definition in float64,
    at most twice as much as the definition in the dtype of the inputs (fp32 may be exact there by chance: a few units
    in its last place are allowed in any case)."""

    def run(function, inputs, dout):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = function(*inputs)
        return out, *torch.autograd.grad(out, inputs, dout)

    def check(function, definition, inputs, dout):
        ours, plain = run(function, inputs, dout), run(definition, inputs, dout)
        truth = run(definition, [x.double() for x in inputs], dout.double())
        for i, (x, p, t) in enumerate(zip(ours, plain, truth, strict=True)):
            name = "output" if i == 0 else f"gradient of input {i - 1}"
            assert x.shape == p.shape and x.dtype == p.dtype, name
            # The interpreter truncates to bfloat16 where the GPU rounds: up to one unit in the last place.
            truncated = not torch.cuda.is_available() and x.dtype == torch.bfloat16
            slack = torch.finfo(torch.bfloat16).eps if truncated else 8 * torch.finfo(torch.float32).eps
            error, allowed = relative_error(x, t), 2 * relative_error(p, t) + slack
            # A NaN compares as false and so fails.
            assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"

    return check
