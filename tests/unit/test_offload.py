"""Activations on the host: the same bits, everything once, and nothing that outlives backward."""

import gc
import inspect
import weakref

import pytest
import torch
from torch import Tensor, nn

from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.training import lora, micro_batches, offload
from modeling_latentmoe.training.loading import checkpoint_activations
from modeling_latentmoe.training.offload import offload_activations

from .models import mixed_config


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 1024)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What went to the host, in order."""
    found, init = [], offload._Elements.__init__

    def watched(self: offload._Elements, elements: Tensor) -> None:
        init(self, elements)
        assert self.host.untyped_storage().data_ptr() != elements.untyped_storage().data_ptr()
        found.append(elements)

    monkeypatch.setattr(offload._Elements, "__init__", watched)
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_changes(recompute: bool, sent: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(mixed_config("kdm"))
    model = lora.add_adapter(model, r=4, lora_alpha=8, expert_rank=2).train()
    if recompute:
        checkpoint_activations(model.get_base_model())
    batch = micro_batches.trial_batch(2, 40, model.config)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(**batch).loss.backward()
        return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}

    expected = gradients()
    forward = inspect.signature(model.get_base_model().forward)
    offload_activations(model.get_base_model())
    # `generate` reads it
    assert inspect.signature(model.get_base_model().forward) == forward
    found = gradients()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    assert not any(x.untyped_storage().data_ptr() in weights for x in sent)
    layers = model.config.text_config.num_hidden_layers
    # with recomputation what enters the layers, else everything
    assert sum(x.nbytes for x in sent) >= layers * 80 * 64 * 4 * (1 if recompute else 10)


class Uses(nn.Module):
    """Of x * 2: kept by four operations, once as another shape and once half of it, beside one that is transposed."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2.0
        z = y.t().contiguous().t()
        wide = (y.view(-1, 64) @ torch.ones(64, 1)).sum() + y.view(-1, 64).square().sum()
        return y.sin().sum() + wide + y[:16].cos().sum() + z.exp().cumsum(1).square().sum()


def test_what_several_operations_keep_is_sent_once(sent: list[Tensor]) -> None:
    x = torch.randn(32, 32, requires_grad=True)
    expected = torch.autograd.grad(Uses()(x), x)[0]
    model = Uses()
    offload_activations(model)
    out = model(x)
    # y, its half, what exp returned, and what the last square takes
    assert [y.numel() for y in sent] == [1024, 512, 1024, 1024]
    assert torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], expected)
    assert torch.equal(torch.autograd.grad(out, x)[0], expected)


def test_what_changes_between_is_sent_again(sent: list[Tensor]) -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2.0
            first = y.sin().sum()
            return first + y.mul_(3.0).cos().sum()

    x = torch.randn(32, 32, requires_grad=True)
    model = Changes()
    offload_activations(model)
    got = torch.autograd.grad(model(x), x)[0]
    assert len(sent) == 2
    torch.testing.assert_close(got, 2 * (2 * x).cos() - 6 * (6 * x).sin())


def test_expanded_and_strided_tensors(sent: list[Tensor]) -> None:
    class Strided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2.0
            return (y[:, ::2].sin() + y[:, 1::2]).sum() + y[:, None].expand(32, 3, 32).cos().sum()

    x = torch.randn(32, 32, requires_grad=True)
    expected = torch.autograd.grad(Strided()(x), x)[0]
    model = Strided()
    offload_activations(model)
    assert torch.equal(torch.autograd.grad(model(x), x)[0], expected) and len(sent) == 2


def test_a_model_is_freed() -> None:
    """When it is dropped, not when Python looks for cycles."""
    model = nn.Linear(2, 2)
    offload_activations(model)
    model(torch.ones(1, 2)).sum().backward()
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
