"""Balancing on several gloo processes, against one process that has all tokens.

Legend: M MoE layers, T tokens, E experts.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import spawn
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.configuration_latentmoe import LatentMoETextConfig
from modeling_latentmoe.moe import Router
from modeling_latentmoe.training.balance import QuantileBalancing, auxiliary_loss, expert_shares
from modeling_latentmoe.training.mesh import is_expert
from modeling_latentmoe.training.router_bias import routers

pytestmark = pytest.mark.dist

TOKENS = 230


class Routers(nn.Module):
    """Nothing but the routers of a model."""

    def __init__(self, experts: int):
        super().__init__()
        values = LatentMoEConfig.tiny(vision=False).to_dict()["text_config"]
        self.config = LatentMoETextConfig(**values | {"num_experts": experts, "num_experts_per_token": 1})
        self.layers = nn.ModuleList(Router(self.config) for _ in range(2))
        torch.manual_seed(0)
        for router in self.layers:
            nn.init.normal_(router.weight)
            nn.init.normal_(router.e_score_correction_bias, std=0.1)


def part(rank: int, world: int) -> slice:
    """The tokens of a process: uneven, and none for the last one of three."""
    borders = {1: [0, TOKENS], 2: [0, 31, TOKENS], 3: [0, 31, TOKENS, TOKENS]}[world]
    return slice(borders[rank], borders[rank + 1])


def balanced(rank: int, world: int, experts: int, sharded: bool) -> dict[str, Tensor]:
    """The biases after three steps, as this process sees them in its whole model."""
    model = Routers(experts)
    if sharded:
        fully_shard(model)
    balancing = QuantileBalancing(model)
    for step in range(3):
        torch.manual_seed(step)
        logits = torch.randn(2, TOKENS, experts) + torch.linspace(-1, 1, experts)
        mine = logits[:, part(rank, world)]
        # two micro-batches, of which one has no tokens at times
        for piece in (mine[:, :40], mine[:, 40:]):
            balancing.observe(list(piece))
        balancing.update(torch.zeros(0))
    found = {}
    for name, parameter in model.named_parameters():
        if name in routers(model):
            assert isinstance(parameter, DTensor) == (sharded and dist.is_initialized())
            assert not parameter.requires_grad
            found[name] = parameter.full_tensor() if sharded else parameter.detach()
    assert found.keys() == balancing.biases().keys() and len(found) == 2
    for name, bias in balancing.biases().items():
        assert torch.equal(bias, found[name])
    return found


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, Tensor]]:
    return {experts: balanced(0, 1, experts, sharded=False) for experts in (4, 7)}


def worlds(rank: int, world: int) -> list[dict[str, Tensor]]:
    return [balanced(rank, world, experts, sharded) for experts in (4, 7) for sharded in (False, True)]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_biases_are_those_of_one_process(tmp_path: Path, alone: dict, world: int) -> None:
    """To the bit, on every process, with replicated routers and with routers that FSDP2 shards unevenly: 7 experts
    over 2 or 3 processes, 4 over 3, where the last one holds nothing."""
    for ours in spawn(tmp_path / "world", world, worlds):
        for found, experts in zip(ours, (4, 4, 7, 7), strict=True):
            assert found.keys() == alone[experts].keys()
            assert all(torch.equal(found[name], bias) for name, bias in alone[experts].items())


def losses(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """The part of the loss and of the gradient to a shared shift of the logits, by the loss rule, for two steps."""
    config, shift, results = Routers(7).config, torch.zeros(7, requires_grad=True), []
    shares = expert_shares(torch.zeros(2, 7, dtype=torch.int64))
    for step in range(2):
        torch.manual_seed(step)
        logits = (torch.randn(2, TOKENS, 7) + torch.linspace(-1, 1, 7))[:, part(rank, world)]
        loss = auxiliary_loss(list(logits + shift), shares, config) * world / TOKENS
        (grad,) = torch.autograd.grad(loss, shift)
        for value in (loss.detach_(), grad) if world > 1 else ():
            dist.all_reduce(value)
            value /= world
        results.append((loss.detach(), grad))
        load = torch.stack([torch.bincount(layer.argmax(-1), minlength=7) for layer in logits])
        if world > 1:
            dist.all_reduce(load)
        shares = expert_shares(load)
    return results


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_auxiliary_loss_is_that_of_one_process(tmp_path: Path, world: int) -> None:
    expected = losses(0, 1)
    assert expected[0][0].item() == pytest.approx(1) and expected[1][0].item() > 1.05
    assert expected[1][1].abs().max() > 0.01
    for ours in spawn(tmp_path / "world", world, losses):
        for found, wanted in zip(ours, expected, strict=True):
            torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=0)
            torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-6)


def train(rank: int, world: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Biases and expert loads of a model under FSDP2: training steps, an evaluation between them, a resumed run."""
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False, experts=16)).train()
    for router in routers(model).values():
        nn.init.normal_(router.e_score_correction_bias, std=0.1)
        nn.init.normal_(router.weight, std=0.1)
    model.requires_grad_(False)
    model.language_model.lm_head.weight.requires_grad_(True)
    if world > 1:
        experts = {param for name, param in model.named_parameters() if is_expert(name)}
        for layer in model.language_model.model.layers:
            fully_shard(layer, ignored_params=experts)
        fully_shard(model, ignored_params=experts)
    balancing, loads = QuantileBalancing(model), []
    ids = torch.randint(0, 250, (6, 50), generator=torch.Generator().manual_seed(1))
    mine = ids[rank * 6 // world : (rank + 1) * 6 // world]
    for _ in range(3):
        output = model.train()(input_ids=mine, output_router_logits=True)
        loads.append(output.expert_load)
        balancing.observe(output.router_logits)
        output.logits.square().mean().backward()
        balancing.update(torch.zeros(0))
        with torch.no_grad():
            model.eval()(input_ids=mine[:1])
    learned = balancing.biases()
    balancing.load({name: torch.zeros(16) for name in learned})
    balancing.load(learned)
    output = model.train()(input_ids=mine)
    output.logits.square().mean().backward()
    return balancing.biases(), torch.stack(loads), output.expert_load


def test_the_model_under_fsdp_routes_by_its_new_biases(tmp_path: Path) -> None:
    """Loads of each step are those of one process, which they would not be if FSDP2 threw a new bias away.

    Up to tokens at the edge of a choice: products of other sizes round differently.
    """
    biases, loads, last = train(0, 1)
    assert (loads[0] - loads[1]).abs().max() > 30 and (loads[-1] - last).abs().max() > 4
    found = spawn(tmp_path / "world", 2, train)
    for name, bias in biases.items():
        assert torch.equal(found[0][0][name], found[1][0][name])
        assert (found[0][0][name] - bias).abs().max() < 1e-3
    assert (sum(result[1] for result in found) - loads).abs().max() <= 2
    assert (sum(result[2] for result in found) - last).abs().max() <= 2
