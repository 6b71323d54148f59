"""Lightning indexer, selection and sparse attention against transformers and brute force in float64.

Legend: B batch, T tokens, S keys, D model width, Q query latent, N heads, I index heads, K index width.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DeepseekV32Config, GlmMoeDsaConfig, HYV4Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Attention

from modeling_latentmoe.cache import LayerCache
from modeling_latentmoe.configuration_latentmoe import LatentMoETextConfig
from modeling_latentmoe.documents import Documents
from modeling_latentmoe.indexer import Choice, LightningIndexer
from modeling_latentmoe.mla import GatedLatentAttention
from modeling_latentmoe.modeling_latentmoe import LatentMoEForCausalLM
from modeling_latentmoe.sparse import best_keys as best_keys_of
from modeling_latentmoe.sparse import index_scores

CPU = torch.device("cpu")
TOPK, D = 8, 20
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
# Many index heads: a key that no head likes scores exactly 0, and elsewhere ties have no order.
INDEX = {"index_topk": TOPK, "index_n_heads": 12, "index_head_dim": 9}


def text_config(attention: str = "eager", **changes) -> LatentMoETextConfig:
    values = {"num_hidden_layers": 1, "linear_attn_config": None, "num_experts": 0, "rms_norm_eps": 1e-2}
    config = LatentMoETextConfig(**(values | DIMS | INDEX | changes))
    config._attn_implementation = attention
    return config


def randomise(module: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.add_(1)


def make_layer(kind: str = "full", attention: str = "eager", seed: int = 0, **changes) -> GatedLatentAttention:
    layer = GatedLatentAttention(text_config(attention, **changes), kind)
    randomise(layer, seed)
    return layer


def dense_twin(layer: GatedLatentAttention) -> GatedLatentAttention:
    """The same attention without an indexer."""
    twin = GatedLatentAttention(layer.config, "none")
    weights = {name: x for name, x in layer.state_dict().items() if not name.startswith("indexer.")}
    twin.load_state_dict(weights)
    return twin.to(layer.o_proj.weight.dtype)


def scores_of(indexer: LightningIndexer, x_BTD: torch.Tensor, c_BTQ: torch.Tensor) -> torch.Tensor:
    q_BTIK, weight_BTI = indexer.queries(x_BTD, c_BTQ)
    return index_scores(q_BTIK, indexer.keys(x_BTD), weight_BTI)


def rows(B: int, T: int, past: int | None = None) -> Documents:
    past_ids = None if past is None else torch.zeros(B, past, dtype=torch.long)
    return Documents.of_batch((B, T), CPU, past_ids=past_ids)


def packed(lengths: Sequence[int]) -> Documents:
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return Documents.of_batch((1, sum(lengths)), CPU, cu_seqlens=cu_seqlens)


def best_keys(scores: Sequence[float], visible: Sequence[bool], k: int) -> list[int]:
    """Brute force: the k largest, the earlier one of equals, ascending."""
    order = sorted((-score, s) for s, score in enumerate(scores) if visible[s])
    return sorted(s for _, s in order[:k])


def true_scores(layer: GatedLatentAttention, x_TD: torch.Tensor) -> torch.Tensor:
    """Scores [T, S] of one document in float64, index head by index head."""
    w, x = {name: value.double() for name, value in layer.state_dict().items()}, x_TD.double()
    heads, width = INDEX["index_n_heads"], INDEX["index_head_dim"]
    c = x @ w["q_a_proj.weight"].T
    c = c / torch.sqrt((c * c).mean(-1, keepdim=True) + 1e-6) * w["q_a_layernorm.weight"]
    k = x @ w["indexer.wk.weight"].T
    k = k - k.mean(-1, keepdim=True)
    k = k / torch.sqrt((k * k).mean(-1, keepdim=True) + 1e-6) * w["indexer.k_norm.weight"] + w["indexer.k_norm.bias"]
    weight = x @ w["indexer.weights_proj.weight"].T / heads**0.5
    total = torch.zeros(len(x), len(x), dtype=torch.float64)
    for i in range(heads):
        q = c @ w["indexer.wq_b.weight"][i * width : (i + 1) * width].T
        total += weight[:, i : i + 1] * (q @ k.T / width**0.5).clamp_min(0)
    return total


def true_selection(layer: GatedLatentAttention, x_TD: torch.Tensor, k: int = TOPK) -> list[list[int]]:
    scores = true_scores(layer, x_TD).tolist()
    return [best_keys(scores[t], [s <= t for s in range(len(scores))], k) for t in range(len(scores))]


def true_output(layer: GatedLatentAttention, x_TD: torch.Tensor, chosen: list[list[int]]) -> torch.Tensor:
    """One document in float64: softmax over the chosen keys only, gate, output projection."""
    w, x = {name: value.double() for name, value in layer.state_dict().items()}, x_TD.double()
    N, nope, extra, wide = layer.num_heads, layer.nope_dim, layer.shared_dim, layer.value_dim

    def normed(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-6) * weight

    q = normed(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
    latent, shared = (x @ w["kv_a_proj_with_mqa.weight"].T).split([layer.latent_dim, extra], dim=-1)
    kv = normed(latent, w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T
    q, kv = q.unflatten(-1, (N, nope + extra)), kv.unflatten(-1, (N, nope + wide))
    out = torch.zeros(len(x), N, wide, dtype=torch.float64)
    for t, keys in enumerate(chosen):
        for n in range(N):
            k = torch.cat([kv[keys, n, :nope], shared[keys]], dim=-1)
            out[t, n] = torch.softmax(k @ q[t, n] / (nope + extra) ** 0.5, dim=0) @ kv[keys, n, nope:]
    gate = torch.sigmoid(x @ w["g_proj.weight"].T) if "g_proj.weight" in w else 1
    return (out.flatten(1) * gate) @ w["o_proj.weight"].T


def listed(choice: Choice, documents: Documents) -> list[list[list[int]]]:
    """Chosen keys of every token [B][T], as positions in its row; none at padding."""
    keys, (B, T), S = documents.key_token_S, documents.ids_BT.shape, documents.key_ids_BS.shape[1]
    chosen = [[] for _ in range(B * T)]
    for token, row in zip(documents.token_M.tolist(), choice.index_Mk.tolist(), strict=True):
        found = [s for s in row if s >= 0]
        assert row == [*sorted(found), *[-1] * (len(row) - len(found))]
        chosen[token] = (keys[found] % S).tolist()
    return [chosen[b * T : (b + 1) * T] for b in range(B)]


def mask_of(choice: Choice, documents: Documents) -> torch.Tensor:
    """bool [B, T, S]"""
    mask = torch.zeros_like(documents.attention_mask_BTS)
    for b, rows_T in enumerate(listed(choice, documents)):
        for t, keys in enumerate(rows_T):
            mask[b, t, keys] = True
    return mask


# The choice of keys.


@dataclass(frozen=True)
class TopK:
    id: str
    T: int
    S: int
    k: int
    values: int | None


TOPKS = (
    TopK("distinct", 20, 20, 5, None),
    TopK("two-values", 20, 20, 5, 2),
    TopK("all-equal", 20, 20, 5, 1),
    TopK("more-wanted-than-keys", 6, 6, 9, 3),
    TopK("one", 12, 12, 1, 3),
    TopK("all", 12, 12, 12, 3),
    TopK("cached-keys", 4, 23, 7, 3),
)


@pytest.mark.parametrize("case", TOPKS, ids=lambda case: case.id)
def test_best_keys_equal_brute_force(case: TopK) -> None:
    torch.manual_seed(0)
    score_BTS = torch.randn(3, case.T, case.S)
    if case.values is not None:
        score_BTS = torch.randint(case.values, score_BTS.shape) - 1.0
        score_BTS = torch.where(score_BTS == 0, score_BTS * torch.randn_like(score_BTS).sign(), score_BTS)
    mask_BTS = torch.rand(3, case.T, case.S) < 0.8
    mask_BTS[:, torch.arange(case.T), torch.arange(case.S - case.T, case.S)] = True
    mask_BTS[0] = True
    mask_BTS &= torch.ones(case.T, case.S).tril(case.S - case.T).bool()
    got = best_keys_of(score_BTS, mask_BTS, case.k)
    assert got.dtype == torch.int64
    assert got.shape == (3, case.T, min(case.k, case.S))
    for b in range(3):
        for t in range(case.T):
            want = best_keys(score_BTS[b, t].tolist(), mask_BTS[b, t].tolist(), case.k)
            assert got[b, t].tolist() == want + [-1] * (got.shape[-1] - len(want))


def test_best_keys_are_not_differentiable() -> None:
    score = torch.randn(1, 4, 4, requires_grad=True)
    assert not best_keys_of(score, torch.ones(1, 4, 4, dtype=torch.bool).tril(), 2).requires_grad


def test_scores_use_relu_scale_and_signed_weights() -> None:
    q_BTNK = torch.tensor([[[[3.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]]]])
    k_BSK = torch.tensor([[[2.0, 5.0, 0.0, 0.0], [-2.0, 1.0, 0.0, 0.0], [-1.0, -1.0, 9.0, 9.0]]])
    weight_BTN = torch.tensor([[[1.5, -2.0]]])
    got = index_scores(q_BTNK, k_BSK, weight_BTN)
    # Halves: 4 ** -0.5. First key 1.5 * 3 - 2 * 5, second 1.5 * relu(-3) - 2 * 1, third nothing.
    torch.testing.assert_close(got, torch.tensor([[[-5.5, -2.0, 0.0]]]))


@torch.no_grad()
def test_scores_equal_float64() -> None:
    layer, x_BTD = make_layer(), torch.randn(2, 30, D)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        layer, x_BTD = layer.to(dtype), x_BTD.to(dtype)
        c_BTQ = layer.q_a_layernorm(layer.q_a_proj(x_BTD))
        got = scores_of(layer.indexer, x_BTD, c_BTQ)
        true = torch.stack([true_scores(layer, x) for x in x_BTD])
        assert got.dtype == dtype
        assert (got.double() - true).abs().max() <= tolerance * true.abs().max()


@torch.no_grad()
def test_index_keys_of_small_inputs_know_their_eps() -> None:
    layer, x_BTD = make_layer(), torch.randn(1, 30, D) * 1e-3
    assert layer.indexer.k_norm.eps == 1e-6
    got = scores_of(layer.indexer, x_BTD, layer.q_a_layernorm(layer.q_a_proj(x_BTD)))
    true = true_scores(layer, x_BTD[0])
    assert (got[0].double() - true).abs().max() <= 1e-5 * true.abs().max()


@torch.no_grad()
def test_bf16_scores_are_computed_in_fp32() -> None:
    layer = make_layer().bfloat16()
    x_BTD = torch.randn(1, 30, D).bfloat16()
    c_BTQ = layer.q_a_layernorm(layer.q_a_proj(x_BTD))
    keys_BSK = layer.indexer.keys(x_BTD)
    got = scores_of(layer.indexer, x_BTD, c_BTQ)
    q = layer.indexer.wq_b(c_BTQ).double().unflatten(-1, (INDEX["index_n_heads"], -1))
    weight = x_BTD.double() @ layer.indexer.weights_proj.weight.double().T * INDEX["index_n_heads"] ** -0.5
    dots = torch.einsum("btik,bsk->btis", q, keys_BSK.double()) * INDEX["index_head_dim"] ** -0.5
    true = torch.einsum("btis,bti->bts", dots.relu(), weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-5)


# Against transformers.


@dataclass(frozen=True)
class Independent:
    """A sparse attention layer of transformers; hy_v4 has our output gate, the others have none."""

    id: str
    config: type
    module: Callable[..., nn.Module]
    gated: bool = False

    def build(self, layer: GatedLatentAttention, kind: str = "full") -> nn.Module:
        fields = DIMS | INDEX | {"num_hidden_layers": 2, "attn_implementation": "eager"}
        if self.id != "deepseek_v32":
            fields["indexer_types"] = ["full", kind]
        # hy_v4 norms index keys with rms_norm_eps.
        module = self.module(self.config(**fields, rms_norm_eps=1e-6), layer_idx=1 if kind == "shared" else 0)
        state = layer.state_dict()
        if self.gated:
            state["gate_proj.weight"] = state.pop("g_proj.weight")
            state["sinks"] = torch.full((layer.num_heads,), -torch.inf)
        module.load_state_dict(state)
        return module


INDEPENDENT = (
    Independent("deepseek_v32", DeepseekV32Config, DeepseekV32Attention),
    Independent("glm_moe_dsa", GlmMoeDsaConfig, GlmMoeDsaAttention),
    Independent("hy_v4", HYV4Config, HYV4Attention, gated=True),
)


def run_independent(module: nn.Module, x_BTD: torch.Tensor, mask_BTS: torch.Tensor, **kwargs) -> torch.Tensor:
    B, T, _ = x_BTD.shape
    bias = torch.zeros(mask_BTS.shape).masked_fill(~mask_BTS, torch.finfo(x_BTD.dtype).min)
    shared = DIMS["qk_rope_head_dim"]
    rotation = torch.ones(B, T, shared), torch.zeros(B, T, shared)
    return module(x_BTD, rotation, bias.unsqueeze(1), position_ids=None, **kwargs)


def independent_selection(module: nn.Module, x_BTD: torch.Tensor, mask_BTS: torch.Tensor) -> torch.Tensor:
    """bool [B, T, S]"""
    caught = []
    handle = module.indexer.register_forward_hook(lambda _, args, output: caught.append(output.long()))
    run_independent(module, x_BTD, mask_BTS)
    handle.remove()
    return torch.zeros_like(mask_BTS).scatter(-1, caught[0], True) & mask_BTS


@pytest.mark.parametrize("packing", [(64,), (30, 3, 8, 23)], ids=["one-document", "packed"])
@pytest.mark.parametrize("case", INDEPENDENT, ids=lambda case: case.id)
@torch.no_grad()
def test_selection_and_output_equal_transformers(case: Independent, packing: tuple[int, ...]) -> None:
    layer = make_layer(mla_use_output_gate=case.gated)
    for seed in range(5):
        torch.manual_seed(seed)
        x_BTD, documents = torch.randn(1, 64, D), packed(packing)
        mask_BTS = documents.attention_mask_BTS
        got, choice = layer(x_BTD, documents)
        module = case.build(layer)
        assert torch.equal(mask_of(choice, documents), independent_selection(module, x_BTD, mask_BTS))
        torch.testing.assert_close(got, run_independent(module, x_BTD, mask_BTS)[0], rtol=1e-5, atol=1e-5)
        parts = x_BTD[0].split(packing)
        true = torch.cat([true_output(layer, x, true_selection(layer, x)) for x in parts])
        torch.testing.assert_close(got[0].double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", INDEPENDENT[1:], ids=lambda case: case.id)
@torch.no_grad()
def test_shared_layer_equals_transformers(case: Independent) -> None:
    """A shared layer has no indexer and takes the indices of the full one."""
    full = make_layer(mla_use_output_gate=case.gated)
    shared = make_layer("shared", seed=1, mla_use_output_gate=case.gated)
    assert not [name for name, _ in shared.named_parameters() if "indexer" in name]
    x_BTD, documents = torch.randn(2, 40, D), rows(2, 40)
    mask_BTS = documents.attention_mask_BTS
    _, choice = full(x_BTD, documents)
    got, passed_on = shared(x_BTD, documents, None, choice)
    _, _, their_index = run_independent(case.build(full), x_BTD, mask_BTS)
    want = run_independent(case.build(shared, "shared"), x_BTD, mask_BTS, prev_topk_indices=their_index)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert passed_on.index_Mk is choice.index_Mk


# Dense below index_topk, sparse above.


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("T", [1, 7, 8, 9, 64])
@torch.no_grad()
def test_dense_up_to_topk_and_gold_above(T: int, attention: str) -> None:
    """Public report: fine on short texts, nonsense on long ones."""
    layer = make_layer(attention=attention)
    x_BTD = torch.randn(2, T, D)
    got, choice = layer(x_BTD, rows(2, T))
    dense, _ = dense_twin(layer)(x_BTD, rows(2, T))
    if T <= TOPK:
        assert choice is None
        assert torch.equal(got, dense)
        return
    assert choice.index_Mk.shape == (2 * T, TOPK) and choice.index_Mk.dtype == torch.int32
    found = listed(choice, rows(2, T))
    for b in range(2):
        chosen = true_selection(layer, x_BTD[b])
        assert found[b] == chosen
        torch.testing.assert_close(got[b].double(), true_output(layer, x_BTD[b], chosen), rtol=1e-5, atol=1e-5)
    # The first queries see no more keys than they may keep; every later one drops some.
    torch.testing.assert_close(got[:, :TOPK], dense[:, :TOPK], rtol=1e-5, atol=1e-6)
    assert ((got - dense)[:, TOPK:].abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_a_short_document_beside_a_long_one_stays_dense(attention: str) -> None:
    layer = make_layer(attention=attention)
    lengths = (8, 25, 3, 8)
    x_BTD, documents = torch.randn(1, sum(lengths), D), packed(lengths)
    got, _ = layer(x_BTD, documents)
    dense, _ = dense_twin(layer)(x_BTD, documents)
    long = torch.zeros(sum(lengths), dtype=torch.bool)
    long[8:33] = True
    assert torch.equal(got[0, ~long], dense[0, ~long])
    assert ((got - dense)[0, 16:33].abs().amax(-1) > 1e-4).all()


@torch.no_grad()
def test_a_short_row_beside_a_long_one_stays_dense() -> None:
    layer, mask = make_layer(), torch.ones(2, 30, dtype=torch.long)
    mask[0, :22] = 0
    x_BTD, documents = torch.randn(2, 30, D), Documents.of_batch((2, 30), CPU, attention_mask=mask)
    got, choice = layer(x_BTD, documents)
    dense, _ = dense_twin(layer)(x_BTD, documents)
    assert got.isfinite().all()
    assert torch.equal(got[0, 22:], dense[0, 22:])
    chosen = true_selection(layer, x_BTD[1])
    assert listed(choice, documents)[1] == chosen
    torch.testing.assert_close(got[1].double(), true_output(layer, x_BTD[1], chosen), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packing", [(64,), (5, 1, 30, 9, 8, 11)], ids=["one-document", "packed"])
@torch.no_grad()
def test_packed_documents_equal_documents_alone(packing: tuple[int, ...]) -> None:
    layer = make_layer().double()
    x_BTD = torch.randn(1, sum(packing), D, dtype=torch.float64)
    got, choice = layer(x_BTD, packed(packing))
    found, start = listed(choice, packed(packing))[0], 0
    for x_TD in x_BTD[0].split(packing):
        mine, chosen = slice(start, start + len(x_TD)), true_selection(layer, x_TD)
        assert found[mine] == [[start + s for s in keys] for keys in chosen]
        want = true_output(layer, x_TD, chosen)
        torch.testing.assert_close(got[0, mine], want, rtol=1e-10, atol=1e-11)
        start += len(x_TD)


@torch.no_grad()
def test_changing_a_document_changes_no_other_one() -> None:
    layer, lengths = make_layer(), (20, 15)
    x_BTD = torch.randn(1, 35, D)
    other = torch.cat([torch.randn(1, 20, D), x_BTD[:, 20:]], dim=1)
    (got, choice), (again, other_choice) = layer(x_BTD, packed(lengths)), layer(other, packed(lengths))
    assert torch.equal(got[:, 20:], again[:, 20:])
    assert torch.equal(choice.index_Mk[20:], other_choice.index_Mk[20:])
    assert not torch.equal(choice.index_Mk[:20], other_choice.index_Mk[:20])


@torch.no_grad()
def test_of_equal_scores_the_earlier_key_is_kept() -> None:
    """An indexer that likes nothing gives every key 0: the first keys of each document are chosen."""
    layer, lengths = make_layer(), (20, 15)
    layer.indexer.weights_proj.weight.zero_()
    x_BTD = torch.randn(1, 35, D)
    got, choice = layer(x_BTD, packed(lengths))
    found, chosen = listed(choice, packed(lengths))[0], [list(range(min(t + 1, TOPK))) for t in range(20)]
    assert found[:20] == chosen
    assert found[20:] == [[20 + s for s in range(min(t + 1, TOPK))] for t in range(15)]
    torch.testing.assert_close(got[0, :20].double(), true_output(layer, x_BTD[0, :20], chosen), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts", [(1,) * 21, (8, 1, 12), (5, 3, 13), (7, 2, 12), (20, 1)], ids=str)
@torch.no_grad()
def test_cached_layer_equals_the_whole(cuts: tuple[int, ...]) -> None:
    """Calls may end anywhere, also around index_topk; index keys are remembered from the first token on."""
    layer, cache = make_layer().double(), LayerCache()
    x_BTD, done, outputs, chosen = torch.randn(2, 21, D, dtype=torch.float64), 0, [], []
    for length in cuts:
        documents = rows(2, length, done)
        out, choice = layer(x_BTD[:, done : done + length], documents, cache)
        outputs.append(out)
        if choice is None:
            assert done + length <= TOPK
            chosen.extend((list(range(t + 1)),) * 2 for t in range(done, done + length))
        else:
            chosen.extend(zip(*listed(choice, documents), strict=True))
        done += length
    for b in range(2):
        want = true_selection(layer, x_BTD[b])
        assert [pair[b] for pair in chosen] == want
        got = torch.cat(outputs, 1)[b]
        torch.testing.assert_close(got, true_output(layer, x_BTD[b], want), rtol=1e-10, atol=1e-11)
    assert cache.get("index_keys").shape == (2, 21, INDEX["index_head_dim"])


def test_the_indexer_gets_no_gradient_from_the_output() -> None:
    layer, x_BTD = make_layer(), torch.randn(1, 20, D, requires_grad=True)
    layer(x_BTD, rows(1, 20))[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == name.startswith("indexer."), name
    assert x_BTD.grad.isfinite().all()


def test_keys_that_are_not_selected_get_no_gradient() -> None:
    layer, x_BTD = make_layer(), torch.randn(1, 30, D, requires_grad=True)
    got, choice = layer(x_BTD, rows(1, 30))
    (grad,) = torch.autograd.grad(got[0, 29].sum(), x_BTD)
    touched = {*listed(choice, rows(1, 30))[0][29], 29}
    assert set(grad[0].abs().sum(-1).nonzero().squeeze(-1).tolist()) == touched


# Sharing through a whole model.

KINDS = ("kda", "full", "kda", "shared", "mla", "shared", "full", "kda", "shared")


def make_model(kinds: Sequence[str] = KINDS, **changes) -> LatentMoEForCausalLM:
    """Layers "kda", "mla" (no indexer), "full" and "shared"."""
    kda = [i + 1 for i, kind in enumerate(kinds) if kind == "kda"]
    linear = {"kda_layers": kda, "full_attn_layers": [i for i in range(1, len(kinds) + 1) if i not in kda]}
    linear |= {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "use_full_rank_gate": True}
    values = {"num_hidden_layers": len(kinds), "vocab_size": 50, "intermediate_size": 24, "pad_token_id": 0}
    values |= {"linear_attn_config": linear, "attn_res_block_size": 3}
    values["indexer_types"] = ["none" if kind in ("kda", "mla") else kind for kind in kinds]
    config = text_config(**(values | changes))
    torch.manual_seed(0)
    model = LatentMoEForCausalLM(config).eval()
    randomise(model)
    return model


@torch.no_grad()
def watch(model: LatentMoEForCausalLM, **inputs) -> dict[int, tuple]:
    """(input, output, chosen keys) of the attention of every layer that is not KDA."""
    seen, handles = {}, []
    for i, layer in enumerate(model.model.layers):
        if not layer.is_linear:

            def hook(_, args, output, i=i):
                seen[i] = (args[0], *output)

            handles.append(layer.self_attn.register_forward_hook(hook))
    model(use_cache=False, **inputs)
    for handle in handles:
        handle.remove()
    return seen


def test_a_shared_layer_uses_the_last_full_choice_through_other_layers() -> None:
    model = make_model()
    seen = watch(model, input_ids=torch.randint(1, 50, (1, 40)))
    assert list(seen) == [1, 3, 4, 5, 6, 8]
    assert seen[4][2] is None
    choices = {i: listed(choice, rows(1, 40))[0] for i, (_, _, choice) in seen.items() if i != 4}
    assert choices[1] != choices[6]
    for i, source in {1: 1, 3: 1, 5: 1, 6: 6, 8: 6}.items():
        x, output, _ = seen[i]
        attention, full = model.model.layers[i].self_attn, model.model.layers[source].self_attn
        chosen = choices[source]
        # The own input of a full layer chooses; what a shared layer would choose by itself differs.
        if i == source:
            assert true_selection(attention, x[0]) == chosen
        else:
            hybrid = copy.deepcopy(attention)
            hybrid.indexer = full.indexer
            assert true_selection(hybrid, x[0]) != chosen
        want = true_output(attention, x[0], chosen)
        torch.testing.assert_close(output[0].double(), want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


@dataclass(frozen=True)
class Length:
    T: int
    packing: tuple[int, ...] | None = None


LENGTHS = (Length(7), Length(8), Length(9), Length(64), Length(20, (8, 7, 5)), Length(20, (9, 6, 5)))


@pytest.mark.parametrize("case", LENGTHS, ids=str)
@torch.no_grad()
def test_a_model_is_dense_exactly_while_documents_fit(case: Length) -> None:
    """To the bit, also beside a longer document."""
    model = make_model().double()
    dense = make_model(index_topk=None, indexer_types=None).double()
    weights = {name: x for name, x in model.state_dict().items() if ".indexer." not in name}
    dense.load_state_dict(weights)
    inputs = {"input_ids": torch.randint(1, 50, (1, case.T)), "use_cache": False}
    lengths = case.packing or (case.T,)
    if case.packing:
        inputs["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    got, want = model(**inputs).logits[0], dense(**inputs).logits[0]
    for mine, other in zip(got.split(lengths), want.split(lengths), strict=True):
        if len(mine) <= TOPK:
            assert torch.equal(mine, other)
        else:
            torch.testing.assert_close(mine[:TOPK], other[:TOPK], rtol=1e-9, atol=1e-9)
            assert ((mine - other)[TOPK:].abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("cuts", [(1,) * 20, (8, 12), (6, 1, 13), (19, 1)], ids=str)
@torch.no_grad()
def test_cached_model_equals_the_whole_past_topk(cuts: tuple[int, ...]) -> None:
    model = make_model().double()
    input_ids = torch.randint(1, 50, (2, 20))
    whole = model(input_ids=input_ids, use_cache=False).logits
    cache, outputs = None, []
    for part in input_ids.split(cuts, dim=1):
        result = model(input_ids=part, cache=cache, use_cache=True)
        cache = result.cache
        outputs.append(result.logits)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-8, atol=1e-8)


def test_layer_norm_of_the_index_keys_has_a_bias() -> None:
    indexer = make_layer().indexer
    x_BTD = torch.randn(1, 3, D)
    want = F.layer_norm(indexer.wk(x_BTD), [INDEX["index_head_dim"]], eps=1e-6) * indexer.k_norm.weight
    torch.testing.assert_close(indexer.keys(x_BTD), want + indexer.k_norm.bias)
