"""The README's sparse-attention commands: after the warm-up chosen keys hold what dense attention looks at."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from modeling_latentmoe.training.data import encode_chat, read_chat
from modeling_latentmoe.training.loading import load_processor
from scripts import make_lookups


def evaluations(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "eval_loss" in record]


@pytest.mark.slow
def test_a_dense_model_becomes_a_sparse_one(root: Path, tmp_path: Path) -> None:
    commands = re.findall(r"^python (scripts/\S+ .*lookups.*)$", (root / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        script, *words = shlex.split(command)
        done = subprocess.run(
            [sys.executable, str(root / script), *words], cwd=tmp_path, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
    processor, test = load_processor(str(tmp_path / "lookups" / "dense")), tmp_path / "lookups" / "test.jsonl"
    chats = [read_chat("test", json.loads(line)) for line in test.read_text().splitlines()]
    assert min(len(encode_chat(processor, chat).input_ids) for chat in chats) >= 8 * 16
    before, after = evaluations(tmp_path / "lookups" / "warmup")
    assert before["eval_mass_chosen"] < 0.5 and before["eval_loss"] > 1.05 * before["eval_loss_dense"]
    assert after["eval_mass_chosen"] >= 0.95 and max(after["eval_mass_last"], after["eval_mass_random"]) < 0.5
    assert abs(after["eval_loss"] / after["eval_loss_dense"] - 1) < 0.01
    trained = evaluations(tmp_path / "lookups" / "adapter")[-1]
    assert trained["eval_loss"] < after["eval_loss"] and trained["eval_mass_chosen"] >= 0.9


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--batch_size", "0"], "--batch_size 0 must be at least 1"),
        (["--sharp", "-1"], "--sharp -1.0 must be at least 0"),
        (["--sharp", "nan"], "--sharp nan must be at least 0"),
        (["--sharp", "inf"], "--sharp inf must be at least 0"),
        (["--sharp", "1e300", "--steps", "1", "--batch_size", "1"], "step 1: loss "),
        (["--seed", "-1"], "--seed -1 must be at least 0"),
    ],
)
def test_wrong_switches(switches: list[str], message: str, tmp_path: Path, capsys) -> None:
    assert make_lookups.main([str(tmp_path / "out"), *switches]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert not any(tmp_path.iterdir())


def test_folders_in_use_are_refused_before_the_training(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.delattr(make_lookups, "train")
    (tmp_path / "file").write_text("mine")
    for out, message in (("", "exists: choose another name"), ("file/out", "is a file")):
        assert make_lookups.main([str(tmp_path / out)]) == 2
        assert message in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("steps", [1, 10])
def test_short_runs(steps: int, tmp_path: Path) -> None:
    """A rise over exactly one of ten steps was a division by zero."""
    assert make_lookups.main([str(tmp_path / "out"), "--steps", str(steps), "--batch_size", "1"]) == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"dense", "train.jsonl", "test.jsonl"}
