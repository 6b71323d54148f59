"""Makes the package importable, and chooses Triton's interpreter where there is no GPU."""

import os
import sys
from pathlib import Path

import pytest
import torch

# Triton decides at its import whether kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "torch-ext"))

import linear_cross_entropy

# The model's loader finds this copy: torch destroys the operators of a first copy when a second one defines them.
sys.modules.setdefault("latentmoe_linear_cross_entropy_source", linear_cross_entropy)

# Of 16-bit products with fp32 results torch has CUDA kernels only; the interpreter's tensors live on the CPU.
_cpu = torch.library.Library("aten", "IMPL", "CPU")
_cpu.impl("bmm.dtype", lambda a, b, out_dtype: torch.bmm(a.to(out_dtype), b.to(out_dtype)))


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
