"""Losses and gradients against float64, on one chunk and on several, with and without a split sum."""

import pytest
import torch
import torch.nn.functional as F
from linear_cross_entropy import chunks, linear_cross_entropy, linear_cross_entropy_reference

IGNORE = -100
# Triton's interpreter cuts bf16 results off instead of rounding them: bf16 is for the GPU, fp16 tells the same here.
DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else []))


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of two tokens, so that few tokens make several."""
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 1)
    monkeypatch.setattr(chunks, "TOKEN_TILE", 2)


@pytest.fixture
def poisoned(monkeypatch):
    """NaN in every tensor of numbers that is allocated without being filled."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def filled(x):
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: filled(new_empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: filled(empty_like(*args, **kwargs)))


def inputs(n: int, d: int, v: int, dtype: torch.dtype, device: str):
    """hidden, weight, target with ignored tokens, and a gradient for each loss; logits spread like a model's."""
    generator = torch.Generator(device).manual_seed(n + d + v)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    hidden, weight = normal(n, d).to(dtype), (normal(v, d) * 3 * d**-0.5).to(dtype)
    target = torch.randint(0, v, (n,), generator=generator, device=device)
    target[2::5] = IGNORE
    return hidden, weight, target, normal(n)


def run(function, hidden, weight, target, loss_gradient):
    """Losses and d hidden."""
    hidden = hidden.clone().requires_grad_()
    loss = function(hidden, weight, target, ignore_index=IGNORE)
    loss.backward(loss_gradient.to(loss.dtype))
    return loss.detach(), hidden.grad


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative to the truth, or the size of x where the truth is zero."""
    size = truth.norm()
    return ((x.double() - truth).norm() / (size if size > 0 else 1)).item()


def check(hidden, weight, target, loss_gradient):
    """Each output errs at most twice as much as plain torch in the same dtype, or a few units in fp32's last place."""
    ours = run(linear_cross_entropy, hidden, weight, target, loss_gradient)
    plain = run(linear_cross_entropy_reference, hidden, weight, target, loss_gradient)
    truth = run(linear_cross_entropy_reference, hidden.double(), weight.double(), target, loss_gradient)
    for name, x, p, t in zip(("loss", "d hidden"), ours, plain, truth, strict=True):
        assert x.shape == p.shape and x.dtype == p.dtype, name
        assert error(x, t) <= 2 * error(p, t) + 8 * torch.finfo(torch.float32).eps, name


def test_reference_is_linear_and_cross_entropy(device):
    hidden, weight, target, loss_gradient = inputs(9, 12, 31, torch.float64, device)

    def torch_own(hidden, weight, target, ignore_index):
        return F.cross_entropy(F.linear(hidden, weight), target, ignore_index=ignore_index, reduction="none")

    for x, y in zip(
        run(linear_cross_entropy_reference, hidden, weight, target, loss_gradient),
        run(torch_own, hidden, weight, target, loss_gradient),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_reference_gradient(device):
    hidden, weight, target, _ = inputs(4, 5, 7, torch.float64, device)
    torch.autograd.gradcheck(lambda h: linear_cross_entropy_reference(h, weight, target), hidden.requires_grad_())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# One column, an odd vocabulary, a split sum, a row of several tiles that the last one exceeds.
@pytest.mark.parametrize("shape", [(1, 16, 1), (3, 7, 33), (9, 24, 128), (4, 40, 17001)], ids=str)
def test_values(shape, dtype, device, poisoned):
    check(*inputs(*shape, dtype, device))


@pytest.mark.parametrize("shape", [(2, 8, 64), (7, 24, 100)], ids=str)
def test_values_in_several_chunks(shape, device, small_chunks, poisoned):
    check(*inputs(*shape, torch.float32, device))


def test_split_and_whole_sum_agree(device, monkeypatch):
    hidden, weight, target, loss_gradient = inputs(5, 24, 128, torch.float32, device)
    assert chunks.splits(5, 24, 128) == 8
    split = run(linear_cross_entropy, hidden, weight, target, loss_gradient)
    monkeypatch.setattr(chunks, "PARTIAL_BYTES", 0)
    assert chunks.splits(5, 24, 128) == 1
    whole = run(linear_cross_entropy, hidden, weight, target, loss_gradient)
    assert torch.equal(split[0], whole[0])
    torch.testing.assert_close(split[1], whole[1])


def test_plan_of_the_released_model():
    # 512 tokens: 160 MiB of logits and 112 MiB of partial sums.
    assert chunks.chunk_tokens(163840, 2) == 512
    assert chunks.splits(512, 7168, 163840) == 8
    assert chunks.chunk_tokens(2**30, 2) == chunks.TOKEN_TILE


def test_no_tokens(device):
    hidden = torch.empty(0, 8, device=device, requires_grad=True)
    loss = linear_cross_entropy(
        hidden, torch.ones(3, 8, device=device), torch.empty(0, dtype=torch.int64, device=device)
    )
    loss.sum().backward()
    assert loss.shape == (0,) and loss.dtype == torch.float32 and hidden.grad.shape == (0, 8)


def test_float64_is_the_reference(device):
    arguments = inputs(6, 8, 33, torch.float64, device)
    for x, y in zip(
        run(linear_cross_entropy, *arguments), run(linear_cross_entropy_reference, *arguments), strict=True
    ):
        assert torch.equal(x, y)


def test_large_and_infinite_logits(device):
    hidden = torch.tensor([[1.0, 0.0], [300.0, 0.0], [-300.0, 0.0]], device=device)
    weight = torch.tensor([[-torch.inf, 0.0], [100.0, 0.0], [99.0, 0.0], [-100.0, 0.0]], device=device)
    target = torch.tensor([1, 2, 3], device=device)
    # 0 * -inf is NaN: infinite rows of the head only meet hidden states of one sign.
    rows = slice(0, 2)
    loss = linear_cross_entropy(hidden[rows], weight, target[rows])
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(hidden[rows], weight), target[rows], reduction="none"))
    loss = linear_cross_entropy(hidden, weight[1:], target - 1)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(hidden, weight[1:]), target - 1, reduction="none"))
