"""Sums of fp64 over processes. By gathering: HCCL gathers every dtype, but reduces no fp64 before Ascend 950."""

import torch
import torch.distributed as dist
from torch import Tensor


def summed(values: Tensor, device: str | torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """`values` summed over the processes of `group`, on the host: the same bits on all of them.

    device: that of the processes' collectives.
    """
    if not dist.is_initialized():
        return values.cpu()
    ranks = dist.get_world_size(group)
    found = torch.empty(ranks, *values.shape, dtype=values.dtype, device=device)
    dist.all_gather(list(found.unbind()), values.to(device), group=group)
    return found.cpu().sum(0)
