"""scripts/export_adapter.py: the same factors under released names, read by stock PEFT, and the check of the names."""

import json
import math
import re
import shutil
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration, moe
from modeling_latentmoe.mxfp4 import LatentMoEMxfp4Config
from modeling_latentmoe.ops import glu
from modeling_latentmoe.training.export import check, released_matrices
from modeling_latentmoe.training.merge import merge
from modeling_latentmoe.training.router_bias import routers, write_biases
from modeling_latentmoe.training.shards import write_header
from scripts.export_adapter import main

from .adapters import GOLDEN, change_json, change_weights, load, logits, make_adapter, randomize, tensors

K3 = Path(__file__).parent.parent / "fixtures" / "k3" / "config.json"
PREFIX = "base_model.model."
STACK = PREFIX + "language_model.model.layers.{}.block_sparse_moe.experts."


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """An adapter on dense layers, experts and projector, with random factors, and the logits of base + adapter."""
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    return folder, make_adapter(GOLDEN, folder, train_projector=True)


@pytest.fixture(scope="module")
def adapter(trained) -> Path:
    return trained[0]


@pytest.fixture(scope="module")
def exported(adapter, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    assert main([str(adapter), str(out)]) == 0
    return out


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def settings(folder: Path) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


def test_factors_of_every_expert_are_slices_of_the_stacked_ones(adapter, exported):
    """Bit for bit: A's rows are expert by expert, B's columns rank by rank, w1 and w3 share their A."""
    old, new = stored(adapter), stored(exported)
    for layer in range(1, 6):
        experts = STACK.format(layer)
        gate_up_a, gate_up_b, down_a, down_b = (
            old[experts + name]
            for name in ("base_layer.lora_A.weight", "base_layer.lora_B.weight", "lora_A.weight", "lora_B.weight")
        )
        for e in range(16):
            a, b = gate_up_a[2 * e : 2 * e + 2], gate_up_b[:, e::16]
            for matrix, factors in {
                "w1": (a, b[:32]),
                "w3": (a, b[32:]),
                "w2": (down_a[2 * e : 2 * e + 2], down_b[:, e::16]),
            }.items():
                assert torch.equal(new[f"{experts}{e}.{matrix}.lora_A.weight"], factors[0])
                assert torch.equal(new[f"{experts}{e}.{matrix}.lora_B.weight"], factors[1])
    dense = {name for name in old if ".experts." not in name}
    assert all(torch.equal(old[name], new[name]) for name in dense)
    assert len(new) == len(dense) + 5 * 16 * 3 * 2


def test_every_key_is_a_module_of_the_released_layout_exactly_once(exported):
    """Reports 22 and 36: names on disk, all layers, all experts, no internal name."""
    released = {name.rpartition(".")[0] for name in tensors(GOLDEN)}
    modules = [re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name)[1] for name in stored(exported)]
    assert set(modules) <= released
    assert all(modules.count(name) == 2 for name in modules)
    experts = {name for name in released if ".experts." in name}
    assert len(experts) == 5 * 16 * 3 and experts <= set(modules)
    layers = {int(re.search(r"layers\.(\d+)\.self_attn", name)[1]) for name in modules if "self_attn" in name}
    assert layers == set(range(6))


def test_product_equals_that_of_the_stack(adapter, exported):
    """The whole term, scale included, computed by PEFT from the file of scripts/lora.py and by hand from the export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(load(GOLDEN), adapter)
    new, config = stored(exported), settings(exported)
    scale = config["lora_alpha"] / config["r"]
    for layer in (1, 5):
        outer = model.get_submodule(STACK.format(layer).removeprefix(PREFIX).rstrip("."))
        # PEFT gives a delta the dtype of the wrapped parameter, which is bytes here
        for wrapper, matrices in ((outer.base_layer, ("w1", "w3")), (outer, ("w2",))):
            a, b = (getattr(wrapper, f"lora_{f}")["default"].weight for f in "AB")
            delta = torch.einsum("ore,eri->eoi", b.unflatten(1, (-1, 16)), a.unflatten(0, (16, -1)))
            for e in range(16):
                names = [f"{STACK.format(layer)}{e}.{matrix}.lora_{{}}.weight" for matrix in matrices]
                ours = torch.cat([scale * new[n.format("B")] @ new[n.format("A")] for n in names])
                torch.testing.assert_close(ours, wrapper.scaling["default"] * delta[e], rtol=1e-5, atol=1e-7)


class SeparateExperts(nn.Module):
    """Routed experts as servers build them: one linear layer for each matrix."""

    def __init__(self, experts: moe.Experts):
        super().__init__()
        self.config = experts.config
        for e, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
            expert = nn.Module()
            for name, weight in zip(("w1", "w3", "w2"), (*gate_up.chunk(2), down), strict=True):
                layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                layer.weight = nn.Parameter(weight.detach().clone())
                expert.add_module(name, layer)
            self.add_module(str(e), expert)

    def forward(self, x_TL, ids_TS, weights_TS, adapters):
        out = torch.zeros_like(x_TL)
        for e, expert in self.named_children():
            rows, slots = (ids_TS == int(e)).nonzero(as_tuple=True)
            y = expert.w2(glu(expert.w1(x_TL[rows]), expert.w3(x_TL[rows]), self.config))
            out.index_add_(0, rows, y * weights_TS[rows, slots].unsqueeze(-1).to(y.dtype))
        return out


def released_model(monkeypatch) -> LatentMoEForConditionalGeneration:
    """The golden model with a module for every name on disk."""
    model = load(GOLDEN, quantization_config=LatentMoEMxfp4Config(dequantize=True))
    for layer in model.language_model.model.layers[1:]:
        layer.block_sparse_moe.experts = SeparateExperts(layer.block_sparse_moe.experts)
    monkeypatch.setattr(moe, "unwrap_experts", lambda module, _: (module, {}))
    return model


def test_stock_peft_reads_it_into_the_released_layout(trained, exported, monkeypatch):
    """Report 23: the logits are those of the trainer; report 28: every tensor of the file is used."""
    base = logits(released_model(monkeypatch))
    model = PeftModel.from_pretrained(released_model(monkeypatch), exported)
    assert get_peft_model_state_dict(model).keys() == stored(exported).keys()
    wanted = trained[1]
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    assert (base - wanted).abs().max() > 0.05 * wanted.abs().max()


def test_one_scale_for_readers_without_patterns(exported):
    """Servers multiply every layer by lora_alpha / r of the file; with the patterns it is the same number."""
    config = settings(exported)
    assert config["lora_alpha"] / config["r"] == 2.0
    assert config["rank_pattern"] == {"w1": 2, "w2": 2, "w3": 2}
    for name, rank in config["rank_pattern"].items():
        assert config["alpha_pattern"][name] / rank == 2.0
    assert config["target_parameters"] is None and not config["use_rslora"]
    assert all(min(value.shape) <= config["r"] for value in stored(exported).values())


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rslora": True, "rank_pattern": {r"experts\.gate_up_proj": 5}},
        {"rank_pattern": {"o_proj": 7}, "alpha_pattern": {r"layers\.1\.self_attn\.o_proj": 20}},
        {"target_parameters": ["experts.down_proj"], "rank_pattern": {r"layers\.0\.self_attn\.o_proj": 2}},
        {"target_modules": r".*layers\.[03]\..*(q_proj|o_proj)"},
        {"target_modules": ["o_proj"], "exclude_modules": ["layers.2.self_attn.o_proj"], "layers_to_transform": [1, 2]},
        {"target_parameters": None},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_configs_of_stock_peft_keep_their_meaning(tmp_path, monkeypatch, changes):
    """Different scales are folded into B: what a server computes with one scale is what PEFT computes with many."""
    options = {"r": 3, "lora_alpha": 6, "target_modules": ["o_proj", "up_proj"]}
    options |= {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]} | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load(GOLDEN), LoraConfig(**options))
    randomize(model, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    assert main([str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    assert check(tmp_path / "out", GOLDEN) == len(stored(tmp_path / "out")) / 2
    wanted = logits(model)
    for patterns in (True, False):
        if not patterns:
            # a reader that ignores patterns still gets ranks from the shapes: give all layers the file's rank
            change_json(tmp_path / "out" / "adapter_config.json", rank_pattern={}, alpha_pattern={})
            change_weights(tmp_path / "out", partial(pad_ranks, rank=settings(tmp_path / "out")["r"]))
        with monkeypatch.context() as patch:
            read = PeftModel.from_pretrained(released_model(patch), tmp_path / "out")
            torch.testing.assert_close(logits(read), wanted, rtol=0, atol=2e-5 * wanted.abs().max().item())


def pad_ranks(values: dict[str, torch.Tensor], rank: int) -> None:
    for name, value in values.items():
        missing = rank - value.shape[0 if "lora_A" in name else 1]
        values[name] = nn.functional.pad(value, (0, 0, 0, missing) if "lora_A" in name else (0, missing))


def test_config_of_the_adapter_round_trips_through_stock_peft(adapter, exported):
    """Report 27: the trainer's file names target_parameters, the export needs none; both are stock PEFT."""
    ours = LoraConfig.from_pretrained(str(adapter))
    assert sorted(ours.target_parameters) == ["experts.down_proj", "experts.gate_up_proj"]
    assert ours.rank_pattern == {r"experts\.gate_up_proj": 2, r"experts\.down_proj": 2}
    read = LoraConfig.from_pretrained(str(exported))
    assert read.target_parameters is None and {"w1", "w2", "w3", "o_proj"} <= set(read.target_modules)
    assert (exported / "base_model.json").read_bytes() == (adapter / "base_model.json").read_bytes()


def test_no_name_of_the_adapter_in_the_file(tmp_path):
    """Report 31: neither from the trainer's PEFT file nor in the export, whatever the adapter is called."""
    model = get_peft_model(load(GOLDEN), LoraConfig(r=2, target_modules=["o_proj"]), adapter_name="foo")
    randomize(model, std=0.1)
    model.save_pretrained(tmp_path)
    assert main([str(tmp_path / "foo"), str(tmp_path / "out")]) == 0
    for folder in ("foo", "out"):
        assert not any("foo" in name or "default" in name for name in stored(tmp_path / folder))
    assert check(tmp_path / "out", GOLDEN) == 6


def test_merging_the_export_gives_the_same_weights(adapter, exported, tmp_path):
    merge(GOLDEN, adapter, tmp_path / "stacked", "bf16")
    merge(GOLDEN, exported, tmp_path / "exported", "bf16")
    ours, theirs = tensors(tmp_path / "stacked"), tensors(tmp_path / "exported")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- the check ---


def said(capsys, *argv) -> tuple[int, str]:
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_check_of_a_sound_export_needs_only_a_config(exported, capsys):
    number = len(stored(exported))
    for model in (GOLDEN, GOLDEN / "config.json"):
        code, text = said(capsys, "--check", exported, "--model", model)
        assert code == 0 and f"all {number} tensors land on {number // 2} modules of the released layout" in text


def internal_names(v: dict) -> None:
    """Report 22"""
    rename(v, "block_sparse_moe.experts", "mlp.experts")


def base_layer(v: dict) -> None:
    """Report 28"""
    rename(v, "experts.3.w1.lora", "experts.3.w1.base_layer.lora")


def other_prefix(v: dict) -> None:
    """Report 30: nothing matches."""
    rename(v, "language_model.model.", "model.language_model.")


def adapter_name(v: dict) -> None:
    """Report 31"""
    rename(v, ".weight", ".default.weight")


def expert_left_out(v: dict) -> None:
    """Report 36"""
    for name in [name for name in v if "layers.2.block_sparse_moe.experts.15.w2" in name]:
        del v[name]


def layer_left_out(v: dict) -> None:
    """Report 36"""
    for name in [name for name in v if "layers.4." in name]:
        del v[name]


def wrong_shape(v: dict) -> None:
    name = next(name for name in v if "experts.0.w2.lora_B" in name)
    v[name] = v[name][:-1].clone()


def rename(values: dict, old: str, new: str) -> None:
    for name in list(values):
        values[name.replace(old, new)] = values.pop(name)


FAULTS = {
    internal_names: r"480 fault\(s\): language_model.model.layers.1.mlp.experts.0.w1 does not exist.*; and 470 more",
    base_layer: r"factors \[2, 32\] and \[32, 2\] of \S+layers.1\S+experts.3.w1.base_layer do not have the rank 4",
    other_prefix: r"model.language_model.layers.0.self_attn.\w+ does not exist",
    adapter_name: r"lora_A.default.weight is not a LoRA factor of this model's layers",
    expert_left_out: r"1 fault\(s\): language_model.model.layers.2.block_sparse_moe.experts.15.w2 has no factors, but",
    layer_left_out: r"\d+ fault\(s\): language_model.model.layers.4.\S+ has no factors, but adapter_config.json names",
    wrong_shape: r"1 fault\(s\): \S+experts.0.w2 has shape \[32, 32\], its factors \[31, 32\]",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_check_names_what_does_not_land(exported, tmp_path, capsys, fault):
    folder = tmp_path / "adapter"
    shutil.copytree(exported, folder)
    change_weights(folder, fault)
    code, text = said(capsys, "--check", folder, "--model", GOLDEN)
    assert code == 2 and text.startswith("error: ") and re.search(FAULTS[fault], text), text


def test_a_pattern_that_is_none_is_named(adapter, exported, tmp_path, capsys):
    for source, argv in ((adapter, [tmp_path / "result"]), (exported, ["--check", "--model", GOLDEN])):
        folder = tmp_path / source.name
        shutil.copytree(source, folder)
        for changes in ({"target_modules": "("}, {"layers_to_transform": [0], "layers_pattern": ["("]}):
            change_json(folder / "adapter_config.json", **(settings(source) | changes))
            code, text = said(capsys, folder, *argv)
            assert code == 2 and re.search(r"adapter_config.json: \w+: '\(' is not a pattern", text), text
    assert not (tmp_path / "result").exists()


def test_check_of_the_stacked_file_says_to_export_it(adapter, capsys):
    code, text = said(capsys, "--check", adapter, "--model", GOLDEN)
    assert code == 2 and "10 fault(s)" in text
    assert "layers.1.block_sparse_moe.experts.gate_up_proj is stacked over experts, export it first" in text


def test_config_that_selects_more_or_less_than_the_file(exported, tmp_path, capsys):
    """Reports 27 and 36"""
    folder = tmp_path / "adapter"
    shutil.copytree(exported, folder)
    targets = settings(exported)["target_modules"]
    change_json(folder / "adapter_config.json", target_modules=[t for t in targets if t != "w2"])
    code, text = said(capsys, "--check", folder, "--model", GOLDEN)
    assert code == 2 and "80 fault(s)" in text and "experts.0.w2 has factors, but adapter_config.json does not" in text
    change_json(folder / "adapter_config.json", target_modules=[*targets, "gate"])
    code, text = said(capsys, "--check", folder, "--model", GOLDEN)
    assert code == 2 and "5 fault(s)" in text and "block_sparse_moe.gate has no factors" in text


def test_adapters_that_cannot_be_exported_and_wrong_command_lines(adapter, tmp_path, capsys):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    targets = ["layers.1.block_sparse_moe.experts.gate_up_proj", "experts.down_proj"]
    change_json(folder / "adapter_config.json", target_parameters=targets)
    assert said(capsys, folder, tmp_path / "out")[0] == 2 and not (tmp_path / "out").exists()
    change_json(folder / "adapter_config.json", use_dora=True)
    assert "use_dora = True is not supported" in said(capsys, folder, tmp_path / "out")[1]
    assert "exists: choose another name" in said(capsys, adapter, folder)[1]
    assert "give either ADAPTER OUT, or --check" in said(capsys, adapter)[1]
    assert "give either ADAPTER OUT, or --check" in said(capsys, "--check", adapter)[1]
    assert "nowhere is not a folder" in said(capsys, tmp_path / "nowhere", tmp_path / "out")[1]
    assert "nowhere does not exist" in said(capsys, "--check", adapter, "--model", tmp_path / "nowhere")[1]


def test_adapters_with_router_biases_are_merged_and_not_exported(adapter, exported, tmp_path, capsys):
    """Servers have no place for the biases: with those of the base other experts would work on the same factors."""
    biases = {name: torch.zeros(16) for name in routers(load(GOLDEN))}
    for source, argv in ((adapter, ["A", "OUT"]), (exported, ["--check", "A", "--model", GOLDEN])):
        folder = tmp_path / source.name
        shutil.copytree(source, folder)
        write_biases(folder, biases)
        code, text = said(capsys, *({"A": folder, "OUT": tmp_path / "new"}.get(word, word) for word in argv))
        assert code == 2 and text.count("\n") == 1
        assert text.startswith(f"error: {folder}/router_bias.safetensors: ") and "use scripts/merge_adapter.py" in text
    assert not (tmp_path / "new").exists()


def test_a_failing_write_leaves_nothing(adapter, tmp_path, monkeypatch, capsys):
    from modeling_latentmoe.training import export as module

    def full(file, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_tensor", full)
    code, text = said(capsys, adapter, tmp_path / "out")
    assert code == 2 and "No space left on device" in text and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_check_at_the_size_of_the_released_model(tmp_path, capsys):
    """494,592 factors of all 247,296 expert matrices, in a file of holes; one misnamed expert among them is found."""
    matrices = released_matrices(LatentMoEConfig.from_pretrained(K3))
    experts = {name: shape for name, shape in matrices.items() if ".experts." in name}
    assert len(experts) == 92 * 896 * 3
    layout = {}
    for name, (rows, columns) in experts.items():
        layout[f"{PREFIX}{name}.lora_A.weight"] = ("BF16", (1, columns))
        layout[f"{PREFIX}{name}.lora_B.weight"] = ("BF16", (rows, 1))

    def write(layout: dict) -> None:
        size = sum(2 * math.prod(shape) for _, shape in layout.values())
        with (tmp_path / "adapter_model.safetensors").open("wb") as file:
            write_header(file, layout)
            file.truncate(file.tell() + size)

    write(layout)
    LoraConfig(r=1, lora_alpha=1, target_modules=["w1", "w2", "w3"]).save_pretrained(tmp_path)
    code, text = said(capsys, "--check", tmp_path, "--model", K3)
    assert code == 0 and "all 494,592 tensors land on 247,296 modules" in text, text
    lost = f"{PREFIX}language_model.model.layers.92.block_sparse_moe.experts.895.w2.lora_{{}}.weight"
    for half in "AB":
        layout[lost.format(half).replace("895", "896")] = layout.pop(lost.format(half))
    write(layout)
    code, text = said(capsys, "--check", tmp_path, "--model", K3)
    assert code == 2 and "2 fault(s)" in text and "experts.896.w2 does not exist" in text


@pytest.mark.parametrize("field", ["lora_alpha", "weight"])
def test_numbers_that_are_none_are_not_exported(adapter, tmp_path, capsys, field):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    if field == "weight":
        tensors = load_file(folder / "adapter_model.safetensors")
        next(iter(tensors.values())).view(-1)[0] = float("nan")
        save_file(tensors, folder / "adapter_model.safetensors")
    else:
        config = settings(folder)
        (folder / "adapter_config.json").write_text(json.dumps(config | {field: float("nan")}))
    code, text = said(capsys, folder, tmp_path / "out")
    assert code == 2 and "error: " in text and not (tmp_path / "out").exists()


@pytest.mark.parametrize("config", [None, "{}", "[]", '{"model_type": "llama"}'])
def test_check_needs_a_config_of_this_architecture(exported, tmp_path, capsys, config):
    """Without one, the defaults of the released model would be taken for the user's."""
    model = tmp_path / "model"
    model.mkdir()
    if config is not None:
        (model / "config.json").write_text(config)
    code, text = said(capsys, "--check", exported, "--model", model)
    assert code == 2 and "config.json" in text
