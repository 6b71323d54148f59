"""Routing on one GPU: verified against the torch definition, then timed beside it.

    python hub_kernels/latent_moe/benchmarks/route.py            # writes results/h200.json
    python hub_kernels/latent_moe/benchmarks/route.py --quick    # few repeats, nothing written
    python hub_kernels/latent_moe/benchmarks/route.py --parts 8192 balance    # these alone

Every row is written as soon as it is measured, under the command that measures its part alone.

A call takes less time on the device than its launches take on the host, which in a model runs ahead: what can be
captured is timed as the replay of a CUDA graph. The definition sorts, as the model does, with a bincount that waits for
the device.

Legend: T tokens, E experts, S chosen experts per token.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

HUB_KERNELS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HUB_KERNELS), str(HUB_KERNELS.parent), str(HUB_KERNELS / "latent_moe" / "torch-ext")]

import measure  # noqa: E402
from latent_moe.balance import count_biases, score_shares  # noqa: E402
from latent_moe.route import route  # noqa: E402
from latent_moe.route_reference import (  # noqa: E402
    Routing,
    count_biases_reference,
    route_reference,
    score_shares_reference,
)

from modeling_latentmoe import ops  # noqa: E402

E, S, BINS = 896, 16, 1000
TOKENS = (1024, 8192, 32768, 131072)
# Tokens of the table of choices: ids in int64, weights and scores in fp32, row and slot in int32.
CHOICE_BYTES = 8 + 4 + 4 + 4 + 4
# Choices may differ from the definition's where two scores are closer than fp32 can tell: shares of all tokens.
NEAR_TIES = 1e-3


def inputs(T: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(T, E, device="cuda"), torch.randn(E, device="cuda") / 8


def model_route(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the model does: choose, then sort the slots as its experts do."""
    ids, weights = ops.route(logits, bias, S)
    flat = ids.flatten()
    return ids, weights, torch.bincount(flat, minlength=E), flat.argsort(stable=True)


def gradient(function: Callable[..., torch.Tensor], logits: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    leaf = logits.detach().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf, d.to(logits.dtype))[0]


def verified(logits: torch.Tensor, bias: torch.Tensor, d: torch.Tensor) -> float:
    """The larger of the errors of weights and gradients over those of torch in fp32; SystemExit for a wrong result."""
    ours, plain = route(logits, bias, S), route_reference(logits, bias, S)
    truth: Routing = route_reference(logits.double(), bias.double(), S)
    same = (ours.ids_TS == truth.ids_TS).all(1) & (plain.ids_TS == truth.ids_TS).all(1)
    if not (~same).float().mean() <= NEAR_TIES:
        raise SystemExit(f"route: {int((~same).sum())} of {len(same)} tokens choose other experts than in float64")
    rows = ours.rows
    total = int(rows.offset[-1])
    slots = ours.ids_TS.flatten().argsort(stable=True)
    if not (total == ours.ids_TS.numel() and torch.equal(rows.slot_R.long(), slots)):
        raise SystemExit("route: rows are not sorted by expert")

    results = {
        "ours": (ours.weights_TS, gradient(lambda x: route(x, bias, S).weights_TS, logits, d)),
        "torch": (plain.weights_TS, gradient(lambda x: route_reference(x, bias, S).weights_TS, logits, d)),
    }
    wide = gradient(lambda x: route_reference(x, bias.double(), S).weights_TS, logits.double(), d)
    errors = {
        name: [measure.relative_error(x[same], t[same]) for x, t in zip(values, (truth.weights_TS, wide), strict=True)]
        for name, values in results.items()
    }
    least = 4 * torch.finfo(torch.float32).eps
    worst = max(a / max(b, least) for a, b in zip(errors["ours"], errors["torch"], strict=True))
    if not worst <= 2:
        raise SystemExit(f"route: error {worst:.2f} times that of torch")
    return worst


def routing_rows(T: int, quick: bool) -> Iterator[dict[str, Any]]:
    logits, bias = inputs(T)
    d = torch.randn(T, S, device="cuda")
    # The definition in float64 of all tokens at once would take several copies of the logits.
    error = verified(logits[:8192], bias, d[:8192])
    forward = {
        "ours": measure.captured(lambda: route(logits, bias, S)),
        "torch": lambda: model_route(logits, bias),
    }
    if not quick:
        compiled = torch.compile(model_route)
        forward["torch.compile"] = lambda: compiled(logits, bias)
    repeats = 3 if quick else 12
    shape = f"T={T}, top-{S} of {E}"
    logit_bytes, choice_bytes = 4 * T * E, CHOICE_BYTES * T * S
    floor = measure.floor_ms(0, logit_bytes + choice_bytes)
    peak = measure.peak_gib(lambda: route(logits, bias, S))
    yield measure.row("route fwd", shape, measure.samples_ms(forward, repeats), floor, peak, error)

    both = {
        "ours": measure.captured(lambda: gradient(lambda x: route(x, bias, S).weights_TS, logits, d)),
        "torch": lambda: gradient(lambda x: model_route(x, bias)[1], logits, d),
    }
    # Ids, scores and the gradient of the weights read, that of the logits written.
    floor = measure.floor_ms(0, 2 * logit_bytes + choice_bytes + (8 + 4 + 4) * T * S)
    yield measure.row("route fwd+bwd", shape, measure.samples_ms(both, repeats), floor, None, error)


def balance_rows(T: int, quick: bool) -> Iterator[dict[str, Any]]:
    """The statistics of both kinds of balancing, on the logits that were routed."""
    logits, bias = inputs(T)
    low, width = bias.amin() - 1, (bias.amax() - bias.amin() + 2) / BINS
    cutoff = route(logits, bias, S).cutoff_T
    counts, wanted = (torch.zeros(E, BINS, dtype=torch.int32, device="cuda") for _ in range(2))
    count_biases(counts, logits, cutoff, low, width)
    count_biases_reference(wanted, logits, cutoff, low, width)
    # A number at the edge of a bin may fall to either side of it.
    if not (counts.cumsum(1) - wanted.cumsum(1)).abs().sum() <= NEAR_TIES * T * E:
        raise SystemExit("count_biases: counts differ from the definition's")
    d = torch.randn(E, device="cuda")
    names = {"ours": score_shares, "torch": score_shares_reference}
    truth = gradient(score_shares_reference, logits.double(), d)
    errors = {name: measure.relative_error(gradient(f, logits, d), truth) for name, f in names.items()}
    ratio = errors["ours"] / errors["torch"]
    if not ratio <= 2:
        raise SystemExit(f"score_shares: error {ratio:.2f} times that of torch")
    del truth

    def observe() -> None:
        """Quantile Balancing without the cutoffs of the routing."""
        best = (logits.sigmoid() + bias).topk(S + 1, dim=-1).values[:, -1]
        count_biases_reference(wanted, logits, best, low, width)

    repeats, shape, logit_bytes = 3 if quick else 12, f"T={T} x {E}", 4 * T * E
    timed = {
        "ours": measure.captured(lambda: count_biases(counts, logits, cutoff, low, width)),
        "torch": observe,
    }
    floor = measure.floor_ms(0, logit_bytes + 2 * counts.nbytes)
    yield measure.row("bias counts", shape, measure.samples_ms(timed, repeats), floor, None, None)
    timed = {
        "ours": measure.captured(lambda: gradient(score_shares, logits, d)),
        "torch": lambda: gradient(score_shares_reference, logits, d),
    }
    floor = measure.floor_ms(0, 3 * logit_bytes)
    yield measure.row("score shares fwd+bwd", shape, measure.samples_ms(timed, repeats), floor, None, ratio)


def main() -> None:
    parts = {str(T): lambda quick, T=T: routing_rows(T, quick) for T in TOKENS}
    parts["balance"] = lambda quick: balance_rows(8192, quick)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats, nothing written")
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=parts, help="tokens to route, or balance")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for part in arguments.parts:
        found = []
        for line in parts[part](arguments.quick):
            found.append(line)
            if not arguments.quick:
                measure.record(f"python hub_kernels/latent_moe/benchmarks/route.py --parts {part}", found)


if __name__ == "__main__":
    main()
