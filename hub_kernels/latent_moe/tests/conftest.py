"""Makes the package importable, and chooses Triton's interpreter where there is no GPU."""

import os
import sys
from pathlib import Path

import pytest
import torch

# Triton decides at its import whether kernels are interpreted.
INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "torch-ext"))

import latent_moe  # noqa: E402

# The model's loader finds this copy: torch destroys the operators of a first copy when a second one defines them.
sys.modules.setdefault("latentmoe_latent_moe_source", latent_moe)


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=INTERPRETED)
def loop_bounds(monkeypatch):
    """Loop bounds of interpreted kernels are arrays of one element, which numpy 2.4 no longer takes for integers."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
