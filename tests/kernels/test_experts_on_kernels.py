"""The kernels of this checkout inside the layer of experts: as accurate as torch, packed and with adapters."""

from types import SimpleNamespace

import pytest
import torch
from small_model import check
from torch.utils.checkpoint import checkpoint

from modeling_latentmoe import kernel_loading, ops
from modeling_latentmoe.mxfp4 import encode

pytest.importorskip("triton")
if kernel_loading._checkout("latent_moe") is None:
    pytest.skip("hub_kernels/ has no experts", allow_module_level=True)


@pytest.fixture(autouse=True)
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name, the kernels of this checkout."""
    monkeypatch.setattr(kernel_loading, "_LOADED", {("latent_moe", "hub"): kernel_loading.load("latent_moe", "auto")})


def results(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stacks: list, factors: list, held: range, kernels: str
) -> dict[str, torch.Tensor]:
    """Sum over the experts `held` and all gradients; matrices and arithmetic in the dtype of x.

    With kernels, the sum is computed again in the backward pass, as activation checkpointing does.
    """
    config = SimpleNamespace(
        kernels=kernels,
        num_experts=6,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
    )
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (x, weights, *factors)]
    here = slice(held.start, held.stop)
    matrices = []
    for (weight, scale), a, b in zip(stacks, leaves[2::2], leaves[3::2], strict=True):
        weight = weight[here] if scale is not None else weight[here].to(x.dtype)
        adapter = ops.LowRank(a[here], b[here], 0.5)
        matrices.append(ops.ExpertMatrices(weight, None if scale is None else scale[here], (adapter,)))
    inputs = leaves[0], ids - held.start, leaves[1], *matrices, config
    out = ops.expert_mlp(*inputs) if kernels == "torch" else checkpoint(ops.expert_mlp, *inputs, use_reentrant=False)
    gradients = torch.autograd.grad(out, leaves, torch.ones_like(out).tril())
    return {"out": out.detach()} | {f"gradient {n}": g for n, g in enumerate(gradients)}


def compare(device: str, dtype: torch.dtype, packed: bool, held: range, L: int, F: int, T: int) -> None:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    ids = torch.rand(T, 6, generator=generator, device=device).topk(3).indices
    x, weights = normal(T, L).to(dtype), normal(T, 3)
    stacks, factors = [], []
    for rows, columns in ((2 * F, L), (L, F)):
        weight = normal(6, rows, columns) * columns**-0.5
        stacks.append(encode(weight) if packed else (weight.to(dtype), None))
        factors += [normal(6, 2, columns) * columns**-0.5, normal(6, rows, 2)]
    exact = [t.double() for t in (x, weights)], [f.double() for f in factors]
    true = results(exact[0][0], ids, exact[0][1], stacks, exact[1], held, "torch")
    plain, got = (results(x, ids, weights, stacks, factors, held, choice) for choice in ("torch", "hub"))
    for name in true:
        check(name, got[name].double(), plain[name].double(), true[name], dtype, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below runs on the GPU")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("held", [range(6), range(2, 4)], ids=str)
def test_in_the_interpreter(held: range, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_loading, "DEVICES", ("cpu",))
    compare("cpu", torch.float32, packed, held, L=32, F=32, T=7)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_the_gpu(dtype: torch.dtype, packed: bool) -> None:
    for held in (range(6), range(2, 4)):
        compare("cuda", dtype, packed, held, L=512, F=384, T=700)
