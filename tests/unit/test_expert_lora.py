"""Stock PEFT adapters on routed experts: packed and dequantised bases agree, files are standard."""

import json
from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_latentmoe import LatentMoEForConditionalGeneration, moe
from modeling_latentmoe.expert_lora import unwrap_experts
from modeling_latentmoe.moe import Experts
from modeling_latentmoe.mxfp4 import LatentMoEMxfp4Config

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden" / "checkpoint"
IDS_BT = torch.arange(1, 25).view(2, 12) * 7 % 200
DENSE_TARGETS = ["q_proj", "o_proj", "kv_b_proj", "routed_expert_down_proj", "up_proj"]
EXPERT_TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def packed(dtype: torch.dtype = torch.float32) -> LatentMoEForConditionalGeneration:
    return LatentMoEForConditionalGeneration.from_pretrained(GOLDEN, dtype=dtype)


def dense(dtype: torch.dtype = torch.float32) -> LatentMoEForConditionalGeneration:
    return LatentMoEForConditionalGeneration.from_pretrained(
        GOLDEN, dtype=dtype, quantization_config=LatentMoEMxfp4Config(dequantize=True)
    )


def lora(**changes) -> LoraConfig:
    return LoraConfig(
        **{"r": 3, "lora_alpha": 6, "target_modules": DENSE_TARGETS, "target_parameters": EXPERT_TARGETS} | changes
    )


def adapted(base: torch.nn.Module, seed: int = 0, **changes) -> PeftModel:
    torch.manual_seed(seed)
    return get_peft_model(base, lora(**changes))


def train(model: torch.nn.Module, steps: int = 4) -> list[float]:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS_BT, labels=IDS_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS_BT).logits


def experts(model: torch.nn.Module, layer: int = 1) -> torch.nn.Module:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return base.language_model.model.layers[layer].block_sparse_moe.experts


def hashes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return ((a - b).abs().max() / b.abs().max()).item() < tolerance


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """An adapter trained on the packed base, and the logits that it gives there."""
    folder = tmp_path_factory.mktemp("adapter")
    model = adapted(packed())
    train(model)
    model.save_pretrained(folder)
    return folder, logits(model)


def test_packed_and_dequantised_train_alike_and_write_the_same_file(tmp_path):
    models = {"packed": adapted(packed()), "dense": adapted(dense())}
    bytes_before = hashes(models["packed"])
    losses, files = {}, {}
    for name, model in models.items():
        losses[name] = train(model)
        model.save_pretrained(tmp_path / name)
        files[name] = load_file(tmp_path / name / "adapter_model.safetensors")
    assert losses["packed"] == pytest.approx(losses["dense"], rel=1e-5)
    assert losses["packed"][-1] < losses["packed"][0] - 0.1
    assert files["packed"].keys() == files["dense"].keys()
    for name, value in files["packed"].items():
        torch.testing.assert_close(value, files["dense"][name], rtol=1e-3, atol=2e-4, msg=name)
    for name, value in hashes(models["packed"]).items():
        assert torch.equal(value, bytes_before[name])


def test_file_is_pefts_own_layout(trained):
    folder, _ = trained
    tensors = load_file(folder / "adapter_model.safetensors")
    prefix = "base_model.model.language_model.model.layers.1.block_sparse_moe.experts."
    shapes = {name.removeprefix(prefix): tuple(t.shape) for name, t in tensors.items() if name.startswith(prefix)}
    assert shapes == {
        "base_layer.lora_A.weight": (16 * 3, 32),
        "base_layer.lora_B.weight": (64, 3 * 16),
        "lora_A.weight": (16 * 3, 32),
        "lora_B.weight": (32, 3 * 16),
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["lora_dropout"] == 0
    assert sorted(config["target_parameters"]) == sorted(EXPERT_TARGETS)


@pytest.mark.parametrize("base", [packed, dense])
@pytest.mark.parametrize("how", ["PeftModel", "low_cpu_mem_usage", "load_adapter"])
def test_stock_loading_on_both_bases(trained, base, how):
    folder, expected = trained
    model = base()
    if how == "load_adapter":
        model.load_adapter(str(folder))
    else:
        model = PeftModel.from_pretrained(model, folder, low_cpu_mem_usage=how == "low_cpu_mem_usage")
    assert close(logits(model), expected)
    assert not close(logits(base()), expected)


def stock_forward(monkeypatch) -> None:
    """Let PEFT's wrappers run their own forward, which adds B A to the weights."""
    monkeypatch.setattr(moe, "unwrap_experts", lambda module, _: (module, {}))
    original = Experts.forward
    monkeypatch.setattr(Experts, "forward", lambda self, x, ids, weights, adapters: original(self, x, ids, weights, {}))


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"target_parameters": EXPERT_TARGETS[:1]}])
def test_dequantised_equals_stock_peft_forward_and_gradients(monkeypatch, changes):
    model = adapted(dense(), **changes)
    train(model, steps=2)
    results = []
    for stock in (False, True):
        if stock:
            stock_forward(monkeypatch)
        model.zero_grad()
        loss = model(input_ids=IDS_BT, labels=IDS_BT).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        results.append((logits(model), grads))
    (ours, our_grads), (theirs, their_grads) = results
    assert close(ours, theirs)
    assert any("experts" in name for name in our_grads)
    for name, grad in our_grads.items():
        assert ((grad - their_grads[name]).abs().max() <= 1e-4 * their_grads[name].abs().max()).item(), name


@pytest.mark.parametrize("base", [packed, dense])
def test_no_tensor_as_large_as_an_expert_stack(base, monkeypatch):
    from modeling_latentmoe import ops

    monkeypatch.setattr(ops, "DECODED_BYTES", 1)
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                # Views of the frozen stack itself are no new memory.
                if (
                    isinstance(t, torch.Tensor)
                    and t.is_floating_point()
                    and t.untyped_storage().data_ptr() not in known
                ):
                    largest = max(largest, t.numel())
            return out

    model = adapted(base(), target_modules=[], r=1)
    block = model.get_base_model().language_model.model.layers[1].block_sparse_moe
    known = {p.untyped_storage().data_ptr() for p in block.parameters()}
    x_BTD = torch.randn(1, 3, 64, requires_grad=True)
    with Largest():
        block(x_BTD)[0].sum().backward()
    assert experts(model).lora_B["default"].weight.grad.abs().sum() > 0
    assert 0 < largest < 16 * 32 * 32


def test_checkpointed_layers_give_the_same_gradients():
    model = adapted(packed())
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            model.get_base_model().gradient_checkpointing_enable()
            model.enable_input_require_grads()
        model.train()
        model.zero_grad()
        model(input_ids=IDS_BT, labels=IDS_BT).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-7, msg=name)


def test_adapters_switch_off_and_over(trained, tmp_path):
    folder, expected = trained
    model = PeftModel.from_pretrained(packed(), folder, adapter_name="a")
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(packed()))
    other = adapted(dense(), seed=7)
    train(other, steps=2)
    other.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, adapter_name="b")
    assert close(logits(model), expected)
    model.set_adapter("b")
    assert close(logits(model), logits(other))
    model.base_model.set_adapter(["a", "b"])
    both = PeftModel.from_pretrained(dense(), folder, adapter_name="a")
    both.load_adapter(tmp_path, adapter_name="b")
    both.base_model.set_adapter(["a", "b"])
    assert close(logits(model), logits(both))
    assert not close(logits(model), expected)


def test_unload_gives_back_the_packed_model(trained, tmp_path):
    model = PeftModel.from_pretrained(packed(), trained[0]).unload()
    assert torch.equal(logits(model), logits(packed()))
    model.save_pretrained(tmp_path)
    saved, disk = {}, {}
    for folder, into in ((tmp_path, saved), (GOLDEN, disk)):
        for file in folder.glob("*.safetensors"):
            into |= load_file(file)
    assert saved.keys() == disk.keys()
    assert all(torch.equal(saved[name], disk[name]) for name in disk)


@pytest.mark.parametrize("safe_merge", [False, True])
def test_merging_into_bytes_raises_and_changes_none(trained, safe_merge):
    model = PeftModel.from_pretrained(packed(), trained[0])
    before = hashes(model)
    with pytest.raises(RuntimeError):
        model.merge_and_unload(safe_merge=safe_merge)
    for name, value in hashes(model).items():
        assert torch.equal(value, before[name])


def test_merging_into_floats_gives_the_adapted_model(trained):
    folder, expected = trained
    # W + BA rounded once in every matrix of six layers: the noise between correct implementations is 5e-5.
    assert close(logits(PeftModel.from_pretrained(dense(), folder).merge_and_unload()), expected, 2e-4)


def test_merged_in_place_then_disabled(trained):
    folder, expected = trained
    model = PeftModel.from_pretrained(dense(), folder)
    model.merge_adapter()
    assert close(logits(model), expected, 2e-4)
    with model.disable_adapter():
        assert close(logits(model), logits(dense()), 2e-4)


def test_bf16_base_keeps_fp32_factors(trained):
    folder, _ = trained
    model = PeftModel.from_pretrained(packed(torch.bfloat16), folder)
    assert experts(model).lora_A["default"].weight.dtype == torch.float32
    loss = adapted_loss = None
    with torch.no_grad():
        loss = model(input_ids=IDS_BT, labels=IDS_BT).loss
        adapted_loss = PeftModel.from_pretrained(dense(torch.bfloat16), folder)(input_ids=IDS_BT, labels=IDS_BT).loss
    assert loss.item() == pytest.approx(adapted_loss.item(), rel=2e-2)


def test_router_trains_only_when_named():
    names = {name for name, p in adapted(packed()).named_parameters() if p.requires_grad}
    assert not any(".gate." in name for name in names)
    model = adapted(packed(), target_parameters=[*EXPERT_TARGETS, "gate.weight"])
    train(model, steps=2)
    gate = model.get_base_model().language_model.model.layers[1].block_sparse_moe.gate
    assert gate.lora_B["default"].weight.abs().sum() > 0


# --- misuse ---


def test_other_tuners_on_the_experts_are_refused():
    from peft import LoHaConfig

    with pytest.raises(ValueError, match="not supported"):
        get_peft_model(packed(), LoraConfig(target_modules=["experts"]))
    with pytest.raises(TypeError, match="not supported"):
        get_peft_model(packed(), LoHaConfig(target_modules=["experts"]))

    class SomeTunerLayer(torch.nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

    model = packed()
    block = model.language_model.model.layers[1].block_sparse_moe
    block.experts = SomeTunerLayer(block.experts)
    with pytest.raises(TypeError, match=r"SomeTunerLayer around routed experts.*target_parameters"):
        logits(model)


def test_fully_trained_copies_of_the_experts_are_refused():
    model = get_peft_model(dense(), LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"]))
    with pytest.raises(TypeError, match="ModulesToSaveWrapper around routed experts"):
        logits(model)


@pytest.mark.parametrize("changes", [{"lora_dropout": 0.1}, {"use_dora": True}])
def test_options_that_cannot_be_factored_are_refused(changes):
    with pytest.raises(ValueError, match="does not work"):
        adapted(packed(), **changes)


def test_one_adapter_per_row_is_refused(trained):
    model = PeftModel.from_pretrained(packed(), trained[0], adapter_name="a").eval()
    with pytest.raises(ValueError, match="adapter_names"):
        model(input_ids=IDS_BT, adapter_names=["a", "__base__"])


def test_factors_of_the_stored_instead_of_the_logical_shape_are_refused():
    """What peft before 0.21 would make of packed parameters."""
    model = packed()
    for param in model.parameters():
        param.__dict__.pop("ds_shape", None)
    with pytest.raises(ValueError, match=r"do not fit expert weights \[16, .*peft >= 0.21"):
        logits(adapted(model))


# --- tripwire ---


def test_pefts_wrapper_still_looks_as_expected():
    """Everything `expert_lora.py` reads. If this fails after an update of peft, that file must follow."""
    assert peft.__version__.startswith("0.21.")
    model = adapted(packed(), r=3, lora_alpha=6)
    down = experts(model)
    gate_up = down.base_layer
    assert [type(w).__name__ for w in (down, gate_up)] == ["ParamWrapper", "ParamWrapper"]
    assert [w.parameter_name for w in (down, gate_up)] == ["down_proj", "gate_up_proj"]
    assert isinstance(gate_up.base_layer, Experts) and gate_up.get_base_layer() is gate_up.base_layer
    for wrapper, (rows, columns) in ((down, (32, 32)), (gate_up, (64, 32))):
        assert wrapper.active_adapters == ["default"] and wrapper.scaling == {"default": 2.0}
        assert wrapper.disable_adapters is False and wrapper.merged is False
        assert wrapper.num_experts == 16
        a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
        assert (a.shape, b.shape) == ((16 * 3, columns), (rows, 16 * 3))
        torch.nn.init.normal_(b)
    # The layout of both factors, from PEFT's own product of them.
    _, adapters = unwrap_experts(down, Experts)
    for stem, wrapper in (("gate_up", gate_up), ("down", down)):
        (factors,) = adapters[stem]
        delta = wrapper.scaling["default"] * factors.b_EOr @ factors.a_ErI
        wrapper.get_param = lambda: torch.empty(0)
        torch.testing.assert_close(delta, wrapper.get_delta_weight("default"))
