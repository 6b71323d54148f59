"""Kernel repositories that tests pack and load: a toy, and those of hub_kernels/ where Triton is installed."""

import importlib.util
from pathlib import Path

import pytest

HUB_KERNELS = Path(__file__).resolve().parent.parent / "hub_kernels"
REAL = sorted(file.parent for file in HUB_KERNELS.glob("*/build.toml"))
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
# None stands for the toy.
EVERY = pytest.mark.parametrize(
    "folder",
    [pytest.param(None, id="toy"), *(pytest.param(folder, id=folder.name, marks=NEEDS_TRITON) for folder in REAL)],
)

# The same where the toy shows all there is to see and the others take a while.
TOY_FIRST = pytest.mark.parametrize(
    "folder",
    [
        pytest.param(None, id="toy"),
        *(pytest.param(folder, id=folder.name, marks=[NEEDS_TRITON, pytest.mark.slow]) for folder in REAL),
    ],
)

# Where `kernels` looks for a variant depends on the torch build alone; packages of Triton code run anywhere in its
# interpreter.
AS_ON_CUDA = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
torch.version.cuda = torch.version.cuda or "13.0"
"""

BUILD = """
[general]
name = "toy-kernel"
version = {version}
edition = 5
license = "apache-2.0"
backends = ["cuda"]

[general.hub]
repo-id = "user/toy-kernel"

[torch-noarch]
"""
INIT = '''
"""A toy."""

from . import layers
from .operators import scale

__all__ = ["layers", "scale"]
'''
OPS = """
NAMESPACE = "latentmoe_toy_kernel_source"


def op(name: str) -> str:
    return f"{NAMESPACE}::{name}"
"""
OPERATORS = """
import torch

from ._ops import op


@torch.library.custom_op(op("scale"), mutates_args=())
def _scale(x: torch.Tensor) -> torch.Tensor:
    return x * {factor}


@_scale.register_fake
def _(x):
    return torch.empty_like(x)


def scale(x: torch.Tensor) -> torch.Tensor:
    return torch.compile(_scale, fullgraph=True, backend="eager")(x)
"""
LAYERS = """
from torch import nn

from .operators import scale


class Scale(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, x):
        return scale(x)
"""


def write_toy(folder: Path, factor: int = 3, version: int = 1) -> Path:
    """A repository in the layout of hub_kernels/ whose one operator multiplies by `factor`."""
    package = folder / "torch-ext" / "toy_kernel"
    package.mkdir(parents=True)
    (folder / "build.toml").write_text(BUILD.format(version=version))
    (folder / "CARD.md").write_text("# Toy\n")
    files = {"__init__": INIT, "_ops": OPS, "operators": OPERATORS.format(factor=factor), "layers": LAYERS}
    for name, text in files.items():
        (package / f"{name}.py").write_text(text.lstrip())
    return folder
