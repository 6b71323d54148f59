"""Models train through the operators of a fake card as they do through torch: losses, adapters, indexers.

The model of the operators' limits is bf16, as cards want it: 96 heads, 512 + 64 latent numbers, an indexer of 32 heads
of 128, 1024 chosen keys, 1280 tokens of two documents, of which one has more keys than are chosen. What differs is
rounding: a gradient (relative error of its norm) by less than GRADIENT, and the losses by less than LOSS. The shipped
tiny model runs in fp32, where its experts, router, norms, dense attention and loss are operators too.
"""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_latentmoe import LatentMoEForCausalLM, LatentMoEForConditionalGeneration, ops, sparse
from modeling_latentmoe.configuration_latentmoe import LatentMoETextConfig
from modeling_latentmoe.training.lora import add_adapter

LOSS, GRADIENT = 1e-3, 0.02
TOKENS, BORDER = 1280, 1048
DENSE = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj"]


class QuickProducts(TorchDispatchMode):
    """bf16 matrix products in fp32, rounded once, as accelerators have them: a CPU without bf16 instructions multiplies
    a number at a time."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        products = torch.ops.aten.mm.default, torch.ops.aten.bmm.default
        if function in products and args[0].dtype == torch.bfloat16:
            return function(*(x.float() for x in args)).bfloat16()
        return function(*args, **kwargs or {})


def limits_model() -> nn.Module:
    """A KDA layer and an indexed one, with adapters on attention; indexers learn."""
    linear = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 1, "head_dim": 64}
    linear |= {"short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
    config = LatentMoETextConfig(
        **{"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_experts": 0},
        **{"num_attention_heads": 96, "num_key_value_heads": 96, "q_lora_rank": 32, "kv_lora_rank": 512},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"index_topk": 1024, "index_n_heads": 32, "index_head_dim": 128},
        **{"attn_res_block_size": 2, "linear_attn_config": linear, "pad_token_id": 0},
    )
    torch.manual_seed(0)
    model = LatentMoEForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.3 if parameter.ndim == 1 else 0.08) * torch.randn_like(parameter))
    config.indexer_loss = True
    model = get_peft_model(model.bfloat16(), LoraConfig(r=4, lora_alpha=8, target_modules=DENSE))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.05 * torch.randn(parameter.shape)
        if ".indexer." in name:
            parameter.requires_grad_(True)
    return model.train()


def step(model: nn.Module, kernels: str, tokens: int, border: int) -> dict[str, Tensor]:
    """Losses and gradients of a step on two packed documents."""
    model.config.kernels = kernels
    model.zero_grad()
    ids = torch.randint(1, 64, (1, tokens), generator=torch.Generator().manual_seed(1))
    borders = torch.tensor([0, border, tokens], dtype=torch.int32)
    with QuickProducts():
        output = model(input_ids=ids, labels=ids, cu_seqlens=borders, return_logits=False)
        (output.loss + output.indexer_loss / tokens).backward()
    losses = {"loss": output.loss.detach(), "indexer loss": output.indexer_loss.detach()}
    return losses | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys() and any("lora_" in name for name in got)
    for name, value in want.items():
        error = ((got[name].double() - value.double()).norm() / value.double().norm()).item()
        assert error < (LOSS if "loss" in name else GRADIENT), f"{name}: {error:.3g}"


def masked_attention(q_TNL, kv_SL, index_Tk, scale, value_width, sink_N=None):
    """`sparse.sparse_attention` in a third of its time where most keys are listed: scores of all of them."""
    outs, logs = [], []
    kv = kv_SL.float()
    for rows in torch.arange(len(q_TNL)).split(128):
        listed = index_Tk[rows]
        end = int(listed.max()) + 1
        mask = torch.zeros(len(rows), end + 1, dtype=torch.bool).scatter_(1, listed.long() % (end + 1), True)[:, :end]
        score = torch.einsum("tnl,sl->tns", q_TNL[rows].float(), kv[:end]) * scale
        score = score.masked_fill(~mask.unsqueeze(1), -torch.inf)
        logs.append(score.logsumexp(-1))
        outs.append(torch.einsum("tns,sv->tnv", score.softmax(-1), kv[:end, :value_width]))
    return torch.cat(outs).to(q_TNL.dtype), torch.cat(logs)


def masked_probabilities(q_TNL, kv_SL, index_Tk, lse_TN, scale):
    """`sparse.head_probabilities`, likewise."""
    found = []
    for rows in torch.arange(len(q_TNL)).split(128):
        end = int(index_Tk[rows].max()) + 1
        score = torch.einsum("tnl,sl->tns", q_TNL[rows].float(), kv_SL[:end].float()) * scale
        share = (score - lse_TN[rows].unsqueeze(-1)).exp_().sum(1)
        found.append(share.gather(1, index_Tk[rows].clamp(min=0).long()).masked_fill(index_Tk[rows] < 0, 0))
    return torch.cat(found)


def test_the_faster_definition_is_the_definition() -> None:
    torch.manual_seed(0)
    q, kv = torch.randn(50, 3, 24, requires_grad=True), torch.randn(50, 24, requires_grad=True)
    first, end = torch.zeros(50, dtype=torch.int32), torch.arange(1, 51, dtype=torch.int32)
    index = sparse.index_topk(torch.randn(50, 2, 8), torch.randn(50, 8), torch.randn(50, 2), first, end, 20)
    pairs = [function(q, kv, index, 0.2, 16) for function in (masked_attention, sparse.sparse_attention)]
    gradients = [torch.autograd.grad(out.square().sum(), (q, kv)) for out, _ in pairs]
    for got, want in (*zip(*pairs, strict=True), *zip(*gradients, strict=True)):
        assert torch.allclose(got, want, atol=1e-5)
    lse = pairs[1][1].detach()
    shares = [f(q, kv, index, lse, 0.2) for f in (masked_probabilities, sparse.head_probabilities)]
    assert torch.allclose(*shares, atol=1e-5)


@pytest.mark.parametrize("reference", ["masked", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_model_of_the_limits_trains(reference: str, card: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if reference == "masked":
        monkeypatch.setattr(ops, "sparse_attention_torch", masked_attention)
        monkeypatch.setattr(ops, "head_probabilities_torch", masked_probabilities)
    model = limits_model()
    got = step(model, "auto", TOKENS, BORDER)
    used = {*card}
    assert {"npu_lightning_indexer", "npu_sparse_flash_attention", "npu_sparse_flash_attention_grad"} <= used
    assert {"npu_rms_norm", "npu_cross_entropy_loss", "npu_sparse_lightning_indexer_grad_kl_loss"} <= used
    assert card.count("npu_sparse_flash_attention") == card.count("npu_sparse_flash_attention_grad") == 2
    del card[:]
    want = step(model, "torch", TOKENS, BORDER)
    # the norms of a layer have no choice of their own
    assert {*card} == {"npu_rms_norm"} and any(".indexer." in name for name in want)
    assert_alike(got, want)


def test_its_indexer_warms_up(card: list[str]) -> None:
    """Dense attention, and the loss over all visible keys: in a tenth of the tokens, for time's sake."""
    model = limits_model()
    model.config.dense_attention = True
    got = step(model, "auto", 150, 100)
    used = {*card}
    assert {"npu_fusion_attention", "npu_dense_lightning_indexer_grad_kl_loss"} <= used
    assert "npu_sparse_flash_attention" not in used
    assert_alike(got, step(model, "torch", 150, 100))


@pytest.mark.slow
def test_recomputed_layers_call_the_same_operators(card: list[str]) -> None:
    model = limits_model()
    want = step(model, "auto", 150, 100)
    once = [*card]
    del card[:]
    model.gradient_checkpointing_enable()
    got = step(model, "auto", 150, 100)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert card.count("npu_fusion_attention") > once.count("npu_fusion_attention")


@pytest.mark.parametrize("held", [None, range(2, 9)], ids=["whole", "a part of the experts"])
def test_the_tiny_model_trains(held: range | None, tiny: Path, card: list[str]) -> None:
    """Every layer of it, experts in 4 bits, adapters on attention and experts; with a part of the experts as a rank of
    expert parallelism holds them."""
    model = LatentMoEForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32)
    if held is not None:
        for module in model.modules():
            if hasattr(module, "restrict"):
                module.restrict(held)
    torch.manual_seed(0)
    model = add_adapter(model, r=4, lora_alpha=8, expert_rank=2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    model.eval()
    ids = torch.randint(5, 200, (2, 40), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, 31:] = 0
    results = {}
    for kernels in ("auto", "torch"):
        model.config.kernels = kernels
        model.zero_grad()
        del card[:]
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels, return_logits=False).loss
        loss.backward()
        results[kernels] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        results[kernels]["loss"] = loss.detach()
        if kernels == "auto":
            used = {"npu_moe_gating_top_k", "npu_grouped_matmul", "npu_moe_token_permute", "npu_fusion_attention"}
            assert used <= {*card}
            way = "npu_moe_token_unpermute" if held is None else "npu_moe_token_permute_grad_v2"
            assert way in card
    got, want = results["auto"], results["torch"]
    assert got.keys() == want.keys() and sum("experts" in name for name in got) > 8
    for name in want:
        error = ((got[name] - want[name]).norm() / want[name].norm().clamp(min=1e-12)).item()
        assert error < 2e-4, f"{name}: {error:.3g}"


def test_the_tiny_model_generates(tiny: Path, card: list[str]) -> None:
    """Prefill and single tokens in bf16: the recurrent operator is used, and the text is that of torch at first."""
    model = LatentMoEForConditionalGeneration.from_pretrained(tiny, dtype=torch.bfloat16).eval()
    ids = torch.randint(5, 200, (2, 30), generator=torch.Generator().manual_seed(3))
    texts = []
    for kernels in ("auto", "torch"):
        model.config.kernels = kernels
        texts.append(model.generate(input_ids=ids, max_new_tokens=3, do_sample=False))
    assert torch.equal(texts[0][:, :31], texts[1][:, :31])
    assert "npu_recurrent_gated_delta_rule_functional" in card
