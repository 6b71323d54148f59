"""The README's tables of real sizes are those of the recorded measurements."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from modeling_latentmoe.training.results import record, with_tables
from scripts import bench, bench_dispatch

RECORDS = json.loads(bench.RESULTS.read_text())
KERNELS = json.loads(bench.KERNELS_RESULTS.read_text())


def test_readme_has_the_recorded_tables() -> None:
    readme = (bench.ROOT / "README.md").read_text()
    shown = bench.tables(RECORDS) | {"steps": bench.step_table(KERNELS)}
    assert with_tables(readme, shown) == readme, "run `python scripts/bench.py readme`"
    kernels = bench.KERNELS_RESULTS.with_suffix(".md").read_text()
    assert bench.kernel_table(KERNELS) == kernels, "run `python scripts/bench.py readme`"


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


def test_first_layers_are_the_released_ones() -> None:
    released = json.loads(bench.RELEASED.read_text())
    ours = bench.first_layers(4)
    assert ours["text_config"]["linear_attn_config"]["kda_layers"] == [1, 2, 3]
    assert ours["text_config"]["linear_attn_config"]["full_attn_layers"] == [4]
    # special tokens too: nothing else is changed
    for name in ("num_hidden_layers", "linear_attn_config"):
        ours["text_config"][name] = released["text_config"][name]
    assert ours == released


def test_special_tokens_follow_the_vocabulary() -> None:
    small = bench.first_layers(2, vocab_size=1024)
    assert small["pad_token_id"] == 1023 and small["media_placeholder_token_id"] == 768 + 21
    assert small["text_config"]["eos_token_id"] == 770


def test_chats_fill_the_packed_rows(tmp_path: Path) -> None:
    """A window of rows is full of chats that fit into a row, with the pictures that they name."""
    rows = [json.loads(line) for line in bench.write_chats(tmp_path, 8 * 2 * 512, 512).read_text().splitlines()]
    pictures = [row["images"][0] for row in rows if "images" in row]
    assert len(pictures) == -(-len(rows) // 4) and all((tmp_path / name).is_file() for name in pictures)
    # four tokens a word, 64 a picture of 8 x 8 tokens
    tokens = [sum(4 * len(m["content"].split()) for m in row["messages"]) + 64 * ("images" in row) for row in rows]
    assert max(tokens) <= 512 // 4 + 64
    # the last chat, and at most 7 tokens less a text for whole words
    assert abs(sum(tokens) - 8 * 2 * 512) <= 192 + 7 * len(rows)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--set", "nonsense=3"], "--set nonsense"),
        (["--set", "num_experts"], "--set"),
        (["--ep", "3"], "--ep 3 does not divide"),
        (["--tokens", "8"], "--tokens 8"),
        (["--ep", "99", "--device", "cuda"], "99 GPUs are needed"),
    ],
)
def test_slice_names_mistakes_before_it_writes(argv: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert bench.main(["slice", *argv]) == 2
    assert message in capsys.readouterr().err


def test_training_has_a_table() -> None:
    row = {"op": "train, K3 layers 0-3", "shape": "T=8192 EP2 x 2 devices", "experts": 896, "tokens_per_s": 4321.0}
    row |= {"memory_gib": 99.5, "host": 3 * 2**30, "write_s": 60.0, "start_s": 70.0, "loss": [12.5, 12.25]}
    table = bench.tables([{"device": "GPU", "rows": [row]}])["slice"].splitlines()
    cells = ["GPU, EP2 x 2 devices", "896", "8192", "4,321", "99.5 GiB", "3.0 GiB", "60 s, 70 s", "12.500 to 12.250"]
    assert table[2] == f"| {' | '.join(cells)} |"
    assert {line.count("|") for line in table} == {9}


def test_device_time_counts_what_overlaps_once() -> None:
    """Of scripts/bench_dispatch.py: kernels side by side, one inside another, and a pause; microseconds in, ms out."""
    spans = [(10.0, 20.0), (15.0, 40.0), (16.0, 18.0), (50.0, 60.0)]
    events = [SimpleNamespace(time_range=SimpleNamespace(start=start, end=end)) for start, end in reversed(spans)]
    assert bench_dispatch.busy_ms(events) == pytest.approx(0.04)
    assert bench_dispatch.busy_ms([]) == 0
