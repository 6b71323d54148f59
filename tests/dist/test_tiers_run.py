"""scripts/lora.py under FSDP2 and EP 2 with experts outside of the device: the run that it is with all on it."""

import json
import shutil
from pathlib import Path

import pytest
from training_runs import Ended, records, same_bits, train

pytestmark = pytest.mark.dist


def argv(model: Path, rows: Path, output: Path, *more: str) -> list[str]:
    """Four steps of eight rows, a checkpoint after two."""
    settings = ["--model", str(model), "--dataset", str(rows), "--output_dir", str(output), "--ep", "2"]
    settings += ["--batch_size", "2", "--gradient_accumulation", "2", "--timeout", "60", "--max_steps", "4"]
    return [*settings, "--save_every", "2", "--r", "4", "--expert_rank", "2", *more]


def succeeded(processes: list[Ended]) -> str:
    """What the first process said."""
    assert [process.code for process in processes] == [0] * len(processes), [process.err for process in processes]
    return processes[0].out


@pytest.mark.slow
def test_the_same_run_wherever_the_experts_are(tiny: Path, tmp_path: Path) -> None:
    """In host memory; and in their files from the second checkpoint on, recomputed."""
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"{i}?", "completion": " ".join("7" * (1 + i % 5))} for i in range(24)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    device, host, file = (tmp_path / name / "run" for name in ("device", "host", "file"))
    succeeded(train(device.parent, 2, argv(tiny, rows, device), fsdp=True))
    out = succeeded(train(host.parent, 2, argv(tiny, rows, host, "--experts_in", "host:0-4"), fsdp=True))
    assert "are sent to the device for every use" in out
    same_bits(host, device, "checkpoint-000004")
    steps = [record for record in map(json.loads, (host / "metrics.jsonl").open()) if "loss" in record]
    assert len(steps) == 4 and all(record["experts_moved_s"] > 0 for record in steps)

    for name in ("checkpoint-000002", "expert_load"):
        shutil.copytree(device / name, file / name)
    for name in ("run.yaml", "metrics.jsonl"):
        shutil.copy(device / name, file)
    more = ["--resume", "--experts_in", "file:1-3", "--gradient_checkpointing", "full"]
    succeeded(train(file.parent, 2, argv(tiny, rows, file, *more), fsdp=True))
    same_bits(file, device, "checkpoint-000004")
    assert records(file) == records(device)
