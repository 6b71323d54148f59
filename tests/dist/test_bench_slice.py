"""The training run that `scripts/bench.py slice` measures works, from the written snapshot to the figures."""

import json
from pathlib import Path

import pytest

from scripts import bench
from tests.unit.snapshots import released_config

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_slice_of_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(bench, "RELEASED", released_config(tmp_path))
    before = bench.RESULTS.read_bytes()
    command = ["slice", "--ep", "2", "--tokens", "256", "--workdir", str(tmp_path), "--set", "num_experts=8"]
    assert bench.main(command) == 0
    said = capfd.readouterr().out
    row = json.loads(next(line for line in said.splitlines() if line.startswith('{"op"')))
    assert row["op"] == "train, K3 layers 0-3" and row["shape"] == "T=256 EP2 x 2 devices" and row["experts"] == 8
    # no expert of the released layout is missing, and every chat fits into a row
    assert "rank 1: efsdp 0, ep 1, experts 4 to 7 of every layer" in said
    assert "left out: 0 samples over --max_length" in said
    # untrained: every id of the vocabulary is as likely, about
    assert all(loss == pytest.approx(6.2, abs=0.5) for loss in row["loss"])
    assert 0 < row["start_s"] < row["total_s"] and row["tokens_per_s"] > 0
    # a trial leaves no result and no folder
    assert bench.RESULTS.read_bytes() == before and not list(tmp_path.glob("tmp*"))
