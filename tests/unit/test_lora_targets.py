"""What LoRA adapts, at which rank and rate; what it refuses; and how strictly an adapter is read back."""

import copy
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.training import checkpoint, lora
from modeling_latentmoe.training.router_bias import routers, write_biases


def small_model(**options) -> LatentMoEForConditionalGeneration:
    torch.manual_seed(0)
    return LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(**options)).float().eval()


def adapted(model: nn.Module) -> dict[str, int]:
    """Full name -> rank of everything that got factors, stacks by their parameter's name."""
    result = {}
    for name, module in model.get_base_model().named_modules():
        if "default" in getattr(module, "lora_A", {}):
            name = name.replace(".base_layer", "")
            stack = getattr(module, "parameter_name", None)
            result[f"{name}.{stack}" if stack else name] = module.r["default"]
    return result


def fill(model: nn.Module, seed: int = 1) -> None:
    """Make every factor random, so that an adapter changes the logits."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=torch.arange(3, 40)[None]).logits


OPTIONS = {"r": 8, "lora_alpha": 16.0, "expert_rank": 2}


def test_defaults_cover_the_text_stack_and_nothing_else() -> None:
    model = small_model()
    expected = {
        name: 8
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.rpartition(".")[2] in lora.DENSE_TARGETS
        and "vision_tower" not in name
    }
    expected |= {name: 2 for name, _ in model.named_parameters() if ".experts." in name and name.endswith("_proj")}
    peft_model = lora.add_adapter(model, **OPTIONS)
    assert adapted(peft_model) == expected
    # every kind of layer is there: KDA, latent attention, dense and shared feed-forward, latent projections
    for part in ("0.self_attn.q_proj", "2.self_attn.kv_b_proj", "0.mlp.up_proj", "1.block_sparse_moe.experts.down"):
        assert any(part in name for name in expected), part
    for name, parameter in peft_model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert "lora_" not in name or parameter.dtype == torch.float32
        assert "lora_" not in name or not any(part in name for part in ("indexer", "vision_tower", "gate.weight"))


@pytest.mark.parametrize("expert_rank", [1, 2])
def test_ranks_and_scales_are_per_module(expert_rank: int, tmp_path: Path) -> None:
    """Public report 38: experts of a smaller rank than the dense layers, in the model, in the file and back."""
    model = lora.add_adapter(small_model(), r=32, lora_alpha=8.0, expert_rank=expert_rank)
    experts = model.config.text_config.num_experts
    for name, module in model.named_modules():
        if "default" in getattr(module, "lora_A", {}):
            rank = expert_rank if hasattr(module, "parameter_name") else 32
            assert module.r["default"] == rank and module.scaling["default"] == 8 / 32, name
            stacked = rank * experts if hasattr(module, "parameter_name") else rank
            assert module.lora_A["default"].weight.shape[0] == stacked
            assert module.lora_B["default"].weight.shape[1] == stacked
    fill(model)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(small_model(), tmp_path)
    assert adapted(again) == adapted(model)
    assert torch.equal(logits(again), expected)


def test_bf16_base_keeps_fp32_factors() -> None:
    model = lora.add_adapter(small_model().bfloat16(), **OPTIONS, train_projector=True)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_projector_is_adapted_on_request_by_plain_lora() -> None:
    names = adapted(lora.add_adapter(small_model(), **OPTIONS, train_projector=True))
    assert {"mm_projector.proj.0", "mm_projector.proj.2"} <= names.keys()
    text_only = adapted(lora.add_adapter(small_model(vision=False), **OPTIONS, train_projector=True))
    assert text_only == adapted(lora.add_adapter(small_model(vision=False), **OPTIONS))


def test_named_targets_alone() -> None:
    names = adapted(lora.add_adapter(small_model(), **OPTIONS, target_modules=["experts.down_proj", "kv_b_proj"]))
    assert {name.rpartition(".")[2] for name in names} == {"down_proj", "kv_b_proj"}
    assert all(".experts." in name for name in names if name.endswith("down_proj"))
    names = adapted(lora.add_adapter(small_model(), **OPTIONS, target_modules=["down_proj"]))
    assert names and not any(".experts." in name for name in names)


def test_a_name_that_also_exists_in_the_indexer_or_tower_stays_outside() -> None:
    """Short names are matched by PEFT wherever they end a module's name; protected parts are excluded."""
    model = small_model()
    attention = next(m for n, m in model.named_modules() if n.endswith("self_attn") and hasattr(m, "indexer"))
    attention.indexer.q_proj = nn.Linear(4, 4)
    model.vision_tower.q_proj = nn.Linear(4, 4)
    names = adapted(lora.add_adapter(model, **OPTIONS, target_modules=["q_proj"]))
    assert names and all(name.endswith("self_attn.q_proj") for name in names)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("q_prj", r"--target_modules q_prj: the model has no such module; it has .*experts\.down_proj .*q_proj"),
        ("gate", r"block_sparse_moe\.gate is the router, not a linear layer"),
        ("wqkv", "the vision tower, which stays frozen"),
        ("proj.0", r"must be named: mm_projector\.proj\.0"),
        ("wk", "--target_modules wk: LoRA adapts no indexer, --train_indexer trains them"),
        ("indexer.wq_b", r"--target_modules indexer\.wq_b: LoRA adapts no indexer, --train_indexer trains them"),
        ("indexer", "--target_modules indexer: LoRA adapts no indexer"),
        ("gate_up_proj", r"the model has no such module; it has .*experts\.gate_up_proj"),
        ("input_layernorm", "is a RMSNorm, not a linear layer"),
    ],
)
def test_what_cannot_be_adapted_is_explained(target: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lora.add_adapter(small_model(), **OPTIONS, target_modules=["q_proj", target])


def test_nothing_to_adapt_is_refused() -> None:
    with pytest.raises(ValueError, match="--target_modules names nothing"):
        lora.add_adapter(small_model(), **OPTIONS, target_modules=[])
    with pytest.raises(ValueError, match="--expert_rank 0"):
        lora.add_adapter(small_model(), r=8, lora_alpha=8, expert_rank=0)


def test_learning_rate_groups() -> None:
    model = lora.add_adapter(small_model(), **OPTIONS, train_projector=True)
    rates = {"kda": 1.0, "attention": 2.0, "experts": 3.0, "projector": 4.0, "dense": 5.0}
    groups = lora.parameter_groups(model, rates)
    by_id = {id(p): group for group in groups for p in group["params"]}
    assert len(by_id) == sum(p.requires_grad for p in model.parameters())
    types = model.config.text_config.layer_types
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "self_attn" in name:
            layer = int(name.split(".layers.")[1].split(".")[0])
            expected = "kda" if types[layer] == "linear_attention" else "attention"
        else:
            expected = "projector" if "mm_projector" in name else "experts" if ".experts." in name else "dense"
        assert by_id[id(parameter)]["name"] == expected, name
        assert by_id[id(parameter)]["lr"] == rates[expected]
    without = lora.parameter_groups(lora.add_adapter(small_model(), **OPTIONS, target_modules=["q_proj"]), rates)
    assert [group["name"] for group in without] == ["kda"] or "projector" not in [g["name"] for g in without]


def test_trainable_line_counts_packed_weights_as_weights() -> None:
    """The packed and the float model are the same number of weights."""
    lines = []
    for packed in (True, False):
        model = lora.add_adapter(small_model(packed=packed), **OPTIONS)
        groups = lora.parameter_groups(model, dict.fromkeys(("kda", "attention", "experts", "projector", "dense"), 1.0))
        lines.append(lora.trainable_line(model, groups))
    assert lines[0] == lines[1]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    assert lines[0].startswith(f"trainable parameters: {trained:,} of {total:,} = ")


def test_training_moves_every_factor() -> None:
    model = lora.add_adapter(small_model(), **OPTIONS)
    fill(model)
    ids = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.isfinite().all() and (parameter.grad != 0).any(), name


# --- files


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A folder with an adapter of the small model, and the logits with and without it."""
    folder = tmp_path_factory.mktemp("adapter")
    base = small_model()
    plain, identity = logits(base), lora.base_identity(base, "org/base")
    model = lora.add_adapter(base, **OPTIONS, train_projector=True)
    fill(model)
    checkpoint.save_adapter(model, folder, identity)
    return folder, plain, logits(model)


def test_stock_peft_and_our_reader_give_the_same_logits(saved) -> None:
    folder, plain, expected = saved
    assert sorted(file.name for file in folder.iterdir()) == sorted(checkpoint.ADAPTER_FILES)
    assert (expected - plain).abs().max() > 1e-2
    torch.testing.assert_close(logits(PeftModel.from_pretrained(small_model(), folder)), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(lora.load_adapter(small_model(), str(folder))), expected, rtol=1e-5, atol=1e-5)
    native = small_model()
    native.load_adapter(str(folder))
    torch.testing.assert_close(logits(native), expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_in_eight_bits(saved, tmp_path: Path) -> None:
    """As stock PEFT reads it, which widens it."""
    folder = shutil.copytree(saved[0], tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"
    save_file({name: x.to(torch.float8_e4m3fn) for name, x in load_file(weights).items()}, weights)
    expected = logits(PeftModel.from_pretrained(small_model(), folder))
    assert (expected - saved[1]).abs().max() > 1e-2
    torch.testing.assert_close(logits(lora.load_adapter(small_model(), str(folder))), expected, rtol=1e-5, atol=1e-5)
    base = small_model()
    identity = lora.base_identity(base, "org/base")
    model = lora.add_adapter(base, **OPTIONS, train_projector=True)
    lora.fill_adapter(model, str(folder), identity)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


def test_file_holds_factors_under_names_without_the_adapter(saved) -> None:
    tensors = load_file(saved[0] / "adapter_model.safetensors")
    assert all("lora_" in name and ".default" not in name for name in tensors)
    config = json.loads((saved[0] / "adapter_config.json").read_text())
    assert config["lora_dropout"] == 0 and config["modules_to_save"] is None
    assert sorted(config["target_parameters"]) == sorted(lora.EXPERT_TARGETS)
    assert set(config["rank_pattern"].values()) == {2}


def test_adapter_of_another_base_is_refused(saved, tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny())
    nn.init.normal_(other.language_model.model.norm.weight)
    with pytest.raises(ValueError, match=r"was made for another base model \(org/base\)"):
        lora.load_adapter(other.float(), str(saved[0]))
    wide = LatentMoEConfig.tiny()
    wide.text_config.rms_norm_eps = 1e-3
    with pytest.raises(ValueError, match="another base model"):
        lora.load_adapter(LatentMoEForConditionalGeneration(wide).float(), str(saved[0]))


def test_identity_ignores_dtype_and_packing() -> None:
    model = small_model()
    identity = lora.base_identity(model, "x")
    assert lora.base_identity(copy.deepcopy(model).bfloat16(), "x") == identity
    dense = small_model(packed=False)
    others = {name: p for name, p in model.state_dict().items() if ".experts." not in name}
    dense.load_state_dict(others, strict=False)
    assert lora.base_identity(dense, "x") == identity


def test_identity_of_a_fine_tuned_base_is_another() -> None:
    """A merge leaves config and norms as they were: an adapter of the merged model must not fit the first one."""
    model = small_model()
    identity = lora.base_identity(model, "x")
    layer = model.language_model.model.layers[3]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.mul_(1.01)
    assert lora.base_identity(model, "x") != identity


@pytest.mark.parametrize("fault", ["missing tensor", "extra tensor", "shape", "no config", "no file"])
def test_every_tensor_of_the_file_must_fit(fault: str, saved, tmp_path: Path) -> None:
    for file in checkpoint.ADAPTER_FILES:
        (tmp_path / file).write_bytes((saved[0] / file).read_bytes())
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    first = sorted(tensors)[0]
    if fault == "missing tensor":
        del tensors[first]
    if fault == "extra tensor":
        tensors["base_model.model.elsewhere.lora_A.weight"] = torch.zeros(2, 2)
    if fault == "shape":
        tensors[first] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    if fault == "no config":
        (tmp_path / "adapter_config.json").unlink()
    if fault == "no file":
        (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="adapter ") as error:
        lora.load_adapter(small_model(), str(tmp_path))
    assert "\n" not in str(error.value)


def test_router_biases_beside_an_adapter_are_applied(saved, tmp_path: Path) -> None:
    """By our reader; stock PEFT ignores the file and routes by the base's biases."""
    folder, _, expected = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    biases = {name: torch.linspace(-1, 1, 16) for name in routers(small_model())}
    write_biases(tmp_path, biases)
    model = lora.load_adapter(small_model(), str(tmp_path))
    for name, router in routers(model.get_base_model()).items():
        assert torch.equal(router.e_score_correction_bias, biases[name])
        assert not router.e_score_correction_bias.requires_grad
    assert (logits(model) - expected).abs().max() > 1e-2
    stock = PeftModel.from_pretrained(small_model(), tmp_path)
    torch.testing.assert_close(logits(stock), expected, rtol=1e-5, atol=1e-5)


def test_router_biases_that_do_not_fit_leave_the_model_as_it_was(saved, tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    model = small_model()
    write_biases(tmp_path, {name: torch.zeros(8) for name in routers(model)})
    with pytest.raises(ValueError, match=r"router_bias.safetensors: \S+ is float32 \[8\], the model needs"):
        lora.load_adapter(model, str(tmp_path))
    torch.testing.assert_close(logits(model), saved[1], rtol=0, atol=0)


def test_router_biases_come_with_a_download(saved, tmp_path: Path, monkeypatch) -> None:
    """What is asked of the Hub for an adapter includes them."""
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    write_biases(tmp_path, {name: torch.linspace(-1, 1, 16) for name in routers(small_model())})

    def download(repo: str, allow_patterns: list[str]) -> str:
        snapshot = tmp_path / "snapshot"
        snapshot.mkdir()
        for file in filter_repo_objects([file.name for file in tmp_path.iterdir()], allow_patterns=allow_patterns):
            shutil.copyfile(tmp_path / file, snapshot / file)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = lora.load_adapter(small_model(), "user/adapter").get_base_model()
    assert all(router.e_score_correction_bias[15] == 1 for router in routers(model).values())
