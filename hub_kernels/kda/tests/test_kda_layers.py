"""The layers give what the functions give, from the parameters of the layer they replace."""

import pytest
import torch
from kda import chunk_kda, layers, short_conv
from torch import nn


def test_convolution(device):
    host = nn.Module()
    host.weight = nn.Parameter(torch.randn(8, 1, 4, device=device))
    x, tail = torch.randn(9, 8, device=device), torch.randn(2, 3, 8, device=device)
    cu_seqlens = torch.tensor([0, 4, 9], device=device)
    y = layers.ShortConvolution.forward(host, x, cu_seqlens, tail)
    assert torch.equal(y, short_conv((x,), (host.weight.squeeze(1),), cu_seqlens, (tail,))[0])
    (dweight,) = torch.autograd.grad(y.sum(), host.weight)
    assert dweight.shape == host.weight.shape and (dweight != 0).all()


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_delta_rule(device, lower_bound):
    """Heads of A_log that do not exist are left out, and get no gradient."""
    T, H, K, V = 5, 2, 16, 32
    host = nn.Module()
    host.A_log = nn.Parameter(torch.rand(H + 1, device=device))
    host.dt_bias = nn.Parameter(torch.randn(H * K, device=device))
    host.gate_lower_bound = lower_bound
    q, k, f = (torch.randn(1, T, H, K, device=device) for _ in range(3))
    v, beta = torch.randn(1, T, H, V, device=device), torch.randn(1, T, H, device=device)
    cu_seqlens = torch.tensor([0, 3, 5], device=device)
    states = torch.randn(2, H, K, V, device=device)
    o, final = layers.KimiDeltaRule.forward(host, q, k, v, f, beta, cu_seqlens, states, True)
    expected = chunk_kda(
        q, k, v, f, beta, host.A_log[:H], host.dt_bias.view(H, K),
        lower_bound=lower_bound, cu_seqlens=cu_seqlens, initial_state=states, output_final_state=True,
    )  # fmt: skip
    assert torch.equal(o, expected[0]) and torch.equal(final, expected[1])
    dA_log, ddt_bias = torch.autograd.grad(o.sum(), [host.A_log, host.dt_bias])
    assert (dA_log[:H] != 0).all() and dA_log[H] == 0 and (ddt_bias != 0).all()
    assert layers.KimiDeltaRule.forward(host, q, k, v, f, beta)[1] is None


@pytest.mark.parametrize("layer", [layers.ShortConvolution, layers.KimiDeltaRule])
def test_layers_hold_nothing_of_their_own(layer):
    assert "__init__" not in vars(layer) and not [*layer().parameters(), *layer().buffers()]
    assert layer.has_backward and layer.can_torch_compile
