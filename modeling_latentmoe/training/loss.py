"""The loss rule: every trained token of a step weighs the same, wherever it is computed.

Shapes: B batch, T tokens, E experts.

A step accumulates micro-batches on each of `dp_size` processes. With n the number of trained tokens of all
of them together, the loss of the step is (sum of all token losses) / n. Each process backpropagates

    dp_size * (sum of its token losses) / n

because the gradients of replicated parameters are then averaged over the processes. n is therefore known
before the first forward of the step.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from modeling_latentmoe.training.balance import Balancing
from modeling_latentmoe.training.expert_parallel import count_drops

IGNORE = -100


def count_loss_tokens(labels_BT: Tensor) -> int:
    """Number of positions that are predicted: labels are shifted by one, so the first of a row never is."""
    return int((labels_BT[:, 1:] != IGNORE).sum())


def global_sum(accelerator: Accelerator, *counts: int) -> list[int]:
    """Each count summed over all processes, in one exchange."""
    total = accelerator.reduce(torch.tensor(counts, device=accelerator.device), reduction="sum")
    return total.tolist()


class Step(NamedTuple):
    """What all processes computed together: the loss, and the expert load, int64 [MoE layers, E], empty for a model
    without routed experts. auxiliary, indexer: losses of the balance and of the indexers, per token; dropped:
    assignments of tokens to experts beyond their capacity."""

    loss: float
    load: Tensor
    auxiliary: float = 0.0
    indexer: float = 0.0
    dropped: int = 0


def backpropagate(
    accelerator: Accelerator,
    model: nn.Module,
    window: list[dict[str, Tensor]],
    n_tokens: int,
    n_read: int,
    balancing: Balancing | None = None,
    capacity_factor: float | None = None,
) -> Step:
    """Forward and backward of this process' micro-batches of one step.

    `window` holds batches of model arguments with `labels`; `n_tokens` is the number of trained tokens of
    all processes, `n_read` that of all of their tokens. Returns the same numbers on every process.
    """
    # accelerator.backward divides by its accumulation steps: undone here, because n_tokens covers the whole
    # window
    scale = accelerator.num_processes * accelerator.gradient_accumulation_steps / n_tokens
    sums = torch.zeros(3, dtype=torch.float64)
    loads, dropped = [], 0
    for i, batch in enumerate(window):
        batch = {name: value.to(accelerator.device) for name, value in batch.items()}
        # gradients travel between processes once per step, with the last micro-batch
        with nullcontext() if i == len(window) - 1 else accelerator.no_sync(model):
            output = model(
                **batch, num_items_in_batch=1, return_logits=False, output_router_logits=balancing is not None
            )
            loss = output.loss
            auxiliary = torch.zeros_like(loss)
            indexer = torch.zeros_like(loss) if output.indexer_loss is None else output.indexer_loss
            if balancing is not None:
                mask_BT = batch.get("attention_mask")
                valid_T = None if mask_BT is None else mask_BT.bool().flatten()
                auxiliary = balancing.observe(output.router_logits, valid_T)
            # balance and indexers are per token that was read, the loss per token that was predicted
            accelerator.backward(loss * scale + (auxiliary + indexer) * (scale * n_tokens / n_read))
        sums += torch.stack([loss, auxiliary, indexer]).detach().double().cpu()
        if output.expert_load is not None:
            loads.append(output.expert_load)
            if capacity_factor is not None:
                dropped += count_drops(output.expert_load, capacity_factor)
    loss, auxiliary, indexer = accelerator.reduce(sums.to(accelerator.device), reduction="sum").tolist()
    if not loads:
        return Step(loss / n_tokens, torch.zeros(0, dtype=torch.int64), indexer=indexer / n_read)
    load = accelerator.reduce(torch.stack(loads).sum(0), reduction="sum").cpu()
    return Step(loss / n_tokens, load, auxiliary / n_read, indexer / n_read, *global_sum(accelerator, dropped))
