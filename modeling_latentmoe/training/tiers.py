"""Bring routed experts that live elsewhere (expert_homes.py) to the device, one layer ahead, forward and backward.

There is memory for two layers, two slots. When the experts of a layer are about to run, their slot has what was sent
for them, and the other slot is sent what comes next: the layer above going forward, the one below going backward, where
a recomputed forward counts as backward.

    forward   ... use 4 (slot A, 5 -> B)   use 5 (slot B, 6 -> A)   use 6 (slot A) |
    backward  | use 6 (slot A)   use 5 (slot B, 4 -> A)   use 4 (slot A, 3 -> B) ...

Nothing else decides what is right: a layer that was not foreseen is sent when it is used, and waited for. A slot may be
overwritten as soon as another layer is used, since all work on the one before has been launched by then: the copy waits
on its own stream for an event behind that work, and the next use of the slot for an event behind the copy.

The experts know nothing of this. Autograd saves a parameter as the tensor object that it is, not as its bytes, and
backward finds in it what it shows at that time: so the hook before backward shows it the slot again.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modeling_latentmoe.training.expert_homes import FileHome, HostHome
from modeling_latentmoe.training.placement import SLOTS
from modeling_latentmoe.training.timing import mark

Home = HostHome | FileHome


class Transit(NamedTuple):
    """A layer's way to its slot: seconds of reading, events around the copy, and around the wait of who computes."""

    read_s: float
    start: Any
    arrived: Any
    ready: Any
    served: Any

    @property
    def moved_s(self) -> float:
        return self.read_s + self.start.elapsed_time(self.arrived) / 1e3

    @property
    def exposed_s(self) -> float:
        return self.ready.elapsed_time(self.served) / 1e3


class Slot:
    """Memory of the device for one layer, at this time for `homes[place]`; `arrival` until its first use awaited it."""

    def __init__(self, homes: Sequence[Home], device: torch.device) -> None:
        nbytes = max(home.layout.nbytes for home in homes)
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        # made now: selective checkpointing would count operators that only one of two forward passes runs
        self.views = [home.layout.views(self.bytes) for home in homes]
        self.place: int | None = None
        self.arrival: Future | None = None


class Tiers:
    """Makes the experts of `homes`, which are in the order of their layers, computable on `device`.

    From here on their modules bring what they need; `state_dict` shows what the homes hold, never a slot.
    """

    def __init__(self, homes: Sequence[Home], device: torch.device) -> None:
        self.homes, self.device = homes, device
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream() if device.type == "cpu" else self.module.Stream(device)
        # one thread: layers are sent in the order in which they were asked for
        self.sender = ThreadPoolExecutor(1, thread_name_prefix="expert-tiers")
        with self.module.stream(self.stream):
            # memory of that stream: if it is freed, nobody else gets it while something is on its way there
            self.slots = [Slot(homes, device) for _ in homes[:SLOTS]]
        self.resting = [{name: param.data for name, param in _parameters(home).items()} for home in homes]
        self.copied: Any = None
        # what `figures` has not counted yet, and the sums of what it has
        self.transits: list[Transit] = []
        self.moved_s = self.exposed_s = 0.0
        for place, home in enumerate(homes):
            self._watch(place, home)
        for place, slot in enumerate(self.slots):
            self._send(place, slot)
        self.used = self.slots[-1] if homes else None

    def _watch(self, place: int, home: Home) -> None:
        def before_backward(module: nn.Module, args: Any, output: Tensor) -> None:
            # a hook of the module would warn where nothing but its adapters is trained
            if output.requires_grad:
                output.register_hook(lambda _: self.use(place, backward=True))

        def show_home(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: dict) -> None:
            state.update({f"{prefix}{name}": tensor for name, tensor in home.tensors().items()})

        home.experts.register_forward_pre_hook(lambda *_: self.use(place, backward=_in_backward()))
        home.experts.register_forward_hook(before_backward)
        home.experts.register_state_dict_post_hook(show_home)

    def use(self, place: int, backward: bool) -> None:
        """Have the experts of `homes[place]` in a slot before what is launched next, and send for those after them."""
        slot = self._slot_of(place) or self._send(place, self._other_slot())
        if slot.arrival is not None:
            self._await(slot)
        self.used = slot
        following = self._following(place, backward)
        if following is not None and self._slot_of(following) is None:
            self._send(following, self._other_slot())

    def _following(self, place: int, backward: bool) -> int | None:
        """What is used after `place`: nothing new at the turn from forward to backward and after the backward pass, but
        the first layer again where there is no backward pass."""
        if backward:
            return place - 1 if place else None
        if place + 1 < len(self.homes):
            return place + 1
        return None if torch.is_grad_enabled() else 0

    def _slot_of(self, place: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.place == place), None)

    def _other_slot(self) -> Slot:
        """The one that is not in use."""
        return next(slot for slot in self.slots if slot is not self.used)

    def _send(self, place: int, slot: Slot) -> Slot:
        """Have the bytes of a layer on their way into `slot`, behind all work that was launched so far."""
        if slot.place is not None:
            self._show(slot.place, self.resting[slot.place])
        slot.place = place
        released = mark(self.device)
        slot.arrival = self.sender.submit(self._copy, self.homes[place], slot, released)
        return slot

    def _copy(self, home: Home, slot: Slot, released: Any) -> tuple[float, Any, Any]:
        """On the sender's thread: returns the seconds that reading took, and events around the copy."""
        if home.staged and self.copied is not None:
            # the layer before is sent from where this one is read to
            self.copied.synchronize()
        began = time.perf_counter()
        source = home.read()
        read_s = time.perf_counter() - began
        with self.module.stream(self.stream):
            released.wait(self.stream)
            start = mark(self.device, self.stream)
            slot.bytes[: len(source)].copy_(source, non_blocking=True)
            self.copied = mark(self.device, self.stream)
        return read_s, start, self.copied

    def _await(self, slot: Slot) -> None:
        """Let the stream of the computation wait for what is sent to `slot`, and show it in the module's parameters."""
        stream = self.module.current_stream(self.device)
        ready = mark(self.device, stream)
        read_s, start, arrived = slot.arrival.result()
        arrived.wait(stream)
        self.transits.append(Transit(read_s, start, arrived, ready, mark(self.device, stream)))
        slot.arrival = None
        self._show(slot.place, slot.views[slot.place])

    def _show(self, place: int, tensors: dict[str, Tensor]) -> None:
        for name, param in _parameters(self.homes[place]).items():
            param.data = tensors[name]

    def figures(self) -> dict[str, float]:
        """Seconds that layers took to come since the last call, those in which computation waited for them, and the
        share that computation hid. What is not over yet counts the next time: the device is not waited for.
        """
        if not self.homes:
            return {}
        over = []
        # in the order of the stream
        while self.transits and self.transits[0].served.query():
            over.append(self.transits.pop(0))
        moved = sum(transit.moved_s for transit in over)
        exposed = sum(transit.exposed_s for transit in over)
        self.moved_s += moved
        self.exposed_s += exposed
        return {"experts_moved_s": moved, "experts_exposed_s": exposed, "experts_hidden": hidden(moved, exposed)}

    def summary(self) -> list[str]:
        """A line about the whole run; none where all experts are on the device."""
        if not self.homes:
            return []
        self.figures()
        size = sum(home.layout.nbytes for home in self.homes)
        return [
            f"experts of {len(self.homes)} layers ({size / 1e9:,.2f} GB) are sent to the device for every use: "
            f"{self.moved_s:,.2f} s in all, {hidden(self.moved_s, self.exposed_s):.1%} hidden behind computation"
        ]


def hidden(moved_s: float, exposed_s: float) -> float:
    """The share of `moved_s` that computation did not wait for; 1 where nothing moved."""
    return max(0.0, 1 - exposed_s / moved_s) if moved_s else 1.0


def _parameters(home: Home) -> dict[str, nn.Parameter]:
    return dict(home.experts.named_parameters(recurse=False))


def _in_backward() -> bool:
    """Whether autograd is running, as it is while an activation is computed again."""
    return torch._C._current_graph_task_id() != -1
