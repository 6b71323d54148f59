"""Memory of a step, against arithmetic by hand, layout.py, and what was measured on a GPU."""

import json
from pathlib import Path

import pytest
import torch

from modeling_latentmoe import LatentMoEConfig
from modeling_latentmoe.configuration_latentmoe import LatentMoETextConfig
from modeling_latentmoe.training.footprint import (
    CONTEXT_BYTES,
    DECODED_BYTES,
    FRAGMENTS,
    KDA_BYTES,
    LOSS_BYTES,
    Work,
    activation_bytes,
    experts_on_device,
    footprint,
    gathered_bytes,
    kept_bytes,
    layer_bytes,
    moe_layers,
    passing_bytes,
    ranks_of_token,
)
from modeling_latentmoe.training.layout import Adapter, build_share, dense_bytes, shares

ROOT = Path(__file__).resolve().parents[2]
K3 = LatentMoEConfig.kimi_k3().get_text_config()
GIB = 2**30
# of a layer that has them, for one token in bf16: the streams behind both halves
STREAMS = 2 * 7168 * 2
ROUTED = 3584 * 2 + 12 * 16 + 16 * 2 * 3072 * 2
FEED = ROUTED + (3584 + 2 * 6144) * 2
MLA = (2 * 1536 + 96 * 192 + 3 * 576 + 2 * 96 * 128 + 96 * 256) * 2 + 4 * 96
# beside what they keep: rows of gradients to multiply, and what they become; sums in fp32 and not
BESIDE = 16 * (3072 + 3584) * 2 + 3584 * 6


@pytest.mark.parametrize(
    ("layer", "expected"),
    [(0, 6 * 12288 * 2 + 2 * 33792 * 2), (1, 6 * 12288 * 2 + FEED), (3, MLA + FEED)],
)
def test_what_a_layer_keeps(layer: int, expected: int) -> None:
    assert layer_bytes(K3, layer, Work(1)) == expected + STREAMS


@pytest.mark.parametrize(("experts", "peak"), [(112, 25.00), (896, 64.50)])
def test_peaks_as_counted(experts: int, peak: float) -> None:
    """Of scripts/bench_step.py, T=8192: weights, adapters of rank 2, their gradients, and what backward needs. Counted
    operator by operator, the kernels' own memory included: a count that gave 32.19 where 32.3 GiB were measured."""
    linear = {**K3.linear_attn_config, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    text = {"num_hidden_layers": 4, "num_experts": experts, "linear_attn_config": linear, "vocab_size": 1024, **tokens}
    packing = {"quantization_config": LatentMoEConfig.kimi_k3().quantization_config}
    # without a tower
    config = LatentMoEConfig(text_config=text, media_placeholder_token_id=3, **tokens, **packing)
    model = build_share(config, torch.bfloat16, Adapter(16, 2), 0, 1)
    # Kernels for Hopper decode where they multiply: nothing is held decoded.
    share, work = next(shares(model, 1, 1)), Work(8192, packed=False)
    held = share.expert_bytes + share.dense_bytes + 2 * share.gradient_bytes
    text_config = config.get_text_config()
    found = held + activation_bytes(text_config, work) + passing_bytes(text_config, work)
    assert found / GIB == pytest.approx(peak, rel=0.03)


def test_kda_as_measured() -> None:
    rows = [row for record in json.loads((ROOT / "results" / "h200.json").read_text()) for row in record["rows"]]
    peaks = {row["shape"]: row["peak_gib"] * GIB for row in rows if row["op"] == "KDA fwd+bwd"}
    for tokens in (8192, 32768):
        assert pytest.approx(peaks[f"T={tokens}"], rel=0.01) == KDA_BYTES * tokens * 12288


def test_rows_that_travel() -> None:
    """8 times fewer than chosen experts on 2 processes, 2.3 on 8, 1.1 on 64."""
    assert ranks_of_token(K3, 1) == 1
    assert [round(16 / ranks_of_token(K3, ep), 1) for ep in (2, 8, 64)] == [8.0, 2.3, 1.1]


@pytest.mark.parametrize("ep", [1, 2, 64])
def test_what_checkpointing_keeps(ep: int) -> None:
    stream, decision = 7168 * 2, 12 * 16
    assert kept_bytes(K3, 0, Work(1, ep, "full")) == stream
    assert kept_bytes(K3, 3, Work(1, ep, "full")) == stream + decision
    # with one process nothing travels
    ranks = 0 if ep == 1 else ranks_of_token(K3, ep)
    travelled = ranks * (3584 * 2 + 12 * 16) + (4 * 3584 if ep > 1 else 0)
    attended = 96 * (128 * 2 + 4)
    assert kept_bytes(K3, 3, Work(1, ep, "selective")) == pytest.approx(stream + decision + attended + travelled)
    assert kept_bytes(K3, 1, Work(1, ep, "selective")) == pytest.approx(stream + decision + travelled)


def test_activations_of_the_released_model() -> None:
    """The first stream, four tensors behind the last layer, and gradients of 8 snapshots and 2 streams come on top."""
    others, tokens = 15 * 7168 * 2, 4096
    layers = [layer_bytes(K3, layer, Work(1)) for layer in range(93)]
    assert activation_bytes(K3, Work(tokens)) == tokens * (sum(layers) + others)
    kept = 93 * 7168 * 2 + 92 * 12 * 16
    assert activation_bytes(K3, Work(tokens, 1, "full")) == tokens * (kept + max(layers) + others)


def test_choices_of_keys_are_kept() -> None:
    """Layer 5 of the tiny model has an indexer, layer 7 takes its choice: 16 places of four bytes."""
    config = LatentMoEConfig.tiny().get_text_config()
    assert config.indexer_types[5] == "full" and config.indexer_types[7] == "shared"
    found = [kept_bytes(config, layer, Work(1, 1, "full", width=4)) for layer in (5, 7)]
    assert found == [64 * 4 + 12 * 4 + 16 * 4, 64 * 4 + 12 * 4]


def test_what_passes() -> None:
    """Backward of the experts: products, their gradients and those of rows; then what travels at many processes."""
    tokens = 4096
    assert passing_bytes(K3, Work(tokens)) == tokens * BESIDE
    # at 64 processes: in backward, and what travels
    ranks = ranks_of_token(K3, 64)
    crowded = [16 * (3072 + 3584) * 2 + ranks * 3584 * 6, 16 * ranks * 3584]
    assert passing_bytes(K3, Work(tokens, 64, packed=False)) == int(tokens * max(crowded))
    # 896 experts get 600 rows each from 33600 tokens on, and packed ones are decoded then
    few, many = (passing_bytes(K3, Work(n)) - int(n * BESIDE) for n in (33599, 33600))
    assert few == 0 and many == DECODED_BYTES
    # of few tokens only the loss needs much
    assert passing_bytes(K3, Work(16)) == LOSS_BYTES


def test_where_the_peak_is() -> None:
    """Of one dense KDA layer, in its mixer, when the feed-forward needs nothing any more. Before a layer with experts,
    only what exceeds what that has given back; with layers computed again, what exceeds the largest."""
    tokens, products = 4096, 2 * 33792 * 2
    mixer = (KDA_BYTES / 2 + 3) * 2 * 12288
    one, two = map(kda_layers, (1, 2))
    assert passing_bytes(one, Work(tokens)) == int(tokens * (mixer - products))
    assert passing_bytes(two, Work(tokens)) == tokens * BESIDE
    dense, experts = (layer_bytes(two, layer, Work(tokens)) for layer in range(2))
    beside = max(dense + mixer - products, experts + BESIDE) - experts
    assert passing_bytes(two, Work(tokens, 1, "full")) == int(tokens * beside)


def kda_layers(number: int) -> LatentMoETextConfig:
    """The released model's first layers."""
    linear = {**K3.linear_attn_config, "kda_layers": list(range(1, number + 1)), "full_attn_layers": []}
    fields = K3.to_dict() | {"num_hidden_layers": number, "linear_attn_config": linear, "layer_types": None}
    return LatentMoETextConfig(**fields | {"indexer_types": None})


def test_experts_outside() -> None:
    assert moe_layers(K3) == 92
    assert experts_on_device(K3, 920, 0) == 920
    # one of 92 layers out and through a slot; two and more need two slots
    assert experts_on_device(K3, 920, 1) == 920
    assert experts_on_device(K3, 920, 2) == 920
    assert experts_on_device(K3, 920, 3) == 910
    assert experts_on_device(K3, 920, 92) == 20


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (4, 2)])
def test_what_is_held_is_the_layout(world: int, ep: int) -> None:
    config = LatentMoEConfig.tiny()
    model = build_share(config, torch.bfloat16, Adapter(4, 2), 0, ep)
    share, text = next(shares(model, world, ep)), config.get_text_config()
    gathered = gathered_bytes(model) if world > 1 else 0
    found = footprint(text, share, gathered, Work(64, ep))
    assert found.experts + found.dense + found.adapters + found.moments == share.total_bytes
    assert found.gathered == gathered and found.activations == activation_bytes(text, Work(64, ep))
    comes_and_goes = gathered + found.activations + found.passing
    assert found.reserved == CONTEXT_BYTES + int(FRAGMENTS * comes_and_goes)
    assert found.total == share.total_bytes + comes_and_goes + found.reserved


def test_gathered_layers() -> None:
    """The root and three times the largest unit; units and root together are all but the experts."""
    config = LatentMoEConfig.tiny()
    model = build_share(config, torch.bfloat16, Adapter(4, 2), 0, 2)
    names = ("LatentMoEDecoderLayer", "LatentMoEVisionBlock")
    units = [module for module in model.modules() if type(module).__name__ in names]
    sizes = [
        sum(p.nbytes for n, p in unit.named_parameters() if not n.startswith("block_sparse_moe.experts."))
        for unit in units
    ]
    assert gathered_bytes(model) == dense_bytes(model) - sum(sizes) + 3 * max(sizes)


def test_more_tokens_more_memory() -> None:
    for checkpointing in ("none", "full", "selective"):
        sizes = [activation_bytes(K3, Work(tokens, 8, checkpointing)) for tokens in (1000, 2000)]
        assert sizes[1] == pytest.approx(2 * sizes[0], abs=2)


def test_wider_numbers_take_more() -> None:
    """In fp32 all that is not counted in fp32 or as a place doubles."""
    narrow, wide = (layer_bytes(K3, 3, Work(1, width=width)) for width in (2, 4))
    assert wide - 4 * 96 - 12 * 16 == 2 * (narrow - 4 * 96 - 12 * 16)
