"""The rehearsal snapshot has the released layout to the tensor, and its random values are sane and reproducible."""

import importlib.util
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.headers import DTYPE_BYTES, read_header
from modeling_latentmoe.training.rehearsal import chosen, shards_of, write_snapshot
from modeling_latentmoe.training.shards import Layout

from .snapshots import GOLDEN, INDEX, shard, write_small_snapshot

ROOT = Path(__file__).parents[2]
K3 = ROOT / "tests" / "fixtures" / "k3" / "config.json"

# The released checkpoint by families: name with * for numbers -> how many, shape, dtype.
EVERY = "language_model.model.layers.*."
ATTENTION, MOE = EVERY + "self_attn.", EVERY + "block_sparse_moe."
BLOCK = "vision_tower.encoder.blocks.*."
D, P, E = 7168, 12288, 896
RELEASED = {
    "language_model.model.embed_tokens.weight": (1, (163840, D), "BF16"),
    "language_model.lm_head.weight": (1, (163840, D), "BF16"),
    "language_model.model.norm.weight": (1, (D,), "BF16"),
    "language_model.model.output_attn_res_norm.weight": (1, (D,), "BF16"),
    "language_model.model.output_attn_res_proj.weight": (1, (1, D), "BF16"),
    **{
        f"{EVERY}{name}.weight": (93, (D,), "BF16")
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
    },
    EVERY + "self_attention_res_proj.weight": (93, (1, D), "BF16"),
    EVERY + "mlp_res_proj.weight": (93, (1, D), "BF16"),
    ATTENTION + "g_proj.weight": (93, (P, D), "BF16"),
    ATTENTION + "o_proj.weight": (93, (D, P), "BF16"),
    **{f"{ATTENTION}{name}_proj.weight": (69, (P, D), "BF16") for name in "qkv"},
    **{f"{ATTENTION}{name}_conv1d.weight": (69, (P, 1, 4), "F32") for name in "qkv"},
    ATTENTION + "f_a_proj.weight": (69, (128, D), "BF16"),
    ATTENTION + "f_b_proj.weight": (69, (P, 128), "BF16"),
    ATTENTION + "b_proj.weight": (69, (96, D), "BF16"),
    ATTENTION + "A_log": (69, (128,), "F32"),
    ATTENTION + "dt_bias": (69, (P,), "F32"),
    ATTENTION + "o_norm.weight": (69, (128,), "F32"),
    ATTENTION + "q_a_proj.weight": (24, (1536, D), "BF16"),
    ATTENTION + "q_a_layernorm.weight": (24, (1536,), "BF16"),
    ATTENTION + "q_b_proj.weight": (24, (18432, 1536), "BF16"),
    ATTENTION + "kv_a_proj_with_mqa.weight": (24, (576, D), "BF16"),
    ATTENTION + "kv_a_layernorm.weight": (24, (512,), "BF16"),
    ATTENTION + "kv_b_proj.weight": (24, (24576, 512), "BF16"),
    EVERY + "mlp.gate_proj.weight": (1, (33792, D), "BF16"),
    EVERY + "mlp.up_proj.weight": (1, (33792, D), "BF16"),
    EVERY + "mlp.down_proj.weight": (1, (D, 33792), "BF16"),
    MOE + "gate.weight": (92, (E, D), "BF16"),
    MOE + "gate.e_score_correction_bias": (92, (E,), "F32"),
    MOE + "routed_expert_down_proj.weight": (92, (3584, D), "BF16"),
    MOE + "routed_expert_norm.weight": (92, (3584,), "BF16"),
    MOE + "routed_expert_up_proj.weight": (92, (D, 3584), "BF16"),
    MOE + "shared_experts.gate_proj.weight": (92, (6144, D), "BF16"),
    MOE + "shared_experts.up_proj.weight": (92, (6144, D), "BF16"),
    MOE + "shared_experts.down_proj.weight": (92, (D, 6144), "BF16"),
    **{f"{MOE}experts.*.{w}.weight_packed": (92 * E, (3072, 1792), "U8") for w in ("w1", "w3")},
    **{f"{MOE}experts.*.{w}.weight_scale": (92 * E, (3072, 112), "U8") for w in ("w1", "w3")},
    MOE + "experts.*.w2.weight_packed": (92 * E, (3584, 1536), "U8"),
    MOE + "experts.*.w2.weight_scale": (92 * E, (3584, 96), "U8"),
    "vision_tower.patch_embed.proj.weight": (1, (1024, 3, 14, 14), "BF16"),
    "vision_tower.patch_embed.pos_emb.weight": (1, (64, 64, 1024), "BF16"),
    BLOCK + "norm0.weight": (27, (1024,), "BF16"),
    BLOCK + "norm1.weight": (27, (1024,), "BF16"),
    BLOCK + "wqkv.weight": (27, (4608, 1024), "BF16"),
    BLOCK + "wo.weight": (27, (1024, 1536), "BF16"),
    BLOCK + "mlp.fc0.weight": (27, (4096, 1024), "BF16"),
    BLOCK + "mlp.fc1.weight": (27, (1024, 4096), "BF16"),
    "vision_tower.encoder.final_layernorm.weight": (1, (1024,), "BF16"),
    "mm_projector.proj.*.weight": None,
    "mm_projector.post_norm.weight": (1, (D,), "BF16"),
}
PROJECTOR = {"mm_projector.proj.0.weight": (4096, 4096), "mm_projector.proj.2.weight": (D, 4096)}
TENSORS, BYTES = 497_220, 1_560_860_324_864


@pytest.fixture(scope="module")
def k3() -> dict[str, Layout]:
    return shards_of(LatentMoEConfig.from_pretrained(K3), seed=0)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return write_small_snapshot(tmp_path_factory.mktemp("small") / "snapshot")


def test_k3_has_every_released_tensor(k3):
    tensors = {name: tensor for content in k3.values() for name, tensor in content.items()}
    assert len(tensors) == sum(map(len, k3.values())) == TENSORS
    assert sum(math.prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in tensors.values()) == BYTES
    projector = {name: tensors.pop(name)[1] for name in PROJECTOR}
    assert projector == PROJECTOR
    found = Counter((re.sub(r"\.\d+\.", ".*.", name), shape, dtype) for name, (dtype, shape) in tensors.items())
    families = {name: family for name, family in RELEASED.items() if family}
    assert found == Counter({(name, shape, dtype): count for name, (count, shape, dtype) in families.items()})


def test_k3_is_dealt_out_as_released(k3):
    assert list(k3) == [f"model-{n:05d}-of-000096.safetensors" for n in range(1, 97)]
    contents = list(k3.values())
    for layer, content in enumerate(contents[:93]):
        assert all(name.startswith(f"language_model.model.layers.{layer}.") for name in content)
    assert set(contents[93]) == {name for name in RELEASED if name.startswith("language_model.") and "*" not in name}
    assert all(name.startswith("mm_projector.") for name in contents[94]) and len(contents[94]) == 3
    assert all(name.startswith("vision_tower.") for name in contents[95]) and len(contents[95]) == 165


def test_experts_are_contiguous_and_in_no_order(k3):
    for content in list(k3.values())[1:4]:
        order = [int(match[1]) for name in content if (match := re.search(r"\.experts\.(\d+)\.", name))]
        assert all(len(set(order[i : i + 6])) == 1 for i in range(0, len(order), 6))
        experts = order[::6]
        assert sorted(experts) == list(range(E)) and experts != sorted(experts)


@pytest.mark.slow
def test_k3_takes_little_disk(tmp_path):
    write_snapshot(tmp_path / "k3", LatentMoEConfig.from_pretrained(K3))
    files = list((tmp_path / "k3").iterdir())
    assert sum(file.stat().st_blocks * 512 for file in files) <= 200e6
    index = json.loads((tmp_path / "k3" / INDEX).read_text())
    assert index["metadata"]["total_size"] == BYTES and len(index["weight_map"]) == TENSORS
    shards = sorted((tmp_path / "k3").glob("*.safetensors"))
    assert len(shards) == 96
    with safe_open(shards[92], "pt") as file:
        assert file.get_slice("language_model.model.layers.92.self_attn.kv_b_proj.weight").get_shape() == [24576, 512]


def test_values_are_sane(small):
    tensors = {name: value for file in small.glob("*.safetensors") for name, value in load_file(file).items()}
    for name, value in tensors.items():
        if name.endswith("weight_scale"):
            assert value.min() >= 0x78 and value.max() <= 0x7A
        elif name.endswith("A_log"):
            assert (value[:4] > 0).all() and not value[4:].any()
        elif "norm" in name:
            assert 0.8 < value.float().mean() < 1.2 and 0 < value.float().std() < 0.2
        elif name.endswith("weight_packed"):
            assert len(value.unique()) > 100
        else:
            assert value.float().abs().mean() > 0 and value.float().std() < 1


def test_a_tensor_is_the_same_whatever_else_is_filled(small, tmp_path):
    """Only what was asked for has bytes; the rest are holes."""
    partly = write_small_snapshot(tmp_path / "partly", chosen([2], [3, 7], rest=False))
    for file in small.glob("*.safetensors"):
        full, some = load_file(file), load_file(partly / file.name)
        for name in full:
            expert = re.search(r"\.experts\.(\d+)\.", name)
            if ".layers.2." in name and (expert is None or int(expert[1]) in (3, 7)):
                assert torch.equal(some[name], full[name]) and some[name].any(), name
            else:
                assert not some[name].any(), name


def test_another_seed_gives_other_values_and_another_order(small, tmp_path):
    config = LatentMoEConfig.from_pretrained(small / "config.json")
    write_snapshot(tmp_path / "other", config, lambda name: ".layers.2." in name, seed=1)
    name = "language_model.model.layers.2.self_attn.q_proj.weight"
    mine, other = small / shard(3), tmp_path / "other" / shard(3)
    assert not torch.equal(load_file(mine)[name], load_file(other)[name])
    assert set(read_header(mine)) == set(read_header(other)) and list(read_header(mine)) != list(read_header(other))


@pytest.mark.parametrize("experts, vision, shards", [(0, True, 11), (16, False, 9)])
def test_other_models_have_snapshots_too(tmp_path, experts, vision, shards):
    write_snapshot(tmp_path / "snapshot", LatentMoEConfig.tiny(vision=vision, experts=experts, packed=False))
    headers = [read_header(file) for file in sorted((tmp_path / "snapshot").glob("*.safetensors"))]
    assert len(headers) == shards
    assert not any(tensor.dtype == "U8" for header in headers for tensor in header.values())


def test_a_vocabulary_without_room_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size: 256"):
        write_snapshot(tmp_path / "snapshot", LatentMoEConfig.from_pretrained(GOLDEN))
    assert not (tmp_path / "snapshot").exists()


@pytest.fixture(scope="module")
def rehearse():
    spec = importlib.util.spec_from_file_location("rehearse", ROOT / "scripts" / "rehearse.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script(rehearse, small, tmp_path):
    config = small / "config.json"
    argv = [str(config), str(tmp_path / "out"), "--layers", "1-3", "--experts", "0,2-3", "--rest"]
    assert rehearse.main(argv) == 0
    assert (tmp_path / "out" / "config.json").read_bytes() == config.read_bytes()
    layer = load_file(tmp_path / "out" / shard(3))
    for expert in range(16):
        name = f"language_model.model.layers.2.block_sparse_moe.experts.{expert}.w2.weight_packed"
        assert torch.equal(layer[name], load_file(small / shard(3))[name]) is (expert in (0, 2, 3))
    head = "language_model.lm_head.weight"
    assert torch.equal(load_file(tmp_path / "out" / shard(7))[head], load_file(small / shard(7))[head])


@pytest.mark.parametrize(
    "argv, message",
    [
        (["nowhere.json", "out"], "error: config: nowhere.json is not a file"),
        (["{config}"], "error: the following arguments are required: folder"),
        (["{config}", "{folder}"], "error: {folder} exists: choose another name"),
        (["{config}", "out", "--layers", "a"], "error: argument --layers: 'a' is not a number or a span"),
        (["{config}", "out", "--layers", "1-2-9"], "error: argument --layers: '1-2-9' is not a number or a span"),
        (["{config}", "out", "--layers", "0--3"], "error: argument --layers: '0--3' is not a number or a span"),
        (["{config}", "out", "--layers", "3-0"], "error: argument --layers: '3-0' does not rise"),
        (["{config}", "out", "--layers", "500"], "error: --layers 500: the model has"),
        (["{config}", "out", "--seed", "-1"], "error: --seed -1 must be at least 0"),
        (["{config}", "out", "--experts", "500"], "error: --experts 500: the model has"),
    ],
)
def test_script_names_mistakes(rehearse, small, capsys, argv, message):
    assert rehearse.main([word.format(config=small / "config.json", folder=small) for word in argv]) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith(message.format(folder=small)) and streams.err.count("\n") == 1 and not streams.out


def test_script_help_teaches(rehearse, capsys):
    with pytest.raises(SystemExit) as done:
        rehearse.main(["--help"])
    assert done.value.code == 0 and "--experts 0-13" in capsys.readouterr().out
