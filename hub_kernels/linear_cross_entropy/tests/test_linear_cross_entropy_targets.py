"""Which tokens count, what must not touch them, and which arguments are refused."""

import pytest
import torch
from linear_cross_entropy import layers, linear_cross_entropy

N, D, V = 5, 16, 50


@pytest.fixture
def arguments(device):
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, device=device)
    weight = torch.randn(V, D, generator=generator, device=device)
    return hidden, weight, torch.randint(0, V, (N,), generator=generator, device=device)


def run(hidden, weight, target, **keywords):
    hidden = hidden.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, **keywords)
    loss.sum().backward()
    return loss.detach(), hidden.grad


def test_ignored_tokens_are_zero_and_touch_nothing(arguments):
    hidden, weight, target = arguments
    clean = run(hidden, weight, target)
    poisoned, marked = hidden.clone(), target.clone()
    poisoned[1], poisoned[3] = torch.nan, torch.inf
    marked[1] = marked[3] = -100
    kept = torch.tensor([0, 2, 4], device=hidden.device)
    for ours, before in zip(run(poisoned, weight, marked), clean, strict=True):
        assert torch.equal(ours[kept], before[kept])
        assert (ours[[1, 3]] == 0).all()


def test_ignore_index_may_be_a_word(arguments):
    hidden, weight, target = arguments
    target[2] = 7
    loss, gradient = run(hidden, weight, target, ignore_index=7)
    assert loss[2] == 0 and (gradient[2] == 0).all() and loss[0] > 0


@pytest.mark.parametrize("outside", [-1, V, 2**40, -(2**40)])
def test_target_outside_the_vocabulary_is_nan(arguments, outside):
    hidden, weight, target = arguments
    clean = run(hidden, weight, target)
    target[2] = outside
    kept = torch.tensor([0, 1, 3, 4], device=hidden.device)
    for ours, before in zip(run(hidden, weight, target), clean, strict=True):
        assert ours[2].isnan().all()
        assert torch.equal(ours[kept], before[kept])


def test_without_a_gradient_only_the_losses(arguments):
    hidden, weight, target = arguments
    loss, _ = run(hidden, weight, target)
    assert torch.equal(linear_cross_entropy(hidden, weight, target), loss)
    with torch.no_grad():
        inference = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), target)
    assert torch.equal(inference, loss) and not inference.requires_grad


def test_gradient_is_linear_in_the_gradient_of_the_losses(arguments):
    hidden, weight, target = arguments
    _, unit = run(hidden, weight, target)
    hidden = hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target)
    scale = torch.arange(N, device=hidden.device, dtype=torch.float32)
    (first,) = torch.autograd.grad(loss, hidden, scale, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden, scale)
    assert torch.equal(first, unit * scale.unsqueeze(1)) and torch.equal(first, second)


def test_strided_hidden_and_target(arguments):
    hidden, weight, target = arguments
    loss, gradient = run(hidden, weight, target)
    strided = run(hidden.t().contiguous().t(), weight, target.repeat_interleave(2)[::2])
    assert torch.equal(strided[0], loss) and torch.equal(strided[1], gradient)


def test_autocast_leaves_the_products_alone(arguments, device):
    loss, gradient = run(*arguments)
    with torch.autocast(device, torch.bfloat16):
        inside = run(*arguments)
    assert torch.equal(inside[0], loss) and torch.equal(inside[1], gradient)


def test_layer_is_the_function(arguments):
    assert torch.equal(layers.LinearCrossEntropy()(*arguments), linear_cross_entropy(*arguments))


def test_arguments_are_refused_by_name(arguments):
    hidden, weight, target = arguments
    for name, bad in {
        "hidden": [(hidden[0], weight, target), (hidden.int(), weight.int(), target)],
        "weight": [
            (hidden, weight[0], target),
            (hidden, weight[:, 1:], target),
            (hidden, weight[:0], target),
            (hidden, weight.half(), target),
            (hidden, weight.t().contiguous().t(), target),
            (hidden, weight.clone().requires_grad_(), target),
            (hidden, weight.to("meta"), target),
        ],
        "target": [
            (hidden, weight, target[1:]),
            (hidden, weight, target.int()),
            (hidden, weight, target[None]),
            (hidden, weight, target.to("meta")),
        ],
    }.items():
        for arguments in bad:
            with pytest.raises(ValueError, match=f"^{name}:"):
                linear_cross_entropy(*arguments)


def test_a_second_derivative_is_an_error(arguments):
    hidden, weight, target = arguments
    hidden = hidden.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target).sum()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        (loss + gradient.square().sum()).backward()


def test_compiles_in_one_graph(arguments, device):
    hidden, weight, target = arguments
    expected = run(hidden, weight, target)

    # Generating code for the CPU takes a minute and tells nothing about the operators.
    @torch.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    def compiled(hidden):
        return (linear_cross_entropy(hidden * 1.0, weight, target) * 2).sum()

    hidden = hidden.requires_grad_()
    loss = compiled(hidden)
    loss.backward()
    torch.testing.assert_close(loss.detach(), 2 * expected[0].sum())
    torch.testing.assert_close(hidden.grad, 2 * expected[1])
