"""Measure what the README states about real sizes: loading shares of Kimi-K3, running and training its first layers.

    python scripts/bench.py shares                                      # bytes and memory of a rank: EP 8, 16, 64
    python scripts/bench.py layers --ep 64 --tokens 16                  # layers 0-3, 14 of 896 experts, on CPU
    python scripts/bench.py layers --ep 8 --tokens 4096 --device cuda   # 112 experts on one GPU
    python scripts/bench.py slice --ep 2 --device cuda                  # train layers 0-3, 896 experts, on two GPUs
    python scripts/bench.py readme                                      # write the tables: README.md, results/h200.md

No weights are needed: a snapshot of the released layout is written first, into --workdir, with random bytes where the
layers compute and holes elsewhere. `shares` needs 12 GB of memory; `layers` takes 11 GB of disk and 16 GB of memory
at EP 64, 16 and 22 GB at EP 8; `slice` takes 60 GB of disk and 35 GB of memory for each process. Results go to
results/scale.json, a record for each command.
"""

import argparse
import json
import math
import os
import random
import re
import resource
import shlex
import statistics
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
from PIL import Image

from modeling_latentmoe import chat_latentmoe as chat
from modeling_latentmoe.configuration_latentmoe import KERNELS, LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.tokenization_latentmoe import RESERVED_TOKENS
from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.data import PACKING_WINDOW
from modeling_latentmoe.training.files import write_text
from modeling_latentmoe.training.loading import SHIPPED_MODEL, load_model
from modeling_latentmoe.training.lora import add_adapter
from modeling_latentmoe.training.mesh import check_layout
from modeling_latentmoe.training.monitor import read_records
from modeling_latentmoe.training.overlay import make_overlay
from modeling_latentmoe.training.rehearsal import SPECIAL_TOKENS, chosen, write_snapshot
from modeling_latentmoe.training.results import record, with_tables
from modeling_latentmoe.training.streaming import planned_reads, restrict_experts

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "scale.json"
KERNELS_RESULTS = ROOT / "results" / "h200.json"
RELEASED = ROOT / "tests" / "fixtures" / "k3" / "config.json"
DEGREES = (8, 16, 64)
GB, GIB = 1e9, 2**30
# of a training run: steps in all, and those in the beginning that also load kernels
STEPS, WARM_UP = 6, 2


def first_layers(layers: int, **text: int) -> dict[str, Any]:
    """The released config.json, cut to its first layers; `text` replaces numbers of its text_config."""
    config = json.loads(RELEASED.read_text())
    for name in text:
        if not isinstance(config["text_config"].get(name), int):
            raise ValueError(f"--set {name}: text_config of the released config.json has no number of this name")
    config["text_config"] |= {**text, "num_hidden_layers": layers}
    # special tokens end the vocabulary
    first = config["text_config"]["vocab_size"] - RESERVED_TOKENS
    special = {"bos": "[BOS]", "eos": chat.END_OF_MSG, "pad": "[PAD]"}
    ids = {f"{name}_token_id": first + SPECIAL_TOKENS[token] for name, token in special.items()}
    config["text_config"] |= ids
    config |= {**ids, "media_placeholder_token_id": first + SPECIAL_TOKENS[chat.MEDIA_PAD]}
    kinds = config["text_config"]["linear_attn_config"]
    for kind in ("kda_layers", "full_attn_layers"):
        kinds[kind] = [n for n in kinds[kind] if n <= layers]
    return config


def snapshot(folder: Path, released: dict[str, Any], fill: Callable[[str], bool]) -> Path:
    """Write a snapshot with this released config.json into `folder`, and beside it the overlay that loads it."""
    layers = released["text_config"]["num_hidden_layers"]
    source, out = folder / f"k3-{layers}-layers", folder / f"overlay-{layers}-layers"
    write_snapshot(source, LatentMoEConfig.from_dict(released), fill)
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
    small = snapshot(folder, first_layers(2), lambda name: False)
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
    released = first_layers(4)
    experts = released["text_config"]["num_experts"]
    if args.ep < 1 or experts % args.ep:
        raise ValueError(f"--ep {args.ep} does not divide {experts} experts")
    if args.tokens < 2:
        raise ValueError(f"--tokens {args.tokens}: a loss needs at least 2")
    check_gpus(args.device, 1)
    owned = range(experts // args.ep)
    folder = snapshot(Path(args.workdir), released, chosen(list(range(4)), list(owned), rest=True))
    device = torch.device(args.device)
    began = time.perf_counter()
    model = load_model(str(folder), "bf16", 0, args.ep, args.kernels)
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
            loss = model(input_ids=ids, labels=ids, return_logits=False).loss
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


def check_gpus(device: str, needed: int) -> None:
    """ValueError unless torch sees as many GPUs as are needed on `device`."""
    if device == "cuda" and torch.cuda.device_count() < needed:
        raise ValueError(f"--device cuda: {needed} GPUs are needed, torch sees {torch.cuda.device_count()}")


# ---------------------------------------------------------------------------------------------- slice


def train_slice(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train layers 0-3 at full width with all experts, spread over --ep processes: scripts/lora.py, a few steps.

    Every process packs one row of --tokens a step. Every tensor is filled with random bytes, no two experts are alike.
    """
    check_gpus(args.device, args.ep)
    if args.tokens < 128:
        raise ValueError(f"--tokens {args.tokens}: a row of several chats needs at least 128")
    # the threads below write files
    torch.set_num_threads(1)
    folder, changes = Path(args.workdir), dict(args.set)
    released = first_layers(changes.pop("num_hidden_layers", 4), **changes)
    check_layout(LatentMoEConfig.from_dict(released), args.ep, args.ep)
    began = time.perf_counter()
    model = snapshot(folder, released, lambda name: True)
    text = released["text_config"]
    row: dict[str, Any] = {"op": f"train, K3 layers 0-{text['num_hidden_layers'] - 1}"}
    row |= {"shape": f"T={args.tokens} EP{args.ep} x {args.ep} devices", "experts": text["num_experts"]}
    row |= {"written": sum(file.stat().st_size for file in model.glob("*.safetensors"))}
    row |= {"write_s": time.perf_counter() - began}
    data = write_chats(folder, PACKING_WINDOW * args.ep * args.tokens, args.tokens)
    output, began = folder / "run", time.time()
    train(args, model, data, output)
    records = read_records(output / "metrics.jsonl")
    # the folder of the run is made when every process has its model
    row |= {"start_s": (output / "run.yaml").stat().st_mtime - began, "total_s": time.time() - began}
    row |= {"tokens_per_s": statistics.median(record["tokens_per_s"] for record in records[WARM_UP:])}
    row |= {"host": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024}
    if args.device == "cuda":
        row |= {"memory_gib": max(record["memory_gib"] for record in records)}
    row |= {"loss": [records[0]["loss"], records[-1]["loss"]]}
    print(json.dumps(row), flush=True)
    # a trial of other sizes is no result
    return [] if args.set else [row]


def write_chats(folder: Path, total: int, row_tokens: int) -> Path:
    """Chats of made-up words, together of `total` tokens or a little more, the longest a quarter of a packed row.

    One in four shows a square picture, of an eighth of a row at most.
    """
    rng, rows, written = random.Random(0), [], 0
    while written < total:
        length = rng.randint(row_tokens // 16, row_tokens // 4)
        user, assistant = (words(rng, length // 2) for _ in range(2))
        message: dict[str, Any] = {"messages": [{"role": "user", "content": user}]}
        message["messages"].append({"role": "assistant", "content": assistant})
        if len(rows) % 4 == 0:
            # a token shows 28 x 28 pixels
            side = math.isqrt(row_tokens // 8)
            name = f"{len(rows)}.png"
            Image.frombytes("RGB", (28 * side, 28 * side), rng.randbytes(3 * (28 * side) ** 2)).save(folder / name)
            message["images"] = [name]
            length += side**2
        rows.append(json.dumps(message))
        written += length
    file = folder / "chats.jsonl"
    file.write_text("\n".join(rows) + "\n")
    return file


def words(rng: random.Random, tokens: int) -> str:
    """Text of about so many tokens: the tokenizer of a written snapshot makes four of a word of six letters."""
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(max(1, tokens // 4)))


def train(args: argparse.Namespace, model: Path, data: Path, output: Path) -> None:
    """Launch scripts/lora.py as a user does, a process for every device. OSError where it fails."""
    # without bf16 instructions a step takes an hour
    dtype = "bf16" if args.device == "cuda" else "fp32"
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", "accelerate_configs/fsdp2_ep.yaml", "--num_processes", str(args.ep)]
    command += ["--main_process_port", "0", *([args.cpu_fsdp] if args.device == "cpu" else []), "scripts/lora.py"]
    command += ["--model", str(model), "--dataset", str(data), "--output_dir", str(output), "--ep", str(args.ep)]
    command += ["--dtype", dtype, "--expert_rank", "2", "--gradient_checkpointing", "full", "--lr", "1e-4"]
    command += ["--packing", "--batch_size", "1", "--max_length", str(args.tokens), "--max_steps", str(STEPS)]
    command += ["--kernels", args.kernels]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {})}
    if subprocess.run(command, cwd=ROOT, env=environment).returncode:
        raise OSError("training failed, see above")


def number(text: str) -> tuple[str, int]:
    """Name and value of an entry of --set, such as "num_experts=14"."""
    name, _, value = text.partition("=")
    return name, int(value)


# ---------------------------------------------------------------------------------------------- results


def tables(records: list[dict[str, Any]]) -> dict[str, str]:
    """The README's tables, by the name in their markers."""
    share = ["| experts over | owned | read | peak memory, computed | layers 0-1 measured: owned, peak, time |"]
    share += ["|---|---|---|---|---|"]
    step = ["| device | experts | tokens | load | forward | backward | peak memory |", "|---|---|---|---|---|---|---|"]
    training = ["| device | experts | tokens of a row | tokens/s | peak memory, device | host | write, start | loss |"]
    training += ["|" + "---|" * 8]
    for entry in records:
        for row in entry["rows"]:
            tokens, *layout = row["shape"].removeprefix("T=").split(maxsplit=1)
            if row["op"] == "load":
                small = row["layers"]
                share.append(
                    f"| {row['shape']} | {row['owned'] / GB:,.1f} GB | {row['read'] / GB:,.1f} GB | "
                    f"{row['peak'] / GB:,.1f} GB | {small['owned'] / GB:.2f} GB, {small['peak'] / GB:.2f} GB, "
                    f"{small['seconds']:.1f} s |"
                )
            elif row["op"].startswith("train"):
                device = f"{row['memory_gib']:.1f} GiB" if "memory_gib" in row else "-"
                training.append(
                    f"| {entry['device']}, {layout[0]} | {row['experts']} | {tokens} | {row['tokens_per_s']:,.0f} | "
                    f"{device} | {row['host'] / GIB:.1f} GiB | {row['write_s']:.0f} s, {row['start_s']:.0f} s | "
                    f"{row['loss'][0]:.3f} to {row['loss'][1]:.3f} |"
                )
            else:
                step.append(
                    f"| {entry['device']} | {row['experts']} | {tokens} | {row['load_s']:.1f} s | "
                    f"{row['forward_s']:.2f} s | {row['backward_s']:.2f} s | {row['peak'] / GIB:.1f} GiB |"
                )
    return {"shares": "\n".join(share), "layers": "\n".join(step), "slice": "\n".join(training)}


def step_table(records: list[dict[str, Any]]) -> str:
    """Of scripts/bench_step.py, for the README."""
    table = [
        "| step | tokens/s of a GPU | peak memory | beside it, in the same run | at commit |",
        "|---|---|---|---|---|",
    ]
    of_steps = [
        (entry["commit"], row) for entry in records if "bench_step" in entry["command"] for row in entry["rows"]
    ]
    for commit, row in of_steps:
        tokens = int(row["shape"].removeprefix("T=").split()[0].rstrip(","))
        others = [f"{name}: {tokens / ms * 1e3:,.0f}" for name, ms in row["peers_ms"].items()]
        speed = tokens / row["ours_ms"] * 1e3
        name = f"{row['op']}, {row['shape']}"
        cells = name, f"{speed:,.0f}", f"{row['peak_gib']:.1f} GiB", "; ".join(others) or "-", commit
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def kernel_table(records: list[dict[str, Any]]) -> str:
    """Of the kernels' benchmarks: results/h200.md."""
    table = [
        "# Kernels on one H200",
        "",
        "Made by `python scripts/bench.py readme` from h200.json: medians, ms. The floor is the least that arithmetic",
        "and device memory allow; errors are against float64, over torch's in the same dtype. At commits f0883cb and",
        "afbeb51 the host launched while the call before ran, so that times under 3 ms may have it in them.",
    ]
    for entry in records:
        if "bench_step" in entry["command"]:
            continue
        versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
        table += ["", f"`{entry['command']}` at {entry['commit'] or 'an unnamed commit'}; {versions}", ""]
        table += [
            "| operation | shape | ours | others | floor | peak memory | error |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in entry["rows"]:
            others = "; ".join(f"{name} {ms:.3f}" for name, ms in row["peers_ms"].items()) or "-"
            peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f} GiB"
            error = "-" if row["err_vs_torch"] is None else f"{row['err_vs_torch']:.2f}"
            cells = row["op"], row["shape"], f"{row['ours_ms']:.3f}", others, f"{row['floor_ms']:.3f}", peak, error
            table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table) + "\n"


def bench(argv: Sequence[str]) -> None:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (("shares", shares), ("layers", layers), ("slice", train_slice)):
        command = commands.add_parser(name, help=run.__doc__)
        command.add_argument("--workdir", help="folder on a disk with room (default: a temporary one, deleted)")
        command.set_defaults(run=run, device="cpu")
        if name == "layers":
            command.add_argument("--ep", type=int, default=64, help="ranks that share the experts (default 64)")
            command.add_argument("--tokens", type=int, default=16, help="tokens of the sequence (default 16)")
        if name == "slice":
            command.add_argument("--ep", type=int, default=2, help="processes, which share the experts (default 2)")
            command.add_argument("--tokens", type=int, default=8192, help="of a process in a step (default 8192)")
            command.add_argument(
                "--set",
                type=number,
                nargs="+",
                default=[],
                metavar="NAME=N",
                help="other numbers in text_config, such as num_experts=14: a trial for small machines, not recorded",
            )
            command.add_argument("--cpu_fsdp", default="tests/dist/cpu_fsdp.py", help="what starts FSDP2 on CPU")
        if name != "shares":
            command.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default cpu")
            command.add_argument(
                "--kernels", default="auto", choices=KERNELS, help="as of scripts/lora.py (default auto)"
            )
    command = commands.add_parser("load", help=load.__doc__)
    command.add_argument("folder", help="a folder that `from_pretrained` loads")
    command.add_argument("--ep", type=int, default=1, help="ranks that share the experts (default 1)")
    commands.add_parser("readme", help="write the tables of README.md from results/scale.json")
    args = parser.parse_args(argv)
    if args.command == "readme":
        readme = ROOT / "README.md"
        kernels = json.loads(KERNELS_RESULTS.read_text())
        shown = tables(json.loads(RESULTS.read_text())) | {"steps": step_table(kernels)}
        write_text(readme, with_tables(readme.read_text(), shown))
        write_text(KERNELS_RESULTS.with_suffix(".md"), kernel_table(kernels))
        return
    if args.command == "load":
        load(args)
        return
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=args.workdir) as folder:
        args.workdir = folder
        rows = args.run(args)
    shown = re.sub(r" --workdir[ =]\S+", "", shlex.join(["python", "scripts/bench.py", *argv]))
    if rows:
        record(RESULTS, shown, args.device, rows)


def main(argv: Sequence[str]) -> int:
    return run_command(bench, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
