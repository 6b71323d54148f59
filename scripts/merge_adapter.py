"""Merge a LoRA adapter into the weights of a checkpoint folder, for servers that read no adapters.

    python scripts/merge_adapter.py Kimi-K3 runs/digits Kimi-K3-digits
    python scripts/merge_adapter.py Kimi-K3 runs/digits Kimi-K3-digits-bf16 --experts bf16

The result has the base's names, shards and other files. It is written shard by shard, in the memory of a few
matrices, and appears under its name when it is complete. merge_report.json in it says for every merged matrix how
large the delta was, how far rounding moved it, and for MXFP4 the bound of that error.

Every mistake in the input ends it with one line and exit code 2.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.lora import BASE_FILE
from modeling_latentmoe.training.merge import REPORT_FILE, merge


def merge_adapter(argv: Sequence[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("base", type=Path, help="checkpoint folder")
    parser.add_argument("adapter", type=Path, help="adapter folder, for example the output of scripts/lora.py")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--experts",
        choices=("mxfp4", "bf16"),
        help="form of the routed experts: mxfp4 rounds them to 4 bits again, where a small delta can vanish; bf16 "
        "keeps it, but makes all experts four times as large; left out, they stay as they are in the base",
    )
    args = parser.parse_args(argv)
    for folder in (args.base, args.adapter):
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
    if not (args.adapter / BASE_FILE).is_file():
        print(f"{args.adapter} has no {BASE_FILE}: only its shapes tell whether it was made for this base")
    for line in merge(args.base, args.adapter, args.out, args.experts).lines():
        print(line)
    print(f"wrote {args.out}; each matrix is in {args.out / REPORT_FILE}")


def main(argv: Sequence[str]) -> int:
    return run_command(merge_adapter, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
