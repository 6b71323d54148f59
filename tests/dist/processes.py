"""Several gloo processes for one test. They are forked from a server that has only imported the packages: a world
starts in a moment."""

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT_S = 60
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["scripts.lora", "matplotlib.pyplot"])


def as_launched(rank: int, world: int) -> None:
    """Set what Accelerate looks for in a process of several on one machine."""
    ranks, sizes = (("RANK", "LOCAL_RANK"), rank), (("WORLD_SIZE", "LOCAL_WORLD_SIZE"), world)
    os.environ |= {name: str(value) for names, value in (ranks, sizes) for name in names}
    # the group exists already: nobody calls there
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _enter(rank: int, world: int, folder: str, work: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S)
    )
    torch.save(work(rank, world, *args), f"{folder}/result-{rank}.pt")
    dist.destroy_process_group()


def spawn(folder: Path, world: int, work: Callable, *args) -> list:
    """`work(rank, world, *args)` in `world` processes of one group; what each returned."""
    folder.mkdir(exist_ok=True)
    processes = [PROCESSES.Process(target=_enter, args=(rank, world, str(folder), work, args)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(4 * TIMEOUT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * world, codes
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(world)]
