"""How long a LoRA step would take, from times of operators on one device and the bandwidth of links. All prediction.

Every operator has a count, such as floating-point operations or rows, which this file takes from the config. Steps on
one device were measured operator by operator (results/operators.json, by calibration.py); any other step takes its
counts times the seconds that each took there. Nothing was fitted to a step on several devices.

Between one launch of a kernel and the next some time passes ("launches"), which does not shrink with tokens. Below some
thousand tokens the host is slower than even that, and predictions are too good.

Legend: T tokens, D model width, H heads of KDA, K their width and P that of all of them, N heads in attention, V width
        of their values, Q query latent.
"""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from modeling_latentmoe.configuration_latentmoe import INDEXED, LINEAR, LatentMoEConfig, LatentMoETextConfig
from modeling_latentmoe.training.flops import mean_keys
from modeling_latentmoe.training.footprint import Work, alike_layers, moe_layers, ranks_of_token

# Half a tile of rows is empty for every expert, on average (kernels of latent_moe).
TILE_ROWS = 64
# Bytes of device memory around a row that travels, forward and backward, per number of its latents: rows are gathered,
# joined, parted and summed (expert_parallel.py).
ROW_MEMORY = (40, 44)
# Of a trained weight in an optimizer step, in fp32: AdamW reads four numbers and writes three, gradients are read twice
# and scaled, and the last good value is kept.
OPTIMIZER_BYTES = 4 * 12
GB = 1e9


class Rate(NamedTuple):
    """Seconds for one of what is counted, forward and backward, and the share of them that computing it again costs."""

    seconds: float
    again: float


class Operators(NamedTuple):
    """What was measured: `rates` by operator, bytes per second by link or memory, seconds that a collective takes."""

    device: str
    rates: dict[str, Rate]
    bandwidth: dict[str, float]
    collective_s: float
    counts_s: float


class Machine(NamedTuple):
    """How many devices there are in all, and in one machine."""

    devices: int = 1
    per_machine: int = 8


class Sizes(NamedTuple):
    """Bytes that a step moves. root, layers: what FSDP gathers from `shards` devices, layer by layer; nothing from 1.
    expert_layer: on one device, packed or not. adapters: all that a device holds, and those of its experts among them.
    """

    root: int
    layers: list[int]
    shards: int
    expert_layer: int
    adapters: int
    expert_adapters: int


class Split(NamedTuple):
    """Seconds of a step by what they are spent on; what other work hides is not counted.

    other: low-rank products, mixtures, norms, routers, launches. all_to_all: dispatch and combine, with the copies
    around them. all_gather: of FSDP. host: experts that come from host memory. optimizer: with the sums of gradients.
    """

    dense: float
    kda: float
    attention: float
    experts: float
    other: float
    head: float
    all_to_all: float
    all_gather: float
    host: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


# What a table of measured operators must have beside operators: bandwidths and times.
LINKS, COLLECTIVES = ("memory", "all_to_all", "all_gather", "host", "machines"), ("collective", "counts")
# Operators whose time a part of `Split` is.
PARTS = {
    "dense": ("dense products",),
    "kda": ("KDA",),
    "attention": ("attention", "sparse attention", "indexer"),
    "experts": ("experts", "held experts"),
    "other": ("router", "low rank", "mixtures", "other", "launches"),
    "head": ("head",),
}


def read_operators(file: Path) -> Operators:
    """The measured times of results/operators.json, or of a file like it. ValueError naming it."""
    try:
        values = json.loads(file.read_text())
        measured = [int(values["measured_at"][name]) for name in ("layers", "tokens", "experts")]
        found = {name: (1e-3 * entry["ms"], float(entry["again"])) for name, entry in values["operators"].items()}
        bandwidth = {name: GB * entry["value"] for name, entry in values["gb_per_s"].items()}
        seconds = {name: 1e-3 * entry["value"] for name, entry in values["ms"].items()}
        device = values["device"]
        if min(measured) < 1:
            raise ValueError(f"measured_at {measured} must be at least 1")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not a table of measured operators ({type(error).__name__}: {error})") from error
    reference = reference_counts(*measured)
    for known, names in ((found, reference), (bandwidth, LINKS), (seconds, COLLECTIVES)):
        if missing := set(names) - set(known):
            raise ValueError(f"{file}: no time of {', '.join(sorted(missing))}")
    rates = {name: Rate(found[name][0] / count, found[name][1]) for name, count in reference.items()}
    return Operators(device, rates, bandwidth, seconds["collective"], seconds["counts"])


def reference_counts(layers: int, tokens: int, experts: int) -> dict[str, float]:
    """Of the measured step: the first layers of Kimi-K3 with so many of their experts, all tokens in one document, its
    head, and beside it one layer of sparse attention."""
    dense = LatentMoEConfig.kimi_k3().get_text_config()
    sparse = LatentMoEConfig.kda_dsa().get_text_config()
    work = Work(tokens, ep=dense.num_experts // experts)
    first = layer_counts(sparse, sparse.layer_types.index(INDEXED), work, tokens)
    reference = counts(dense, work, tokens, tokens, layers)
    return reference | Counter({name: first[name] for name in ("sparse attention", "indexer")})


def counts(
    config: LatentMoETextConfig, work: Work, length: int, learned: float, layers: int | None = None
) -> Counter[str]:
    """Of one micro-batch, forward and backward. length: of its documents. learned: tokens with a loss. layers: only the
    first so many."""
    layers = config.num_hidden_layers if layers is None else layers
    T, D, block = work.tokens, config.hidden_size, config.attn_res_block_size
    total = Counter(head=learned * config.vocab_size * D, launches=layers, other=T * D * layers)
    for layer, number in alike_layers(config, layers).items():
        for name, count in layer_counts(config, layer, work, length).items():
            total[name] += number * count
    for layer in range(layers):
        # before attention and before the feed-forward: snapshots, of which a block's first layer adds one, and stream
        for sources in (-(-layer // block) + 1, layer // block + 2):
            # three passes over each source and two over their sum; one source is the result
            total["mixtures"] += T * D * (3 * sources + 2) * (sources > 1)
    return total


def layer_counts(config: LatentMoETextConfig, layer: int, work: Work, length: int) -> Counter[str]:
    """Of one layer but what all have alike."""
    T, D, kind = work.tokens, config.hidden_size, config.layer_types[layer]
    found: Counter[str] = Counter()
    for inputs, outputs, adapted in matrices(config, layer):
        found["dense products"] += T * inputs * outputs
        found["low rank"] += T * (inputs + outputs) * adapted
    if kind == LINEAR:
        found["KDA"] += T * config.linear_attn_config["num_heads"] * config.linear_attn_config["head_dim"]
    else:
        N, V = config.num_attention_heads, config.v_head_dim
        chosen = kind == INDEXED and length > config.index_topk
        keys = mean_keys(length, config.index_topk if chosen else length)
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + V
        found["sparse attention" if chosen else "attention"] += T * keys * N * width
        if chosen and config.indexer_types[layer] == "full":
            scored = mean_keys(length, length) / config.index_kpool
            found["indexer"] += T * scored * config.index_n_heads * config.index_head_dim
    if config.is_moe_layer(layer):
        found["router"] += T * D * config.num_experts
        found += expert_counts(config, work)
    return found


def matrices(config: LatentMoETextConfig, layer: int) -> list[tuple[int, int, bool]]:
    """Width of inputs and outputs of every dense product of a layer but its router, and whether it has an adapter."""
    D = config.hidden_size
    if config.layer_types[layer] == LINEAR:
        H, K = config.linear_attn_config["num_heads"], config.linear_attn_config["head_dim"]
        P = H * K
        found = [*[(D, P, True)] * 4, (P, D, True), (D, K, False), (K, P, False), (D, H, False)]
    else:
        N, V, Q = config.num_attention_heads, config.v_head_dim, config.q_lora_rank
        nope, shared, latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        found = [(D, Q, True), (Q, N * (nope + shared), True), (D, latent + shared, True)]
        found += [(latent, N * (nope + V), True), (N * V, D, True)]
        if config.mla_use_output_gate:
            found.append((D, N * V, True))
        if config.layer_types[layer] == INDEXED and config.indexer_types[layer] == "full":
            heads, K = config.index_n_heads, config.index_head_dim
            found += [(Q, heads * K, False), (D, K, False), (D, heads, False)]
            found += [(D, K, False)] * (config.index_kpool > 1)
    hidden = config.intermediate_size
    if config.is_moe_layer(layer):
        hidden = config.moe_intermediate_size * (config.num_shared_experts or 0)
        if latent := config.routed_expert_hidden_size:
            found += [(D, latent, True), (latent, D, True)]
    if hidden:
        found += [(D, hidden, True), (D, hidden, True), (hidden, D, True)]
    return found


def expert_counts(config: LatentMoETextConfig, work: Work) -> Counter[str]:
    """Of one layer on one device: multiplications of rows, and weights of experts, which are read and decoded. Those in
    bf16 are taken to cost as much as packed ones: they need no decoding and four times the reading."""
    held = config.num_experts // work.ep
    slots = work.tokens * config.num_experts_per_token
    weight = 3 * config.expert_hidden_size * config.moe_intermediate_size
    return Counter({"experts": (slots + TILE_ROWS * held) * weight, "held experts": held * weight})


def micro_batch(
    config: LatentMoETextConfig,
    operators: Operators,
    machine: Machine,
    sizes: Sizes,
    work: Work,
    length: int,
    learned: float,
    layers_out: int = 0,
) -> Split:
    """Forward and backward of one micro-batch; the optimizer's part is zero."""
    recomputed = work.checkpointing != "none"
    kept = {"attention", "sparse attention"} if work.checkpointing == "selective" else set()
    spent, forward = {}, 0.0
    for name, count in counts(config, work, length, learned * work.tokens).items():
        seconds, again = count * operators.rates[name].seconds, operators.rates[name].again
        spent[name] = seconds * (1 + again * (recomputed and name not in kept))
        forward += seconds * again
    parts = {part: sum(spent.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    # what there is to hide transfers behind: one layer's forward, and its backward with what is computed again
    whole = sum(parts.values()) - parts["head"]
    layer = forward / config.num_hidden_layers, (whole - forward) / config.num_hidden_layers
    return Split(
        **parts,
        all_to_all=all_to_all(config, operators, machine, work),
        all_gather=all_gather(operators, machine, sizes, layer),
        host=from_host(config, operators, sizes, layers_out, layer),
        optimizer=0.0,
    )


def all_to_all(config: LatentMoETextConfig, operators: Operators, machine: Machine, work: Work) -> float:
    """Dispatch and combine of all layers, forward and backward. A row travels once to each device that it concerns."""
    if work.ep == 1:
        return 0.0
    latent, chosen = config.expert_hidden_size, config.num_experts_per_token
    near, far = travelling(config, work, machine.per_machine)

    def exchange(row_bytes: float) -> float:
        links = near * row_bytes / operators.bandwidth["all_to_all"], far * row_bytes / operators.bandwidth["machines"]
        return operators.collective_s + max(links)

    # latents, ids (int32) and weights (fp32) of experts, then sums in fp32; gradients of the sums and of both
    forward = operators.counts_s + exchange(2 * latent + 8 * chosen) + exchange(4 * latent)
    backward = exchange(2 * latent) + exchange(2 * latent + 4 * chosen)
    rows = work.tokens * ranks_of_token(config, work.ep)
    copied = [rows * latent * per_number / operators.bandwidth["memory"] for per_number in ROW_MEMORY]
    passes = 2 if work.checkpointing == "full" else 1
    return moe_layers(config) * (passes * (forward + copied[0]) + backward + copied[1])


def travelling(config: LatentMoETextConfig, work: Work, per_machine: int) -> tuple[float, float]:
    """Rows that leave a device: to others of its machine, and to other machines."""
    each = work.tokens * ranks_of_token(config, work.ep) / work.ep
    inside = min(work.ep, per_machine)
    return each * (inside - 1), each * (work.ep - inside)


def all_gather(operators: Operators, machine: Machine, sizes: Sizes, layer_s: tuple[float, float]) -> float:
    """What is not hidden, forward and backward: the root, the first layer, and what later ones take longer than a layer
    computes. Devices of a machine share the links to others."""
    if sizes.shards == 1:
        return 0.0
    speed = operators.bandwidth["all_gather"]
    if sizes.shards > machine.per_machine:
        speed = min(speed, machine.per_machine * operators.bandwidth["machines"])

    def gather(nbytes: int) -> float:
        return operators.collective_s + nbytes * (1 - 1 / sizes.shards) / speed

    first, *others = sizes.layers
    return sum(
        gather(sizes.root) + gather(first) + sum(max(0.0, gather(nbytes) - hiding) for nbytes in others)
        for hiding in layer_s
    )


def from_host(
    config: LatentMoETextConfig, operators: Operators, sizes: Sizes, layers_out: int, layer_s: tuple[float, float]
) -> float:
    """What is not hidden of experts that come from host memory, forward and backward: they are sent for when the ones
    before them, some layers earlier, begin (tiers.py)."""
    if not layers_out:
        return 0.0
    coming, between = sizes.expert_layer / operators.bandwidth["host"], moe_layers(config) / layers_out
    return layers_out * sum(max(0.0, coming - between * hiding) for hiding in layer_s)


def optimizer_step(config: LatentMoETextConfig, operators: Operators, machine: Machine, sizes: Sizes, ep: int) -> float:
    """Sums of expert gradients over devices that hold the same experts, clipping, AdamW."""
    update = sizes.adapters / 4 * OPTIMIZER_BYTES / operators.bandwidth["memory"]
    copies = machine.devices // ep
    if copies == 1:
        return update
    link = operators.bandwidth["all_to_all" if machine.devices <= machine.per_machine else "machines"]
    # two factors for each of two stacks
    collectives = 4 * moe_layers(config) * operators.collective_s
    return update + collectives + 2 * (1 - 1 / copies) * sizes.expert_adapters / link
