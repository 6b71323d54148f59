"""The grid of ranks: who holds which experts, what cannot work, and how many bytes each of 128 ranks holds."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.training import lora
from modeling_latentmoe.training.mesh import build_mesh, check_layout, is_expert, owned_experts, rank_map, shares
from modeling_latentmoe.training.streaming import restrict_experts


@pytest.mark.parametrize(
    ("world", "ep", "experts", "message"),
    [
        (8, 3, 16, "--ep 3 does not divide the 8 processes"),
        (6, 3, 16, "--ep 3 does not divide the 16 experts"),
        (8, 16, 16, "--ep 16 does not divide the 8 processes"),
        (2, 2, 0, "--ep 2 does not divide the 0 experts"),
        (2, 0, 16, "--ep 0 must be at least 1"),
    ],
)
def test_layouts_that_cannot_work(world: int, ep: int, experts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(LatentMoEConfig.tiny(experts=experts), world, ep)


def test_layouts_that_work() -> None:
    for world, ep in ((1, 1), (8, 1), (8, 8), (8, 2), (128, 16), (3, 1)):
        check_layout(LatentMoEConfig.tiny(), world, ep)
    check_layout(LatentMoEConfig.tiny(experts=0), 4, 1)


def test_rank_map_of_eight() -> None:
    """Public report 58: every rank's place, which the library shows so that nobody builds it by hand."""
    lines = rank_map(LatentMoEConfig.tiny(), 8, 4).splitlines()
    assert lines[0] == "rank 0: efsdp 0, ep 0, experts 0 to 3 of every layer"
    assert lines[6] == "rank 6: efsdp 1, ep 2, experts 8 to 11 of every layer"
    assert len(lines) == 8


@pytest.mark.parametrize("rank", [0, 63, 64, 127])
def test_mesh_of_128_ranks(rank: int) -> None:
    """EP 64 x efsdp 2: groups are neighbours, columns hold the same experts; the map agrees with torch's mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=128)
    try:
        mesh = build_mesh(128, 64, "cpu")
        assert mesh.mesh_dim_names == ("efsdp", "ep") and mesh.shape == (2, 64)
        first = rank // 64 * 64
        assert dist.get_process_group_ranks(mesh.get_group("ep")) == list(range(first, first + 64))
        assert dist.get_process_group_ranks(mesh.get_group("efsdp")) == [rank % 64, rank % 64 + 64]
        place = f"rank {rank}: efsdp {mesh.get_local_rank('efsdp')}, ep {mesh.get_local_rank('ep')},"
        assert place in rank_map(LatentMoEConfig.tiny(experts=896), 128, 64)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (6, 2), (128, 64)])
def test_bytes_of_every_rank(world: int, ep: int) -> None:
    """They add up: experts and their adapters once per column, everything else once."""
    config = LatentMoEConfig.tiny(experts=64)
    with torch.device("meta"):
        whole = lora.add_adapter(LatentMoEForConditionalGeneration(config), r=4, lora_alpha=8, expert_rank=2)
        part = LatentMoEForConditionalGeneration(config)
        restrict_experts(part, 0, ep)
        part = lora.add_adapter(part, r=4, lora_alpha=8, expert_rank=2)
    found = list(shares(part, world, ep))
    assert [share.rank for share in found] == list(range(world))
    expected = {True: 0, False: 0}
    for name, param in whole.named_parameters():
        expected[is_expert(name)] += param.nbytes
    assert sum(share.expert_bytes for share in found) == expected[True] * world // ep
    assert sum(share.dense_bytes for share in found) == expected[False]
    for column in range(world // ep):
        held = [expert for share in found if share.efsdp == column for expert in share.experts]
        assert held == list(range(64))


def test_shares_are_slices_in_order() -> None:
    assert [owned_experts(rank, 4, 16) for rank in range(4)] == [range(0, 4), range(4, 8), range(8, 12), range(12, 16)]


def test_only_routed_experts_are_experts() -> None:
    names = [name for name, _ in LatentMoEForConditionalGeneration(LatentMoEConfig.tiny()).named_parameters()]
    chosen = {name.rpartition(".")[2] for name in names if is_expert(name)}
    assert chosen == {"gate_up_proj", "gate_up_scale", "down_proj", "down_scale"}
