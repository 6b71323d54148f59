"""Chunked KDA against its definition in float64: outputs, final states, and the gradients of every input.

What is returned in the inputs' half precision may err twice as much as the definition in the same precision. Final
states and the gradients of A_log, dt_bias and initial states are float32, but come from products of rounded operands:
they may err as much as one rounding to bfloat16. Sums over tokens, the gradients of A_log and dt_bias, keep the errors
of their terms where the terms cancel: they are measured against the sum of the terms' magnitudes.

Off a GPU kernels are interpreted, where bfloat16 is cut off instead of rounded. There the numbers are bfloat16's in
float16 tensors, and results are rounded to bfloat16 afterwards: the kernels do the same arithmetic for both.

Legend: B batch, T tokens, H heads, K key width, V value width, X documents, N chunks of C tokens.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from kda import chunk as kda_chunk
from kda import chunk_kda, chunk_kda_reference
from kda.passes import Passes
from kda.reference import _l2_normalised, _log_decay, _wide

STREAMS = ("q", "k", "v", "f", "beta")
INPUTS = (*STREAMS, "A_log", "dt_bias", "initial_state")
RESULTS = ("o", "final", *INPUTS)
HEAD_AXIS = {"A_log": 0, "dt_bias": 0, "initial_state": 1, "final": 1, "dfinal": 1}
# float32: scores are products of two factors, powers of two whose exponents are rounded at up to 115; each rounding
# costs 115 * 2^-24 * ln 2 = 5e-6, and running sums have several. Most results stay far below.
EXACT = 2e-5
BF16_ROUNDING = torch.finfo(torch.bfloat16).eps / 2
LENGTHS = [1, 2, 3, 15, 63, 64, 65, 130]


def lengths(*fast: int) -> list:
    """All of them, of which the others take minutes together."""
    return [T if T in fast else pytest.param(T, marks=pytest.mark.slow) for T in LENGTHS]


# Interpreted, gates without one reference take seconds each.
SLOW_BOUNDS = [-5.0, pytest.param(-8.0, marks=pytest.mark.slow), None]
BOUNDS = [-5.0, -8.0, None]
C = 16

BETA_OF_REPEATED_KEYS = pytest.mark.xfail(
    strict=True,
    reason="dbeta errs 3.7 times as much as torch: the state's gradient is large, its product with the key that every "
    "token writes anew is small, and products of fp16 operands keep 11 bits of the large one",
)


def inputs(T, H, K, V, dtype, device, B=1, documents=None, seed=0, f_mean=0.0):
    """Inputs by name, and upstream gradients `do` and `dfinal`; half-precision numbers are bfloat16's."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    def stream(*shape, mean=0.0):
        x = draw(*shape) + mean
        return x if dtype == torch.float32 else x.bfloat16().to(dtype)

    X = documents or B
    return {
        "q": stream(B, T, H, K),
        "k": stream(B, T, H, K),
        "v": stream(B, T, H, V),
        "f": stream(B, T, H, K, mean=f_mean),
        "beta": stream(B, T, H),
        "A_log": torch.rand(H, generator=generator, device=device).add(0.1).log(),
        "dt_bias": draw(H, K) / 2 - 2,
        "initial_state": draw(X, H, K, V),
        "do": stream(B, T, H, V),
        "dfinal": draw(X, H, K, V),
    }


def run(function, given, **options):
    """Results by name, gradients under their inputs' names."""
    leaves = {name: given[name].detach().requires_grad_() for name in INPUTS}
    o, final = function(**leaves, output_final_state=True, **options)
    outputs, upstream = (o, final), (given["do"].to(o.dtype), given["dfinal"].to(final.dtype))
    gradients = torch.autograd.grad(outputs, [*leaves.values()], upstream)
    return dict(zip(RESULTS, (o.detach(), final.detach(), *gradients), strict=True))


def of_heads(named, heads):
    return {name: x.index_select(HEAD_AXIS.get(name, 2), heads) for name, x in named.items()}


def rounded(x):
    return x if x.dtype == torch.float32 else x.bfloat16()


@pytest.fixture
def agrees(as_accurate, within):
    """check(given, heads=all, definition=chunk_kda_reference, **options): ours is accurate; returns its results."""

    def check(given, heads=None, definition=chunk_kda_reference, exact=EXACT, **options):
        results = ours = run(chunk_kda, given, **options)
        if heads is not None:
            heads = torch.tensor(heads, device=ours["o"].device)
            ours, given = of_heads(ours, heads), of_heads(given, heads)
        # With a parameter of its own for every token, its gradients are the terms of the parameter's.
        tokens = given["beta"].shape[:2]
        spread = {name: given[name].expand(*tokens, *given[name].shape) for name in ("A_log", "dt_bias")}
        truth = run(definition, {name: x.double() for name, x in (given | spread).items()}, **options)
        half = given["q"].dtype != torch.float32
        plain = run(definition, given, **options) if half else None
        bound = BF16_ROUNDING if half else exact
        for name in RESULTS:
            x, true = ours[name], truth[name]
            if name in spread:
                within(name, x, true.sum((0, 1)), bound, true.abs().sum((0, 1)))
            elif half and x.dtype == given["q"].dtype:
                as_accurate(name, rounded(x), rounded(plain[name]), true)
            else:
                within(name, x, true, bound)
        return results

    return check


def chunked_definition(
    q, k, v, f, beta, A_log, dt_bias, *, lower_bound, initial_state=None, output_final_state=False
):  # fmt: skip
    """`chunk_kda_reference` without packing, C tokens at a time: soon enough for long documents."""
    B, T, H, V = v.shape
    g = _log_decay(_wide(f), A_log, dt_bias, lower_bound)
    q_unit, k_unit = _l2_normalised(_wide(q)) * q.shape[-1] ** -0.5, _l2_normalised(_wide(k))

    def cut(x):
        """[B, T, H, D] -> [N, B, H, C, D]; zeros behind the end change nothing."""
        return F.pad(x, (0, 0, 0, 0, 0, -T % C)).unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4)

    q, k, v_cut, g, b = (cut(x) for x in (q_unit, k_unit, _wide(v), g, _wide(beta).sigmoid().unsqueeze(-1)))
    G = g.cumsum(-2)
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).tril().logical_not()
    fade = (G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(later.unsqueeze(-1), -torch.inf).exp()
    faded_k = fade * k.unsqueeze(-3)
    attend, keys = ((faded_k @ x.unsqueeze(-1)).squeeze(-1) for x in (q, k))
    right = torch.cat([b * k * G.exp(), b * v_cut], -1)
    solved = torch.linalg.solve_triangular((b * keys).tril(-1), right, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], V], -1)
    total = G[..., -1:, :]
    k_out, decay, q_in = k * (total - G).exp(), total.exp().transpose(-1, -2), q * G.exp()
    state = q.new_zeros(B, H, q.shape[-1], V) if initial_state is None else initial_state.to(q.dtype)
    outputs = []
    for w_n, u_n, q_n, a_n, k_n, d_n in zip(*(x.unbind(0) for x in (w, u, q_in, attend, k_out, decay)), strict=True):
        values = u_n - w_n @ state
        outputs.append(q_n @ state + a_n @ values)
        state = d_n * state + k_n.transpose(-1, -2) @ values
    o = torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)[:, :T]
    return o.to(v.dtype), state if output_final_state else None


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_chunked_definition(within, lower_bound):
    given = {name: x.double() for name, x in inputs(37, 2, 8, 4, torch.float32, "cpu", B=2).items()}
    truth = run(chunk_kda_reference, given, lower_bound=lower_bound)
    for name, x in run(chunked_definition, given, lower_bound=lower_bound).items():
        within(name, x, truth[name], 1e-13)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_sums_of_log_decays(within, device, lower_bound):
    """From the middle of every 32 tokens, and of every 16; each is rounded once, whatever the number of its terms."""
    T, H, K = 75, 2, 16
    given = inputs(T, H, K, K, torch.float32, device)
    passes = Passes(given["q"], given["v"], None, lower_bound)
    work = passes.new_chunks(True)
    sums, quarters = work.sums, work.quarters
    passes.gate(given["f"], given["A_log"], given["dt_bias"], sums, quarters)
    g = _log_decay(*(given[name].double() for name in ("f", "A_log", "dt_bias")), lower_bound)[0] / math.log(2)
    of_halves = F.pad(g, (0, 0, 0, 0, 0, -T % 64)).unflatten(0, (-1, 32))
    running = of_halves.cumsum(1)
    truth = (running - running[:, 15:16]).flatten(0, 1)[:T].transpose(0, 1)
    # A term has four roundings, on a GPU two approximations beside them.
    within("sums", sums, truth, 4e-7)
    truth = of_halves.unflatten(1, (2, 16)).sum(2).flatten(0, 1).unflatten(0, (-1, 4)).transpose(1, 2)
    within("quarters", quarters if lower_bound is None else quarters.log2(), truth, 4e-7)


def test_tokens_in_no_document_have_no_gradient(device):
    """Whatever memory they get held before; outputs of such tokens are NaN, and nobody may take them for results."""
    given = inputs(7, 2, 16, 16, torch.float32, device)
    del given["initial_state"]
    leaves = {name: given[name].requires_grad_() for name in STREAMS}
    rest = {name: given[name] for name in ("A_log", "dt_bias")}
    cu_seqlens = torch.tensor([0, 3], device=device)
    o, _ = chunk_kda(**leaves, **rest, lower_bound=-5.0, cu_seqlens=cu_seqlens)
    assert o[:, 3:].isnan().all() and o[:, :3].isfinite().all()
    trash = [torch.full_like(x, 7777.0) for x in leaves.values()]
    del trash
    for name, gradient in zip(STREAMS, torch.autograd.grad(o, [*leaves.values()], given["do"]), strict=True):
        assert gradient[:, :3].any() and not gradient[:, 3:].any(), name


@pytest.mark.parametrize("cu_seqlens", [None, [0, 2, 5]])
def test_operators_are_well_formed(device, cu_seqlens):
    """Also for inputs that lie otherwise: their gradients are contiguous, and torch.compile has to know that."""
    given = inputs(5, 2, 16, 16, torch.float32, device, documents=2 if cu_seqlens else None)
    streams = [given[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v", "f", "beta")]
    leaves = [x.detach().requires_grad_() for x in (*streams, given["A_log"], given["dt_bias"])]
    bounds = cu_seqlens and torch.tensor(cu_seqlens, device=device)
    call = (*leaves, bounds, given["initial_state"].requires_grad_(), -5.0, True)
    torch.library.opcheck(kda_chunk._forward, call)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in call[:-1]]
    torch.library.opcheck(kda_chunk._backward, (given["do"], given["dfinal"], *plain))


@pytest.mark.parametrize("T", lengths(1, 65))
def test_lengths_in_fp32(agrees, device, T):
    B = 1 + T % 2
    agrees(inputs(T, 2 - T % 2, 16, 32, torch.float32, device, B=B), lower_bound=-5.0)


@pytest.mark.parametrize("T", lengths(3, 65))
def test_lengths_in_half_precision(agrees, device, T):
    B = 2 - T % 2
    agrees(inputs(T, 1 + T % 2, 32, 16, torch.float16, device, B=B), lower_bound=-5.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lower_bound", SLOW_BOUNDS)
def test_gates(agrees, device, lower_bound, dtype):
    agrees(inputs(66, 1, 32, 32, dtype, device), lower_bound=lower_bound)


# Tokens from 10 on decay at the bound, which is -5; tokens down to -10 hardly at all.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("f_mean", [-10.0, 4.0, 10.0])
def test_gate_extremes(agrees, device, f_mean, dtype):
    """What is left of a gradient when the scores between tokens are a thousandth of those with themselves."""
    agrees(inputs(66, 1, 32, 32, dtype, device, f_mean=f_mean), lower_bound=-5.0, exact=5e-5)


def repeated(given):
    return given | {"k": given["k"][:, :1].expand_as(given["k"]).contiguous()}


def orthogonal(given):
    """Key t is a multiple of unit vector t modulo K."""
    T, K = given["k"].shape[1], given["k"].shape[3]
    lines = torch.eye(K, dtype=given["k"].dtype, device=given["k"].device).repeat(-(-T // K), 1)[:T]
    return given | {"k": (3 * lines).unsqueeze(1).expand_as(given["k"]).contiguous()}


@pytest.mark.parametrize("keys", [repeated, orthogonal])
def test_special_keys(agrees, device, keys):
    agrees(keys(inputs(66, 1, 32, 32, torch.float16, device)), lower_bound=-5.0)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bounds", [[0, 5, 5, 8, 8], [0, 0, 1, 66, 67, 67]])
def test_packed_documents(agrees, device, bounds, dtype):
    """Empty documents, documents of one token, and public report 74: borders that occur twice."""
    cu_seqlens = torch.tensor(bounds, device=device, dtype=torch.int32)
    given = inputs(bounds[-1], 2, 16, 16, dtype, device, documents=len(bounds) - 1)
    results = agrees(given, lower_bound=-5.0, cu_seqlens=cu_seqlens)
    empty = cu_seqlens.diff() == 0
    assert torch.equal(results["final"][empty], given["initial_state"][empty])
    assert torch.equal(results["initial_state"][empty], given["dfinal"][empty])


def test_documents_do_not_see_each_other(device):
    """Public reports 71 and 72: what document 1 holds changes no bit of document 2, its gradients included."""
    first, T = 70, 80
    cu_seqlens = torch.tensor([0, first, T], device=device)
    given = inputs(T, 1, 32, 32, torch.float16, device, documents=2)
    changed = dict(given)
    for name in (*STREAMS, "do"):
        changed[name] = given[name].clone()
        changed[name][:, :first] = torch.nan if name == "v" else 2 * given[name][:, :first].flip(1)
    for name in ("initial_state", "dfinal"):
        changed[name] = given[name].clone()
        changed[name][0] = torch.nan
    results, others = (run(chunk_kda, x, lower_bound=-5.0, cu_seqlens=cu_seqlens) for x in (given, changed))
    for name in ("o", *STREAMS):
        assert torch.equal(results[name][:, first:], others[name][:, first:]), name
    for name in ("final", "initial_state"):
        assert torch.equal(results[name][1], others[name][1]), name


def test_tokens_outside_all_documents_are_nan(device):
    given = inputs(8, 1, 16, 16, torch.float32, device, documents=1)
    whole = run(chunk_kda, {n: x[:, :5] if n in (*STREAMS, "do") else x for n, x in given.items()}, lower_bound=-5.0)
    part = {name: given[name] for name in INPUTS}
    o, _ = chunk_kda(**part, lower_bound=-5.0, cu_seqlens=torch.tensor([0, 5], device=device))
    assert torch.equal(o[:, :5], whole["o"]) and o[:, 5:].isnan().all()


def test_rows_of_a_batch_do_not_see_each_other(device):
    """Public report 69: a row gives the same bits in any batch."""
    given = inputs(66, 1, 16, 16, torch.float16, device, B=3)
    batch = run(chunk_kda, given, lower_bound=-5.0)
    alone = run(chunk_kda, {n: x if n in ("A_log", "dt_bias") else x[1:2] for n, x in given.items()}, lower_bound=-5.0)
    for name in ("o", "final", *STREAMS, "initial_state"):
        assert torch.equal(batch[name][1:2], alone[name]), name


def zeroed(given, what):
    """Nothing to learn from the last token, the last chunk or everything; or no values at first, or none at all."""
    given = given | {name: torch.zeros_like(given[name]) for name in ("initial_state", "dfinal")}
    name, tokens = {
        "last token": ("do", slice(-1, None)),
        "last chunk": ("do", slice(-65, None)),
        "no gradient": ("do", slice(None)),
        "first values": ("v", slice(0, 70)),
        "no values": ("v", slice(None)),
    }[what]
    x = given[name].clone()
    x[:, tokens] = 0
    return given | {name: x}


ZEROS = ("last token", "last chunk", "no gradient", "first values", "no values")


def finite_where_the_definition_is(given, **options):
    """Results are finite, and zero where the definition's are all zero."""
    ours, plain = run(chunk_kda, given, **options), run(chunk_kda_reference, given, **options)
    for name in RESULTS:
        assert ours[name].isfinite().all(), name
        assert ours[name].any() or not plain[name].any(), name
        assert not ours[name].any() or plain[name].any(), name
    return ours, plain


@pytest.mark.parametrize("what", ZEROS)
def test_zeros(device, what):
    """A token without a label has no gradient; scales of nothing but zeros must not become zero."""
    given = zeroed(inputs(129, 1, 16, 16, torch.float16, device), what)
    finite_where_the_definition_is(given, lower_bound=-5.0)


def test_without_states(as_accurate, device):
    given = inputs(66, 1, 16, 16, torch.float16, device)
    o, final = chunk_kda(**{name: given[name] for name in INPUTS[:-1]}, lower_bound=-5.0)
    given["initial_state"] = torch.zeros_like(given["initial_state"])
    assert final is None
    assert torch.equal(o, chunk_kda(**{name: given[name] for name in INPUTS}, lower_bound=-5.0)[0])


def test_no_tokens(device):
    given = inputs(0, 2, 16, 16, torch.float32, device)
    results = run(chunk_kda, given, lower_bound=-5.0)
    assert results["o"].shape == given["v"].shape
    assert torch.equal(results["final"], given["initial_state"])
    assert torch.equal(results["initial_state"], given["dfinal"])
    assert all((results[name] == 0).all() for name in (*STREAMS, "A_log", "dt_bias"))


def poisoned(given, **options):
    """The results when new memory is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=given["q"].device).isnan().all()
        return run(chunk_kda, given, **options)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_every_result_is_written(device, dtype):
    cu_seqlens = torch.tensor([0, 0, 1, 66, 67, 67], device=device)
    given = inputs(67, 1, 16, 32, dtype, device, documents=5)
    clean = run(chunk_kda, given, lower_bound=-5.0, cu_seqlens=cu_seqlens)
    for name, x in poisoned(given, lower_bound=-5.0, cu_seqlens=cu_seqlens).items():
        assert torch.equal(x, clean[name]), name


def strided(given):
    """The same numbers with other strides."""
    return {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in given.items()}


def test_strided_inputs(device):
    given = inputs(9, 2, 16, 32, torch.float16, device, B=2)
    plain, others = (run(chunk_kda, x, lower_bound=-5.0) for x in (given, strided(given)))
    for name in RESULTS:
        assert torch.equal(plain[name], others[name]), name


def test_gradient_of_a_plain_sum(device):
    """Its upstream gradient is one number with strides of zero."""
    given = inputs(9, 1, 16, 16, torch.float32, device)
    ones = {name: torch.ones_like(given[name]) for name in ("do", "dfinal")}
    expected = run(chunk_kda, given | ones, lower_bound=-5.0)
    ones = {name: x.new_ones(()).expand_as(x) for name, x in ones.items()}
    for name, x in run(chunk_kda, given | ones, lower_bound=-5.0).items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: {"q": x["q"].double()}),
        ("q", lambda x: {"q": x["q"][0]}),
        ("q", lambda x: {"q": x["q"][..., :8]}),
        ("k", lambda x: {"k": x["k"][:, 1:]}),
        ("k", lambda x: {"k": x["k"].half()}),
        ("v", lambda x: {"v": x["v"][..., :8]}),
        ("v", lambda x: {"v": x["v"].half()}),
        ("f", lambda x: {"f": x["f"][..., 1:]}),
        ("f", lambda x: {"f": x["f"].half()}),
        ("beta", lambda x: {"beta": x["beta"].unsqueeze(-1)}),
        ("A_log", lambda x: {"A_log": x["A_log"][1:]}),
        ("dt_bias", lambda x: {"dt_bias": x["dt_bias"].flatten()}),
        ("initial_state", lambda x: {"initial_state": x["initial_state"][:1]}),
        ("initial_state", lambda x: {"initial_state": x["initial_state"].half()}),
        ("lower_bound", lambda x: {"lower_bound": 5.0}),
        ("lower_bound", lambda x: {"lower_bound": 0.0}),
        ("cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([0, 2, 5])}),
        ("cu_seqlens", lambda x: {"q": x["q"][:1], "k": x["k"][:1], "v": x["v"][:1], "f": x["f"][:1]}
            | {"beta": x["beta"][:1], "cu_seqlens": torch.tensor([0.0, 2.0, 5.0])}),
    ],
)  # fmt: skip
def test_bad_arguments(device, name, change):
    given = inputs(5, 2, 16, 16, torch.float32, device, B=2)
    arguments = {argument: given[argument] for argument in INPUTS} | {"lower_bound": -5.0}
    with pytest.raises(ValueError, match=f"^{name} "):
        chunk_kda(**arguments | change(arguments))


@pytest.mark.parametrize("name", ["v", "f", "A_log", "cu_seqlens"])
def test_tensors_of_two_devices(device, name):
    given = inputs(5, 2, 16, 16, torch.float32, device, documents=2)
    arguments = {argument: given[argument] for argument in INPUTS} | {"lower_bound": -5.0}
    arguments["cu_seqlens"] = torch.tensor([0, 2, 5], device=device)
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"^{name} must be where q is, on {device}.*: on meta"):
        chunk_kda(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [1, 2, 96, 128])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_heads_and_widths(agrees, device, lower_bound, K, H):
    given = inputs(1000, H, K, K, torch.bfloat16, device)
    agrees(given, sorted({0, H - 1}), chunked_definition, lower_bound=lower_bound)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "H"), [(8192, 96), (131072, 4)])
def test_long_documents(agrees, device, T, H):
    agrees(inputs(T, H, 128, 128, torch.bfloat16, device), [0, H - 1], chunked_definition, lower_bound=-5.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("T", [1, 2, 3, 15, 63, 64, 65, 1024])
def test_gradients_at_all_lengths(agrees, device, T, dtype):
    """Public reports 64 and 65: gradients are finite and right at every length, A_log's and dt_bias's too."""
    results = agrees(inputs(T, 2, 128, 128, dtype, device, B=2), None, chunked_definition, lower_bound=-5.0)
    assert all(x.isfinite().all() for x in results.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("f_mean", [-12.0, 4.0, 12.0])
@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_gate_extremes_at_full_width(agrees, device, lower_bound, f_mean, dtype):
    given = inputs(1000, 2, 128, 128, dtype, device, f_mean=f_mean)
    # A half's decays sum up to 2^-231 and 2^-369 under the bounds, and to about 2^-600 without one: each rounding of
    # such an exponent costs 1e-5, 1.5e-5 and 2.5e-5, and sums have several.
    agrees(given, None, chunked_definition, exact=1e-4 if lower_bound is None else 5e-5, lower_bound=lower_bound)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("keys", "f_mean"),
    [(repeated, 0.0), (orthogonal, 0.0), (orthogonal, -6.0), pytest.param(repeated, -6.0, marks=BETA_OF_REPEATED_KEYS)],
)
def test_special_keys_at_full_width(agrees, device, keys, f_mean):
    given = keys(inputs(1000, 4, 128, 128, torch.bfloat16, device, f_mean=f_mean))
    agrees(given, None, chunked_definition, lower_bound=-5.0)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128])
def test_packed_documents_at_full_width(agrees, device, K):
    bounds = [0, 0, 1, 64, 128, 128, 129, 300, 300]
    cu_seqlens = torch.tensor(bounds, device=device, dtype=torch.int32)
    given = inputs(bounds[-1], 2, K, K, torch.bfloat16, device, documents=len(bounds) - 1)
    agrees(given, lower_bound=-5.0, cu_seqlens=cu_seqlens)
    clean = run(chunk_kda, given, lower_bound=-5.0, cu_seqlens=cu_seqlens)
    for name, x in poisoned(given, lower_bound=-5.0, cu_seqlens=cu_seqlens).items():
        assert torch.equal(x, clean[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("what", ZEROS)
def test_zeros_at_full_width(within, device, what):
    given = zeroed(inputs(193, 2, 128, 128, torch.bfloat16, device), what)
    ours, plain = finite_where_the_definition_is(given, lower_bound=-5.0)
    for name in ("o", "q", "k", "v"):
        if plain[name].any():
            within(name, ours[name], plain[name], 4 * BF16_ROUNDING)


@pytest.mark.gpu
def test_same_bits(device):
    """Public report 63: thirty runs, one result."""
    cu_seqlens = torch.tensor([0, 700, 700, 701, 3000], device=device)
    given = inputs(3000, 24, 128, 128, torch.bfloat16, device, documents=4)
    first = run(chunk_kda, given, lower_bound=-5.0, cu_seqlens=cu_seqlens)
    for _ in range(29):
        for name, x in run(chunk_kda, given, lower_bound=-5.0, cu_seqlens=cu_seqlens).items():
            assert torch.equal(x, first[name]), name


@pytest.mark.gpu
def test_compiles_as_one_graph(device):
    cu_seqlens = torch.tensor([0, 100, 100, 101, 300], device=device)
    given = inputs(300, 2, 128, 128, torch.bfloat16, device, documents=4)
    eager = run(chunk_kda, given, lower_bound=-5.0, cu_seqlens=cu_seqlens)
    compiled = run(torch.compile(chunk_kda, fullgraph=True), given, lower_bound=-5.0, cu_seqlens=cu_seqlens)
    for name in RESULTS:
        assert torch.equal(eager[name], compiled[name]), name


@pytest.mark.gpu
def test_host_does_not_wait(device):
    cu_seqlens = torch.tensor([0, 100, 100, 101, 300], device=device)
    given = inputs(300, 2, 128, 128, torch.bfloat16, device, documents=4)
    run(chunk_kda, given, lower_bound=-5.0, cu_seqlens=cu_seqlens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(chunk_kda, given, lower_bound=-5.0, cu_seqlens=cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_replays_in_a_cuda_graph(device):
    """Also with other documents than were captured: only their number is fixed."""
    given = inputs(300, 2, 128, 128, torch.bfloat16, device, documents=3)
    arguments = {name: given[name] for name in INPUTS}
    arguments |= {"cu_seqlens": torch.tensor([0, 100, 101, 300], device=device), "lower_bound": -5.0}
    with torch.no_grad():
        chunk_kda(**arguments, output_final_state=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chunk_kda(**arguments, output_final_state=True)
        other = inputs(300, 2, 128, 128, torch.bfloat16, device, documents=3, seed=1)
        for name in INPUTS:
            arguments[name].copy_(other[name])
        arguments["cu_seqlens"].copy_(torch.tensor([0, 0, 170, 300]))
        graph.replay()
        for x, y in zip(captured, chunk_kda(**arguments, output_final_state=True), strict=True):
            assert torch.equal(x, y)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(agrees, device):
    """1M tokens of 24 heads: the last document agrees with a run of its own, and that with float64."""
    T, H, last = 2**20, 24, 100
    x, y = (torch.randn(1, T, H, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    short = inputs(last, H, 128, 128, torch.bfloat16, device)
    short |= {
        "v": x[:, -last:].clone(),
        "q": x[:, -last:].clone(),
        "k": y[:, -last:].clone(),
        "f": y[:, -last:].clone(),
    }
    alone = agrees(short, [0, H - 1], chunked_definition, lower_bound=-5.0)
    # Two tensors serve as four, which leaves memory for the gradients.
    q, k, v, f = (z.detach().requires_grad_() for z in (x, y, x, y))
    beta = torch.randn(1, T, H, device=device, dtype=torch.bfloat16)
    beta[:, -last:] = short["beta"]
    beta.requires_grad_()
    states = torch.cat([torch.zeros_like(short["initial_state"]), short["initial_state"]]).requires_grad_()
    dfinal = torch.cat([torch.zeros_like(short["dfinal"]), short["dfinal"]])
    parameters = [short[name].detach().requires_grad_() for name in ("A_log", "dt_bias")]
    cu_seqlens = torch.tensor([0, T - last, T], device=device)
    leaves = [q, k, v, f, beta, *parameters, states]
    o, final = chunk_kda(
        *leaves[:-1], lower_bound=-5.0, cu_seqlens=cu_seqlens, initial_state=states, output_final_state=True
    )
    assert o.isfinite().all() and final.isfinite().all()
    assert torch.equal(o[:, -last:], alone["o"]) and torch.equal(final[1:], alone["final"])
    with torch.no_grad():
        o[:, -last:] = short["do"]
    gradients = torch.autograd.grad((o, final), leaves, (o.detach(), dfinal))
    assert all(gradient.isfinite().all() for gradient in gradients)
    for name, gradient in zip(STREAMS, gradients, strict=False):
        assert torch.equal(gradient[:, -last:], alone[name]), name
    assert torch.equal(gradients[-1][1:], alone["initial_state"])
