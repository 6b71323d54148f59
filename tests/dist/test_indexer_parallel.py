"""Indexers trained on several processes: in every layout what one process learns, in both stages."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_lora_parallel import argv, steps, succeeded
from training_runs import train

from modeling_latentmoe.training.indexer import INDEXER_FILE

# Two minutes each on two cores.
pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of 20 to 60 tokens; the tiny model chooses 32 keys."""
    folder = tmp_path_factory.mktemp("rows")
    lines = [{"prompt": f"{i}?", "completion": " ".join("7" * (1 + 5 * (i % 5)))} for i in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


def same_run(ours: Path, theirs: Path) -> None:
    for mine, other in zip(steps(ours), steps(theirs), strict=True):
        for name in ("loss", "indexer_loss", "grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-9), (name, mine["step"])
    for file in (INDEXER_FILE, "adapter_model.safetensors"):
        mine, others = load_file(ours / file), load_file(theirs / file)
        assert mine.keys() == others.keys()
        for name, value in others.items():
            assert (mine[name].double() - value.double()).norm() <= 1e-6 * value.double().norm(), name


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_every_layout_trains_the_same_indexers(stage: str, tiny: Path, rows: Path, tmp_path: Path) -> None:
    """FSDP2 x EP 2 with recomputation, which continues from its checkpoint as DDP x EP 2."""
    one, two = tmp_path / "one", tmp_path / "two"
    more = ["--train_indexer", stage, "--lr", "1e-3"]
    succeeded(train(tmp_path / "said", 1, argv(tiny, rows, one, 1, 4, *more)))
    start = load_file(one / "checkpoint-000002" / INDEXER_FILE)
    assert not any(torch.equal(value, start[name]) for name, value in load_file(one / INDEXER_FILE).items())
    settings = argv(tiny, rows, two, 2, 2, *more, "--gradient_checkpointing", "full")
    succeeded(train(tmp_path / "said", 2, settings, fsdp=True))
    same_run(two, one)
    (two / INDEXER_FILE).unlink()
    for file in (two / "checkpoint-000004").rglob("*"):
        if file.is_file():
            file.unlink()
    (two / "checkpoint-000004").rename(two / "gone")
    assert "continuing from" in succeeded(train(tmp_path / "said", 2, [*settings, "--resume"]))
    same_run(two, one)
