"""Processes that diverge are an error: what is copied to several of them must be the same to the bit."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from modeling_latentmoe.training.mesh import is_expert


def check_same_start(facts: dict[str, Any]) -> None:
    """ValueError unless all processes start from the same `facts`, such as settings and the digest of the base."""
    for rank, theirs in enumerate(gather_object([facts])):
        for name, value in facts.items():
            if theirs[name] != value:
                raise ValueError(f"process {rank} has {name} {theirs[name]}, another has {value}: start all alike")


@torch.no_grad()
def check_copies(model: nn.Module, mesh: DeviceMesh) -> None:
    """ValueError that names a trained parameter whose copies differ; every process calls it.

    Factors of experts are copied over "efsdp"; others over all processes, unless FSDP gave each one a part.
    """
    for group, names, sums in _checksums(model, mesh):
        least, most = sums.clone(), sums
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        differ = (least != most).nonzero().flatten().tolist()
        if differ:
            raise ValueError(f"{names[differ[0]]} and {len(differ) - 1} more trained tensors differ between processes")


def _checksums(model: nn.Module, mesh: DeviceMesh):
    copies: dict[bool, list[tuple[str, Tensor]]] = {True: [], False: []}
    for name, param in model.named_parameters():
        if param.requires_grad and not isinstance(param, DTensor):
            copies[is_expert(name)].append((name, checksum(param)))
    for experts, group in ((True, mesh.get_group("efsdp")), (False, None)):
        if copies[experts]:
            names, sums = zip(*copies[experts], strict=True)
            yield group, names, torch.stack(sums)


def checksum(values: Tensor) -> Tensor:
    """A whole number that depends on every bit and every place."""
    bits = values.detach().contiguous().view(torch.int32).flatten().long()
    return (bits * (torch.arange(len(bits), device=bits.device) % 8191 + 1)).sum()
