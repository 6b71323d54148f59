"""Attention residual and gated RMSNorm on one GPU: verified against float64, then timed beside every public peer.

    python hub_kernels/residual/benchmarks/benchmark.py            # writes results/h200.json
    python hub_kernels/residual/benchmarks/benchmark.py --quick    # few repeats, nothing written

Legend: T tokens, J sources, D model width, H heads, K head width.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

HUB_KERNELS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HUB_KERNELS), str(HUB_KERNELS.parent), str(HUB_KERNELS / "residual" / "torch-ext")]

import measure  # noqa: E402
import output_projection  # noqa: E402
import residual  # noqa: E402

from modeling_latentmoe import ops  # noqa: E402

EPS = 1e-5
T, J, D, H, K = 8192, 8, 7168, 96, 128
# Peers may round more often than we do, but must compute the same function.
PEER_ERROR = 2e-2

Function = Callable[..., torch.Tensor]


def mixture_candidates() -> dict[str, Function]:
    """Functions of (*sources, score); "ours" and "torch" come first."""
    candidates: dict[str, Function] = {
        "ours": lambda *x: residual.attn_residual(x[:-1], x[-1], EPS),
        "torch": lambda *x: ops.attn_residual(x[:-1], x[-1], EPS),
        "torch.compile": torch.compile(lambda *x: ops.attn_residual(x[:-1], x[-1], EPS)),
    }
    try:
        from fla.ops.attnres import fused_attnres
    except ImportError as error:
        print(f"fla: not installed ({error})")
    else:
        ones = torch.ones(D, device="cuda")
        for level, name in enumerate(("fla, output kept", "fla, output recomputed")):
            candidates[name] = lambda *x, level=level: fused_attnres(
                x[-1], x[:-1], ones, rms_eps=EPS, checkpoint_level=level
            )
    return candidates


def gated_norm_candidates() -> dict[str, Function]:
    """Functions of (x, gate, weight); "ours" and "torch" come first."""
    candidates: dict[str, Function] = {
        "ours": lambda *x: residual.gated_rms_norm(*x, EPS),
        "torch": lambda *x: ops.gated_rms_norm(*x, EPS),
        "torch.compile": torch.compile(lambda *x: ops.gated_rms_norm(*x, EPS)),
    }
    try:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
    except ImportError as error:
        print(f"fla: not installed ({error})")
    else:
        candidates["fla"] = lambda x, gate, weight: rms_norm_gated(x, gate, weight, None, "sigmoid", eps=EPS)
    return candidates


def with_gradients(function: Function, inputs: Sequence[torch.Tensor], dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


def verified(
    candidates: dict[str, Function], definition: Function, inputs: Sequence[torch.Tensor], dout: torch.Tensor
) -> tuple[dict[str, Function], float, float]:
    """Candidates that pass, and our error over that of torch: of the output, and the worst over the gradients too."""
    truth = with_gradients(definition, [x.detach().double().requires_grad_() for x in inputs], dout.double())
    passed, errors = {}, {}
    for name, function in candidates.items():
        try:
            results = with_gradients(function, inputs, dout)
        except Exception as error:
            if name in ("ours", "torch"):
                raise
            print(f"{name}: dropped, it does not run: {type(error).__name__}: {error}")
            continue
        errors[name] = [measure.relative_error(x, t) for x, t in zip(results, truth, strict=True)]
        if name in ("ours", "torch") or max(errors[name]) <= PEER_ERROR:
            passed[name] = function
        else:
            print(f"{name}: dropped, relative error {max(errors[name]):.1e}")
    # fp32 results of torch may be exact by chance.
    least = 4 * torch.finfo(torch.float32).eps
    ratios = [a / max(b, least) for a, b in zip(errors["ours"], errors["torch"], strict=True)]
    if not max(ratios) <= 2:
        raise SystemExit(f"ours errs more than twice as much as torch: {ratios}")
    return passed, ratios[0], max(ratios)


def rows_of(
    op: str,
    shape: str,
    candidates: dict[str, Function],
    definition: Function,
    inputs: Sequence[torch.Tensor],
    dout: torch.Tensor,
    moved_bytes: tuple[float, float],
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Rows of the forward pass and of forward and backward; moved_bytes: the least traffic of each."""
    candidates, out_ratio, worst_ratio = verified(candidates, definition, inputs, dout)

    def forward(function: Function) -> torch.Tensor:
        with torch.no_grad():
            return function(*inputs)

    passes = [
        ("fwd", forward, moved_bytes[0], out_ratio),
        ("fwd+bwd", lambda function: with_gradients(function, inputs, dout), sum(moved_bytes), worst_ratio),
    ]
    for name, run, least, ratio in passes:
        timed = {key: (lambda function=function, run=run: run(function)) for key, function in candidates.items()}
        times = measure.samples_ms(timed, repeats)
        peak = measure.peak_gib(timed["ours"])
        yield measure.row(f"{op} {name}", shape, times, measure.floor_ms(0, least), peak, ratio)


def mixture_rows(quick: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    sources = [torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(J)]
    score = (3 * D**-0.5 * torch.randn(D, device="cuda")).requires_grad_()
    row_bytes = 2 * T * D
    return rows_of(
        "attention residual",
        f"L={J}, T={T} x {D}",
        mixture_candidates(),
        lambda *x: residual.reference.attn_residual(x[:-1], x[-1], EPS),
        [*sources, score],
        torch.randn(T, D, device="cuda", dtype=torch.bfloat16),
        ((J + 1) * row_bytes, (2 * J + 1) * row_bytes),
        3 if quick else 12,
    )


def gated_norm_rows(quick: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    x, gate = (torch.randn(T, H, K, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    weight = (1 + torch.randn(K, device="cuda") / 4).requires_grad_()
    row_bytes = 2 * T * H * K
    return rows_of(
        "gated RMSNorm",
        f"T={T} x {H} x {K}",
        gated_norm_candidates(),
        lambda *y: residual.reference.gated_rms_norm(*y, EPS),
        [x, gate, weight],
        torch.randn(T, H, K, device="cuda", dtype=torch.bfloat16),
        (3 * row_bytes, 5 * row_bytes),
        3 if quick else 12,
    )


if __name__ == "__main__":
    measure.main(
        __doc__,
        "python hub_kernels/residual/benchmarks/benchmark.py",
        {"mixture": mixture_rows, "gated_norm": gated_norm_rows, "output_projection": output_projection.rows},
    )
