"""What only a GPU can show: bf16 at the released model's size, memory, equal bits from run to run."""

import pytest
import torch
from linear_cross_entropy import linear_cross_entropy, reference
from test_linear_cross_entropy_values import check, inputs, run

pytestmark = pytest.mark.gpu
D, V = 7168, 163840


@pytest.mark.parametrize("n", [1, 3, 1000, 8192])
def test_released_size(n):
    check(*inputs(n, D, V, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("v", [163839, 163841, 163856])
def test_vocabularies_that_fill_no_tile(v):
    check(*inputs(700, 512, v, torch.bfloat16, "cuda"))


def test_row_offsets_beyond_32_bits(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", 8)
    check(*inputs(200, 64, 2**24 + 1, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype):
    check(*inputs(600, 1024, 128256, dtype, "cuda"))


def test_equal_bits_from_run_to_run():
    arguments = inputs(1000, 1024, V, torch.bfloat16, "cuda")
    first = run(linear_cross_entropy, *arguments)
    for _ in range(29):
        for x, y in zip(run(linear_cross_entropy, *arguments), first, strict=True):
            assert torch.equal(x, y)


def test_memory():
    hidden, weight, target, loss_gradient = inputs(8192, D, V, torch.bfloat16, "cuda")
    hidden.requires_grad_()

    def step():
        torch.autograd.grad(linear_cross_entropy(hidden, weight, target), hidden, loss_gradient)

    # The first call also takes what cuBLAS keeps.
    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    assert torch.cuda.max_memory_allocated() - before <= 0.4 * 2**30


def test_no_host_synchronisation():
    hidden, weight, target, loss_gradient = inputs(1000, 512, 4096, torch.bfloat16, "cuda")
    hidden.requires_grad_()
    torch.autograd.grad(linear_cross_entropy(hidden, weight, target), hidden, loss_gradient)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(linear_cross_entropy(hidden, weight, target), hidden, loss_gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")
