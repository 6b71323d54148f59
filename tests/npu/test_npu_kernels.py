"""The `torch-npu` variants of hub_kernels/ without a card: packed, chosen as on Ascend, run by Triton's interpreter.

`kernels` takes a machine for Ascend if torch's other device is called "npu", and asks torch-npu for CANN's version:
both are played while a variant loads. Values are compared with the torch definitions through `ops.py`.
test_npu_tiles.py has what kernels hold at a time.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from modeling_latentmoe import kernel_loading, npu, npu_kernels, ops
from scripts import pack_kernels

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where there is no GPU"),
]
NAMES = ("residual", "latent_moe")
FP32, BF16 = torch.float32, torch.bfloat16
# What a CPU plays.
CORES = 2


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModuleType]]:
    """The packed repositories, loaded as `kernels` loads them on Ascend."""
    kernels = pytest.importorskip("kernels")
    output = tmp_path_factory.mktemp("packed")
    assert pack_kernels.main([*NAMES, "--output", str(output)]) == 0
    collect = ModuleType("torch_npu.utils.collect_env")
    collect.get_cann_version = lambda: "9.0.0"
    with pytest.MonkeyPatch.context() as platform:
        for name in ("torch_npu", "torch_npu.utils"):
            platform.setitem(sys.modules, name, ModuleType(name))
        platform.setitem(sys.modules, collect.__name__, collect)
        platform.setattr(torch.version, "cuda", None)
        platform.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
        yield {name: kernels.get_local_kernel(output / name) for name in NAMES}


@pytest.fixture
def served(card: list[str], variants: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The model finds them."""
    monkeypatch.setattr(npu_kernels, "compiler_problem", lambda: None)
    monkeypatch.setattr(kernel_loading, "_LOADED", {(name, "auto"): module for name, module in variants.items()})
    return variants


def part(variant: ModuleType, name: str) -> ModuleType:
    return sys.modules[f"{variant.__name__}.{name}"]


def test_the_variant_for_ascend_is_chosen(variants: dict[str, ModuleType]) -> None:
    for name, module in variants.items():
        folder = Path(module.__file__).parent
        assert folder.name == "torch-npu" and sorted(x.name for x in folder.parent.iterdir())[0] == "torch-cuda"
        assert json.loads((folder / "metadata.json").read_text())["backend"] == {"type": "cann"}
        assert module.__name__.startswith(f"latentmoe_{name}_")
        assert all(hasattr(module, public) for public in module.__all__)
    # What is written for tensor cores is not there to be called, and the modules with Gluon are not imported.
    assert variants["latent_moe"].__all__ == ["situ_glu", "swiglu"] and not hasattr(
        variants["latent_moe"], "expert_mlp"
    )
    assert f"{variants['latent_moe'].__name__}.hopper" not in sys.modules


def activation(leaves: list[Tensor], kernels: str, **options) -> Tensor:
    config = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0} | options
    return ops.glu(*leaves, SimpleNamespace(kernels=kernels, **config))


def situ(leaves: list[Tensor], kernels: str) -> Tensor:
    return activation(leaves, kernels, hidden_act="situ")


def situ_alone(leaves: list[Tensor], kernels: str) -> Tensor:
    return activation(leaves, kernels, hidden_act="situ", activation_situ_linear_beta=None)


def swiglu(leaves: list[Tensor], kernels: str) -> Tensor:
    return activation(leaves, kernels, hidden_act="silu")


def mixture(leaves: list[Tensor], kernels: str) -> Tensor:
    return ops.attn_residual(leaves[:-1], leaves[-1], 1e-5, kernels)


def norm(leaves: list[Tensor], kernels: str) -> Tensor:
    return ops.gated_rms_norm(*leaves, 1e-5, kernels)


def row(width: int, dtype: torch.dtype) -> Tensor:
    """In fp32 whatever the dtype of the others, except in float64."""
    return torch.randn(width, dtype=torch.promote_types(dtype, FP32)) * 3 * width**-0.5


# Operation -> inputs of a dtype. Widths that are no powers of two, rows that do not divide, tiles that are cut off.
CASES: list[tuple[Callable, Callable]] = [
    (situ, lambda d: [4 * torch.randn(2, 11, 100, dtype=d) for _ in range(2)]),
    (situ, lambda d: [4 * torch.randn(2, 1100, dtype=d) for _ in range(2)]),
    (situ_alone, lambda d: [4 * torch.randn(5, 33, dtype=d) for _ in range(2)]),
    (swiglu, lambda d: list((4 * torch.randn(7, 96, dtype=d)).chunk(2, dim=-1))),
    (mixture, lambda d: [torch.randn(2, 3, 40, dtype=d) * 2**j for j in range(5)] + [row(40, d)]),
    (mixture, lambda d: [torch.randn(1, 3, 3000, dtype=d) * 2**j for j in range(2)] + [row(3000, d)]),
    (mixture, lambda d: [torch.randn(1, 1, 7, dtype=d), row(7, d)]),
    (mixture, lambda d: [torch.randn(1, 2, 40, dtype=d) for _ in range(16)] + [row(40, d)]),
    (norm, lambda d: [torch.randn(2, 7, 3, 128, dtype=d) for _ in range(2)] + [row(128, d)]),
    (norm, lambda d: [torch.randn(5, 33, dtype=d) for _ in range(2)] + [row(33, d)]),
    (norm, lambda d: [torch.randn(3, 1000, dtype=d) for _ in range(2)] + [row(1000, d)]),
]


def results(run: Callable, leaves: list[Tensor], kernels: str, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = run(leaves, kernels)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def error(got: Tensor, want: Tensor) -> float:
    """Relative, of norms; of a gradient that is zero, its norm."""
    return ((got.double() - want).norm() / (want.norm() or 1)).item()


# In bf16, one of every operation.
@pytest.mark.parametrize(("case", "dtype"), [*((i, FP32) for i in range(len(CASES))), *((i, BF16) for i in (0, 4, 8))])
def test_values_and_gradients(case: int, dtype: torch.dtype, served: dict[str, ModuleType]) -> None:
    """Errors against float64 are at most twice those of the torch definition in the same dtype."""
    torch.manual_seed(case)
    run, make = CASES[case]
    leaves = make(dtype)
    grad = torch.randn(run(leaves, "torch").shape)
    ours, plain = (results(run, leaves, kernels, grad.to(dtype)) for kernels in ("auto", "torch"))
    truth = results(run, [x.double() for x in leaves], "torch", grad.to(dtype))
    # The interpreter truncates to bfloat16 where a card rounds.
    slack = torch.finfo(BF16).eps if dtype == BF16 else 8 * torch.finfo(FP32).eps
    for got, other, want in zip(ours, plain, truth, strict=True):
        assert got.dtype == other.dtype and got.shape == other.shape
        assert error(got, want) <= 2 * error(other, want) + slack
    assert not npu.SAID


def test_programs_are_as_many_as_cores(served: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """One axis, no more programs than cores and than there is work for, and nothing about warps."""
    seen: list[tuple[str, tuple[int, ...], dict]] = []

    class Watched:
        def __init__(self, kernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid):
            def run(*arguments, **options) -> None:
                seen.append((self.kernel.fn.__name__, grid, options))
                self.kernel[grid](*arguments, **options)

            return run

    watched = {
        "gated_norm": ("gated_norm_fwd_cores_kernel", "gated_norm_bwd_kernel"),
        "mixture_ascend": ("mixture_fwd_cores_kernel", "mixture_factors_kernel", "mixture_bwd_cores_kernel"),
        "glu": ("FORWARD", "BACKWARD"),
    }
    for file, names in watched.items():
        module = part(served["latent_moe" if file == "glu" else "residual"], file)
        for name in names:
            monkeypatch.setattr(module, name, Watched(getattr(module, name)))
    for rows, programs in ((1, 1), (6, CORES)):
        seen.clear()
        for run, width, count in ((situ, 1024, 2), (mixture, 16, 3), (norm, 1024, 2)):
            inputs = [torch.randn(1, rows, width) for _ in range(count)]
            leaves = inputs if run is situ else [*inputs, row(width, FP32)]
            results(run, leaves, "auto", torch.ones(1, rows, width))
        assert len(seen) == 7 and [grid for _, grid, _ in seen] == [(programs,)] * 7
        assert not any({"num_warps", "num_stages", "num_ctas"} & options.keys() for *_, options in seen)


def test_wrong_calls_are_refused(variants: dict[str, ModuleType]) -> None:
    x, score = torch.ones(3, 8), torch.ones(8)
    residual, experts = variants["residual"], variants["latent_moe"]
    for call, message in [
        (lambda: residual.attn_residual([x] * 17, score, 1e-5), "sources: 17 of them, on Ascend 16 at most"),
        (lambda: residual.gated_rms_norm(*[torch.ones(1, 1025)] * 2, torch.ones(1025), 1e-5), "last axis of 1 to 1024"),
        (lambda: residual.gated_rms_norm(x, x[:2], score, 1e-5), "gate: shape"),
        (lambda: experts.situ_glu(x, x.half()), "up: torch.float16"),
        (lambda: experts.swiglu(x.double(), x.double()), "gate: dtype torch.float64"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def refusals(served: object) -> list[str]:
    """Each operation twice: what the log says, once."""
    x, wide = torch.randn(1, 2, 16), torch.randn(1, 2, 1025)
    for _ in range(2):
        for run, leaves in (
            (situ, [x, x.double()]),
            (mixture, [*[x] * 17, row(16, FP32)]),
            (norm, [wide, wide, row(1025, FP32)]),
        ):
            assert torch.equal(run(leaves, "auto"), run(leaves, "torch"))
    return sorted(npu.SAID)


def test_other_calls_are_torch_by_name(served: dict[str, ModuleType]) -> None:
    assert refusals(served) == [
        "attn_residual: the torch definition, there are 17 sources 16 wide",
        "gated_rms_norm: the torch definition, rows are 1025 wide",
        "glu: the torch definition, the tensors are torch.float32, torch.float64",
    ]


def test_without_the_compiler_or_the_repositories(
    card: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(1, 2, 16)
    calls = [(situ, [x, x]), (mixture, [x, x, row(16, FP32)]), (norm, [x, x, row(16, FP32)])]

    def run_all() -> None:
        for _ in range(2):
            for run, leaves in calls:
                assert torch.equal(run(leaves, "auto"), run(leaves, "torch"))

    npu_kernels.compiler_problem.cache_clear()
    monkeypatch.setattr(kernel_loading, "_LOADED", {})
    run_all()
    reason = "the torch definition, triton-ascend does not load (No module named 'triton.backends.ascend')"
    assert sorted(npu.SAID) == [f"{name}: {reason}" for name in ("attn_residual", "gated_rms_norm", "glu")]
    assert not kernel_loading._LOADED

    said: list[str] = []
    npu.SAID.clear()
    monkeypatch.setattr(npu_kernels, "compiler_problem", lambda: None)
    monkeypatch.setattr(kernel_loading, "_checkout", lambda name: None)
    monkeypatch.setattr(kernel_loading.logger, "warning", said.append)
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)

    def absent(*_, **__):
        raise kernel_loading.LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(kernel_loading, "snapshot_download", absent)
    run_all()
    # scripts/check_npu.py shows these as not used
    assert sorted(npu.SAID) == [
        f"{name}: the torch definition, there is no repository {repository} at hand"
        for name, repository in (("attn_residual", "residual"), ("gated_rms_norm", "residual"), ("glu", "latent_moe"))
    ]
    assert sorted(said) == [
        f"{name}: torch definitions, {kernel_loading.REPOSITORIES[name]}, revision v1, is not in the Hub cache"
        for name in ("latent_moe", "residual")
    ]
