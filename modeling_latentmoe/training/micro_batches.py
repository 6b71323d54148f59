"""Micro-batches that fit: the largest one, found by trying, and smaller ones where memory is used up during a run.

The batches that are read stay as they are: they are computed in parts. So a step has the same rows, the same loss and,
but for rounding, the same gradients, and the data continues as if nothing had happened.

Legend: B batch, T tokens, U units that are not parted (rows or packed documents), I images, P patches of all images.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from modeling_latentmoe.training.balance import Balancing
from modeling_latentmoe.training.data import with_images
from modeling_latentmoe.training.loss import Step, padding_like


class MicroBatches:
    """Computes steps in as few parts as fit; every process makes the same calls and has the same answers.

    attempt: forward and backward of micro-batches, with counts of tokens, see `backpropagate`. config: of the model.
    """

    def __init__(
        self,
        attempt: Callable[..., Step],
        optimizer: torch.optim.Optimizer,
        balancing: Balancing | None,
        config: PreTrainedConfig,
        device: torch.device,
    ) -> None:
        self.attempt, self.optimizer, self.balancing = attempt, optimizer, balancing
        self.config, self.device = config, device
        # of every batch that is read
        self.parts = 1

    def step(self, window: list[dict[str, Tensor]], n_tokens: int, n_read: int, say: Callable[[str], Any]) -> Step:
        """Forward and backward of a step; where a process ran out of memory all begin it again, in smaller parts.

        Raises OutOfMemoryError where a part is a single sample already.
        """
        while True:
            pieces = [piece for batch in window for piece in split(batch, self.parts, self.config)]
            result = self.attempt(pieces, n_tokens, n_read)
            if not result.out_of_memory:
                return result
            self._clear()
            samples = torch.tensor(max(map(count_samples, window)), device=self.device)
            dist.all_reduce(samples, op=dist.ReduceOp.MAX)
            if self.parts >= samples:
                raise torch.OutOfMemoryError("a micro-batch of one sample does not fit")
            self.parts *= 2
            say(f"out of memory: micro-batches are halved, every batch is computed in {self.parts} from now on")

    def largest(self, length: int, most: int) -> int:
        """How many samples of `length` tokens of text fit in a micro-batch, up to `most`, to an eighth."""

        def fits(rows: int) -> bool:
            trial = with_images(trial_batch(rows, length, self.config), self.config)
            result = self.attempt([trial], rows * length, rows * length)
            self._clear()
            return not result.out_of_memory

        found = largest(fits, most)
        if self.device.type != "cpu":
            # what did not fit is not what training needs
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
        return found

    def _clear(self) -> None:
        self.optimizer.zero_grad()
        if self.balancing is not None:
            self.balancing.forget()


def check_device(device: torch.device) -> None:
    """ValueError where trying does not tell: a machine whose memory is used up slows down or ends processes."""
    if device.type == "cpu":
        raise ValueError("--batch_size auto needs an accelerator: on a CPU give a number")


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, to an eighth, by trying; ValueError if 1 does not fit.

    Every process has the same answers.
    """
    good, bad, trial = 0, most + 1, most
    while trial > good and bad - good > max(1, good // 8):
        if fits(trial):
            good = trial
        else:
            bad = trial
        trial = (good + bad) // 2
    if not good:
        raise ValueError(
            "--batch_size auto: not even one sample of --max_length fits: lower --max_length, set "
            "--gradient_checkpointing full, --offload_activations or --experts_in auto, or use more devices"
        )
    return good


def trial_batch(rows: int, length: int, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Random text, every token of it learned."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(config.get_text_config().vocab_size, (rows, length), generator=generator)
    # one that stands for an image would ask for it
    media = config.media_placeholder_token_id
    ids_BT[ids_BT == media] = (media + 1) % config.get_text_config().vocab_size
    return {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "labels": ids_BT.clone()}


def count_samples(batch: dict[str, Tensor]) -> int:
    """Rows of a padded batch, documents of a packed one."""
    return len(batch["cu_seqlens"]) - 1 if "cu_seqlens" in batch else len(batch["input_ids"])


def split(batch: dict[str, Tensor], parts: int, config: PreTrainedConfig) -> list[dict[str, Tensor]]:
    """The rows of a padded batch, or the documents of a packed one, in `parts` batches, in order and about equally
    large; where there are fewer of them, the rest are padding, because all processes take the same number."""
    if parts == 1:
        return [batch]
    if "cu_seqlens" in batch:
        edges = batch["cu_seqlens"].long()
        middles = (edges[:-1] + edges[1:]) // 2
        part_U = middles * parts // int(edges[-1])
    else:
        part_U = torch.arange(len(batch["input_ids"])) * parts // len(batch["input_ids"])
    return [_piece(batch, (part_U == part).nonzero().flatten(), config) for part in range(parts)]


def _piece(batch: dict[str, Tensor], units: Tensor, config: PreTrainedConfig) -> dict[str, Tensor]:
    """The rows or documents `units`, which are neighbours."""
    if not len(units):
        return padding_like(batch)
    first, last = int(units[0]), int(units[-1])
    if "cu_seqlens" in batch:
        edges = batch["cu_seqlens"][first : last + 2]
        here = slice(int(edges[0]), int(edges[-1]))
        before = batch["input_ids"][:, : here.start]
        piece = {name: batch[name][:, here] for name in ("input_ids", "labels")} | {"cu_seqlens": edges - edges[0]}
    else:
        before = batch["input_ids"][:first]
        width = int(batch["attention_mask"][first : last + 1].sum(1).max())
        names = ("input_ids", "attention_mask", "labels")
        piece = {name: batch[name][first : last + 1, :width] for name in names}
    return piece | _images(batch, before, piece["input_ids"], config)


def _images(batch: dict[str, Tensor], before: Tensor, here: Tensor, config: PreTrainedConfig) -> dict[str, Tensor]:
    """The images whose placeholders are `here`, after those that are `before`."""
    if "pixel_values" not in batch:
        return {}
    height, width = config.vision_config.merge_kernel_size
    patches_I = batch["grid_thws"].prod(1)
    # an image's tokens: those of one moment
    tokens_I = batch["grid_thws"][:, 1:].prod(1) // (height * width)
    ends_I = tokens_I.cumsum(0)
    skipped, own = (int((ids == config.media_placeholder_token_id).sum()) for ids in (before, here))
    inside_I = (ends_I > skipped) & (ends_I <= skipped + own)
    inside_P = inside_I.repeat_interleave(patches_I)
    return {"pixel_values": batch["pixel_values"][inside_P], "grid_thws": batch["grid_thws"][inside_I]}
