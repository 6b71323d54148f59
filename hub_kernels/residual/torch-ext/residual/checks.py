"""Refusals shared by both operations: every message names the argument."""

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_rows(name: str, x: torch.Tensor, widest: int) -> None:
    """x [..., width] is a floating tensor, its rows not empty and at most this wide."""
    if x.dtype not in DTYPES:
        raise ValueError(f"{name}: dtype {x.dtype} is not supported, use bfloat16, float16 or float32")
    if x.dim() == 0 or not 1 <= x.shape[-1] <= widest:
        raise ValueError(f"{name}: shape {tuple(x.shape)} needs a last axis of 1 to {widest}")


def check_like(name: str, x: torch.Tensor, shape: torch.Size, device: torch.device) -> None:
    """x has this shape and is on this device."""
    if x.shape != shape:
        raise ValueError(f"{name}: shape {tuple(x.shape)} should be {tuple(shape)}")
    if x.device != device:
        raise ValueError(f"{name}: on {x.device}, but the other tensors are on {device}")
