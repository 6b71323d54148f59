"""Configuration: contradictory fields raise and are named; presets and partial models are what they say."""

import copy
import json

import pytest
import torch

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration, LatentMoETextConfig

from .models import mixed_config, random_model

FAULTS = [
    (
        {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [3, 4]}},
        "must partition the layers 1..8",
    ),
    (
        {"linear_attn_config": {"kda_layers": [0, 1, 2, 3, 4, 5, 6], "full_attn_layers": [7]}},
        "must partition",
    ),
    ({"linear_attn_config": {"num_heads": 4}}, "kda_layers and full_attn_layers"),
    ({"linear_attn_config": {"num_heads": 0}}, "linear_attn_config.num_heads"),
    ({"linear_attn_config": {"gate_lower_bound": 1.0}}, "gate_lower_bound"),
    ({"linear_attn_config": {"use_full_rank_gate": False}}, "use_full_rank_gate"),
    ({"num_experts_per_token": 17}, "num_experts_per_token: 17"),
    ({"num_experts_per_token": 0}, "num_experts_per_token: 0"),
    ({"moe_intermediate_size": 40}, "moe_intermediate_size: 40 is not a multiple of 32"),
    ({"routed_expert_hidden_size": 48}, "routed_expert_hidden_size: 48 is not a multiple of 32"),
    ({"hidden_act": "relu6"}, "hidden_act: unknown activation 'relu6'"),
    ({"moe_router_activation_func": "tanh"}, "moe_router_activation_func"),
    ({"topk_method": "greedy"}, "topk_method"),
    ({"num_expert_group": 3}, "num_expert_group"),
    ({"num_expert_group": 8, "topk_group": 1}, "num_experts_per_token: 4 > 2 experts"),
    ({"index_topk": None}, "indexer_types is set but index_topk is null"),
    ({"index_topk": 0}, "index_topk: 0, must be a positive integer"),
    ({"index_n_heads": -1}, "index_n_heads: -1, must be a positive integer"),
    ({"index_head_dim": None}, "index_head_dim: None, must be a positive integer"),
    ({"index_topk": 16, "index_kpool": 3}, "index_kpool: 3, must divide index_topk=16"),
    ({"index_kpool": 0}, "index_kpool: 0"),
    ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail: false is not supported"),
    # Public report 84: a rotary indexer that is read without its rotation, or with another, chooses wrong keys.
    ({"indexer_rope_interleave": True}, "indexer_rope_interleave: indexers with a rotary embedding"),
    ({"indexer_rope_interleave": False}, "indexer_rope_interleave: indexers with a rotary embedding"),
    ({"indexer_types": ["none"] * 7}, "indexer_types: 7 entries"),
    ({"indexer_types": ["full"] + ["none"] * 7}, r"indexer_types\[0\]: 'full' on a KDA layer"),
    (
        {"indexer_types": ["none"] * 5 + ["shared", "none", "full"]},
        r"indexer_types\[5\]: 'shared' but no earlier",
    ),
    ({"indexer_types": ["none"] * 5 + ["half", "none", "full"]}, r"indexer_types\[5\]: 'half'"),
    ({"layer_types": ["linear_attention"] * 8}, "layer_types contradicts"),
    ({"mla_use_nope": False}, "mla_use_nope"),
    ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    ({"num_key_value_heads": 2}, "num_key_value_heads"),
    ({"hidden_size": 0}, "hidden_size: 0"),
    ({"hidden_size": 128}, "vision_config.text_hidden_size: 64 differs from text_config.hidden_size=128"),
    ({"vocab_size": 200, "pad_token_id": 7}, r"media_placeholder_token_id: 265, must lie in 0\.\.vocab_size-1=199"),
    ({"vocab_size": 266, "pad_token_id": 7}, "pad_token_id: 267 is not null or below vocab_size=266"),
    ({"pad_token_id": 512}, r"pad_token_id: 512, must lie in 0\.\.vocab_size-1=511"),
    ({"pad_token_id": -1}, "pad_token_id: -1"),
    ({"moe_layer_freq": 0}, "moe_layer_freq: 0"),
    ({"num_expert_group": 0}, "num_expert_group: 0"),
    ({"topk_group": 0}, "topk_group: 0"),
    ({"num_shared_experts": -1}, "num_shared_experts: -1"),
    ({"first_k_dense_replace": -1}, "first_k_dense_replace: -1"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps: 0.0"),
    ({"activation_situ_beta": 0.0}, "activation_situ_beta: 0.0"),
    ({"rms_norm_eps": None}, "rms_norm_eps: None"),
    ({"num_hidden_layers": "3"}, "num_hidden_layers: '3'"),
    ({"linear_attn_config": {"kda_layers": 3, "full_attn_layers": []}}, "kda_layers 3 and full_attn_layers"),
    ({"routed_scaling_factor": None}, "routed_scaling_factor: None"),
    ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor: inf"),
    ({"qk_rope_head_dim": None}, "qk_rope_head_dim: None"),
    ({"activation_situ_linear_beta": 0.0}, "activation_situ_linear_beta: 0.0"),
    ({"num_experts_per_token": True}, "num_experts_per_token: True"),
    ({"use_grouped_topk": False, "num_expert_group": 2, "topk_group": 2}, "use_grouped_topk: false contradicts"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
]


@pytest.mark.parametrize(("change", "message"), FAULTS, ids=[str(i) for i in range(len(FAULTS))])
def test_contradictions_raise_and_name_the_field(change, message):
    config = LatentMoEConfig.tiny().to_dict()
    text = config["text_config"]
    linear = change.pop("linear_attn_config", None) if "linear_attn_config" in change else None
    if linear is not None:
        # A partial dict replaces the lists only when it names one of them.
        base = {} if linear == {"num_heads": 4} else text["linear_attn_config"]
        text["linear_attn_config"] = {**base, **linear}
        text["layer_types"] = None
    if "index_topk" in change or "indexer_types" in change:
        text["layer_types"] = None
    text.update(change)
    with pytest.raises(ValueError, match=message):
        LatentMoEConfig(**config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("patch_size", 0),
        ("vt_num_attention_heads", None),
        ("init_pos_emb_time", None),
        ("merge_kernel_size", 2),
        ("projector_ln_eps", None),
    ],
)
def test_faults_of_the_vision_config_raise_and_name_the_field(name, value):
    config = LatentMoEConfig.tiny().to_dict()
    config["vision_config"][name] = value
    with pytest.raises(ValueError, match=f"vision_config.{name}: {value}"):
        LatentMoEConfig(**config)


@pytest.mark.parametrize("placeholder", [None, -1])
@pytest.mark.parametrize("changes", [{}, {"vision_config": None}])
def test_a_media_placeholder_that_is_no_token_is_refused(placeholder, changes):
    """Also without images: forward and `generate` look for it."""
    fields = LatentMoEConfig.tiny().to_dict() | changes | {"media_placeholder_token_id": placeholder}
    with pytest.raises(ValueError, match=f"media_placeholder_token_id: {placeholder}"):
        LatentMoEConfig(**fields)


def test_without_images_the_media_placeholder_may_lie_outside_of_the_vocabulary():
    fields = LatentMoEConfig.tiny().to_dict() | {"vision_config": None, "media_placeholder_token_id": 163605}
    assert LatentMoEConfig(**fields).media_placeholder_token_id == 163605


def test_without_a_situ_beta_it_is_one():
    one, null = (mixed_config("km", activation_situ_beta=beta) for beta in (1.0, None))
    x = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(random_model(null)(input_ids=x).logits, random_model(one)(input_ids=x).logits)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format: 'nvfp4"),
        ({"quant_method": "bitsandbytes"}, "quant_method: 'bitsandbytes'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"group_size": 16}}}},
            "group_size: 16, must be 32",
        ),
    ],
)
def test_other_quantizations_are_refused(quantization, message):
    with pytest.raises(ValueError, match=message):
        LatentMoEConfig.tiny(packed=False).__class__(quantization_config=quantization)


def test_missing_gate_bound_means_softplus():
    """A config that does not name the bound must never get one (a Kimi-Linear checkpoint was not trained with it)."""
    config = LatentMoEConfig.tiny().to_dict()
    del config["text_config"]["linear_attn_config"]["gate_lower_bound"]
    assert LatentMoEConfig(**config).text_config.gate_lower_bound is None
    assert LatentMoEConfig.tiny().text_config.gate_lower_bound == -5.0


def test_seed_architecture_preset():
    """KDA + gated DSA Top-2048, 3:1, 896 experts of which 16 are active, 1M context."""
    text = LatentMoEConfig.kda_dsa().text_config
    assert text.layer_types.count("linear_attention") == 69
    assert text.layer_types.count("indexed_attention") == 24
    assert (text.index_topk, text.num_experts, text.num_experts_per_token) == (2048, 896, 16)
    assert text.max_position_embeddings == 2**20
    assert text.indexer_types[3] == "full" and text.indexer_types[7] == "shared"
    assert text.indexer_types[91] == "full" and text.indexer_types[92] == "shared"
    assert LatentMoEConfig.kda_dsa().packed_experts


def test_written_config_reads_back_the_same(tmp_path):
    for config in (
        LatentMoEConfig(),
        LatentMoEConfig.kda_dsa(),
        LatentMoEConfig.tiny(),
        mixed_config("kdm", vision=True),
        LatentMoEConfig.tiny(vision=False),
        LatentMoEConfig(vision_config=None),
    ):
        config.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert written["model_type"] == "latentmoe"
        assert {"AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText"} == set(
            written["auto_map"]
        )
        if config.packed_experts:
            assert written["quantization_config"]["quant_method"] == "latentmoe_mxfp4"
        assert LatentMoEConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


PARTIAL = {
    "text only": LatentMoEConfig.tiny(vision=False),
    "dense only": LatentMoEConfig.tiny(experts=0),
    "dense text": LatentMoEConfig.tiny(vision=False, experts=0),
    "attention only": mixed_config("mm"),
    "no shared experts": mixed_config("kd", num_shared_experts=0),
    "experts at model width": mixed_config("kd", routed_expert_hidden_size=None),
    "swiglu": mixed_config("kd", hidden_act="silu"),
    "no linear beta": mixed_config("kd", activation_situ_linear_beta=None),
    "no output gate": mixed_config("kd", mla_use_output_gate=False),
    "no latent norm": mixed_config("kd", latent_moe_use_norm=False),
    "softmax router in groups": mixed_config(
        "kd", moe_router_activation_func="softmax", num_expert_group=2, topk_group=2
    ),
    "every second layer sparse": mixed_config("kdkd", moe_layer_freq=2),
    "tied embeddings": mixed_config("kd"),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_partial_models_train_save_and_reload(name, tmp_path):
    config = copy.deepcopy(PARTIAL[name])
    if name == "tied embeddings":
        config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    model = random_model(config)
    x = torch.randint(0, 200, (2, 20), generator=torch.Generator().manual_seed(0))
    out = model(input_ids=x, labels=x)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert (out.expert_load is None) == (not config.text_config.num_experts)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(again(input_ids=x).logits, out.logits)


@pytest.mark.parametrize("model_type", ["latentmoe", "kimi_k3"])
def test_file_without_vision_config_is_text_only(model_type, tmp_path):
    """Only a config that names no part at all is the released model with its tower."""
    written = {**LatentMoEConfig.tiny().to_dict(), "model_type": model_type}
    del written["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(written, default=str))
    read = LatentMoEConfig.from_pretrained(tmp_path)
    assert read.vision_config is None
    assert LatentMoEConfig(text_config=written["text_config"], pad_token_id=267).vision_config is None
    read.save_pretrained(tmp_path)
    assert LatentMoEConfig.from_pretrained(tmp_path).to_dict() == read.to_dict()
    assert LatentMoEConfig(vision_config=None).vision_config is None
    for config in (LatentMoEConfig(), LatentMoEConfig.kimi_k3(), LatentMoEConfig.kda_dsa()):
        assert config.vision_config.vt_num_hidden_layers == 27


def test_parts_that_a_file_does_not_name_are_absent(tmp_path):
    """As in the released classes; the same fields left out of a constructor are the released K3's."""
    config = LatentMoEConfig.tiny(vision=False)
    written = config.to_dict()
    names = ("routed_expert_hidden_size", "latent_moe_use_norm", "mla_use_output_gate", "num_experts")
    for name in names:
        del written["text_config"][name]
    (tmp_path / "config.json").write_text(json.dumps(written, default=str))
    for read in (LatentMoEConfig.from_pretrained(tmp_path), LatentMoEConfig.from_dict(written)):
        assert [getattr(read.text_config, name) for name in names] == [None, False, False, None]
        assert not any(map(read.text_config.is_moe_layer, range(8)))
        read.save_pretrained(tmp_path / "again")
        assert LatentMoEConfig.from_pretrained(tmp_path / "again").to_dict() == read.to_dict()
    text = LatentMoETextConfig.from_dict(written["text_config"] | {"num_local_experts": 16})
    assert (text.num_experts, text.expert_hidden_size, text.latent_moe_use_norm) == (16, 64, False)
    text = LatentMoETextConfig(**written["text_config"])
    assert [getattr(text, name) for name in names] == [3584, True, True, 896]


def test_file_without_linear_attention_has_mla_alone():
    written = mixed_config("mm").text_config.to_dict()
    del written["linear_attn_config"]
    assert LatentMoETextConfig.from_dict(written).layer_types == ["full_attention"] * 2


def test_text_config_alone_counts_its_layers():
    text = LatentMoETextConfig()
    assert len(text.layer_types) == 93
    assert text.layer_types[91] == text.layer_types[92] == "full_attention"
    assert text.num_experts_per_tok == 16
    assert text.auto_map["AutoModelForCausalLM"] == "modeling_latentmoe.LatentMoEForCausalLM"


def test_position_table_starts_at_the_initializer_range():
    config = LatentMoEConfig.tiny(packed=False)
    config.text_config.initializer_range = 0.3
    torch.manual_seed(0)
    table = LatentMoEForConditionalGeneration(config).vision_tower.patch_embed.pos_emb.weight
    assert table.std().item() == pytest.approx(0.3, rel=0.1) and table.mean().abs() < 0.03
