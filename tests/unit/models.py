"""Random small models whose every part matters, shared by the whole-model tests."""

import torch

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration

NONE = "none"


def mixed_config(kinds: str, vision: bool = False, experts: int = 8, **text) -> LatentMoEConfig:
    """`kinds`: one letter a layer: k KDA, m gated MLA, d DSA with its own indexer, s DSA with the indices of the
    last d. Sizes differ from every default, so a hard-coded one cannot pass."""
    config = LatentMoEConfig.tiny(vision=vision, experts=experts, packed=False).to_dict()
    layers = range(1, len(kinds) + 1)
    linear = {"kda_layers": [i for i in layers if kinds[i - 1] == "k"], "num_heads": 3, "head_dim": 24}
    linear |= {"full_attn_layers": [i for i in layers if kinds[i - 1] != "k"], "short_conv_kernel_size": 3}
    linear |= {"gate_lower_bound": -4.0, "use_full_rank_gate": True}
    indexers = [{"d": "full", "s": "shared"}.get(kind, NONE) for kind in kinds]
    config["text_config"] |= {
        "num_hidden_layers": len(kinds),
        "layer_types": None,
        "linear_attn_config": linear,
        "indexer_types": indexers if "d" in kinds else None,
        "index_topk": 6 if "d" in kinds else None,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_token": min(3, experts) or None,
        "attn_res_block_size": 2,
        "routed_scaling_factor": 1.7,
        **text,
    }
    return LatentMoEConfig(**config)


def random_model(config: LatentMoEConfig, seed: int = 0) -> LatentMoEForConditionalGeneration:
    """fp32, evaluation mode, with weights large enough that leaving out any part changes the logits."""
    torch.manual_seed(seed)
    model = LatentMoEForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "e_score_correction_bias" in name or "dt_bias" in name:
                param.normal_(std=0.1)
            elif param.is_floating_point() and param.dim() > 1:
                param.add_(torch.randn_like(param) * 0.08)
    return model


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-4) -> None:
    """Largest difference within `tolerance` of the largest expected value (fp32 order-of-summation noise)."""
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"
