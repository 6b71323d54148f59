"""The loss rule on one process: what counts as a trained token, and that accumulation changes nothing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.training.loss import IGNORE, backpropagate, count_loss_tokens, token_loss_sum


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


def test_sum_equals_the_plain_definition_in_fp32_for_bf16_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=generator).bfloat16()
    labels = torch.tensor([[1, 2, IGNORE, 4, 5], [IGNORE, 0, 10, IGNORE, IGNORE]])
    expected = 0.0
    for b in range(2):
        for t in range(4):
            if labels[b, t + 1] != IGNORE:
                expected -= logits[b, t].double().log_softmax(-1)[labels[b, t + 1]].item()
    assert token_loss_sum(logits, labels).item() == pytest.approx(expected, rel=1e-6)
    assert token_loss_sum(logits, labels).dtype == torch.float32
    assert token_loss_sum(logits.double(), labels).dtype == torch.float64


def test_a_batch_without_trained_tokens_has_zero_gradients() -> None:
    logits = torch.randn(1, 4, 3, requires_grad=True)
    loss = token_loss_sum(logits, torch.full((1, 4), IGNORE))
    loss.backward()
    assert loss.item() == 0 and (logits.grad == 0).all()


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
