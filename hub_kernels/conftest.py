"""Makes the packages importable, on a GPU where there is one, else in Triton's interpreter (../conftest.py), and holds
what their tests measure errors with."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

for file in sorted(Path(__file__).parent.glob("*/torch-ext/*/__init__.py")):
    folder = file.parent
    sys.path.insert(0, str(folder.parent))
    # The model's loader finds this copy: torch destroys the operators of a first copy when a second one defines them.
    sys.modules[f"latentmoe_{folder.name}_source"] = importlib.import_module(folder.name)


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
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


@pytest.fixture
def as_accurate():
    """check(name, ours, plain, truth): ours errs, against float64, at most twice as much as plain torch.

    Plain torch in fp32 is sometimes exact by chance; a few units in fp32's last place are allowed in any case.
    """

    def check(name: str, ours: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor) -> None:
        assert ours.shape == plain.shape and ours.dtype == plain.dtype, name
        error, allowed = relative_error(ours, truth), 2 * relative_error(plain, truth)
        # A NaN compares as false and so fails.
        assert error <= allowed + 8 * torch.finfo(torch.float32).eps, (
            f"{name}: error {error:.2e}, allowed {allowed:.2e}"
        )

    return check


@pytest.fixture
def within():
    """check(name, x, truth, bound, scale=truth): ||x - truth|| is at most `bound` times the norm of the scale."""

    def check(name: str, x: torch.Tensor, truth: torch.Tensor, bound: float, scale: torch.Tensor | None = None) -> None:
        assert x.shape == truth.shape, name
        norm = (truth if scale is None else scale).double().norm().item()
        error = (x.double() - truth.double()).norm().item()
        assert error <= bound * norm, f"{name}: error {error:.2e}, allowed {bound:.0e} of {norm:.2e}"

    return check
