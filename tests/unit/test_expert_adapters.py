"""Adapters of shared-out experts: the values at the start, and the way to one file and back, at every degree."""

import math

import pytest
import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.training import lora
from modeling_latentmoe.training.expert_adapters import (
    held_experts,
    initialise_adapters,
    merge_factor,
    slice_adapter,
    slice_factor,
)
from modeling_latentmoe.training.mesh import is_expert
from modeling_latentmoe.training.streaming import restrict_experts

EXPERTS = 16


def adapted(ep_rank: int, ep_degree: int) -> nn.Module:
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False))
    restrict_experts(model, ep_rank, ep_degree)
    torch.manual_seed(1)
    model = lora.add_adapter(model, r=4, lora_alpha=8, expert_rank=2)
    initialise_adapters(model, seed=3)
    return model


def factors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_initial_values_do_not_depend_on_the_degree(degree: int) -> None:
    """Dense adapters too, which PEFT draws from the global random state."""
    whole = factors(adapted(0, 1))
    parts = [adapted(rank, degree) for rank in range(degree)]
    for name, value in whole.items():
        shares = [factors(part)[name] for part in parts]
        if is_expert(name):
            assert torch.equal(merge_factor(name, shares, EXPERTS // degree), value), name
        else:
            assert all(torch.equal(share, value) for share in shares), name


def test_initial_values_are_those_of_peft_in_distribution() -> None:
    """And no two experts, layers or seeds share them."""
    model = adapted(0, 1)
    firsts = {name: value for name, value in factors(model).items() if is_expert(name) and "lora_A" in name}
    assert len(firsts) == 2 * 7
    for value in firsts.values():
        bound = 1 / math.sqrt(value.shape[1])
        assert 0.95 * bound < value.abs().max() <= bound
        assert value.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    rows = torch.cat([value[:, :32] for value in firsts.values()])
    assert len(rows.unique(dim=0)) == len(rows)
    assert all((value == 0).all() for name, value in factors(model).items() if "lora_B" in name)
    before = {name: value.clone() for name, value in firsts.items()}
    initialise_adapters(model, seed=4)
    assert not any(torch.equal(before[name], value) for name, value in firsts.items())


@pytest.mark.parametrize("name", ["experts.lora_A.weight", "experts.lora_B.weight"])
def test_layout_of_a_share(name: str) -> None:
    """PEFT's layout, written out: A expert by expert, B with the expert as the faster index."""
    experts, r, width = 6, 2, 3
    by_expert = torch.arange(experts * r * width).view(experts, r, width)
    whole = by_expert.flatten(0, 1) if "lora_A" in name else by_expert.permute(2, 1, 0).flatten(1)
    shares = [slice_factor(name, whole, range(first, first + 2), experts) for first in (0, 2, 4)]
    for rank, share in enumerate(shares):
        mine = by_expert[2 * rank : 2 * rank + 2]
        assert torch.equal(share, mine.flatten(0, 1) if "lora_A" in name else mine.permute(2, 1, 0).flatten(1))
    assert torch.equal(merge_factor(name, shares, 2), whole)


@pytest.mark.slow
def test_a_file_is_loaded_by_shares() -> None:
    """Public report 92: an adapter made at one degree goes onto another; every share has its experts' values."""
    whole = adapted(0, 1)
    with torch.no_grad():
        for param in factors(whole).values():
            param.normal_()
    file = get_peft_model_state_dict(whole)
    parts = []
    for rank in range(4):
        part = adapted(rank, 4)
        result = set_peft_model_state_dict(part, slice_adapter(part, file))
        assert not result.unexpected_keys
        assert held_experts(part) == range(4 * rank, 4 * rank + 4)
        parts.append(part)
    for name, value in factors(whole).items():
        shares = [factors(part)[name] for part in parts]
        assert torch.equal(merge_factor(name, shares, 4) if is_expert(name) else shares[3], value)
