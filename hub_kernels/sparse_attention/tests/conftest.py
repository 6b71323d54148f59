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
    """check(name, x, truth, bound): x errs, against float64, at most `bound` of the truth's norm."""

    def check(name: str, x: torch.Tensor, truth: torch.Tensor, bound: float) -> None:
        assert x.shape == truth.shape, name
        error = relative_error(x, truth)
        assert error <= bound, f"{name}: error {error:.2e}, allowed {bound:.2e}"

    return check
