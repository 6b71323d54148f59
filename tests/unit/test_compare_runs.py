"""The comparison of layouts: its table in the README, and that it sees what differs."""

import json
from pathlib import Path

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


def test_two_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the same run leaves on two devices: by the step, and the mean decides."""
    for name, factor in (("gpu", 1.0), ("npu", 1.003), ("far", 1.02), ("broken", float("nan"))):
        (tmp_path / name).mkdir()
        rows = [{"step": 0, "eval_loss": 9.0}]
        rows += [{"step": n, "loss": 3.0 / n * factor, "grad_norm": 1.0 + 0.1 * (factor - 1)} for n in range(1, 21)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gpu, npu, far, broken = (str(tmp_path / name) for name in ("gpu", "npu", "far", "broken"))
    assert compare_runs.main(["folders", gpu, npu]) == 0
    printed = capsys.readouterr().out
    assert "mean relative difference of 20 steps: loss 0.300%, norm 0.030%" in printed
    assert len(printed.splitlines()) == 22
    for other, reason in ((far, "the losses differ by 2.000% in the mean"), (broken, "differ by nan%")):
        assert compare_runs.main(["folders", gpu, other]) == 2
        assert reason in capsys.readouterr().err
    assert compare_runs.main(["folders", gpu, far, "--limit", "0.03"]) == 0
    short = tmp_path / "gpu" / "metrics.jsonl"
    short.write_text("\n".join(short.read_text().splitlines()[:10]) + "\n")
    for arguments, reason in (
        ([gpu, npu], "11 steps are only in one of"),
        ([gpu], "name two"),
        ([gpu, "x"], "x has no"),
    ):
        assert compare_runs.main(["folders", *arguments]) == 2
        assert reason in capsys.readouterr().err
    for row, reason in (
        ({"step": 1, "loss": 1.0}, "metrics.jsonl: grad_norm of step 1 is None, no number"),
        ({"step": 1, "loss": "x", "grad_norm": 1.0}, "metrics.jsonl: loss of step 1 is 'x', no number"),
    ):
        short.write_text(json.dumps(row) + "\n")
        assert compare_runs.main(["folders", gpu, npu]) == 2
        assert reason in capsys.readouterr().err
