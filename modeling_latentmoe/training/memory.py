"""The memory of a device: what a step needs of it at least."""

import os
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from modeling_latentmoe.ops import LOGIT_BYTES
from modeling_latentmoe.training.footprint import (
    Work,
    activation_bytes,
    alike_layers,
    experts_on_device,
    gathered_bytes,
    layer_bytes,
)
from modeling_latentmoe.training.launch import copies_of
from modeling_latentmoe.training.layout import shares
from modeling_latentmoe.training.mesh import expert_layers
from modeling_latentmoe.training.placement import Placement

GIB = 2**30


class Estimate(NamedTuple):
    """Bytes of a process' device, at least: what it holds all the time, the layers that FSDP gathers for a moment, and
    the activations and logits of a micro-batch."""

    weights: int
    experts: int
    adapters: int
    gradients: int
    moments: int
    last_good: int
    gathered: int
    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def table(self, title: str, memory: int) -> str:
        names = {"experts": "experts of its share", "adapters": "adapters (fp32)", "moments": "moments of AdamW"}
        names |= {"last_good": "adapters before the last step", "gathered": "layers that FSDP gathers"}
        lines = [(names.get(name, name), value) for name, value in self._asdict().items()]
        lines += [("in all", self.total), ("there is", memory)]
        return "\n".join([title, *(f"  {name:30}{value / GIB:9.3f} GiB" for name, value in lines)])


class Room:
    """What a step needs of every device at least, and whether that is there. `__init__` is a collective, and raises
    ValueError where weights and states alone do not fit.

    model: with its adapters and this process' experts, before FSDP shards it. Weights and states are counted, tensor by
    tensor. Activations are those that the leanest kernels keep, with experts that all get as many tokens; temporary
    tensors, images, and memory that the allocator cannot use come on top.
    """

    def __init__(
        self, model: nn.Module, accelerator: Accelerator, ep: int, placement: Placement, recompute: str, offload: bool
    ) -> None:
        self.config, self.device, self.ep = model.config.get_text_config(), accelerator.device, ep
        self.itemsize = next(param.itemsize for param in model.parameters() if param.is_floating_point())
        self.recompute, self.offload = recompute, offload
        world, copies = accelerator.num_processes, copies_of(accelerator)
        # of the first process: no other one has more
        share = next(shares(model, world, ep, copies))
        held = experts_on_device(self.config, share.expert_bytes, len(placement.layers & expert_layers(model).keys()))
        gathered = gathered_bytes(model) if copies < world else 0
        states = {"adapters": share.gradient_bytes, "gradients": share.gradient_bytes, "moments": share.moment_bytes}
        self.fixed = Estimate(share.dense_bytes, held, **states, last_good=share.gradient_bytes, gathered=gathered)
        self.memory = least_memory(accelerator.device)
        if self.fixed.total >= self.memory:
            raise ValueError(self._refusal(self.fixed, 0, ""))

    def needed(self, tokens: int) -> Estimate:
        """For a micro-batch of so many tokens, padding included."""
        work = Work(tokens, self.ep, self.recompute, width=self.itemsize)
        if self.offload:
            layers = alike_layers(self.config, self.config.num_hidden_layers)
            activations = tokens * int(max(layer_bytes(self.config, layer, work) for layer in layers))
        else:
            activations = activation_bytes(self.config, work)
        logits = min(LOGIT_BYTES, 4 * self.config.vocab_size * tokens)
        return self.fixed._replace(activations=activations, logits=logits)

    def check(self, tokens: int, switches: str) -> str:
        """A table of what is needed for the largest micro-batch of any process, this one's has `tokens`; a collective.
        ValueError with what to change, such as `switches`, where the smallest device has less memory than that."""
        most = torch.tensor(tokens, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        needed = self.needed(int(most))
        if needed.total > self.memory:
            raise ValueError(self._refusal(needed, int(most), switches))
        return needed.table(f"memory of a process, at least, for micro-batches of {int(most):,} tokens:", self.memory)

    def _refusal(self, needed: Estimate, tokens: int, switches: str) -> str:
        fault = f"a step needs at least {needed.total / GIB:.3f} GiB, but a device has {self.memory / GIB:.3f} GiB"
        if self.fixed.total >= self.memory:
            return f"{fault}, and most of it is weights: use more devices with FSDP, a larger --ep or --experts_in auto"
        fitting = int((self.memory - self.fixed.total) * tokens / (needed.total - self.fixed.total))
        ways = [f"lower {switches}, to at most {fitting:,} tokens in a micro-batch"]
        ways += ["--gradient_checkpointing full"] if self.recompute == "none" else []
        ways += [] if self.offload else ["--offload_activations"]
        return f"{fault}: {', or '.join(ways)}"

    def most_rows(self, length: int, limit: int) -> int:
        """How many samples of `length` tokens have room by the estimate, at least 1 and at most `limit`."""
        of_one = self.needed(length).total - self.fixed.total
        return max(1, min(limit, (self.memory - self.fixed.total) // of_one))


def least_memory(device: torch.device) -> int:
    """Bytes that the process with the least could have: of its device, or its share of the machine."""
    if device.type == "cpu":
        total = psutil.virtual_memory().total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        total = torch.get_device_module(device).mem_get_info(device)[1]
    least = torch.tensor(total, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)
