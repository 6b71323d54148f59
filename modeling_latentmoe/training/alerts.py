"""Conditions that a user wants to hear of: `--alert "load_imbalance>4"`.

One form: a figure of a step, > or <, a number. An alert is given when a condition begins to hold, and again only after
it has not held in between: a line in the log, the record of the step, a mark in the picture, and a command of the user.
"""

import math
import os
import re
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from subprocess import DEVNULL
from typing import Any, NamedTuple

# figures of a step, with what is said of them in the metrics of Prometheus
FIGURES = {
    "loss": "mean loss of a trained token",
    "grad_norm": "norm of all gradients before clipping",
    "tokens_per_s": "tokens in a second, of all devices together",
    "tokens_per_s_per_device": "tokens in a second and device",
    "throughput_drop": "how much fewer tokens in a second than in the median of the last steps, a share",
    "mfu": "model FLOP (forward and input gradients, nothing twice) in a second, as a share of the device's peak",
    "step_s": "seconds of the step",
    "data_s": "seconds of reading and preparing data",
    "forward_s": "seconds of the forward passes",
    "backward_s": "seconds of the backward passes",
    "optimizer_s": "seconds of reducing and clipping gradients and of the update",
    "all_to_all_s": "seconds of exchanging tokens between experts, inside of forward and backward",
    "all_gather_s": "seconds of gathering weights, inside of forward and backward",
    "all_to_all_share": "all_to_all_s as a share of step_s",
    "all_gather_share": "all_gather_s as a share of step_s",
    "all_to_all_gb_per_s": "gigabytes that leave a process in a second of all_to_all_s",
    "all_gather_gb_per_s": "gigabytes that leave a process in a second of all_gather_s",
    "memory_gib": "most memory that the process with the most has had",
    "memory_gib_min": "most memory that the process with the least has had",
    "memory_share": "memory_gib as a share of the device's memory",
    "load_imbalance": "busiest expert over the average one, in the worst layer",
    "idle_experts": "experts that got no token",
    "dropped": "assignments of tokens to experts beyond their capacity",
    "nonfinite": "1 where loss or gradients are not finite, which ends the run",
}
NONFINITE = "nonfinite>0"
# steps that the median speed is of, and how many it takes to speak of a median
WINDOW, FEWEST = 50, 5
_FORM = re.compile(r"\s*(\w+)\s*([<>])\s*(\S+)\s*")


class Condition(NamedTuple):
    """`figure` is above ("above") or below `limit`."""

    figure: str
    above: bool
    limit: float

    def __str__(self) -> str:
        return f"{self.figure}{'>' if self.above else '<'}{self.limit:g}"

    def holds(self, value: float) -> bool:
        return value > self.limit if self.above else value < self.limit


def parse_condition(text: str) -> Condition:
    """The value of one --alert; ValueError that names the switch and the figures there are."""
    found = _FORM.fullmatch(text)
    try:
        limit = float(found[3]) if found else math.nan
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit) or found[1] not in FIGURES:
        raise ValueError(
            f"--alert {text!r} must be FIGURE>NUMBER or FIGURE<NUMBER, of the figures {', '.join(FIGURES)}"
        )
    return Condition(found[1], found[2] == ">", limit)


def check_alerts(conditions: Sequence[str], command: str | None) -> None:
    """ValueError that names the switch, unless all conditions can be read and a command says what it is for."""
    for text in conditions:
        parse_condition(text)
    if command is not None and not command.strip():
        raise ValueError("--alert_command is empty")


def check_mfu(conditions: Sequence[str], peak: float | None) -> None:
    """ValueError for a condition on the MFU where the peak of the device is not known."""
    if peak is None and any(parse_condition(text).figure == "mfu" for text in conditions):
        raise ValueError("--alert mfu: the peak of this device is not known, give --peak_tflops")


class Alerts:
    """Watches the records of the steps, and tells; only the process with `active` does. A context: at its end commands
    that still run are waited for, for a while.

    conditions: of --alert; that a step is not finite always is one. command: the user's, for a shell, or None; it finds
    the alert in its environment (`environment_of`). say: prints a line. records: of the steps so far, of a run that
    continues: what lasts is not told again.
    """

    PATIENCE_S = 10

    def __init__(
        self,
        conditions: Sequence[str],
        command: str | None,
        output_dir: str,
        active: bool,
        say: Callable[[str], None],
        records: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.conditions = [parse_condition(text) for text in dict.fromkeys([*conditions, NONFINITE])]
        self.command, self.output_dir, self.active, self.say = command, output_dir, active, say
        self.lasting: set[Condition] = set()
        self.speeds: deque[float] = deque(maxlen=WINDOW)
        self.commands: list[tuple[Condition, subprocess.Popen]] = []
        for record in records:
            if "loss" in record:
                self._begun(record)
                self.speeds.append(record["tokens_per_s"])

    def __enter__(self) -> "Alerts":
        return self

    def __exit__(self, *exception: object) -> None:
        until = time.monotonic() + self.PATIENCE_S
        for condition, process in self.commands:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.say(f"--alert_command for {condition} still runs, it is left alone")
        self._report_failures()

    def watch(self, record: dict[str, Any]) -> dict[str, Any]:
        """`record` of a step with "throughput_drop", and "alerts" where some begin, which are told."""
        if "tokens_per_s" in record:
            usual = statistics.median(self.speeds) if len(self.speeds) >= FEWEST else record["tokens_per_s"]
            record = {**record, "throughput_drop": 1 - record["tokens_per_s"] / usual}
            self.speeds.append(record["tokens_per_s"])
        begun = self._begun(record)
        self._report_failures()
        for condition in begun:
            if self.active:
                self._tell(condition, record)
        return (
            {**record, "alerts": {str(condition): record[condition.figure] for condition in begun}} if begun else record
        )

    def _begun(self, record: dict[str, Any]) -> list[Condition]:
        known = [condition for condition in self.conditions if condition.figure in record]
        holding = [condition for condition in known if condition.holds(record[condition.figure])]
        begun = [condition for condition in holding if condition not in self.lasting]
        self.lasting = set(holding)
        return begun

    def _tell(self, condition: Condition, record: dict[str, Any]) -> None:
        self.say(f"alert: {condition} in step {record['step']}, it is {record[condition.figure]:g}")
        if self.command is None:
            return
        if any(condition == other for other, _ in self.commands):
            self.say(f"--alert_command for {condition} still runs, it is not started again")
            return
        environment = {**os.environ, **environment_of(condition, record, self.output_dir)}
        try:
            # a session of its own: Ctrl-C is for the run
            process = subprocess.Popen(self.command, shell=True, env=environment, start_new_session=True, stdin=DEVNULL)
        except OSError as error:
            self.say(f"--alert_command for {condition} could not be started: {error}")
            return
        self.commands.append((condition, process))

    def _report_failures(self) -> None:
        ended = [(condition, process) for condition, process in self.commands if process.poll() is not None]
        self.commands = [pair for pair in self.commands if pair not in ended]
        for condition, process in ended:
            if process.returncode:
                self.say(f"--alert_command for {condition} failed with exit code {process.returncode}")


def environment_of(condition: Condition, record: dict[str, Any], output_dir: str) -> dict[str, str]:
    """What the user's command gets to know."""
    values = {"CONDITION": condition, "FIGURE": condition.figure, "LIMIT": condition.limit}
    values |= {"VALUE": record[condition.figure], "STEP": record["step"], "OUTPUT_DIR": output_dir}
    return {f"ALERT_{name}": f"{value}" for name, value in values.items()}
