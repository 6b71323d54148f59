"""The grid of ranks: who holds which experts, and what cannot work."""

import pytest
import torch.distributed as dist

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.training.layout import fake_process_group
from modeling_latentmoe.training.mesh import build_mesh, check_layout, is_expert, owned_experts, rank_map


@pytest.mark.parametrize(
    ("world", "ep", "experts", "message"),
    [
        (8, 3, 16, "--ep 3 does not divide the 8 processes"),
        (6, 3, 16, "--ep 3 does not divide the 16 experts"),
        (8, 16, 16, "--ep 16 does not divide the 8 processes"),
        (2, 2, 0, "--ep 2: the model has no routed experts"),
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


@pytest.mark.parametrize(
    ("world", "ep", "expected"),
    [
        (
            128,
            64,
            [
                "ranks 0 to 63: efsdp 0, ep 0 to 63, experts 0 to 895 of every layer, 14 each",
                "ranks 64 to 127: efsdp 1, ep 0 to 63, experts 0 to 895 of every layer, 14 each",
            ],
        ),
        (
            32,
            2,
            [
                "ranks 0 to 30 in steps of 2: efsdp 0 to 15, ep 0, experts 0 to 447 of every layer",
                "ranks 1 to 31 in steps of 2: efsdp 0 to 15, ep 1, experts 448 to 895 of every layer",
            ],
        ),
        (128, 1, ["ranks 0 to 127: efsdp 0 to 127, ep 0, experts 0 to 895 of every layer"]),
    ],
)
def test_rank_map_of_many(world: int, ep: int, expected: list[str]) -> None:
    """Rows or columns, whichever are fewer."""
    assert rank_map(LatentMoEConfig.tiny(experts=896), world, ep).splitlines() == expected


def test_rank_map_without_experts() -> None:
    assert rank_map(LatentMoEConfig.tiny(experts=0), 17, 1) == "ranks 0 to 16: efsdp 0 to 16, ep 0, no experts"


@pytest.mark.parametrize("rank", [0, 63, 64, 127])
def test_mesh_of_128_ranks(rank: int) -> None:
    """EP 64 x efsdp 2: groups are neighbours, columns hold the same experts; both maps agree with torch's mesh."""
    with fake_process_group(rank, 128):
        mesh = build_mesh(128, 64, "cpu")
        assert mesh.mesh_dim_names == ("efsdp", "ep") and mesh.shape == (2, 64)
        assert tuple(mesh.get_coordinate()) == (rank // 64, rank % 64)
        first = rank // 64 * 64
        assert dist.get_process_group_ranks(mesh.get_group("ep")) == list(range(first, first + 64))
        assert dist.get_process_group_ranks(mesh.get_group("efsdp")) == [rank % 64, rank % 64 + 64]


@pytest.mark.parametrize("rank", range(8))
def test_rank_map_is_that_of_the_mesh(rank: int) -> None:
    """Public report 58."""
    with fake_process_group(rank, 8):
        mesh = build_mesh(8, 4, "cpu")
        place = f"rank {rank}: efsdp {mesh.get_local_rank('efsdp')}, ep {mesh.get_local_rank('ep')}, experts"
        assert rank_map(LatentMoEConfig.tiny(), 8, 4).splitlines()[rank].startswith(place)


def test_shares_are_slices_in_order() -> None:
    assert [owned_experts(rank, 4, 16) for rank in range(4)] == [range(0, 4), range(4, 8), range(8, 12), range(12, 16)]


def test_only_routed_experts_are_experts() -> None:
    names = [name for name, _ in LatentMoEForConditionalGeneration(LatentMoEConfig.tiny()).named_parameters()]
    chosen = {name.rpartition(".")[2] for name in names if is_expert(name)}
    assert chosen == {"gate_up_proj", "gate_up_scale", "down_proj", "down_scale"}
