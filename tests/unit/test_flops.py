"""FLOP per token: the formulas over the config against a walk over the model's own matrices, and known sizes."""

import pytest
import torch
from torch import nn

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForCausalLM
from modeling_latentmoe.training.flops import forward_flops_per_token


def counted(config: LatentMoEConfig, length: int) -> float:
    """Twice the weights that multiply a token, of the built model, and the products between tokens, key by key."""
    text = config.text_config
    with torch.device("meta"):
        model = LatentMoEForCausalLM(text)
    total = 0.0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "_res_proj" not in name:
            total += 2 * module.weight.numel()
        elif type(module).__name__ == "Experts":
            chosen = text.num_experts_per_token / text.num_experts
            total += sum(2 * shape.numel() * chosen for shape in module.logical_shapes.values())
        elif type(module).__name__ == "Router":
            total += 2 * module.weight.numel()
        elif type(module).__name__ == "KimiDeltaAttention":
            H, K = module.num_heads, module.head_dim
            total += H * (6 * K * K + 6 * 64 * K)
        elif type(module).__name__ == "GatedLatentAttention":
            most = text.index_topk if module.indexer_type != "none" else length
            width = module.nope_dim + module.shared_dim + module.value_dim
            total += sum(min(i + 1, most) * module.num_heads * 2 * width for i in range(length)) / length
        elif type(module).__name__ == "LightningIndexer" and length > module.topk:
            total += sum((i + 1) * module.heads * 2 * module.head_dim for i in range(length)) / length
    return total


CONFIGS = [
    LatentMoEConfig.kimi_k3,
    LatentMoEConfig.kda_dsa,
    LatentMoEConfig.tiny,
    lambda: LatentMoEConfig.tiny(experts=0),
]


@pytest.mark.parametrize("make", CONFIGS)
@pytest.mark.parametrize("length", [1, 17, 5000])
def test_formulas_equal_a_walk_over_the_model(make, length: int) -> None:
    """Public report 15: another field name for the number of experts per token gave a wrong count."""
    config = make()
    assert forward_flops_per_token(config.text_config, length) == pytest.approx(counted(config, length), rel=1e-6)


def test_released_layers_at_known_sizes() -> None:
    """Layers 0 to 3 of Kimi-K3, 8192 tokens, from the shapes of its checkpoint."""
    kda = 2 * (5 * 12288 * 7168 + 128 * 7168 + 12288 * 128 + 96 * 7168) + 2 * 96 * (3 * 128 * 128 + 3 * 64 * 128)
    weights = 1536 * 7168 + 18432 * 1536 + 576 * 7168 + 24576 * 512 + 2 * 12288 * 7168
    mla = 2 * weights + 2 * 96 * (192 + 128) * 8193 / 2
    moe = 2 * (896 * 7168 + 2 * 3584 * 7168 + 16 * 3 * 3072 * 3584 + 3 * 6144 * 7168)
    known = 3 * kda + mla + 2 * 3 * 33792 * 7168 + 3 * moe
    config = LatentMoEConfig.kimi_k3().text_config
    first = type(config)(
        **{**config.to_dict(), "num_hidden_layers": 4, "layer_types": None}
        | {"linear_attn_config": {**config.linear_attn_config, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}}
    )
    assert forward_flops_per_token(first, 8192, head=False) == pytest.approx(known, rel=1e-9)
