"""Held-out loss, and accuracy of freely generated answers."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator

from modeling_latentmoe.chat_latentmoe import parse_message
from modeling_latentmoe.training.data import Chat, encode_chat, encode_prompt, pad
from modeling_latentmoe.training.loss import count_loss_tokens, token_loss_sum


@torch.inference_mode()
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
    remaining = iter(chats)
    while group := list(islice(remaining, batch_size)):
        batch = pad([encode_chat(processor, chat, thinking) for chat in group], processor.tokenizer.pad_token_id)
        batch = {name: value.to(model.device) for name, value in batch.items()}
        labels_BT = batch.pop("labels")
        loss = token_loss_sum(model(**batch).logits, labels_BT)
        answers = generate_answers(model, processor, group, max_new_tokens, thinking)
        right = sum(answer.strip() == chat.answer.strip() for answer, chat in zip(answers, group, strict=True))
        sums += torch.tensor([loss.item(), count_loss_tokens(labels_BT), right, len(group)], dtype=torch.float64)
    model.train(was_training)
    loss, tokens, right, answers = accelerator.reduce(sums.to(accelerator.device), reduction="sum").tolist()
    if not answers:
        raise ValueError("--eval_dataset has no rows")
    return {"eval_loss": loss / tokens, "eval_accuracy": right / answers, "eval_samples": int(answers)}


def generate_answers(
    model: Any, processor: Any, chats: Sequence[Chat], max_new_tokens: int, thinking: bool
) -> list[str]:
    """The greedy answers to the prompts of `chats`, generated together."""
    prompts = [encode_prompt(processor, chat, thinking) for chat in chats]
    batch = pad(prompts, processor.tokenizer.pad_token_id, left=True)
    batch.pop("labels")
    batch = {name: value.to(model.device) for name, value in batch.items()}
    ids_BT = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
    start = batch["input_ids"].shape[1]
    return [parse_message(processor.tokenizer, ids[start:], thinking)["response"] for ids in ids_BT.tolist()]
