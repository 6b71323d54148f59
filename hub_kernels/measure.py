"""How the kernels' benchmarks measure: times, memory, floors, errors and the record file.

A benchmark verifies every candidate against float64 first, then times all that passed in one process, interleaved,
and writes `results/h200.json` at the top of the checkout: one entry per command, whose rows name `op` and `shape`,
our time and samples, the peers' times, the floor, peak memory, and our error over that of same-dtype torch. Every row
is written as soon as it is measured, so that a run that is cut short keeps what it has.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# Ceilings of one H200, measured on random data: a device-to-device copy and a large bf16 matrix product.
FLOPS_PER_SECOND, BYTES_PER_SECOND = 790e12, 4.3e12
# Cycles of the device, 10 ms, in which the host prepares what is timed.
AHEAD = 20_000_000
RESULTS = Path(__file__).resolve().parents[1] / "results" / "h200.json"
# Whose versions a record names where they are installed, beside those of torch and Triton.
PEERS = ("flash-linear-attention", "nemo-automodel", "tilelang", "liger-kernel", "transformers")


def floor_ms(flops: float, moved_bytes: float) -> float:
    """The least time for this much arithmetic and device-memory traffic, ms."""
    return max(flops / FLOPS_PER_SECOND, moved_bytes / BYTES_PER_SECOND) * 1e3


def samples_ms(functions: dict[str, Callable[[], Any]], repeats: int = 12, warmup: int = 3) -> dict[str, list[float]]:
    """Device times of each function, ms, taken in turn so that drift of the clocks meets all of them alike.

    The device waits while the host launches: what launches cost shows only where the host needs longer than AHEAD, or
    waits itself for the device.
    """
    for function in functions.values():
        for _ in range(warmup):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


def captured(function: Callable[[], Any]) -> Callable[[], None]:
    """Replay of a CUDA graph of the function, warmed up: what small launches cost without their gaps."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def peak_gib(function: Callable[[], Any]) -> float:
    """Memory the function takes at its peak above what was held before, GiB; outputs count."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak / 2**30


def relative_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """||x - truth|| / ||truth|| in float64; NaN anywhere gives infinity."""
    error = ((x.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-300)).item()
    return math.inf if math.isnan(error) else error


def row(
    op: str, shape: str, times: dict[str, list[float]], floor: float, peak: float | None, err_vs_torch: float | None
) -> dict[str, Any]:
    """One row of the record, printed as well; the entry "ours" of `times` is this repository's kernel."""
    median = {name: statistics.median(samples) for name, samples in times.items()}
    ours = median.pop("ours")
    fastest = min(median, key=median.__getitem__, default=None)
    line = f"{op:28s} {shape:26s} ours {ours:8.3f} ms = {ours / floor:5.2f} x floor {floor:.3f}"
    if fastest is not None:
        line += f" | fastest other {fastest} {median[fastest]:.3f} = {median[fastest] / ours:.2f} x ours"
    if peak is not None:
        line += f" | {peak:.2f} GiB"
    if err_vs_torch is not None:
        line += f" | error {err_vs_torch:.2f} x torch"
    print(line, flush=True)
    return {
        "op": op,
        "shape": shape,
        "ours_ms": ours,
        "ours_samples": times["ours"],
        "peers_ms": median,
        "floor_ms": floor,
        "peak_gib": peak,
        "err_vs_torch": err_vs_torch,
    }


def main(description: str, command: str, ops: dict[str, Callable[[bool], Iterable[dict[str, Any]]]]) -> None:
    """The command line of a benchmark of several operations, each a function of `quick` that gives its rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats, nothing written")
    parser.add_argument("--ops", default=",".join(ops), help=f"which of {', '.join(ops)}, separated by commas")
    arguments = parser.parse_args()
    chosen = arguments.ops.split(",")
    if unknown := set(chosen) - set(ops):
        parser.error(f"--ops: {', '.join(sorted(unknown))} is none of {', '.join(ops)}")
    for name in chosen:
        rows = ops[name](arguments.quick)
        if arguments.quick:
            list(rows)
        else:
            record(f"{command} --ops {name}", rows)


def record(command: str, rows: Iterable[dict[str, Any]], file: Path = RESULTS) -> None:
    """Write the rows into the record file, each as it comes, in place of those that the same command left there."""
    versions = {"torch": torch.__version__, "triton": metadata.version("triton"), "cuda": torch.version.cuda}
    versions |= {name: metadata.version(name) for name in PEERS if installed(name)}
    measured: list[dict[str, Any]] = []
    entry = {"device": torch.cuda.get_device_name(), "versions": versions, "command": command, "commit": commit()}
    for row in rows:
        measured.append(row)
        write_entry(entry | {"rows": measured}, file)


def commit() -> str:
    """The checkout's commit, "-dirty" where files other than records differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=RESULTS.parents[1], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS.parent.name}")
    return git("describe", "--always") + ("-dirty" if changed else "")


def installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def write_entry(entry: dict[str, Any], file: Path) -> None:
    """Put the entry into the record file, in place of one of the same command."""
    entries = json.loads(file.read_text()) if file.is_file() else []
    commands = [old["command"] for old in entries]
    place = commands.index(entry["command"]) if entry["command"] in commands else len(entries)
    entries[place : place + 1] = [entry]
    file.parent.mkdir(exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(entries, indent=1) + "\n")
    os.replace(partial, file)
