"""The activations alone on one GPU: verified against float64, then timed beside torch and torch.compile.

    python hub_kernels/latent_moe/benchmarks/glu.py            # writes results/h200.json
    python hub_kernels/latent_moe/benchmarks/glu.py --quick    # few repeats, nothing written
    python hub_kernels/latent_moe/benchmarks/glu.py --rows 8192    # this number of rows alone

Every row of the record is written as soon as it is measured, under the command that measures its number of rows alone.

Legend: T rows, F width.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

HUB_KERNELS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HUB_KERNELS), str(HUB_KERNELS / "latent_moe" / "torch-ext")]

import latent_moe  # noqa: E402
import measure  # noqa: E402
from latent_moe.reference import activation_reference  # noqa: E402

# Widths by numbers of rows.
SHAPES = {131072: 3072, 8192: 33792}
BETA, LINEAR_BETA = 4.0, 25.0

Function = Callable[..., torch.Tensor]


def defined(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return activation_reference(gate, up, "situ", BETA, LINEAR_BETA)


CANDIDATES: dict[str, Function] = {
    "ours": lambda gate, up: latent_moe.situ_glu(gate, up, BETA, LINEAR_BETA),
    "torch": defined,
    "torch.compile": torch.compile(defined, dynamic=False),
}


def with_gradients(function: Function, inputs: Sequence[torch.Tensor], dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


def error_ratios(inputs: Sequence[torch.Tensor], dout: torch.Tensor) -> list[float]:
    """Our errors over torch's, of the output and both gradients, on a share of the rows."""
    inputs, dout = [x.detach()[:4096].requires_grad_() for x in inputs], dout[:4096]
    truth = with_gradients(defined, [x.detach().double().requires_grad_() for x in inputs], dout.double())
    ours, plain = (with_gradients(CANDIDATES[name], inputs, dout) for name in ("ours", "torch"))
    pairs = zip(ours, plain, truth, strict=True)
    ratios = [measure.relative_error(x, t) / measure.relative_error(p, t) for x, p, t in pairs]
    if not max(ratios) <= 2:
        raise SystemExit(f"ours errs more than twice as much as torch: {ratios}")
    return ratios


def rows_of(T: int, F: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Rows of the record: of the forward pass and of forward and backward."""
    inputs = [torch.randn(T, F, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    dout = torch.randn_like(inputs[0])
    ratios = error_ratios(inputs, dout)

    def forward(function: Function) -> torch.Tensor:
        with torch.no_grad():
            return function(*inputs)

    passes = [
        ("fwd", forward, 3 * dout.nbytes, ratios[0]),
        ("fwd+bwd", lambda function: with_gradients(function, inputs, dout), 8 * dout.nbytes, max(ratios)),
    ]
    for name, run, least, ratio in passes:
        timed = {key: (lambda function=function, run=run: run(function)) for key, function in CANDIDATES.items()}
        times = measure.samples_ms(timed, repeats)
        peak = measure.peak_gib(timed["ours"])
        yield measure.row(f"SiTU {name}", f"{T} x {F}", times, measure.floor_ms(0, least), peak, ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats, nothing written")
    parser.add_argument("--rows", type=int, nargs="+", default=list(SHAPES), choices=SHAPES)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for T in arguments.rows:
        found = []
        for line in rows_of(T, SHAPES[T], 3 if arguments.quick else 12):
            found.append(line)
            if not arguments.quick:
                measure.record(f"python hub_kernels/latent_moe/benchmarks/glu.py --rows {T}", found)


if __name__ == "__main__":
    main()
