"""Make a tiny model of dense attention and chats that need it, to add an indexer to and train it on a laptop.

    python scripts/make_lookups.py lookups
    python scripts/add_indexer.py lookups/dense lookups/sparse --index_topk 16 --index_n_heads 8 --index_head_dim 16

The README has the commands that follow. It writes lookups/dense, a model of one attention and one KDA layer, and
lookups/train.jsonl and test.jsonl. A chat shows a stream of words with a few facts among them, and its answer looks
these up again and again:

    user       hum B3 ray elk D0 ...              assistant   d 0 b 3 d 0 ...

Sparse attention can only be as good as dense attention is sharp. Beside the answers this model learns to attend
sharply, by a penalty on the entropy of every head: in a model this small attention is else spread over so many keys
that even the best eighth of them holds little more than half of it (of the shipped tiny model 54 to 78 %).
"""

import json
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.image_processing_latentmoe import LatentMoEImageProcessor
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.processing_latentmoe import LatentMoEProcessor
from modeling_latentmoe.tokenization_latentmoe import tiny_tokenizer
from modeling_latentmoe.training.commands import Parser, run_command
from modeling_latentmoe.training.data import encode_chat, pad, read_chat
from modeling_latentmoe.training.files import check_new, new_folder

FILLERS = ("hum", "ray", "elk", "oak", "fig", "sky", "pea", "ivy", "owl", "cup", "net", "jam")
NAMES, VALUES = "ABCD", range(8)
WORDS, LOOKUPS = 80, 20


def lookup(split: str, index: int) -> dict:
    """A chat, a function of its arguments alone."""
    rng = random.Random(f"{split}/{index}")
    facts = {name: rng.choice(VALUES) for name in NAMES}
    words = [rng.choice(FILLERS) for _ in range(WORDS)] + [f"{name}{value}" for name, value in facts.items()]
    rng.shuffle(words)
    asked = rng.choices(NAMES, k=LOOKUPS)
    answer = " ".join(f"{name.lower()} {facts[name]}" for name in asked)
    return {"messages": [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": answer}]}


def make_processor() -> LatentMoEProcessor:
    texts = [message["content"] for index in range(300) for message in lookup("vocabulary", index)["messages"]]
    tags = ["message", " role", '="', "user", "assistant", "system", "response", "think"] * 200
    return LatentMoEProcessor(LatentMoEImageProcessor(), tiny_tokenizer(texts + tags, vocab_size=400))


def make_config(processor: LatentMoEProcessor) -> LatentMoEConfig:
    tokenizer = processor.tokenizer
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|end_of_msg|>"),
        "pad_token_id": tokenizer.pad_token_id,
    }
    linear = {"full_attn_layers": [1], "kda_layers": [2], "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts": 0,
        "attn_res_block_size": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.06,
        "linear_attn_config": linear | {"use_full_rank_gate": True, "gate_lower_bound": -5.0},
    }
    return LatentMoEConfig(
        text_config=text | ids,
        vision_config=None,
        media_placeholder_token_id=tokenizer.convert_tokens_to_ids("<|media_pad|>"),
        **ids,
    )


class Entropy:
    """Entropy of dense attention in nats, averaged over the tokens and heads of every layer, with its gradient."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.found: list[Tensor] = []
        for module in model.modules():
            if hasattr(module, "indexer_type"):
                module.register_forward_hook(self.look)

    def look(self, layer: nn.Module, args: tuple, output: object) -> None:
        x_BTD, documents = args[:2]
        _, q_BTNH, latent_BTL = layer.project(x_BTD)
        (q_MNL, kv_SL, scale, _), _ = layer.absorb(q_BTNH, latent_BTL, documents)
        first_M, end_M = documents.key_ranges
        place_S = torch.arange(len(kv_SL))
        visible_MS = (place_S >= first_M[:, None]) & (place_S < end_M[:, None])
        score = (torch.einsum("mnl,sl->mns", q_MNL, kv_SL) * scale).masked_fill(~visible_MS[:, None], -1e9)
        share = score.softmax(-1)
        self.found.append(-(share * score.log_softmax(-1)).sum(-1).mean())

    def take(self) -> Tensor:
        total, self.found = torch.stack(self.found).mean(), []
        return total


def train(model: PreTrainedModel, processor: LatentMoEProcessor, steps: int, batch_size: int, sharp: float) -> None:
    """AdamW; prints loss and entropy now and then. FloatingPointError where they are not finite."""
    entropy, started = Entropy(model), time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.98), weight_decay=0.01)
    # with a rise of exactly one step torch divides by zero
    rise = 0.1 if steps > 10 else 0.3
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps, pct_start=rise)
    model.train()
    for step in range(steps):
        chats = [read_chat("dense", lookup("dense", step * batch_size + row), None) for row in range(batch_size)]
        batch = pad([encode_chat(processor, chat, False) for chat in chats], processor.tokenizer.pad_token_id, False)
        loss = model(**batch, return_logits=False).loss
        spread = entropy.take()
        total = loss + sharp * spread
        if not math.isfinite(total.item()):
            what = f"loss {loss:.4g} + --sharp {sharp:g} * entropy {spread:.4g}"
            raise FloatingPointError(f"step {step + 1}: {what} is not finite")
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 25 == 0:
            elapsed = time.monotonic() - started
            print(f"step {step + 1}, {elapsed:.0f} s: loss {loss:.3f}, entropy {spread:.2f} nats", flush=True)


def make_lookups(argv: Sequence[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--steps", type=int, default=200, help="of the dense model (default %(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="chats per step (default %(default)s)")
    parser.add_argument("--sharp", type=float, default=0.05, help="weight of the entropy (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default %(default)s)")
    args = parser.parse_args(argv)
    for name in ("steps", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    if not 0 <= args.sharp < math.inf:
        raise ValueError(f"--sharp {args.sharp} must be at least 0 and finite")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed {args.seed} must be at least 0 and below 2**32")
    check_new(args.out)
    torch.manual_seed(args.seed)
    processor = make_processor()
    model = LatentMoEForConditionalGeneration(make_config(processor))
    train(model, processor, args.steps, args.batch_size, args.sharp)
    with new_folder(args.out) as partial:
        model.save_pretrained(partial / "dense")
        processor.save_pretrained(partial / "dense")
        for split, count in (("train", 1600), ("test", 64)):
            lines = [json.dumps(lookup(split, index)) + "\n" for index in range(count)]
            (partial / f"{split}.jsonl").write_text("".join(lines))
    print(f"wrote {args.out}")


def main(argv: Sequence[str]) -> int:
    return run_command(make_lookups, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
