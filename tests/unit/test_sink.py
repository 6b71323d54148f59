"""Learnable sinks: a logit per head that takes probability and gives no value.

Legend: B batch, T tokens, D model width, N heads.
"""

import pytest
import torch
from transformers import HYV4Config
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Attention

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration

from .models import close, mixed_config, random_model
from .test_indexer_parity import DIMS, INDEX, TOPK, D, dense_twin, make_layer, rows, run_independent

SINK = "learnable_sink_param"


def hy_v4(layer) -> HYV4Attention:
    fields = DIMS | INDEX | {"num_hidden_layers": 1, "indexer_types": ["full"], "rms_norm_eps": 1e-6}
    module = HYV4Attention(HYV4Config(**fields, attn_implementation="eager"), layer_idx=0)
    state = layer.state_dict()
    state["gate_proj.weight"], state["sinks"] = state.pop("g_proj.weight"), state.pop(SINK)
    module.load_state_dict(state)
    return module


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("T", [1, TOPK, TOPK + 1, 40])
def test_equals_hy_v4(T: int, attention: str) -> None:
    """Dense and sparse, outputs and gradients of inputs and sinks."""
    for seed in range(3):
        layer = make_layer(attention=attention, seed=seed, learnable_sink=True)
        module, x_BTD = hy_v4(layer), torch.randn(2, T, D, requires_grad=True)
        documents = rows(2, T)
        got, _ = layer(x_BTD, documents)
        want = run_independent(module, x_BTD, documents.attention_mask_BTS)[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        factor = torch.randn_like(got)
        mine = torch.autograd.grad((got * factor).sum(), [x_BTD, layer.learnable_sink_param, layer.kv_b_proj.weight])
        theirs = torch.autograd.grad((want * factor).sum(), [x_BTD, module.sinks, module.kv_b_proj.weight])
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [TOPK, 30])
@torch.no_grad()
def test_minus_infinity_is_no_sink_and_zero_is_one(T: int) -> None:
    layer, x_BTD = make_layer(learnable_sink=True), torch.randn(1, T, D)
    weights = {name: value for name, value in layer.state_dict().items() if name != SINK}
    without = make_layer()
    without.load_state_dict(weights)
    assert SINK not in without.state_dict()
    want, _ = without(x_BTD, rows(1, T))
    layer.learnable_sink_param.fill_(-torch.inf)
    torch.testing.assert_close(layer(x_BTD, rows(1, T))[0], want, rtol=1e-6, atol=1e-7)
    layer.learnable_sink_param.zero_()
    assert (layer(x_BTD, rows(1, T))[0] - want).abs().max() > 1e-3


@torch.no_grad()
def test_dense_and_sparse_are_one_function_while_all_keys_are_chosen() -> None:
    layer, x_BTD = make_layer(learnable_sink=True).double(), torch.randn(1, 20, D, dtype=torch.float64)
    twin = dense_twin(layer)
    got, choice = layer(x_BTD, rows(1, 20))
    assert choice.index_Mk is not None
    torch.testing.assert_close(got[:, :TOPK], twin(x_BTD, rows(1, 20))[0][:, :TOPK], rtol=1e-10, atol=1e-11)


def test_sinks_stay_fp32_and_are_saved(tmp_path) -> None:
    model = random_model(mixed_config("kdms", learnable_sink=True))
    for name, parameter in model.named_parameters():
        if name.endswith(SINK):
            parameter.data.uniform_(-1, 1)
    model = model.to(torch.bfloat16)
    sinks = {name: x for name, x in model.state_dict().items() if name.endswith(SINK)}
    assert len(sinks) == 3 and all(x.dtype == torch.float32 for x in sinks.values())
    model.save_pretrained(tmp_path)
    assert LatentMoEConfig.from_pretrained(tmp_path).text_config.learnable_sink
    again = LatentMoEForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, x in sinks.items():
        assert torch.equal(again.state_dict()[name], x)


@torch.no_grad()
def test_a_model_with_sinks_in_pieces_equals_the_whole() -> None:
    model = random_model(mixed_config("kdms", learnable_sink=True))
    for name, parameter in model.named_parameters():
        if name.endswith(SINK):
            parameter.uniform_(-1, 1)
    ids = torch.randint(0, 250, (2, 20), generator=torch.Generator().manual_seed(1))
    whole, first = model(input_ids=ids, use_cache=False).logits, model(input_ids=ids[:, :12])
    pieces, cache = [first.logits], first.cache
    for t in range(12, 20):
        out = model(input_ids=ids[:, t : t + 1], cache=cache)
        pieces.append(out.logits)
    close(torch.cat(pieces, 1), whole)


def test_dense_checkpoints_have_no_sink() -> None:
    """Zero would change what they compute."""
    assert not LatentMoEConfig.kimi_k3().text_config.learnable_sink
    assert not [name for name in random_model(mixed_config("kdms")).state_dict() if name.endswith(SINK)]
