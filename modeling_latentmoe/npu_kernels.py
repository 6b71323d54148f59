"""Kernels of the Hub that Triton-Ascend compiles (npu.py): activations, attention residuals, the norm of KDA's output.

What is served is the `torch-npu` variant of a repository, or the sources in this checkout (kernel_loading.py). Each
function returns the repository, or None where the torch definition computes the call; the log says once why.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch

from .kernel_loading import loaded
from .npu import FLOATS, dtype_problem, serves

# What the kernels take: sources, and widths of rows.
MIXTURE_SOURCES, MIXTURE_WIDTH, NORM_WIDTH = 16, 16384, 1024


@cache
def compiler_problem() -> str | None:
    """Why there is no Triton-Ascend, if so: decided once, before any step."""
    try:
        importlib.import_module("triton.backends.ascend")
    except ImportError as error:
        return f"triton-ascend does not load ({error})"
    return None


def _kernels(
    operation: str, repository: str, choice: str, problem: str | None, *tensors: torch.Tensor
) -> ModuleType | None:
    def reason() -> str | None:
        found = problem or dtype_problem(*tensors, dtypes=FLOATS) or compiler_problem()
        return found or (None if loaded(repository, choice) else f"there is no repository {repository} at hand")

    return loaded(repository, choice) if serves(operation, choice, tensors[0], (), reason) else None


def activations(gate: torch.Tensor, up: torch.Tensor, choice: str) -> ModuleType | None:
    """Has situ_glu and swiglu."""
    return _kernels("glu", "latent_moe", choice, None, gate, up)


def mixture(sources: Sequence[torch.Tensor], choice: str) -> ModuleType | None:
    """Has attn_residual."""
    count, width = len(sources), sources[0].shape[-1]
    fits = count <= MIXTURE_SOURCES and width <= MIXTURE_WIDTH
    problem = None if fits else f"there are {count} sources {width} wide"
    return _kernels("attn_residual", "residual", choice, problem, *sources)


def norm(x: torch.Tensor, gate: torch.Tensor, choice: str) -> ModuleType | None:
    """Has gated_rms_norm."""
    width = x.shape[-1]
    problem = None if width <= NORM_WIDTH else f"rows are {width} wide"
    return _kernels("gated_rms_norm", "residual", choice, problem, x, gate)
