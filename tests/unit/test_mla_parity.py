"""Gated MLA against the layers of transformers, their rotation switched off, and written out in float64.

Legend: B batch, T tokens, S keys, D model width, N heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV32Config, GlmMoeDsaConfig, HYV4Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Attention

from modeling_latentmoe import ops
from modeling_latentmoe.cache import LayerCache
from modeling_latentmoe.configuration_latentmoe import LatentMoETextConfig
from modeling_latentmoe.documents import Documents
from modeling_latentmoe.mla import GatedLatentAttention

CPU = torch.device("cpu")
D = 20
# No width equals another, and the norm of the config is not that of the latents.
DIMS = {
    "hidden_size": D,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}


def text_config(attention: str = "eager", **changes) -> LatentMoETextConfig:
    values = {"num_hidden_layers": 1, "linear_attn_config": None, "num_experts": 0, "rms_norm_eps": 1e-2}
    config = LatentMoETextConfig(**(values | DIMS | changes))
    config._attn_implementation = attention
    return config


def make_layer(config: LatentMoETextConfig, seed: int = 0, latents: float = 1.0) -> GatedLatentAttention:
    """Random weights; `latents` scales the inputs of the two latent norms."""
    torch.manual_seed(seed)
    layer = GatedLatentAttention(config, "none")
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.ndim == 2 else 0.3))
            if parameter.ndim == 1:
                parameter.add_(1)
            if name in ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"):
                parameter.mul_(latents)
    return layer


def packed(lengths: Sequence[int]) -> Documents:
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return Documents.of_batch((1, sum(lengths)), CPU, cu_seqlens=cu_seqlens)


def reference(layer: GatedLatentAttention, x_TD: torch.Tensor, gated: bool) -> torch.Tensor:
    """One document in float64, one head and one query at a time."""
    w = {name.removesuffix(".weight"): value.double() for name, value in layer.state_dict().items()}
    x, nope, extra, wide = x_TD.double(), layer.nope_dim, layer.shared_dim, layer.value_dim

    def normed(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-6) * weight

    q = normed(x @ w["q_a_proj"].T, w["q_a_layernorm"]) @ w["q_b_proj"].T
    kv_a = x @ w["kv_a_proj_with_mqa"].T
    latent, shared = kv_a[:, : layer.latent_dim], kv_a[:, layer.latent_dim :]
    kv = normed(latent, w["kv_a_layernorm"]) @ w["kv_b_proj"].T
    heads = []
    for n in range(layer.num_heads):
        q_n = q[:, n * (nope + extra) : (n + 1) * (nope + extra)]
        k_n, v_n = kv[:, n * (nope + wide) : (n + 1) * (nope + wide)].split([nope, wide], dim=-1)
        k_n = torch.cat([k_n, shared], dim=-1)
        rows = []
        for t in range(len(x)):
            weights = torch.softmax(k_n[: t + 1] @ q_n[t] / (nope + extra) ** 0.5, dim=0)
            rows.append(weights @ v_n[: t + 1])
        heads.append(torch.stack(rows))
    out = torch.cat(heads, dim=-1)
    if gated:
        out = out / (1 + torch.exp(-(x @ w["g_proj"].T)))
    return out @ w["o_proj"].T


def error(got: torch.Tensor, true: torch.Tensor) -> float:
    assert got.shape == true.shape
    return ((got.double() - true).square().mean().sqrt() / true.square().mean().sqrt()).item()


def no_rotation(B: int, T: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(B, T, dim, dtype=dtype), torch.zeros(B, T, dim, dtype=dtype)


@dataclass(frozen=True)
class Independent:
    """An attention layer of transformers; one with an indexer never reaches its index_topk."""

    id: str
    config: type
    module: Callable[..., nn.Module]
    gated: bool = False
    indexed: bool = True

    def build(self, layer: GatedLatentAttention) -> nn.Module:
        fields = DIMS | {"num_hidden_layers": 1, "attn_implementation": "eager"}
        fields |= {"qk_rope_head_dim": layer.shared_dim, "v_head_dim": layer.value_dim}
        if self.indexed:
            fields |= {"index_topk": 10_000, "index_n_heads": 2, "index_head_dim": 8}
        module = self.module(self.config(**fields), layer_idx=0)
        state = layer.state_dict()
        if self.gated:
            state["gate_proj.weight"] = state.pop("g_proj.weight")
            # No attention sink: its exponential is zero.
            state["sinks"] = torch.full((layer.num_heads,), -torch.inf)
        result = module.load_state_dict(state, strict=False)
        assert not result.unexpected_keys
        assert all(name.startswith("indexer.") for name in result.missing_keys)
        return module.to(layer.o_proj.weight.dtype)

    def run(self, layer: GatedLatentAttention, x_BTD: torch.Tensor, mask_BTS: torch.Tensor) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        bias = torch.zeros(mask_BTS.shape, dtype=x_BTD.dtype).masked_fill(~mask_BTS, torch.finfo(x_BTD.dtype).min)
        rotation = no_rotation(B, T, layer.shared_dim, x_BTD.dtype)
        return self.build(layer)(x_BTD, rotation, bias.unsqueeze(1), position_ids=None)[0]


INDEPENDENT = (
    Independent("deepseek_v3", DeepseekV3Config, DeepseekV3Attention, indexed=False),
    Independent("deepseek_v32", DeepseekV32Config, DeepseekV32Attention),
    Independent("glm_moe_dsa", GlmMoeDsaConfig, GlmMoeDsaAttention),
    Independent("hy_v4-output-gate", HYV4Config, HYV4Attention, gated=True),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", INDEPENDENT, ids=lambda case: case.id)
@torch.no_grad()
def test_layer_equals_transformers(case: Independent, attention: str, dtype: torch.dtype) -> None:
    layer = make_layer(text_config(attention, mla_use_output_gate=case.gated)).to(dtype)
    x_BTD = torch.randn(2, 33, D).to(dtype)
    documents = Documents.of_batch((2, 33), CPU)
    got, index = layer(x_BTD, documents)
    independent = case.run(layer, x_BTD, documents.attention_mask_BTS)
    true = torch.stack([reference(layer, x, case.gated) for x in x_BTD])
    assert index is None
    assert got.dtype == dtype
    assert error(got, true) <= 2 * error(independent, true)
    assert error(got, true) <= (1e-6 if dtype == torch.float32 else 2e-2)


@dataclass(frozen=True)
class Shape:
    id: str
    changes: tuple[tuple[str, int | bool], ...] = ()
    latents: float = 1.0

    @property
    def gated(self) -> bool:
        return dict(self.changes).get("mla_use_output_gate", True)


SHAPES = (
    Shape("gated"),
    Shape("no-gate", (("mla_use_output_gate", False),)),
    Shape("no-shared-dimensions", (("qk_rope_head_dim", 0),)),
    Shape("wide-values", (("v_head_dim", 11),)),
    Shape("one-head", (("num_attention_heads", 1), ("num_key_value_heads", 1))),
    Shape("small-latents", latents=1e-3),
)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.id)
@torch.no_grad()
def test_layer_equals_float64(case: Shape, attention: str) -> None:
    """Latents of about 1e-3 tell an eps of 1e-6 from any other."""
    layer = make_layer(text_config(attention, **dict(case.changes)), latents=case.latents)
    for T in (1, 2, 17):
        x_BTD = torch.randn(2, T, D)
        true = torch.stack([reference(layer, x, case.gated) for x in x_BTD])
        got, _ = layer(x_BTD, Documents.of_batch((2, T), CPU))
        assert error(got, true) < 1e-6
    double, _ = layer.double()(x_BTD.double(), Documents.of_batch((2, T), CPU))
    torch.testing.assert_close(double, true, rtol=1e-10, atol=1e-11)


def test_latent_norms_keep_their_own_eps() -> None:
    layer = make_layer(text_config(rms_norm_eps=1e-2))
    assert (layer.q_a_layernorm.eps, layer.kv_a_layernorm.eps) == (1e-6, 1e-6)


@torch.no_grad()
def test_every_part_of_the_reference_matters() -> None:
    """The comparison sees the gate, the shared key dimensions and the scale."""
    layer, x_TD = make_layer(text_config()), torch.randn(9, D)
    true = reference(layer, x_TD, True)
    assert error(reference(layer, x_TD, False), true) > 0.1
    for name, rows in (("kv_a_proj_with_mqa", slice(10, None)), ("q_b_proj", slice(None))):
        other = make_layer(text_config())
        other.get_submodule(name).weight[rows] *= 1.1
        assert error(other(x_TD[None], packed([9]))[0][0], true) > 1e-3


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_packed_documents_equal_documents_alone(attention: str) -> None:
    layer = make_layer(text_config(attention)).double()
    lengths = (5, 1, 12, 1, 3)
    x_BTD = torch.randn(1, sum(lengths), D, dtype=torch.float64)
    got, _ = layer(x_BTD, packed(lengths))
    for mine, x_TD in zip(got[0].split(lengths), x_BTD[0].split(lengths), strict=True):
        torch.testing.assert_close(mine, reference(layer, x_TD, True), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("case", INDEPENDENT, ids=lambda case: case.id)
@torch.no_grad()
def test_packed_documents_equal_transformers_with_a_block_mask(case: Independent) -> None:
    lengths = (6, 1, 9)
    layer = make_layer(text_config(mla_use_output_gate=case.gated))
    x_BTD = torch.randn(1, 16, D)
    mask_BTS = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()[None]
    torch.testing.assert_close(layer(x_BTD, packed(lengths))[0], case.run(layer, x_BTD, mask_BTS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_documents_and_the_future_do_not_leak(attention: str) -> None:
    layer, lengths = make_layer(text_config(attention)), (4, 7, 5)
    x_BTD = torch.randn(1, 16, D, requires_grad=True)
    got, _ = layer(x_BTD, packed(lengths))
    (grad,) = torch.autograd.grad(got[0, 4:9].square().sum(), x_BTD)
    outside = torch.ones(16, dtype=torch.bool)
    outside[4:9] = False
    assert (grad[0, outside] == 0).all()
    assert (grad[0, 4:9].abs().sum(-1) > 0).all()
    with torch.no_grad():
        changed = torch.where(outside[:, None], torch.randn(16, D), x_BTD[0])[None]
        again, _ = layer(changed, packed(lengths))
    assert torch.equal(again[0, 4:9], got[0, 4:9])
    assert not torch.equal(again[0, 9:], got[0, 9:])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_padding_is_not_seen_and_stays_finite(attention: str) -> None:
    layer = make_layer(text_config(attention))
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :5], mask[1, 8:], mask[2, :] = 0, 0, 0
    x_BTD = torch.randn(3, 12, D) * 3
    got, _ = layer(x_BTD, Documents.of_batch((3, 12), CPU, attention_mask=mask))
    assert got.isfinite().all()
    assert error(got[0, 5:], reference(layer, x_BTD[0, 5:], True)) < 1e-6
    assert error(got[1, :8], reference(layer, x_BTD[1, :8], True)) < 1e-6


@pytest.mark.parametrize("cuts", [(1,) * 13, (12, 1), (5, 3, 1, 4)], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_cached_layer_equals_the_whole(attention: str, cuts: tuple[int, ...]) -> None:
    layer, cache, done, outputs = make_layer(text_config(attention)).double(), LayerCache(), 0, []
    x_BTD = torch.randn(2, 13, D, dtype=torch.float64)
    for length in cuts:
        documents = Documents.of_batch((2, length), CPU, past_ids=torch.zeros(2, done, dtype=torch.long))
        outputs.append(layer(x_BTD[:, done : done + length], documents, cache)[0])
        done += length
    true = torch.stack([reference(layer, x, True) for x in x_BTD])
    torch.testing.assert_close(torch.cat(outputs, 1), true, rtol=1e-10, atol=1e-11)
    assert set(cache.tensors) == {"latent"}
    assert cache.get("latent").shape == (2, 13, DIMS["kv_lora_rank"] + DIMS["qk_rope_head_dim"])


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "sdpa"])
def test_attention_survives_extreme_scores(fused: bool) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 2, 6, 4) * 1e3, torch.randn(1, 2, 6, 4) * 1e3, torch.randn(1, 2, 6, 3)
    mask_BTS = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    got = ops.attention(q, k, v, mask_BTS, 0.5, fused)
    for t in range(6):
        score_NS = torch.einsum("nk,nsk->ns", q[0, :, t].double(), k[0, :, : t + 1].double()) * 0.5
        want = torch.einsum("ns,nsv->nv", score_NS.softmax(-1), v[0, :, : t + 1].double())
        torch.testing.assert_close(got[0, :, t].double(), want, rtol=1e-4, atol=1e-4)
