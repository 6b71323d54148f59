"""Measure how tokens travel to experts and back: dispatch and combine, forward and backward, at Kimi-K3's sizes.

    torchrun --nproc_per_node 2 scripts/bench_dispatch.py --device cuda
    torchrun --nproc_per_node 2 scripts/bench_dispatch.py --tokens 64 --experts 16 --chosen 4 --width 32 --hidden 8

Every process has random tokens, each with random experts, equally likely. The experts return what they get, so that
nothing but the exchange is timed; against it, in the same run with the same tokens and experts, stand the all-to-all
implementation of expert parallelism of transformers, with routing weights in bf16, which is the fastest for it, and the
link: the same bytes in collectives alone. Then dense products with the FLOPs of the experts take their place, to see
what overlap hides. Everything is checked before it is timed. Results go to results/dispatch.json; the second line is a
trial on CPU, which leaves none.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from transformers.distributed.expert_parallel import AllToAllEP

from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.expert_parallel import AllToAll, Overlapped, Travel, saving_line
from modeling_latentmoe.training.links import Direct
from modeling_latentmoe.training.mesh import owned_experts
from modeling_latentmoe.training.results import record

RESULTS = Path(__file__).resolve().parent.parent / "results" / "dispatch.json"
FORMS = {
    "latentmoe": Travel(),
    "sums bf16": Travel(sums="bf16"),
    "rows int8, sums bf16": Travel(rows="int8", sums="bf16"),
    "rows fp8, sums bf16": Travel(rows="fp8", sums="bf16"),
    "rows and sums int8": Travel(rows="int8", sums="int8"),
    "rows and sums fp8": Travel(rows="fp8", sums="fp8"),
}
CHUNKS = (0, 1, 2, 4)
# steps of which one is the average
PROFILED = 5
# of Kimi-K3's experts
HIDDEN = 3072


class Problem(NamedTuple):
    """What a process has: tokens x_TL, their experts ids_TS and routing weights, the gradient of the result."""

    x_TL: Tensor
    weights_TS: Tensor
    ids_TS: Tensor
    grad_TL: Tensor


Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
Experts = Callable[[Tensor, Tensor, Tensor, dict], Tensor]


def make_problem(tokens: int, args: argparse.Namespace, device: torch.device) -> Problem:
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x_TL, grad_TL = torch.randn(2, tokens, args.width, generator=generator, device=device).bfloat16()
    ids_TS = torch.rand(tokens, args.experts, generator=generator, device=device).topk(args.chosen).indices
    weights_TS = torch.rand(tokens, args.chosen, generator=generator, device=device)
    return Problem(x_TL.requires_grad_(), weights_TS.requires_grad_(), ids_TS, grad_TL)


def held_weights(ids_RS: Tensor, weights_RS: Tensor, owned: range) -> Tensor:
    """[R, 1]"""
    return (weights_RS * ((ids_RS >= owned.start) & (ids_RS < owned.stop))).sum(1, keepdim=True)


def ours(travel: Travel, args: argparse.Namespace, experts: Experts) -> Layer:
    kind = Overlapped if travel.chunks else AllToAll
    exchange = kind(Direct(dist.group.WORLD), args.experts, travel=travel)

    def layer(x_TL: Tensor, ids_TS: Tensor, weights_TS: Tensor) -> Tensor:
        sent = exchange.dispatch(x_TL, ids_TS, weights_TS)
        rows = (sent.x_RL, sent.ids_RS, sent.weights_RS, {})
        return exchange.combine(exchange.experts_on_parts(experts, *rows) if travel.chunks else experts(*rows), sent)

    return layer


class Identity(nn.Module):
    """Experts, as transformers' implementation calls them: one for every row."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, x_RL: Tensor, ids_R1: Tensor, weights_R1: Tensor) -> Tensor:
        return x_RL


def theirs(args: argparse.Namespace) -> Layer:
    mesh = init_device_mesh(args.device, (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    exchange = AllToAllEP(Identity(args.experts // dist.get_world_size()), mesh["ep"], mesh["tp"])
    return lambda x_TL, ids_TS, weights_TS: exchange(x_TL, ids_TS, weights_TS.bfloat16())


def step(layer: Layer, problem: Problem) -> Tensor:
    y_TL = layer(problem.x_TL, problem.ids_TS, problem.weights_TS)
    problem.x_TL.grad = problem.weights_TS.grad = None
    y_TL.backward(problem.grad_TL)
    return y_TL.detach()


def errors(layer: Layer, problem: Problem) -> dict[str, float]:
    """Relative errors of result and gradients where the experts return what they get, over all tokens of a process."""
    y_TL = step(layer, problem)
    factor_T1, x_TL, grad_TL = problem.weights_TS.detach().sum(1, keepdim=True), problem.x_TL.detach(), problem.grad_TL
    expected = {
        "y": (y_TL, factor_T1 * x_TL),
        "x_grad": (problem.x_TL.grad, factor_T1 * grad_TL),
        "weights_grad": (
            problem.weights_TS.grad,
            (x_TL.float() * grad_TL).sum(1, keepdim=True).expand_as(problem.weights_TS),
        ),
    }
    return {name: ((actual - right).norm() / right.norm()).item() for name, (actual, right) in expected.items()}


def milliseconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median, of the slower process."""
    taken = []
    for _ in range(repeats + 2):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - began))
    slowest = torch.tensor(statistics.median(taken[2:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def busy_ms(events: Iterable[FunctionEvent]) -> float:
    """Time in which at least one of them ran."""
    total, until = 0.0, -math.inf
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e3


def launches(work: Callable[[], Any]) -> dict[str, float]:
    """Kernels and copies that one step launches, how often the host waits for the device, and the time in which the
    device has something to do: what a step takes longer, the host adds. Waiting for another process is device time."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        work()
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(warning.message) for warning in caught)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            work()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    # those are ranges, not kernels
    kernels = [event for event in events if not event.name.startswith("nccl:")]
    return {"launches": len(kernels) / PROFILED, "waits": waits, "device_ms": busy_ms(kernels) / PROFILED}


def link(problem: Problem, args: argparse.Namespace, device: torch.device) -> tuple[float, int]:
    """(ms, bytes that leave this process) of the four exchanges of rows alone: bf16, the sums in fp32, and back."""
    share, world = args.experts // dist.get_world_size(), dist.get_world_size()
    sent = [int((problem.ids_TS // share == rank).any(1).sum()) for rank in range(world)]
    counts = torch.tensor(sent, device=device)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    received = received.tolist()
    elsewhere = sum(sent) - sent[dist.get_rank()]
    total, left = 0.0, 0
    for dtype, forth in (
        (torch.bfloat16, True),
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.bfloat16, False),
    ):
        here, there = (sent, received) if forth else (received, sent)
        rows = torch.ones(sum(here), args.width, dtype=dtype, device=device).view(torch.uint8)
        out = rows.new_empty(sum(there), rows.shape[1])
        total += milliseconds(
            lambda o=out, r=rows, h=here, t=there: dist.all_to_all_single(o, r, t, h), device, args.repeats
        )
        left += (elsewhere if forth else sum(here) - here[dist.get_rank()]) * rows.shape[1]
    return total, left


def dense_experts(args: argparse.Namespace, owned: range, device: torch.device) -> Experts:
    """Two products with as many FLOPs as the experts of a row here, expected from equal chances."""
    width = args.hidden * max(1, round(args.chosen / dist.get_world_size()))
    generator = torch.Generator(device).manual_seed(0)
    up, down = (
        torch.randn(*shape, generator=generator, device=device).div(shape[0] ** 0.5).bfloat16()
        for shape in ((args.width, 2 * width), (width, args.width))
    )

    def experts(x_RL: Tensor, ids_RS: Tensor, weights_RS: Tensor, _: dict) -> Tensor:
        gate, value = (x_RL @ up).chunk(2, dim=1)
        return ((gate * value) @ down) * held_weights(ids_RS, weights_RS, owned)

    return experts


def measure(tokens: int, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    world, rank, on_gpu = dist.get_world_size(), dist.get_rank(), device.type == "cuda"
    owned, problem, rows = owned_experts(rank, world, args.experts), make_problem(tokens, args, device), []
    shape = f"T={tokens} EP{world}"

    def tell(**row: Any) -> None:
        rows.append({"shape": shape, **row})
        if rank == 0:
            print(json.dumps(rows[-1]), flush=True)

    def identity(x_RL: Tensor, ids_RS: Tensor, weights_RS: Tensor, _: dict) -> Tensor:
        return x_RL * held_weights(ids_RS, weights_RS, owned)

    link_ms, left = link(problem, args, device)
    tell(op="link", ms=link_ms, bytes=left, gb_per_s=left / link_ms / 1e6)
    layers = {"transformers": theirs(args), **{name: ours(travel, args, identity) for name, travel in FORMS.items()}}
    for name, layer in layers.items():
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        row: dict[str, Any] = {"op": name, **errors(layer, problem)}
        limit = 1e-2 if name in ("transformers", "latentmoe") else 1e-1
        if not max(row["y"], row["x_grad"], row["weights_grad"]) < limit:
            raise FloatingPointError(f"{name}: {row}")
        if on_gpu:
            row["memory_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
            row |= launches(lambda one=layer: step(one, problem))
        row["ms"] = milliseconds(lambda one=layer: step(one, problem), device, args.repeats)
        if name == "latentmoe":
            row |= {"gb_per_s": left / row["ms"] / 1e6, "of_link": link_ms / row["ms"]}
            row["speedup"] = rows[-1]["ms"] / row["ms"]
        tell(**row)

    experts, expected = dense_experts(args, owned, device), None
    alone = ours(Travel(), args, experts)
    for chunks in CHUNKS:
        layer = ours(Travel(chunks=chunks), args, experts) if chunks else alone
        found = step(layer, problem), problem.x_TL.grad, problem.weights_TS.grad
        expected = found if expected is None else expected
        change = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))
        if not change < 1e-2:
            raise FloatingPointError(f"chunks {chunks}: {change}")
        ms = milliseconds(lambda one=layer: step(one, problem), device, args.repeats)
        tell(op=f"with experts' FLOPs, chunks {chunks}", ms=ms, change=change)
    return rows


def bench(argv: Sequence[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="of a process (8192 and 32768)")
    parser.add_argument("--experts", type=int, default=896, help="of the layer (default 896)")
    parser.add_argument("--chosen", type=int, default=16, help="experts of a token (default 16)")
    parser.add_argument("--width", type=int, default=3584, help="of the rows (default 3584)")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help=f"of an expert (default {HIDDEN})")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps, of which the median counts (default 10)")
    args = parser.parse_args(argv)
    if "LOCAL_RANK" not in os.environ:
        raise ValueError("start it with torchrun --nproc_per_node 2 scripts/bench_dispatch.py")
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(args.device), device_id=device if device.type == "cuda" else None
    )
    try:
        world = dist.get_world_size()
        if args.experts % world:
            raise ValueError(f"--experts {args.experts}: {world} processes cannot share them equally")
        if dist.get_rank() == 0:
            print(saving_line(args.experts, args.chosen, world), flush=True)
        rows = [row for tokens in args.tokens for row in measure(tokens, args, device)]
        if dist.get_rank() == 0 and device.type == "cuda":
            command = shlex.join(["torchrun", "--nproc_per_node", str(world), "scripts/bench_dispatch.py", *argv])
            record(RESULTS, command, args.device, rows)
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str]) -> int:
    return run_command(bench, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
