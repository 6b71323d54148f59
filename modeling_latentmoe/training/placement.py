"""Which layers keep their routed experts outside of the device: the switch --experts_in, and what "auto" chooses.

device          all experts on the device
host:0-30,40    those of these layers in pinned host memory
file:0-30       those of these layers in the files of the checkpoint, from which they are read anew for every use
auto            as many in host memory as the memory of the device demands
"""

import re
from typing import NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedConfig

from modeling_latentmoe.training.launch import copies_of
from modeling_latentmoe.training.layout import shares
from modeling_latentmoe.training.mesh import expert_layers
from modeling_latentmoe.training.sources import is_url

# layers of experts that the device has room for while they pass through it
SLOTS = 2
# what "auto" leaves of a device's memory to activations and to layers that are gathered for a moment
ACTIVATIONS = 0.3
KINDS = "device, auto, host:LAYERS or file:LAYERS, such as host:0-30,40"
_LAYERS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


class Placement(NamedTuple):
    """The value of the switch as it was given, its kind ("device", "host", "file" or "auto"), and the layers."""

    text: str
    kind: str
    layers: frozenset[int] = frozenset()

    @property
    def on_disk(self) -> frozenset[int]:
        """Layers whose experts need not be loaded."""
        return self.layers if self.kind == "file" else frozenset()


def parse_placement(text: str) -> Placement:
    """What --experts_in asks for; ValueError naming it."""
    kind, colon, layers = text.partition(":")
    if kind in ("device", "auto") and not colon:
        return Placement(text, kind)
    if kind not in ("host", "file") or not _LAYERS.fullmatch(layers):
        raise ValueError(f"--experts_in {text} must be {KINDS}")
    chosen: set[int] = set()
    for part in layers.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if not span:
            raise ValueError(f"--experts_in {text}: the range {part} must start with its lower layer")
        chosen.update(span)
    return Placement(text, kind, frozenset(chosen))


def check_placement(placement: Placement, config: PreTrainedConfig, model: str) -> None:
    """ValueError unless the model of this config has these layers, one of them with experts; before it is loaded."""
    text = config.get_text_config()
    if not placement.layers:
        return
    last = text.num_hidden_layers - 1
    if max(placement.layers) > last:
        raise ValueError(f"--experts_in {placement.text}: the last layer of {model} is {last}")
    if not any(text.is_moe_layer(layer) for layer in placement.layers):
        found = [layer for layer in range(last + 1) if text.is_moe_layer(layer)]
        where = f"its layers {found[0]} to {found[-1]} have some" if found else "it has none, leave the switch out"
        raise ValueError(f"--experts_in {placement.text}: no routed experts in these layers of {model}: {where}")
    if placement.kind == "file" and is_url(model):
        raise ValueError(f"--experts_in {placement.text}: --model {model} is a URL, copy the checkpoint to a folder")


def decide(placement: Placement, model: nn.Module, accelerator: Accelerator, ep_degree: int) -> Placement:
    """`placement` itself, or what "auto" chooses for all processes, which is said. A collective then.

    model: with its adapters and this process' experts, not yet on the device.
    """
    if placement.kind != "auto":
        return placement
    device, layers = accelerator.device, expert_layers(model)
    if device.type == "cpu" or not layers:
        accelerator.print("--experts_in auto: experts stay on the device")
        return Placement(placement.text, "device")
    free, total = _least_memory(device)
    # of the first process: no other one has more
    share = next(shares(model, accelerator.num_processes, ep_degree, copies_of(accelerator)))
    room = free - (share.total_bytes - share.expert_bytes) - int(ACTIVATIONS * total)
    chosen = choose_layers(list(layers), share.expert_bytes // len(layers), room)
    accelerator.print(
        f"--experts_in auto: experts of {len(chosen)} of {len(layers)} layers in host memory "
        f"({share.expert_bytes / 1e9:,.1f} GB of experts, room for {max(0, room) / 1e9:,.1f} GB on the device)"
    )
    return Placement(placement.text, "host", frozenset(chosen)) if chosen else Placement(placement.text, "device")


def _least_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of the device that has the least, of those of all processes."""
    least = torch.tensor(torch.get_device_module(device).mem_get_info(device), device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    free, total = least.tolist()
    return free, total


def choose_layers(layers: list[int], layer_bytes: int, room: int) -> list[int]:
    """The fewest of `layers` that must leave the device if `room` bytes of it are for experts.

    They are spread evenly: the layers between two of them compute while the second one's experts are on their way.
    """
    if len(layers) * layer_bytes <= room:
        return []
    out = len(layers) - max(0, room // layer_bytes - SLOTS)
    return [layers[(2 * i + 1) * len(layers) // (2 * out)] for i in range(out)]
