"""Attention residual on Ascend: launches of its kernels.

Legend: T rows (tokens), J sources, D model width, P programs.
"""

import torch
import triton

from .launch import launch, vector_cores
from .mixture_ascend_kernels import mixture_bwd_cores_kernel, mixture_factors_kernel, mixture_fwd_cores_kernel

# Pointers that the kernels take.
SOURCES = 16
# What a core of A2 and A3 holds is 192 KB; copies that run ahead of the arithmetic take every tile twice.
BUFFER = 96 * 1024
# Tiles in fp32 that are alive at a time, beside the weights of the sources.
TILES = 7


def tile(J: int, D: int, itemsize: int) -> int:
    """Elements of a tile: there is one for every source, for dout and for the result, and those in fp32."""
    fit = BUFFER // ((J + 2) * itemsize + 4 * (J + TILES))
    return min(triton.next_power_of_2(D), 1 << (fit.bit_length() - 1))


def _pointers(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors + tensors[:1] * (SOURCES - len(tensors))


def _sizes(sources: list[torch.Tensor]) -> dict[str, int]:
    J, D = len(sources), sources[0].shape[-1]
    return {"J": J, "D": D, "BD": tile(J, D, sources[0].element_size())}


def forward(
    sources: list[torch.Tensor], score_D: torch.Tensor, out: torch.Tensor, stats_T2J: torch.Tensor, eps: float
) -> None:
    """Write out and stats_T2J; all tensors are contiguous, as in `backward`."""
    T, _, J = stats_T2J.shape
    arguments = *_pointers(sources), score_D, out, stats_T2J, T, eps
    constants = {**_sizes(sources), "BJ": triton.next_power_of_2(J)}
    launch(mixture_fwd_cores_kernel, min(T, vector_cores(out.device)), out, *arguments, **constants)


def backward(
    dout: torch.Tensor,
    sources: list[torch.Tensor],
    score_D: torch.Tensor,
    stats_T2J: torch.Tensor,
    dsources: list[torch.Tensor],
) -> torch.Tensor:
    """Write dsources and return the gradient of the score [D]."""
    T, _, J = stats_T2J.shape
    sizes, P = _sizes(sources), min(T, vector_cores(dout.device))
    factors_T3J = stats_T2J.new_empty(T, 3, J)
    arguments = *_pointers(sources), dout, stats_T2J, factors_T3J, T
    launch(mixture_factors_kernel, P, dout, *arguments, **sizes, BJ=triton.next_power_of_2(J))
    dscore_PD = score_D.new_empty(P, score_D.shape[0])
    arguments = *_pointers(sources), *_pointers(dsources), dout, score_D, factors_T3J, dscore_PD, T
    launch(mixture_bwd_cores_kernel, P, dout, *arguments, **sizes)
    return dscore_PD.sum(0)
