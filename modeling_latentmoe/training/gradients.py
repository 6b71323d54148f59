"""Gradients of a step in which every process had its own data, and experts were shared out over "ep".

Each process backpropagated dp_size times its part of the loss (see loss.py). Replicated parameters average their
gradients over all processes, which DDP or FSDP does. A process that holds an expert already has, from the tokens that
travelled to it, what its expert-parallel group owes that expert: over the groups, its column of the mesh, gradients
are summed here, and divided by the number of all processes.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from modeling_latentmoe.training.mesh import is_expert


def exclude_experts_from_ddp(model: nn.Module) -> None:
    """Make DDP, which is about to wrap `model`, leave alone everything that belongs to routed experts.

    It would give all processes the experts of the first one, and average the gradients of different experts.
    """
    names = [name for name, _ in model.named_parameters() if is_expert(name)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def reduce_expert_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give the trained parameters of the experts their gradients; once a step, on every process."""
    for name, param in model.named_parameters():
        if param.requires_grad and is_expert(name):
            # every process takes the same collectives
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            if mesh["efsdp"].size() > 1:
                dist.all_reduce(grad, group=mesh.get_group("efsdp"))
            param.grad = grad.div_(mesh.size())


@torch.no_grad()
def clip_grad_norm(model: nn.Module, mesh: DeviceMesh, max_norm: float) -> float:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm before.

    It is that of the whole model's gradients, each counted once: those of experts are summed over "ep", sharded ones
    over their own mesh, replicated ones taken as they are. The same number on every process.
    """
    grads: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, param in model.named_parameters():
        if param.grad is not None:
            grads[is_expert(name)].append(param.grad)
    squares = torch.zeros(2, dtype=torch.float64, device=mesh.device_type)
    for place, kind in enumerate((True, False)):
        if grads[kind]:
            norm = torch.nn.utils.get_total_norm(grads[kind])
            squares[place] = (norm.full_tensor() if isinstance(norm, DTensor) else norm).double().square()
    dist.all_reduce(squares[:1], group=mesh.get_group("ep"))
    total = float(squares.sum().sqrt())
    scale = max_norm / (total + 1e-6)
    # false for one that is not finite: gradients stay as they are
    if scale < 1:
        for grad in grads[True] + grads[False]:
            grad.mul_(scale)
    return total
