"""Short convolution and SiLU of q, k and v at the released model's width: errors, then times."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from kda import short_conv, short_conv_reference
from measure import floor_ms, peak_gib, relative_error, row, samples_ms

STREAMS, P, W, T = 3, 12288, 4, 8192
# Channels are independent: float64 takes some of each stream.
CHECKED = 64
# Our error over that of the torch definition; of others, who may round weights' gradients, the error itself.
OURS, OTHERS = 2.0, 2e-2
# An fp32 error below this is rounding, whichever way it fell.
EXACT = 5e-7

Convolution = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def implementations(quick: bool) -> dict[str, Convolution]:
    found: dict[str, Convolution] = {"ours": short_conv, "torch": short_conv_reference}
    if not quick:
        found["torch.compile"] = torch.compile(short_conv_reference)
    try:
        from fla.modules.causal_conv1d import causal_conv1d
    except ImportError:
        print("short convolution: flash-linear-attention is not installed")
        return found
    found["fla, a launch per stream"] = lambda xs, ws: [
        causal_conv1d(x.unsqueeze(0), w, activation="silu")[0].squeeze(0) for x, w in zip(xs, ws, strict=True)
    ]
    return found


def results(convolution: Convolution, xs, weights, dys) -> list[torch.Tensor]:
    """Outputs and gradients of streams and weights."""
    leaves = [x.detach().requires_grad_() for x in [*xs, *weights]]
    ys = convolution(leaves[: len(xs)], leaves[len(xs) :])
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, leaves, dys)]


def errors(convolution: Convolution, xs, weights, dys) -> tuple[float, float]:
    """The largest error of a result, and the largest over that of the torch definition."""
    channels = torch.randperm(P, device="cuda")[:CHECKED]
    some = [[x[:, channels] for x in xs], [w[channels] for w in weights], [dy[:, channels] for dy in dys]]
    plain = results(short_conv_reference, *some)
    truth = results(short_conv_reference, *([x.double() for x in group] for group in some))
    actual = results(convolution, xs, weights, dys)
    # Streams, their outputs and gradients have the channels last; weight gradients have them first.
    picked = [x[channels] if x.shape[0] == P else x[:, channels] for x in actual]
    found = [relative_error(x, t) for x, t in zip(picked, truth, strict=True)]
    plain_errors = [relative_error(p, t) for p, t in zip(plain, truth, strict=True)]
    return max(found), max(e / max(p, EXACT) for e, p in zip(found, plain_errors, strict=True))


def rows(quick: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    xs, dys = ([torch.randn(T, P, device="cuda", dtype=torch.bfloat16) for _ in range(STREAMS)] for _ in range(2))
    weights = [torch.randn(P, W, device="cuda") / W**0.5 for _ in range(STREAMS)]
    passed, ours_error = {}, 0.0
    for name, convolution in implementations(quick).items():
        error, over_torch = errors(convolution, xs, weights, dys)
        if name == "ours":
            ours_error = over_torch
            if not over_torch <= OURS:
                raise SystemExit(f"short convolution: error {over_torch:.2f} times that of torch")
        if error <= OTHERS:
            passed[name] = convolution
        else:
            print(f"short convolution: {name} is left out, relative error {error:.1e}")

    def forward(convolution: Convolution) -> Callable[[], Any]:
        return lambda: convolution(xs, weights)

    def both(convolution: Convolution) -> Callable[[], Any]:
        return lambda: results(convolution, xs, weights, dys)

    shape, element_bytes = f"T={T} x {STREAMS} x {P}", 2 * STREAMS * T * P
    found = []
    # Forward: x read, y written; backward: x and dy read, dx written.
    for name, work, transfers in (("fwd", forward, 2), ("fwd+bwd", both, 5)):
        times = samples_ms({name: work(convolution) for name, convolution in passed.items()}, 5 if quick else 12)
        peak = peak_gib(work(short_conv))
        floor = floor_ms(0, transfers * element_bytes)
        found.append(row(f"short conv + SiLU q,k,v {name}", shape, times, floor, peak, ours_error))
    return found
