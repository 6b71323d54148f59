"""The loss rule on one process: what counts as a trained token, and that accumulation changes nothing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, get_peft_model

from modeling_latentmoe import ops
from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.training.loss import IGNORE, backpropagate, count_loss_tokens, padding_like


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps its settings for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def documents() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels of eight documents with 1 to 14 trained tokens."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for n in (5, 17, 9, 12, 6, 16, 7, 11):
        ids = torch.randint(0, 256, (n,), generator=generator)
        labels = ids.clone()
        labels[: 3 if n > 6 else n - 1] = IGNORE
        result.append((ids, labels))
    return result


def padded(docs: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    longest = max(len(ids) for ids, _ in docs)
    rows = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE}
    batch = {name: torch.full((len(docs), longest), fill) for name, fill in rows.items()}
    for i, (ids, labels) in enumerate(docs):
        batch["input_ids"][i, : len(ids)] = ids
        batch["attention_mask"][i, : len(ids)] = 1
        batch["labels"][i, : len(ids)] = labels
    return batch


def packed(docs: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([0] + [len(ids) for ids, _ in docs])
    return {
        "input_ids": torch.cat([ids for ids, _ in docs])[None],
        "labels": torch.cat([labels for _, labels in docs])[None],
        "cu_seqlens": lengths.cumsum(0).int(),
    }


def small_model() -> LatentMoEForConditionalGeneration:
    torch.manual_seed(0)
    return LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False, packed=False)).float()


def step(window: list[dict[str, torch.Tensor]], accumulation_setting: int = 1):
    """Loss, gradients and expert load of one step on a fresh model."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation_setting)
    model = small_model()
    tokens = sum(count_loss_tokens(batch["labels"]) for batch in window)
    loss, load, *_ = backpropagate(accelerator, accelerator.prepare(model), copy.deepcopy(window), tokens, 1)
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, load


def test_tokens_are_counted_after_the_shift() -> None:
    labels = torch.tensor([[7, 8, IGNORE, 9], [IGNORE, IGNORE, IGNORE, IGNORE], [5, IGNORE, IGNORE, IGNORE]])
    assert count_loss_tokens(labels) == 2


def test_losses_equal_the_plain_definition_in_fp32_for_bf16_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of 16 rows and at once; ignored rows are zeros."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(40, 5, generator=generator).bfloat16()
    weight_VD = torch.randn(11, 5, generator=generator).bfloat16()
    target_N = torch.randint(0, 11, (40,), generator=generator)
    target_N[[3, 17, 39]] = IGNORE
    expected_N = torch.zeros(40, dtype=torch.float64)
    for n, target in enumerate(target_N.tolist()):
        if target != IGNORE:
            expected_N[n] = -F.linear(hidden_ND[n], weight_VD).double().log_softmax(-1)[target]
    for limit in (0, 2**20):
        monkeypatch.setattr(ops, "LOGIT_BYTES", limit)
        losses_N = ops.linear_cross_entropy(hidden_ND, weight_VD, target_N)
        assert losses_N.dtype == torch.float32
        torch.testing.assert_close(losses_N.double(), expected_N, rtol=1e-6, atol=1e-6)
        assert (losses_N[[3, 17, 39]] == 0).all()
    assert ops.linear_cross_entropy(hidden_ND.double(), weight_VD.double(), target_N).dtype == torch.float64


def test_only_some_rows_have_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays alive between forward and backward does not grow with the vocabulary."""
    monkeypatch.setattr(ops, "LOGIT_BYTES", 0)
    hidden_ND, weight_VD = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        loss = ops.linear_cross_entropy(hidden_ND, weight_VD, torch.randint(0, 1000, (64,))).sum()
    assert max(kept, default=0) <= weight_VD.numel()
    (grad,) = torch.autograd.grad(loss, hidden_ND)
    assert grad.isfinite().all() and grad.any()


def test_a_batch_without_trained_tokens_has_zero_gradients() -> None:
    model, ids = small_model(), torch.arange(4)[None]
    loss = model(input_ids=ids, labels=torch.full((1, 4), IGNORE), return_logits=False).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert loss.item() == 0 and gradients and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("learned", [True, False])
def test_padding_is_one_token_without_label(learned: bool) -> None:
    """Also of a batch that has nothing to learn; images stay away."""
    ids = torch.tensor([[3, 9, 9, 5], [3, 6, 0, 0]])
    labels = ids.clone() if learned else torch.full_like(ids, IGNORE)
    images = {"pixel_values": torch.zeros(8, 3), "grid_thws": torch.tensor([[1, 2, 4]])}
    batch = padding_like({"input_ids": ids, "labels": labels, "attention_mask": (ids > 0).long(), **images})
    assert batch["input_ids"].tolist() == [[3]] and batch["labels"].tolist() == [[IGNORE]]
    assert batch["attention_mask"].tolist() == [[0]]
    assert len(batch["pixel_values"]) == len(batch["grid_thws"]) == 0


@pytest.mark.parametrize("layout", [padded, packed])
def test_the_loss_without_logits_is_the_loss(layout) -> None:
    model, batch = small_model().double(), layout(documents())
    whole, alone = model(**batch), model(**batch, return_logits=False)
    assert alone.logits is None
    torch.testing.assert_close(alone.loss, whole.loss, rtol=1e-12, atol=0)
    parameters = [p for name, p in model.named_parameters() if p.requires_grad]
    grads = (torch.autograd.grad(out.loss, parameters, allow_unused=True) for out in (whole, alone))
    for want, got in zip(*grads, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="return_logits"):
        model(input_ids=batch["input_ids"], return_logits=False)


def test_a_resized_head_still_gives_the_loss() -> None:
    """transformers puts a plain linear layer in place of the head."""
    model, batch = small_model(), padded(documents())
    model.resize_token_embeddings(300)
    assert torch.equal(model(**batch, return_logits=False).loss, model(**batch).loss)


def test_an_adapter_on_the_head_counts() -> None:
    """Public report: a fused loss that reads the weight of the head alone and leaves its adapter untrained."""
    model, batch = small_model(), padded(documents())
    model = get_peft_model(model, LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    whole, alone = model(**batch), model(**batch, return_logits=False)
    assert alone.logits is None
    assert torch.equal(whole.loss, alone.loss)
    alone.loss.backward()
    assert all(p.grad.any() for name, p in model.named_parameters() if "lora_" in name)


def test_loss_is_the_mean_over_all_tokens_of_the_window() -> None:
    docs = documents()
    loss, _, load = step([padded(docs)])
    with torch.no_grad():
        model, total, count = small_model(), 0.0, 0
        for ids, labels in docs:
            logits = model(input_ids=ids[None]).logits[0, :-1]
            kept = labels[1:] != IGNORE
            total += F.cross_entropy(logits[kept], labels[1:][kept], reduction="sum").item()
            count += int(kept.sum())
    assert loss == pytest.approx(total / count, rel=1e-6)
    tokens = sum(len(ids) for ids, _ in docs)
    config = LatentMoEConfig.tiny().text_config
    assert load.sum(-1).tolist() == [tokens * config.num_experts_per_token] * len(load)


@pytest.mark.parametrize("setting", [1, 4])
@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_changes_nothing(parts: int, layout, setting: int) -> None:
    """`setting` is what a launcher's configuration may have told Accelerate, which then divides by it."""
    docs = documents()
    loss, gradients, load = step([padded(docs)])
    size = len(docs) // parts
    window = [layout(docs[i : i + size]) for i in range(0, len(docs), size)]
    other_loss, other_gradients, other_load = step(window, setting)
    assert other_loss == pytest.approx(loss, abs=1e-6)
    assert torch.equal(load, other_load)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
