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
