"""Activation checkpointing: the same gradients, and decisions (router and indexer top-k) are never made again."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .models import mixed_config, random_model


class CountTopk(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.topk.default:
            self.calls += 1
        return func(*args, **(kwargs or {}))


def grads(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [False, True])
def test_same_gradients_and_no_second_decision(packed):
    model = random_model(mixed_config("kdks")).train()
    x = torch.randint(0, 250, (1, 30), generator=torch.Generator().manual_seed(0))
    row = {"input_ids": x, "labels": x} | ({"cu_seqlens": torch.tensor([0, 13, 30])} if packed else {})
    model(**row).loss.backward()
    expected = grads(model)
    model.zero_grad()

    model.gradient_checkpointing_enable()
    with CountTopk() as count:
        loss = model(**row).loss
        forward = count.calls
        loss.backward()
    # Three MoE routers, and one indexer that needs two (its threshold, then the positions).
    assert forward == 3 + 2
    assert count.calls == forward
    actual = grads(model)
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(actual[name], grad), name


def test_ties_and_a_perturbed_recomputation_keep_the_graph():
    """Identical rows make every router choice a tie; the recomputed stream is moved by rounding noise."""
    model = random_model(mixed_config("kdks")).train()
    model.gradient_checkpointing_enable()
    x = torch.full((2, 24), 7)
    layer = model.language_model.model.layers[1].input_layernorm
    noise = [1.0]
    layer.register_forward_hook(lambda _, args, out: out * noise[0])
    loss = model(input_ids=x, labels=x).loss
    noise[0] = 1 + 2**-23
    loss.backward()
    assert all(g.isfinite().all() for g in grads(model).values())


def test_reentrant_checkpointing_is_refused():
    model = random_model(mixed_config("k"))
    with pytest.raises(ValueError, match="use_reentrant: must be False"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


@torch.no_grad()
def test_checkpointing_model_still_generates_in_training_mode():
    model = random_model(mixed_config("kdks"))
    common = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    x = torch.randint(0, 250, (1, 9))
    expected = model.generate(input_ids=x, **common)
    model.gradient_checkpointing_enable()
    assert torch.equal(model.train().generate(input_ids=x, **common), expected)


def test_a_cache_under_recomputation_is_refused():
    model = random_model(mixed_config("k")).train()
    model.gradient_checkpointing_enable()
    x = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="gradient checkpointing cannot fill a cache"):
        model(input_ids=x, use_cache=True)
