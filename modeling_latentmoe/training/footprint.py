"""Memory of one process in a training step, in bytes: what it holds all the time, and what a step adds to that.

Weights, adapters and moments are those of layout.py, to the byte. The rest is counted from the config, per token: what
each layer keeps for backward with kernels in use (the torch definitions keep more; recompute.py says what is not kept),
what passes through memory beside it, and the layers that FSDP gathers for a moment. Experts count as evenly chosen,
pictures not at all.

Legend: D model width, N heads in attention, V width of their values, Q query latent.
"""

from collections import Counter
from typing import NamedTuple

from torch import nn

from modeling_latentmoe.configuration_latentmoe import INDEXED, LINEAR, LatentMoETextConfig
from modeling_latentmoe.training.expert_parallel import rows_per_token
from modeling_latentmoe.training.layout import Share
from modeling_latentmoe.training.mesh import is_expert
from modeling_latentmoe.training.placement import SLOTS

# KDA, forward and backward, beside its inputs: bytes for a token and channel of all heads, measured (results/h200.json,
# "KDA fwd+bwd": 2.93 GiB for 8192 tokens and 12288 channels in bf16).
KDA_BYTES = 31.3
# Of packed experts with so many rows each on average, so much is held decoded at a time (kernels of latent_moe).
DECODED_ROWS, DECODED_BYTES = 600, 2**30
# Logits of a chunk of tokens, their gradients and partial sums (kernels of linear_cross_entropy: 0.39 GiB measured).
LOSS_BYTES = 2**29
# Beside what torch allocates: the device's context and buffers of collectives. An assumption.
CONTEXT_BYTES = 2 * 2**30
# What the allocator loses to fragments, as a share of all that comes and goes. An assumption.
FRAGMENTS = 0.05


class Work(NamedTuple):
    """What one process computes at a time.

    tokens: of a micro-batch. ep: processes that share the experts. checkpointing: "none", "full" or "selective", as of
    scripts/lora.py. packed: experts are in 4 bits. width: bytes of an activation.
    """

    tokens: int
    ep: int = 1
    checkpointing: str = "none"
    packed: bool = True
    width: int = 2


class Footprint(NamedTuple):
    """Bytes of one process at the peak of a step.

    experts: on the device. dense: this process' part of everything else that is frozen. adapters: with their gradients
    and last good values. moments: of AdamW. gathered: layers that FSDP holds whole at a time. activations: what
    backward needs. passing: what comes and goes while a layer is computed. reserved: of the device, outside of these.
    """

    experts: int
    dense: int
    adapters: int
    moments: int
    gathered: int
    activations: int
    passing: int
    reserved: int

    @property
    def total(self) -> int:
        return sum(self)


def footprint(config: LatentMoETextConfig, share: Share, gathered: int, work: Work, layers_out: int = 0) -> Footprint:
    """The peak of a process that holds `share`.

    gathered: of `gathered_bytes`, 0 where FSDP does not shard. layers_out: so many layers' experts live outside of the
    device and pass through it.
    """
    experts = experts_on_device(config, share.expert_bytes, layers_out)
    adapters = 3 * share.gradient_bytes
    activations, passing = activation_bytes(config, work), passing_bytes(config, work)
    reserved = CONTEXT_BYTES + int(FRAGMENTS * (gathered + activations + passing))
    return Footprint(experts, share.dense_bytes, adapters, share.moment_bytes, gathered, activations, passing, reserved)


def unit_bytes(model: nn.Module) -> tuple[int, list[int]]:
    """What FSDP gathers together: the root, which has embeddings and head, and each layer or vision block, in order.

    model: not yet sharded, with its adapters; it may be on the meta device.
    """
    units = [_dense(module) for module in model.modules() if type(module).__name__ in model._no_split_modules]
    return _dense(model) - sum(units), units


def gathered_bytes(model: nn.Module) -> int:
    """What FSDP holds whole at its peak, of the model of `unit_bytes`: the root all the time; the largest layer; and
    the next one twice, as it arrives and where it is put."""
    root, units = unit_bytes(model)
    return root + 3 * max(units, default=0)


def _dense(module: nn.Module) -> int:
    return sum(param.nbytes for name, param in module.named_parameters() if not is_expert(f".{name}"))


def experts_on_device(config: LatentMoETextConfig, expert_bytes: int, layers_out: int) -> int:
    """What is on the device of `expert_bytes` if those of `layers_out` layers pass through the slots of tiers.py."""
    layers = moe_layers(config)
    if not layers:
        return 0
    return expert_bytes // layers * (layers - layers_out + min(SLOTS, layers_out))


def moe_layers(config: LatentMoETextConfig) -> int:
    return sum(map(config.is_moe_layer, range(config.num_hidden_layers)))


def ranks_of_token(config: LatentMoETextConfig, ep: int) -> float:
    """How many of `ep` processes hold an expert that a token chose, on average: so often its row travels."""
    experts, chosen = config.num_experts or 0, config.num_experts_per_token or 0
    return rows_per_token(experts, chosen, ep) if experts else 1.0


def activation_bytes(config: LatentMoETextConfig, work: Work) -> int:
    """What backward needs when it begins; with checkpointing, what is kept of all layers and one layer computed again.

    Gradients of the streams that layers hand on count too: one of each snapshot is held until its layer.
    """
    D, width = config.hidden_size, work.width
    alike = alike_layers(config, config.num_hidden_layers)
    needed = {layer: layer_bytes(config, layer, work) for layer in alike}
    if work.checkpointing == "none":
        token = sum(number * needed[layer] for layer, number in alike.items())
    else:
        kept = sum(number * kept_bytes(config, layer, work) for layer, number in alike.items())
        token = kept + max(needed.values())
    snapshots = -(-config.num_hidden_layers // config.attn_res_block_size)
    # the first stream; the last mixture, its norm, what the loss takes of that and the gradient of it
    token += (1 + 4 + snapshots + 2) * D * width
    return int(work.tokens * token)


def alike_layers(config: LatentMoETextConfig, layers: int) -> dict[int, int]:
    """Of the first `layers` layers one of each kind, and how many there are of its kind."""
    indexers = config.indexer_types or ["none"] * config.num_hidden_layers
    kinds = [(config.layer_types[layer], indexers[layer], config.is_moe_layer(layer)) for layer in range(layers)]
    return {kinds.index(kind): number for kind, number in Counter(kinds).items()}


def layer_bytes(config: LatentMoETextConfig, layer: int, work: Work) -> float:
    """What one layer keeps for backward, per token."""
    D, width = config.hidden_size, work.width
    kind = config.layer_types[layer]
    mixer = _kda(config) * width if kind == LINEAR else _attention(config, kind == INDEXED, width)
    feed = _experts(config, work) if config.is_moe_layer(layer) else 2 * config.intermediate_size * width
    # the streams behind both sub-layers
    return mixer + feed + 2 * D * width


def kept_bytes(config: LatentMoETextConfig, layer: int, work: Work) -> float:
    """What checkpointing keeps of one layer, per token: its input, decisions, and if selective what travelled and what
    attention gave."""
    width, chosen, latent = work.width, config.num_experts_per_token or 0, config.expert_hidden_size
    kept, kind = config.hidden_size * width, config.layer_types[layer]
    if kind == INDEXED and config.indexer_types[layer] == "full":
        kept += 4 * config.index_topk
    if config.is_moe_layer(layer):
        # of the router's top-k: a value and a place
        kept += 12 * chosen
    if work.checkpointing == "selective":
        if kind != LINEAR:
            kept += config.num_attention_heads * (config.v_head_dim * width + 4)
        if config.is_moe_layer(layer) and work.ep > 1:
            kept += ranks_of_token(config, work.ep) * (latent * width + 12 * chosen) + 4 * latent
    return kept


def _channels(config: LatentMoETextConfig) -> int:
    """Of all heads of KDA."""
    return config.linear_attn_config["num_heads"] * config.linear_attn_config["head_dim"]


def _kda(config: LatentMoETextConfig) -> int:
    """Numbers: q, k, v before their convolutions, decay, output and gate."""
    return 6 * _channels(config)


def _attention(config: LatentMoETextConfig, indexed: bool, width: int) -> int:
    N, V, Q = config.num_attention_heads, config.v_head_dim, config.q_lora_rank
    nope, shared, latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    # query latent before and behind its norm, queries, latent before and behind its norm and joined; output and gate
    numbers = 2 * Q + N * (nope + shared) + 3 * (latent + shared) + 2 * N * V
    if indexed:
        # absorbed queries and outputs, chosen keys
        return (numbers + N * (2 * latent + shared)) * width + 4 * config.index_topk + 4 * N
    # keys and values as they are expanded
    return (numbers + N * (nope + V)) * width + 4 * N


def _experts(config: LatentMoETextConfig, work: Work) -> float:
    width, chosen, latent = work.width, config.num_experts_per_token, config.expert_hidden_size
    hidden, shared = config.moe_intermediate_size, config.num_shared_experts or 0
    ranks = ranks_of_token(config, work.ep)
    # rows with the ids and weights of their experts, where they are computed; gates and ups of every chosen expert
    routed = ranks * (latent * width + 12 * chosen) + chosen * 2 * hidden * width
    # behind the experts: their sum; gates and ups of shared experts
    return routed + (latent + 2 * shared * hidden) * width


def passing_bytes(config: LatentMoETextConfig, work: Work) -> int:
    """The most that is held beside `activation_bytes` at a time: by backward of some layer, whose successors need
    nothing any more, or by the loss."""
    layers = range(config.num_hidden_layers)
    needed, beside = ([count(config, layer, work) for layer in layers] for count in (layer_bytes, _beside))
    if work.checkpointing == "none":
        token = max(beside[layer] - sum(needed[layer + 1 :]) for layer in layers)
    else:
        token = max(map(sum, zip(needed, beside, strict=True))) - max(needed)
    fixed, experts = 0, config.num_experts or 0
    rows = work.tokens * (config.num_experts_per_token or 0) * work.ep
    if moe_layers(config) and work.packed and rows >= DECODED_ROWS * experts:
        held = -(-experts // work.ep) * 3 * config.expert_hidden_size * config.moe_intermediate_size * work.width
        fixed = min(DECODED_BYTES, held)
    return int(max(work.tokens * token + fixed, LOSS_BYTES))


def _beside(config: LatentMoETextConfig, layer: int, work: Work) -> float:
    """What comes and goes in backward of one layer beside `layer_bytes`, per token: in its feed-forward, or in its
    mixer, when the feed-forward needs nothing any more."""
    mixer = _mixer_beside(config, layer, work.width)
    if not config.is_moe_layer(layer):
        return max(4 * config.intermediate_size * work.width, mixer - 2 * config.intermediate_size * work.width)
    return max(_experts_beside(config, work), mixer - _experts(config, work))


def _mixer_beside(config: LatentMoETextConfig, layer: int, width: int) -> float:
    if config.layer_types[layer] == LINEAR:
        # with q, k, v behind their convolutions, computed again
        return (KDA_BYTES / 2 + 3) * width * _channels(config)
    keys, values = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    # keys, computed again; gradients of queries, keys, values and outputs, and those of queries once more in fp32
    return config.num_attention_heads * ((3 * keys + 2 * values) * width + 4 * keys)


def _experts_beside(config: LatentMoETextConfig, work: Work) -> float:
    width, chosen, latent = work.width, config.num_experts_per_token, config.expert_hidden_size
    ranks = ranks_of_token(config, work.ep)
    # rows of the output's gradient and the gradients of activations, before those of gates and ups take their place;
    # sums and their gradients, fp32 and not
    backward = chosen * (config.moe_intermediate_size + latent) * width + ranks * latent * (4 + width)
    # sums in fp32: as they are, as they leave, and twice as they arrive
    return max(backward, 16 * ranks * latent if work.ep > 1 else 0.0)
