"""The loss rule on several processes: 1 or 2 of them, 1, 2 or 4 micro-batches, uneven tokens, same gradients."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from processes import as_launched, spawn

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.training import lora
from modeling_latentmoe.training.data import Sample, pack, pad
from modeling_latentmoe.training.loss import IGNORE, backpropagate, count_loss_tokens, global_sum

pytestmark = pytest.mark.dist

# tokens and trained tokens of eight documents; the last ones train one token each: halves and quarters hold very
# different numbers of tokens
DOCUMENTS = [(20, 17), (18, 15), (16, 12), (14, 9), (12, 1), (10, 1), (8, 1), (6, 1)]


def documents() -> list[Sample]:
    generator, found = torch.Generator().manual_seed(0), []
    for n, trained in DOCUMENTS:
        ids = torch.randint(0, 256, (n,), generator=generator)
        labels = ids.clone()
        labels[: n - trained] = IGNORE
        found.append(Sample(ids, labels))
    return found


def work(rank: int, world: int, layouts: list[tuple[int, str]]) -> list[dict]:
    """One step for each layout: how many micro-batches, and how they are made. This process takes every `world`-th."""
    as_launched(rank, world)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False))
    model = lora.add_adapter(model, r=4, lora_alpha=8, expert_rank=2)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    wrapped, results = accelerator.prepare(model), []
    for parts, layout in layouts:
        size = len(DOCUMENTS) // (world * parts)
        groups = [documents()[i * size : (i + 1) * size] for i in range(world * parts)][rank::world]
        window = [pack(group) if layout == "packed" else pad(group, 0) for group in groups]
        (tokens,) = global_sum(accelerator, sum(count_loss_tokens(batch["labels"]) for batch in window))
        loss, load, *_ = backpropagate(accelerator, wrapped, window, tokens, 1)
        gradients = {name: param.grad.clone() for name, param in trained.items()}
        norm = float(accelerator.clip_grad_norm_(trained.values(), 1e9))
        results.append({"loss": loss, "norm": norm, "tokens": tokens, "load": load, "gradients": gradients})
        wrapped.zero_grad()
    return results


def test_processes_and_accumulation_change_nothing(tmp_path: Path) -> None:
    """Public report 56."""
    ((reference, accumulated),) = spawn(tmp_path / "one", 1, work, [(1, "padded"), (4, "packed")])
    assert reference["tokens"] == 57
    manual = torch.cat([grad.flatten().double() for grad in reference["gradients"].values()]).norm()
    assert reference["norm"] == pytest.approx(manual.item(), rel=1e-5)
    pairs = spawn(tmp_path / "two", 2, work, [(1, "padded"), (2, "packed")])
    for result in (accumulated, *(result for pair in pairs for result in pair)):
        assert result["tokens"] == 57
        assert result["loss"] == pytest.approx(reference["loss"], abs=1e-6)
        assert result["norm"] == pytest.approx(reference["norm"], abs=1e-6)
        assert torch.equal(result["load"], reference["load"])
        for name, gradient in reference["gradients"].items():
            assert (result["gradients"][name] - gradient).abs().max() <= 1e-6, name
