"""Where the experts live: a grid of all ranks with the axes "efsdp" and "ep".

The ranks of one row, neighbours in rank and so on one node where that is large enough, form an expert-parallel group
and hold all experts together. The ranks of a column hold the same experts. Every rank has its own data.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedConfig

from modeling_latentmoe.conversion import EXPERTS


def check_layout(config: PreTrainedConfig, world_size: int, ep_degree: int) -> None:
    """ValueError unless `world_size` ranks form groups of `ep_degree` that can share the experts equally."""
    experts = config.get_text_config().num_experts or 0
    if ep_degree < 1:
        raise ValueError(f"--ep {ep_degree} must be at least 1")
    if world_size % ep_degree:
        raise ValueError(f"--ep {ep_degree} does not divide the {world_size} processes that were launched")
    if ep_degree > 1 and (not experts or experts % ep_degree):
        raise ValueError(f"--ep {ep_degree} does not divide the {experts} experts of the model")


def build_mesh(world_size: int, ep_degree: int, device_type: str) -> DeviceMesh:
    """The mesh ("efsdp", "ep") over all ranks, which `check_layout` accepted. A collective: every rank calls it."""
    return init_device_mesh(device_type, (world_size // ep_degree, ep_degree), mesh_dim_names=("efsdp", "ep"))


def owned_experts(ep_rank: int, ep_degree: int, experts: int) -> range:
    """The experts that rank `ep_rank` of an expert-parallel group holds, of every layer."""
    share = experts // ep_degree
    return range(ep_rank * share, (ep_rank + 1) * share)


def rank_map(config: PreTrainedConfig, world_size: int, ep_degree: int) -> str:
    """A line for every rank: its place in the mesh and its experts."""
    experts = config.get_text_config().num_experts or 0
    lines = []
    for rank in range(world_size):
        efsdp, ep = divmod(rank, ep_degree)
        owned = owned_experts(ep, ep_degree, experts)
        held = f"experts {owned.start} to {owned.stop - 1} of every layer" if owned else "no experts"
        lines.append(f"rank {rank}: efsdp {efsdp}, ep {ep}, {held}")
    return "\n".join(lines)


class Share(NamedTuple):
    """What one rank holds of a model: bytes of expert stacks, adapters on them included, and of everything else."""

    rank: int
    efsdp: int
    ep: int
    experts: range
    expert_bytes: int
    dense_bytes: int


def shares(model: nn.Module, world_size: int, ep_degree: int) -> Iterator[Share]:
    """The share of every rank.

    model: with one rank's share of the experts; it may be on the meta device. Everything but the experts is divided
    over all ranks along the first axis, as FSDP2 does.
    """
    expert_bytes, dense = 0, []
    for name, param in model.named_parameters():
        if is_expert(name):
            expert_bytes += param.nbytes
        else:
            dense.append(param)
    experts = model.config.get_text_config().num_experts or 0
    for rank in range(world_size):
        efsdp, ep = divmod(rank, ep_degree)
        dense_bytes = sum(_part(param, rank, world_size) for param in dense)
        yield Share(rank, efsdp, ep, owned_experts(ep, ep_degree, experts), expert_bytes, dense_bytes)


def is_expert(name: str) -> bool:
    """Whether the parameter of this full name belongs to a stack of routed experts, adapters included."""
    return f".{EXPERTS.rpartition('.')[2]}." in name


def _part(param: Tensor, rank: int, world_size: int) -> int:
    """Bytes of one rank's part: equal parts of the first axis, except the last ones."""
    if not param.ndim:
        return param.nbytes
    rows = -(-len(param) // world_size)
    return max(0, min(rows, len(param) - rank * rows)) * (param.nbytes // len(param))
