"""Where the time of a step goes, and how fast bytes travel, on every process.

A part of a step lies between two marks: events of the stream that computes, or the host's clock where there are no
streams. Marks cost microseconds and wait for nothing; the device is waited for once, at the end of the step.

    data, forward, backward, optimizer    one after the other; optimizer: reducing and clipping gradients, the update
    all_to_all, all_gather                rows and weights on their way between processes, inside of forward and
                                          backward: on a stream of their own they overlap with computation

The time of a collective has in it how long the slowest process lets the others wait.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

PARTS = ("data", "forward", "backward", "optimizer")
TRAVEL = ("all_to_all", "all_gather")


class Moment:
    """An event of a device's stream, where there are no streams."""

    def record(self, stream: Any) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: Any) -> None:
        """What was recorded has happened."""

    def synchronize(self) -> None:
        """What was recorded has happened."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Moment") -> float:
        return 1e3 * (end.seconds - self.seconds)


def mark(device: torch.device, stream: Any = None) -> Any:
    """An event behind what was launched on a stream so far, by default the one that computes."""
    module = torch.get_device_module(device)
    event = Moment() if device.type == "cpu" else module.Event(enable_timing=True)
    event.record(module.current_stream(device) if stream is None else stream)
    return event


class Span(NamedTuple):
    """A part of a step between two marks, and the bytes that left this process in it."""

    part: str
    nbytes: int
    start: Any
    end: Any


class Clock:
    """Times the parts of a step of this process: `begin`, `span` around each part, `finish`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self.running = False
        self.spans: list[Span] = []

    def begin(self) -> None:
        """A step begins; a step that did not end is forgotten."""
        self.spans, self.running, self.start = [], True, mark(self.device)

    @contextmanager
    def span(self, part: str, nbytes: int = 0) -> Iterator[None]:
        """Count what is launched inside as `part`; between steps, as in an evaluation, nothing is counted."""
        end = self.start_span(part, nbytes)
        yield
        end()

    def start_span(self, part: str, nbytes: int = 0) -> Callable[[], None]:
        """The same, from here until what is returned is called."""
        if not self.running:
            return lambda: None
        start = mark(self.device)
        return lambda: self.spans.append(Span(part, nbytes, start, mark(self.device)))

    def finish(self) -> dict[str, float]:
        """End the step and wait for the device. Seconds of the step and of its parts, and gigabytes that left."""
        self.running, end = False, mark(self.device)
        self.module.synchronize()
        figures = {"step_s": _seconds(self.start, end)}
        for part in (*PARTS, *TRAVEL):
            figures[f"{part}_s"] = self._covered([span for span in self.spans if span.part == part])
        for part in TRAVEL:
            figures[f"{part}_gb"] = sum(span.nbytes for span in self.spans if span.part == part) / 1e9
        self.spans = []
        return figures

    def _covered(self, spans: Sequence[Span]) -> float:
        """Seconds in which at least one of the spans was open."""
        covered, reached = 0.0, 0.0
        for start, end in sorted((_seconds(self.start, s.start), _seconds(self.start, s.end)) for s in spans):
            covered += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return covered


def device_name(device: torch.device) -> str:
    """What a device calls itself."""
    return "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def _seconds(start: Any, end: Any) -> float:
    return start.elapsed_time(end) / 1e3


def of_all_processes(figures: dict[str, float], device: torch.device) -> list[dict[str, float]]:
    """The figures of every process, which have the same names, by rank; one exchange."""
    mine = torch.tensor(list(figures.values()), dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [dict(zip(figures, values, strict=True)) for values in torch.stack(everyone).tolist()]


def split(processes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the figures of all processes: mean seconds, share of the step that rows and weights were on their way, and
    how many gigabytes left a process in a second of that (0 where nothing left)."""
    means = {name: sum(figures[name] for figures in processes) / len(processes) for name in processes[0]}
    record = {name: means[name] for name in ("step_s", *(f"{part}_s" for part in (*PARTS, *TRAVEL)))}
    for part in TRAVEL:
        seconds = means[f"{part}_s"]
        record[f"{part}_share"] = seconds / means["step_s"]
        record[f"{part}_gb_per_s"] = means[f"{part}_gb"] / seconds if seconds else 0.0
    return record
