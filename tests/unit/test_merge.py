"""scripts/merge_adapter.py: values against PEFT's own merge, rounding bounds, what stays untouched, what is refused."""

import json
import os
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.mxfp4 import LatentMoEMxfp4Config, decode, encode
from modeling_latentmoe.training import merge as module
from modeling_latentmoe.training.export import export
from modeling_latentmoe.training.lora import load_adapter
from modeling_latentmoe.training.merge import REPORT_FILE, merge, pack
from modeling_latentmoe.training.router_bias import routers, write_biases
from scripts.merge_adapter import main

from .adapters import (
    GOLDEN,
    INDEX,
    change_json,
    change_weights,
    load,
    logits,
    make_adapter,
    randomize,
    same,
    tensors,
    write_shards,
)

MOE = "block_sparse_moe"
EXPERT = re.compile(r"(.*\.experts\.\d+\.w[123])\.(\w+)")


def dense(folder: Path) -> LatentMoEForConditionalGeneration:
    return load(folder, quantization_config=LatentMoEMxfp4Config(dequantize=True))


def merged_by_peft(base: torch.nn.Module, adapter: Path, folder: Path) -> dict[str, torch.Tensor]:
    """PEFT's own fp32 merge into float weights, under names on disk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    merged.save_pretrained(folder)
    return tensors(folder)


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a packed checkpoint, experts decoded to fp32 as `experts.0.w1.weight`."""
    disk = tensors(folder)
    values = {name: value for name, value in disk.items() if not EXPERT.fullmatch(name)}
    for name, value in disk.items():
        if name.endswith(".weight_packed"):
            values[name.removesuffix("_packed")] = decode(value, disk[name[:-6] + "scale"], torch.float32)
    return values


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """On dense layers, experts and projector of the golden checkpoint."""
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    make_adapter(GOLDEN, folder, std=0.3, train_projector=True)
    return folder


@pytest.fixture(scope="module")
def reference(adapter, tmp_path_factory) -> dict[str, torch.Tensor]:
    return merged_by_peft(dense(GOLDEN), adapter, tmp_path_factory.mktemp("peft"))


@pytest.fixture(scope="module")
def packed(adapter, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("merged") / "mxfp4"
    merge(GOLDEN, adapter, out, "mxfp4")
    return out


def expected(reference: dict[str, torch.Tensor], experts) -> dict[str, torch.Tensor]:
    """The fp32 merge in the dtypes of the golden checkpoint, experts through `experts`."""
    stored = tensors(GOLDEN)
    return {
        name: experts(value) if EXPERT.fullmatch(name) else value.to(stored[name].dtype)
        for name, value in reference.items()
    }


def test_bf16_experts_are_the_fp32_merge_rounded_once(adapter, reference, tmp_path):
    merge(GOLDEN, adapter, tmp_path / "out", "bf16")
    disk = tensors(tmp_path / "out")
    assert disk.keys() == reference.keys()
    for name, value in expected(reference, lambda value: value.to(torch.bfloat16)).items():
        assert disk[name].dtype == value.dtype, name
        # fp32 sums in another order may fall on the other side of a tie: one unit of bf16 at most
        torch.testing.assert_close(disk[name].float(), value.float(), rtol=2**-7, atol=1e-6, msg=name)
        if value.dtype == torch.bfloat16:
            assert (disk[name] != value).float().mean() < 1e-3, name


def test_float_checkpoints_give_the_logits_of_base_plus_adapter(tmp_path):
    """fp32 on disk: nothing is rounded, so base + adapter, PEFT's merge and ours are one model."""
    dense(GOLDEN).save_pretrained(tmp_path / "base", max_shard_size="300KB")
    wanted = make_adapter(tmp_path / "base", tmp_path / "adapter", std=0.05)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    base, ours = logits(load(tmp_path / "base")), logits(load(tmp_path / "out"))
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    assert (base - wanted).abs().max() > 0.05 * wanted.abs().max()
    theirs = merged_by_peft(load(tmp_path / "base"), tmp_path / "adapter", tmp_path / "peft")
    for name, value in tensors(tmp_path / "out").items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-6, msg=name)


def test_mxfp4_experts_all_change_and_stay_within_the_rounding_bound(adapter, reference, packed):
    """Report 26: per expert the delta arrives, and its error against the fp32 merge is below the bound."""
    before, after = decoded(GOLDEN), decoded(packed)
    report = json.loads((packed / REPORT_FILE).read_text())["records"]
    experts = [name for name in after if EXPERT.fullmatch(name)]
    assert len(experts) == 5 * 16 * 3
    for name in experts:
        exact = reference[name]
        error = (after[name] - exact).abs()
        # the largest relative error of the format: a fifth of the largest magnitude of 32 columns
        fifth = exact.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 5
        assert (error.unflatten(-1, (-1, 32)) <= fifth + 1e-6).all(), name
        assert (after[name] - before[name]).abs().max() > 0, name
        record = report[name.removesuffix(".weight")]
        assert record["form"] == "mxfp4" and record["changed"]
        assert record["max_error"] == pytest.approx(error.max().item(), abs=1e-6)
        assert record["rms_error"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-4)
        assert 0 < record["max_error"] <= record["bound"] <= fifth.max().item() * 5 / 4
        assert record["max_delta"] == pytest.approx((exact - before[name]).abs().max().item(), abs=1e-6)


def test_mxfp4_logits_are_those_of_the_fp32_merge_packed_again(reference, packed, tmp_path):
    model = dense(GOLDEN)
    values = expected(reference, lambda value: decode(*pack(value)[:2], torch.float32))
    shutil.copytree(GOLDEN, tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    del config["text_config"]["quantization_config"]
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    write_shards(tmp_path / "base", [values])
    wanted = logits(load(tmp_path / "base"))
    torch.testing.assert_close(logits(load(packed)), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    assert (logits(model) - wanted).abs().max() > 0.05 * wanted.abs().max()


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
def test_every_targeted_tensor_differs_and_every_other_is_byte_identical(adapter, tmp_path, experts):
    """Reports 25 and 106: released names under `language_model.model.`, nothing lost, nothing else touched."""
    merge(GOLDEN, adapter, tmp_path / "out", experts)
    before, after = tensors(GOLDEN), tensors(tmp_path / "out")
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    compared = 0
    for name, value in before.items():
        expert = EXPERT.fullmatch(name)
        if expert and experts == "bf16":
            assert name not in after and f"{expert[1]}.weight" in after
        elif expert:
            assert value.dtype == after[name].dtype == torch.uint8
            assert expert[2] == "weight_scale" or not torch.equal(value, after[name]), name
        elif any(f".{name}".endswith(f".{target}.weight") for target in targets) and "vision_tower" not in name:
            assert not torch.equal(value, after[name]), name
            compared += 1
        else:
            assert same(value, after[name]), name
    assert compared == len(re.findall("lora_A", " ".join(load_file(adapter / "adapter_model.safetensors")))) - 10
    assert all(name.startswith(("language_model.model.", "language_model.lm_head", "vision_", "mm_")) for name in after)
    a_log = after["language_model.model.layers.0.self_attn.A_log"]
    assert a_log.shape == (128,) and a_log[:4].all() and not a_log[4:].any()
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, content in files.items() for name in content}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in after.values())
    assert files.keys() == {file.name for file in GOLDEN.glob("*.safetensors")}


def test_the_order_of_tensors_in_a_shard_stays(adapter, packed):
    for file in GOLDEN.glob("*.safetensors"):
        headers = []
        for path in (file, packed / file.name):
            raw = path.read_bytes()
            headers.append(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]))
            headers[-1].pop("__metadata__", None)
        assert headers[0] == headers[1]


def test_config_and_other_files_are_carried_over(adapter, packed, tmp_path):
    """MXFP4 keeps the released config; bf16 takes the quantization out, so that servers and we read float experts."""
    base = tmp_path / "base"
    shutil.copytree(GOLDEN, base)
    for file in ("tiktoken.model", "tokenizer_config.json", "modeling_kimi_k3.py", "figures/one.png"):
        (base / file).parent.mkdir(exist_ok=True)
        (base / file).write_text(file)
    # a snapshot in the Hub's cache is made of links
    (base / "LICENSE").symlink_to(tmp_path / "blob")
    (tmp_path / "blob").write_text("license")
    (base / ".cache").mkdir()
    assert (packed / "config.json").read_bytes() == (GOLDEN / "config.json").read_bytes()
    merge(base, adapter, tmp_path / "out", "bf16")
    out = tmp_path / "out"
    for file in ("tiktoken.model", "tokenizer_config.json", "modeling_kimi_k3.py", "figures/one.png"):
        assert (out / file).read_text() == file
    assert (out / "LICENSE").read_text() == "license" and not (out / "LICENSE").is_symlink()
    assert not (out / ".cache").exists()
    config = json.loads((GOLDEN / "config.json").read_text())
    del config["text_config"]["quantization_config"]
    assert json.loads((out / "config.json").read_text()) == config
    assert load(out).language_model.model.layers[1].block_sparse_moe.experts.gate_up_proj.is_floating_point()


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Path:
    """32 experts of a layer that lie 17/15 in two shards, MXFP4 pairs torn apart, and a shard that nothing touches."""
    folder = tmp_path_factory.mktemp("uneven") / "base"
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(experts=32))
    torch.nn.init.normal_(model.language_model.model.norm.weight, mean=1, std=0.1)
    model.save_pretrained(folder)
    shards: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for name, value in sorted(tensors(folder).items()):
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert is None:
            shards[2 if "vision_tower" in name or "norm" in name else 0][name] = value
        else:
            torn = expert[1] == "3" and name.endswith("scale")
            shards[0 if int(expert[1]) < 17 and not torn else 1][name] = value
    write_shards(folder, shards)
    return folder


@pytest.mark.parametrize("experts", ["mxfp4", pytest.param("bf16", marks=pytest.mark.slow)])
def test_experts_that_split_unevenly_over_shards(uneven, tmp_path, experts):
    """Report 25: the number of experts is never taken from one shard; a pair may even lie in two."""
    make_adapter(uneven, tmp_path / "adapter", std=0.5, target_modules=["experts.gate_up_proj", "experts.down_proj"])
    merge(uneven, tmp_path / "adapter", tmp_path / "out", experts)
    reference = merged_by_peft(dense(uneven), tmp_path / "adapter", tmp_path / "peft")
    before = decoded(uneven)
    after = decoded(tmp_path / "out") if experts == "mxfp4" else tensors(tmp_path / "out")
    names = [name for name in reference if EXPERT.fullmatch(name)]
    assert len(names) == 7 * 32 * 3
    for name in names:
        exact, value = reference[name], after[name].float()
        limit = exact.abs() * 2**-7 if experts == "bf16" else exact.abs().max() / 5
        assert ((value - exact).abs() <= limit + 1e-6).all(), name
        assert not torch.equal(value, before[name]), name
    name = "model-00003-of-00003.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (uneven / name).read_bytes()
    assert not (tmp_path / "out" / name).samefile(uneven / name)
    load(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"use_rslora": True},
        {"rank_pattern": {r"experts\.gate_up_proj": 5, "o_proj": 2}, "alpha_pattern": {r"layers\.1\..*o_proj": 20}},
        {"target_parameters": ["experts.down_proj"]},
        {"target_parameters": ["experts.gate_up_proj"], "use_rslora": True},
        {"target_parameters": [f"2.{MOE}.experts.down_proj", f"3.{MOE}.experts.gate_up_proj"]},
        {"target_modules": r".*layers\.[03]\..*(q_proj|o_proj)", "target_parameters": None},
        {"target_modules": ["o_proj"], "exclude_modules": ["layers.2.self_attn.o_proj"], "layers_to_transform": [1, 2]},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_configs_of_stock_peft_mean_here_what_they_mean_there(tmp_path, changes):
    options = {"r": 3, "lora_alpha": 6, "target_modules": ["o_proj", "up_proj"]}
    options |= {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]} | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load(GOLDEN), LoraConfig(**options))
    randomize(model, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    merge(GOLDEN, tmp_path / "adapter", tmp_path / "out", "bf16")
    reference = merged_by_peft(dense(GOLDEN), tmp_path / "adapter", tmp_path / "peft")
    for name, value in tensors(tmp_path / "out").items():
        torch.testing.assert_close(value.float(), reference[name], rtol=2**-7, atol=1e-5, msg=name)


def with_biases(adapter: Path, folder: Path) -> dict[str, torch.Tensor]:
    """A copy of an adapter for the golden checkpoint, with biases that route in another way; returns these."""
    shutil.copytree(adapter, folder)
    torch.manual_seed(0)
    biases = {name: 0.3 * torch.randn(16) for name in routers(load(GOLDEN))}
    write_biases(folder, biases)
    return biases


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
def test_router_biases_of_the_adapter_replace_those_of_the_base(adapter, tmp_path, experts, capsys):
    """Exactly, in fp32 whatever the base stores; all other tensors are those of a merge without them."""
    biases = with_biases(adapter, tmp_path / "adapter")
    shutil.copytree(GOLDEN, tmp_path / "base")
    shards = [load_file(file) for file in sorted(GOLDEN.glob("*.safetensors"))]
    first = next(iter(biases))
    for shard in shards:
        shard.update({name: value.bfloat16() for name, value in shard.items() if name == first})
    write_shards(tmp_path / "base", shards)
    merge(tmp_path / "base", adapter, tmp_path / "without", experts)
    argv = [tmp_path / "base", tmp_path / "adapter", tmp_path / "with", "--experts", experts]
    assert main([str(word) for word in argv]) == 0
    before, after = tensors(tmp_path / "without"), tensors(tmp_path / "with")
    assert before.keys() == after.keys() and before[first].dtype == torch.bfloat16 and len(biases) == 5
    for name, value in after.items():
        assert same(value, biases.get(name, before[name])), name
    changes = {name: (value - before[name]).abs().max().item() for name, value in biases.items()}
    assert json.loads((tmp_path / "with" / REPORT_FILE).read_text())["router_biases"] == pytest.approx(changes)
    said = f"the biases of 5 routers are those of the adapter, changed by at most {max(changes.values()):.3g}"
    assert said in capsys.readouterr().out
    index = json.loads((tmp_path / "with" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in after.values())


def test_base_with_an_adapter_and_its_biases_routes_as_the_merge_does(tmp_path):
    dense(GOLDEN).save_pretrained(tmp_path / "base")
    plain = make_adapter(tmp_path / "base", tmp_path / "plain", std=0.05)
    with_biases(tmp_path / "plain", tmp_path / "adapter")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    wanted = logits(load_adapter(load(tmp_path / "base"), str(tmp_path / "adapter")))
    torch.testing.assert_close(logits(load(tmp_path / "out")), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    assert (plain - wanted).abs().max() > 0.01 * wanted.abs().max()


def test_experts_without_a_token_are_allowed_and_counted(adapter, tmp_path):
    """Their B is still zero after training; a whole stack without training is refused."""
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    stack = "base_model.model.language_model.model.layers.2.block_sparse_moe.experts"

    def silence(values):
        values[f"{stack}.lora_B.weight"].unflatten(1, (-1, 16))[:, :, 5] = 0

    change_weights(folder, silence)
    report = merge(GOLDEN, folder, tmp_path / "out", "mxfp4")
    record = report.records["language_model.model.layers.2.block_sparse_moe.experts.5.w2"]
    assert record.max_delta == 0 and not record.changed
    lines = "\n".join(report.lines())
    total = len(report.records)
    assert f"{total - 1} of {total} weight matrices" in lines
    assert "1 have factors whose product is zero: experts that saw no token" in lines
    change_weights(folder, lambda values: values[f"{stack}.lora_B.weight"].zero_())
    with pytest.raises(ValueError, match=r"layers.2.block_sparse_moe.experts.down_proj are zero, it is untrained"):
        merge(GOLDEN, folder, tmp_path / "again", "mxfp4")


def test_a_delta_that_rounding_undoes_is_no_silent_success(adapter, tmp_path):
    """Report 26: a merge into 4 bits that would give the base back says so, and what to do."""
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)

    def shrink(values):
        for name in values:
            if ".experts." in name and "lora_B" in name:
                values[name] *= 1e-6

    change_weights(folder, shrink)
    with pytest.raises(ValueError, match=r"experts.* would not change: .* below the rounding of mxfp4; use --experts"):
        merge(GOLDEN, folder, tmp_path / "out", "mxfp4")
    assert not (tmp_path / "out").exists()
    report = merge(GOLDEN, folder, tmp_path / "out", "bf16")
    assert report.records["language_model.model.layers.1.block_sparse_moe.experts.0.w1"].form == "bfloat16"


def test_bound_is_half_a_step_of_the_grid():
    torch.manual_seed(0)
    weight = torch.randn(64, 256) * torch.logspace(-6, 6, 64).unsqueeze(1)
    packed, scale, bound = pack(weight)
    ratio = (decode(packed, scale, torch.float32) - weight).abs().unflatten(-1, (-1, 32)).amax(-1) / bound
    assert ratio.max() <= 1 and ratio.max() > 0.98


def test_groups_at_the_end_of_their_grid_keep_their_scale():
    """A delta of a millionth must not double the scale of a group whose largest value is 6 units."""
    torch.manual_seed(0)
    base = decode(torch.randint(0, 256, (64, 128), dtype=torch.uint8), torch.full((64, 8), 121).byte(), torch.float32)
    base[:, ::32] = 6 * 2.0**-6
    moved = base * (1 + 1e-6)
    assert torch.equal(decode(*pack(moved)[:2], torch.float32), base)
    assert not torch.equal(decode(*encode(moved), torch.float32), base)
    for std in (0.001, 0.01, 0.05):
        exact = base + std * torch.randn_like(base)
        packed, scale, bound = pack(exact)
        ours, plain = (decode(*pair, torch.float32) - exact for pair in ((packed, scale), encode(exact)))
        assert ours.square().mean() < 0.95 * plain.square().mean()
        assert (ours.abs().unflatten(-1, (-1, 32)).amax(-1) <= bound).all()


# --- what is refused ---


def other_base(adapter: Path) -> None:
    change_json(adapter / "base_model.json", digest="0" * 64)


def no_module(adapter: Path) -> None:
    prefix = "base_model.model.language_model.model.layers."
    change_weights(adapter, lambda v: v.update({k.replace(prefix + "4", prefix + "7"): v.pop(k) for k in list(v)}))


def wrong_prefix(adapter: Path) -> None:
    """Report 106: names of other libraries."""
    change_weights(adapter, lambda v: v.update({k.replace("language_model.model", "model"): v.pop(k) for k in list(v)}))


def adapter_name(adapter: Path) -> None:
    """Report 31"""
    change_weights(adapter, lambda v: v.update({k.replace("_A.w", "_A.default.w"): v.pop(k) for k in list(v)}))


def layer_left_out(adapter: Path) -> None:
    """Report 36"""
    change_weights(adapter, lambda v: [v.pop(k) for k in list(v) if "layers.3.self_attn.o_proj" in k])


def half_left_out(adapter: Path) -> None:
    change_weights(adapter, lambda v: v.pop(next(k for k in v if "o_proj.lora_B" in k)))


def unnamed_module(adapter: Path) -> None:
    """Report 36: the config lists less than the file has."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    targets = [target for target in config["target_modules"] if target != "kv_b_proj"]
    change_json(adapter / "adapter_config.json", target_modules=targets)


def unnamed_parameter(adapter: Path) -> None:
    """Report 27"""
    change_json(adapter / "adapter_config.json", target_parameters=None)


def wrong_rank(adapter: Path) -> None:
    change_json(adapter / "adapter_config.json", r=8)


def untrained(adapter: Path) -> None:
    change_weights(adapter, lambda v: [v[k].zero_() for k in v if "lora_B" in k])


def dora(adapter: Path) -> None:
    change_json(adapter / "adapter_config.json", use_dora=True)


def saved_modules(adapter: Path) -> None:
    change_json(adapter / "adapter_config.json", modules_to_save=["lm_head"])


def moved_base(adapter: Path) -> None:
    change_json(adapter / "adapter_config.json", init_lora_weights="pissa")


def unknown_field(adapter: Path) -> None:
    """Report 27"""
    change_json(adapter / "adapter_config.json", target_experts=["w1"])


def not_lora(adapter: Path) -> None:
    change_json(adapter / "adapter_config.json", peft_type="LOHA")


def cut_short(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def not_a_number(adapter: Path) -> None:
    change_weights(adapter, lambda v: [v[k].fill_(float("nan")) for k in v if "layers.3" in k and "o_proj" in k])


def bias_of_no_router(adapter: Path) -> None:
    write_biases(adapter, {name.replace("layers.5", "layers.0"): torch.zeros(16) for name in routers(load(GOLDEN))})


REFUSED = {
    bias_of_no_router: r"router_bias.safetensors: the model has no router with the bias \S+layers.0.\S+correction_bias",
    other_base: r"was made for another base model \(.*checkpoint\)",
    no_module: r"does not fit .*fault\(s\): language_model.model.layers.7.* does not exist",
    wrong_prefix: r"model.layers.0.self_attn.\w+ does not exist",
    adapter_name: r"lora_A.default.weight is not a LoRA factor",
    layer_left_out: r"1 fault\(s\): language_model.model.layers.3.self_attn.o_proj has no factors, but adapter_config",
    half_left_out: r"o_proj has lora_A without its partner",
    unnamed_module: r"2 fault\(s\): .*layers.3.self_attn.kv_b_proj has factors, but adapter_config.json does not",
    unnamed_parameter: r"experts.* has factors, but target_parameters of adapter_config.json does not name",
    wrong_rank: r"do not have the rank 8 of adapter_config.json",
    untrained: r"the factors of .* are zero, it is untrained",
    dora: r"use_dora = True is not supported",
    saved_modules: r"modules_to_save = \['lm_head'\] is not supported",
    moved_base: r"init_lora_weights = 'pissa' is not supported",
    unknown_field: r"target_experts = \['w1'\] is not supported",
    not_lora: r"peft_type LOHA is not supported",
    cut_short: r"adapter_model.safetensors is damaged or cut short",
    not_a_number: r"layers.3.self_attn.o_proj hold NaN",
}


@pytest.mark.parametrize("fault", REFUSED, ids=lambda fault: fault.__name__)
def test_adapters_that_do_not_fit_are_refused(adapter, tmp_path, capsys, fault):
    """Reports 28 and 30: every tensor of the file finds its one place, or nothing is written."""
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    fault(folder)
    assert main([str(GOLDEN), str(folder), str(tmp_path / "out"), "--experts", "mxfp4"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and re.search(REFUSED[fault], said), said
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_damaged_bases_are_refused(adapter, tmp_path, capsys):
    def said(experts: str = "mxfp4") -> str:
        assert main([str(tmp_path / "base"), str(adapter), str(tmp_path / "out"), "--experts", experts]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    shutil.copytree(GOLDEN, tmp_path / "base")
    shards = [load_file(file) for file in sorted(GOLDEN.glob("*.safetensors"))]
    scale = next(name for name in shards[1] if name.endswith("w1.weight_scale"))
    write_shards(tmp_path / "base", [shards[0], {k: v for k, v in shards[1].items() if k != scale}, *shards[2:]])
    assert f"{scale} is missing" in said()
    write_shards(tmp_path / "base", [*shards, {scale: shards[1][scale]}])
    assert f"{scale} is stored twice" in said()
    shards[1][scale] = torch.full_like(shards[1][scale], 255)
    write_shards(tmp_path / "base", shards)
    assert "NaN or infinite" in said() and "NaN or infinite" in said("bf16")
    write_shards(tmp_path / "base", shards)
    index = json.loads((tmp_path / "base" / INDEX).read_text())
    del index["weight_map"][scale]
    (tmp_path / "base" / INDEX).write_text(json.dumps(index))
    assert f"do not agree about {scale}" in said()
    (tmp_path / "base" / "model-00002-of-00004.safetensors").unlink()
    assert f"{tmp_path / 'base'}: model-00002-of-00004.safetensors is missing" in said()
    (tmp_path / "base" / INDEX).write_text("{}")
    assert f"{tmp_path / 'base' / INDEX} is damaged" in said()


def test_a_config_of_the_base_that_is_no_object(adapter, tmp_path, capsys):
    shutil.copytree(GOLDEN, tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text("[]")
    assert main([str(tmp_path / "base"), str(adapter), str(tmp_path / "out")]) == 2
    assert f"{tmp_path / 'base' / 'config.json'} is damaged: it must be a JSON object" in capsys.readouterr().err


def test_wrong_folders_and_switches(adapter, tmp_path, capsys):
    base, out = tmp_path / "base", tmp_path / "out"
    dense(GOLDEN).save_pretrained(base)

    def said(*argv) -> str:
        assert main([str(word) for word in argv]) == 2
        return capsys.readouterr().err

    assert "--experts mxfp4: the experts of" in said(base, adapter, out, "--experts", "mxfp4")
    assert "invalid choice" in said(base, adapter, out, "--experts", "fp8")
    assert "nowhere is not a folder" in said(tmp_path / "nowhere", adapter, out)
    assert f"{base} exists: choose another name" in said(GOLDEN, adapter, base)
    assert "lies inside" in said(base, adapter, base / "merged")
    assert "adapter_config.json is missing" in said(base, base, out)
    assert "required" in said(base)


# --- interruptions and memory ---


def test_a_kill_leaves_no_result_and_the_next_run_gives_it(adapter, packed, tmp_path, monkeypatch):
    out = tmp_path / "out"
    child = os.fork()
    if not child:
        try:
            write = module.Merger.write
            shards = []

            def dying(self, file, target, bar):
                shards.append(file)
                if len(shards) == 3:
                    os._exit(77)
                write(self, file, target, bar)

            module.Merger.write = dying
            merge(GOLDEN, adapter, out)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 77
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.") and left.name.endswith(".partial")
    merge(GOLDEN, adapter, out)
    assert {path.name for path in tmp_path.iterdir()} == {"out", left.name}
    for file in packed.glob("*.safetensors"):
        assert file.read_bytes() == (out / file.name).read_bytes()


def test_full_disk(adapter, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"out needs 0.0 GB, but only 0.0 GB are free there"):
        merge(GOLDEN, adapter, tmp_path / "out")
    monkeypatch.undo()

    def full(file, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_tensor", full)
    with pytest.raises(OSError, match="No space left on device"):
        merge(GOLDEN, adapter, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_peak_memory_is_below_two_shards(tmp_path, fresh_process):
    """Report 106, on shards of 27 MB. What the code itself takes, loaded and run once, is not counted."""
    config = LatentMoEConfig.tiny(vision=False, experts=64)
    text = config.text_config.to_dict() | {"moe_intermediate_size": 512, "routed_expert_hidden_size": 512}
    text |= {"num_hidden_layers": 3, "layer_types": None, "index_topk": None, "indexer_types": None}
    text["linear_attn_config"] |= {"kda_layers": [1, 2], "full_attn_layers": [3]}
    base = tmp_path / "base"
    big = LatentMoEForConditionalGeneration(LatentMoEConfig(**config.to_dict() | {"text_config": text}))
    big.save_pretrained(base, max_shard_size="28MB")
    make_adapter(base, tmp_path / "adapter", std=0.3)
    make_adapter(GOLDEN, tmp_path / "small", std=0.3)
    shard = max(file.stat().st_size for file in base.glob("*.safetensors"))
    assert shard > 25e6 and len(list(base.glob("*.safetensors"))) == 3
    said = fresh_process(
        f"""
import re
from pathlib import Path
from modeling_latentmoe.training.merge import merge
here = Path({str(tmp_path)!r})
memory = lambda field: 1024 * int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
for experts in ("mxfp4", "bf16"):
    merge(Path({str(GOLDEN)!r}), here / "small", here / f"warm_{{experts}}", experts)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = memory("VmRSS")
    merge(here / "base", here / "adapter", here / f"out_{{experts}}", experts)
    print(memory("VmHWM") - before)
""",
        package=True,
    )
    packed, decoded = map(int, said.split())
    assert 1e6 < packed < 2 * shard and 0 < decoded < 2 * shard, f"{packed} and {decoded} bytes for shards of {shard}"


def test_script_says_what_happened(adapter, tmp_path, capsys):
    assert main([str(GOLDEN), str(adapter), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    total = len(json.loads((tmp_path / "out" / REPORT_FILE).read_text())["records"])
    assert f"{total} of {total} weight matrices that the adapter has factors for changed" in said
    assert re.search(r"MXFP4: rounding error at most 0\.\d+, \d+% of its bound; delta at most", said)
    assert REPORT_FILE in said
    (folder := tmp_path / "stock").mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / file, folder)
    assert main([str(GOLDEN), str(folder), str(tmp_path / "again")]) == 0
    assert "has no base_model.json" in capsys.readouterr().out


def test_folders_that_look_temporary_are_left_alone(adapter, tmp_path):
    """Once, the folder `out.partial` was taken for a left-over and deleted, also where it was the base itself."""
    base = tmp_path / "out.partial"
    shutil.copytree(GOLDEN, base)
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    merge(base, adapter, tmp_path / "out")
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before


def test_a_read_only_base_is_merged(adapter, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(GOLDEN, base)
    for path in [*base.iterdir(), base]:
        path.chmod(path.stat().st_mode & ~0o222)
    merge(base, adapter, tmp_path / "out", "bf16")
    assert all(path.stat().st_mode & 0o200 for path in [tmp_path / "out", *(tmp_path / "out").iterdir()])
    base.chmod(0o755)


def test_a_link_as_result_is_refused_before_the_work(adapter, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ValueError, match="link is a link"):
        merge(GOLDEN, adapter, tmp_path / "link")


def test_an_export_with_an_expert_that_saw_no_token_is_merged(adapter, tmp_path):
    """Its own pair of factors is zero then, which is not an untrained adapter."""
    trained = tmp_path / "trained"
    shutil.copytree(adapter, trained)
    tensors = load_file(trained / "adapter_model.safetensors")
    name = next(name for name in tensors if ".experts." in name and "lora_B" in name)
    experts = json.loads((GOLDEN / "config.json").read_text())["text_config"]["num_experts"]
    tensors[name].unflatten(1, (-1, experts))[:, :, 2] = 0
    save_file(tensors, trained / "adapter_model.safetensors")
    export(trained, tmp_path / "exported")
    merge(GOLDEN, trained, tmp_path / "one", "bf16")
    merge(GOLDEN, tmp_path / "exported", tmp_path / "two", "bf16")
    for file in (tmp_path / "one").glob("*.safetensors"):
        one, two = load_file(file), load_file(tmp_path / "two" / file.name)
        for tensor, value in one.items():
            torch.testing.assert_close(two[tensor].float(), value.float(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("r", 0), ("r", "4"), ("lora_alpha", "8"), ("lora_alpha", 0), ("lora_alpha", float("nan"))),
        *(("rank_pattern", {"q_proj": 0}), ("rank_pattern", [1]), ("rank_pattern", {"[": 3})),
        *(("target_modules", "("), ("exclude_modules", "("), ("target_modules", 5), ("target_parameters", [5])),
    ],
)
def test_values_of_the_adapter_config(adapter, tmp_path, capsys, field, value):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {field: value}))
    assert main([str(GOLDEN), str(folder), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "adapter_config.json" in error, error
    assert not (tmp_path / "out").exists()
