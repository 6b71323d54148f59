"""Where the experts live: a grid of all ranks with the axes "efsdp" and "ep".

The ranks of one row, neighbours in rank and so on one node where that is large enough, form an expert-parallel group
and hold all experts together. The ranks of a column hold the same experts. Every rank has its own data.
"""

import re
from datetime import timedelta

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import PreTrainedConfig

from modeling_latentmoe.conversion import EXPERTS

# of the rank map, before it groups
MOST_LINES = 16


def check_layout(config: PreTrainedConfig, world_size: int, ep_degree: int) -> None:
    """ValueError unless `world_size` ranks form groups of `ep_degree` that can share the experts equally."""
    experts = config.get_text_config().num_experts or 0
    if ep_degree < 1:
        raise ValueError(f"--ep {ep_degree} must be at least 1")
    if world_size % ep_degree:
        raise ValueError(f"--ep {ep_degree} does not divide the {world_size} processes that were launched")
    if ep_degree > 1 and not experts:
        raise ValueError(f"--ep {ep_degree}: the model has no routed experts")
    if ep_degree > 1 and experts % ep_degree:
        raise ValueError(f"--ep {ep_degree} does not divide the {experts} experts of the model")


def build_mesh(world_size: int, ep_degree: int, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """The mesh ("efsdp", "ep") over all ranks, which `check_layout` accepted. A collective: every rank calls it.

    timeout: after which a rank that does not answer in one of its groups is an error; by default torch's.
    """
    mesh = init_device_mesh(device_type, (world_size // ep_degree, ep_degree), mesh_dim_names=("efsdp", "ep"))
    if timeout is not None:
        # torch makes these groups with its default, whatever the group of all ranks has
        for axis in mesh.mesh_dim_names:
            _set_pg_timeout(timeout, mesh.get_group(axis))
    return mesh


def owned_experts(ep_rank: int, ep_degree: int, experts: int) -> range:
    """The experts that rank `ep_rank` of an expert-parallel group holds, of every layer."""
    share = experts // ep_degree
    return range(ep_rank * share, (ep_rank + 1) * share)


def rank_map(config: PreTrainedConfig, world_size: int, ep_degree: int) -> str:
    """Places in the mesh and experts: a line a rank; of more than MOST_LINES ranks, a line a row or column."""
    experts = config.get_text_config().num_experts or 0
    if world_size <= MOST_LINES:
        groups = [range(rank, rank + 1) for rank in range(world_size)]
    else:
        rows = [range(first, first + ep_degree) for first in range(0, world_size, ep_degree)]
        columns = [range(ep, world_size, ep_degree) for ep in range(ep_degree)]
        groups = min(rows, columns, key=len)
    return "\n".join(_map_line(ranks, ep_degree, experts) for ranks in groups)


def _map_line(ranks: range, ep_degree: int, experts: int) -> str:
    (efsdp, ep), (last_efsdp, last_ep) = divmod(ranks[0], ep_degree), divmod(ranks[-1], ep_degree)
    owned, last_owned = owned_experts(ep, ep_degree, experts), owned_experts(last_ep, ep_degree, experts)
    held = f"experts {span(owned.start, last_owned.stop - 1)} of every layer" if owned else "no experts"
    who = f"{'rank' if len(ranks) == 1 else 'ranks'} {span(ranks[0], ranks[-1])}"
    steps = f" in steps of {ranks.step}" if ranks.step > 1 else ""
    each = f", {len(owned)} each" if last_ep > ep else ""
    return f"{who}{steps}: efsdp {span(efsdp, last_efsdp)}, ep {span(ep, last_ep)}, {held}{each}"


def span(first: int, last: int) -> str:
    """Numbers in words: "3", or "3 to 5"."""
    return f"{first}" if first == last else f"{first} to {last}"


def is_expert(name: str) -> bool:
    """Whether the parameter of this full name belongs to a stack of routed experts, adapters included."""
    return f".{EXPERTS.rpartition('.')[2]}." in name


def expert_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The stacks of routed experts of `model` by the number of their layer, in order."""
    found = {}
    for name, module in model.named_modules():
        # by an attribute: the class may come from the installed package or from remote code
        if "logical_shapes" in module.__dict__:
            found[int(re.search(r"(?:^|\.)layers\.(\d+)\.", name)[1])] = module
    return found
