"""Write a snapshot of a released model without its weights, to rehearse on: all files, holes instead of data.

    python scripts/rehearse.py tests/fixtures/k3/config.json /tmp/k3
    python scripts/rehearse.py tests/fixtures/k3/config.json /tmp/k3 --layers 0-3 --experts 0-13

The first command writes the complete Kimi-K3 (96 shards, 497,220 tensors, 1.56 TB of length) in some 136 MB of disk.
The second one also gives layers 0 to 3 real random bytes: all but the routed experts, and of these the first 14.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.preflight import read_config
from modeling_latentmoe.training.rehearsal import chosen, write_snapshot


def numbers(text: str) -> list[int]:
    """The numbers of a list of spans: "0-3,7" -> [0, 1, 2, 3, 7]."""
    chosen: list[int] = []
    for span in text.split(","):
        if not re.fullmatch(r"\d{1,6}(-\d{1,6})?", span):
            raise argparse.ArgumentTypeError(f"{span!r} is not a number or a span such as 0-3")
        first, last = int(span.split("-")[0]), int(span.split("-")[-1])
        if last < first:
            raise argparse.ArgumentTypeError(f"{span!r} does not rise")
        chosen += range(first, last + 1)
    return chosen


def rehearse(argv: Sequence[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("config", type=Path, help="config.json of the model, which is copied")
    parser.add_argument("folder", type=Path, help="where to write the snapshot; must not exist")
    parser.add_argument("--layers", type=numbers, default=[], metavar="0-3,7", help="layers that get random bytes")
    parser.add_argument("--experts", type=numbers, default=[], metavar="0-13", help="their experts that do")
    parser.add_argument("--rest", action="store_true", help="embeddings, head, projector and vision tower do")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random bytes (0)")
    args = parser.parse_args(argv)
    if not args.config.is_file():
        raise ValueError(f"config: {args.config} is not a file")
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed} must be at least 0")
    config = read_config(args.config)
    text = config.text_config
    asked = {"--layers": (args.layers, text.num_hidden_layers), "--experts": (args.experts, text.num_experts or 0)}
    for switch, (values, count) in asked.items():
        if max(values, default=-1) >= count:
            raise ValueError(f"{switch} {max(values)}: the model has {count}, counted from 0")
    write_snapshot(args.folder, config, chosen(args.layers, args.experts, args.rest), args.seed)
    shutil.copy(args.config, args.folder / "config.json")


def main(argv: Sequence[str]) -> int:
    return run_command(rehearse, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
