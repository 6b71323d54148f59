"""Activation checkpointing: the same gradients, and decisions (router and indexer top-k) are never made again."""

from functools import partial

import pytest
import torch
from recorder import Recorder
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from modeling_latentmoe.training.loading import checkpoint_activations

from .models import mixed_config, random_model

TOPK = torch.ops.aten.topk.default
# What attention is on CPU where keys and values have one width.
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ONE_WIDTH = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}


def grads(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def rounding_noise(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Every element as it is, or moved by about `scale` units in the last place."""
    return x * (1 + scale * torch.finfo(x.dtype).eps * torch.randint_like(x, -1, 2))


@pytest.mark.parametrize("packed", [False, True])
def test_same_gradients_less_memory_and_no_second_decision(packed):
    """Public report 60: gradients to the bit, no top-k in backward; selective, no attention either."""
    model = random_model(mixed_config("kdmks", **ONE_WIDTH)).train()
    x = torch.randint(0, 250, (1, 30), generator=torch.Generator().manual_seed(0))
    row = {"input_ids": x, "labels": x} | ({"cu_seqlens": torch.tensor([0, 13, 30])} if packed else {})
    runs = {}
    for mode in ("none", "full", "selective"):
        if mode != "none":
            checkpoint_activations(model, selective=mode == "selective")
        with Recorder() as recorder:
            loss = model(**row).loss
            kept, forward = recorder.live_bytes(), recorder.calls.copy()
            loss.backward()
        # Four MoE routers, and one indexer that needs two (its threshold, then the positions).
        assert forward[TOPK] == recorder.calls[TOPK] == 4 + 2
        # The layer that is dense, document by document, and once more.
        documents = 2 if packed else 1
        assert forward[ATTENTION] == documents
        assert recorder.calls[ATTENTION] == documents * (2 if mode == "full" else 1)
        runs[mode] = kept, grads(model)
        model.zero_grad()
    assert runs["full"][0] < runs["selective"][0] < runs["none"][0]
    expected = runs["none"][1]
    for mode in ("full", "selective"):
        actual = runs[mode][1]
        assert actual.keys() == expected.keys()
        for name, grad in expected.items():
            assert torch.equal(actual[name], grad), (mode, name)


def test_the_kept_memory_is_that_of_attention():
    """[B, N, T, H] outputs and [B, N, T] normalisers of two layers, no more."""
    model = random_model(mixed_config("mkm", **ONE_WIDTH)).train()
    kept = {}
    for selective in (False, True):
        checkpoint_activations(model, selective)
        with Recorder() as recorder:
            loss = model(input_ids=torch.arange(60).view(2, 30)).logits.sum()
            kept[selective] = recorder.live_bytes()
        del loss
    assert kept[True] - kept[False] == 2 * (2 * 2 * 30) * (24 + 1) * 4


@pytest.mark.parametrize("selective", [False, True])
def test_near_ties_and_a_perturbed_recomputation_keep_the_graph(selective):
    """Public report 61: every expert has a twin whose router weights differ by rounding noise; the recomputed stream is
    moved by such noise, another one at every element. The graph stays, and gradients move by no more than noise."""
    model = random_model(mixed_config("kdks")).train()
    for layer in model.language_model.model.layers[1:]:
        gate = layer.block_sparse_moe.gate
        gate.weight.data[4:] = rounding_noise(gate.weight.data[:4])
        gate.e_score_correction_bias.data.zero_()
    x = torch.full((2, 24), 7)
    model(input_ids=x, labels=x).loss.backward()
    expected = grads(model)
    model.zero_grad()
    checkpoint_activations(model, selective)
    layer = model.language_model.model.layers[1].input_layernorm
    # A recomputation has the operators of the forward, so the hook is there both times.
    scale = [0.0]
    layer.register_forward_hook(lambda _, args, out: rounding_noise(out, scale[0]))
    loss = model(input_ids=x, labels=x).loss
    scale[0] = 1.0
    loss.backward()
    actual = grads(model)
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(actual[name], grad, rtol=1e-3, atol=1e-5 * grad.abs().max().item()), name


def test_reentrant_checkpointing_is_refused():
    model = random_model(mixed_config("k"))
    with pytest.raises(ValueError, match="use_reentrant: must be False"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


def test_another_choice_of_what_to_keep_is_refused():
    """It would replace the one that keeps decisions."""
    model = random_model(mixed_config("k"))
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    with pytest.raises(ValueError, match=r"context_fn: not supported, .*saved_ops=\[\.\.\.\]"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"context_fn": contexts})


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
