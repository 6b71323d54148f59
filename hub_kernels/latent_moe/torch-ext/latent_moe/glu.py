"""Gated activations alone: elementwise, one kernel forward and one backward, for feed-forward layers without experts.

On CUDA devices every block has a program. Ascend runs as many programs as it has cores, and they walk over the blocks.

Legend: T rows, F width; BT and BF rows and columns of a block.
"""

import torch
import triton
import triton.language as tl

from ._ops import op
from .activation import activate, activate_backward, activation_code
from .ascend import ASCEND, device_of, vector_cores

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Elements of a block: 32 in each thread of four warps, 16-bit ones in four loads of 16 bytes from each tensor. What
# backward holds of them in fp32 fits into the buffer of a core of Ascend.
BLOCK, BLOCK_COLUMNS = (1024, 1024) if ASCEND else (4096, 1024)
# The functions of the hardware are CUDA's; the interpreter has none. Read once, it is a variable of the environment.
HARDWARE = not ASCEND and not triton.knobs.runtime.interpret


def situ_glu(
    gate: torch.Tensor, up: torch.Tensor, beta: float | None = None, linear_beta: float | None = None
) -> torch.Tensor:
    """beta tanh(gate / beta) sigmoid(gate) times linear_beta tanh(up / linear_beta), in fp32, rounded once.

    gate, up: [..., F] of one shape and dtype bf16, fp16 or fp32; beta None means 1, linear_beta None leaves up as it
    is. Rows may lie anywhere, as in halves of one tensor. Gradients flow to both; nothing but them is kept. Raises
    ValueError naming the argument. The activation of Kimi-K3.
    """
    return _activated(gate, up, "situ", 1.0 if beta is None else beta, linear_beta)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate sigmoid(gate) up, as `situ_glu` otherwise (Shazeer, "GLU variants", 2020)."""
    return _activated(gate, up, "silu", 1.0, None)


def _activated(
    gate: torch.Tensor, up: torch.Tensor, activation: str, beta: float, linear_beta: float | None
) -> torch.Tensor:
    if gate.dtype not in DTYPES:
        raise ValueError(f"gate: dtype {gate.dtype} is not supported, use bfloat16, float16 or float32")
    if gate.dim() == 0 or not gate.shape[-1]:
        raise ValueError(f"gate: shape {tuple(gate.shape)} needs a last axis, not of 0")
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ValueError(f"up: {up.dtype} {tuple(up.shape)} should be {gate.dtype} {tuple(gate.shape)}")
    if up.device != gate.device:
        raise ValueError(f"up: on {up.device}, but gate is on {gate.device}")
    rows = (-1, gate.shape[-1])
    return glu_fwd(gate.reshape(rows), up.reshape(rows), activation, beta, linear_beta).view(gate.shape)


@triton.jit
def _block(i, T, F, BT: tl.constexpr, BF: tl.constexpr):
    """Rows and columns of block i, and which of them exist; columns of a row come one after the other."""
    tiles = tl.cdiv(F, BF)
    o_t = (i // tiles * BT + tl.arange(0, BT).to(tl.int64))[:, None]
    o_f = (i % tiles * BF + tl.arange(0, BF))[None, :]
    return o_t, o_f, (o_t < T) & (o_f < F)


@triton.jit
def _forward(
    i, gate, up, out, T, F, stride_g, stride_u, beta, linear_beta,
    ACTIVATION: tl.constexpr, FAST: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    o_t, o_f, m = _block(i, T, F, BT, BF)
    b_g = tl.load(gate + o_t * stride_g + o_f, mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(up + o_t * stride_u + o_f, mask=m, other=0.0).to(tl.float32)
    b_h = activate(b_g, b_u, beta, linear_beta, ACTIVATION, FAST)
    tl.store(out + o_t * F + o_f, b_h.to(out.dtype.element_ty), mask=m)


@triton.jit
def _backward(
    i, gate, up, dout, dgate, dup, T, F, stride_g, stride_u, beta, linear_beta,
    ACTIVATION: tl.constexpr, FAST: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    o_t, o_f, m = _block(i, T, F, BT, BF)
    o_o = o_t * F + o_f
    b_g = tl.load(gate + o_t * stride_g + o_f, mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(up + o_t * stride_u + o_f, mask=m, other=0.0).to(tl.float32)
    b_do = tl.load(dout + o_o, mask=m, other=0.0).to(tl.float32)
    _, b_dg, b_du = activate_backward(b_g, b_u, b_do, beta, linear_beta, ACTIVATION, FAST)
    tl.store(dgate + o_o, b_dg.to(dgate.dtype.element_ty), mask=m)
    tl.store(dup + o_o, b_du.to(dup.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["T"])
def glu_fwd_kernel(
    gate, up, out, T, F, stride_g, stride_u, beta, linear_beta,
    ACTIVATION: tl.constexpr, FAST: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """stride_g, stride_u: from row to row."""
    i = tl.program_id(0)
    _forward(i, gate, up, out, T, F, stride_g, stride_u, beta, linear_beta, ACTIVATION, FAST, BT, BF)


@triton.jit(do_not_specialize=["T"])
def glu_bwd_kernel(
    gate, up, dout, dgate, dup, T, F, stride_g, stride_u, beta, linear_beta,
    ACTIVATION: tl.constexpr, FAST: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    _backward(i, gate, up, dout, dgate, dup, T, F, stride_g, stride_u, beta, linear_beta, ACTIVATION, FAST, BT, BF)


@triton.jit(do_not_specialize=["T"])
def glu_fwd_cores_kernel(
    gate, up, out, T, F, stride_g, stride_u, beta, linear_beta,
    ACTIVATION: tl.constexpr, FAST: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    for i in tl.range(tl.program_id(0), tl.cdiv(T, BT) * tl.cdiv(F, BF), tl.num_programs(0)):
        _forward(i, gate, up, out, T, F, stride_g, stride_u, beta, linear_beta, ACTIVATION, FAST, BT, BF)


@triton.jit(do_not_specialize=["T"])
def glu_bwd_cores_kernel(
    gate, up, dout, dgate, dup, T, F, stride_g, stride_u, beta, linear_beta,
    ACTIVATION: tl.constexpr, FAST: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    for i in tl.range(tl.program_id(0), tl.cdiv(T, BT) * tl.cdiv(F, BF), tl.num_programs(0)):
        _backward(i, gate, up, dout, dgate, dup, T, F, stride_g, stride_u, beta, linear_beta, ACTIVATION, FAST, BT, BF)


FORWARD, BACKWARD = (glu_fwd_cores_kernel, glu_bwd_cores_kernel) if ASCEND else (glu_fwd_kernel, glu_bwd_kernel)


def _launch(kernel, gate_TF: torch.Tensor, up_TF: torch.Tensor, others, activation, beta, linear_beta) -> None:
    """Of 16-bit results fp16 has as many bits as the functions of the hardware: they serve bf16 alone."""
    gate_TF, up_TF = (x if x.stride(-1) == 1 else x.contiguous() for x in (gate_TF, up_TF))
    T, F = gate_TF.shape
    # In plain integers: from Python, the functions of triton take as long as a launch.
    BF = min(BLOCK_COLUMNS, 1 << (F - 1).bit_length())
    BT = BLOCK // BF
    blocks = -(-T // BT) * -(-F // BF)
    arguments = (
        gate_TF, up_TF, *others, T, F, gate_TF.stride(0), up_TF.stride(0), beta,
        1.0 if linear_beta is None else linear_beta,
    )  # fmt: skip
    constants = {"ACTIVATION": activation_code(activation, linear_beta), "BT": BT, "BF": BF}
    if not blocks:
        return
    if ASCEND:
        programs = min(blocks, vector_cores(gate_TF.device))
        with device_of(gate_TF):
            kernel[(programs,)](*arguments, **constants, FAST=False)
    else:
        fast = HARDWARE and gate_TF.dtype == torch.bfloat16
        with torch.cuda.device_of(gate_TF):
            kernel[(blocks,)](*arguments, **constants, FAST=fast, num_warps=4)


@torch.library.custom_op(op("glu_fwd"), mutates_args=())
def glu_fwd(
    gate_TF: torch.Tensor, up_TF: torch.Tensor, activation: str, beta: float, linear_beta: float | None
) -> torch.Tensor:
    out_TF = gate_TF.new_empty(gate_TF.shape)
    _launch(FORWARD, gate_TF, up_TF, (out_TF,), activation, beta, linear_beta)
    return out_TF


@torch.library.custom_op(op("glu_bwd"), mutates_args=())
def glu_bwd(
    dout_TF: torch.Tensor,
    gate_TF: torch.Tensor,
    up_TF: torch.Tensor,
    activation: str,
    beta: float,
    linear_beta: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dgate_TF, dup_TF = gate_TF.new_empty(gate_TF.shape), up_TF.new_empty(up_TF.shape)
    others = dout_TF.contiguous(), dgate_TF, dup_TF
    _launch(BACKWARD, gate_TF, up_TF, others, activation, beta, linear_beta)
    return dgate_TF, dup_TF


@glu_fwd.register_fake
def _(gate_TF, up_TF, activation, beta, linear_beta):
    return gate_TF.new_empty(gate_TF.shape)


@glu_bwd.register_fake
def _(dout_TF, gate_TF, up_TF, activation, beta, linear_beta):
    return gate_TF.new_empty(gate_TF.shape), up_TF.new_empty(up_TF.shape)


def _save(ctx, inputs, output):
    gate_TF, up_TF, *ctx.activation = inputs
    ctx.save_for_backward(gate_TF, up_TF)


def _gradients(ctx, dout_TF):
    return *glu_bwd(dout_TF, *ctx.saved_tensors, *ctx.activation), None, None, None


glu_fwd.register_autograd(_gradients, setup_context=_save)
