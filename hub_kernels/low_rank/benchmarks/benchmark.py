"""Low-rank updates on one GPU: verified against float64, then timed beside PEFT's formula and its variants.

    python hub_kernels/low_rank/benchmarks/benchmark.py            # writes results/h200.json
    python hub_kernels/low_rank/benchmarks/benchmark.py --quick    # few repeats, nothing written

Legend: T tokens, r rank, I and O widths of a layer's input and output.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

HUB_KERNELS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HUB_KERNELS), str(HUB_KERNELS / "low_rank" / "torch-ext")]

import low_rank  # noqa: E402
import measure  # noqa: E402

T, RANK, SCALING = 8192, 16, 2.0
WIDTHS = [(7168, 12288), (12288, 7168), (7168, 33792)]
# Peers may round their factors, but must compute the same function.
PEER_ERROR = 2e-2

Function = Callable[..., torch.Tensor]


def peft_formula(y: torch.Tensor, x: torch.Tensor, a_rI: torch.Tensor, b_Or: torch.Tensor) -> torch.Tensor:
    """What PEFT computes with fp32 factors beside a 16-bit layer."""
    return (y + F.linear(F.linear(x.float(), a_rI), b_Or) * SCALING).to(y.dtype)


def autocast_formula(y: torch.Tensor, x: torch.Tensor, a_rI: torch.Tensor, b_Or: torch.Tensor) -> torch.Tensor:
    """The same under bf16 autocast, which rounds the factors."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return y + F.linear(F.linear(x, a_rI), b_Or) * SCALING


def exact(y: torch.Tensor, x: torch.Tensor, a_rI: torch.Tensor, b_Or: torch.Tensor) -> torch.Tensor:
    return low_rank.reference.add_low_rank(y, x, a_rI, b_Or, SCALING)


CANDIDATES: dict[str, Function] = {
    "ours": lambda *inputs: low_rank.add_low_rank(*inputs, SCALING),
    "PEFT's formula": peft_formula,
    "PEFT's formula, torch.compile": torch.compile(peft_formula, dynamic=False),
    "bf16 autocast": autocast_formula,
}


def with_gradients(function: Function, inputs: Sequence[torch.Tensor], dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


def verified(inputs: Sequence[torch.Tensor], dout: torch.Tensor) -> tuple[dict[str, Function], float, float]:
    """Candidates that pass, and our error over that of PEFT's formula: of the output, and the worst of all."""
    truth = with_gradients(exact, [x.detach().double().requires_grad_() for x in inputs], dout.double())
    errors = {}
    for name, function in CANDIDATES.items():
        results = with_gradients(function, inputs, dout)
        errors[name] = [measure.relative_error(x, t) for x, t in zip(results, truth, strict=True)]
        print(f"{name}: errors of out, dy, dx, da, db", " ".join(f"{error:.1e}" for error in errors[name]))
    # fp32 results of torch may be exact by chance.
    least = 4 * torch.finfo(torch.float32).eps
    ratios = [a / max(b, least) for a, b in zip(errors["ours"], errors["PEFT's formula"], strict=True)]
    if not max(ratios) <= 2:
        raise SystemExit(f"ours errs more than twice as much as PEFT's formula: {ratios}")
    return {n: f for n, f in CANDIDATES.items() if max(errors[n]) <= PEER_ERROR}, ratios[0], max(ratios)


def rows_of(inputs: Sequence[torch.Tensor], dout: torch.Tensor, repeats: int) -> Iterator[dict[str, Any]]:
    """Rows of the forward pass and of forward and backward."""
    candidates, out_ratio, worst_ratio = verified(inputs, dout)
    I_bytes, O_bytes = inputs[1].nbytes, inputs[0].nbytes

    def forward(function: Function) -> torch.Tensor:
        with torch.no_grad():
            return function(*inputs)

    forward_bytes = I_bytes + 2 * O_bytes
    passes = [
        ("fwd", forward, forward_bytes, out_ratio),
        ("fwd+bwd", lambda f: with_gradients(f, inputs, dout), forward_bytes + 2 * I_bytes + O_bytes, worst_ratio),
    ]
    for name, run, least, ratio in passes:
        timed = {key: (lambda function=function, run=run: run(function)) for key, function in candidates.items()}
        times = measure.samples_ms(timed, repeats)
        shape = f"T={len(dout)}, {inputs[1].shape[1]} -> {dout.shape[1]}, r={RANK}"
        peak = measure.peak_gib(timed["ours"])
        yield measure.row(f"low-rank update {name}", shape, times, measure.floor_ms(0, least), peak, ratio)


def update_rows(quick: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    for K, N in WIDTHS:
        y, x = (torch.randn(T, width, device="cuda", dtype=torch.bfloat16) for width in (N, K))
        a, b = torch.randn(RANK, K, device="cuda") * K**-0.5, torch.randn(N, RANK, device="cuda") * RANK**-0.5
        inputs = [tensor.requires_grad_() for tensor in (y, x, a, b)]
        yield from rows_of(inputs, torch.randn_like(y), 3 if quick else 12)
        del y, x, inputs


if __name__ == "__main__":
    measure.main(__doc__, "python hub_kernels/low_rank/benchmarks/benchmark.py", {"update": update_rows})
