"""Triton decides at its import whether kernels are interpreted: before any test module is. Every test draws its own
random numbers, the same in each run and in any order."""

import importlib.util
import os
import zlib

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=INTERPRETED and importlib.util.find_spec("triton") is not None)
def loop_bounds():
    """Loop bounds of interpreted kernels are arrays of one element, which numpy 2.4 no longer takes for integers."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
        yield


@pytest.fixture(autouse=True)
def own_random_numbers(request):
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
