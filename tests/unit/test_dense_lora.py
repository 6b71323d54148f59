"""LoRA on dense layers through `ops.add_low_rank`: the function and gradients of PEFT's own, and what it keeps."""

import copy
from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear
from torch import nn
from transformers import PreTrainedConfig

from modeling_latentmoe import ops
from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.training import dense_lora, lora

INPUTS, OUTPUTS, RANK = 40, 56, 4


class Layers(nn.Module):
    """Two linear layers, as PEFT finds them in a model."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(INPUTS, OUTPUTS, dtype=dtype)
        self.second = nn.Linear(OUTPUTS, INPUTS, bias=False, dtype=dtype)
        self.config = PreTrainedConfig()
        self.config.kernels = "torch"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def adapted(dtype: torch.dtype = torch.float32, fused: bool = True, **options) -> PeftModel:
    """With fp32 factors (fp64 in a model of that dtype), all random."""
    config = LoraConfig(r=RANK, lora_alpha=6, target_modules=["first", "second"], **options)
    model = get_peft_model(Layers(dtype), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            wide = torch.promote_types(dtype, torch.float32)
            parameter.data = torch.randn(parameter.shape).mul(0.3).to(wide)
    if fused:
        dense_lora.fuse_dense(model)
    return model


def layers(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def results(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients, of the input too."""
    x = x.to(next(model.parameters()).dtype).requires_grad_()
    model.zero_grad()
    out = model(x)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"out": out.detach(), "x": x.grad} | gradients


def error(x: torch.Tensor, true: torch.Tensor) -> float:
    return ((x.double() - true).norm() / true.norm()).item()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen rows at a time."""
    monkeypatch.setattr(ops, "LOW_RANK_BYTES", 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", [(50,), (3, 11), (1,), ()])
def test_fp32_is_what_peft_computes(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, INPUTS)
    got, wanted = results(adapted(), x), results(adapted(fused=False), x)
    assert got.keys() == wanted.keys() and sum("lora_" in name for name in got) == 4
    for name in wanted:
        assert error(got[name], wanted[name].double()) < 1e-6, name


@pytest.mark.usefixtures("small_blocks")
def test_bf16_errs_no_more_than_peft() -> None:
    x = torch.randn(200, INPUTS).bfloat16()
    true = adapted(torch.float64)
    # what bf16 made of the weights is no error
    true.load_state_dict(adapted(torch.bfloat16).state_dict())
    true = results(true, x)
    got, plain = results(adapted(torch.bfloat16), x), results(adapted(torch.bfloat16, fused=False), x)
    for name in true:
        assert got[name].dtype == plain[name].dtype
        assert error(got[name], true[name]) <= 2 * error(plain[name], true[name]), name


def test_float64_stays_float64() -> None:
    x = torch.randn(9, INPUTS)
    got, wanted = (results(adapted(torch.float64, fused), x) for fused in (True, False))
    for name in wanted:
        assert error(got[name], wanted[name]) < 1e-14, name


def test_gradients_are_derivatives() -> None:
    model = adapted(torch.float64)
    parameters = [p for p in model.parameters() if p.requires_grad]
    x = torch.randn(3, INPUTS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: model(x), (x, *parameters))


def test_no_wide_copy_is_kept_or_made() -> None:
    """Of 16-bit rows: the tensors that a layer keeps are its input as it came and the low rows."""
    model = adapted(torch.bfloat16)
    x = torch.randn(64, INPUTS, dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layers(model)[0](x)
    wide = [t.shape for t in kept if t.dtype == torch.float32 and not isinstance(t, nn.Parameter)]
    assert wide == [(64, RANK)]
    assert any(t.data_ptr() == x.data_ptr() for t in kept)


def test_autocast_does_not_round_gradients() -> None:
    torch.manual_seed(0)
    y, x = torch.randn(6, OUTPUTS), torch.randn(6, INPUTS, requires_grad=True)
    a, b = torch.randn(RANK, INPUTS, requires_grad=True), torch.randn(OUTPUTS, RANK, requires_grad=True)
    out = ops.AddLowRank.apply(y, x, a, b, 0.5)
    want = torch.autograd.grad(out, (x, a, b), out.detach(), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(out, (x, a, b), out.detach())
    assert all(torch.equal(mine, other) for mine, other in zip(got, want, strict=True))


def test_an_input_that_needs_no_gradient_and_frozen_factors() -> None:
    model = adapted()
    model(torch.randn(5, INPUTS)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.requires_grad_(False)
    x = torch.randn(5, INPUTS, requires_grad=True)
    model(x).sum().backward()
    plain = adapted(fused=False).requires_grad_(False)
    torch.testing.assert_close(x.grad, torch.autograd.grad(plain(x).sum(), x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("safe", [True, False])
def test_merging_is_peft_s(safe: bool, dtype: torch.dtype) -> None:
    weights = []
    for fused in (True, False):
        model = adapted(dtype, fused)
        for layer in layers(model):
            layer.merge(safe_merge=safe)
        merged = [layer.base_layer.weight.clone() for layer in layers(model)]
        assert all(torch.equal(layer(x), layer.base_layer(x)) for layer in layers(model)[:1] for x in [rows(dtype)])
        for layer in layers(model):
            layer.unmerge()
        weights.append(merged + [layer.base_layer.weight for layer in layers(model)])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, INPUTS, generator=torch.Generator().manual_seed(2)).to(dtype)


def test_switching_off_and_several_adapters() -> None:
    x, outputs = rows(torch.bfloat16), []
    for fused in (True, False):
        model = adapted(torch.bfloat16, fused)
        model.add_adapter("other", LoraConfig(r=2, target_modules=["first"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "other"])
        torch.manual_seed(3)
        for layer in layers(model):
            if "other" in layer.lora_A:
                nn.init.normal_(layer.lora_A["other"].weight)
                nn.init.normal_(layer.lora_B["other"].weight)
        if fused:
            dense_lora.fuse_dense(model)
        with model.disable_adapter():
            assert torch.equal(model(x), Layers(torch.bfloat16)(x))
        outputs.append(model(x))
    # each adapter is rounded, and PEFT rounds their sum
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)


def test_a_batch_with_one_adapter_per_row() -> None:
    x, names = rows(torch.bfloat16), ["default", "__base__", "default", "__base__"]
    got, wanted = (adapted(torch.bfloat16, fused).eval()(x, adapter_names=names) for fused in (True, False))
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}])
def test_other_kinds_of_adapters_keep_peft_s_forward(options: dict) -> None:
    model = adapted(torch.bfloat16, **options)
    affected = layers(model)
    assert not any(isinstance(v, dense_lora.FusedVariant) for layer in affected for v in layer.lora_variant.values())
    model(rows(torch.bfloat16)).sum().backward()


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.5}, {"use_dora": True}])
@pytest.mark.parametrize("used", ["later", ["default", "later"]], ids=str)
def test_an_adapter_that_peft_adds_later_keeps_peft_s_forward(used: str | list[str], options: dict) -> None:
    outputs = []
    for fused in (True, False):
        model = adapted(torch.bfloat16, fused)
        torch.manual_seed(3)
        model.add_adapter("later", LoraConfig(r=2, target_modules=["first"], init_lora_weights=False, **options))
        model.base_model.set_adapter(used)
        outputs.append(model.eval()(rows(torch.bfloat16)))
    # each adapter is rounded, and PEFT rounds their sum
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)


def test_peft_still_hands_over_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a release of PEFT no longer asks `lora_variant`, or casts the input before it does."""
    seen = []
    forward = ops.add_low_rank

    def spy(y, x, *arguments):
        seen.append((y.dtype, x.dtype))
        return forward(y, x, *arguments)

    monkeypatch.setattr(dense_lora, "add_low_rank", spy)
    model = copy.deepcopy(adapted(torch.bfloat16))
    model(rows(torch.bfloat16))
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2, f"peft {peft.__version__} computes dense layers otherwise"


def test_a_copied_model_has_its_own_choice_of_kernels() -> None:
    model = adapted()
    other = copy.deepcopy(model)
    other.get_base_model().config.kernels = "hub"
    model(rows(torch.float32))
    with pytest.raises(ValueError, match='kernels="hub": low_rank'):
        other(rows(torch.float32))


def tiny_model() -> LatentMoEForConditionalGeneration:
    torch.manual_seed(0)
    return LatentMoEForConditionalGeneration(LatentMoEConfig.tiny()).float().eval()


def test_every_dense_layer_of_the_model_is_fused(tmp_path: Path) -> None:
    """Those of a new adapter and of one that is read; what PEFT stores and reads is as without."""
    model = lora.add_adapter(tiny_model(), r=4, lora_alpha=8, expert_rank=2, train_projector=True)
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    ids = torch.arange(3, 40)[None]
    again = lora.load_adapter(tiny_model(), str(tmp_path))
    for fused in (model, again):
        assert layers(fused)
        for layer in layers(fused):
            assert isinstance(layer.lora_variant["default"], dense_lora.FusedVariant)
            assert layer.lora_variant["default"].config is fused.config.get_text_config()
    stock = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert not any(layer.lora_variant for layer in layers(stock))
    with torch.no_grad():
        outputs = [m.eval()(input_ids=ids).logits for m in (model, again, stock)]
    assert torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])


def test_recomputed_activations_give_the_same_gradients() -> None:
    ids, found = torch.arange(3, 30)[None], []
    for recompute in (False, True):
        torch.manual_seed(5)
        model = lora.add_adapter(tiny_model(), r=4, lora_alpha=8, expert_rank=2).train()
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
        if recompute:
            model.get_base_model().gradient_checkpointing_enable()
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
