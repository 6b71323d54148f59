"""The pooled indexer against transformers' glm5_next, brute force in float64, and itself in pieces.

Legend: B batch, T tokens, S keys, D model width, P keys of a pool.
"""

from collections.abc import Sequence

import pytest
import torch
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextAttention

from modeling_latentmoe.cache import LayerCache
from modeling_latentmoe.documents import Documents
from modeling_latentmoe.mla import GatedLatentAttention

from .models import close, mixed_config, random_model
from .test_indexer_parity import CPU, DIMS, INDEX, best_keys, listed, make_layer, mask_of, packed, rows

P, TOPK, D = 4, 8, DIMS["hidden_size"]
POOLED = {"index_kpool": P, "mla_use_output_gate": False, "qk_rope_head_dim": 0}


def true_selection(layer: GatedLatentAttention, x_TD: torch.Tensor) -> list[list[int]]:
    """One document in float64, pool by pool: the best complete pools that a token sees the end of, and what follows."""
    w, x = {name: value.double() for name, value in layer.state_dict().items()}, x_TD.double()
    c = x @ w["q_a_proj.weight"].T
    c = c / torch.sqrt((c * c).mean(-1, keepdim=True) + 1e-6) * w["q_a_layernorm.weight"]
    k = torch.nn.functional.layer_norm(x @ w["indexer.wk.weight"].T, [INDEX["index_head_dim"]], eps=1e-6)
    k = k * w["indexer.k_norm.weight"] + w["indexer.k_norm.bias"]
    logit = x @ w["indexer.index_kpool_compress_gate"].T
    heads, width = INDEX["index_n_heads"], INDEX["index_head_dim"]
    pooled = []
    for start in range(0, len(x) - P + 1, P):
        share = torch.softmax(logit[start : start + P] + w["indexer.index_kpool_compress_ape"], dim=0)
        pooled.append((share * k[start : start + P]).sum(0))
    found = []
    for t in range(len(x)):
        q = (c[t] @ w["indexer.wq_b.weight"].T).view(heads, width)
        weight = x[t] @ w["indexer.weights_proj.weight"].T / heads**0.5
        complete = (t + 1) // P
        scores = [float(weight @ (q @ key / width**0.5).clamp_min(0)) for key in pooled[:complete]]
        best = best_keys(scores, [True] * complete, TOPK // P)
        found.append([g * P + i for g in best for i in range(P)] + list(range(complete * P, t + 1)))
    return found


def glm5(layer: GatedLatentAttention) -> Glm5NextTextAttention:
    fields = DIMS | INDEX | {"qk_rope_head_dim": 0, "index_kpool": P, "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
    config = Glm5NextTextConfig(**fields, indexer_types=["full"], layer_types=["indexed_attention"])
    config._attn_implementation = "eager"
    module = Glm5NextTextAttention(config, layer_idx=0)
    module.load_state_dict(layer.state_dict())
    return module


@pytest.mark.parametrize("padding", [0, 3, 5])
@torch.no_grad()
def test_selection_and_output_equal_glm5_next(padding: int) -> None:
    layer = make_layer(**POOLED)
    module, caught = glm5(layer), []
    module.indexer.register_forward_hook(lambda _, args, output: caught.append(output.long()))
    for seed in range(5):
        torch.manual_seed(seed)
        x_BTD, mask = torch.randn(2, 43, D), torch.ones(2, 43, dtype=torch.long)
        mask[0, :padding] = 0
        documents = Documents.of_batch((2, 43), CPU, attention_mask=mask)
        got, choice = layer(x_BTD, documents)
        want = module(x_BTD, mask.bool())[0]
        theirs = torch.zeros(2, 43, 44, dtype=torch.bool).scatter(-1, caught[-1].where(caught[-1] >= 0, 43), True)
        assert torch.equal(mask_of(choice, documents), theirs[..., :43] & mask.bool()[:, :, None])
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packing", [(43,), (13, 1, 3, 20, 9), (9, 8, 4)], ids=str)
@torch.no_grad()
def test_packed_documents_equal_documents_alone(packing: Sequence[int]) -> None:
    layer = make_layer(**POOLED).double()
    x_BTD = torch.randn(1, sum(packing), D, dtype=torch.float64)
    got, choice = layer(x_BTD, packed(packing))
    found, start = listed(choice, packed(packing))[0], 0
    assert choice.index_Mk.shape == (sum(packing), TOPK + P - 1)
    for length in packing:
        mine = slice(start, start + length)
        chosen = true_selection(layer, x_BTD[0, mine])
        assert found[mine] == [[start + s for s in keys] for keys in chosen]
        alone, _ = layer(x_BTD[:, mine], rows(1, length))
        torch.testing.assert_close(got[:, mine], alone, rtol=1e-10, atol=1e-11)
        start += length


@pytest.mark.parametrize("cuts", [(1,) * 21, (8, 1, 12), (5, 3, 13), (20, 1)], ids=str)
@torch.no_grad()
def test_cached_layer_equals_the_whole(cuts: Sequence[int]) -> None:
    layer, cache = make_layer(**POOLED).double(), LayerCache()
    x_BTD, done, outputs = torch.randn(2, 21, D, dtype=torch.float64), 0, []
    whole, _ = layer(x_BTD, rows(2, 21))
    for length in cuts:
        outputs.append(layer(x_BTD[:, done : done + length], rows(2, length, done), cache)[0])
        done += length
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-10, atol=1e-11)
    # Keys, and the logits that mix them.
    assert cache.get("index_keys").shape == (2, 21, 2 * INDEX["index_head_dim"])


@torch.no_grad()
def test_a_model_with_pools_generates_as_it_reads() -> None:
    model = random_model(mixed_config("kdks", index_kpool=3))
    ids = torch.randint(0, 250, (2, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    text = model.generate(ids, attention_mask=mask, max_new_tokens=15, do_sample=False, eos_token_id=None)
    mask = torch.cat([mask, torch.ones(2, 15, dtype=torch.long)], dim=1)
    logits = model(input_ids=text, attention_mask=mask, use_cache=False).logits
    assert torch.equal(logits[:, 4:-1].argmax(-1), text[:, 5:])


def test_pools_learn() -> None:
    """Mixture and places are trained with the rest of the indexer, in both stages."""
    for dense in (False, True):
        layer = make_layer(**POOLED).double().train()
        layer.config.indexer_loss, layer.config.dense_attention = True, dense
        x_BTD = torch.randn(1, 30, D, dtype=torch.float64)
        loss = layer(x_BTD, packed((21, 9)))[1].losses[0]
        loss.backward()
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        assert {name for name, grad in grads.items() if grad is not None and grad.any()} == {
            name for name in grads if name.startswith("indexer.")
        }
        # Against a difference of the loss itself.
        gate, step = layer.indexer.index_kpool_compress_gate, 1e-6
        with torch.no_grad():
            direction = torch.randn_like(gate)
            values = []
            for sign in (1, -1):
                gate.add_(sign * step * direction)
                values.append(layer(x_BTD, packed((21, 9)))[1].losses[0])
                gate.sub_(sign * step * direction)
        slope = (values[0] - values[1]) / (2 * step)
        torch.testing.assert_close(
            slope, (grads["indexer.index_kpool_compress_gate"] * direction).sum(), rtol=1e-5, atol=1e-7
        )


def test_two_stages_have_one_loss_where_all_pools_are_chosen() -> None:
    layer = make_layer(**POOLED).double().train()
    layer.config.indexer_loss = True
    x_BTD = torch.randn(1, TOPK + 1, D, dtype=torch.float64)
    sparse = layer(x_BTD, rows(1, TOPK + 1))[1]
    layer.config.dense_attention = True
    dense = layer(x_BTD, rows(1, TOPK + 1))[1]
    assert sparse.index_Mk is not None and dense.index_Mk is None
    torch.testing.assert_close(sparse.losses[0], dense.losses[0])


def test_logits_close() -> None:
    """Of a whole model in pieces."""
    model = random_model(mixed_config("kdks", index_kpool=2))
    ids = torch.randint(0, 250, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole, first = model(input_ids=ids, use_cache=False).logits, model(input_ids=ids[:, :12])
        close(torch.cat([first.logits, model(input_ids=ids[:, 12:], cache=first.cache).logits], 1), whole)
