"""What a run leaves on disk, written so that a crash at any moment leaves the old files or the new ones.

output_dir/
  adapter_config.json  adapter_model.safetensors  base_model.json  README.md   the adapter, ready to share
  router_bias.safetensors  indexer.safetensors          what Quantile Balancing and --train_indexer learned, if they did
  run.yaml  metrics.jsonl  training.png                                        how it was made
  checkpoint-000100/   the adapter, whole; trained/: weights and moments, each process' part in a file of its own;
                       state.pt: random state and position in the data of every process

All processes write into the same folder: on several machines it lies in a shared file system.

A checkpoint of step N holds the weights after N updates, and nobody has seen their loss: step N + 1 is the
first to compute it. Where that is not finite the checkpoint is bad, and the last good adapter is an earlier one.
"""

import io
import json
import os
import pickle
import re
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object
from huggingface_hub import HfApi
from peft import PeftModel
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from modeling_latentmoe.training.agreement import check_copies
from modeling_latentmoe.training.expert_adapters import gather_adapter
from modeling_latentmoe.training.files import LOAD_FOLDER, TEMPORARY, write_text
from modeling_latentmoe.training.lora import BASE_FILE, SIDE_FILES, check_beside
from modeling_latentmoe.training.trained_state import load_trained_state, save_trained_state
from modeling_latentmoe.training.values import write_values

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", BASE_FILE)
RUN_FILES = (*ADAPTER_FILES, *SIDE_FILES, "README.md", "run.yaml", "metrics.jsonl", "training.png")
TRAINED = "trained"
Beside = Mapping[str, Mapping[str, Tensor]]
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
    "ep",
    "ep_chunks",
    "ep_rows",
    "ep_sums",
    "ep_node_size",
    "experts_in",
    "gradient_accumulation",
    "gradient_checkpointing",
    "timeout",
    "traceback",
    "offload_activations",
    "prometheus",
    "peak_tflops",
    "alert",
    "alert_command",
}


def check_output(output_dir: str, settings: dict[str, Any], overwrite: bool, resume: bool) -> Path | None:
    """Refuse a folder in use; with `resume`, return the checkpoint to continue from. Changes nothing.

    `settings` are the run's arguments; a resumed run must have those it was started with, and its checkpoint all files
    of its adapter. Raises ValueError that names the switch.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file")
    if resume:
        checkpoint = latest_checkpoint(folder)
        check_same_run(folder, settings)
        try:
            check_beside(checkpoint)
        except ValueError as error:
            whole = f"or delete {checkpoint} to continue from an earlier checkpoint"
            raise ValueError(f"--resume: {error}, {whole}") from error
        return checkpoint
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise ValueError(
            f"--output_dir {folder} is in use: choose another folder, or --resume to continue its run or "
            "--overwrite to replace it"
        )
    return None


def check_writable(folder: Path) -> None:
    """OSError that names the switch unless something can be made in `folder`, which may not exist yet.

    Tried with a temporary folder: what permissions say does not hold everywhere, in /proc for example.
    """
    place = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(dir=place).cleanup()
    except OSError as error:
        raise OSError(f"--output_dir {folder} cannot be written: {error.strerror}") from error


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
    for path in {*checkpoints(folder), *folder.glob(f"*{TEMPORARY}"), *folder.glob(LOAD_FOLDER)}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d{6,}", path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def latest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint of a run; ValueError if there is none."""
    found = checkpoints(folder)
    if not found:
        used = folder.is_dir() and any(folder.iterdir())
        anew = "give --overwrite in its place" if used else "leave it out"
        raise ValueError(f"--resume: there is no checkpoint in --output_dir {folder}; to start anew, {anew}")
    return found[-1]


def last_good_adapter(folder: Path, bad: Path) -> str:
    """Says where the last good adapter is when the first step after checkpoint `bad` is not finite.

    The adapter of an unfinished run is the one that was kept when a step was not finite.
    """
    if (folder / "adapter_model.safetensors").exists():
        return f"the last good adapter is in {folder}"
    earlier = [path for path in checkpoints(folder) if step_of(path) < step_of(bad)]
    if earlier:
        return f"the last good adapter is in {earlier[-1]}; delete {bad} for --resume to continue from there"
    return "there is no good adapter before it"


def check_same_run(folder: Path, settings: dict[str, Any]) -> None:
    """ValueError where an argument differs from the ones that the run in `folder` was started with."""
    file = folder / "run.yaml"
    try:
        started = yaml.safe_load(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"--resume: {file} is missing, which has the run's settings; copy the whole folder") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--resume: {file} is not valid YAML: {error}") from error
    if not isinstance(started, dict):
        raise ValueError(f"--resume: {file} does not hold the settings of a run")
    for name, value in settings.items():
        if name not in FREE_ON_RESUME and started.get(name) != value:
            raise ValueError(f"--resume: --{name} is {value} but the run in {folder} has {started.get(name)}")


def save_adapter(
    model: PeftModel,
    folder: Path,
    identity: dict[str, str],
    factors: dict[str, Tensor] | None = None,
    beside: Beside | None = None,
) -> None:
    """Write the adapter, in PEFT's standard files, and beside it which base model and which other files belong to it.

    factors: those of the whole model (`gather_adapter`), where this process holds only a part. beside: what else was
    learned, name of a file, one of SIDE_FILES -> its tensors (values.py); those of an earlier adapter are removed.
    """
    partial = folder / f"adapter{TEMPORARY}"
    model.save_pretrained(partial, is_main_process=True, state_dict=factors)
    learned = {file: values for file, values in (beside or {}).items() if values}
    write_text(partial / BASE_FILE, json.dumps({**identity, "files": sorted(learned)}, indent=2) + "\n")
    for file, values in learned.items():
        write_values(partial / file, values)
    for file in set(SIDE_FILES) - learned.keys():
        (folder / file).unlink(missing_ok=True)
    for file in (*ADAPTER_FILES, *learned):
        os.replace(partial / file, folder / file)
    shutil.rmtree(partial)


def save_whole_adapter(
    model: PeftModel,
    mesh: DeviceMesh,
    folder: Path,
    identity: dict[str, str],
    beside: Beside | None = None,
) -> None:
    """`save_adapter` by the first process, from what all of them hold; every process calls it."""
    check_copies(model, mesh)
    factors = gather_adapter(model, mesh)
    if factors:
        save_adapter(model, folder, identity, factors, beside)


def save_checkpoint(
    accelerator: Accelerator,
    model: PeftModel,
    mesh: DeviceMesh,
    folder: Path,
    identity: dict[str, str],
    optimizer: torch.optim.Optimizer,
    beside: Beside,
    state: dict[str, Any],
    position: dict[str, Any],
    keep: int,
) -> Path:
    """Write checkpoint-<step>, which does not exist, and remove all but the newest `keep`; every process calls it.

    `state` is what the loop has to know to go on, the same on every process, with "step"; `position` is where this
    process is in the data.
    """
    processes = gather_object([{"position": position, "random": torch.get_rng_state()}])
    final = folder / f"checkpoint-{state['step']:06d}"
    partial = folder / (final.name + TEMPORARY)
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    accelerator.wait_for_everyone()
    save_trained_state(partial / TRAINED, model, optimizer, mesh)
    save_whole_adapter(model, mesh, partial, identity, beside)
    if accelerator.is_main_process:
        # torch itself says nothing of a full disk
        buffer = io.BytesIO()
        torch.save({"state": state, "processes": processes}, buffer)
        (partial / "state.pt").write_bytes(buffer.getbuffer())
        os.replace(partial, final)
        for old in checkpoints(folder)[:-keep]:
            # half a checkpoint must not look like a whole one
            leaving = old.with_name(old.name + TEMPORARY)
            os.replace(old, leaving)
            shutil.rmtree(leaving)
    accelerator.wait_for_everyone()
    return final


def load_checkpoint(
    checkpoint: Path, model: PeftModel, mesh: DeviceMesh, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Put weights, moments and random state back; returns the `state`, and the `position` of every process that wrote
    the checkpoint.

    The random state only where as many processes read it as wrote it; nothing that training computes depends on it.
    Raises ValueError that names the file for one that is not whole.
    """
    whole = f"delete {checkpoint} to continue from an earlier checkpoint"
    try:
        saved = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
        state, processes = saved["state"], saved["processes"]
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, KeyError, TypeError) as error:
        raise ValueError(f"--resume: {checkpoint / 'state.pt'} is damaged, cut short or missing; {whole}") from error
    try:
        load_trained_state(checkpoint / TRAINED, model, optimizer, mesh)
    except ValueError as error:
        raise ValueError(f"--resume: {error}; {whole}") from error
    if len(processes) == mesh.size():
        torch.set_rng_state(processes[mesh.get_rank()]["random"])
    return state, [process["position"] for process in processes]


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
