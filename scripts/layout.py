"""Show what every process of a launch would hold, without devices or weights, and check that nothing is missing.

    python scripts/layout.py --ep 8 --model Kimi-K3 --dtype bf16
    python scripts/layout.py --config_file accelerate_configs/multi_node.yaml --ep 64 --model Kimi-K3 --dtype bf16

The model is made from its config.json alone. It prints the two meshes, the experts of every rank, and bytes: weights,
adapters, their gradients and AdamW's moments; activations, and the layers that FSDP gathers for a moment, come on top.
Some ranks are really built, on a process group that only pretends to have the others, and compared with what was
computed. A launch that cannot work ends with one line and exit code 2.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.launch import read_launch
from modeling_latentmoe.training.layout import (
    Adapter,
    Share,
    build_share,
    check_complete,
    dense_bytes,
    fake_share,
    shares,
)
from modeling_latentmoe.training.loading import DTYPES, SHIPPED_MODEL
from modeling_latentmoe.training.mesh import check_layout, rank_map, span
from modeling_latentmoe.training.preflight import read_config
from modeling_latentmoe.training.sources import hub_config

CONFIG = Path(__file__).resolve().parent.parent / "accelerate_configs" / "fsdp2_ep.yaml"
COLUMNS = ("ranks", "experts", "their adapters", "dense", "its adapters", "gradients", "moments", "last good", "total")


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--config_file", default=str(CONFIG), help="of accelerate launch (fsdp2_ep.yaml)")
    parser.add_argument("--num_processes", type=int, help="of accelerate launch, instead of the file's number")
    parser.add_argument("--num_machines", type=int, help="of accelerate launch, instead of the file's number")
    parser.add_argument("--model", default=SHIPPED_MODEL, help=f"folder or Hub id with a config.json ({SHIPPED_MODEL})")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel degree (1)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="precision of the frozen weights (fp32)")
    parser.add_argument("--r", type=int, default=16, help="LoRA rank of dense layers (16)")
    parser.add_argument("--expert_rank", type=int, default=4, help="LoRA rank of every routed expert (4)")
    parser.add_argument("--all", action="store_true", help="build every rank, not only the first, middle and last one")
    return parser.parse_args(argv)


def layout(argv: Sequence[str]) -> None:
    args = arguments(argv)
    began = time.perf_counter()
    counts = {"--num_processes": args.num_processes, "--num_machines": args.num_machines}
    switches = [word for name, count in counts.items() if count is not None for word in (name, str(count))]
    launch = read_launch(args.config_file, switches)
    world, copies = launch.processes, launch.copies
    config = read_config(Path(args.model) if Path(args.model).exists() else hub_config(args.model))
    check_layout(config, world, args.ep)
    model_arguments = config, DTYPES[args.dtype], Adapter(args.r, args.expert_rank)

    model = build_share(*model_arguments, 0, args.ep)
    computed = list(shares(model, world, args.ep, copies))
    print(f"{args.model}: processes {world}, machines {launch.machines}")
    print(f"dense mesh: dp_replicate {copies} x dp_shard {world // copies}")
    print(f"expert mesh: efsdp {world // args.ep} x ep {args.ep}")
    print(rank_map(config, world, args.ep))
    print(f"\n{table(computed)}\n")

    experts, dense = config.get_text_config().num_experts or 0, dense_bytes(model)
    check_complete(computed, experts, dense, copies)
    print(f"each row of the expert mesh holds every one of {experts} experts once")
    print(f"all ranks together hold {copies} x {dense:,} bytes of dense weights and adapters, which is all of them")
    built = range(world) if args.all else sorted({0, world // 2, world - 1})
    for rank in built:
        found = fake_share(*model_arguments, rank, world, args.ep, copies)
        if found != computed[rank]:
            raise ValueError(f"rank {rank} holds {found}, but {computed[rank]} was computed")
    names = "all ranks" if args.all else f"ranks {', '.join(map(str, built))}"
    print(f"{names}: built, and they hold what was computed ({time.perf_counter() - began:.0f} s in all)")


def table(computed: list[Share]) -> str:
    """What each rank holds; neighbours with the same numbers share a line."""
    unit, name = (1e9, "GB") if max(share.total_bytes for share in computed) >= 1e9 else (1e6, "MB")
    cells = {share.rank: tuple(f"{size / unit:,.2f}" for size in sizes_of(share)) for share in computed}
    lines = [COLUMNS]
    for sizes, group in groupby(cells, key=cells.__getitem__):
        ranks = list(group)
        lines.append((span(ranks[0], ranks[-1]), *sizes))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join((f"{name} on each rank", *text))


def sizes_of(share: Share) -> tuple[int, ...]:
    """In the order of COLUMNS."""
    return (
        share.expert_bytes,
        share.expert_adapter_bytes,
        share.dense_bytes,
        share.dense_adapter_bytes,
        share.gradient_bytes,
        share.moment_bytes,
        # the adapters before the last step, which are saved if the next loss is not finite
        share.gradient_bytes,
        share.total_bytes,
    )


def main(argv: Sequence[str]) -> int:
    return run_command(layout, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
