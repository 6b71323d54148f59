"""Refusals: every message names the argument.

Legend: T queries, N heads, S keys, L columns of a key, V of them values, k selected keys per query.
"""

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS, WIDEST, UNIT = 128, 1024, 16


def _form(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"


def _check_like(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(x.shape) != shape or x.dtype != dtype or x.device != device:
        raise ValueError(f"{name} must be {list(shape)}, {dtype}, on {device}: {_form(x)}")


def check_selection(q_TNL: torch.Tensor, kv_SL: torch.Tensor, index_Tk: torch.Tensor) -> None:
    """Queries, keys and selected keys fit together."""
    if q_TNL.ndim != 3 or q_TNL.dtype not in DTYPES or not 1 <= q_TNL.shape[1] <= HEADS:
        raise ValueError(f"q_TNL must be [T, 1..{HEADS}, L], bfloat16, float16 or float32: {_form(q_TNL)}")
    T, _, L = q_TNL.shape
    if not UNIT <= L <= WIDEST or L % UNIT:
        raise ValueError(f"q_TNL: L must be a multiple of {UNIT} up to {WIDEST}: {_form(q_TNL)}")
    if kv_SL.ndim != 2 or kv_SL.numel() >= 2**31:
        raise ValueError(f"kv_SL must be [S, {L}] of less than 2**31 elements: {_form(kv_SL)}")
    _check_like("kv_SL", kv_SL, (kv_SL.shape[0], L), q_TNL.dtype, q_TNL.device)
    if index_Tk.ndim != 2 or not index_Tk.shape[1]:
        raise ValueError(f"index_Tk must be [{T}, k] with k at least 1: {_form(index_Tk)}")
    _check_like("index_Tk", index_Tk, (T, index_Tk.shape[1]), torch.int32, q_TNL.device)


def check_values(value_width: int, L: int) -> None:
    if not UNIT <= value_width <= L or value_width % UNIT:
        raise ValueError(f"value_width must be a multiple of {UNIT} up to L = {L}: {value_width}")


def check_sink(sink_N: torch.Tensor | None, N: int, device: torch.device) -> None:
    if sink_N is not None:
        _check_like("sink_N", sink_N, (N,), torch.float32, device)


def check_lse(lse_TN: torch.Tensor, T: int, N: int, device: torch.device) -> None:
    _check_like("lse_TN", lse_TN, (T, N), torch.float32, device)
