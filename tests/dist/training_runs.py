"""Whole runs of scripts/lora.py in several gloo processes, forked from a server that has imported everything."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from accelerate import Accelerator
from cpu_fsdp import start_with_fsdp
from processes import PROCESSES, TIMEOUT_S

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
) -> list[Ended]:
    """Run the script with `argv` in `world` processes; `before(rank)` is called in each one before it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), **(environment or {})}
    common |= FSDP2 if fsdp else {}
    processes = [
        PROCESSES.Process(target=_run, args=(rank, str(folder), argv, common, fsdp, before)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(4 * TIMEOUT_S)
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
