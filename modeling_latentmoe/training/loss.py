"""The loss rule: every trained token of a step weighs the same, wherever it is computed.

Legend: B batch, T tokens, E experts.

A step accumulates micro-batches on each of `dp_size` processes. With n the number of trained tokens of all
of them together, the loss of the step is (sum of all token losses) / n. Each process backpropagates

    dp_size * (sum of its token losses) / n

because the gradients of replicated parameters are then averaged over the processes. n is therefore known
before the first forward of the step.

A process whose memory is used up in a step goes on with batches of padding, so that the others, which may wait for it,
come to the end of the step, where all learn of it (collectives.py).
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modeling_latentmoe.training.balance import Balancing
from modeling_latentmoe.training.collectives import Collectives
from modeling_latentmoe.training.expert_parallel import count_drops
from modeling_latentmoe.training.gradients import average_gradients
from modeling_latentmoe.training.sums import summed
from modeling_latentmoe.training.timing import Clock

IGNORE = -100


def count_loss_tokens(labels_BT: Tensor) -> int:
    """Number of positions that are predicted: labels are shifted by one, so the first of a row never is."""
    return int((labels_BT[:, 1:] != IGNORE).sum())


def global_sum(accelerator: Accelerator, *counts: int) -> list[int]:
    """Each count summed over all processes, in one exchange."""
    total = accelerator.reduce(torch.tensor(counts, device=accelerator.device), reduction="sum")
    return total.tolist()


def padding_like(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch of one token of padding: nothing to learn, nothing to route, no images."""
    # what a document begins with is no placeholder of an image; a batch may have no label to take instead
    token_11 = batch["input_ids"][:1, :1]
    images = {name: batch[name][:0] for name in ("pixel_values", "grid_thws") if name in batch}
    return {
        "input_ids": token_11,
        "attention_mask": torch.zeros_like(token_11),
        "labels": torch.full_like(token_11, IGNORE),
        **images,
    }


class Step(NamedTuple):
    """What all processes computed together: the loss, and the expert load, int64 [MoE layers, E], empty for a model
    without routed experts. auxiliary, indexer: losses of the balance and of the indexers, per token; dropped:
    assignments of tokens to experts beyond their capacity. out_of_memory: on how many processes there was too little,
    where the rest, and all gradients, mean nothing."""

    loss: float
    load: Tensor
    auxiliary: float = 0.0
    indexer: float = 0.0
    dropped: int = 0
    out_of_memory: int = 0


def backpropagate(
    accelerator: Accelerator,
    model: nn.Module,
    window: list[dict[str, Tensor]],
    n_tokens: int,
    n_read: int,
    balancing: Balancing | None = None,
    capacity_factor: float | None = None,
    collectives: Collectives | None = None,
) -> Step:
    """Forward and backward of this process' micro-batches of one step.

    `window` holds batches of model arguments with `labels`; `n_tokens` is the number of trained tokens of
    all processes, `n_read` that of all of their tokens. Returns the same numbers on every process. collectives: those
    of `model`, where they are watched, with the clock of the step.
    """
    if collectives is None:
        collectives = Collectives(model, Clock(accelerator.device))
    clock, copied = collectives.clock, isinstance(model, DistributedDataParallel)
    # DDP would reduce gradients in the middle of a backward pass, which may fail: they are averaged below
    module = model.module if copied else model
    # accelerator.backward divides by its accumulation steps: undone here, because n_tokens covers the whole window
    scale = accelerator.num_processes * accelerator.gradient_accumulation_steps / n_tokens
    sums = torch.zeros(4, dtype=torch.float64)
    loads, dropped = [], 0

    def compute(batch: dict[str, Tensor], balancing: Balancing | None) -> None:
        nonlocal sums, dropped
        batch = {name: value.to(accelerator.device) for name, value in batch.items()}
        with clock.span("forward"):
            output = module(
                **batch, num_items_in_batch=1, return_logits=False, output_router_logits=balancing is not None
            )
            loss = output.loss
            auxiliary = torch.zeros_like(loss)
            indexer = torch.zeros_like(loss) if output.indexer_loss is None else output.indexer_loss
            if balancing is not None:
                mask_BT = batch.get("attention_mask")
                valid_T = None if mask_BT is None else mask_BT.bool().flatten()
                auxiliary = balancing.observe(output.router_logits, valid_T)
        with clock.span("backward"):
            # balance and indexers are per token that was read, the loss per token that was predicted
            accelerator.backward(loss * scale + (auxiliary + indexer) * (scale * n_tokens / n_read))
        sums[:3] += torch.stack([loss, auxiliary, indexer]).detach().double().cpu()
        if output.expert_load is not None:
            loads.append(output.expert_load)
            if capacity_factor is not None:
                dropped += count_drops(output.expert_load, capacity_factor)

    out_of_memory = False
    for i, batch in enumerate(window):
        # FSDP reduces gradients once per step, with the last micro-batch
        with nullcontext() if copied or i == len(window) - 1 else accelerator.no_sync(model):
            collectives.begin()
            if not out_of_memory:
                try:
                    compute(batch, balancing)
                    continue
                except torch.OutOfMemoryError:
                    out_of_memory = True
                # not inside of `except`, where the error still holds what was computed
                collectives.catch_up()
            compute(padding_like(batch), None)
    collectives.end()
    sums[3] = out_of_memory
    loss, auxiliary, indexer, failures = summed(sums, accelerator.device).tolist()
    if failures:
        return Step(float("nan"), torch.zeros(0, dtype=torch.int64), out_of_memory=int(failures))
    if copied:
        with clock.span("optimizer"):
            average_gradients(model)
    if not loads:
        return Step(loss / n_tokens, torch.zeros(0, dtype=torch.int64), indexer=indexer / n_read)
    load = accelerator.reduce(torch.stack(loads).sum(0), reduction="sum").cpu()
    return Step(loss / n_tokens, load, auxiliary / n_read, indexer / n_read, *global_sum(accelerator, dropped))
