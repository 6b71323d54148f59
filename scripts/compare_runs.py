"""Train the same data in different layouts, processes and experts shared out in every way, and compare the runs.

    python scripts/compare_runs.py                                        # CPU: float64 and float32
    python scripts/compare_runs.py --device cuda --dtypes bf16            # as many GPUs as the layouts need
    python scripts/compare_runs.py readme                                 # write the tables into README.md
    python scripts/compare_runs.py folders runs/gpu runs/npu              # two runs of lora.py, step by step

Every run is `scripts/lora.py` itself, ten steps on packed pictures and texts of uneven lengths, started as a user
starts it. Loss and gradient norm of every step, every tensor of the final adapter, and the number of adapters are
compared with those of one process: fp64 to 1e-9; fp32 to 1e-5, but the gradient norm as close as one process in fp32 is
to fp64; bf16 to twice the spread of single runs whose rows come in another order.
Results go to results/parallel.json. FSDP on CPU needs --cpu_fsdp, a script that lets Accelerate do what it refuses.

`folders` compares runs that exist, as one on a GPU and one on an NPU: loss and gradient norm of every step that both
have. The mean of the losses' relative differences must be below --limit.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.files import write_text
from modeling_latentmoe.training.loading import SHIPPED_MODEL
from modeling_latentmoe.training.monitor import read_records
from modeling_latentmoe.training.results import record, with_tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "parallel.json"
STEPS, ROWS = 10, 24
# relative: of loss and gradient norm in every step, and of the norm of every tensor of the adapter
LIMITS = {"fp64": 1e-9, "fp32": 1e-5}
# By default AdamW's first update is the sign of the gradient: an element whose gradient is nothing but rounding moves
# as far as any other, in either direction; and with large steps in fp32 some token soon goes to other experts.
SETTINGS = {
    "fp64": [],
    "fp32": ["--lr", "3e-5", "--adam_epsilon", "1e-3"],
    "bf16": ["--lr", "1e-4", "--adam_epsilon", "1e-3"],
}


class Layout(NamedTuple):
    """How many processes, whether FSDP2 shards what is not an expert, and how many share the experts."""

    processes: int
    fsdp: bool
    ep: int

    def __str__(self) -> str:
        if self.processes == 1:
            return "1 process"
        parts = ["FSDP2" if self.fsdp else "DDP"] + [f"EP {self.ep}"] * (self.ep > 1)
        return f"{self.processes} processes, {' x '.join(parts)}"


ONE = Layout(1, False, 1)
LAYOUTS = {
    "cpu": [
        *(Layout(2, True, 1), Layout(4, True, 1)),
        *(Layout(2, False, 2), Layout(4, False, 4), Layout(8, False, 8)),
        Layout(4, True, 2),
    ],
    "cuda": [Layout(2, True, 1), Layout(2, False, 2), Layout(2, True, 2)],
}
LAYOUTS["npu"] = LAYOUTS["cuda"]


class Run(NamedTuple):
    """What a run left: losses and gradient norms by step, the adapter, and what it says about its parameters."""

    losses: Tensor
    norms: Tensor
    adapter: dict[str, Tensor]
    trainable: str


def write_data(folder: Path) -> Path:
    """Rows of pictures with a question and rows of text, from a few tokens to a hundred."""
    rows = []
    for i in range(ROWS):
        answer = " ".join(str((i * k) % 97) for k in range(1, 2 + 5 * (i % 4)))
        row: dict[str, Any] = {"messages": [{"role": "user", "content": f"{i} times?"}]}
        row["messages"].append({"role": "assistant", "content": answer})
        if i % 3 == 0:
            noise = torch.randint(0, 256, (28 * (1 + i % 2), 28 * (1 + i % 3), 3), dtype=torch.uint8)
            Image.fromarray(noise.numpy()).save(folder / f"{i}.png")
            row["images"] = [f"{i}.png"]
        rows.append(json.dumps(row))
    file = folder / "rows.jsonl"
    file.write_text("\n".join(rows) + "\n")
    return file


def shuffled(data: Path, number: int) -> Path:
    """The same rows in another order, in a file beside `data`."""
    lines = data.read_text().splitlines()
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(number)).tolist()
    file = data.with_name(f"rows-{number}.jsonl")
    file.write_text("\n".join(lines[i] for i in order) + "\n")
    return file


def run(args: argparse.Namespace, folder: Path, data: Path, layout: Layout, dtype: str, more: Sequence[str]) -> Run:
    """Train in one layout. A step is one pass over the data: each process packs all of its rows into one."""
    output = folder / "run"
    settings = ["--model", SHIPPED_MODEL, "--dataset", str(data), "--packing", "--batch_size", "16"]
    settings += ["--max_length", "256"]
    settings += ["--max_steps", str(STEPS), "--ep", str(layout.ep), "--dtype", dtype, "--save_every", str(STEPS)]
    settings += ["--output_dir", str(output), "--overwrite", *more]
    script = ["scripts/lora.py", *settings]
    launch = ["torch.distributed.run", "--nproc_per_node", str(layout.processes)]
    launch += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--"]
    if layout.fsdp:
        launch = ["accelerate.commands.launch", "--config_file", "accelerate_configs/fsdp2.yaml"]
        launch += ["--num_processes", str(layout.processes), "--main_process_port", "0"]
        if args.device == "cpu":
            script = [args.cpu_fsdp, *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Python looks there first; the starter script of FSDP on CPU has another folder as its own
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    if args.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-m", *launch, *script], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise OSError(f"{layout} failed: {done.stderr[-3000:]}")
    records = read_records(output / "metrics.jsonl")
    losses, norms = (torch.tensor([r[name] for r in records], dtype=torch.float64) for name in ("loss", "grad_norm"))
    adapter = load_file(output / "adapter_model.safetensors")
    trainable = next(line for line in done.stdout.splitlines() if line.startswith("trainable parameters"))
    return Run(losses, norms, adapter, trainable)


def difference(ours: Run, theirs: Run) -> dict[str, Any]:
    """Largest relative differences of two runs, and whether they train the same adapters."""
    same = ours.adapter.keys() == theirs.adapter.keys() and ours.trainable == theirs.trainable
    tensors = [relative(ours.adapter[name].double(), theirs.adapter[name].double()) for name in theirs.adapter]
    return {
        "loss": float(((ours.losses - theirs.losses) / theirs.losses).abs().max()),
        "grad_norm": float(((ours.norms - theirs.norms) / theirs.norms).abs().max()),
        "adapter": max(tensors),
        "same_adapters": same,
        "adapters": len(ours.adapter),
        "trainable": int(re.search(r"([\d,]+) of", ours.trainable)[1].replace(",", "")),
    }


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm; 0 for two tensors of zeros."""
    norm = float(theirs.norm())
    return float((ours - theirs).norm()) / norm if norm else float(ours.norm())


def compare(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for every layout, dtype and kind of checkpointing."""
    torch.manual_seed(0)
    data, rows = write_data(folder), []
    for dtype in args.dtypes:
        reference = run(args, folder, data, ONE, dtype, SETTINGS[dtype])
        limits = dict.fromkeys(("loss", "grad_norm", "adapter"), LIMITS.get(dtype))
        if dtype == "fp32":
            # two fp32 runs need not be closer to each other than one of them is to the truth
            exact = difference(reference, run(args, folder, data, ONE, "fp64", SETTINGS["fp32"]))
            limits["grad_norm"] = max(limits["grad_norm"], exact["grad_norm"])
        if dtype not in LIMITS:
            # every step sees all rows: in another order of packing they are rounded otherwise, and that is all
            others = [run(args, folder, shuffled(data, n), ONE, dtype, SETTINGS[dtype]) for n in range(3)]
            spread = [difference(other, reference) for other in others]
            limits = {name: 2 * max(each[name] for each in spread) for name in limits}
        for layout in (ONE, *LAYOUTS[args.device]):
            kinds = ("none", "full", "selective")[layout == ONE : 3 if layout == Layout(4, True, 2) else 2]
            for checkpointing in kinds:
                more = [*SETTINGS[dtype], "--gradient_checkpointing", checkpointing]
                row = {"op": "ten steps", "shape": str(layout), "dtype": dtype, "checkpointing": checkpointing}
                row |= difference(run(args, folder, data, layout, dtype, more), reference) | {"limits": limits}
                row["agrees"] = row["same_adapters"] and all(row[name] <= limit for name, limit in limits.items())
                print(json.dumps(row), flush=True)
                rows.append(row)
    return rows


def tables(records: list[dict[str, Any]]) -> dict[str, str]:
    """The README's table: the worst of all kinds of checkpointing, for each device, layout and dtype."""
    lines = ["| device | layout | dtype | loss | gradient norm | adapter | limits | adapters | trainable |"]
    lines += ["|" + "---|" * 9]
    for entry in records:
        worst: dict[tuple[str, str], dict[str, Any]] = {}
        for row in entry["rows"]:
            held = worst.setdefault((row["shape"], row["dtype"]), dict(row))
            for name in ("loss", "grad_norm", "adapter"):
                held[name] = max(held[name], row[name])
        for row in worst.values():
            figures = " | ".join(f"{row[name]:.1e}" for name in ("loss", "grad_norm", "adapter"))
            limits = ", ".join(f"{limit:.0e}" for limit in row["limits"].values())
            counts = f"{row['adapters']} | {row['trainable']:,}"
            lines.append(f"| {entry['device']} | {row['shape']} | {row['dtype']} | {figures} | {limits} | {counts} |")
    return {"parallel": "\n".join(lines)}


def compare_folders(folders: Sequence[Path], limit: float) -> None:
    """Print loss and gradient norm of two runs side by side; ValueError where they are further apart than `limit`."""
    records: list[dict[int, dict[str, Any]]] = []
    for folder in folders:
        if not (folder / "metrics.jsonl").is_file():
            raise ValueError(f"{folder} has no metrics.jsonl: it is no --output_dir of scripts/lora.py")
        rows = {row["step"]: row for row in read_records(folder / "metrics.jsonl") if "loss" in row}
        for step, row in rows.items():
            for name in ("loss", "grad_norm"):
                if not isinstance(value := row.get(name), int | float):
                    raise ValueError(f"{folder / 'metrics.jsonl'}: {name} of step {step} is {value!r}, no number")
        records.append(rows)
    steps = sorted(records[0].keys() & records[1].keys())
    if not steps:
        raise ValueError(f"{folders[0]} and {folders[1]} have no step in common")
    print(f"{'step':>6} {'loss':>11} {'loss':>11} {'difference':>10} {'norm':>11} {'norm':>11} {'difference':>10}")
    found = {"loss": [], "grad_norm": []}
    for step in steps:
        cells = []
        for name, differences in found.items():
            first, second = (float(rows[step][name]) for rows in records)
            differences.append(abs(first - second) / max(abs(first), torch.finfo(torch.float32).tiny))
            cells += [f"{first:11.5g}", f"{second:11.5g}", f"{differences[-1]:10.2%}"]
        print(f"{step:6}", *cells)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    print(f"mean relative difference of {len(steps)} steps: loss {means['loss']:.3%}, norm {means['grad_norm']:.3%}")
    left = len(records[0].keys() ^ records[1].keys())
    if left:
        raise ValueError(f"{left} steps are only in one of {folders[0]} and {folders[1]}")
    # a loss that is not a number is no agreement
    if not means["loss"] <= limit:
        raise ValueError(f"the losses differ by {means['loss']:.3%} in the mean, over --limit {limit:.3%}")


def main_command(argv: Sequence[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("command", nargs="?", default="run", choices=("run", "readme", "folders"), help="default run")
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="of `folders`: the first is the reference"
    )
    parser.add_argument("--limit", type=float, default=0.01, help="of `folders`, default %(default)s")
    parser.add_argument("--device", default="cpu", choices=sorted(LAYOUTS), help="default cpu")
    parser.add_argument("--dtypes", nargs="+", default=["fp64", "fp32"], choices=("fp64", "fp32", "bf16"))
    parser.add_argument("--cpu_fsdp", default="tests/dist/cpu_fsdp.py", help="script that starts FSDP2 on CPU")
    args = parser.parse_args(argv)
    if args.command == "readme":
        readme = ROOT / "README.md"
        write_text(readme, with_tables(readme.read_text(), tables(json.loads(RESULTS.read_text()))))
        return
    if (args.command == "folders") != (len(args.folders) == 2):
        raise ValueError("folders: name two --output_dir of scripts/lora.py, and nothing for other commands")
    if args.command == "folders":
        compare_folders(args.folders, args.limit)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(args, Path(folder))
    record(RESULTS, shlex.join(["python", "scripts/compare_runs.py", *argv]), args.device, rows)
    different = [f"{row['shape']} in {row['dtype']}" for row in rows if not row["agrees"]]
    if different:
        raise ValueError(f"{len(different)} of {len(rows)} runs differ too much from one process, first {different[0]}")


def main(argv: Sequence[str]) -> int:
    return run_command(main_command, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
