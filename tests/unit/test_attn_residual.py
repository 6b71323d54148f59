"""Attention residuals: the mixture against its formula, the decoder's snapshots written out again.

Legend: B batch, T tokens, D model width, J sources.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from modeling_latentmoe import ops
from modeling_latentmoe.attn_residual import ResidualNorm, ResidualProjection, mix
from modeling_latentmoe.configuration_latentmoe import LatentMoETextConfig
from modeling_latentmoe.documents import Documents
from modeling_latentmoe.layers import RMSNorm
from modeling_latentmoe.modeling_latentmoe import LatentMoEModel

B, T, D = 2, 7, 24


def formula(sources: Sequence[torch.Tensor], score_D: torch.Tensor, eps: float) -> torch.Tensor:
    """softmax_j(V_j / sqrt(mean V_j^2 + eps) . score) V_j in float64, for all sources at once."""
    V_JBTD = torch.stack([v.double() for v in sources])
    normed = V_JBTD / torch.sqrt((V_JBTD**2).mean(-1, keepdim=True) + eps)
    weight_JBT = torch.exp(torch.log_softmax(normed @ score_D.double(), dim=0))
    return torch.einsum("jbt,jbtd->btd", weight_JBT, V_JBTD)


def stock(sources: Sequence[torch.Tensor], score_D: torch.Tensor, eps: float) -> torch.Tensor:
    """The same from torch's own functions, in fp32 inside and the dtype of the sources outside."""
    V_JBTD = torch.stack(list(sources)).float()
    score_JBT = nn.functional.linear(nn.functional.rms_norm(V_JBTD, [D], eps=eps), score_D.float()[None])
    return (score_JBT.softmax(0) * V_JBTD).sum(0).to(sources[0].dtype)


def error(got: torch.Tensor, true: torch.Tensor) -> float:
    assert got.shape == true.shape
    return ((got.double() - true).square().mean().sqrt() / true.square().mean().sqrt()).item()


@dataclass(frozen=True)
class Mixture:
    id: str
    sources: int
    eps: float = 1e-5
    size: float = 1.0
    score: float = 0.5


MIXTURES = (
    Mixture("one", 1),
    Mixture("two", 2),
    Mixture("three", 3),
    Mixture("released-depth", 9),
    Mixture("many", 64),
    Mixture("other-eps", 4, eps=0.3),
    Mixture("small-sources", 4, size=3e-3),
    Mixture("large-sources", 4, size=1e4),
    Mixture("sharp", 4, score=60.0),
    Mixture("no-score", 5, score=0.0),
)


def make_sources(case: Mixture, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Sources of different lengths, and the fp32 score vector."""
    torch.manual_seed(case.sources)
    sources = [(torch.randn(B, T, D) * case.size * 1.5 ** (j % 4)).to(dtype) for j in range(case.sources)]
    return sources, torch.randn(D) * case.score


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: case.id)
def test_mixture_equals_its_formula(case: Mixture, dtype: torch.dtype) -> None:
    sources, score_D = make_sources(case, dtype)
    got = ops.attn_residual(sources, score_D, case.eps)
    true = formula(sources, score_D, case.eps)
    assert got.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-12 * case.size)
        return
    assert error(got, true) <= 2 * error(stock(sources, score_D, case.eps), true) + torch.finfo(dtype).eps / 8
    if dtype == torch.bfloat16:
        # Rounded once: every value lies within half a bf16 step of the true one, up to fp32 noise.
        assert ((got.double() - true).abs() <= true.abs() * 2**-8 * 1.01 + 1e-5 * case.size).all()


def test_mixture_uses_raw_sources() -> None:
    """Lengths do not decide the weights, but they do decide the result."""
    sources, score_D = make_sources(Mixture("", 3), torch.float64)
    # Equal directions of unequal length get equal weights, so their plain mean comes out.
    scaled = [sources[0], 4 * sources[0], 16 * sources[0]]
    torch.testing.assert_close(ops.attn_residual(scaled, score_D, 1e-12), 7 * sources[0], rtol=1e-9, atol=1e-9)


def test_scores_have_no_temperature() -> None:
    """Two sources of scores log 3 and 0 weigh 3 : 1."""
    a, b = torch.zeros(1, 1, D), torch.zeros(1, 1, D)
    a[..., 0], b[..., 1] = D**0.5, D**0.5
    score_D = torch.zeros(D)
    score_D[0] = torch.tensor(3.0).log() / D**0.5
    got = ops.attn_residual([a, b], score_D, 0.0)
    torch.testing.assert_close(got, 0.75 * a + 0.25 * b)


def test_gradients_of_sources_and_score() -> None:
    sources, score_D = make_sources(Mixture("", 4), torch.float64)
    leaves = [*(v.requires_grad_() for v in sources), score_D.double().requires_grad_()]
    direction = torch.randn(B, T, D, dtype=torch.float64)

    def gradients(run) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((run(leaves[:-1], leaves[-1], 1e-5) * direction).sum(), leaves)

    true = gradients(formula)
    for got, want in zip(gradients(ops.attn_residual), true, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    single = [leaf.detach().float().requires_grad_() for leaf in leaves]
    loss = (ops.attn_residual(single[:-1], single[-1], 1e-5) * direction.float()).sum()
    for got, want in zip(torch.autograd.grad(loss, single), true, strict=True):
        assert error(got, want) < 1e-6


# Weights of the two modules.


def make_weights(dtype: torch.dtype = torch.float32, eps: float = 1e-3) -> tuple[ResidualProjection, ResidualNorm]:
    torch.manual_seed(3)
    proj, norm = ResidualProjection(D), ResidualNorm(D, eps)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.5 * torch.randn(D))
    return proj.to(dtype), norm.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_mix_scores_with_the_product_of_both_weights(dtype: torch.dtype) -> None:
    proj, norm = make_weights(dtype)
    sources, _ = make_sources(Mixture("", 4), dtype)
    got = mix(tuple(sources), proj, norm)
    score_D = norm.weight.double() * proj.weight[0].double()
    true = formula(sources, score_D, norm.eps)
    limit = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float64: 1e-14}[dtype]
    assert got.dtype == dtype
    assert error(got, true) < limit
    # Neither the norm's weight nor its eps may be lost, nor may the weight scale what is mixed.
    for wrong in (proj.weight[0], norm.weight):
        assert error(formula(sources, wrong, norm.eps), true) > 10 * limit
    assert error(norm.weight.double() * true, true) > 10 * limit


def test_mix_keeps_the_product_of_bf16_weights_in_fp32() -> None:
    proj, norm = make_weights(torch.bfloat16)
    with torch.no_grad():
        norm.weight.mul_(40)
    sources, _ = make_sources(Mixture("", 4), torch.bfloat16)
    got, rounded = mix(tuple(sources), proj, norm), (norm.weight * proj.weight[0]).double()
    true = formula(sources, norm.weight.double() * proj.weight[0].double(), norm.eps)
    assert error(got, true) < error(formula(sources, rounded, norm.eps), true)


def test_a_single_source_is_returned_as_it_is() -> None:
    proj, norm = make_weights()
    x = torch.randn(B, T, D)
    assert mix((x,), proj, norm) is x


# The decoder.


def make_model(layers: int, block: int) -> LatentMoEModel:
    linear = {
        "kda_layers": [1],
        "full_attn_layers": list(range(2, layers + 1)),
        "num_heads": 2,
        "head_dim": 8,
    }
    linear |= {"short_conv_kernel_size": 4, "use_full_rank_gate": True}
    config = LatentMoETextConfig(
        num_hidden_layers=layers,
        attn_res_block_size=block,
        vocab_size=30,
        hidden_size=D,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=2,
        v_head_dim=6,
        intermediate_size=16,
        num_experts=0,
        rms_norm_eps=1e-3,
        linear_attn_config=linear,
        pad_token_id=0,
    )
    torch.manual_seed(4)
    model = LatentMoEModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + (parameter.ndim == 1))
    return model


def restated(model: LatentMoEModel, block: int, embedding: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    """The running stream entering each layer, then the output; and the number of sources of each mixture.

    A block's stream is the sum of its own sub-layers; finished blocks and the embedding are kept beside it.
    """
    documents = Documents.of_batch(embedding.shape[:2], embedding.device)
    counts = []

    def mixture(sources: list[torch.Tensor], proj: nn.Linear, norm: RMSNorm) -> torch.Tensor:
        counts.append(len(sources))
        return formula(sources, norm.weight * proj.weight[0], norm.eps)

    finished, parts = [], [embedding]
    streams = [embedding]
    for i, layer in enumerate(model.layers):
        x = mixture([*finished, sum(parts)], layer.self_attention_res_proj, layer.self_attention_res_norm)
        if i % block == 0:
            finished, parts = [*finished, sum(parts)], []
        attended = layer.self_attn(layer.input_layernorm(x), documents)
        parts.append(attended if isinstance(attended, torch.Tensor) else attended[0])
        y = mixture([*finished, sum(parts)], layer.mlp_res_proj, layer.mlp_res_norm)
        parts.append(layer.mlp(layer.post_attention_layernorm(y)))
        streams.append(sum(parts))
    out = mixture([*finished, sum(parts)], model.output_attn_res_proj, model.output_attn_res_norm)
    return [*streams[:-1], model.norm(out)], counts


@pytest.mark.parametrize(("layers", "block"), [(1, 1), (4, 1), (5, 2), (7, 3), (4, 4), (5, 4), (4, 12)], ids=str)
@torch.no_grad()
def test_decoder_equals_its_restatement(layers: int, block: int) -> None:
    model = make_model(layers, block)
    input_ids = torch.randint(1, 30, (B, T))
    got = model(input_ids=input_ids, output_hidden_states=True, use_cache=False).hidden_states
    want, counts = restated(model, block, model.embed_tokens(input_ids))
    assert len(got) == layers + 1
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    expected = [n for i in range(layers) for n in (-(-i // block) + 1, i // block + 2)]
    assert counts == [*expected, -(-layers // block) + 1]


def test_every_mixture_of_the_decoder_learns() -> None:
    model = make_model(5, 2)
    out = model(input_ids=torch.randint(1, 30, (B, T)), use_cache=False).last_hidden_state
    out.square().sum().backward()
    silent = {name for name, p in model.named_parameters() if "_res_" in name and (p.grad is None or not p.grad.any())}
    # The first layer has the embedding as its only source before attention: nothing to weigh.
    assert silent == {"layers.0.self_attention_res_norm.weight", "layers.0.self_attention_res_proj.weight"}
