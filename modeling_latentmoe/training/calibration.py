"""A table of operators (step_time.py) from two steps of scripts/bench_step.py on one device.

They differ in the number of experts that the device holds, which tells apart what is paid for every row from what is
paid for every expert, and the router from other dense products.
"""

import json
import re
from typing import Any

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.training.step_time import TILE_ROWS

STEP = "K3 slice, LoRA step"
SHAPE = re.compile(r"T=(\d+), (\d+) experts")
LAYERS = 4
# Operators of a table by the names of the parts that the benchmark prints.
PARTS = {"KDA": "kda", "attention": "attention", "low rank": "low_rank", "mixtures": "residual", "other": "other"}


def calibrated(table: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """`table` with the operators that two recorded steps measure; the others stay as they are.

    records: of results/h200.json. ValueError unless they have steps of as many tokens with few and with more experts,
    of the same commit: differences between other steps are not those of the experts.
    """
    config = LatentMoEConfig.kimi_k3().get_text_config()
    tokens, steps, entry = _steps(records)
    few, more = min(steps), max(steps)
    ms, more_ms = steps[few]["parts_ms"], steps[more]["parts_ms"]
    if len(commits := {steps[few]["commit"], steps[more]["commit"]}) > 1:
        raise ValueError(
            f"steps of {tokens} tokens with {few} and {more} experts are of commits {' and '.join(sorted(commits))}: "
            "measure both at one"
        )
    slots = tokens * config.num_experts_per_token
    rows, more_rows = slots + TILE_ROWS * few, slots + TILE_ROWS * more
    # both steps take rows * a + experts * b
    of_rows = rows * (ms["latent_moe"] * more - more_ms["latent_moe"] * few) / (rows * more - more_rows * few)
    column = (more_ms["dense products"] - ms["dense products"]) / (more - few)
    found = {name: ms[part] for name, part in PARTS.items()}
    found |= {"experts": of_rows, "held experts": ms["latent_moe"] - of_rows}
    found |= {"router": column * config.num_experts, "dense products": ms["dense products"] - column * few}
    found |= {"launches": steps[few]["ours_ms"] - sum(ms.values())}
    source = f"scripts/bench_step.py, {tokens} tokens, {few} and {more} experts, commit {entry['commit']}"
    operators = {
        name: {**old, "ms": round(found[name], 2), "source": source} if name in found else old
        for name, old in table["operators"].items()
    }
    measured = {"layers": LAYERS, "tokens": tokens, "experts": few}
    return table | {"device": entry["device"], "measured_at": measured, "operators": operators}


def _steps(records: list[dict[str, Any]]) -> tuple[int, dict[int, dict[str, Any]], dict[str, Any]]:
    """The fewest tokens with two steps of other numbers of experts, these steps by that number, and their record."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    where = {}
    for entry in records:
        for row in entry["rows"]:
            if row["op"] == STEP and (shape := SHAPE.fullmatch(row["shape"])):
                found.setdefault(int(shape[1]), {})[int(shape[2])] = row | {"commit": entry["commit"]}
                where[int(shape[1])] = entry
    tokens = min((tokens for tokens, steps in found.items() if len(steps) > 1), default=0)
    if not tokens:
        raise ValueError(
            "two steps are needed, of scripts/bench_step.py --tokens 8192 with --experts 112 and with --experts 896"
        )
    return tokens, found[tokens], where[tokens]


def table_text(table: dict[str, Any]) -> str:
    """The file: an entry a line."""
    sections = []
    for name, value in table.items():
        entries = value.items() if name in ("operators", "gb_per_s", "ms") else ()
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries)
        sections.append(f" {json.dumps(name)}: " + (f"{{\n{lines}\n }}" if entries else json.dumps(value)))
    return "{\n" + ",\n".join(sections) + "\n}\n"
