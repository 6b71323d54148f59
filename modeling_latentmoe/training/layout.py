"""What every rank of a launch holds, in bytes: computed, and seen on a fake process group without devices or weights.

Everything but the experts is "dense": it is divided over the shards of each copy, as FSDP2 does. (In memory FSDP2 pads
the shards of a parameter to the size of the first one, which is not counted.)
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.training.expert_adapters import held_experts
from modeling_latentmoe.training.lora import add_adapter
from modeling_latentmoe.training.mesh import build_mesh, is_expert, owned_experts
from modeling_latentmoe.training.streaming import restrict_experts


class Share(NamedTuple):
    """One rank: its place in the mesh, its experts of every layer, and the bytes that it holds of the model.

    expert_bytes: frozen stacks of experts, packed or not, with their scales. The adapters are fp32.
    """

    rank: int
    efsdp: int
    ep: int
    experts: range
    expert_bytes: int
    expert_adapter_bytes: int
    dense_bytes: int
    dense_adapter_bytes: int

    @property
    def gradient_bytes(self) -> int:
        return self.expert_adapter_bytes + self.dense_adapter_bytes

    @property
    def moment_bytes(self) -> int:
        """Of AdamW, two for each trained weight."""
        return 2 * self.gradient_bytes

    @property
    def total_bytes(self) -> int:
        """Without activations, and without the layers that FSDP gathers for a moment.

        Adapters count twice: their last good values are kept.
        """
        return self.expert_bytes + self.dense_bytes + 3 * self.gradient_bytes + self.moment_bytes


class Adapter(NamedTuple):
    """Ranks of the factors: of dense layers, and of every expert."""

    r: int
    expert_rank: int


def build_share(
    config: LatentMoEConfig, dtype: torch.dtype, adapter: Adapter, ep_rank: int, ep_degree: int
) -> PeftModel:
    """The model with the adapters and the share of experts of rank `ep_rank`, on the meta device."""
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(config).to(dtype)
        restrict_experts(model, ep_rank, ep_degree)
        return add_adapter(model, **adapter._asdict(), lora_alpha=1, train_projector=True)


def shares(model: nn.Module, world_size: int, ep_degree: int, copies: int = 1) -> Iterator[Share]:
    """The share of every rank, computed.

    model: with one rank's share of the experts, all of them are equal; it may be on the meta device. copies: how often
    everything but the experts is held, by as many groups of neighbours.
    """
    shards, experts = world_size // copies, model.config.get_text_config().num_experts or 0
    for rank in range(world_size):
        efsdp, ep = divmod(rank, ep_degree)
        place = rank, efsdp, ep, owned_experts(ep, ep_degree, experts)
        yield _share(model, place, lambda param, shard=rank % shards: _part(param, shard, shards))


def fake_share(
    config: LatentMoEConfig,
    dtype: torch.dtype,
    adapter: Adapter,
    rank: int,
    world_size: int,
    ep_degree: int,
    copies: int = 1,
) -> Share:
    """The share of one rank, as torch makes it: real meshes on a fake process group, and FSDP2 on the meta device."""
    with fake_process_group(rank, world_size):
        mesh = build_mesh(world_size, ep_degree, "cpu")
        efsdp, ep = mesh.get_coordinate()
        model = build_share(config, dtype, adapter, ep, ep_degree)
        if copies < world_size:
            axes = ("dp_replicate", "dp_shard")
            dense_mesh = init_device_mesh("cpu", (copies, world_size // copies), mesh_dim_names=axes)
            shard_dense(model, dense_mesh if copies > 1 else dense_mesh["dp_shard"])
        return _share(model, (rank, efsdp, ep, held_experts(model)), _held)


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """This process as rank `rank` of `world_size`, of which no other one exists: collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_dense(model: PeftModel, mesh: DeviceMesh) -> None:
    """FSDP2 with the units that Accelerate's TRANSFORMER_BASED_WRAP makes, and without the experts."""
    experts = {param for name, param in model.named_parameters() if is_expert(name)}
    units = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, ignored_params=experts)


def check_complete(found: Iterable[Share], experts: int, dense_bytes: int, copies: int = 1) -> None:
    """ValueError unless every row of the mesh holds every expert once, and all ranks `copies` of the dense weights.

    dense_bytes: of the model, adapters included.
    """
    held: dict[int, Counter[int]] = {}
    total = 0
    for share in found:
        held.setdefault(share.efsdp, Counter()).update(share.experts)
        total += share.dense_bytes + share.dense_adapter_bytes
    for row, counts in held.items():
        wrong = [expert for expert in counts.keys() | range(experts) if counts[expert] != (expert < experts)]
        if wrong:
            raise ValueError(f"row {row} of the mesh holds expert {wrong[0]} of every layer {counts[wrong[0]]} times")
    if total != copies * dense_bytes:
        raise ValueError(f"the ranks hold {total} bytes of dense weights, but {copies} x {dense_bytes} are needed")


def dense_bytes(model: nn.Module) -> int:
    """Bytes of everything but the experts, adapters included."""
    return sum(param.nbytes for name, param in model.named_parameters() if not is_expert(name))


def _share(model: nn.Module, place: tuple[int, int, int, range], dense_part: Callable[[Tensor], int]) -> Share:
    held: Counter[tuple[bool, bool]] = Counter()
    for name, param in model.named_parameters():
        held[is_expert(name), param.requires_grad] += param.nbytes if is_expert(name) else dense_part(param)
    return Share(*place, held[True, False], held[True, True], held[False, False], held[False, True])


def _held(param: Tensor) -> int:
    return param.to_local().nbytes if isinstance(param, DTensor) else param.nbytes


def _part(param: Tensor, shard: int, shards: int) -> int:
    """Bytes of one shard: equal parts of the first axis, except the last ones."""
    if not param.ndim:
        return param.nbytes
    rows = -(-len(param) // shards)
    return max(0, min(rows, len(param) - shard * rows)) * (param.nbytes // len(param))
