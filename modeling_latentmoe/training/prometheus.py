"""A text file for Prometheus: what the textfile collector of node_exporter reads, replaced in one step.

Legend: M MoE layers, E experts.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from modeling_latentmoe.training.alerts import FIGURES
from modeling_latentmoe.training.files import TEMPORARY

PREFIX = "latentmoe_"
# of one process, with the label "rank"
OF_RANK = {
    **{name: FIGURES[name] for name in FIGURES if name.endswith("_s") and not name.endswith("per_s")},
    "memory_gib": "most memory that the process has had",
    "memory_limit_gib": "memory of the process' device",
}
Samples = Sequence[tuple[Mapping[str, str], float]]


class Textfile:
    """Writes the figures of a step to `path`, at most every INTERVAL_S seconds; does nothing without a path.

    ValueError where nothing can be written there at the start; later that is said once by `say`, and the run goes on.
    """

    INTERVAL_S = 5.0

    def __init__(self, path: str | None, say: Callable[[str], Any]) -> None:
        self.path, self.say = None if path is None else Path(path), say
        self.written = -self.INTERVAL_S
        if self.path is None:
            return
        try:
            if self.path.is_dir():
                raise IsADirectoryError("it is a folder")
            self._partial.touch()
            self._partial.unlink()
        except OSError as error:
            raise ValueError(f"--prometheus {path} cannot be written: {error}") from error

    def write(
        self, record: Mapping[str, Any], processes: Sequence[Mapping[str, float]], load_ME: Tensor, last: bool = False
    ) -> None:
        """record: of the step. processes: the figures of every process, by rank. load_ME: rows that every expert got in
        the run. last: the file stays, so it is written now."""
        if self.path is None or (not last and time.monotonic() - self.written < self.INTERVAL_S):
            return
        self.written = time.monotonic()
        try:
            self._partial.write_text(metrics_text(record, processes, load_ME))
            os.replace(self._partial, self.path)
        except OSError as error:
            self.say(f"--prometheus {self.path} can no longer be written, the run goes on without it: {error}")
            self.path = None

    @property
    def _partial(self) -> Path:
        return self.path.with_name(self.path.name + TEMPORARY)


def metrics_text(record: Mapping[str, Any], processes: Sequence[Mapping[str, float]], load_ME: Tensor) -> str:
    """The figures in the text format of Prometheus."""
    families = [_family("step", "gauge", "steps that are done", [({}, record["step"])])]
    for name, help in FIGURES.items():
        if name in record and name not in OF_RANK:
            families.append(_family(name, "gauge", help, [({}, record[name])]))
    for name, help in OF_RANK.items():
        samples = [({"rank": str(rank)}, figures[name]) for rank, figures in enumerate(processes) if name in figures]
        families.append(_family(name, "gauge", help, samples))
    rows = [
        ({"layer": str(layer), "expert": str(expert)}, count)
        for layer, load_E in enumerate(load_ME.tolist())
        for expert, count in enumerate(load_E)
    ]
    families.append(_family("expert_rows_total", "counter", "rows that the expert of the MoE layer got", rows))
    return "".join(families)


def _family(name: str, kind: str, help: str, samples: Samples) -> str:
    if not samples:
        return ""
    lines = [f"# HELP {PREFIX}{name} {help}", f"# TYPE {PREFIX}{name} {kind}"]
    for labels, value in samples:
        text = ",".join(f'{label}="{content}"' for label, content in labels.items())
        lines.append(f"{PREFIX}{name}{'{' + text + '}' if text else ''} {value}")
    return "\n".join(lines) + "\n"
