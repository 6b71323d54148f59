"""KDA part by part against the independent code in transformers and a float64 token-by-token recurrence.

A result passes when its distance to float64 is at most twice that of transformers' code in the same dtype.

Legend: B batch, T tokens, M tokens of all documents in order, D model width, H heads, K key width,
        V value width, P = H * K projection width, W convolution width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.kimi_linear import modeling_kimi_linear as kimi

from modeling_latentmoe import ops
from modeling_latentmoe.cache import LayerCache
from modeling_latentmoe.configuration_latentmoe import LatentMoETextConfig
from modeling_latentmoe.documents import Documents
from modeling_latentmoe.kda import KimiDeltaAttention

CPU = torch.device("cpu")
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 200)
# Many heads, so that errors of a single token are an average and not luck.
H, K, V = 16, 8, 6
INPUTS = ("q", "k", "v", "g", "beta", "state")


def packed(lengths: Sequence[int]) -> Documents:
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return Documents.of_batch((1, sum(lengths)), CPU, cu_seqlens=cu_seqlens)


def log_decays(kind: str, T: int) -> torch.Tensor:
    """Log decays [T, H, K] in float64."""
    z = torch.randn(T, H, K, dtype=torch.float64)
    if kind == "none":
        return torch.zeros_like(z)
    if kind == "mild":
        return -0.05 * z.abs()
    if kind == "bounded":
        return -5 * torch.sigmoid(2 * z)
    if kind == "floor":
        return -5 * torch.sigmoid(20 + z)
    if kind == "overflow":
        # Some channels forget all at every token, some nothing: cumulated decays differ by thousands.
        return torch.where(torch.arange(K) % 2 == 0, -50.0, -1e-3).expand_as(z).clone()
    assert kind == "bursts"
    return torch.where(torch.rand(T, 1, 1) < 0.5, -50.0, -0.01).expand_as(z).clone()


def make_inputs(seed: int, T: int, decay: str, documents: int | None = None, size: float = 1.0):
    """Arguments in float64 that fp32 holds exactly; `documents` makes as many initial states."""
    torch.manual_seed(seed)
    values = {
        "q": torch.randn(T, H, K) * size,
        "k": torch.randn(T, H, K) * size,
        "v": torch.randn(T, H, V),
        "g": log_decays(decay, T).float(),
        "beta": torch.sigmoid(torch.randn(T, H)),
        "state": torch.randn(*([] if documents is None else [documents]), H, K, V),
    }
    return {name: value.double() for name, value in values.items()}


def recurrence(q, k, v, g, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token: S = (I - beta k k^T) diag(a) S + beta k v^T, with whole matrices."""
    q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) / math.sqrt(q.shape[-1])
    k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    S, outputs = state, []
    for t in range(len(q)):
        k_HK1, beta_H11 = k[t].unsqueeze(-1), beta[t].view(-1, 1, 1)
        keep = (eye - beta_H11 * k_HK1 @ k_HK1.mT) @ torch.diag_embed(g[t].exp())
        S = keep @ S + beta_H11 * k_HK1 @ v[t].unsqueeze(-2)
        outputs.append((S.mT @ q[t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs), S


def ours_chunked(q, k, v, g, beta, state):
    o, final = ops.delta_chunk(q, k, v, g, beta, packed([len(q)]), state.unsqueeze(0))
    return o, final[0]


def ours_stepped(q, k, v, g, beta, state):
    outputs, S = [], state.unsqueeze(0)
    for t in range(len(q)):
        o, S = ops.delta_step(q[t : t + 1], k[t : t + 1], v[t : t + 1], g[t : t + 1], beta[t : t + 1], S)
        outputs.append(o)
    return torch.cat(outputs), S[0]


def theirs(function: Callable) -> Callable:
    def run(q, k, v, g, beta, state):
        q, k, v, g, beta, state = (x.unsqueeze(0) for x in (q, k, v, g, beta, state))
        o, final = function(
            q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return o[0], final[0]

    return run


def error(got: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Root mean square distance, and the largest one, relative to the size of the true values."""
    assert got.shape == true.shape
    assert got.isfinite().all()
    difference, scale = got.double() - true.double(), true.double().square().mean().sqrt()
    return torch.stack([difference.square().mean().sqrt(), difference.abs().max()]) / scale


def assert_as_accurate(got, independent, true, what: str = "", dtype: torch.dtype = torch.float32) -> None:
    """At most twice the error of the independent code (plus a rounding: it may be exact by luck)."""
    ours, other = error(got, true), error(independent, true)
    rounding = torch.finfo(dtype).eps * torch.tensor([1.0, 4.0])
    assert (ours <= 2 * other + rounding).all(), f"{what}: {ours.tolist()}, independent {other.tolist()}"


@cache
def known(T: int, decay: str) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and what the definition makes of them."""
    inputs = make_inputs(T, T, decay)
    return inputs, recurrence(**inputs)


@dataclass(frozen=True)
class Recurrence:
    """Which implementation of ours is measured against which of transformers."""

    id: str
    ours: Callable
    independent: Callable


# The two models of transformers share this code.
RECURRENCES = (
    Recurrence("chunk", ours_chunked, theirs(glm.chunk_kimi_delta_attention)),
    Recurrence("step", ours_stepped, theirs(kimi.recurrent_kimi_delta_attention)),
)
DECAYS = ("none", "mild", "bounded", "floor", "overflow", "bursts")


@pytest.mark.parametrize("case", RECURRENCES, ids=lambda case: case.id)
@pytest.mark.parametrize("decay", DECAYS)
def test_recurrence_is_as_accurate_as_transformers(case: Recurrence, decay: str) -> None:
    for T in LENGTHS:
        exact, true = known(T, decay)
        single = {name: value.float() for name, value in exact.items()}
        for name, got, other, want in zip(
            ("output", "final state"), case.ours(**single), case.independent(**single), true, strict=True
        ):
            assert got.dtype == torch.float32
            assert_as_accurate(got, other, want, f"{name}, T={T}")


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("ours", [ours_chunked, ours_stepped], ids=["chunk", "step"])
def test_recurrence_in_float64_equals_the_definition(ours: Callable, T: int) -> None:
    for decay in DECAYS:
        inputs, true = known(T, decay)
        for got, want in zip(ours(**inputs), true, strict=True):
            assert got.dtype == torch.float64
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def test_a_missing_state_is_a_zero_state() -> None:
    inputs = make_inputs(0, 37, "bounded")
    inputs["state"].zero_()
    want = recurrence(**inputs)
    del inputs["state"]
    o, final = ops.delta_chunk(*inputs.values(), packed([37]))
    torch.testing.assert_close(o, want[0], rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(final[0], want[1], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("ours", [ours_chunked, ours_stepped], ids=["chunk", "step"])
def test_eps_is_added_to_the_sum_of_squares(ours: Callable) -> None:
    """Queries and keys of about 1e-3 tell an eps in the sum from one in the mean; zeros must stay zeros."""
    inputs = make_inputs(3, 20, "mild", size=1e-3)
    inputs["q"][5], inputs["k"][7] = 0, 0
    o, final = ours(**inputs)
    want_o, want_final = recurrence(**inputs)
    torch.testing.assert_close(o, want_o, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(final, want_final, rtol=1e-9, atol=1e-11)
    assert (o[5] == 0).all()


@pytest.mark.parametrize("T", [1, 17, 65])
def test_bf16_inputs_are_computed_in_fp32_and_rounded_once(T: int) -> None:
    exact = make_inputs(T, T, "bounded")
    half = {name: exact[name].bfloat16() for name in ("q", "k", "v")} | {
        name: exact[name].float() for name in ("g", "beta", "state")
    }
    true_o, true_state = recurrence(**{name: value.double() for name, value in half.items()})
    for ours in (ours_chunked, ours_stepped):
        o, state = ours(**half)
        assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(state.double(), true_state, rtol=1e-5, atol=1e-5)
        other = theirs(glm.recurrent_kimi_delta_attention)(**half)[0]
        assert_as_accurate(o, other, true_o, dtype=torch.bfloat16)
        # One rounding of an fp32 value that may itself sit on either side of a bf16 midpoint.
        assert ((o.double() - true_o).abs() <= true_o.abs() * 2**-8 * 1.01 + 1e-6).all()


def gradients(run: Callable, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of a fixed random projection of outputs and final state."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    torch.manual_seed(99)
    loss = sum((y * torch.randn(y.shape).to(y.dtype)).sum() for y in run(**leaves))
    return dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values())), strict=True))


@pytest.mark.parametrize("decay", ["none", "bounded", "floor", "bursts"])
@pytest.mark.parametrize("T", [1, 16, 17, 35])
def test_gradients_also_through_the_states(T: int, decay: str) -> None:
    exact = make_inputs(T, T, decay)
    single = {name: value.float() for name, value in exact.items()}
    true = gradients(recurrence, exact)
    for ours in (ours_chunked, ours_stepped):
        double, got = gradients(ours, exact), gradients(ours, single)
        other = gradients(theirs(glm.chunk_kimi_delta_attention), single)
        for name in INPUTS:
            torch.testing.assert_close(
                double[name], true[name], rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
            # The gradient of a decay that forgets everything vanishes: nothing to be relative to.
            if true[name].abs().max() < 1e-6:
                assert got[name].abs().max() < 1e-6
            else:
                assert_as_accurate(got[name], other[name], true[name], f"gradient of {name}, {ours.__name__}")


@dataclass(frozen=True)
class Packing:
    id: str
    lengths: tuple[int, ...]


PACKINGS = (
    Packing("one-token", (1,)),
    Packing("only-one-token-documents", (1, 1, 1, 1)),
    Packing("mixed", (5, 1, 17, 1, 33, 16, 2)),
    Packing("rising", (1, 15, 16, 17, 40)),
    Packing("falling", (40, 32, 16, 1)),
)


@pytest.mark.parametrize("case", PACKINGS, ids=lambda case: case.id)
def test_packed_documents_equal_documents_alone(case: Packing) -> None:
    inputs = make_inputs(11, sum(case.lengths), "bounded", documents=len(case.lengths))
    together = ops.delta_chunk(*(inputs[n] for n in INPUTS[:5]), packed(case.lengths), inputs["state"])
    ends = torch.tensor(case.lengths).cumsum(0).tolist()
    for d, (end, length) in enumerate(zip(ends, case.lengths, strict=True)):
        rows = slice(end - length, end)
        o, final = recurrence(*(inputs[n][rows] for n in INPUTS[:5]), inputs["state"][d])
        torch.testing.assert_close(together[0][rows], o, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(together[1][d], final, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("changed", [0, 1, 3], ids=lambda d: f"document-{d}")
def test_a_document_does_not_see_another(changed: int) -> None:
    """Outputs, states and gradients of the others stay bit-identical; the changed one gets zero gradients."""
    lengths = (5, 1, 17, 33)
    inputs = {name: value.float() for name, value in make_inputs(5, 56, "bounded", documents=4).items()}
    documents = packed(lengths)
    document_M = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    mine_M, mine_D = document_M == changed, torch.arange(4) == changed
    other = dict(inputs)
    for name in INPUTS:
        where = mine_D if name == "state" else mine_M
        noise = torch.randn_like(inputs[name]).sigmoid()
        other[name] = torch.where(
            where.view(-1, *[1] * (noise.ndim - 1)), -5 * noise if name == "g" else noise, other[name]
        )

    def run(values):
        leaves = [values[n].clone().requires_grad_() for n in INPUTS]
        o, final = ops.delta_chunk(*leaves[:5], documents, leaves[5])
        loss = (o[~mine_M] ** 2).sum() + (final[~mine_D] ** 2).sum()
        return o, final, torch.autograd.grad(loss, leaves)

    o, final, grads = run(inputs)
    o2, final2, grads2 = run(other)
    assert not torch.equal(o[mine_M], o2[mine_M])
    assert torch.equal(o[~mine_M], o2[~mine_M])
    assert torch.equal(final[~mine_D], final2[~mine_D])
    for name, grad, grad2 in zip(INPUTS, grads, grads2, strict=True):
        mine = mine_D if name == "state" else mine_M
        assert (grad[mine] == 0).all()
        assert torch.equal(grad[~mine], grad2[~mine])


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 40, 64])
def test_a_sequence_may_be_cut_anywhere(cut: int) -> None:
    inputs = make_inputs(cut, 65, "bounded")
    whole, state = recurrence(**inputs), inputs.pop("state")
    head, tail = ({n: x[rows] for n, x in inputs.items()} for rows in (slice(cut), slice(cut, None)))
    for first, second in (
        (ours_chunked, ours_chunked),
        (ours_chunked, ours_stepped),
        (ours_stepped, ours_chunked),
    ):
        o1, middle = first(**head, state=state)
        o2, final = second(**tail, state=middle)
        torch.testing.assert_close(torch.cat([o1, o2]), whole[0], rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(final, whole[1], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_raw_gates_are_those_of_the_recurrence(bound: float | None, dtype: torch.dtype) -> None:
    """`kda_chunk` and `kda_step` are the gates and the recurrence, bit for bit."""
    exact, documents = make_inputs(4, 12, "none", documents=2), packed([5, 7])
    q, k, v, state = (exact[name].to(dtype) for name in ("q", "k", "v", "state"))
    z, beta = torch.randn(12, H, K).to(dtype), torch.randn(12, H).to(dtype)
    gate = torch.rand(H) * 2, torch.randn(H, K), bound
    log_decay, rate = ops.kda_gate(z, *gate), torch.sigmoid(beta.float())

    want = ops.delta_chunk(q, k, v, log_decay, rate, documents, state.float())
    got = ops.kda_chunk(q, k, v, z, beta, *gate, documents, state.float())
    assert all(map(torch.equal, got, want))
    assert ops.kda_chunk(q, k, v, z, beta, *gate, documents, keep_state=False)[1] is None

    rows = [x[:2] for x in (q, k, v)]
    want = ops.delta_step(*rows, log_decay[:2], rate[:2], state.float())
    got = ops.kda_step(*rows, z[:2], beta[:2], *gate, state.float())
    assert all(map(torch.equal, got, want))


# Decay gate.


def gate_module(module: str, bound: float | None, A_log_H: torch.Tensor, dt_bias_HK: torch.Tensor):
    config = SimpleNamespace(linear_head_dim=K, linear_num_heads=3, hidden_size=5, linear_lower_bound=bound)
    gate = {"glm5_next": glm.Glm5NextTextForgetGate, "kimi_linear": kimi.KimiLinearForgetGate}[module](config)
    with torch.no_grad():
        gate.A_log.copy_(A_log_H.view_as(gate.A_log))
        gate.dt_bias.copy_(dt_bias_HK.flatten())
    return gate


@dataclass(frozen=True)
class Gate:
    id: str
    module: str
    bound: float | None


GATES = (
    Gate("bound-5-glm5_next", "glm5_next", -5.0),
    Gate("bound-2.5-glm5_next", "glm5_next", -2.5),
    Gate("softplus-glm5_next", "glm5_next", None),
    Gate("softplus-kimi_linear", "kimi_linear", None),
)


@pytest.mark.parametrize("case", GATES, ids=lambda case: case.id)
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e4], ids=lambda size: f"inputs-{size:g}")
def test_gate_at_extreme_inputs(case: Gate, size: float) -> None:
    torch.manual_seed(2)
    A_log_H, dt_bias_HK = torch.tensor([-4.0, 0.3, math.log(16)]), torch.randn(3, K)
    module = gate_module(case.module, case.bound, A_log_H, dt_bias_HK)
    x_BTD = torch.randn(1, 40, 5) * size
    with torch.no_grad():
        z_MHK = module.f_b_proj(module.f_a_proj(x_BTD))[0].unflatten(-1, (3, K))
        independent = module(x_BTD)[0]
    got = ops.kda_gate(z_MHK, A_log_H, dt_bias_HK, case.bound)

    rate, z = A_log_H.double().exp()[:, None], z_MHK.double() + dt_bias_HK.double()
    if case.bound is None:
        true = -rate * (z.clamp_min(0) + torch.log1p(torch.exp(-z.abs())))
    else:
        true = case.bound / (1 + torch.exp(-rate * z))
        assert (got >= case.bound).all()
    assert got.dtype == torch.float32
    assert (got <= 0).all()
    # An input sum near 0 of large parts has lost digits before the gate sees it: compare where fp32 can.
    torch.testing.assert_close(got.double(), true, rtol=2e-5, atol=2e-6 * max(1.0, size * 1e-2))
    assert_as_accurate(got, independent, true)
    assert ops.kda_gate(z_MHK.double(), A_log_H.double(), dt_bias_HK.double(), case.bound).dtype == torch.float64


@pytest.mark.parametrize(
    ("z", "bounded", "softplus"),
    [(-1e4, 0.0, 0.0), (0.0, -2.5, -2 * math.log(2)), (1e4, -5.0, -2e4), (1.0, -4.403985, -2.6265233)],
)
def test_gate_forms_differ(z: float, bounded: float, softplus: float) -> None:
    """Public report: the bounded gate computed as a clamped softplus; here clamping would give -1.39 at 0."""
    args = torch.full((1, 1, 1), z), torch.tensor([math.log(2)]), torch.zeros(1, 1)
    assert ops.kda_gate(*args, -5.0).item() == pytest.approx(bounded, rel=1e-6, abs=1e-30)
    assert ops.kda_gate(*args, None).item() == pytest.approx(softplus, rel=1e-6, abs=1e-30)


def test_gate_gradient_is_finite_at_extreme_inputs() -> None:
    for bound in (-5.0, None):
        z = torch.tensor([-1e4, -88.0, 0.0, 88.0, 1e4]).view(5, 1, 1).requires_grad_()
        A_log = torch.tensor([math.log(16)], requires_grad=True)
        ops.kda_gate(z, A_log, torch.zeros(1, 1), bound).sum().backward()
        assert z.grad.isfinite().all()
        assert A_log.grad.isfinite().all()


# Gated norm and short convolution.


@dataclass(frozen=True)
class Norm:
    id: str
    module: type
    eps: float
    size: float = 1.0
    dtype: torch.dtype = torch.float32


NORMS = (
    Norm("glm5_next", glm.Glm5NextTextRMSNormGated, 1e-5),
    Norm("kimi_linear", kimi.KimiLinearRMSNormGated, 1e-5),
    Norm("other-eps", kimi.KimiLinearRMSNormGated, 1e-2),
    Norm("small-inputs", glm.Glm5NextTextRMSNormGated, 1e-5, size=1e-3),
    Norm("bf16", glm.Glm5NextTextRMSNormGated, 1e-5, dtype=torch.bfloat16),
)


@pytest.mark.parametrize("case", NORMS, ids=lambda case: case.id)
def test_gated_rms_norm(case: Norm) -> None:
    torch.manual_seed(4)
    x, gate = (torch.randn(30, H, K) * case.size).to(case.dtype), (torch.randn(30, H, K) * 4).to(case.dtype)
    module = case.module(K, eps=case.eps)
    with torch.no_grad():
        module.weight.copy_(torch.randn(K))
        independent = module(x, gate)
    got = ops.gated_rms_norm(x, gate, module.weight.detach(), case.eps)
    x64, g64, w64 = x.double(), gate.double(), module.weight.detach().double()
    true = x64 / torch.sqrt((x64 * x64).mean(-1, keepdim=True) + case.eps) * w64 / (1 + torch.exp(-g64))
    assert got.dtype == case.dtype
    assert_as_accurate(got, independent, true, dtype=case.dtype)
    # Norm first and gate second: gating first would change the root mean square.
    gated_first = F.rms_norm(x64 * torch.sigmoid(g64), [K], eps=case.eps) * w64
    assert error(got, gated_first)[0] > 0.02


@pytest.mark.parametrize("width", [1, 2, 4, 5])
@pytest.mark.parametrize("T", [1, 3, 20])
def test_short_conv_equals_transformers(T: int, width: int) -> None:
    torch.manual_seed(5)
    x_TP, weight_PW = torch.randn(T, 6), torch.randn(6, width)
    (got,) = ops.short_conv((x_TP,), (weight_PW,), packed([T]))
    independent = glm.causal_conv1d_fn(x_TP.T.unsqueeze(0), weight_PW, activation="silu")[0].T
    true = torch.zeros(T, 6, dtype=torch.float64)
    for t in range(T):
        for j in range(width):
            source = t - (width - 1) + j
            if source >= 0:
                true[t] += weight_PW[:, j].double() * x_TP[source].double()
    true = true / (1 + torch.exp(-true))
    assert_as_accurate(got, independent, true)


def test_short_conv_reads_the_remembered_tokens_of_its_document() -> None:
    torch.manual_seed(6)
    lengths, W, P = (1, 4, 2), 4, 3
    x_MP, weight_PW = torch.randn(7, P, dtype=torch.float64), torch.randn(P, W, dtype=torch.float64)
    tail_XWP = torch.randn(3, W - 1, P, dtype=torch.float64)
    documents = packed(lengths)
    _, tail_XW = documents.window(W)
    (got,) = ops.short_conv((x_MP,), (weight_PW,), documents, (tail_XWP,))
    kept = torch.cat([x_MP, tail_XWP.flatten(0, 1)])[tail_XW]
    start = 0
    for d, length in enumerate(lengths):
        line = torch.cat([tail_XWP[d], x_MP[start : start + length]])
        want = F.silu(F.conv1d(line.T[None], weight_PW[:, None], groups=P)[0].T)
        torch.testing.assert_close(got[start : start + length], want, rtol=1e-12, atol=1e-12)
        assert torch.equal(kept[d], line[-(W - 1) :])
        start += length


def test_short_conv_takes_its_inputs_together() -> None:
    torch.manual_seed(8)
    documents, widths = packed([3, 5]), (2, 4, 6)
    inputs = tuple(torch.randn(8, P) for P in widths)
    weights = tuple(torch.randn(P, 3) for P in widths)
    tails = tuple(torch.randn(2, 2, P) for P in widths)
    together = ops.short_conv(inputs, weights, documents, tails)
    for got, x_MP, weight_PW, tail_XWP in zip(together, inputs, weights, tails, strict=True):
        assert torch.equal(got, *ops.short_conv((x_MP,), (weight_PW,), documents, (tail_XWP,)))


def test_short_conv_of_bf16_accumulates_in_fp32() -> None:
    torch.manual_seed(7)
    x_MP, weight_PW = torch.randn(50, 4).bfloat16(), torch.randn(4, 4)
    (got,) = ops.short_conv((x_MP,), (weight_PW,), packed([50]))
    (wide,) = ops.short_conv((x_MP.double(),), (weight_PW.double(),), packed([50]))
    assert got.dtype == torch.bfloat16
    assert ((got.double() - wide).abs() <= wide.abs() * 2**-8 * 1.01 + 1e-6).all()


# The whole layer.


def text_config(bound: float | str | None = -5.0, heads: int = 3, **changes) -> LatentMoETextConfig:
    """One KDA layer whose constants are not the released ones; bound "missing" leaves the field out."""
    linear = {"kda_layers": [1], "full_attn_layers": [], "num_heads": heads, "head_dim": 8}
    linear |= {"short_conv_kernel_size": 3, "use_full_rank_gate": True}
    if bound != "missing":
        linear["gate_lower_bound"] = bound
    values = {"num_hidden_layers": 1, "hidden_size": 20, "rms_norm_eps": 1e-3, "num_experts": 0}
    return LatentMoETextConfig(**(values | changes), linear_attn_config=linear)


def make_layer(config: LatentMoETextConfig, seed: int = 0) -> KimiDeltaAttention:
    torch.manual_seed(seed)
    layer = KimiDeltaAttention(config)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 2 else 0.5))
            if name == "o_norm.weight":
                parameter.add_(1)
        # Only the first head_dim inputs reach the gate: then a low-rank gate can hold the same matrix.
        layer.g_proj.weight[:, layer.head_dim :] = 0
    return layer


def independent_layer(layer: KimiDeltaAttention, config: LatentMoETextConfig, module: str):
    """The layer of transformers with our weights; its low-rank gate selects inputs, then applies ours."""
    linear = config.linear_attn_config
    fields = SimpleNamespace(
        hidden_size=config.hidden_size,
        linear_num_heads=linear["num_heads"],
        linear_head_dim=linear["head_dim"],
        linear_conv_kernel_dim=linear["short_conv_kernel_size"],
        linear_lower_bound=config.gate_lower_bound,
        hidden_act="silu",
        rms_norm_eps=config.rms_norm_eps,
        layer_types=["linear_attention"],
    )
    build = {"glm5_next": glm.Glm5NextTextLinearAttention, "kimi_linear": kimi.KimiLinearDeltaAttention}[module]
    other = build(fields, 0)
    ours, K = layer.state_dict(), layer.head_dim
    state = {f"{n}.weight": ours[f"{n}.weight"] for n in ("q_proj", "k_proj", "v_proj", "b_proj", "o_norm", "o_proj")}
    state |= {f"forget_gate.{n}.weight": ours[f"{n}.weight"] for n in ("f_a_proj", "f_b_proj")}
    state["forget_gate.dt_bias"] = ours["dt_bias"]
    state["forget_gate.A_log"] = ours["A_log"][: layer.num_heads].view_as(other.forget_gate.A_log)
    state["conv1d.weight"] = torch.cat([ours[f"{n}_conv1d.weight"] for n in "qkv"])
    state["g_a_proj.weight"] = torch.eye(K, config.hidden_size)
    state["g_b_proj.weight"] = ours["g_proj.weight"][:, :K]
    other.load_state_dict(state)
    return other


def reference_layer(layer: KimiDeltaAttention, x_TD: torch.Tensor, bound: float | None, eps: float) -> torch.Tensor:
    """One document [T, D] through the layer in float64, written out."""
    w = {name: value.double() for name, value in layer.state_dict().items()}
    N, width, x = layer.num_heads, w["q_conv1d.weight"].shape[-1], x_TD.double()

    def convolved(name: str) -> torch.Tensor:
        line = F.pad(x @ w[f"{name}_proj.weight"].T, (0, 0, width - 1, 0))
        taps = [line[j : j + len(x)] * w[f"{name}_conv1d.weight"][:, 0, j] for j in range(width)]
        return F.silu(sum(taps)).unflatten(-1, (N, -1))

    z = (x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"]).unflatten(-1, (N, -1))
    rate = w["A_log"][:N].exp()[:, None]
    g = -rate * torch.log1p(z.exp()) if bound is None else bound * torch.sigmoid(rate * z)
    beta = torch.sigmoid(x @ w["b_proj.weight"].T)
    state = torch.zeros(N, z.shape[-1], z.shape[-1], dtype=torch.float64)
    o, _ = recurrence(convolved("q"), convolved("k"), convolved("v"), g, beta, state)
    o = o / torch.sqrt((o * o).mean(-1, keepdim=True) + eps) * w["o_norm.weight"]
    return (o.flatten(1) * torch.sigmoid(x @ w["g_proj.weight"].T)) @ w["o_proj.weight"].T


@dataclass(frozen=True)
class Layer:
    id: str
    module: str
    bound: float | str | None


LAYERS = (
    Layer("bound-5", "glm5_next", -5.0),
    Layer("bound-2.5", "glm5_next", -2.5),
    Layer("softplus-null", "glm5_next", None),
    Layer("softplus-missing", "kimi_linear", "missing"),
)


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.id)
def test_layer_equals_transformers(case: Layer) -> None:
    """Public report: a model trained with the softplus gate and run with the bounded one repeats itself."""
    config = text_config(case.bound)
    bound = None if case.bound == "missing" else case.bound
    layer = make_layer(config)
    other = independent_layer(layer, config, case.module)
    x_BTD = torch.randn(2, 70, 20)
    with torch.no_grad():
        got = layer(x_BTD, Documents.of_batch((2, 70), CPU))
        independent = other(x_BTD)
        true = torch.stack([reference_layer(layer, x, bound, 1e-3) for x in x_BTD])
        wrong = reference_layer(layer, x_BTD[0], -5.0 if bound is None else None, 1e-3)
        double = layer.double()(x_BTD.double(), Documents.of_batch((2, 70), CPU))
    torch.testing.assert_close(double, true, rtol=1e-9, atol=1e-10)
    assert_as_accurate(got, independent, true)
    assert error(got[0], wrong)[0] > 1e-2


def test_the_released_decay_rates_are_stored_padded() -> None:
    """A_log holds 128 numbers per 128 heads begun; those behind the heads are never read."""
    config = text_config()
    layer = make_layer(config)
    assert layer.A_log.shape == (128,)
    x_BTD, documents = torch.randn(1, 9, 20), Documents.of_batch((1, 9), CPU)
    with torch.no_grad():
        before = layer(x_BTD, documents)
        layer.A_log[3:] = torch.nan
        assert torch.equal(layer(x_BTD, documents), before)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_layer_ignores_padding(side: str) -> None:
    config = text_config()
    layer = make_layer(config)
    mask = torch.zeros(1, 30, dtype=torch.long)
    real = {"left": slice(11, 30), "right": slice(19), "both": slice(6, 25)}[side]
    mask[:, real] = 1
    x_BTD = torch.randn(1, 30, 20) * 10
    with torch.no_grad():
        got = layer(x_BTD, Documents.of_batch((1, 30), CPU, attention_mask=mask))
        independent = independent_layer(layer, config, "glm5_next")(x_BTD, attention_mask=mask)
        true = reference_layer(layer, x_BTD[0, real], -5.0, 1e-3)
    assert_as_accurate(got[0, real], independent[0, real], true)
    assert (got[mask == 0] == 0).all()


def test_packed_layer_equals_documents_alone() -> None:
    layer = make_layer(text_config()).double()
    lengths = (5, 1, 17, 1, 20)
    x_BTD = torch.randn(1, sum(lengths), 20, dtype=torch.float64)
    with torch.no_grad():
        got = layer(x_BTD, packed(lengths))[0]
    parts = zip(got.split(lengths), x_BTD[0].split(lengths), strict=True)
    for mine, x_TD in parts:
        torch.testing.assert_close(mine, reference_layer(layer, x_TD, -5.0, 1e-3), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("cuts", [(1,) * 21, (20, 1), (7, 1, 13), (2, 19), (16, 1, 1, 1, 2)], ids=str)
def test_cached_layer_equals_the_whole(cuts: tuple[int, ...]) -> None:
    layer, cache = make_layer(text_config()).double(), LayerCache()
    x_BTD = torch.randn(2, 21, 20, dtype=torch.float64)
    done, outputs = 0, []
    with torch.no_grad():
        for length in cuts:
            past = torch.zeros(2, done, dtype=torch.long)
            documents = Documents.of_batch((2, length), CPU, past_ids=past)
            outputs.append(layer(x_BTD[:, done : done + length], documents, cache))
            done += length
    true = torch.stack([reference_layer(layer, x, -5.0, 1e-3) for x in x_BTD])
    torch.testing.assert_close(torch.cat(outputs, 1), true, rtol=1e-9, atol=1e-10)
    assert cache.get("state").shape == (2, 3, 8, 8)
    assert cache.get("q_conv").shape == (2, 2, 24)


@pytest.mark.parametrize("cut", [1, 2, 9])
def test_a_padded_row_keeps_its_cache(cut: int) -> None:
    """Left-padded rows of different length, cut inside the padding of one of them."""
    layer, cache = make_layer(text_config()).double(), LayerCache()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    x_BTD, outputs = torch.randn(2, 12, 20, dtype=torch.float64), []
    with torch.no_grad():
        for rows in (slice(cut), slice(cut, 11), slice(11, 12)):
            length = rows.stop - (rows.start or 0)
            past = torch.where(mask[:, : rows.start or 0] == 0, -1, 0)
            documents = Documents.of_batch((2, length), CPU, attention_mask=mask[:, rows], past_ids=past)
            outputs.append(layer(x_BTD[:, rows], documents, cache))
    got = torch.cat(outputs, 1)
    torch.testing.assert_close(got[0], reference_layer(layer, x_BTD[0], -5.0, 1e-3), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(got[1, 5:], reference_layer(layer, x_BTD[1, 5:], -5.0, 1e-3), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    """Public report: KDA outputs that move by 1e-3 with the batch size."""
    layer = make_layer(text_config()).to(dtype)
    x_BTD = torch.randn(8, 70, 20).to(dtype)
    with torch.no_grad():
        alone = layer(x_BTD[:1], Documents.of_batch((1, 70), CPU))[0]
        for B in (4, 8):
            batched = layer(x_BTD[:B], Documents.of_batch((B, 70), CPU))[0]
            difference = (batched.double() - alone.double()).abs()
            scale = alone.double().abs().max()
            assert difference.max() <= (1e-5 if dtype == torch.float32 else 2**-7 * scale)


def test_bf16_layer_keeps_rates_and_states_in_fp32() -> None:
    config = text_config()
    layer, cache = make_layer(config).to(torch.bfloat16), LayerCache()
    x_BTD = torch.randn(1, 40, 20).bfloat16()
    with torch.no_grad():
        got = layer(x_BTD, Documents.of_batch((1, 40), CPU), cache)
        true = reference_layer(layer, x_BTD[0], -5.0, 1e-3)
        other = independent_layer(layer, config, "glm5_next").to(torch.bfloat16)
        for name in ("conv1d.weight", "forget_gate.A_log", "forget_gate.dt_bias", "o_norm.weight"):
            other.get_parameter(name).data = independent_layer(layer, config, "glm5_next").get_parameter(name).data
        independent = other(x_BTD)
    for name in ("A_log", "dt_bias", "q_conv1d.weight", "o_norm.weight"):
        assert layer.get_parameter(name).dtype == torch.float32
    assert cache.get("state").dtype == torch.float32
    assert got.dtype == torch.bfloat16
    assert_as_accurate(got[0], independent[0], true, dtype=torch.bfloat16)
