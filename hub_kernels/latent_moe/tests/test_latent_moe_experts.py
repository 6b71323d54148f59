"""The expert MLP against its definition: values and gradients, packed and float, adapters, ragged groups, refusals."""

import contextlib

import pytest
import torch
from latent_moe import layers, mlp
from latent_moe.experts import _expert_mlp, _expert_mlp_backward, expert_mlp
from latent_moe.mxfp4 import decode, in_contraction_order
from latent_moe.reference import ExpertMatrices, LowRank, decode_reference, expert_mlp_reference
from latent_moe.sorting import sort_slots

from modeling_latentmoe import mxfp4, ops

# Triton's interpreter cuts bf16 results off instead of rounding them: bf16 is for the GPU, fp16 tells the same here.
DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else []))
SITU = {"activation": "situ", "beta": 4.0, "linear_beta": 25.0}


@pytest.fixture(autouse=True)
def poisoned():
    """New memory holds NaN and the largest integers until something is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=not torch.cuda.is_available())
def small_tiles(monkeypatch):
    """The interpreter is slow, and its dots of 16 bits as exact as others."""
    for tiles in (mlp._PACKED, mlp._FLOAT):
        for name in tiles:
            monkeypatch.setitem(tiles, name, mlp._EXACT)


class Case:
    """Arguments of the MLP with E experts, of which the tokens choose some; ids from E on are not held."""

    def __init__(self, counts, L, F, dtype, device, packed=True, rank=0, shared=False, factors=None, seed=0):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device, self.dtype, self.factors = device, dtype, factors or dtype
        E, T = len(counts), max(1, sum(counts))
        ids = torch.cat(
            [torch.full((n,), e, device=device) for e, n in enumerate(counts)] + [torch.full((T,), E, device=device)]
        )
        first = ids[:T][torch.randperm(T, generator=self.generator, device=device)]
        # A second slot, for a few tokens at the next expert.
        second = torch.where(torch.arange(T, device=device) % 3 == 0, (first + 1) % (E + 1), E)
        self.ids_TS = torch.stack((first, torch.where(second == first, E, second)), 1)
        self.rows = sort_slots(self.ids_TS, E)
        self.x, self.weights = self.normal(T, L).to(dtype), self.normal(T, 2)
        self.gradient = self.normal(T, L)
        self.gate_up = self.matrices(E, 2 * F, L, packed, rank, shared)
        self.down = self.matrices(E, L, F, packed, rank, shared)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def matrices(self, E, N, K, packed, rank, shared):
        adapters = ()
        if rank:
            # The side of the latents is what experts share.
            a, b = (
                self.normal(1 if shared and N > K else E, rank, K),
                self.normal(1 if shared and N <= K else E, N, rank),
            )
            adapters = (LowRank((a * K**-0.5).to(self.factors), b.to(self.factors), 0.5),)
        weight = self.normal(E, N, K) * K**-0.5
        if packed:
            return ExpertMatrices(*mxfp4.encode(weight), adapters)
        return ExpertMatrices(weight.to(self.dtype), None, adapters)

    def run(self, function, dtype=None, rows=None, **keywords):
        """Result and gradients of x, weights and all factors; in another dtype where one is given."""

        def leaf(x):
            return x.detach().clone().to(dtype or x.dtype).requires_grad_()

        def wide(matrices):
            weight = (
                matrices.weight if matrices.scale is not None else matrices.weight.to(dtype or matrices.weight.dtype)
            )
            adapters = tuple(LowRank(leaf(a), leaf(b), scaling) for a, b, scaling in matrices.adapters)
            return ExpertMatrices(weight, matrices.scale, adapters)

        x, weights, gate_up, down = leaf(self.x), leaf(self.weights), wide(self.gate_up), wide(self.down)
        out = function(x, rows or self.rows, weights, gate_up, down, **{**SITU, **keywords})
        factors = [f for m in (gate_up, down) for adapter in m.adapters for f in adapter[:2]]
        return [out.detach(), *torch.autograd.grad(out, [x, weights, *factors], self.gradient.to(out.dtype))]


NAMES = ("out", "dx", "dweights", "da gate_up", "db gate_up", "da down", "db down")


def error(x, truth):
    size = truth.double().norm()
    return ((x.double() - truth.double()).norm() / (size if size > 0 else 1)).item()


def check(case, keywords=None, floor=8):
    """Ours errs at most twice as much as plain torch in the same dtype, or `floor` units in fp32's last place."""
    keywords = keywords or {}
    ours = case.run(expert_mlp, **keywords)
    plain = case.run(expert_mlp_reference, **keywords)
    truth = case.run(expert_mlp_reference, torch.float64, **keywords)
    for name, x, p, t in zip(NAMES, ours, plain, truth, strict=False):
        assert x.shape == p.shape and x.dtype == p.dtype, name
        assert error(x, t) <= 2 * error(p, t) + floor * torch.finfo(torch.float32).eps, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_every_byte_with_every_scale_decodes_exactly(dtype, device):
    packed = torch.arange(256, device=device, dtype=torch.uint8).repeat(256).view(1, 256, 256)
    scale = torch.arange(256, device=device, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    out = torch.empty(1, 256, 512, device=device, dtype=dtype)
    decode(packed, scale, out)
    torch.testing.assert_close(out, decode_reference(packed, scale, dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out, mxfp4.decode(packed, scale, dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("K", [96, 128])
def test_products_decode_exactly_and_in_order(K, device):
    """Rows with a single one pick the columns, or the rows, of the matrices."""
    generator = torch.Generator(device).manual_seed(0)
    packed = torch.randint(0, 256, (2, K, K // 2), generator=generator, device=device, dtype=torch.uint8)
    scale = torch.randint(0, 253, (2, K, K // 32), generator=generator, device=device, dtype=torch.uint8)
    matrices = mlp.Matrices(packed, scale, None, None, 1.0)
    eye = torch.eye(K, device=device).repeat(2, 1)
    slots = torch.arange(2 * K, device=device, dtype=torch.int32)
    offset = torch.tensor([0, K, 2 * K], device=device, dtype=torch.int32)
    plan = mlp.Plan(slots, slots.view(-1, 1), offset, "situ", 1.0, None)
    W = decode_reference(packed, scale, torch.float32)
    y = mlp._forward(in_contraction_order(eye), None, matrices, plan).view(2, K, K)
    assert torch.equal(y, W.transpose(1, 2))
    assert torch.equal(mlp._backward(eye, None, None, matrices, plan).view(2, K, K), W)


def test_contraction_order(device):
    x = torch.arange(96.0, device=device).repeat(3, 1)
    y = in_contraction_order(x)
    assert torch.equal(y[0].view(3, 4, 4, 2).permute(0, 2, 3, 1).flatten(), x[0])
    # Place 8 i + 2 j + c holds column 8 j + 4 c + i.
    assert y[1, :6].tolist() == [0, 4, 8, 12, 16, 20] and y[1, 32] == 32 and y[1, 8] == 1


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES[1:])], ids=str)
@pytest.mark.parametrize("packed", [True, False])
def test_values_and_gradients(packed, dtype, device):
    check(Case((0, 1, 15, 16, 17), 96, 32, dtype, device, packed, rank=3))


@pytest.mark.parametrize("packed", [True, False])
def test_widths_that_fill_no_tile(packed, device):
    L, F = (160, 96) if packed else (23, 10)
    check(Case((2, 0, 3), L, F, torch.float32, device, packed, rank=1))


@pytest.mark.parametrize(
    "activation", [{"activation": "silu"}, {"linear_beta": None}, {"beta": None}], ids=("silu", "uncapped", "beta 1")
)
def test_activations(activation, device):
    check(Case((5, 4), 64, 32, torch.float32, device), activation)


def test_activations_are_those_of_the_model(device):
    case = Case((4, 3), 64, 32, torch.float32, device, rank=2)
    for act in ("situ", "silu"):
        config = type(
            "C",
            (),
            {"hidden_act": act, "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "kernels": "torch"},
        )
        want = ops.expert_mlp(case.x, case.ids_TS, case.weights, case.gate_up, case.down, config)
        keywords = SITU if act == "situ" else {"activation": "silu"}
        got = expert_mlp(case.x, case.rows, case.weights, case.gate_up, case.down, **keywords)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("counts", [(1,), (40, 0, 0), (0, 0)], ids=str)
def test_skewed_single_and_empty_experts(counts, device):
    # Of a single row, every sum over rows is one number, which torch may have right by luck.
    check(Case(counts, 64, 32, torch.float32, device, rank=2), floor=64)


def test_adapters(device):
    """In fp32 beside 16-bit rows, shared by experts, and several at once."""
    check(Case((3, 0, 9), 64, 32, torch.float16, device, rank=2, factors=torch.float32))
    check(Case((3, 0, 9), 64, 32, torch.float32, device, rank=4, shared=True))
    case = Case((3, 0, 9), 64, 32, torch.float32, device, rank=2)
    other = Case((3, 0, 9), 64, 32, torch.float32, device, rank=17, seed=1)
    case.gate_up = case.gate_up._replace(adapters=case.gate_up.adapters + other.gate_up.adapters)
    check(case)


def test_recomputed_activations_are_the_same(device):
    case = Case((3, 5), 64, 32, torch.float32, device, rank=2)
    for x, y in zip(case.run(expert_mlp), case.run(expert_mlp, save_activations=False), strict=True):
        assert torch.equal(x, y)


def test_a_second_backward_through_the_same_graph(device):
    """The first one overwrites gates and ups, also where hooks hide that from autograd; checkpointing has them anew."""
    case = Case((3, 5), 64, 32, torch.float32, device, rank=2)

    def step(x, weights):
        return expert_mlp(x, case.rows, weights, case.gate_up, case.down, **SITU)

    want = case.run(expert_mlp)[1:3]
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    for around in (contextlib.nullcontext(), hooks, None):
        x, weights = case.x.clone().requires_grad_(), case.weights.clone().requires_grad_()
        if around is None:
            out = torch.utils.checkpoint.checkpoint(step, x, weights, use_reentrant=False)
        else:
            with around:
                out = step(x, weights)
        for _ in range(3):
            for gradient, wanted in zip(
                torch.autograd.grad(out, (x, weights), case.gradient, retain_graph=True), want, strict=True
            ):
                assert torch.equal(gradient, wanted)


def test_decoding_into_the_workspace(device, monkeypatch):
    case = Case((3, 5, 0, 2), 64, 32, torch.float32, device, rank=2)
    monkeypatch.setattr(mlp, "WORKSPACE_ROWS", 0)
    check(case)
    # one and three experts at a time
    monkeypatch.setattr(mlp, "WORKSPACE_BYTES", 1)
    check(case)
    monkeypatch.setattr(mlp, "WORKSPACE_BYTES", 3 * 64 * 64 * 4)
    check(case)


def test_rows_that_are_known_to_be_few(device):
    case = Case((3, 5), 64, 32, torch.float32, device)
    held = int(case.rows.offset[-1])
    for x, y in zip(case.run(expert_mlp), case.run(expert_mlp, max_rows=held), strict=True):
        assert torch.equal(x, y)
    out, dx, dweights = case.run(expert_mlp, max_rows=held - 2)
    late = (case.rows.row_TS >= held - 2).any(1)
    for x in (out, dx, dweights):
        assert x[late].isnan().any(1).all() and x[~late].isfinite().all()


def test_only_what_is_needed_is_kept(device):
    case = Case((3, 5), 64, 32, torch.float32, device)
    with torch.no_grad():
        out = expert_mlp(case.x, case.rows, case.weights, case.gate_up, case.down, **SITU)
    assert torch.equal(out, case.run(expert_mlp)[0])
    out = expert_mlp(case.x, case.rows, case.weights.requires_grad_(), case.gate_up, case.down, **SITU)
    out.sum().backward()
    assert case.weights.grad is not None and case.x.grad is None


def test_strided_arguments(device):
    case = Case((3, 5), 64, 32, torch.float32, device)
    want = case.run(expert_mlp)
    case.x, case.weights = case.x.t().contiguous().t(), case.weights.t().contiguous().t()
    for x, y in zip(case.run(expert_mlp), want, strict=True):
        assert torch.equal(x, y)


def test_no_tokens(device):
    case = Case((3, 5), 64, 32, torch.float32, device)
    x, weights = case.x[:0].requires_grad_(), case.weights[:0]
    out = expert_mlp(x, sort_slots(case.ids_TS[:0], 2), weights, case.gate_up, case.down)
    out.sum().backward()
    assert out.shape == (0, 64) and out.dtype == torch.float32 and x.grad.shape == (0, 64)


def test_float64_is_the_reference(device):
    case = Case((3, 5), 64, 32, torch.float32, device, rank=2)
    for x, y in zip(case.run(expert_mlp, torch.float64), case.run(expert_mlp_reference, torch.float64), strict=True):
        assert torch.equal(x, y)


def test_layer_is_the_function(device):
    case = Case((3, 5), 64, 32, torch.float32, device, rank=2)
    layer = layers.RoutedExperts()
    layer.gate_up_proj, layer.gate_up_scale, _ = case.gate_up
    layer.down_proj, layer.down_scale, _ = case.down
    layer.owned = range(10, 12)
    layer.config = type(
        "C", (), {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    )
    adapters = {"gate_up": case.gate_up.adapters, "down": case.down.adapters}
    got = layer(case.x, case.ids_TS + 10, case.weights, adapters)
    assert torch.equal(got, expert_mlp(case.x, case.rows, case.weights, case.gate_up, case.down, **SITU))


def test_operators_are_registered_as_they_run(device):
    case = Case((3, 5), 64, 32, torch.float32, device)
    rows = case.rows.slot_R, case.rows.row_TS, case.rows.offset
    first, second = (*case.gate_up[:2], None, None, 1.0), (*case.down[:2], None, None, 1.0)
    inputs = case.x, case.weights, *rows, *first, *second, "situ", 4.0, 25.0, True
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(_expert_mlp, inputs, test_utils=tests)
    kept = _expert_mlp(*inputs)[1:]
    torch.library.opcheck(_expert_mlp_backward, (case.gradient, *inputs, *kept), test_utils=tests)


def test_compiles_in_one_graph(device):
    case = Case((3, 5), 64, 32, torch.float32, device, rank=2)
    want = case.run(expert_mlp)

    # Generating code for the CPU takes a minute and tells nothing about the operators.
    @torch.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    def compiled(x, rows, weights, gate_up, down, **keywords):
        return expert_mlp(x, rows, weights, gate_up, down, **keywords)

    for x, y in zip(case.run(compiled), want, strict=True):
        torch.testing.assert_close(x, y)


def test_arguments_are_refused_by_name(device):
    case = Case((3, 5), 64, 32, torch.float32, device, rank=2)
    good = {
        "x_TL": case.x, "rows": case.rows, "weights_TS": case.weights, "gate_up": case.gate_up, "down": case.down,
    }  # fmt: skip
    gate_up, down = case.gate_up, case.down
    a, b, _ = gate_up.adapters[0]
    wide = LowRank(a.repeat(1, 40, 1), b.repeat(1, 1, 40), 1.0)
    for name, bad in {
        "x_TL": [case.x[0], case.x.int()],
        "weights_TS": [case.weights[:, :1], case.weights.int(), case.weights.to("meta")],
        "gate_up": [
            gate_up._replace(scale=None),
            gate_up._replace(scale=gate_up.scale[:, 1:]),
            gate_up._replace(weight=gate_up.weight.transpose(1, 2)),
            gate_up._replace(weight=gate_up.weight[:1], scale=gate_up.scale[:1]),
            gate_up._replace(adapters=(LowRank(b, a, 1.0),)),
            gate_up._replace(adapters=(LowRank(a.int(), b, 1.0),)),
            gate_up._replace(adapters=(wide,)),
            ExpertMatrices(case.normal(2, 64, 64).requires_grad_()),
            ExpertMatrices(case.normal(2, 63, 64)),
            gate_up._replace(scale=gate_up.scale.to("meta")),
            gate_up._replace(adapters=(LowRank(a, b.to("meta"), 1.0),)),
        ],
        "down": [
            gate_up._replace(weight=gate_up.weight[:, :, :16], scale=gate_up.scale[:, :, :1], adapters=()),
            down._replace(weight=down.weight[:, 1:]),
        ],
        "activation": ["relu"],
        "max_rows": [0],
        "beta": [0.0, -1.0],
        "linear_beta": [0.0],
    }.items():
        for value in bad:
            with pytest.raises(ValueError, match=f"^{name}:"):
                expert_mlp(**{**good, name: value})


def test_an_expert_chosen_twice_is_nan(device):
    """Not a share in the other slot's row: its token is lost, and no other."""
    ids = torch.tensor([[2, 2], [1, 0], [0, 1]], device=device)
    rows = sort_slots(ids, 3)
    assert (rows.row_TS[0] >= len(rows.slot_R)).sum() == 1
    generator = torch.Generator(device).manual_seed(0)
    gate_up, down = (
        ExpertMatrices(torch.randn(3, *shape, generator=generator, device=device), None, ())
        for shape in ((32, 8), (8, 16))
    )
    x = torch.randn(3, 8, generator=generator, device=device)
    out = expert_mlp(x, rows, torch.ones(3, 2, device=device), gate_up, down, **SITU)
    assert out[0].isnan().all() and out[1:].isfinite().all()
