"""What compute-sanitizer watches on a GPU runs, here in Triton's interpreter where there is none."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
# Minutes together in the interpreter.
SLOW = ("kda", "sparse_attention", "latent_moe", "residual")


@pytest.mark.parametrize(
    "package", ["linear_cross_entropy", "low_rank", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_every_kernel_runs(package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    importlib.import_module("sanitize").PACKAGES[package]()
    assert f"{package}: done" in capsys.readouterr().out
