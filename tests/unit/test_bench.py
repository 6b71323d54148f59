"""The README's tables of real sizes are those of the recorded measurements."""

import json
import re
from pathlib import Path

import pytest

from modeling_latentmoe.training.results import record, with_tables
from scripts import bench

RECORDS = json.loads(bench.RESULTS.read_text())


def test_readme_has_the_recorded_tables() -> None:
    readme = (bench.ROOT / "README.md").read_text()
    assert with_tables(readme, bench.tables(RECORDS)) == readme, "run `python scripts/bench.py readme`"


def test_ranks_read_what_they_own() -> None:
    """The promise of the streaming load, at the size of the whole checkpoint and as measured on two layers."""
    rows = [row for entry in RECORDS for row in entry["rows"] if row["op"] == "load"]
    assert [row["shape"] for row in rows] == [f"EP{degree}" for degree in bench.DEGREES]
    for row in rows:
        assert row["owned"] < row["read"] <= 1.02 * row["owned"]
        measured = row["layers"]
        assert measured["owned"] < measured["read"] <= 1.02 * measured["owned"]
        assert measured["peak"] <= measured["owned"] + 512 * 2**20
    # three quarters of the difference between 8 and 16 ranks lie between 16 and 64: half, and a quarter and an eighth
    owned = [row["owned"] for row in rows]
    assert (owned[1] - owned[2]) / (owned[0] - owned[1]) == pytest.approx(0.75, abs=1e-3)


def test_recording_keeps_other_commands(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    record(file, "a", "cpu", [{"op": "x"}])
    record(file, "b", "cpu", [{"op": "y"}])
    record(file, "a", "cpu", [{"op": "z"}])
    entries = json.loads(file.read_text())
    assert [(entry["command"], entry["rows"][0]["op"]) for entry in entries] == [("a", "z"), ("b", "y")]
    assert all(re.fullmatch(r"CPU, \d+ cores", entry["device"]) for entry in entries)


def test_missing_markers_are_named() -> None:
    with pytest.raises(ValueError, match="no table markers for shares"):
        with_tables("# nothing", bench.tables(RECORDS))
