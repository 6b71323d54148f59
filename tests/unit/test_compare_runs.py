"""The comparison of layouts: its table in the README, and that it sees what differs."""

import json

import pytest
import torch

from modeling_latentmoe.training.results import with_tables
from scripts import compare_runs

RECORDS = json.loads(compare_runs.RESULTS.read_text())


def test_readme_has_the_recorded_table() -> None:
    readme = (compare_runs.ROOT / "README.md").read_text()
    assert with_tables(readme, compare_runs.tables(RECORDS)) == readme, "run `python scripts/compare_runs.py readme`"


def test_every_recorded_run_agrees() -> None:
    """fp64 to 1e-9, and every asked layout is there, with and without checkpointing."""
    rows = [row for entry in RECORDS for row in entry["rows"]]
    for row in rows:
        assert row["agrees"] and row["same_adapters"]
        assert all(row[name] <= limit for name, limit in row["limits"].items())
        assert row["dtype"] != "fp64" or set(row["limits"].values()) == {1e-9}
    for dtype, device in (("fp64", "cpu"), ("fp32", "cpu"), ("bf16", "cuda")):
        found = {(row["shape"], row["checkpointing"]) for row in rows if row["dtype"] == dtype}
        asked = {(str(layout), kind) for layout in compare_runs.LAYOUTS[device] for kind in ("none", "full")}
        assert asked <= found


def test_differences_are_seen() -> None:
    run = compare_runs.Run(
        torch.tensor([2.0, 4.0]), torch.tensor([1.0, 1.0]), {"a": torch.ones(4), "b": torch.zeros(2)}, "x: 1,200 of 3"
    )
    same = compare_runs.difference(run, run)
    assert (same["loss"], same["grad_norm"], same["adapter"], same["same_adapters"]) == (0, 0, 0, True)
    assert (same["adapters"], same["trainable"]) == (2, 1200)
    moved = {"a": torch.tensor([1.0, 1.0, 1.0, 1.2]), "b": torch.zeros(2)}
    other = run._replace(losses=torch.tensor([2.0, 4.4]), adapter=moved)
    found = compare_runs.difference(other, run)
    assert found["loss"] == pytest.approx(0.1) and found["adapter"] == pytest.approx(0.1) and found["grad_norm"] == 0
    assert not compare_runs.difference(run._replace(trainable="x: 1,100 of 3"), run)["same_adapters"]
