"""Attention residual: checks, operators and autograd.

Legend: T rows (tokens), J sources, D model width, P programs.
"""

from collections.abc import Sequence

import torch
import triton

from . import mixture_ascend
from ._ops import op
from .checks import check_like, check_rows
from .launch import ASCEND, launch, persistent_programs
from .mixture_kernels import mixture_bwd_kernel, mixture_fwd_kernel

# A row lives in the registers of one program, at most 64 elements in a thread.
WIDEST = 16384
# Rows that a program copies ahead, as far as they fit into its share of shared memory, bytes.
COPIES, COPIES_BYTES = 3, 96 * 1024


def attn_residual(sources: Sequence[torch.Tensor], score_D: torch.Tensor, eps: float) -> torch.Tensor:
    """sum_j a_j V_j over sources V_j [..., D], where a = softmax_j(rms_norm(V_j) . score), in fp32, rounded once.

    sources: one or more tensors of one shape and dtype (bf16, fp16 or fp32), at most 16 on Ascend, D up to 16384;
    score_D: fp32. eps is added to the mean square of a row. Gradients flow to every source and, through fp32 sums of
    fixed order, to the score. Raises ValueError naming the argument. Block attention residuals of the Kimi-K3 report.
    """
    sources = list(sources)
    if not sources:
        raise ValueError("sources: at least one is needed")
    if ASCEND and len(sources) > mixture_ascend.SOURCES:
        raise ValueError(f"sources: {len(sources)} of them, on Ascend {mixture_ascend.SOURCES} at most")
    first = sources[0]
    check_rows("sources[0]", first, WIDEST)
    for j, source in enumerate(sources):
        check_like(f"sources[{j}]", source, first.shape, first.device)
        if source.dtype != first.dtype:
            raise ValueError(f"sources[{j}]: dtype {source.dtype}, but sources[0] has {first.dtype}")
    check_like("score_D", score_D, first.shape[-1:], first.device)
    if score_D.dtype != torch.float32:
        raise ValueError(f"score_D: dtype {score_D.dtype} should be float32")
    out, _ = mixture_fwd(sources, score_D, eps)
    return out


def _programs(x: torch.Tensor, T: int) -> int:
    """At the released width two programs share a processor: one computes while the other waits at a barrier."""
    per_processor = min(16, WIDEST // triton.next_power_of_2(x.shape[-1]))
    return persistent_programs(x.device, per_processor, T)


def _block(x: torch.Tensor) -> dict[str, int]:
    """Block of a row, 64 elements per thread: the fewer warps, the less of their work is not on elements."""
    D, BD = x.shape[-1], triton.next_power_of_2(x.shape[-1])
    copies = min(COPIES, COPIES_BYTES // (BD * x.element_size()))
    return {"D": D, "BD": BD, "STAGES": copies + 1, "num_warps": max(1, BD // 2048)}


@torch.library.custom_op(op("mixture_fwd"), mutates_args=())
def mixture_fwd(sources: list[torch.Tensor], score_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixture, and for the backward pass the logit and 1 / rms of every source of every row [T, 2, J]."""
    sources = [source.contiguous() for source in sources]
    first, J, D = sources[0], len(sources), sources[0].shape[-1]
    T = first.numel() // D
    out = torch.empty_like(first)
    stats_T2J = score_D.new_empty(T, 2, J)
    if ASCEND:
        mixture_ascend.forward(sources, score_D.contiguous(), out, stats_T2J, eps)
    else:
        arguments = tuple(sources), score_D.contiguous(), out, stats_T2J, T, eps
        launch(mixture_fwd_kernel, _programs(first, T), first, *arguments, J=J, **_block(first))
    return out, stats_T2J


@torch.library.custom_op(op("mixture_bwd"), mutates_args=())
def mixture_bwd(
    dout: torch.Tensor, sources: list[torch.Tensor], score_D: torch.Tensor, stats_T2J: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients of every source and of the score."""
    streams = [x.contiguous() for x in (dout, *sources)]
    T, _, J = stats_T2J.shape
    D = score_D.shape[0]
    dsources = [torch.empty_like(source) for source in streams[1:]]
    if ASCEND:
        return dsources, mixture_ascend.backward(streams[0], streams[1:], score_D.contiguous(), stats_T2J, dsources)
    P = _programs(dout, T)
    dscore_PD = score_D.new_empty(P, D)
    arguments = tuple(streams), score_D.contiguous(), stats_T2J, tuple(dsources), dscore_PD, T
    launch(mixture_bwd_kernel, P, dout, *arguments, J=J, BJ=triton.next_power_of_2(J), **_block(dout))
    return dsources, dscore_PD.sum(0)


@mixture_fwd.register_fake
def _(sources, score_D, eps):
    first = sources[0]
    out = torch.empty_like(first, memory_format=torch.contiguous_format)
    return out, score_D.new_empty(first.numel() // first.shape[-1], 2, len(sources))


@mixture_bwd.register_fake
def _(dout, sources, score_D, stats_T2J):
    dsources = [torch.empty_like(source, memory_format=torch.contiguous_format) for source in sources]
    return dsources, torch.empty_like(score_D)


def _save(ctx, inputs, output):
    sources, score_D, _ = inputs
    _, stats_T2J = output
    ctx.mark_non_differentiable(stats_T2J)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(score_D, stats_T2J, *sources)


def _backward(ctx, dout, _):
    score_D, stats_T2J, *sources = ctx.saved_tensors
    dsources, dscore_D = mixture_bwd(dout, sources, score_D, stats_T2J)
    return dsources, dscore_D, None


mixture_fwd.register_autograd(_backward, setup_context=_save)
