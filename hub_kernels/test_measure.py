"""What a benchmark writes: every row as it comes, in place of what the same command left."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    file, seen = tmp_path / "results" / "gpu.json", []

    def rows(*names: str) -> Iterator[dict[str, str]]:
        for name in names:
            yield {"op": name}
            seen.append([row["op"] for row in json.loads(file.read_text())[-1]["rows"]])

    measure.record("one", rows("a", "b"), file)
    measure.record("two", rows("c"), file)
    assert seen == [["a"], ["a", "b"], ["c"]]

    def cut_short() -> Iterator[dict[str, str]]:
        yield {"op": "d"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.record("one", cut_short(), file)
    entries = json.loads(file.read_text())
    assert [(entry["command"], entry["rows"]) for entry in entries] == [("one", [{"op": "d"}]), ("two", [{"op": "c"}])]
    assert entries[0]["device"] == "a GPU" and entries[0]["versions"]["torch"] == torch.__version__
    assert [path.name for path in file.parent.iterdir()] == ["gpu.json"]


def test_errors_and_floors() -> None:
    truth = torch.tensor([3.0, 4.0])
    assert measure.relative_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert measure.relative_error(torch.tensor([3.0, float("nan")]), truth) == float("inf")
    assert measure.floor_ms(790e9, 0) == pytest.approx(1.0) and measure.floor_ms(0, 4.3e9) == pytest.approx(1.0)
