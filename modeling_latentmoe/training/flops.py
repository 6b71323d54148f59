"""How many floating-point operations a token costs, counted from the config alone.

A multiplication with a weight counts 2 per weight; of routed experts only the chosen ones count. Attention counts the
keys that a causal query sees on average, or selects. KDA counts what its recurrence needs in chunks of 64 tokens: three
products with the state and three inside a chunk. Norms, activations, convolutions and softmax are not counted.
"""

from modeling_latentmoe.configuration_latentmoe import INDEXED, LINEAR, LatentMoETextConfig

KDA_COUNTED_CHUNK = 64


def forward_flops_per_token(config: LatentMoETextConfig, length: int, head: bool = True) -> float:
    """Forward FLOP of the text stack per token of documents of `length` tokens; `head`: with the vocabulary head.

    A LoRA step costs about twice that (forward and input gradients; the adapters are small).
    """
    D = config.hidden_size
    total = 2 * D * config.vocab_size if head else 0
    for layer, kind in enumerate(config.layer_types):
        total += _kda(config) if kind == LINEAR else _attention(config, length, indexed=kind == INDEXED)
        if kind == INDEXED and config.indexer_types[layer] == "full":
            total += _indexer(config, length)
        total += _experts(config) if config.is_moe_layer(layer) else 6 * D * config.intermediate_size
    return total


def step_flops(config: LatentMoETextConfig, read: int, trained: int, length: int) -> float:
    """FLOP of a training step on `read` tokens in documents of `length`, of which `trained` reach the vocabulary head.

    Forward and input gradients; what is recomputed does not count, nor do adapters and images.
    """
    body = forward_flops_per_token(config, length, head=False) * read
    return 2 * (body + 2 * config.hidden_size * config.vocab_size * trained)


# dense bf16 TFLOP/s without sparsity, by words in the name that a device gives itself, the first that fits
PEAK_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("B200", 2250.0),
)


def peak_tflops(device_name: str) -> float | None:
    """What a device of this name could do in bf16, in TFLOP/s; None for one that is not listed."""
    return next((peak for words, peak in PEAK_TFLOPS if words in device_name), None)


def _kda(config: LatentMoETextConfig) -> float:
    D, linear = config.hidden_size, config.linear_attn_config
    H, K = linear["num_heads"], linear["head_dim"]
    projections = 5 * D * H * K + D * K + K * H * K + D * H
    return 2 * projections + 2 * H * (3 * K * K + 3 * KDA_COUNTED_CHUNK * K)


def _attention(config: LatentMoETextConfig, length: int, indexed: bool) -> float:
    D, N, V = config.hidden_size, config.num_attention_heads, config.v_head_dim
    nope, shared, latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    projections = D * config.q_lora_rank + config.q_lora_rank * N * (nope + shared)
    projections += D * (latent + shared) + latent * N * (nope + V)
    projections += (2 if config.mla_use_output_gate else 1) * D * N * V
    keys = mean_keys(length, config.index_topk) if indexed else mean_keys(length, length)
    return 2 * projections + 2 * N * (nope + shared + V) * keys


def mean_keys(length: int, most: int) -> float:
    """Mean number of keys of a causal query that sees at most `most` of those before it and itself."""
    if length <= most:
        return (length + 1) / 2
    return (most * (most + 1) / 2 + (length - most) * most) / length


def _indexer(config: LatentMoETextConfig, length: int) -> float:
    N, K = config.index_n_heads, config.index_head_dim
    projections = config.q_lora_rank * N * K + config.hidden_size * (K + N)
    projections += config.hidden_size * K if config.index_kpool > 1 else 0
    scored = mean_keys(length, length) / config.index_kpool if length > config.index_topk else 0
    return 2 * projections + 2 * N * K * scored


def _experts(config: LatentMoETextConfig) -> float:
    D, latent, hidden = config.hidden_size, config.routed_expert_hidden_size, config.moe_intermediate_size
    weights = D * config.num_experts + 3 * config.expert_hidden_size * hidden * config.num_experts_per_token
    weights += 2 * D * latent if latent else 0
    weights += 3 * D * hidden * (config.num_shared_experts or 0)
    return 2 * weights
