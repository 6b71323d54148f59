"""Backward computes again what it would have kept: the same bits, less memory, also among other hooks."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from recorder import Recorder
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from modeling_latentmoe import kda, layers, mla, modeling_latentmoe, moe
from modeling_latentmoe.recompute import recomputed
from modeling_latentmoe.training.loading import checkpoint_activations

from .models import mixed_config, random_model


class Counted:
    """A cheap function of which is known how often it ran."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.sigmoid()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 30, generator=generator, requires_grad=True)
    return x, torch.randn(30, 30, generator=generator, requires_grad=True)


def uses(y: Tensor, weight: Tensor) -> Tensor:
    """Keeps y three times, of which once as a view that begins later."""
    return (y @ weight).sum() + (y[3:].t() * 2.0).square().sum() + (y.view(-1, 60) @ weight.view(60, -1)).sum()


def run(step: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> tuple[list[Tensor], int]:
    """Gradients, and the bytes that are held when backward begins."""
    with Recorder() as recorder:
        out = step()
        held = recorder.live_bytes()
    return [out.detach(), *torch.autograd.grad(out, leaves)], held


def test_once_for_all_uses_and_to_the_bit() -> None:
    x, weight = inputs()
    function = Counted()

    def step() -> Tensor:
        y = function(x)
        with recomputed(y, function, x):
            return uses(y, weight)

    expected, _ = run(lambda: uses(x.sigmoid(), weight), (x, weight))
    got, _ = run(step, (x, weight))
    assert function.calls == 2
    assert all(map(torch.equal, got, expected))


def test_again_for_a_second_backward() -> None:
    x, weight = inputs()
    function = Counted()
    y = function(x)
    with recomputed(y, function, x):
        out = uses(y, weight)
    first = torch.autograd.grad(out, (x, weight), retain_graph=True)
    second = torch.autograd.grad(out, (x, weight))
    assert function.calls == 3 and all(map(torch.equal, first, second))


@pytest.mark.parametrize("around", ["nothing", "another", "checkpoint", "hooks"])
def test_less_is_held(around: str) -> None:
    """Of a norm of a mixture and its square, nested, nothing is kept; in checkpointing none of what the inner ones keep
    escapes it."""
    x, weight = inputs()

    def plain(x: Tensor) -> Tensor:
        return ((x * 2.0).cos() @ weight).square().sum()

    def step(x: Tensor) -> Tensor:
        y = x * 2.0
        with recomputed(y, lambda x: x * 2.0, x):
            z = y.cos()
            with recomputed(z, torch.cos, y):
                del y
                return (z @ weight).square().sum()

    packed = []
    if around == "checkpoint":

        def wrap(f: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
            return lambda: checkpoint(f, x, use_reentrant=False)
    elif around == "hooks":

        def wrap(f: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
            def hooked() -> Tensor:
                hooks = torch.autograd.graph.saved_tensors_hooks(lambda y: packed.append(y) or y, lambda y: y)
                with hooks:
                    return f(x)

            return hooked
    else:

        def wrap(f: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
            return lambda: f(x)

    expected, most = run(wrap(plain), (x, weight))
    seen = len(packed)
    got, held = run(wrap(step), (x, weight))
    assert all(map(torch.equal, got, expected))
    # y, z; the product that square keeps stays
    assert most - held == (0 if around == "checkpoint" else 2 * 4 * x.numel())
    if around == "hooks":
        # What came to the hooks around: x, where y and z were, and the product.
        computed = [sum(not y.is_leaf for y in part) for part in (packed[:seen], packed[seen:])]
        assert computed == [3, 1] and any(y is x for y in packed[seen:])


def test_several_outputs_and_one_that_is_an_input() -> None:
    x, weight = inputs()
    calls = []

    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(1)
        return x.sin(), x.view(-1), x.cos()

    y, same, z = function(x)
    with recomputed((y, same, z), function, x):
        out = (y @ weight).sum() + (same.view_as(x) @ weight).sum() + (z.t() @ y).sum()
    got = torch.autograd.grad(out, (x, weight))
    y, z = x.sin(), x.cos()
    expected = torch.autograd.grad((y @ weight).sum() + (x @ weight).sum() + (z.t() @ y).sum(), (x, weight))
    assert len(calls) == 2 and all(map(torch.equal, got, expected))


def test_memory_that_is_used_again_is_not_taken_for_an_output() -> None:
    """Outputs may be freed under it, and what comes next often lies in the same place."""
    x, weight = inputs()
    y = x * 2.0
    with recomputed(y, lambda x: x * 2.0, x):
        del y
        others = [x + float(i) for i in range(50)]
        out = sum((other @ weight).sum() for other in others)
    got = torch.autograd.grad(out, weight)[0]
    assert torch.allclose(got, sum(other.sum(0) for other in others)[:, None].expand_as(got), rtol=1e-4)


def test_parameters_are_kept_as_objects() -> None:
    """Their bytes may be elsewhere when backward begins (tiers.py)."""
    x, weight = inputs()
    weight.requires_grad_(False)
    y = x.sigmoid()
    with recomputed(y, torch.sigmoid, x):
        out = (torch.mul(y, weight[0]) @ torch.eye(30)).sum() + torch.nn.functional.linear(y, weight).sum()
    assert torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], torch.autograd.grad(out, x)[0])

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return y @ weight

        @staticmethod
        def backward(ctx, dout: Tensor) -> tuple[Tensor, None]:
            assert ctx.saved_tensors[0] is weight
            return dout @ weight.t(), None

    y = x.sigmoid()
    with recomputed(y, torch.sigmoid, x):
        out = Product.apply(y, weight)
    torch.autograd.grad(out.sum(), x)


def test_under_the_autocast_of_forward() -> None:
    x, _ = inputs()

    def function(x: Tensor) -> Tensor:
        return x @ x.t()

    with torch.autocast("cpu", torch.bfloat16):
        y = function(x)
        with recomputed(y, function, x):
            out = y.square().sum()
        assert y.dtype == torch.bfloat16
        expected = torch.autograd.grad(function(x).square().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(out, x)[0], expected)


def test_devices_without_autocast() -> None:
    x, weight = (leaf.detach().to("meta").requires_grad_() for leaf in inputs())
    y = x.sigmoid()
    with recomputed(y, torch.sigmoid, x):
        out = uses(y, weight)
    assert [g.shape for g in torch.autograd.grad(out, (x, weight))] == [x.shape, weight.shape]


@pytest.mark.parametrize("changed", ["the input", "an output's neighbour", "a view"])
def test_a_change_in_place_is_an_error(changed: str) -> None:
    x, weight = inputs()
    leaf = x * 1.0
    y = leaf.sigmoid()
    with recomputed(y, torch.sigmoid, leaf):
        other = weight * 2.0
        out = (y @ other).sum()
    with torch.no_grad():
        {"the input": leaf, "an output's neighbour": other, "a view": leaf[:1]}[changed].add_(1.0)
    with pytest.raises(RuntimeError, match=r"a tensor of \((40|30), 30\) that backward needs was changed in place"):
        torch.autograd.grad(out, (x, weight))


def test_tensors_of_inference_mode_are_taken_where_nothing_is_kept() -> None:
    with torch.inference_mode():
        x = torch.randn(4, 4)
    with recomputed(y := x.sigmoid(), torch.sigmoid, x):
        assert torch.equal(y @ y, x.sigmoid() @ x.sigmoid())


def test_an_input_that_changes_before_an_output_is_kept_is_an_error() -> None:
    """The output is still what it was: it would be computed again to something else."""
    x, weight = inputs()
    leaf = x * 1.0
    y = leaf.sigmoid()
    with recomputed(y, torch.sigmoid, leaf), torch.no_grad():
        leaf.add_(1.0)
        with torch.enable_grad(), pytest.raises(RuntimeError, match="that backward needs was changed in place"):
            y @ weight


@pytest.mark.parametrize("checkpointed", [False, True])
def test_nothing_waits_for_the_garbage_collector(checkpointed: bool) -> None:
    x, weight = inputs()
    seen = []

    def function(x: Tensor) -> Tensor:
        y = x.sigmoid()
        seen.append(weakref.ref(y))
        return y

    def step(x: Tensor) -> Tensor:
        y = function(x * 1.0)
        with recomputed(y, function, x):
            return uses(y, weight)

    gc.collect()
    gc.disable()
    try:
        out = checkpoint(step, x, use_reentrant=False) if checkpointed else step(x)
        out.backward()
        assert len(seen) == 2 + checkpointed and all(reference() is None for reference in seen)
    finally:
        gc.enable()


def test_compiles_as_one_graph() -> None:
    """A compiler decides itself what is kept: hooks on saved tensors would break its graph."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x.sigmoid()
        with recomputed(y, torch.sigmoid, x):
            return y @ w

    given = [torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    expected = function(*given)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(*given)
    assert torch.equal(found, expected)
    for x, y in zip(torch.autograd.grad(found.sum(), given), torch.autograd.grad(expected.sum(), given), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=0)


def test_without_gradients_there_is_nothing_to_do() -> None:
    x, weight = inputs()
    function = Counted()
    with torch.no_grad():
        y = function(x)
        with recomputed(y, function, x):
            assert uses(y, weight).grad_fn is None
    assert function.calls == 1


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("batch", ["one row", "padded", "packed"])
def test_the_model_computes_the_same_in_less_memory(
    checkpointing: str, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer's gradients to the bit. Checkpointing keeps what it kept."""
    model = random_model(mixed_config("kmdk")).train()
    if checkpointing != "none":
        checkpoint_activations(model, selective=checkpointing == "selective")
    ids = torch.randint(0, 250, (1 if batch == "packed" else 2, 30), generator=torch.Generator().manual_seed(0))
    borders = {}
    if batch == "padded":
        borders["attention_mask"] = (torch.arange(30) < torch.tensor([[30], [21]])).long()
    elif batch == "packed":
        borders["cu_seqlens"] = torch.tensor([0, 13, 30])
    found = []
    for kept in (False, True):
        if kept:
            for module in (kda, layers, mla, modeling_latentmoe, moe):
                monkeypatch.setattr(module, "recomputed", lambda *_: nullcontext())
        model.zero_grad()
        with Recorder() as recorder:
            out = model(input_ids=ids, **borders, labels=ids)
            held = recorder.live_bytes()
            out.loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((held, out.loss.detach(), grads))
        del out
    (held, loss, grads), (most, expected_loss, expected) = found
    assert held < most if checkpointing == "none" else held == most
    assert torch.equal(loss, expected_loss) and grads.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(grads[name], gradient), name
