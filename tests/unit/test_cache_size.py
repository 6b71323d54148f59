"""What decoding remembers, byte by byte.

Public report 108: a cache was sized from all layers instead of the KDA layers, which a model of one kind hides.
"""

import pytest
import torch

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig, LatentMoETextConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForCausalLM


@pytest.mark.parametrize("dense", [1, 2])
@pytest.mark.parametrize("kda", [[1, 2, 4, 5, 7], [2, 8], [1, 3, 4, 5, 6, 7, 8], []])
def test_bytes_follow_from_the_kind_of_each_layer(kda: list[int], dense: int) -> None:
    config = LatentMoEConfig.tiny(vision=False).to_dict()["text_config"]
    full = [n for n in range(1, 9) if n not in kda]
    indexers = ["none"] * 8
    indexers[full[-1] - 1] = "full"
    config |= {"first_k_dense_replace": dense, "indexer_types": indexers, "layer_types": None}
    config["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": full}
    config = LatentMoETextConfig(**config)
    model = LatentMoEForCausalLM(config).to(torch.bfloat16)
    B, T = 3, 21
    ids = torch.randint(5, 200, (B, T))
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).cache
        cache = model(input_ids=ids[:, :1], use_cache=True, cache=cache).cache

    H, K, W = (config.linear_attn_config[name] for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
    state = B * H * K * K * 4 + 3 * B * (W - 1) * H * K * 2
    latent = B * (T + 1) * (config.kv_lora_rank + config.qk_rope_head_dim) * 2
    for layer, kind in enumerate(config.layer_types):
        expected = {"linear_attention": state, "full_attention": latent}.get(kind)
        if expected is None:
            expected = latent + B * (T + 1) * config.index_head_dim * 2
        found = sum(tensor.nbytes for tensor in cache.layers[layer].tensors.values())
        assert found == expected, (layer, kind)
