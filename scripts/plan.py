"""Which layouts of a LoRA run fit on so many devices, and which would be the fastest? Without devices or weights.

    python scripts/plan.py --devices 128 --memory 64GiB --model kimi-k3
    python scripts/plan.py --devices 16 --memory 141GB --host_memory 2TB --model Kimi-K3 --write mine.yaml
    python scripts/plan.py --check                       # what a step on two devices will take, to be measured after

Everything it prints is a PREDICTION. Memory is counted from the config (training/footprint.py); times are those of the
operators of measured steps on one device, scaled by what each has to do, and bytes over the bandwidth of links
(training/step_time.py, results/operators.json). No step on several devices went into it.

A line is a layout, the fastest first:

    dp         copies of all but the experts x devices that share each copy (FSDP2)
    ep, efsdp  devices that share the experts, and how often all of them hold the experts
    rows       documents of --max_length tokens in a micro-batch, x micro-batches in a step
    again      what is computed again in backward (--gradient_checkpointing)
    experts    packed (4 bits) or bf16; + N: those of N layers live in host memory and pass through the device
    GiB        of one device at its peak
    step       seconds, and tokens/s of one device; then seconds by what they are spent on, where other work does not
               hide them: dense products, KDA, attention, experts, all else, head, all-to-all (dispatch and combine of
               de-duplicated rows, with the copies around), FSDP's all-gather, experts coming from the host, optimizer

It ends with the memory of the chosen layout by kind and the command that runs it; --write makes the file which that
command names. For your own devices, copy results/operators.json and replace what differs; its operators are measured by

    python scripts/bench_step.py --tokens 8192 --no_peer                # 112 experts
    python scripts/bench_step.py --tokens 8192 --no_peer --experts 896
    python scripts/plan.py --calibrate results/h200.json --operators mine.json

Mistakes are one line and exit code 2, also where nothing fits: it says by how much, and what would help.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
import yaml

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig, LatentMoETextConfig
from modeling_latentmoe.training.calibration import calibrated, table_text
from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.files import write_text
from modeling_latentmoe.training.footprint import Footprint, Work, activation_bytes, passing_bytes, ranks_of_token
from modeling_latentmoe.training.layout import Adapter, build_share
from modeling_latentmoe.training.plan import GIB, Layout, Wish, chosen_layers, plan
from modeling_latentmoe.training.preflight import read_config
from modeling_latentmoe.training.step_time import Machine, Operators, Sizes, micro_batch, read_operators

ROOT = Path(__file__).resolve().parent.parent
OPERATORS = ROOT / "results" / "operators.json"
CONFIGS = ROOT / "accelerate_configs"
PRESETS = {"kimi-k3": LatentMoEConfig.kimi_k3, "kda-dsa": LatentMoEConfig.kda_dsa, "tiny": LatentMoEConfig.tiny}
UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
COLUMNS = ("", "dp", "ep", "efsdp", "rows", "again", "experts", "GiB", "step", "tokens/s")
PARTS = ("dense", "KDA", "attn", "experts", "else", "head", "a2a", "gather", "host", "optim")
# of --check
LAYERS, CHECKED, CHECK_TOKENS = 4, ((1, 112), (2, 896)), (8192, 32768)


def size(text: str) -> int:
    """Bytes of an amount of memory, such as "64GiB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(\w+)", text)
    if not found or found[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"{text} must be a number and one of {', '.join(UNITS)}, such as 64GiB")
    return int(float(found[1]) * UNITS[found[2]])


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--devices", type=int, default=8, help="in all (8)")
    parser.add_argument("--per_machine", type=int, default=8, help="devices of one machine (8)")
    parser.add_argument("--memory", type=size, default="141GB", help="of a device (141GB, an H200)")
    parser.add_argument("--host_memory", type=size, default="0GB", help="of a machine, for experts (0GB: none)")
    parser.add_argument("--model", default="kimi-k3", help=f"{', '.join(PRESETS)}, or a folder with a config.json")
    parser.add_argument("--tokens", type=int, default=32768, help="of one device in a step (32768)")
    parser.add_argument("--max_length", type=int, default=8192, help="tokens of a document (8192)")
    parser.add_argument("--learned", type=float, default=1.0, help="share of tokens that the loss is taken of (1)")
    parser.add_argument("--r", type=int, default=16, help="LoRA rank of dense layers (16)")
    parser.add_argument("--expert_rank", type=int, default=4, help="LoRA rank of every routed expert (4)")
    parser.add_argument("--operators", type=Path, default=OPERATORS, help="measured times (results/operators.json)")
    parser.add_argument("--top", type=int, default=12, help="how many layouts to print (12)")
    parser.add_argument("--pick", type=int, default=1, help="the layout to explain and to write, by its line (1)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="configuration for accelerate launch")
    parser.add_argument(
        "--calibrate", type=Path, metavar="RECORDS", help="only write what RECORDS measured into --operators"
    )
    parser.add_argument("--check", action="store_true", help="only predict a step that can be measured on two devices")
    args = parser.parse_args(argv)
    for name in ("devices", "per_machine", "tokens", "max_length", "top", "pick"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    if args.devices > args.per_machine and args.devices % args.per_machine:
        raise ValueError(f"--per_machine {args.per_machine} does not divide --devices {args.devices}")
    if args.tokens % args.max_length:
        raise ValueError(f"--max_length {args.max_length} does not divide --tokens {args.tokens}")
    if not 0 <= args.learned <= 1:
        raise ValueError(f"--learned {args.learned} must be a share, at least 0 and at most 1")
    return args


def run(argv: Sequence[str]) -> None:
    args = arguments(argv)
    if args.calibrate:
        if not args.calibrate.is_file():
            raise ValueError(f"--calibrate {args.calibrate} does not exist")
        calibrate(args.calibrate, args.operators)
        return
    if args.write and not args.write.resolve().parent.is_dir():
        raise ValueError(f"--write {args.write}: its folder does not exist")
    operators = read_operators(args.operators)
    print(f"PREDICTION from times of operators on one {operators.device}; no layout below was run")
    if args.check:
        check(operators)
        return
    preset = PRESETS.get(args.model)
    try:
        config = preset() if preset else read_config(Path(args.model))
    except (ValueError, OSError) as error:
        raise ValueError(f"--model {args.model}: {error}; presets are {', '.join(PRESETS)}") from error
    machine = Machine(args.devices, args.per_machine)
    wish = Wish(machine, args.memory, args.host_memory, args.tokens, args.max_length, args.learned)
    model = build_share(config, torch.bfloat16, Adapter(args.r, args.expert_rank), 0, 1)
    layouts = plan(model, operators, wish)
    if args.pick > len(layouts):
        raise ValueError(f"--pick {args.pick}: only {len(layouts)} layouts fit")
    print(
        f"{args.model}: {len(layouts)} layouts fit on {args.devices} devices, {args.tokens} tokens of each in a step\n"
    )
    print(table(layouts[: args.top], args.tokens))
    text, chosen = config.get_text_config(), layouts[args.pick - 1]
    print(f"\nlayout {args.pick}, GiB of a device: {memory(chosen.footprint)}")
    if chosen.ep > 1:
        ranks, routed = ranks_of_token(text, chosen.ep), text.num_experts_per_token
        print(
            f"a row travels to {ranks:.1f} devices instead of {routed} experts: {routed / ranks:.1f} times fewer rows"
        )
    if not chosen.packed and config.packed_experts:
        print(
            "experts in bf16: --model must hold them so (scripts/merge_adapter.py --experts bf16 writes such a model)"
        )
    command = launch_command(args, text, chosen)
    if args.write is not None:
        write_text(args.write, launch_config(chosen, args.per_machine, command))
        print(f"\n{args.write} is written; run\n\n  {command}")
    else:
        print(f"\nwith --write FILE, to run it:\n\n  {command}")


def calibrate(records: Path, operators: Path) -> None:
    try:
        values = calibrated(json.loads(operators.read_text()), json.loads(records.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--calibrate {records}, --operators {operators}: {error}") from error
    write_text(operators, table_text(values))
    measured = values["measured_at"]
    print(f"{operators}: operators of {values['device']}, {measured['tokens']} tokens")


def table(layouts: list[Layout], tokens: int) -> str:
    lines = [(*COLUMNS, *PARTS)]
    for number, layout in enumerate(layouts, 1):
        kind = "packed" if layout.packed else "bf16"
        cells = [str(number), f"{layout.copies}x{layout.shards}", str(layout.ep), str(layout.efsdp)]
        cells += [f"{layout.rows}x{layout.accumulation}", layout.checkpointing]
        cells += [f"{kind} + {layout.layers_out}" if layout.layers_out else kind]
        cells += [f"{layout.footprint.total / GIB:.1f}", f"{layout.step.total:.2f}"]
        cells += [f"{tokens / layout.step.total:,.0f}", *(f"{seconds:.2f}" for seconds in layout.step)]
        lines.append(tuple(cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def memory(found: Footprint) -> str:
    parts = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in found._asdict().items())
    return f"{parts}; in all {found.total / GIB:.1f}"


def launch_command(args: argparse.Namespace, config: LatentMoETextConfig, layout: Layout) -> str:
    """What to type on every machine; words in capitals are the user's to replace."""
    command = ["accelerate", "launch", "--config_file", str(args.write or "FILE")]
    if args.devices > args.per_machine:
        command += ["--machine_rank", "R", "--main_process_ip", "HOST"]
    model = "MODEL" if args.model in PRESETS else args.model
    command += ["scripts/lora.py", "--model", model, "--dataset", "DATA", "--output_dir", "RUN", "--dtype", "bf16"]
    command += ["--ep", str(layout.ep), "--packing", "--max_length", str(args.max_length)]
    command += ["--batch_size", str(layout.rows), "--gradient_accumulation", str(layout.accumulation)]
    command += ["--gradient_checkpointing", layout.checkpointing]
    command += ["--r", str(args.r), "--expert_rank", str(args.expert_rank)]
    if layout.layers_out:
        command += ["--experts_in", f"host:{spans(chosen_layers(config, layout.layers_out))}"]
    return shlex.join(command)


def spans(layers: list[int]) -> str:
    """[1, 2, 3, 5] -> "1-3,5"."""
    found: list[list[int]] = []
    for layer in layers:
        if found and layer == found[-1][1] + 1:
            found[-1][1] = layer
        else:
            found.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def launch_config(layout: Layout, per_machine: int, command: str) -> str:
    """The file for accelerate launch: one of accelerate_configs/ with the numbers of the layout."""
    machines = -(-layout.devices // per_machine)
    name = "single" if layout.devices == 1 else "fsdp2_ep" if machines == 1 else "multi_node"
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    values |= {"num_machines": machines, "num_processes": layout.devices}
    if layout.copies > 1:
        sizes = {"dp_replicate": layout.copies, "dp_shard": layout.shards}
        values["parallelism_config"] = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
    return f"# By scripts/plan.py, for\n#   {command}\n{yaml.safe_dump(values, sort_keys=False)}"


def check(operators: Operators) -> None:
    """Layers 0 to 3 of Kimi-K3, as scripts/bench_step.py runs them: from layer inputs to the last norm and back, one
    document, no embedding, head, optimizer or FSDP."""
    print(f"layers 0-{LAYERS - 1} of Kimi-K3 as in scripts/bench_step.py: T tokens of one document on each device\n")
    for (devices, experts), tokens, checkpointing in product(CHECKED, CHECK_TOKENS, ("none", "full")):
        config, work = first_layers(LAYERS, experts), Work(tokens, devices, checkpointing)
        split = micro_batch(config, operators, Machine(devices), Sizes(0, [], 1, 0, 0, 0), work, tokens, learned=0)
        held = (activation_bytes(config, work) + passing_bytes(config, work)) / GIB
        parts = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in zip(PARTS, split, strict=True) if seconds)
        print(
            f"devices {devices}, --ep {devices}, experts {experts}, T={tokens}, again {checkpointing}: "
            f"{1e3 * split.total:,.0f} ms, {tokens / split.total:,.0f} tokens/s of each ({parts}); "
            f"{held:.1f} GiB beside weights"
        )


def first_layers(layers: int, experts: int) -> LatentMoETextConfig:
    """Kimi-K3's text model, cut."""
    linear = dict(LatentMoETextConfig().linear_attn_config)
    for kind in ("kda_layers", "full_attn_layers"):
        linear[kind] = [number for number in linear[kind] if number <= layers]
    return LatentMoETextConfig(num_hidden_layers=layers, num_experts=experts, linear_attn_config=linear)


def main(argv: Sequence[str]) -> int:
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
