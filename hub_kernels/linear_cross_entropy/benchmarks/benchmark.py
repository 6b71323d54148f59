"""Frozen-head linear + cross-entropy at the released model's size: errors, times, memory.

python hub_kernels/linear_cross_entropy/benchmarks/benchmark.py [--quick]

Public implementations are timed where they are installed: flash-linear-attention, liger-kernel, cut-cross-entropy.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "torch-ext"), str(HERE.parents[2])]

from linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference  # noqa: E402
from measure import floor_ms, main, peak_gib, relative_error, row, samples_ms  # noqa: E402

T, D, V = 8192, 7168, 163840
# Errors over those of the torch definition: ours may reach the first, another implementation the second.
OURS, OTHERS = 2.0, 4.0
# What --quick leaves out: long to run or to compile.
SLOW = ("fla linear CE", "cut CE", "torch.compile")

# The mean loss of all tokens, from hidden [T, D], weight [V, D], target [T].
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def definition(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def ours(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, target).mean()


def fla() -> dict[str, Loss]:
    from fla.modules import FusedCrossEntropyLoss
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    fused = FusedCrossEntropyLoss(inplace_backward=True)
    return {
        "linear + fla CE": lambda h, w, y: fused(F.linear(h, w), y),
        "fla linear CE": lambda h, w, y: fused_linear_cross_entropy_loss(h, y, w),
    }


def liger() -> dict[str, Loss]:
    from liger_kernel.transformers.functional import liger_cross_entropy, liger_fused_linear_cross_entropy

    return {
        "linear + Liger CE": lambda h, w, y: liger_cross_entropy(F.linear(h, w), y),
        "Liger linear CE": lambda h, w, y: liger_fused_linear_cross_entropy(h, w, y),
    }


def cut() -> dict[str, Loss]:
    from cut_cross_entropy import linear_cross_entropy as cut_linear_cross_entropy

    # Without its filter, which leaves out small probabilities.
    return {"cut CE": lambda h, w, y: cut_linear_cross_entropy(h, w, y, filter_eps=None)}


def others() -> dict[str, Loss]:
    """Plain torch, and the public implementations that are installed."""
    losses: dict[str, Loss] = {"torch": definition, "torch.compile": torch.compile(definition)}
    for public in (fla, liger, cut):
        try:
            losses |= public()
        except ImportError as missing:
            print(f"{public.__name__}: not installed ({missing})")
    return losses


def with_gradient(loss: Loss, hidden, weight, target) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = hidden.detach().requires_grad_()
    value = loss(hidden, weight, target)
    return value.detach(), torch.autograd.grad(value, hidden)[0]


def verified(losses: dict[str, Loss], hidden, weight, target) -> tuple[dict[str, Loss], float]:
    """The implementations whose loss and d hidden are right, and the worse of our errors over torch's."""
    wide = hidden.double(), weight.double()
    truth = with_gradient(lambda h, w, y: linear_cross_entropy_reference(h, w, y).mean(), *wide, target)
    del wide
    plain = [
        relative_error(x, t) for x, t in zip(with_gradient(definition, hidden, weight, target), truth, strict=True)
    ]
    # The mean of many losses is right by chance to more digits than fp32 promises.
    allowed = [max(plain[0], 1e-6), plain[1]]
    kept, ratio = {}, {}
    for name, loss in losses.items():
        # A public implementation that does not run here is no candidate; ours has to.
        try:
            results = with_gradient(loss, hidden, weight, target)
        except Exception as problem:
            if name == "ours":
                raise
            print(f"{name}: dropped, {type(problem).__name__}: {problem}")
            continue
        errors = [relative_error(x, t) for x, t in zip(results, truth, strict=True)]
        ratio[name] = max(e / a for e, a in zip(errors, allowed, strict=True))
        right = ratio[name] <= (OURS if name == "ours" else OTHERS)
        print(f"{name:18s} loss {errors[0]:.1e}, d hidden {errors[1]:.1e}{'' if right else ': dropped'}", flush=True)
        if right:
            kept[name] = loss
        del results
        torch.cuda.empty_cache()
    assert "ours" in kept, f"error {ratio['ours']:.2f} x torch"
    return kept, ratio["ours"]


def loss_rows(quick: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    hidden = torch.randn(T, D, device="cuda", dtype=torch.bfloat16)
    weight = torch.empty(V, D, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)
    target = torch.randint(0, V, (T,), device="cuda")
    data = hidden, weight, target

    losses = {"ours": ours, **others()}
    if quick:
        losses = {name: loss for name, loss in losses.items() if name not in SLOW}
    losses, error = verified(losses, *data)
    repeats = 3 if quick else 12
    shape = f"T={T}, V={V}"
    product, weight_bytes, hidden_bytes = 2 * T * D * V, 2 * V * D, 2 * T * D

    training = {name: lambda loss=loss: with_gradient(loss, *data) for name, loss in losses.items()}
    times = samples_ms(training, repeats)
    memory = {name: peak_gib(step) for name, step in training.items()}
    floor = floor_ms(2 * product, weight_bytes + 2 * hidden_bytes)
    yield row("frozen-head linear + CE fwd + d hidden", shape, times, floor, memory["ours"], error)
    print("peak GiB above the inputs: " + ", ".join(f"{name} {gib:.2f}" for name, gib in memory.items()))

    def forward(loss: Loss) -> Callable[[], torch.Tensor]:
        return torch.no_grad()(lambda: loss(*data))

    inference = {name: forward(loss) for name, loss in losses.items()}
    times, memory = samples_ms(inference, repeats), peak_gib(inference["ours"])
    floor = floor_ms(product, weight_bytes + hidden_bytes)
    yield row("frozen-head linear + CE fwd", shape, times, floor, memory, None)


if __name__ == "__main__":
    main(__doc__, "python hub_kernels/linear_cross_entropy/benchmarks/benchmark.py", {"loss": loss_rows})
