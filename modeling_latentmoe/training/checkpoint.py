"""What a run leaves on disk, written so that a crash at any moment leaves the old files or the new ones.

output_dir/
  adapter_config.json  adapter_model.safetensors  base_model.json  README.md   the adapter, ready to share
  run.yaml  metrics.jsonl  training.png                                        how it was made
  checkpoint-000100/   the adapter and state.pt: optimizer, random state, position in the data

A checkpoint of step N holds the weights after N updates, and nobody has seen their loss: step N + 1 is the
first to compute it. Where that is not finite the checkpoint is bad, and the last good adapter is an earlier one.
"""

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object
from huggingface_hub import HfApi
from peft import PeftModel, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from modeling_latentmoe.training.files import TEMPORARY, write_text
from modeling_latentmoe.training.lora import BASE_FILE

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", BASE_FILE)
RUN_FILES = (*ADAPTER_FILES, "README.md", "run.yaml", "metrics.jsonl", "training.png")
# a resumed run may differ from the interrupted one in these alone
FREE_ON_RESUME = {
    "resume",
    "overwrite",
    "push_to_hub",
    "log_with",
    "eval_every",
    "save_every",
    "output_dir",
    "keep",
    "traceback",
}


def check_output(output_dir: str, settings: dict[str, Any], overwrite: bool, resume: bool) -> Path | None:
    """Refuse a folder in use; with `resume`, return the checkpoint to continue from. Changes nothing.

    `settings` are the run's arguments; a resumed run must have those it was started with. Raises ValueError
    that names the switch.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file")
    if resume:
        checkpoint = latest_checkpoint(folder)
        check_same_run(folder, settings)
        return checkpoint
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise ValueError(
            f"--output_dir {folder} is in use: choose another folder, or --resume to continue its run or "
            " --overwrite to replace it"
        )
    return None


def start_output(folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder of a new run, without anything that an earlier run left there, and save its
    settings."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_run(folder)
    write_text(folder / "run.yaml", yaml.safe_dump(settings, sort_keys=False))


def remove_run(folder: Path) -> None:
    """Delete what an earlier run left in the folder, and nothing else."""
    for file in RUN_FILES:
        (folder / file).unlink(missing_ok=True)
    for path in {*folder.glob("checkpoint-*"), *folder.glob(f"*{TEMPORARY}")}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("checkpoint-*") if path.suffix != TEMPORARY)


def latest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint of a run; ValueError if there is none."""
    found = checkpoints(folder)
    if not found:
        raise ValueError(f"--resume: there is no checkpoint in --output_dir {folder}")
    return found[-1]


def last_good_adapter(folder: Path, bad: Path) -> str:
    """Says where the last good adapter is when the first step after checkpoint `bad` is not finite.

    The adapter of an unfinished run is the one that was kept when a step was not finite.
    """
    if (folder / "adapter_model.safetensors").exists():
        return f"the last good adapter is in {folder}"
    earlier = [path for path in checkpoints(folder) if path < bad]
    if earlier:
        return f"the last good adapter is in {earlier[-1]}; delete {bad} for --resume to continue from there"
    return "there is no good adapter before it"


def check_same_run(folder: Path, settings: dict[str, Any]) -> None:
    """ValueError where an argument differs from the ones that the run in `folder` was started with."""
    file = folder / "run.yaml"
    try:
        started = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"--resume: {file} is not valid YAML: {error}") from error
    if not isinstance(started, dict):
        raise ValueError(f"--resume: {file} does not hold the settings of a run")
    for name, value in settings.items():
        if name not in FREE_ON_RESUME and started.get(name) != value:
            raise ValueError(f"--resume: --{name} is {value} but the run in {folder} has {started.get(name)}")


def save_adapter(model: PeftModel, folder: Path, identity: dict[str, str]) -> None:
    """Write the adapter, in PEFT's standard files, and beside it which base model it belongs to."""
    partial = folder / f"adapter{TEMPORARY}"
    model.save_pretrained(partial, is_main_process=True)
    write_text(partial / BASE_FILE, json.dumps(identity, indent=2) + "\n")
    for file in ADAPTER_FILES:
        os.replace(partial / file, folder / file)
    shutil.rmtree(partial)


def save_checkpoint(
    accelerator: Accelerator,
    model: PeftModel,
    folder: Path,
    identity: dict[str, str],
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write checkpoint-<step> and remove all but the newest `keep`; every process calls it.

    `state` is what this process' loop has to know to go on, with "step".
    """
    states = gather_object([{**state, "random": torch.get_rng_state()}])
    final = folder / f"checkpoint-{state['step']:06d}"
    if accelerator.is_main_process:
        partial = folder / (final.name + TEMPORARY)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_adapter(model, partial, identity)
        torch.save({"optimizer": optimizer.state_dict(), "processes": states}, partial / "state.pt")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def load_checkpoint(
    accelerator: Accelerator, checkpoint: Path, model: PeftModel, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Put adapter, optimizer and random state back; returns the `state` that this process had saved.

    Raises ValueError that names the file for one that is not whole.
    """
    saved = read_whole(checkpoint / "state.pt", lambda file: torch.load(file, map_location="cpu", weights_only=True))
    factors = read_whole(checkpoint / "adapter_model.safetensors", load_file)
    if len(saved["processes"]) != accelerator.num_processes:
        raise ValueError(
            f"--resume: {checkpoint} was written by {len(saved['processes'])} processes, this run has "
            f"{accelerator.num_processes}"
        )
    result = set_peft_model_state_dict(model, factors)
    assert not result.unexpected_keys, result.unexpected_keys
    optimizer.load_state_dict(saved["optimizer"])
    state = saved["processes"][accelerator.process_index]
    torch.set_rng_state(state.pop("random"))
    return state


def read_whole(file: Path, read: Callable[[Path], Any]) -> Any:
    """`read(file)`; ValueError where the file is damaged or ends too early."""
    try:
        return read(file)
    except (RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise ValueError(
            f"--resume: {file} is damaged or cut short; delete {file.parent} to continue from an earlier checkpoint"
        ) from error


class Interrupt:
    """Turns the first Ctrl-C (or SIGTERM) into `asked`, which the loop reads between steps; a second one
    ends it."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "Interrupt":
        self.previous = {number: signal.signal(number, self.ask) for number in self.SIGNALS}
        return self

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def push(folder: Path, repo: str) -> str:
    """Upload a finished run, without its checkpoints, to the Hub model repository `repo`; returns its
    address."""
    api = HfApi()
    api.create_repo(repo, exist_ok=True)
    api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=list(RUN_FILES), commit_message="Adapter")
    return f"{api.endpoint}/{repo}"
