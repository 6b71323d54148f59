"""Every layout in which a LoRA run fits on given devices, the fastest first. Memory and times are predictions.

A layout says how often all but the experts is held and over how many devices each copy is sharded (dp_replicate and
dp_shard), how many devices share the experts (ep) and how many times they are held (efsdp), how many rows a micro-batch
has, what is computed again, whether experts are packed, and of how many layers they live in host memory.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from peft import PeftModel

from modeling_latentmoe.configuration_latentmoe import LatentMoETextConfig
from modeling_latentmoe.training.footprint import (
    Footprint,
    Work,
    experts_on_device,
    footprint,
    gathered_bytes,
    moe_layers,
    unit_bytes,
)
from modeling_latentmoe.training.layout import Share, shares
from modeling_latentmoe.training.placement import SLOTS, choose_layers
from modeling_latentmoe.training.step_time import Machine, Operators, Sizes, Split, micro_batch, optimizer_step

CHECKPOINTING = ("none", "selective", "full")
GIB = 2**30
# What makes a part of the memory smaller.
HELP = {
    "experts": "more devices that share them (--devices), or host memory for them (--host_memory)",
    "dense": "more devices (--devices), which share it",
    "adapters": "lower ranks (--r, --expert_rank)",
    "moments": "lower ranks (--r, --expert_rank)",
    "activations": "a smaller --max_length",
    "passing": "a smaller --max_length",
    "gathered": "nothing but devices with more memory",
    "reserved": "nothing but devices with more memory",
}


class Wish(NamedTuple):
    """What there is, and what a step shall do.

    memory: of a device, host_memory: of a machine, in bytes. tokens: of a device in a step. max_length: of a document.
    learned: share of the tokens that the loss is taken of.
    """

    machine: Machine
    memory: int
    host_memory: int
    tokens: int
    max_length: int
    learned: float


class Layout(NamedTuple):
    """One way to run, with its footprint and the seconds of one of its steps."""

    devices: int
    copies: int
    ep: int
    rows: int
    accumulation: int
    checkpointing: str
    packed: bool
    layers_out: int
    footprint: Footprint
    step: Split

    @property
    def efsdp(self) -> int:
        return self.devices // self.ep

    @property
    def shards(self) -> int:
        return self.devices // self.copies


class Place(NamedTuple):
    """A layout before its time is known, and what one of its devices holds."""

    copies: int
    ep: int
    rows: int
    checkpointing: str
    packed: bool
    layers_out: int
    share: Share
    footprint: Footprint


def plan(model: PeftModel, operators: Operators, wish: Wish) -> list[Layout]:
    """All layouts that fit, the fastest first. ValueError where none does: by how much, and what would help.

    model: of layout.build_share with all experts, on the meta device.
    """
    places = list(all_places(model, wish))
    fitting = [place for place in places if place.footprint.total <= wish.memory]
    if not fitting:
        raise ValueError(
            why_none(model.config.get_text_config(), wish, min(places, key=lambda place: place.footprint.total))
        )
    root, layers = unit_bytes(model)
    found = [timed(model.config.get_text_config(), operators, wish, root, layers, place) for place in fitting]
    return sorted(found, key=lambda layout: (layout.step.total, not layout.packed, layout.footprint.total, layout[:8]))


def all_places(model: PeftModel, wish: Wish) -> Iterator[Place]:
    """Layouts of which the layers in host memory are as few as possible; many need more memory than there is."""
    config, machine = model.config.get_text_config(), wish.machine
    packs, gathered = model.config.packed_experts, gathered_bytes(model)
    for copies in sorted({1, -(-machine.devices // machine.per_machine)}):
        whole = next(shares(model, machine.devices, 1, copies))
        degrees_packed = product(degrees(config, machine.devices), sorted({packs, False}))
        for (ep, packed), rows, checkpointing in product(degrees_packed, micro_batches(wish), CHECKPOINTING):
            share = of_degree(whole, ep, unpacked=packs and not packed)
            work = Work(rows * wish.max_length, ep, checkpointing, packed)
            found = footprint(config, share, gathered if copies < machine.devices else 0, work)
            out = layers_out(config, share, found.total - found.experts, wish)
            found = found._replace(experts=experts_on_device(config, share.expert_bytes, out))
            yield Place(copies, ep, rows, checkpointing, packed, out, share, found)


def timed(
    config: LatentMoETextConfig, operators: Operators, wish: Wish, root: int, layers: list[int], place: Place
) -> Layout:
    """The layout of `place`. root, layers: of `unit_bytes`."""
    machine, share = wish.machine, place.share
    expert_layer = share.expert_bytes // max(1, moe_layers(config))
    shards = machine.devices // place.copies
    sizes = Sizes(root, layers, shards, expert_layer, share.gradient_bytes, share.expert_adapter_bytes)
    work = Work(place.rows * wish.max_length, place.ep, place.checkpointing, place.packed)
    accumulation = wish.tokens // work.tokens
    micro = micro_batch(config, operators, machine, sizes, work, wish.max_length, wish.learned, place.layers_out)
    step = Split(*(accumulation * part for part in micro))
    step = step._replace(optimizer=optimizer_step(config, operators, machine, sizes, place.ep))
    how = place.checkpointing, place.packed, place.layers_out
    return Layout(machine.devices, place.copies, place.ep, place.rows, accumulation, *how, place.footprint, step)


def degrees(config: LatentMoETextConfig, devices: int) -> list[int]:
    """Numbers of devices that can share the experts."""
    experts = config.num_experts or 0
    return [1, *(ep for ep in range(2, devices + 1) if experts and devices % ep == 0 and experts % ep == 0)]


def micro_batches(wish: Wish) -> list[int]:
    """Rows of a micro-batch: powers of two whose tokens divide those of a step."""
    rows = wish.tokens // wish.max_length
    return [1 << power for power in range(rows.bit_length()) if rows % (1 << power) == 0]


def of_degree(whole: Share, ep: int, unpacked: bool) -> Share:
    """The share of one device of `ep`, of one that holds all experts. unpacked: in bf16 instead of 4.25 bits."""
    experts = whole.expert_bytes // ep
    return whole._replace(
        expert_bytes=experts * 64 // 17 if unpacked else experts, expert_adapter_bytes=whole.expert_adapter_bytes // ep
    )


def layers_out(config: LatentMoETextConfig, share: Share, others: int, wish: Wish) -> int:
    """The fewest layers whose experts must leave the device, as far as host memory takes them.

    others: bytes of the device that are not experts.
    """
    layers = moe_layers(config)
    if not layers or others + share.expert_bytes <= wish.memory:
        return 0
    in_machine = min(wish.machine.devices, wish.machine.per_machine)
    layer_bytes = share.expert_bytes // layers
    most = min(layers, wish.host_memory // (layer_bytes * in_machine))
    needed = max(SLOTS + 1, layers + SLOTS - max(0, wish.memory - others) // layer_bytes)
    return min(needed, most) if most > SLOTS else 0


def chosen_layers(config: LatentMoETextConfig, count: int) -> list[int]:
    """Which layers' experts live in host memory, if those of `count` do: evenly spread, as --experts_in auto does."""
    layers = [layer for layer in range(config.num_hidden_layers) if config.is_moe_layer(layer)]
    return choose_layers(layers, 1, len(layers) - count + SLOTS) if count else []


def why_none(config: LatentMoETextConfig, wish: Wish, smallest: Place) -> str:
    """One line: by how much even the smallest layout is too large, and what would help."""
    devices, found = wish.machine.devices, smallest.footprint
    over = found.total - wish.memory
    part = max(Footprint._fields, key=lambda name: getattr(found, name))
    only = ""
    if devices > 1 and config.num_experts and degrees(config, devices) == [1]:
        only = f"; no --ep above 1 divides {devices} devices and {config.num_experts} experts, take another number"
    return (
        f"--memory {wish.memory / GIB:.1f}GiB: no layout of {devices} devices fits. The smallest needs "
        f"{found.total / GIB:.1f} GiB on each, {over / GIB:.1f} more (predicted; --ep {smallest.ep}, "
        f"{smallest.rows * wish.max_length} tokens, checkpointing {smallest.checkpointing}); most of it, "
        f"{getattr(found, part) / GIB:.1f} GiB, is {part}: what helps is {HELP[part]}{only}"
    )
