"""The kernel of this checkout inside adapted dense layers: as accurate as torch, in training and in generation."""

import pytest
import torch
from small_model import assert_as_accurate, batches, results, small_model
from torch import nn

from modeling_latentmoe import kernel_loading
from modeling_latentmoe.training.lora import add_adapter

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of adapters alone, so that no other's rounding counts; "hub" would refuse the CPU."""
    loaded = dict.fromkeys((name, "auto") for name in kernel_loading.REPOSITORIES)
    loaded["low_rank", "auto"] = kernel_loading.load("low_rank", "auto")
    monkeypatch.setattr(kernel_loading, "_LOADED", loaded)


def adapted(dtype: torch.dtype, device: str) -> nn.Module:
    """With fp32 factors beside weights that bf16 holds; everything in float64 where that is asked for."""
    model = small_model().bfloat16().to(device, dtype)
    torch.manual_seed(2)
    model = add_adapter(model, r=4, lora_alpha=8, expert_rank=1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape).mul(0.1).to(parameter)
    return model


def compare(dtype: torch.dtype, device: str, T: int) -> None:
    batch = batches(device, T)["packed"]
    model = adapted(dtype, device)
    true = results(adapted(torch.float64, device), batch, "torch")
    plain = {name: value.clone() for name, value in results(model, batch, "torch").items()}
    got = results(model, batch, "auto")
    assert sum("lora_" in name for name in got) == sum("lora_" in name for name, _ in model.named_parameters())
    assert any(not torch.equal(got[name], plain[name]) for name in got)
    assert_as_accurate(got, plain, true, dtype)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below runs on the GPU")
def test_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_loading, "DEVICES", ("cpu",))
    compare(torch.float32, "cpu", T=18)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_the_gpu(dtype: torch.dtype) -> None:
    compare(dtype, "cuda", T=70)
