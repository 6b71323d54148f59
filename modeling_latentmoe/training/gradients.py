"""Gradients of a step in which every process had its own data, and experts were shared out over "ep".

Each process backpropagated dp_size times its part of the loss (see loss.py). Replicated parameters average their
gradients over all processes, in `average_gradients` or in FSDP. A process that holds an expert already has, from the
tokens that travelled to it, what its expert-parallel group owes that expert: over the groups, its column of the mesh,
gradients are summed here, and divided by the number of all processes.

Legend: N targets of LoRA.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from modeling_latentmoe.training.mesh import is_expert
from modeling_latentmoe.training.sums import summed

# whose gradient a process holds: that of its own experts, a shard, or a copy
EXPERT, SHARDED, COPIED = range(3)


def exclude_experts_from_ddp(model: nn.Module) -> None:
    """Make DDP, which is about to wrap `model`, leave alone everything that belongs to routed experts.

    It would give all processes the experts of the first one, and average the gradients of different experts.
    """
    names = [name for name, _ in model.named_parameters() if is_expert(name)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def average_gradients(model: DistributedDataParallel) -> None:
    """Average the gradients of all processes, of every trained parameter that DDP does not leave alone; every process
    calls it, once a step. Their values are exchanged together."""
    named = model.module.named_parameters()
    trained = [param for name, param in named if param.requires_grad and name not in model.parameters_to_ignore]
    for param in trained:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    for dtype in {param.dtype: None for param in trained}:
        grads = [param.grad for param in trained if param.dtype == dtype]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for grad, average in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(average.view_as(grad))


def reduce_expert_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give the trained parameters of the experts their gradients; once a step, on every process."""
    for name, param in model.named_parameters():
        if param.requires_grad and is_expert(name):
            # every process takes the same collectives
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            if mesh["efsdp"].size() > 1:
                dist.all_reduce(grad, group=mesh.get_group("efsdp"))
            param.grad = grad.div_(mesh.size())


class Norms(NamedTuple):
    """Norm of all gradients of the whole model, and of those of every target of LoRA, over all layers."""

    total: float
    targets: dict[str, float]


@torch.no_grad()
def clip_grad_norm(model: nn.Module, mesh: DeviceMesh, max_norm: float) -> Norms:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norms before, same on every process.

    Each gradient of the whole model counts once: those of experts are summed over "ep", sharded ones over the mesh of
    their shards, replicated ones taken as they are.
    """
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    targets = {name: target_of(model, name) for name in trained}
    zeros = torch.zeros(3, dtype=torch.float64, device=mesh.device_type)
    squares = {target: zeros.clone() for target in targets.values()}
    grads = {name: param.grad for name, param in trained.items() if param.grad is not None}
    for name, grad in grads.items():
        local, kind = (grad.to_local(), SHARDED) if isinstance(grad, DTensor) else (grad, COPIED)
        squares[targets[name]][EXPERT if is_expert(name) else kind] += local.norm().double().square()
    squares_3N = torch.stack(list(squares.values()), dim=1)
    experts_N, sharded_N = summed(squares_3N[EXPERT], mesh.device_type, mesh.get_group("ep")), squares_3N[SHARDED]
    # of the parameters and not of the gradients: every process takes the same collectives
    sharded = [param for param in trained.values() if isinstance(param, DTensor)]
    groups = dict.fromkeys(param.device_mesh.get_group(_shard_axis(param)) for param in sharded)
    for group in groups:
        sharded_N = summed(sharded_N, mesh.device_type, group)
    squares_N = experts_N + sharded_N.cpu() + squares_3N[COPIED].cpu()
    total = float(squares_N.sum().sqrt())
    scale = max_norm / (total + 1e-6)
    # where the norm is not finite gradients stay as they are
    if 0 < scale < 1:
        for grad in grads.values():
            grad.mul_(scale)
    return Norms(total, dict(zip(squares, squares_N.sqrt().tolist(), strict=True)))


def target_of(model: nn.Module, name: str) -> str:
    """What LoRA adapts with the parameter of this full name, such as "q_proj" or "experts.down_proj", or which part
    of an indexer it is; the name of any other parameter."""
    _, indexer, part = name.partition(".indexer.")
    if indexer:
        return f"indexer.{part}"
    owner, lora, _ = name.partition(".lora_")
    if not lora:
        return name
    if is_expert(name):
        return f"experts.{model.get_submodule(owner).parameter_name}"
    return owner.rpartition(".")[2]


def _shard_axis(param: DTensor) -> int:
    (axis,) = (axis for axis, placement in enumerate(param.placements) if placement.is_shard())
    return axis
