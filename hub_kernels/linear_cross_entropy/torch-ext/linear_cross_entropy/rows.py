"""Triton kernels: cross-entropy of rows of logits, and its gradient in place of the logits.

Sizes: N rows, V vocabulary, P columns from one row to the next. Tiles: BV = BL * BE columns, as BL lanes of BE
neighbours. A program has one row. It reads the row from its end to its start for the maximum and the sum of
exponentials, then from its start to its end for the gradient: each pass begins with what the cache kept of the last.
"""

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Below every logit, and finite: what -inf logits and the columns after the row are compared with.
LOWEST = tl.constexpr(-3.4e38)

# A program of 32 warps has an SM to itself, so that of 163840 bf16 logits per row the 132 rows in flight (43 MB) can
# stay in the cache of 50 MB between the passes. Three stages keep two tiles, 64 KiB, on their way meanwhile.
TILE_BYTES, LOAD_BYTES, WARPS, STAGES = 32768, 16, 32, 3
# Row pitches are multiples of this many columns: every load is then 16 bytes wide, whatever the vocabulary.
COLUMN_ALIGNMENT = 16


@triton.jit
def _maximum_and_sum(
    x, o_x, V: tl.constexpr, P: tl.constexpr, BL: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr
):
    """Maximum m of a row and the sum of exp(x - m), both fp32; every lane keeps its own until the end."""
    b_m = tl.full([BL], LOWEST, tl.float32)
    b_s = tl.zeros([BL], tl.float32)
    for i_v in tl.range(tl.cdiv(V, BL * BE), num_stages=STAGES):
        o_v = (tl.cdiv(V, BL * BE) - 1 - i_v) * (BL * BE) + o_x
        b_x = tl.load(x + o_v, mask=o_v < P, other=0.0).to(tl.float32)
        b_x = tl.where(o_v < V, b_x, -float("inf"))
        b_new = tl.maximum(b_m, tl.max(b_x, 1))
        b_e = tl.exp2((b_x - b_new[:, None]) * LOG2E)
        b_s = b_s * tl.exp2((b_m - b_new) * LOG2E) + tl.sum(b_e, 1)
        b_m = b_new
    m = tl.max(b_m, 0)
    return m, tl.sum(b_s * tl.exp2((b_m - m) * LOG2E), 0)


@triton.jit
def loss_kernel(
    logits,
    target,
    loss,
    ignore_index,
    V: tl.constexpr,
    P: tl.constexpr,
    BL: tl.constexpr,
    BE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """loss = log sum exp(logits) - logits[target]; 0 where ignored, NaN where the target is outside [0, V)."""
    i_n = tl.program_id(0).to(tl.int64)
    x = logits + i_n * P
    t = tl.load(target + i_n)
    if t == ignore_index:
        tl.store(loss + i_n, 0.0)
    else:
        x_t = tl.load(x + t, mask=(t >= 0) & (t < V), other=float("nan")).to(tl.float32)
        o_x = tl.arange(0, BL)[:, None] * BE + tl.arange(0, BE)[None, :]
        m, s = _maximum_and_sum(x, o_x, V, P, BL, BE, STAGES)
        tl.store(loss + i_n, m - x_t + tl.log(s))


@triton.jit
def loss_and_gradient_kernel(
    logits,
    target,
    loss,
    ignore_index,
    V: tl.constexpr,
    P: tl.constexpr,
    BL: tl.constexpr,
    BE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`loss_kernel`, and logits <- softmax(logits) - onehot(target): zeros where ignored, NaN where the loss is."""
    i_n = tl.program_id(0).to(tl.int64)
    x = logits + i_n * P
    t = tl.load(target + i_n)
    o_x = tl.arange(0, BL)[:, None] * BE + tl.arange(0, BE)[None, :]
    if t == ignore_index:
        tl.store(loss + i_n, 0.0)
        for i_v in range(tl.cdiv(V, BL * BE)):
            o_v = i_v * (BL * BE) + o_x
            tl.store(x + o_v, tl.zeros([BL, BE], logits.dtype.element_ty), mask=o_v < P)
    else:
        # The reductions below synchronise the program: all of it has this before any of it overwrites the row.
        x_t = tl.load(x + t, mask=(t >= 0) & (t < V), other=float("nan")).to(tl.float32)
        m, s = _maximum_and_sum(x, o_x, V, P, BL, BE, STAGES)
        tl.store(loss + i_n, m - x_t + tl.log(s))
        scale = tl.where((t >= 0) & (t < V), 1.0 / s, float("nan"))
        for i_v in tl.range(tl.cdiv(V, BL * BE), num_stages=STAGES):
            o_v = i_v * (BL * BE) + o_x
            b_x = tl.load(x + o_v, mask=o_v < P, other=0.0).to(tl.float32)
            b_p = tl.exp2((b_x - m) * LOG2E) * scale
            b_p = tl.where(o_v == t, b_p - 1.0, b_p)
            tl.store(x + o_v, b_p.to(logits.dtype.element_ty), mask=o_v < P)


def pitched_rows(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised [rows, columns], dtype and device of `like`, its rows as far apart as the kernels need them."""
    pitch = triton.cdiv(columns, COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    return like.new_empty(rows, pitch)[:, :columns]


def _launch(
    kernel: triton.KernelInterface,
    logits_NV: torch.Tensor,
    target_N: torch.Tensor,
    loss_N: torch.Tensor,
    ignore_index: int,
) -> None:
    n, v = logits_NV.shape
    # Triton launches on the current GPU, which need not be that of the tensors.
    with torch.cuda.device_of(logits_NV):
        kernel[(n,)](
            logits_NV,
            target_N,
            loss_N,
            ignore_index,
            V=v,
            P=logits_NV.stride(0),
            BL=TILE_BYTES // LOAD_BYTES,
            BE=LOAD_BYTES // logits_NV.element_size(),
            STAGES=STAGES,
            num_warps=WARPS,
        )


def row_loss(logits_NV: torch.Tensor, target_N: torch.Tensor, loss_N: torch.Tensor, ignore_index: int) -> None:
    """Writes the cross-entropy of each row into `loss_N`, fp32. The logits are `pitched_rows`."""
    _launch(loss_kernel, logits_NV, target_N, loss_N, ignore_index)


def row_loss_and_gradient(
    logits_NV: torch.Tensor, target_N: torch.Tensor, loss_N: torch.Tensor, ignore_index: int
) -> None:
    """`row_loss`, and the gradient of each row's loss over its logits, in their place and dtype."""
    _launch(loss_and_gradient_kernel, logits_NV, target_N, loss_N, ignore_index)
