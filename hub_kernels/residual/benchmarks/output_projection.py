"""What a gated norm within the output projection would gain: a matrix product whose rows are normed as they are loaded,
beside the norm's own kernel and the product of torch. The package has the latter alone.

Legend: T tokens, H heads, K head width, N output width; BT, BN rows and columns of a tile.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import measure
import residual
import torch
import triton
import triton.language as tl

T, H, K, N, EPS = 8192, 96, 128, 7168, 1e-5
# Tiles of the product, warps, and heads that lie in shared memory, whose 227 KB do not take larger ones.
TILES = ((128, 128, 4, 2), (128, 128, 8, 2), (64, 256, 4, 2), (64, 256, 8, 2), (64, 128, 4, 3))


@triton.jit(do_not_specialize=["T"])
def normed_projection_kernel(
    x, gate, weight, matrix, out, T, eps,
    H: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile of out [T, N] = (rms_norm(x) weight sigmoid(gate)) [T, H K] times matrix [N, H K] transposed. Programs
    that run at the same time share GROUP rows of tiles, whose columns come one after the other."""
    tiles_t, tiles_n = tl.cdiv(T, BT), tl.cdiv(N, BN)
    i = tl.program_id(0)
    first = i // (GROUP * tiles_n) * GROUP
    rows = min(tiles_t - first, GROUP)
    i_t, i_n = first + i % (GROUP * tiles_n) % rows, i % (GROUP * tiles_n) // rows
    o_t = i_t * BT + tl.arange(0, BT).to(tl.int64)
    o_n = i_n * BN + tl.arange(0, BN).to(tl.int64)
    o_k = tl.arange(0, K)
    m_t, m_n = (o_t < T)[:, None], (o_n < N)[:, None]
    b_w = tl.load(weight + o_k).to(tl.float32)
    b_out = tl.zeros([BT, BN], tl.float32)
    for i_h in range(H):
        o_x = o_t[:, None] * (H * K) + i_h * K + o_k[None, :]
        b_x = tl.load(x + o_x, mask=m_t, other=0.0).to(tl.float32)
        b_z = tl.load(gate + o_x, mask=m_t, other=0.0).to(tl.float32)
        b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / K + eps)
        b_normed = (b_x * b_r[:, None] * b_w[None, :] * tl.sigmoid(b_z)).to(DTYPE)
        b_m = tl.load(matrix + o_n[:, None] * (H * K) + i_h * K + o_k[None, :], mask=m_n, other=0.0)
        b_out = tl.dot(b_normed, b_m.T, b_out)
    tl.store(out + o_t[:, None] * N + o_n[None, :], b_out.to(out.dtype.element_ty), mask=m_t & (o_n < N)[None, :])


def fused(tile: tuple[int, int, int, int], x_THK, gate_THK, weight_K, matrix_ND) -> torch.Tensor:
    T, H, K = x_THK.shape
    N = matrix_ND.shape[0]
    BT, BN, warps, stages = tile
    out_TN = x_THK.new_empty(T, N)
    normed_projection_kernel[(triton.cdiv(T, BT) * triton.cdiv(N, BN),)](
        x_THK, gate_THK, weight_K, matrix_ND, out_TN, T, EPS, H=H, K=K, N=N, BT=BT, BN=BN, GROUP=8,
        DTYPE=tl.bfloat16 if x_THK.dtype == torch.bfloat16 else tl.float32, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_TN


def separate(x_THK, gate_THK, weight_K, matrix_ND) -> torch.Tensor:
    return torch.nn.functional.linear(residual.gated_rms_norm(x_THK, gate_THK, weight_K, EPS).flatten(1), matrix_ND)


def candidates() -> dict[str, Callable[..., torch.Tensor]]:
    found = {f"in one kernel, {t[0]} x {t[1]}, {t[2]} warps": partial(fused, t) for t in TILES}
    return {"ours": separate} | found


def rows(quick: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    x, gate = (torch.randn(T, H, K, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = 1 + torch.randn(K, device="cuda") / 4
    matrix = (torch.randn(N, H * K, device="cuda") * (H * K) ** -0.5).to(torch.bfloat16)
    some = torch.randperm(T, device="cuda")[:64]
    plain_normed = residual.reference.gated_rms_norm(x[some], gate[some], weight, EPS).flatten(1)
    wide = residual.reference.gated_rms_norm(x[some].double(), gate[some].double(), weight.double(), EPS).flatten(1)
    truth = wide @ matrix.double().t()
    plain = measure.relative_error(plain_normed @ matrix.t(), truth)
    timed, errors = {}, {}
    for name, function in candidates().items():
        errors[name] = measure.relative_error(function(x, gate, weight, matrix)[some], truth) / plain
        if not errors[name] <= 2:
            raise SystemExit(f"{name}: error {errors[name]:.2f} times that of torch")
        timed[name] = partial(function, x, gate, weight, matrix)
    times = measure.samples_ms(timed, 3 if quick else 12)
    floor = measure.floor_ms(2 * T * H * K * N, 2 * (2 * T * H * K + N * H * K + T * N))
    shape = f"T={T} x {H} x {K} -> {N}"
    peak = measure.peak_gib(timed["ours"])
    return [measure.row("gated RMSNorm + projection fwd", shape, times, floor, peak, errors["ours"])]
