"""Routing against its definition: choices, weights, sorted rows, gradients, ties, capacity, statistics, refusals."""

import pytest
import torch
from latent_moe import sorting
from latent_moe.balance import _count_biases, _score_shares, _score_shares_bwd, count_biases, score_shares
from latent_moe.route import _route, _route_bwd, route
from latent_moe.route_reference import (
    count_biases_reference,
    route_reference,
    score_shares_reference,
    sort_slots_reference,
)
from latent_moe.sorting import _sort_slots, sort_slots

from modeling_latentmoe import ops
from modeling_latentmoe.training.balance import BINS, QuantileBalancing, auxiliary_loss, bin_range
from modeling_latentmoe.training.expert_parallel import drop_excess

EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def poisoned():
    """New memory holds NaN and the largest integers until something is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs_of(T: int, E: int, device: str):
    """Logits, a bias, and a mask of tokens that count."""
    generator = torch.Generator(device).manual_seed(7 * T + E)
    logits = torch.randn(T, E, generator=generator, device=device)
    bias = torch.randn(E, generator=generator, device=device) / 8
    return logits, bias, torch.rand(T, generator=generator, device=device) > 0.3


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative to the truth, or absolute where the truth is zero (the gradient of a weight that is always 1)."""
    size = truth.double().norm()
    return ((x.double() - truth.double()).norm() / (size if size > 1e-6 else 1)).item()


def check_accuracy(name: str, ours: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor) -> None:
    """Ours errs at most twice as much as plain torch in fp32, or a few units in fp32's last place."""
    assert ours.shape == plain.shape and ours.dtype == plain.dtype, name
    assert error(ours, truth) <= 2 * error(plain, truth) + 8 * EPS, name


def same_rows(rows, wanted) -> None:
    for name, x, y in zip(wanted._fields, rows, wanted, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), name


def with_gradient(function, logits, *args, **kwargs):
    logits = logits.clone().requires_grad_()
    routing = function(logits, *args, **kwargs)
    generator = torch.Generator(logits.device).manual_seed(1)
    dweights = torch.randn(routing.weights_TS.shape, generator=generator, device=logits.device)
    return routing, torch.autograd.grad(routing.weights_TS, logits, dweights.to(logits.dtype))[0]


def check(logits, bias, k, **options) -> None:
    """Choices and rows are those of the definition; weights, cutoffs and gradients are as accurate."""
    ours, gradient = with_gradient(route, logits, bias, k, **options)
    plain, plain_gradient = with_gradient(route_reference, logits, bias, k, **options)
    truth, true_gradient = with_gradient(route_reference, logits.double(), bias.double(), k, **options)
    assert torch.equal(ours.ids_TS, plain.ids_TS) and torch.equal(ours.ids_TS, truth.ids_TS)
    same_rows(ours.rows, plain.rows)
    check_accuracy("weights", ours.weights_TS, plain.weights_TS, truth.weights_TS)
    check_accuracy("gradient", gradient, plain_gradient, true_gradient)
    finite = torch.isfinite(truth.cutoff_T)
    assert torch.equal(torch.isneginf(ours.cutoff_T), ~finite)
    check_accuracy("cutoff", ours.cutoff_T[finite], plain.cutoff_T[finite], truth.cutoff_T[finite])


@pytest.mark.parametrize(
    "shape",
    [
        *((1, 1, 1), (3, 16, 4), (34, 112, 16), (33, 7, 7)),
        *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((5, 133, 32), (64, 16, 1))),
    ],
    ids=str,
)
def test_values_and_gradients(shape, device):
    T, E, k = shape
    logits, bias, mask = inputs_of(T, E, device)
    check(logits, bias, k)
    check(logits, bias, k, mask_T=mask, scaling_factor=2.5, capacity_factor=0.9)


def test_released_width(device):
    logits, bias, mask = inputs_of(3, 896, device)
    check(logits, bias, 16, mask_T=mask)


def test_plain_scores(device):
    logits, bias, _ = inputs_of(9, 24, device)
    check(logits, bias, 5, renormalize=False)


def test_model_routes_alike(device):
    logits, bias, _ = inputs_of(21, 48, device)
    ids, weights = ops.route(logits, bias, 6, scaling_factor=1.5)
    routing = route(logits, bias, 6, scaling_factor=1.5)
    assert torch.equal(routing.ids_TS, ids)
    torch.testing.assert_close(routing.weights_TS, weights)
    assert torch.equal(routing.rows.load_E, torch.bincount(ids.flatten(), minlength=48))


def test_of_equal_scores_the_first_wins(device):
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randint(-1, 2, (20, 300), generator=generator, device=device).float()
    for bias in (torch.zeros(300, device=device), torch.arange(300, device=device) % 2 * 1.0):
        check(logits, bias, 9)
    ids = route(torch.zeros(3, 300, device=device), torch.zeros(300, device=device), 32).ids_TS
    assert torch.equal(ids, torch.arange(32, device=device).expand(3, 32))


def test_scores_at_their_ends(device):
    logits = torch.linspace(-80, 80, 641, device=device).unsqueeze(1)
    routing = route(logits, torch.zeros(1, device=device), 1, renormalize=False)
    truth = logits.double().sigmoid()
    # The interpreter rounds a product before it adds to it.
    units = 2 if device == "cuda" else 32
    assert ((routing.weights_TS - truth).abs() <= units * EPS * truth).all()
    ends = torch.tensor([[-torch.inf, torch.inf, -200.0, 200.0]], device=device)
    torch.testing.assert_close(
        route(ends, torch.zeros(4, device=device), 4, renormalize=False).weights_TS,
        torch.tensor([[1.0, 1.0, 0.0, 0.0]], device=device),
    )


def test_experts_that_are_shut_and_logits_that_are_lost(device):
    logits, bias, _ = inputs_of(4, 12, device)
    bias[::2] = -torch.inf
    check(logits, bias, 6)
    # The last resort of tokens that need more.
    assert torch.equal(route(logits, bias, 8).ids_TS[:, 6:], torch.tensor([[0, 2]], device=device).expand(4, 2))
    logits[1] = torch.nan
    logits[2, 5] = torch.nan
    routing = route(logits, bias, 8)
    ids, weights = routing.ids_TS, routing.weights_TS
    assert (ids.sort(1).values.diff(dim=1) > 0).all() and ids.min() >= 0 and ids.max() < 12
    assert ids[2, 0] == 5
    # Nothing hides them.
    assert weights[1:3].isnan().all() and weights[[0, 3]].isfinite().all()


@pytest.mark.parametrize("T", [0, 1, 40])
def test_no_token_counts(T, device):
    logits, bias, _ = inputs_of(T, 16, device)
    mask = torch.zeros(T, dtype=torch.bool, device=device)
    routing, gradient = with_gradient(route, logits, bias, 3, mask_T=mask, capacity_factor=1.0)
    assert (routing.ids_TS == -1).all() and (routing.weights_TS == 0).all() and (gradient == 0).all()
    same_rows(routing.rows, route_reference(logits, bias, 3, mask_T=mask, capacity_factor=1.0).rows)


def test_what_masked_tokens_hold_does_not_matter(device):
    logits, bias, mask = inputs_of(35, 16, device)
    clean = with_gradient(route, logits, bias, 3, mask_T=mask)
    logits[~mask] = torch.nan
    routing, gradient = with_gradient(route, logits, bias, 3, mask_T=mask)
    assert torch.equal(gradient, clean[1]) and torch.equal(routing.weights_TS, clean[0].weights_TS)
    same_rows(routing.rows, clean[0].rows)


def test_strided_inputs(device):
    logits, bias, mask = inputs_of(12, 32, device)
    generous = torch.stack([bias, bias], dim=1)
    check(logits[:, ::2], generous[::2, 0], 3, mask_T=mask)
    check(logits.t().contiguous().t()[::3], bias, 3, mask_T=mask[::3])
    ids = route(logits, bias, 4).ids_TS
    same_rows(sort_slots(ids.t().contiguous().t(), 32), sort_slots_reference(ids, 32))


def test_gradient_that_is_one_number(device):
    logits, bias, _ = inputs_of(3, 8, device)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(route(logits, bias, 2, renormalize=False).weights_TS.sum(), logits)
    (wanted,) = torch.autograd.grad(route_reference(logits, bias, 2, renormalize=False).weights_TS.sum(), logits)
    torch.testing.assert_close(gradient, wanted)


def choices(T: int, E: int, S: int, device: str) -> torch.Tensor:
    """Distinct ids per token, some of experts that are not held."""
    generator = torch.Generator(device).manual_seed(T + E + S)
    return torch.rand(T, 2 * (E + S), generator=generator, device=device).argsort(1)[:, :S] - S


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (31, 5, 3), (32, 17, 2), (33, 8, 32), (200, 3, 5)], ids=str)
def test_sorted_slots(shape, dtype, device, monkeypatch):
    # Several runs of the loop over blocks.
    monkeypatch.setattr(sorting, "COUNTED_BLOCKS", 4)
    T, E, S = shape
    ids = choices(T, E, S, device).to(dtype)
    for factor in (None, 0.3, 1.0, 100.0):
        same_rows(sort_slots(ids, E, factor), sort_slots_reference(ids, E, factor))


def test_rows_lead_back_to_slots(device):
    rows = sort_slots(choices(50, 6, 4, device), 6)
    total = rows.offset[-1]
    assert torch.equal(rows.row_TS.flatten()[rows.slot_R[:total].long()], torch.arange(total, device=device).int())
    assert (rows.slot_R[total:] == -1).all() and (rows.row_TS >= 0).sum() == total


def test_all_tokens_choose_the_same(device):
    ids = torch.arange(4, device=device).expand(70, 4)
    for factor in (None, 0.5):
        same_rows(sort_slots(ids, 9, factor), sort_slots_reference(ids, 9, factor))


def test_drops_are_those_of_expert_parallel_training(device):
    logits, bias, _ = inputs_of(60, 8, device)
    routing = route(logits, bias, 3, capacity_factor=0.8)
    kept = drop_excess(routing.ids_TS, 8, 0.8)
    assert torch.equal(routing.rows.row_TS >= 0, kept >= 0)
    assert routing.rows.dropped == (kept < 0).sum()


class TextConfig:
    moe_router_activation_func = "sigmoid"


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (37, 112)], ids=str)
def test_score_shares(shape, device):
    logits, d, mask = inputs_of(*shape, device)

    def run(function, logits, **options):
        logits = logits.clone().requires_grad_()
        out = function(4 * logits, **options)
        return out.detach(), torch.autograd.grad(out, logits, d.to(out.dtype))[0]

    for options in ({}, {"mask_T": mask}):
        results = run(score_shares, logits, **options)
        plain = run(score_shares_reference, logits, **options)
        truth = run(score_shares_reference, logits.double(), **options)
        for name, *values in zip(("shares", "gradient"), results, plain, truth, strict=True):
            check_accuracy(name, *values)


def test_shares_give_the_auxiliary_loss(device):
    logits, load, mask = inputs_of(30, 12, device)
    load = load.softmax(0)
    wanted = auxiliary_loss([logits], load[None], TextConfig, mask)
    torch.testing.assert_close(12 * (score_shares(logits, mask) * load).sum(), wanted)


def test_scores_too_small_for_fp32(device):
    logits = torch.tensor([[-150.0, -151.0], [120.0, 130.0]], device=device)
    torch.testing.assert_close(score_shares(logits), score_shares_reference(logits))


def test_cutoffs_give_the_counts_of_quantile_balancing(device):
    logits, bias, mask = inputs_of(40, 20, device)
    low, width = bin_range(bias)
    routing = route(logits, bias, 3, mask_T=mask)
    counts, wanted = (torch.zeros(20, BINS, dtype=torch.int32, device=device) for _ in range(2))
    for _ in range(2):
        count_biases(counts, logits, routing.cutoff_T, low, width)
        count_biases_reference(wanted, logits, routing.cutoff_T, low, width)
    balancing = QuantileBalancing.__new__(QuantileBalancing)
    balancing.top_k, balancing.bias_ME, balancing.counts_MEH = 3, bias[None], torch.zeros_like(counts)[None]
    balancing.observe([logits], mask)
    # A number at the edge of a bin may fall to either side of it.
    for other in (wanted, 2 * balancing.counts_MEH[0]):
        assert torch.equal(counts.sum(1), other.sum(1))
        assert (counts.cumsum(1) - other.cumsum(1)).abs().sum() <= 8


def test_refusals_name_the_argument(device):
    logits, bias, mask = inputs_of(3, 8, device)
    ids = torch.zeros(3, 2, dtype=torch.int64, device=device)
    counts, scalar = torch.zeros(8, 10, dtype=torch.int32, device=device), bias[0]
    for function, message in [
        (lambda: route(logits[0], bias, 2), "logits_TE: expected float32"),
        (lambda: route(logits.double(), bias, 2), "logits_TE: expected float32"),
        (lambda: route(logits.repeat(1, 129), bias, 2), "logits_TE: 1032 experts"),
        (lambda: route(logits, bias[1:], 2), "bias_E: expected"),
        (lambda: route(logits, bias.double(), 2), "bias_E: expected"),
        (lambda: route(logits, bias.to("meta"), 2), "bias_E: on meta"),
        (lambda: route(logits, bias, 2, mask_T=mask.to("meta")), "mask_T: on meta"),
        (lambda: route(logits, bias, 9), "top_k: 9"),
        (lambda: route(logits, bias, 0), "top_k: 0"),
        (lambda: route(logits, bias, 2, mask_T=mask[1:]), "mask_T: expected"),
        (lambda: route(logits, bias, 2, mask_T=mask.int()), "mask_T: expected"),
        (lambda: route(logits, bias, 2, capacity_factor=0.0), "capacity_factor: 0.0"),
        (lambda: sort_slots(ids[0], 8), "ids_TS: expected"),
        (lambda: sort_slots(ids.float(), 8), "ids_TS: expected"),
        (lambda: sort_slots(ids.repeat(1, 20), 8), "ids_TS: 40 slots"),
        (lambda: sort_slots(ids, 0), "experts: 0"),
        (lambda: sort_slots(ids, 8, -1.0), "capacity_factor: -1.0"),
        (lambda: score_shares(logits, mask.int()), "mask_T: expected"),
        (lambda: count_biases(counts, logits, bias, scalar, scalar), "cutoff_T: expected"),
        (lambda: count_biases(counts[1:], logits, bias[:3], scalar, scalar), "counts_EH: expected"),
        (lambda: count_biases(counts, logits, bias[:3], bias, scalar), "low: expected"),
        (lambda: count_biases(counts, logits, bias[:3], scalar, scalar.double()), "width: expected"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            function()


def test_operators_are_well_formed(device):
    logits, bias, mask = inputs_of(5, 8, device)
    # The last of its checks adds up outputs that are no numbers to differentiate: compilation is tested below.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_route, (logits.requires_grad_(), bias, mask, 3, True, 1.5, 1.25), test_utils=checks)
    routing = route(logits, bias, 3)
    ids, weights = routing.ids_TS, routing.weights_TS.detach()
    torch.library.opcheck(_route_bwd, (weights, ids, weights, 8, True, 1.0))
    torch.library.opcheck(_sort_slots, (ids, 8, None))
    torch.library.opcheck(_score_shares, (logits, mask))
    torch.library.opcheck(_score_shares_bwd, (bias, logits.detach(), mask))
    low, width = bin_range(bias)
    counts = torch.zeros(8, 10, dtype=torch.int32, device=device)
    torch.library.opcheck(_count_biases, (counts, logits.detach(), routing.cutoff_T, low, width))


def compiled_equals_eager(backend: str, T: int, E: int, k: int, device: str) -> None:
    logits, bias, mask = inputs_of(T, E, device)

    def step(logits):
        routing = route(logits * 1.0, bias, k, mask_T=mask, capacity_factor=1.0)
        loss = routing.weights_TS.square().sum() + score_shares(logits, mask).square().sum()
        return loss, routing.ids_TS, *routing.rows

    results = []
    for function in (torch.compile(step, fullgraph=True, backend=backend), step):
        leaf = logits.clone().requires_grad_()
        loss, *others = function(leaf)
        loss.backward()
        results.append((loss.detach(), leaf.grad, *others))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_compiled_whole(device):
    compiled_equals_eager("aot_eager", 5, 8, 3, device)


@pytest.mark.gpu
def test_compiled_by_inductor():
    compiled_equals_eager("inductor", 1000, 896, 16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("E", [1, 16, 112, 896])
@pytest.mark.parametrize("T", [1, 63, 1000, 8192])
def test_large(T, E):
    # Scores that torch computes to the same bits are chosen, sorted and dropped alike.
    logits, bias, mask = inputs_of(T, E, "cuda")
    k = min(16, E)
    for options in ({}, {"mask_T": mask, "capacity_factor": 1.0}):
        ours, gradient = with_gradient(route, logits, bias, k, **options)
        plain, wanted = with_gradient(route_reference, logits, bias, k, **options)
        assert torch.equal(ours.ids_TS, plain.ids_TS)
        same_rows(ours.rows, plain.rows)
        torch.testing.assert_close(ours.weights_TS, plain.weights_TS)
        torch.testing.assert_close(gradient, wanted)
        assert torch.equal(ours.cutoff_T, plain.cutoff_T)


@pytest.mark.gpu
def test_scores_have_the_bits_of_torch():
    logits = (8 * torch.randn(2**20, 1, device="cuda")).clamp(-80, 80)
    routing = route(logits, torch.zeros(1, device="cuda"), 1, renormalize=False)
    different = (routing.weights_TS != logits.sigmoid()).sum().item()
    # The reciprocal is rounded to nearest but for a few in a million.
    assert different <= 32


@pytest.mark.gpu
def test_same_bits_every_run():
    logits, bias, mask = inputs_of(8192, 896, "cuda")
    first = None
    for _ in range(30):
        routing, gradient = with_gradient(route, logits, bias, 16, mask_T=mask, capacity_factor=1.0)
        results = (routing.ids_TS, routing.weights_TS, routing.cutoff_T, *routing.rows, gradient, score_shares(logits))
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


def test_a_second_derivative_is_an_error(device):
    logits, bias, _ = inputs_of(5, 8, device)
    logits.requires_grad_()
    weights = route(logits, bias, 2).weights_TS.sum()
    (gradient,) = torch.autograd.grad(weights, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        (weights + gradient.square().sum()).backward()
