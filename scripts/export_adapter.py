"""Write a LoRA adapter under the names of the released checkpoint, as vLLM and SGLang read it; or check one.

    python scripts/export_adapter.py runs/digits digits-for-servers
    python scripts/export_adapter.py --check digits-for-servers --model Kimi-K3

scripts/lora.py writes the experts of a layer as PEFT stacks them, in two tensors; servers want
`experts.7.w1.lora_A.weight` and so on. The product B A of every matrix stays the same. --check proves, from
the model's config.json alone, that every tensor lands on a module of the released layout, or names those that do not.

Every mistake in the input ends it with one line and exit code 2.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.export import check, export


def export_adapter(argv: Sequence[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("adapter", type=Path, help="adapter folder, for example the output of scripts/lora.py")
    parser.add_argument("out", type=Path, nargs="?", help="folder to write; must not exist")
    parser.add_argument("--check", action="store_true", help="write nothing, compare the adapter with --model")
    parser.add_argument("--model", type=Path, help="checkpoint folder or config.json to compare with")
    args = parser.parse_args(argv)
    if args.check != (args.out is None) or args.check != (args.model is not None):
        raise ValueError("give either ADAPTER OUT, or --check ADAPTER --model FOLDER")
    if not args.adapter.is_dir():
        raise ValueError(f"{args.adapter} is not a folder")
    if args.check:
        if not args.model.exists():
            raise ValueError(f"--model {args.model} does not exist")
        number = check(args.adapter, args.model)
        print(f"{args.adapter}: all {2 * number:,} tensors land on {number:,} modules of the released layout")
    else:
        number = export(args.adapter, args.out)
        print(f"wrote {args.out}: factors of {number:,} weight matrices under their released names")


def main(argv: Sequence[str]) -> int:
    return run_command(export_adapter, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
