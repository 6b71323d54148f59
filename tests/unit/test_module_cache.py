"""Many processes that load remote code at once, on an empty module cache, all start.

transformers copies the code into the cache without a lock, so a process can import a half-written file, or
meet a file system that refuses to replace a file somebody else is writing. Here every copy is made as bad as
that: it stops half-way, and refuses a destination that another process holds. All 16 processes must come
through `training/loading.py` nevertheless.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration

RACE = """
import os, shutil, sys, time, traceback
from pathlib import Path
import torch
from transformers import dynamic_module_utils
from modeling_latentmoe.training import loading

torch.set_num_threads(1)
cache = Path(os.environ["HF_MODULES_CACHE"])
copied = 0

def hostile_copy(source, destination):
    global copied
    destination = Path(destination)
    held = destination.with_suffix(".held")
    try:
        os.close(os.open(held, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        raise PermissionError(f"another process is writing {destination}") from None
    text = Path(source).read_bytes()
    with open(destination, "wb") as file:
        file.write(text[: len(text) // 2])
        file.flush()
        time.sleep(0.005)
        file.write(text[len(text) // 2 :])
    held.unlink()
    copied += 1

def child(start):
    os.read(start, 1)
    dynamic_module_utils.shutil.copyfile = hostile_copy
    processor = loading.load_processor(os.environ["PROCESSOR"])
    model = loading.load_model(os.environ["MODEL"], "fp32")
    assert type(processor).__name__ == "LatentMoEProcessor"
    assert type(model).__name__ == "LatentMoEForConditionalGeneration"
    assert type(model).__module__.startswith("transformers_modules.")

failed = writers = 0
for _ in range(int(os.environ["ROUNDS"])):
    shutil.rmtree(cache, ignore_errors=True)
    start, go = os.pipe()
    children = []
    for _ in range(16):
        if (pid := os.fork()) == 0:
            try:
                child(start)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(100 if copied else 0)
        children.append(pid)
    os.write(go, b"x" * len(children))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    failed += sum(code not in (0, 100) for code in codes)
    writers += sum(code == 100 for code in codes)
    os.close(start), os.close(go)
assert failed == 0, f"{failed} processes failed"
assert writers >= int(os.environ["ROUNDS"]), "the cache was not empty at the start of each round"
"""


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 20])
def test_sixteen_processes_on_an_empty_cache(
    rounds: int, tiny: Path, tmp_path: Path, fresh_process: Callable[..., str]
) -> None:
    """The weights are a few random kilobytes: the code is what races."""
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(packed=False))
    model.save_pretrained(tmp_path / "model")
    env = {"MODEL": str(tmp_path / "model"), "PROCESSOR": str(tiny), "ROUNDS": str(rounds)}
    fresh_process(RACE, env=env, package=True, timeout=600)
