"""One token per sequence: the bare step, and the step with everything around it, against their definitions."""

import pytest
import torch
from kda.decode import decode_kda, step_kda
from kda.reference import decode_kda_reference, step_kda_reference

IN_PLACE = ("conv_states", "state")


def step_inputs(B, H, K, V, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    arguments = {"q": draw(B, H, K), "k": draw(B, H, K), "v": draw(B, H, V), "f": draw(B, H, K), "beta": draw(B, H)}
    arguments |= {"A_log": draw(H, dtype=torch.float32), "dt_bias": draw(H, K, dtype=torch.float32)}
    return arguments | {"state": draw(B, H, K, V, dtype=torch.float32)}


def decode_inputs(B, H, K, V, W, dtype, device, rows=None, seed=0):
    """With `rows`, pools of that many rows and a slot for each sequence."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    widths, N = (H * K, H * K, H * V), rows or B
    slots = None if rows is None else torch.randperm(rows, generator=generator)[:B].to(device, torch.int32)
    return {
        "xs": [draw(B, P) for P in widths],
        "weights": [draw(P, W, dtype=torch.float32) for P in widths],
        "conv_states": [draw(N, W - 1, P) for P in widths],
        "f": draw(B, H, K),
        "beta": draw(B, H),
        "A_log": draw(H, dtype=torch.float32),
        "dt_bias": draw(H, K, dtype=torch.float32),
        "state": draw(N, H, K, V, dtype=torch.float32),
        "gate": draw(B, H, V),
        "norm_weight": draw(V, dtype=torch.float32),
        "slots": slots,
    }


def converted(arguments, change):
    """The arguments with every floating tensor changed."""

    def one(x):
        if isinstance(x, list):
            return [one(y) for y in x]
        return change(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return {name: one(x) for name, x in arguments.items()}


def run_decode(arguments, **options):
    """Output and updated pools; the arguments stay as they are."""
    copies = converted(arguments, torch.clone)
    y = decode_kda(**copies, **options)
    return [y, *copies["conv_states"], copies["state"]]


def check_decode(as_accurate, arguments, lower_bound=-5.0):
    options = {"lower_bound": lower_bound, "eps": 1e-5}
    y, pools, state = decode_kda_reference(**arguments, **options)
    true_y, true_pools, true_state = decode_kda_reference(**converted(arguments, torch.Tensor.double), **options)
    our_y, *our_pools, our_state = run_decode(arguments, **options)
    as_accurate("y", our_y, y, true_y)
    as_accurate("state", our_state, state, true_state)
    for our_pool, pool, true_pool in zip(our_pools, pools, true_pools, strict=True):
        assert torch.equal(our_pool, pool) and torch.equal(our_pool.double(), true_pool)


def check_step(as_accurate, arguments, lower_bound=-5.0):
    ours = step_kda(**arguments, lower_bound=lower_bound)
    plain = step_kda_reference(**arguments, lower_bound=lower_bound)
    truth = step_kda_reference(**converted(arguments, torch.Tensor.double), lower_bound=lower_bound)
    for name, *three in zip(("o", "state"), ours, plain, truth, strict=True):
        as_accurate(name, *three)


@pytest.mark.parametrize("lower_bound", [-5.0, -0.5, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_step(as_accurate, device, dtype, lower_bound):
    check_step(as_accurate, step_inputs(2, 3, 32, 16, dtype, device), lower_bound)


@pytest.mark.parametrize(("K", "V"), [(16, 32), (64, 64), (128, 128)])
def test_widths_of_the_heads(as_accurate, device, K, V):
    check_step(as_accurate, step_inputs(1, 1, K, V, torch.float32, device))
    check_decode(as_accurate, decode_inputs(1, 1, K, V, 4, torch.float32, device))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_decode(as_accurate, device, dtype, lower_bound):
    check_decode(as_accurate, decode_inputs(2, 3, 32, 16, 4, dtype, device), lower_bound)


@pytest.mark.parametrize("W", [2, 3, 8])
def test_widths_of_the_window(as_accurate, device, W):
    check_decode(as_accurate, decode_inputs(2, 1, 16, 16, W, torch.float32, device))


def test_slots(as_accurate, device):
    """Rows of the pools that no sequence owns keep every bit."""
    arguments = decode_inputs(3, 2, 16, 32, 4, torch.float32, device, rows=7)
    check_decode(as_accurate, arguments)
    untouched = [row for row in range(7) if row not in arguments["slots"].tolist()]
    old = [*arguments["conv_states"], arguments["state"]]
    for before, after in zip(old, run_decode(arguments, lower_bound=-5.0, eps=1e-5)[1:], strict=True):
        assert torch.equal(before[untouched], after[untouched])


@pytest.mark.parametrize("f", [-40.0, 40.0])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_ends_of_the_gate(as_accurate, device, f, lower_bound):
    """Decays near their bound everywhere, and near none."""
    arguments = step_inputs(1, 2, 16, 16, torch.float32, device)
    arguments["f"].fill_(f)
    check_step(as_accurate, arguments, lower_bound)


def test_zero_keys(device):
    """The l2 norm of zeros is zero, not NaN, and the state only decays."""
    arguments = step_inputs(1, 1, 16, 16, torch.float32, device)
    arguments["k"].zero_()
    arguments["q"].zero_()
    o, state = step_kda(**arguments, lower_bound=-5.0)
    assert (o == 0).all() and state.isfinite().all() and (state.abs() < arguments["state"].abs()).all()


def test_several_tokens_are_one_document(as_accurate, device):
    """Steps in a row, the pools carried along, do what the chunked definition does."""
    from kda.reference import chunk_kda_reference, short_conv_reference

    T, H, D, W = 6, 2, 16, 4
    first = decode_inputs(T, H, D, D, W, torch.float32, device)
    conv_states = [torch.zeros(1, W - 1, H * D, device=device) for _ in range(3)]
    state = torch.zeros(1, H, D, D, device=device)
    qkv = [y.view(1, T, H, D) for y in short_conv_reference(first["xs"], first["weights"])]
    o, final = chunk_kda_reference(
        *qkv, first["f"][None], first["beta"][None], first["A_log"], first["dt_bias"], lower_bound=-5.0,
        output_final_state=True,
    )  # fmt: skip
    truth = o[0] * torch.rsqrt(o[0].square().mean(-1, keepdim=True) + 1e-5) * first["norm_weight"]
    truth = (truth * first["gate"].sigmoid()).flatten(1)
    for t in range(T):
        token = {name: first[name][t : t + 1] for name in ("f", "beta", "gate")}
        shared = {name: first[name] for name in ("weights", "A_log", "dt_bias", "norm_weight")}
        xs = [x[t : t + 1] for x in first["xs"]]
        y = decode_kda(xs, conv_states=conv_states, state=state, **token, **shared, lower_bound=-5.0, eps=1e-5)
        torch.testing.assert_close(y, truth[t : t + 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-5)
    for pool, x in zip(conv_states, first["xs"], strict=True):
        assert torch.equal(pool[0], x[-(W - 1) :])


def test_every_output_is_written(device, monkeypatch):
    arguments = decode_inputs(2, 2, 16, 32, 4, torch.float32, device)
    bare = step_inputs(2, 2, 16, 32, torch.float32, device)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
    results = [*run_decode(arguments, lower_bound=-5.0, eps=1e-5), *step_kda(**bare, lower_bound=-5.0)]
    assert all(x.isfinite().all() for x in results)


def test_inputs_may_be_slices(device):
    """Projections are often slices of one matrix product."""
    arguments = decode_inputs(2, 2, 16, 16, 4, torch.float32, device)
    apart = run_decode(arguments, lower_bound=-5.0, eps=1e-5)
    arguments["xs"] = list(torch.cat(arguments["xs"], dim=1).split(32, dim=1))
    for x, y in zip(apart, run_decode(arguments, lower_bound=-5.0, eps=1e-5), strict=True):
        assert torch.equal(x, y)


def test_no_sequences(device):
    y, *_ = run_decode(decode_inputs(0, 2, 16, 16, 4, torch.float32, device), lower_bound=-5.0, eps=1e-5)
    assert y.shape == (0, 32)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("state", torch.zeros(2, 2, 16, 24)),
        ("state", torch.zeros(2, 2, 16, 16, dtype=torch.bfloat16)),
        ("state", torch.zeros(3, 2, 16, 16)),
        ("state", torch.zeros(2, 2, 16, 16).transpose(2, 3)),
        ("xs", [torch.zeros(2, 32)] * 2),
        ("xs", [torch.zeros(2, 32), torch.zeros(2, 32), torch.zeros(2, 48)]),
        ("conv_states", [torch.zeros(2, 3, 32, dtype=torch.bfloat16)] * 3),
        ("conv_states", [torch.zeros(2, 32, 3)] * 3),
        ("weights", [torch.zeros(32, 1)] * 3),
        ("f", torch.zeros(2, 2, 8)),
        ("beta", torch.zeros(2, 2, 1)),
        ("A_log", torch.zeros(128)),
        ("gate", torch.zeros(2, 32)),
        ("norm_weight", torch.zeros(16, dtype=torch.float64)),
        ("slots", torch.zeros(2, dtype=torch.int64)),
        ("slots", torch.zeros(2, dtype=torch.int32, device="meta")),
        ("beta", torch.zeros(2, 2, device="meta")),
    ],
)
def test_bad_arguments(device, name, value):
    arguments = decode_inputs(2, 2, 16, 16, 4, torch.float32, device)
    with pytest.raises(ValueError, match=name):
        decode_kda(**arguments | {name: value}, lower_bound=-5.0, eps=1e-5)


@pytest.mark.parametrize("name", ["q", "A_log"])
def test_a_step_of_two_devices(device, name):
    arguments = step_inputs(2, 2, 16, 16, torch.float32, device)
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"^{name} must be .* on {device}.*, got .* on meta"):
        step_kda(**arguments, lower_bound=-5.0)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("B", [1, 5])
def test_model_width(as_accurate, device, B, K):
    check_decode(as_accurate, decode_inputs(B, 96, K, K, 4, torch.bfloat16, device, rows=B + 3))
    check_step(as_accurate, step_inputs(B, 96, K, K, torch.bfloat16, device))


@pytest.mark.gpu
def test_same_bits(device):
    arguments = decode_inputs(3, 96, 128, 128, 4, torch.bfloat16, device)
    first = run_decode(arguments, lower_bound=-5.0, eps=1e-5)
    for _ in range(29):
        for x, y in zip(first, run_decode(arguments, lower_bound=-5.0, eps=1e-5), strict=True):
            assert torch.equal(x, y)


@pytest.mark.gpu
def test_compiles_as_one_graph(device):
    arguments = decode_inputs(2, 4, 64, 64, 4, torch.bfloat16, device)
    eager = run_decode(arguments, lower_bound=-5.0, eps=1e-5)
    compiled = torch.compile(decode_kda, fullgraph=True)(**arguments, lower_bound=-5.0, eps=1e-5)
    for x, y in zip(eager, [compiled, *arguments["conv_states"], arguments["state"]], strict=True):
        assert torch.equal(x, y)
    bare = step_inputs(2, 4, 64, 64, torch.bfloat16, device)
    for x, y in zip(
        step_kda(**bare, lower_bound=None),
        torch.compile(step_kda, fullgraph=True)(**bare, lower_bound=None),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_launches_on_the_gpu_of_the_states(device, monkeypatch):
    """The current GPU may be another one, as where a model is spread over the GPUs of one process."""
    entered, device_of = [], torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: entered.append(x.shape) or device_of(x))
    step_kda(**step_inputs(2, 1, 16, 32, torch.float32, device), lower_bound=-5.0)
    decode_kda(**decode_inputs(3, 1, 16, 32, 4, torch.float32, device), lower_bound=-5.0, eps=1e-5)
    assert entered == [(2, 1, 16, 32), (3, 1, 16, 32)]


@pytest.mark.gpu
def test_replays_in_a_cuda_graph(device):
    """Each replay goes one token further."""
    arguments = decode_inputs(2, 4, 64, 64, 4, torch.bfloat16, device)
    twice = converted(arguments, torch.clone)
    decode_kda(**converted(arguments, torch.clone), lower_bound=-5.0, eps=1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode_kda(**arguments, lower_bound=-5.0, eps=1e-5)
    for _ in range(2):
        graph.replay()
        expected = decode_kda(**twice, lower_bound=-5.0, eps=1e-5)
        assert torch.equal(y, expected) and torch.equal(arguments["state"], twice["state"])
