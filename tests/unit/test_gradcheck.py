"""Analytic gradients against finite differences, in float64 at tiny sizes.

Legend: B batch, T tokens, M tokens of all documents in order, D model width, H heads, K key width,
        V value width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.func import functional_call

from modeling_latentmoe import ops
from modeling_latentmoe.configuration_latentmoe import LatentMoETextConfig
from modeling_latentmoe.documents import Documents
from modeling_latentmoe.indexer import Choice
from modeling_latentmoe.modeling_latentmoe import LatentMoEDecoderLayer
from modeling_latentmoe.sparse import index_scores

CPU = torch.device("cpu")
H, K, V = 2, 3, 2


def packed(*lengths: int) -> Documents:
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return Documents.of_batch((1, sum(lengths)), CPU, cu_seqlens=cu_seqlens)


def leaf(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale + shift).requires_grad_()


@dataclass(frozen=True)
class Lengths:
    id: str
    lengths: tuple[int, ...]
    heads: int
    state: bool
    bound: float | None = -5.0


KDA = (
    Lengths("one-chunk", (3,), 2, False),
    Lengths("two-chunks-with-state", (17,), 1, True),
    Lengths("packed-with-states", (2, 1, 4), 1, True),
    Lengths("softplus", (3,), 1, True, bound=None),
)


@pytest.mark.parametrize("case", KDA, ids=lambda case: case.id)
def test_kda_chunk(case: Lengths) -> None:
    torch.manual_seed(0)
    documents, M, N = packed(*case.lengths), sum(case.lengths), case.heads
    inputs = [leaf(M, N, K), leaf(M, N, K), leaf(M, N, V), leaf(M, N, K), leaf(M, N), leaf(N), leaf(N, K)]
    if case.state:
        inputs.append(leaf(len(case.lengths), N, K, V))

    def run(q, k, v, z, beta, A_log, dt_bias, state=None):
        return ops.kda_chunk(q, k, v, z, beta, A_log, dt_bias, case.bound, documents, state)

    assert gradcheck(run, inputs)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_kda_step(bound: float | None) -> None:
    torch.manual_seed(1)

    def run(q, k, v, z, beta, A_log, dt_bias, state):
        return ops.kda_step(q, k, v, z, beta, A_log, dt_bias, bound, state)

    token = [leaf(2, H, K), leaf(2, H, K), leaf(2, H, V), leaf(2, H, K), leaf(2, H)]
    assert gradcheck(run, [*token, leaf(H), leaf(H, K), leaf(2, H, K, V)])


@pytest.mark.parametrize("bound", [-5.0, -2.0, None])
def test_kda_gate(bound: float | None) -> None:
    torch.manual_seed(2)
    assert gradcheck(partial(ops.kda_gate, lower_bound=bound), [leaf(3, H, K, scale=2), leaf(H), leaf(H, K)])


@pytest.mark.parametrize("width", [1, 4])
def test_short_conv(width: int) -> None:
    torch.manual_seed(3)
    documents = packed(5, 1, 3)

    def run(x_MP, y_MP, x_PW, y_PW, x_tail, y_tail):
        return ops.short_conv((x_MP, y_MP), (x_PW, y_PW), documents, (x_tail, y_tail))

    tails = leaf(3, width - 1, 2), leaf(3, width - 1, 1)
    assert gradcheck(run, [leaf(9, 2), leaf(9, 1), leaf(2, width), leaf(1, width), *tails])


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_gated_rms_norm(eps: float) -> None:
    torch.manual_seed(4)
    assert gradcheck(partial(ops.gated_rms_norm, eps=eps), [leaf(3, H, K), leaf(3, H, K), leaf(K)])


@pytest.mark.parametrize("sources", [1, 2, 5])
def test_attn_residual(sources: int) -> None:
    torch.manual_seed(5)

    def run(score_D, *sources):
        return ops.attn_residual(sources, score_D, 1e-5)

    assert gradcheck(run, [leaf(4), *(leaf(2, 2, 4) for _ in range(sources))])


def test_linear_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than are computed at a time, some of them ignored."""
    monkeypatch.setattr(ops, "LOGIT_BYTES", 0)
    torch.manual_seed(10)
    target_N = torch.randint(0, 5, (2 * ops.ROW_TILE + 1,))
    target_N[[0, 20]] = -100

    def run(hidden_ND, weight_VD):
        return ops.linear_cross_entropy(hidden_ND, weight_VD, target_N)

    assert gradcheck(run, [leaf(len(target_N), 3), leaf(5, 3)])


@pytest.mark.parametrize("beta", [4.0, 0.7, None])
@pytest.mark.parametrize("linear_beta", [25.0, 0.9, None])
def test_situ_glu(beta: float | None, linear_beta: float | None) -> None:
    torch.manual_seed(6)
    run = partial(ops.situ_glu, beta=beta, linear_beta=linear_beta)
    assert gradcheck(run, [leaf(4, 3, scale=2), leaf(4, 3, scale=2)])


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "sdpa"])
def test_attention(fused: bool) -> None:
    torch.manual_seed(7)
    documents = Documents.of_batch((1, 6), CPU, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    mask_BTS = documents.attention_mask_BTS.clone()
    mask_BTS[0, 5, [1, 3]] = False

    def run(q, k, v):
        return ops.attention(q, k, v, mask_BTS, 0.6, fused)

    assert gradcheck(run, [leaf(1, H, 6, K), leaf(1, H, 6, K), leaf(1, H, 6, V)])


def test_index_scores() -> None:
    """The indexer learns from a loss of its own, through the same scores that choose."""
    torch.manual_seed(8)
    assert gradcheck(index_scores, [leaf(1, 3, 2, 4), leaf(1, 5, 4), leaf(1, 3, 2)])


# Whole decoder layers.

D = 6


def text_config(experts: int, bound: float | None, indexed: bool) -> LatentMoETextConfig:
    """Layers: KDA, MLA or DSA, DSA with shared indices."""
    linear = {"kda_layers": [1], "full_attn_layers": [2, 3], "num_heads": 2, "head_dim": 3}
    linear |= {"short_conv_kernel_size": 3, "use_full_rank_gate": True, "gate_lower_bound": bound}
    index = {
        "index_topk": 2,
        "index_n_heads": 3,
        "index_head_dim": 4,
        "indexer_types": ["none", "full", "shared"],
    }
    return LatentMoETextConfig(
        num_hidden_layers=3,
        vocab_size=11,
        hidden_size=D,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=4,
        kv_lora_rank=5,
        qk_nope_head_dim=3,
        qk_rope_head_dim=2,
        v_head_dim=4,
        intermediate_size=5,
        num_experts=experts,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=4,
        routed_expert_hidden_size=3,
        first_k_dense_replace=0,
        attn_res_block_size=2,
        activation_situ_beta=1.5,
        activation_situ_linear_beta=2.5,
        rms_norm_eps=1e-3,
        linear_attn_config=linear,
        pad_token_id=0,
        **(index if indexed else {}),
    )


@dataclass(frozen=True)
class Layer:
    id: str
    number: int
    experts: int = 0
    bound: float | None = -5.0
    indexed: bool = False
    attention: str = "eager"


LAYERS = (
    Layer("kda-dense", 0),
    Layer("kda-softplus", 0, bound=None),
    Layer("kda-moe", 0, experts=4),
    Layer("mla-dense", 1),
    Layer("mla-sdpa", 1, attention="sdpa"),
    Layer("mla-moe", 1, experts=4),
    Layer("dsa-dense", 1, indexed=True),
    Layer("dsa-moe", 1, experts=4, indexed=True),
    Layer("dsa-shared", 2, indexed=True),
)


def build(case: Layer) -> LatentMoEDecoderLayer:
    config = text_config(case.experts, case.bound, case.indexed)
    config._attn_implementation = case.attention
    torch.manual_seed(9)
    layer = LatentMoEDecoderLayer(config, case.number).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + (parameter.ndim == 1))
    return layer


def checked(layer: nn.Module, run: Callable, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Check gradients of the inputs and of every parameter; returns those of the parameters."""
    names = [name for name, _ in layer.named_parameters()]
    parameters = [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]

    def call(*leaves: torch.Tensor):
        weights = dict(zip(names, leaves[: len(names)], strict=True))
        return run(partial(functional_call, layer, weights), *leaves[len(names) :])

    # Random directions instead of every single number: the layers hold thousands.
    assert gradcheck(call, (*parameters, *inputs), fast_mode=True)
    loss = sum(y.square().sum() for y in call(*parameters, *inputs))
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.id)
def test_decoder_layer(case: Layer) -> None:
    """Padding, packed documents, two snapshots; the stream and the snapshots are inputs."""
    layer = build(case)
    position_ids = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    documents = Documents.of_batch((2, 6), CPU, attention_mask=mask, position_ids=position_ids)
    stream, first, second = (leaf(2, 6, D) for _ in range(3))
    index = None
    if case.id == "dsa-shared":
        inputs = torch.randn(10, 3, 4), torch.randn(10, 4), torch.randn(10, 3)
        index = Choice(ops.index_topk(*inputs, *documents.key_ranges, 2))

    def run(layer, stream_BTD, *snapshots):
        out, new_snapshots, chosen, _, load = layer((stream_BTD, snapshots, index, documents))
        assert (load is None) == (case.experts == 0)
        if case.id.startswith("dsa"):
            first_M, end_M = documents.key_ranges
            assert ((chosen.index_Mk >= 0).sum(1) < end_M - first_M).any()
        return out, *new_snapshots

    grads = checked(layer, run, (stream, first, second))
    # Keys are chosen without gradient, and a router's bias only chooses.
    silent = {name for name, grad in grads.items() if grad is None or not grad.any()}
    assert silent == {name for name in grads if ".indexer." in name or name.endswith("e_score_correction_bias")}
