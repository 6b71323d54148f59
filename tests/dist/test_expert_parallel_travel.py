"""The ways in which tokens can travel to their experts: in parts, over nodes, compressed."""

import gc
import random
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import mean
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from processes import spawn
from recorder import Recorder
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.moe import LatentMoE, LocalExchange
from modeling_latentmoe.training import lora
from modeling_latentmoe.training.expert_parallel import (
    AllToAll,
    Overlapped,
    Travel,
    check_travel,
    expert_parallel,
    rows_per_token,
    saving_line,
)
from modeling_latentmoe.training.links import Direct, make_nodes
from modeling_latentmoe.training.loading import checkpoint_activations
from modeling_latentmoe.training.mesh import build_mesh, owned_experts
from modeling_latentmoe.training.payload import decode, encode
from modeling_latentmoe.training.streaming import restrict_experts

pytestmark = pytest.mark.dist

EXPERTS, SLOTS, WIDTH = 20, 4, 8


def routed(
    exchange: AllToAll, experts: range, inputs: tuple[Tensor, Tensor, Tensor], cotangent: Tensor
) -> list[Tensor]:
    """Result and both gradients where expert e returns (e + 1) x."""
    x, ids, weights = (value.clone() for value in inputs)
    x.requires_grad_()
    weights.requires_grad_()

    def forward(x_RL: Tensor, ids_RS: Tensor, weights_RS: Tensor, _: dict) -> Tensor:
        held = (ids_RS >= experts.start) & (ids_RS < experts.stop)
        return (weights_RS * (ids_RS + 1) * held).sum(1, keepdim=True) * x_RL

    sent = exchange.dispatch(x, ids, weights)
    run = partial(exchange.experts_on_parts, forward) if isinstance(exchange, Overlapped) else forward
    y = exchange.combine(run(sent.x_RL, sent.ids_RS, sent.weights_RS, {}), sent)
    y.backward(cotangent)
    return [y.detach(), x.grad, weights.grad]


def all_ways(rank: int, world: int, rounds: int) -> None:
    """Rounds in which every way gives the same bits as the direct one, and that the right ones."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("efsdp", "ep"))
    direct, nodes = Direct(mesh.get_group("ep")), make_nodes(mesh, 2)
    assert (nodes.rank, nodes.ranks) == (direct.rank, direct.ranks) == (rank, world)
    ways = [AllToAll(nodes, EXPERTS)]
    ways += [Overlapped(link, EXPERTS, travel=Travel(chunks=n)) for link, n in ((direct, 1), (direct, 3), (nodes, 2))]
    for step in range(rounds):
        dice = random.Random(step * 1000 + rank)
        torch.manual_seed(step * 1000 + rank)
        tokens = dice.choice([0, 1, 2, 5, 17])
        # in some rounds every token goes to few ranks
        allowed = torch.randperm(EXPERTS)[: dice.choice([SLOTS, EXPERTS])]
        ids = allowed[torch.rand(tokens, len(allowed)).topk(SLOTS).indices]
        # odd thirds: another order of summation would give other bits
        inputs = torch.randn(tokens, WIDTH) / 3, ids, torch.rand(tokens, SLOTS)
        cotangent = torch.randn(tokens, WIDTH)
        owned = owned_experts(rank, world, EXPERTS)
        expected = routed(AllToAll(direct, EXPERTS), owned, inputs, cotangent)
        torch.testing.assert_close(expected[0], (inputs[2] * (ids + 1)).sum(1, keepdim=True) * inputs[0])
        for exchange in ways:
            for ours, theirs in zip(routed(exchange, owned, inputs, cotangent), expected, strict=True):
                assert torch.equal(ours, theirs), (step, exchange.link, exchange.travel)


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_all_ways_give_the_same_bits(tmp_path: Path, rounds: int) -> None:
    """Four processes as two nodes of two; in one part, in several, more of them than tokens."""
    spawn(tmp_path / "world", 4, all_ways, rounds)


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_layer_in_parts_is_the_layer(alone: dist.ProcessGroup) -> None:
    """moe.py does not know that its tokens travel in parts; one of them is empty, as tokens that are not valid are."""
    results = []
    for parts in (0, 3):
        torch.manual_seed(0)
        layer = LatentMoE(LatentMoEConfig.tiny(vision=False).text_config)
        for param in layer.parameters():
            if param.is_floating_point():
                torch.nn.init.normal_(param, std=0.3)
        layer.experts.reset_parameters(0.3)
        layer.double()
        assert isinstance(layer.exchange, LocalExchange)
        if parts:
            layer.exchange = Overlapped(Direct(alone), layer.config.num_experts, travel=Travel(chunks=parts))
            layer.exchange.run_on_parts(layer.experts)
        x = torch.randn(2, 4, 64, dtype=torch.float64, requires_grad=True)
        y, _, load = layer(x, torch.arange(8).view(2, 4) % 2 > 0)
        y.square().sum().backward()
        with torch.no_grad():
            assert torch.equal(layer(x, torch.arange(8).view(2, 4) % 2 > 0)[0], y)
        results.append((y, load, x.grad, layer.gate.weight.grad, layer.routed_expert_down_proj.weight.grad))
    for whole, in_parts in zip(*results, strict=True):
        torch.testing.assert_close(in_parts, whole, rtol=1e-12, atol=1e-12)


# --- the model ---


def build(rank: int, world: int, travel: Travel, mode: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False)).train()
    restrict_experts(model, rank, world)
    model = lora.add_adapter(model, r=4, lora_alpha=8, expert_rank=2).double()
    torch.manual_seed(rank)
    for name, param in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(param, std=0.1)
    expert_parallel(model, build_mesh(world, world, "cpu"), travel=travel)
    if mode != "none":
        checkpoint_activations(model.base_model.model, selective=mode == "selective")
    return model


def model_ways(rank: int, world: int, ways: list[Travel]) -> list[float]:
    """Largest relative change of loss and gradients, of every way and mode of recomputation, against one part, direct
    travel and no recomputation in the same forms."""
    changes, expected = [], {}
    ids = torch.randint(0, 250, (1, 9 + 8 * rank), generator=torch.Generator().manual_seed(rank))
    for mode in ("none", "full", "selective"):
        for travel in ways:
            model = build(rank, world, travel, mode)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            results = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
            results["loss"] = loss.detach()
            right = expected.setdefault((travel.rows, travel.sums), results)
            assert results.keys() == right.keys()
            changes += [((results[name] - value).norm() / value.norm()).item() for name, value in right.items()]
    losses = [results["loss"].item() for results in expected.values()]
    assert max(losses) - min(losses) < 0.02 * max(losses)
    return changes


@pytest.mark.slow
def test_the_model_in_all_ways(tmp_path: Path) -> None:
    """With and without recomputation, with and without saved results; in parts over nodes as well."""
    ways = [Travel(), Travel(chunks=1), Travel(chunks=3)]
    ways += [Travel(rows="int8", sums="bf16"), Travel(chunks=2, rows="int8", sums="bf16")]
    for changes in spawn(tmp_path / "two", 2, model_ways, ways):
        assert max(changes) < 1e-9
    for changes in spawn(tmp_path / "four", 4, model_ways, [Travel(), Travel(chunks=2, node_size=2)]):
        assert max(changes) < 1e-9


def left_behind(rank: int, world: int, travel: Travel, modes: tuple[str, ...]) -> list[tuple[int, list[str]]]:
    """After a step and without the garbage collector: bytes that the step made, parameters of the dropped model."""
    found = []
    for mode in modes:
        model = build(rank, world, travel, mode)
        parameters = {name: ref(param) for name, param in model.named_parameters()}
        gc.collect()
        gc.disable()
        with Recorder() as recorder:
            model(input_ids=torch.arange(9 + rank).unsqueeze(0)).logits.square().sum().backward()
        assert recorder.live_bytes() > 0
        del model
        found.append((recorder.live_bytes(), [name for name, param in parameters.items() if param() is not None]))
        gc.enable()
    return found


@pytest.mark.parametrize("travel", [Travel(), Travel(chunks=2, rows="int8", sums="bf16")])
def test_a_dropped_model_is_freed(tmp_path: Path, travel: Travel) -> None:
    """At once: what waits for the garbage collector takes the next model's place on the device."""
    modes = "none", "selective"
    assert spawn(tmp_path / "world", 2, left_behind, travel, modes) == [[(0, [])] * len(modes)] * 2


# --- switches, forms, figures ---


@pytest.mark.parametrize(
    ("travel", "degree", "match"),
    [
        (Travel(chunks=2), 1, "--ep_chunks 2: at --ep 1"),
        (Travel(rows="fp8"), 1, "--ep_rows fp8: at --ep 1"),
        (Travel(sums="bf16"), 1, "--ep_sums bf16: at --ep 1"),
        (Travel(node_size=2), 1, "--ep_node_size 2: at --ep 1"),
        (Travel(chunks=-1), 2, "--ep_chunks -1"),
        (Travel(rows="bf16"), 2, "--ep_rows bf16"),
        (Travel(node_size=3), 8, "--ep_node_size 3 must divide --ep 8"),
        (Travel(node_size=8), 8, "--ep_node_size 8"),
        (Travel(node_size=1), 8, "--ep_node_size 1"),
    ],
)
def test_what_cannot_be_is_refused(travel: Travel, degree: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_travel(travel, degree)


def test_what_can_be_is_accepted() -> None:
    check_travel(Travel(), 1)
    check_travel(Travel(chunks=4, rows="int8", sums="fp8", node_size=4), 8)


@pytest.mark.parametrize(("form", "limit"), [("bf16", 2**-7), ("int8", 1 / 127), ("fp8", 2**-3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_forms_round_by_row(form: str, limit: float, dtype: torch.dtype) -> None:
    """The largest value of every row is kept, others are off by half a step of the form at most."""
    torch.manual_seed(0)
    # rows of very different sizes, a width that is no multiple of 16
    values = (torch.randn(50, 30) * torch.logspace(-20, 20, 50).unsqueeze(1)).to(dtype)
    back = decode(encode(values, form), form, 30, torch.promote_types(dtype, torch.float32))
    largest = values.double().abs().amax(1, keepdim=True)
    error = (back.double() - values.double()).abs() / (largest if form == "int8" else values.double().abs())
    # below the smallest value of fp8 there is an absolute error
    floor = 2**-9 / 448 if form == "fp8" else 0
    allowed = limit / 2 + floor * largest / values.double().abs()
    assert (error <= allowed * 1.01).all()
    kept = back.double().abs().amax(1, keepdim=True)
    torch.testing.assert_close(kept, largest, rtol=2**-8, atol=0)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_forms_keep_zeros_and_do_not_hide_what_is_not_finite(form: str) -> None:
    values = torch.tensor([[0.0, 0.0], [1.0, float("nan")], [float("inf"), 1.0], [3.0, -3.0]])
    back = decode(encode(values, form), form, 2, torch.float32)
    assert torch.equal(back[0], values[0]) and torch.equal(back[3], values[3])
    assert not back[1].isfinite().any() and not back[2].isfinite().all()
    assert decode(encode(torch.empty(0, 2), form), form, 2, torch.float32).shape == (0, 2)


def test_expected_rows_are_those_of_all_choices() -> None:
    """6 experts on 3 ranks, 3 chosen: counted."""
    counted = mean(len({expert // 2 for expert in chosen}) for chosen in combinations(range(6), 3))
    assert rows_per_token(6, 3, 3) == pytest.approx(counted)
    assert rows_per_token(896, 16, 1) == 1
    savings = [16 / rows_per_token(896, 16, ranks) for ranks in (2, 8, 64)]
    assert savings == [pytest.approx(8.0, rel=1e-3), pytest.approx(2.27, rel=1e-2), pytest.approx(1.12, rel=1e-2)]
    assert saving_line(896, 16, 8).startswith("tokens travel as 7.07 rows each, not 16: 2.3x less")
