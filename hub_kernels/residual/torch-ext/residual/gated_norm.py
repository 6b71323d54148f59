"""Gated RMSNorm: checks, operators and autograd.

Legend: T rows (tokens times heads), K width of a row, P programs.
"""

import torch
import triton

from ._ops import op
from .checks import check_like, check_rows
from .gated_norm_kernels import gated_norm_bwd_kernel, gated_norm_fwd_cores_kernel, gated_norm_fwd_kernel
from .launch import ASCEND, launch, persistent_programs, vector_cores

# Rows copied ahead in backward have to fit into shared memory; on Ascend, a row into what a core holds.
WIDEST = 1024 if ASCEND else 8192
# Blocks copied ahead in backward.
COPIES = 2
# Elements of a block: what four warps hold in registers, or a core of Ascend in its buffer, fp32 included.
FORWARD_BLOCK, BACKWARD_BLOCK = (2048, 1024) if ASCEND else (4096, 1024)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm(x) * weight * sigmoid(gate) over the last axis, in fp32, rounded once to the dtype of x.

    x, gate: [..., K], K up to 8192 (on Ascend, 1024); weight_K: [K]; each bf16, fp16 or fp32. eps is added to the mean
    square of a row. Gradients flow to all three, to the weight through fp32 sums of fixed order. Raises ValueError
    naming the argument. The output norm of Kimi Delta Attention.
    """
    check_rows("x", x, WIDEST)
    check_rows("gate", gate, WIDEST)
    check_rows("weight_K", weight_K, WIDEST)
    check_like("gate", gate, x.shape, x.device)
    check_like("weight_K", weight_K, x.shape[-1:], x.device)
    return gated_norm_fwd(x, gate, weight_K, eps)


def _block(K: int, elements: int) -> tuple[int, int, int]:
    """Rows and width of a block, and warps for it."""
    BK = triton.next_power_of_2(K)
    BT = max(1, elements // BK)
    return BT, BK, min(16, max(4, 4 * BT * BK // elements))


@torch.library.custom_op(op("gated_norm_fwd"), mutates_args=())
def gated_norm_fwd(x: torch.Tensor, gate: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    K = x.shape[-1]
    T = x.numel() // K
    BT, BK, warps = _block(K, FORWARD_BLOCK)
    out = torch.empty_like(x)
    arguments = x, gate.contiguous(), weight_K.contiguous(), out, T, eps
    kernel, programs = gated_norm_fwd_kernel, triton.cdiv(T, BT)
    if ASCEND:
        kernel, programs = gated_norm_fwd_cores_kernel, min(programs, vector_cores(x.device))
    launch(kernel, programs, x, *arguments, K=K, BT=BT, BK=BK, num_warps=warps)
    return out


@torch.library.custom_op(op("gated_norm_bwd"), mutates_args=())
def gated_norm_bwd(
    dout: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight_K: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dout, x, gate = dout.contiguous(), x.contiguous(), gate.contiguous()
    K = x.shape[-1]
    T = x.numel() // K
    BT, BK, warps = _block(K, BACKWARD_BLOCK)
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    P = persistent_programs(x.device, 8, triton.cdiv(T, BT))
    dweight_PK = torch.empty(P, K, dtype=torch.float32, device=x.device)
    arguments = dout, x, gate, weight_K.contiguous(), dx, dgate, dweight_PK, T, eps
    launch(gated_norm_bwd_kernel, P, x, *arguments, K=K, BT=BT, BK=BK, STAGES=COPIES + 1, num_warps=warps)
    return dx, dgate, dweight_PK.sum(0).to(weight_K.dtype)


@gated_norm_fwd.register_fake
def _(x, gate, weight_K, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@gated_norm_bwd.register_fake
def _(dout, x, gate, weight_K, eps):
    return tuple(torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x, gate, weight_K))


def _save(ctx, inputs, output):
    x, gate, weight_K, ctx.eps = inputs
    ctx.save_for_backward(x, gate, weight_K)


def _backward(ctx, dout):
    return *gated_norm_bwd(dout, *ctx.saved_tensors, ctx.eps), None


gated_norm_fwd.register_autograd(_backward, setup_context=_save)
