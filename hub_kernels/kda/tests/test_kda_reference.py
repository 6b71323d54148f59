"""The definitions, against closed forms and torch's own convolution, all in float64."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from kda.reference import chunk_kda_reference, decode_kda_reference, short_conv_reference, step_kda_reference


def inputs(T, H, K, V, B=1, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, f = (draw(B, T, H, K) for _ in range(3))
    return [q, k, draw(B, T, H, V), f, draw(B, T, H), draw(H), draw(H, K)]


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_recurrence_as_matrices(lower_bound):
    """S_t = (I - beta k k^T) diag(exp g) S_{t-1} + beta k v^T,  o_t = S_t^T q / sqrt(K)."""
    T, H, K, V = 7, 2, 5, 3
    q, k, v, f, beta, A_log, dt_bias = given = inputs(T, H, K, V)
    initial = torch.randn(1, H, K, V, dtype=torch.float64)
    o, final = chunk_kda_reference(*given, lower_bound=lower_bound, initial_state=initial, output_final_state=True)
    for h in range(H):
        S = initial[0, h]
        for t in range(T):
            unit_q, unit_k = (x / (x @ x + 1e-6).sqrt() for x in (q[0, t, h], k[0, t, h]))
            z = f[0, t, h] + dt_bias[h]
            rate = A_log[h].exp()
            g = -rate * torch.log1p(z.exp()) if lower_bound is None else lower_bound / (1 + (-rate * z).exp())
            b = 1 / (1 + (-beta[0, t, h]).exp())
            S = (torch.eye(K) - b * torch.outer(unit_k, unit_k)) @ torch.diag(g.exp()) @ S
            S = S + b * torch.outer(unit_k, v[0, t, h])
            torch.testing.assert_close(o[0, t, h], S.T @ unit_q / K**0.5)
        torch.testing.assert_close(final[0, h], S)


def test_packed_documents_are_separate_ones():
    T, H, K, V = 11, 2, 4, 3
    *streams, A_log, dt_bias = inputs(T, H, K, V)
    bounds = [0, 0, 4, 5, 5, 11]
    initial = torch.randn(5, H, K, V, dtype=torch.float64)
    options = {"lower_bound": -5.0, "output_final_state": True}
    o, final = chunk_kda_reference(
        *streams, A_log, dt_bias, cu_seqlens=torch.tensor(bounds), initial_state=initial, **options
    )
    for d, (a, b) in enumerate(pairwise(bounds)):
        document = [x[:, a:b] for x in streams]
        o_d, final_d = chunk_kda_reference(*document, A_log, dt_bias, initial_state=initial[d : d + 1], **options)
        torch.testing.assert_close(o[:, a:b], o_d, rtol=0, atol=0)
        torch.testing.assert_close(final[d : d + 1], final_d, rtol=0, atol=0)
    assert torch.equal(final[[0, 3]], initial[[0, 3]])


def test_rows_of_a_batch_are_separate():
    given = inputs(3, 2, 4, 3, B=2)
    o, final = chunk_kda_reference(*given, lower_bound=-5.0)
    assert final is None
    for b in range(2):
        row = [x[b : b + 1] for x in given[:5]]
        torch.testing.assert_close(o[b : b + 1], chunk_kda_reference(*row, *given[5:], lower_bound=-5.0)[0])
    with pytest.raises(ValueError, match="cu_seqlens"):
        chunk_kda_reference(*given, lower_bound=-5.0, cu_seqlens=torch.tensor([0, 3]))


def test_gradients():
    given = [x.requires_grad_() for x in inputs(3, 1, 3, 2)]
    initial = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)

    def run(*leaves):
        *given, initial = leaves
        return chunk_kda_reference(*given, lower_bound=-5.0, initial_state=initial, output_final_state=True)

    assert torch.autograd.gradcheck(run, (*given, initial))


def test_narrow_inputs_are_rounded_once():
    given = inputs(4, 2, 8, 8)
    narrow = [x.bfloat16() for x in given]
    o, final = chunk_kda_reference(*narrow, lower_bound=-5.0, output_final_state=True)
    wide, _ = chunk_kda_reference(*(x.float() for x in narrow), lower_bound=-5.0)
    assert final.dtype == torch.float32 and torch.equal(o, wide.bfloat16())


@pytest.mark.parametrize("W", [2, 4, 5])
def test_convolution(W):
    x = torch.randn(9, 6, dtype=torch.float64)
    weight, tail = torch.randn(6, W, dtype=torch.float64), torch.randn(2, W - 1, 6, dtype=torch.float64)
    (y,) = short_conv_reference([x], [weight], torch.tensor([0, 5, 9]), [tail])
    for d, (a, b) in enumerate([(0, 5), (5, 9)]):
        padded = torch.cat([tail[d], x[a:b]]).t()
        expected = F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=6)).t()
        torch.testing.assert_close(y[a:b], expected)
    (alone,) = short_conv_reference([x[5:]], [weight])
    torch.testing.assert_close(alone, short_conv_reference([x], [weight], torch.tensor([0, 5, 9]))[0][5:])


def test_decoding_is_the_parts_in_a_row():
    """And of the pools only the rows of its sequences change."""
    B, H, K, V, W, N = 2, 2, 4, 3, 4, 5
    streams = inputs(B, H, K, V)
    q, k, v, f, beta = (x[0] for x in streams[:5])
    A_log, dt_bias = streams[5:]
    xs = [x.flatten(1) for x in (q, k, v)]
    weights = [torch.randn(x.shape[1], W, dtype=torch.float64) for x in xs]
    pools = [torch.randn(N, W - 1, x.shape[1], dtype=torch.float64) for x in xs]
    state, gate = torch.randn(N, H, K, V, dtype=torch.float64), torch.randn(B, H, V, dtype=torch.float64)
    norm_weight, slots = torch.randn(V, dtype=torch.float64), torch.tensor([3, 1], dtype=torch.int32)
    y, new_pools, new_state = decode_kda_reference(
        xs, weights, pools, f, beta, A_log, dt_bias, state, gate, norm_weight, lower_bound=-5.0, eps=1e-5, slots=slots
    )
    rows = slots.long()
    tails = [pool[rows] for pool in pools]
    convolved = short_conv_reference(xs, weights, torch.arange(B + 1), tails)
    heads = [x.unflatten(1, (H, -1)) for x in convolved]
    o, stepped = step_kda_reference(*heads, f, beta, A_log, dt_bias, state[rows], -5.0)
    normed = F.rms_norm(o, (V,), norm_weight, 1e-5) * gate.sigmoid()
    torch.testing.assert_close(y, normed.flatten(1))
    torch.testing.assert_close(new_state[rows], stepped)
    for x, pool, new_pool in zip(xs, pools, new_pools, strict=True):
        torch.testing.assert_close(new_pool[rows], torch.cat([pool[rows, 1:], x.unsqueeze(1)], dim=1))
        assert torch.equal(new_pool[[0, 2, 4]], pool[[0, 2, 4]])
    assert torch.equal(new_state[[0, 2, 4]], state[[0, 2, 4]])
