"""Give a checkpoint with dense attention untrained indexers: a model of sparse attention, to be trained by lora.py.

    python scripts/add_indexer.py latentmoe-k3 latentmoe-k3-sparse
    python scripts/add_indexer.py latentmoe-k3 latentmoe-k3-sparse --every 2 --index_topk 2048 --index_kpool 16

    accelerate launch scripts/lora.py --model latentmoe-k3-sparse --train_indexer warmup --output_dir runs/warmup ...
    accelerate launch scripts/lora.py --model latentmoe-k3-sparse --train_indexer sparse --adapter runs/warmup ...

All attention layers but those of KDA become sparse: every query of a document with more than --index_topk keys attends
to so many of them. With --every N the first of every N such layers owns an indexer and the others share its choice.
The result links to the weights of the base, which is never written to and has to stay where it is. What is wrong ends
it with exit code 2.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from modeling_latentmoe.training.add_indexer import add_indexer
from modeling_latentmoe.training.commands import Parser, run_command


def add(argv: Sequence[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("base", type=Path, help="checkpoint folder with dense attention")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--index_topk", type=int, default=2048, help="keys that a query attends to")
    parser.add_argument("--index_n_heads", type=int, default=64, help="heads of an indexer")
    parser.add_argument("--index_head_dim", type=int, default=128, help="width of an indexer's heads")
    parser.add_argument("--index_kpool", type=int, default=1, help="choose keys in pools of so many")
    parser.add_argument("--every", type=int, default=1, help="layers that share one indexer")
    parser.add_argument("--seed", type=int, default=0, help="of the new weights")
    args = parser.parse_args(argv)
    owners = add_indexer(
        args.base,
        args.out,
        topk=args.index_topk,
        heads=args.index_n_heads,
        head_dim=args.index_head_dim,
        every=args.every,
        pool=args.index_kpool,
        seed=args.seed,
    )
    print(f"{args.out}: untrained indexers in layers {', '.join(map(str, owners))}, top {args.index_topk}")


def main(argv: Sequence[str]) -> int:
    return run_command(add, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
