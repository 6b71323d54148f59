"""Held-out loss, and accuracy of freely generated answers.

Legend: B batch, T tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from modeling_latentmoe.chat_latentmoe import parse_message
from modeling_latentmoe.training.data import Chat, Sample, encode_chat, encode_prompt, pad, with_images
from modeling_latentmoe.training.loss import count_loss_tokens, global_sum
from modeling_latentmoe.training.sums import summed

# what a process evaluates while others still have chats and it has none: they may need its experts or its weights
IDLE = Chat("idle", [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}])


# not inference_mode: sharded weights that are gathered in it could not be trained afterwards
@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: Any,
    processor: Any,
    chats: Iterable[Chat],
    *,
    batch_size: int,
    max_new_tokens: int,
    thinking: bool = False,
) -> dict[str, float]:
    """Mean token loss and share of exactly right answers over the chats of all processes.

    An answer is what the model writes after the chat's prompt, greedily, in at most `max_new_tokens` tokens;
    it is right when it equals the chat's last message, spaces at both ends aside. Each process passes its
    own chats.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64)  # loss, tokens, right answers, answers
    for group, batch in held_out_batches(accelerator, model, processor, chats, batch_size, thinking):
        loss = model(**batch, num_items_in_batch=1, return_logits=False).loss
        answers = generate_answers(accelerator, model, processor, group or [IDLE], max_new_tokens, thinking)
        right = sum(answer.strip() == chat.answer.strip() for answer, chat in zip(answers, group, strict=False))
        if group:
            counts = [loss.item(), count_loss_tokens(batch["labels"]), right, len(group)]
            sums += torch.tensor(counts, dtype=torch.float64)
    model.train(was_training)
    loss, tokens, right, answers = summed(sums, accelerator.device).tolist()
    if not answers:
        raise ValueError("--eval_dataset has no rows")
    return {"eval_loss": loss / tokens, "eval_accuracy": right / answers, "eval_samples": int(answers)}


def held_out_batches(
    accelerator: Accelerator, model: Any, processor: Any, chats: Iterable[Chat], batch_size: int, thinking: bool
) -> Iterator[tuple[list[Chat], dict[str, Tensor]]]:
    """The chats of this process in groups, and each group as a batch; without chats of its own, while other processes
    still have some, a process gets an idle batch for no chats."""
    remaining = iter(chats)
    while any(global_sum(accelerator, len(group := list(islice(remaining, batch_size))))):
        yield group, encode(model, [encode_chat(processor, chat, thinking) for chat in group or [IDLE]], processor)
    for module in model.modules():
        # FSDP keeps what it gathered, always at the root, for a backward pass that does not come
        if isinstance(module, FSDPModule):
            module.reshard()


def encode(model: Any, samples: list[Sample], processor: Any, left: bool = False) -> dict[str, Tensor]:
    """The samples as one padded batch on the model's device."""
    batch = with_images(pad(samples, processor.tokenizer.pad_token_id, left), model.config)
    return {name: value.to(model.device) for name, value in batch.items()}


def generate_answers(
    accelerator: Accelerator,
    model: Any,
    processor: Any,
    chats: Sequence[Chat],
    max_new_tokens: int,
    thinking: bool,
) -> list[str]:
    """The greedy answers to the prompts of `chats`, generated together.

    A process whose answers are complete goes on until those of all processes are.
    """
    batch = encode(model, [encode_prompt(processor, chat, thinking) for chat in chats], processor, left=True)
    batch.pop("labels")
    several = accelerator.num_processes > 1
    ids_BT = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, synced_gpus=several)
    start = batch["input_ids"].shape[1]
    return [parse_message(processor.tokenizer, ids[start:], thinking)["response"] for ids in ids_BT.tolist()]
