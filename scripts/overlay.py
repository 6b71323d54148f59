"""Load a downloaded Kimi-K3 here without copying it: check the download, then lay our code and config over it.

    python scripts/overlay.py --check ~/models/Kimi-K3
    python scripts/overlay.py ~/models/Kimi-K3 ~/models/latentmoe-k3

The first command compares all tensors in the shards' headers with what config.json implies and lists what is wrong:
missing, cut or damaged files, tensors that are missing, unexpected or of another shape or dtype, an index that says
otherwise; then settings, tokenizer and code beside them. It reads no weights and takes seconds; it works for every
folder that our models load from.

The second one checks the same and makes a folder with code, config, processor and tokenizer, and links to the shards:

    AutoModelForImageTextToText.from_pretrained("~/models/latentmoe-k3", trust_remote_code=True)

The download is never written to and has to stay where it is. What is wrong ends it with exit code 2.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.overlay import check_overlay, make_overlay
from modeling_latentmoe.training.preflight import Report, check_folder, summarize


def check(folder: Path) -> Report:
    """The report of a whole checkpoint; prints what is wrong and raises ValueError for one that is not."""
    start = time.monotonic()
    report = check_folder(folder)
    for line in summarize(report.faults):
        print(line)
    if report.faults:
        raise ValueError(f"{folder} is not a whole checkpoint: {len(report.faults)} fault(s), listed above")
    print(
        f"{folder} is whole: {report.tensors:,} tensors, {report.nbytes:,} bytes in {len(report.shards)} shard(s), "
        f"checked in {time.monotonic() - start:.1f} s"
    )
    return report


def overlay(argv: Sequence[str]) -> None:
    parser = Parser(__doc__, usage="overlay.py --check FOLDER | overlay.py SNAPSHOT OUT")
    parser.add_argument("snapshot", type=Path, metavar="SNAPSHOT", help="folder of the download")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="folder to make; must be new or empty")
    parser.add_argument("--check", action="store_true", help="only check SNAPSHOT")
    args = parser.parse_args(argv)
    if args.check == (args.out is not None):
        raise ValueError("pass either --check and one folder, or SNAPSHOT and OUT")
    if args.check:
        check(args.snapshot)
        return
    check_overlay(args.snapshot, args.out)
    make_overlay(args.snapshot, check(args.snapshot).shards, args.out)
    print(f"{args.out} loads it with trust_remote_code=True")


def main(argv: Sequence[str]) -> int:
    return run_command(overlay, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
