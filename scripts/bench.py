"""Measure what the README states about real sizes: loading shares of Kimi-K3, and running its first layers.

    python scripts/bench.py shares                                      # bytes and memory of a rank: EP 8, 16, 64
    python scripts/bench.py layers --ep 64 --tokens 16                  # layers 0-3, 14 of 896 experts, on CPU
    python scripts/bench.py layers --ep 8 --tokens 4096 --device cuda   # 112 experts on one GPU
    python scripts/bench.py readme                                      # write the tables into README.md

No weights are needed: a snapshot of the released layout is written first, into --workdir, with random bytes where the
layers compute and holes elsewhere. `shares` needs 12 GB of memory; `layers` takes 11 GB of disk and 16 GB of memory
at EP 64, 16 and 22 GB at EP 8. Results go to results/scale.json, a record for each command.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.files import write_text
from modeling_latentmoe.training.loading import SHIPPED_MODEL, load_model
from modeling_latentmoe.training.lora import add_adapter
from modeling_latentmoe.training.overlay import make_overlay
from modeling_latentmoe.training.rehearsal import chosen, write_snapshot
from modeling_latentmoe.training.results import record, with_tables
from modeling_latentmoe.training.streaming import planned_reads, restrict_experts

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "scale.json"
RELEASED = ROOT / "tests" / "fixtures" / "k3" / "config.json"
DEGREES = (8, 16, 64)
GB, GIB = 1e9, 2**30


def first_layers(layers: int) -> LatentMoEConfig:
    """The released config, cut to its first layers."""
    config = json.loads(RELEASED.read_text())
    text = config["text_config"]
    text["num_hidden_layers"] = layers
    for kind in ("kda_layers", "full_attn_layers"):
        text["linear_attn_config"][kind] = [n for n in text["linear_attn_config"][kind] if n <= layers]
    return LatentMoEConfig.from_dict(config)


def snapshot(folder: Path, layers: int, fill: Callable[[str], bool]) -> Path:
    """Write the first layers as a released snapshot in `folder`, and beside it the overlay that loads it."""
    config = first_layers(layers)
    source, out = folder / f"k3-{layers}-layers", folder / f"overlay-{layers}-layers"
    write_snapshot(source, config, fill)
    released = json.loads(RELEASED.read_text())
    released["text_config"] |= {
        name: getattr(config.text_config, name) for name in ("num_hidden_layers", "linear_attn_config")
    }
    (source / "config.json").write_text(json.dumps(released, indent=2))
    make_overlay(source, sorted(file.name for file in source.glob("*.safetensors")), out)
    return out


# ---------------------------------------------------------------------------------------------- shares


def shares(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rank 0 of every degree: the whole checkpoint by its headers, and a measured load of the first two layers."""
    folder = Path(args.workdir)
    whole = folder / "k3"
    config = LatentMoEConfig.from_pretrained(RELEASED)
    write_snapshot(whole, config)
    headers = sorted(whole.glob("*.safetensors"))
    small = snapshot(folder, 2, lambda name: False)
    rows = []
    for degree in DEGREES:
        with torch.device("meta"):
            model = LatentMoEForConditionalGeneration(config).to(torch.bfloat16)
        restrict_experts(model, 0, degree)
        owned = sum(tensor.nbytes for tensor in model.state_dict().values())
        requests, _ = planned_reads(model, headers, packed=True)
        read = sum(request.parts[-1].stop - request.parts[0].start for request in requests)
        read += sum(header_bytes(file) for file in headers)
        command = [sys.executable, __file__, "load", str(small), "--ep", str(degree)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise OSError(f"the load at EP {degree} failed, see above")
        measured = json.loads(done.stdout.splitlines()[-1])
        row = {"op": "load", "shape": f"EP{degree}", "owned": owned, "read": read, "layers": measured}
        row["peak"] = owned + max(0, measured["peak"] - measured["owned"])
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def header_bytes(file: Path) -> int:
    with file.open("rb") as shard:
        return 8 + int.from_bytes(shard.read(8), "little")


def load(args: argparse.Namespace) -> None:
    """Load rank 0's share of a folder and print bytes owned, read and of memory at the peak, and seconds."""
    process = psutil.Process()
    # the first load of a process also imports the code beside the weights: not what is measured
    load_model(SHIPPED_MODEL, "bf16", 0, 2)
    memory, read, began = process.memory_info().rss, process.io_counters().read_chars, time.perf_counter()
    model = load_model(args.folder, "bf16", 0, args.ep)
    seconds = time.perf_counter() - began
    report = {
        "owned": sum(tensor.nbytes for tensor in model.state_dict().values()),
        "read": process.io_counters().read_chars - read,
        "peak": peak_memory() - memory,
        "seconds": seconds,
    }
    print(json.dumps(report))


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    # not getrusage: its peak begins with that of the process that started this one
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


# ---------------------------------------------------------------------------------------------- layers


def layers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Layers 0-3 at full width (KDA with dense feed-forward, KDA, KDA, MLA) with one rank's experts: a LoRA step."""
    experts = first_layers(4).text_config.num_experts
    if args.ep < 1 or experts % args.ep:
        raise ValueError(f"--ep {args.ep} does not divide {experts} experts")
    if args.tokens < 2:
        raise ValueError(f"--tokens {args.tokens}: a loss needs at least 2")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU")
    owned = range(experts // args.ep)
    folder = snapshot(Path(args.workdir), 4, chosen(list(range(4)), list(owned), rest=True))
    device = torch.device(args.device)
    began = time.perf_counter()
    model = load_model(str(folder), "bf16", 0, args.ep)
    loaded = time.perf_counter() - began
    model = add_adapter(model.to(device), r=16, lora_alpha=32, expert_rank=2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 100_000, (1, args.tokens), generator=generator).to(device)
    row: dict[str, Any] = {"op": "LoRA step, K3 layers 0-3", "shape": f"T={args.tokens} EP{args.ep}"}
    row |= {"experts": len(owned), "load_s": loaded}
    # The first step on a GPU also loads its kernels.
    for _ in range(2 if device.type == "cuda" else 1):
        model.zero_grad()
        with timed(device, row, "forward_s"):
            loss = model(input_ids=ids, labels=ids).loss
        with timed(device, row, "backward_s"):
            loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    silent = [n for n, g in gradients.items() if "lora_B" in n and (g is None or not g.isfinite().all() or not g.any())]
    if silent or not loss.isfinite():
        raise FloatingPointError(f"loss {loss}, no finite gradient for {', '.join(silent)}")
    row |= {"loss": loss.item(), "adapters": len(gradients)}
    row["peak"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_memory()
    print(json.dumps(row), flush=True)
    return [row]


@contextmanager
def timed(device: torch.device, row: dict[str, Any], name: str):
    """Put the seconds that the block takes into `row[name]`."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize()
    row[name] = time.perf_counter() - began


# ---------------------------------------------------------------------------------------------- results


def tables(records: list[dict[str, Any]]) -> dict[str, str]:
    """The README's tables, by the name in their markers."""
    share = ["| experts over | owned | read | peak memory, computed | layers 0-1 measured: owned, peak, time |"]
    share += ["|---|---|---|---|---|"]
    step = ["| device | experts | tokens | load | forward | backward | peak memory |", "|---|---|---|---|---|---|---|"]
    for entry in records:
        for row in entry["rows"]:
            if row["op"] == "load":
                small = row["layers"]
                share.append(
                    f"| {row['shape']} | {row['owned'] / GB:,.1f} GB | {row['read'] / GB:,.1f} GB | "
                    f"{row['peak'] / GB:,.1f} GB | {small['owned'] / GB:.2f} GB, {small['peak'] / GB:.2f} GB, "
                    f"{small['seconds']:.1f} s |"
                )
            else:
                step.append(
                    f"| {entry['device']} | {row['experts']} | {row['shape'].split()[0][2:]} | {row['load_s']:.1f} s | "
                    f"{row['forward_s']:.2f} s | {row['backward_s']:.2f} s | {row['peak'] / GIB:.1f} GiB |"
                )
    return {"shares": "\n".join(share), "layers": "\n".join(step)}


def bench(argv: Sequence[str]) -> None:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (("shares", shares), ("layers", layers)):
        command = commands.add_parser(name, help=run.__doc__)
        command.add_argument("--workdir", help="folder on a disk with room (default: a temporary one, deleted)")
        command.set_defaults(run=run, device="cpu")
        if name == "layers":
            command.add_argument("--ep", type=int, default=64, help="ranks that share the experts (default 64)")
            command.add_argument("--tokens", type=int, default=16, help="tokens of the sequence (default 16)")
            command.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default cpu")
    command = commands.add_parser("load", help=load.__doc__)
    command.add_argument("folder", help="a folder that `from_pretrained` loads")
    command.add_argument("--ep", type=int, default=1, help="ranks that share the experts (default 1)")
    commands.add_parser("readme", help="write the tables of README.md from results/scale.json")
    args = parser.parse_args(argv)
    if args.command == "readme":
        readme = ROOT / "README.md"
        write_text(readme, with_tables(readme.read_text(), tables(json.loads(RESULTS.read_text()))))
        return
    if args.command == "load":
        load(args)
        return
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=args.workdir) as folder:
        args.workdir = folder
        rows = args.run(args)
    shown = re.sub(r" --workdir[ =]\S+", "", shlex.join(["python", "scripts/bench.py", *argv]))
    record(RESULTS, shown, args.device, rows)


def main(argv: Sequence[str]) -> int:
    return run_command(bench, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
