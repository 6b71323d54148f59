"""What training changes, as tensors of the whole model: trained parameters and the optimizer's moments of them.

Each process writes the part that it holds with torch.distributed.checkpoint, and reads back the part that it holds
then, on whatever number of processes and at whatever degree of expert parallelism.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from modeling_latentmoe.training.expert_adapters import held_experts
from modeling_latentmoe.training.mesh import is_expert

# what a folder of torch.distributed.checkpoint says about its other files
METADATA = ".metadata"


def prepare_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the moments it starts from, zeros, so that a checkpoint has a place to be read into.

    A parameter that never gets a gradient has some too then: every checkpoint holds the same tensors.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.zeros(()), **zeros}


def save_trained_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """Write the trained state into `folder`, which all processes see; every process calls it. OSError on all of them
    where one could not."""
    try:
        dcp.save(trained_state(model, optimizer, mesh), checkpoint_id=folder)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise OSError(f"{folder} could not be written ({cause!r})") from error


def load_trained_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """Put a trained state back, in place; every process calls it. ValueError where a tensor or a part is missing."""
    try:
        # `dcp.load` prints where in its code this fails
        dcp.FileSystemReader(folder).read_metadata()
    # damaged pickles raise anything
    except Exception as error:
        raise ValueError(f"{folder / METADATA} is damaged, cut short or missing ({error!r})") from error
    try:
        dcp.load(trained_state(model, optimizer, mesh), checkpoint_id=folder)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise ValueError(f"{folder} is damaged, cut short or of another adapter ({cause!r})") from error


@torch.no_grad()
def trained_state(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Views of all trained values by name, those of experts as parts of the stacks of all experts.

    optimizer: after `prepare_moments`.
    """
    share, state = len(held_experts(model)), {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        assert param in optimizer.state, f"{name} has no moments"
        for kind, value in {"value": param.detach(), **optimizer.state[param]}.items():
            whole = _of_all_experts(name, value, mesh, share) if is_expert(name) and value.ndim else value
            state[f"{name}.{kind}"] = whole
    return state


def _of_all_experts(name: str, factor: Tensor, mesh: DeviceMesh, share: int) -> DTensor:
    """A factor of this process' experts as a part of that of all: by expert [E, r, in], or [out, r, E] (see
    expert_adapters.py)."""
    axis = 0 if "lora_A" in name else 2
    local = factor.unflatten(0, (share, -1)) if axis == 0 else factor.unflatten(1, (-1, share))
    return DTensor.from_local(local, mesh, [Replicate(), Shard(axis)], run_check=False)
