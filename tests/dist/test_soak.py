"""500 steps with EP 2, one process killed on the way: resumed, the run ends like one that was left alone."""

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from training_runs import same_bits, signal_in_step, train

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.training.loading import load_processor

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS, KILLED_IN, SAVE_EVERY = 500, 271, 40


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """Random weights: a KDA layer, an MLA layer and a DSA layer, the last two with experts."""
    config = LatentMoEConfig.tiny(vision=False, experts=8).to_dict()
    config["text_config"] |= {"num_hidden_layers": 3, "layer_types": None, "indexer_types": ["none", "none", "full"]}
    config["text_config"]["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2, 3]}
    processor = load_processor(str(tiny))
    config["text_config"]["vocab_size"] = len(processor.tokenizer)
    torch.manual_seed(0)
    LatentMoEForConditionalGeneration(LatentMoEConfig(**config)).save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_killed_in_the_middle(model: Path, tmp_path: Path) -> None:
    """SIGKILL, 30 steps after a checkpoint; the other process says what to do."""
    rows = [{"prompt": f"{i}?", "completion": "7" * (1 + i % 6)} for i in range(50)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--model", str(model), "--dataset", str(tmp_path / "rows.jsonl"), "--ep", "2", "--timeout", "60"]
    argv += ["--batch_size", "1", "--max_steps", str(STEPS), "--save_every", str(SAVE_EVERY), "--lr", "3e-3"]
    argv += ["--r", "2", "--expert_rank", "1", "--output_dir"]

    ended = train(tmp_path / "said", 2, [*argv, str(tmp_path / "straight")], timeout=1200)
    assert [process.code for process in ended] == [0, 0], ended

    cut = [*argv, str(tmp_path / "cut")]
    kill = partial(signal_in_step, KILLED_IN, signal.SIGKILL, (1,))
    first, second = train(tmp_path / "said", 2, cut, before=kill, timeout=1200)
    assert (first.code, second.code) == (2, -signal.SIGKILL)
    assert "another process of this run died" in first.err
    last = (KILLED_IN - 1) // SAVE_EVERY * SAVE_EVERY
    assert (tmp_path / "cut" / f"checkpoint-{last:06d}").exists()
    assert not (tmp_path / "cut" / "adapter_model.safetensors").exists()

    first, second = train(tmp_path / "said", 2, [*cut, "--resume"], timeout=1200)
    assert (first.code, second.code) == (0, 0)
    assert f"continuing from {tmp_path / 'cut'}/checkpoint-{last:06d}" in first.out
    same_bits(tmp_path / "cut", tmp_path / "straight", f"checkpoint-{STEPS:06d}")
