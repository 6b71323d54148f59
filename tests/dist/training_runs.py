"""Whole runs of scripts/lora.py in several gloo processes, forked from a server that has imported everything; what they
left, and what ends them."""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from cpu_fsdp import start_with_fsdp
from processes import PROCESSES, TIMEOUT_S
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from modeling_latentmoe.training.monitor import MEASURED

ROOT = Path(__file__).parents[2]
# what `accelerate launch --config_file accelerate_configs/fsdp2.yaml` sets (test_accelerate_configs.py)
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


class Ended(NamedTuple):
    """How a process ended, and what it said."""

    code: int
    out: str
    err: str


def train(
    folder: Path,
    world: int,
    argv: list[str],
    fsdp: bool = False,
    environment: dict[str, str] | None = None,
    before: Callable[[int], None] | None = None,
    timeout: float = 4 * TIMEOUT_S,
) -> list[Ended]:
    """Run the script with `argv` in `world` processes; `before(rank)` is called in each one before it starts. Those
    that have not ended after `timeout` seconds are killed."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    common |= {**(FSDP2 if fsdp else {}), **(environment or {})}
    processes = [
        PROCESSES.Process(target=_run, args=(rank, str(folder), argv, common, fsdp, before)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    said = [[(folder / f"{name}-{rank}").read_text() for name in ("out", "err")] for rank in range(world)]
    return [Ended(code, *texts) for code, texts in zip(codes, said, strict=True)]


def _run(rank: int, folder: str, argv: list[str], common: dict[str, str], fsdp: bool, before: Callable | None) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ |= {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    if fsdp:
        Accelerator.__init__ = start_with_fsdp
    from scripts import lora

    if before:
        before(rank)
    code = lora.main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def signal_in_step(step: int, number: signal.Signals, ranks: tuple[int, ...], rank: int) -> None:
    """Send the processes `ranks` a signal when they have begun a step."""
    from scripts import lora

    backpropagate, steps = lora.backpropagate, []

    def signalling(*args):
        steps.append(1)
        if len(steps) == step and rank in ranks:
            os.kill(os.getpid(), number)
        return backpropagate(*args)

    lora.backpropagate = signalling


def records(output: Path) -> list[dict]:
    """metrics.jsonl, without what depends on the time."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line.keys() - MEASURED} for line in lines]


def tensors(output: Path, checkpoint: str) -> dict[str, torch.Tensor]:
    """Adapter, expert load of every step, and weights and moments of a checkpoint, by name."""
    whole = output / "whole.pt"
    dcp_to_torch_save(output / checkpoint / "trained", whole)
    found = torch.load(whole, weights_only=True) | load_file(output / "adapter_model.safetensors")
    whole.unlink()
    # one file for each checkpoint
    files = sorted((output / "expert_load").iterdir())
    return found | {"load": torch.cat([load_file(file)["load"] for file in files])}


def same_bits(ours: Path, theirs: Path, checkpoint: str) -> None:
    """Two finished runs left the same records, and the same tensors to the bit."""
    assert records(ours) == records(theirs)
    mine, others = tensors(ours, checkpoint), tensors(theirs, checkpoint)
    assert mine.keys() == others.keys() and len(mine) > 50
    for name, value in others.items():
        assert torch.equal(mine[name], value), name
