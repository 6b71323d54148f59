"""What a step needs of a device, against the tensors that there are; smaller micro-batches."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.training import lora, memory, micro_batches
from modeling_latentmoe.training.data import Sample, count_tokens, pack, pad
from modeling_latentmoe.training.footprint import Work, activation_bytes, layer_bytes
from modeling_latentmoe.training.loading import checkpoint_activations
from modeling_latentmoe.training.loss import IGNORE
from modeling_latentmoe.training.placement import parse_placement
from scripts import lora as script

from .models import mixed_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(mixed_config("kdm", vision=True))
    model = lora.add_adapter(model, r=4, lora_alpha=8, expert_rank=2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


@pytest.fixture
def room(model: torch.nn.Module) -> Iterator[memory.Room]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    accelerator = SimpleNamespace(num_processes=1, is_fsdp2=False, parallelism_config=None, device=CPU)
    yield memory.Room(model, accelerator, 1, parse_placement("device"), "none", False)
    dist.destroy_process_group()


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch, return_logits=False, num_items_in_batch=1).loss


def gradients(model: torch.nn.Module, *batches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the sum of all losses."""
    model.zero_grad()
    for batch in batches:
        loss_of(model, batch).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def saved_bytes(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Of all memory that autograd keeps, but for weights."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(model, batch)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in found.items() if place not in weights)


def text(model: torch.nn.Module, rows: int, length: int) -> dict[str, torch.Tensor]:
    return micro_batches.trial_batch(rows, length, model.config)


def test_what_is_held_is_counted_to_the_byte(model: torch.nn.Module, room: memory.Room) -> None:
    trained = [param for param in model.parameters() if param.requires_grad]
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name and not p.requires_grad)
    rest = sum(p.nbytes for p in model.parameters() if not p.requires_grad) - experts
    gradients(model, text(model, 1, 8))
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    fixed = room.fixed
    assert (fixed.weights, fixed.experts) == (rest, experts)
    assert fixed.adapters == fixed.last_good == sum(param.nbytes for param in trained)
    assert fixed.gradients == sum(param.grad.nbytes for param in trained if param.grad is not None)
    assert fixed.moments == sum(moment.nbytes for moment in moments)
    assert fixed.gathered == 0 == fixed.activations


def test_activations_are_a_lower_bound(model: torch.nn.Module, room: memory.Room) -> None:
    """Torch's definitions keep two to four times what kernels need; both grow with the tokens."""
    small, large = (saved_bytes(model, text(model, 2, length)) for length in (32, 64))
    for tokens, found in ((64, small), (128, large)):
        assert 0.25 * found < room.needed(tokens).activations < 0.6 * found
    assert room.needed(128).activations == 2 * room.needed(64).activations


def test_recomputation_keeps_what_enters_the_layers(room: memory.Room) -> None:
    config = mixed_config("kdkm")
    model = LatentMoEForConditionalGeneration(config).train()
    checkpoint_activations(model)
    text_config = config.text_config
    work = Work(1, checkpointing="full", width=4)
    kept = activation_bytes(text_config, work)
    again = max(layer_bytes(text_config, i, work) for i in range(text_config.num_hidden_layers))
    model.get_input_embeddings().requires_grad_(True)
    found = saved_bytes(model, text(model, 2, 64)) / 128
    # at either end of the layers
    snapshots = math.ceil(text_config.num_hidden_layers / text_config.attn_res_block_size)
    ends = (7 + snapshots) * text_config.hidden_size * 4
    assert 0.4 * found < kept - again - ends < 1.1 * found
    room.config, room.offload = text_config, True
    assert room.needed(1).activations == int(again)


def test_a_table_and_a_refusal(room: memory.Room) -> None:
    table = room.check(64, "--batch_size")
    for words in (
        "micro-batches of 64 tokens",
        "experts of its share",
        "moments of AdamW",
        "activations",
        "logits",
        "in all",
    ):
        assert words in table
    room.memory = room.fixed.total + room.needed(100).activations
    with pytest.raises(
        ValueError, match=r"a step needs at least .* lower --batch_size, to at most [89]. tokens.*--gradient_ch"
    ):
        room.check(1000, "--batch_size")
    assert room.most_rows(10, limit=100) == 8 and room.most_rows(10, limit=4) == 4 and room.most_rows(1000, 9) == 1
    room.memory = room.fixed.total // 2
    with pytest.raises(ValueError, match="most of it is weights: use more devices"):
        room.check(64, "--batch_size")


def test_a_run_that_cannot_fit_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "least_memory", lambda device: 3 * 2**20)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1?", "completion": "2"}\n' * 4)
    command = ["--model", str(small), "--dataset", str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "run")]
    assert script.main(command) == 2
    assert "error: a step needs at least 0.0" in capsys.readouterr().err


def test_a_cpu_cannot_tell_what_fits() -> None:
    with pytest.raises(ValueError, match="--batch_size auto needs an accelerator"):
        micro_batches.check_device(torch.device("cpu"))


@pytest.mark.parametrize("most", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.77, 1.0])
def test_the_largest_that_fits(most: int, share: float) -> None:
    limit, tried = max(1, math.floor(share * most)), []

    def fits(rows: int) -> bool:
        tried.append(rows)
        return rows <= limit

    found = micro_batches.largest(fits, most)
    assert found <= limit <= found + max(1, found // 8) and len(tried) <= 1 + math.log2(most) + 1
    with pytest.raises(ValueError, match="--batch_size auto: not even one sample"):
        micro_batches.largest(lambda rows: False, most)


def samples(config: LatentMoEConfig, lengths: list[int], images: dict[int, list[list[int]]]) -> list[Sample]:
    """Text, with pictures of these grids of patches at the start of some."""
    generator, found = torch.Generator().manual_seed(0), []
    for i, length in enumerate(lengths):
        ids = torch.randint(10, 200, (length,), generator=generator)
        grids = torch.tensor(images.get(i, []), dtype=torch.int64).view(-1, 3)
        patches = int(grids.prod(1).sum())
        ids[1 : 1 + patches // 4] = config.media_placeholder_token_id
        labels = ids.masked_fill(ids == config.media_placeholder_token_id, IGNORE)
        pixels = torch.randn(patches, 3, 14, 14, generator=generator) if patches else None
        found.append(Sample(ids, labels, pixels, grids if patches else None))
    return found


@pytest.mark.parametrize(("make", "parts"), [(lambda some: pad(some, 0), 2), (lambda some: pad(some, 0), 8), (pack, 4)])
def test_parts_of_a_micro_batch(model: torch.nn.Module, make, parts: int) -> None:
    """The same tokens, pictures with their rows, and the same gradients; padding where there are not enough rows."""
    config = model.config
    batch = make(samples(config, [20, 9, 14, 6, 11], {1: [[1, 2, 2]], 2: [[1, 2, 4], [1, 2, 2]], 4: [[1, 4, 2]]}))
    pieces = micro_batches.split(batch, parts, config)
    assert len(pieces) == parts and sum(map(count_tokens, pieces)) == count_tokens(batch) == 60
    if parts == 8:
        assert sum(count_tokens(piece) == 0 for piece in pieces) == 3
    with_pictures = [piece for piece in pieces if "pixel_values" in piece]
    assert torch.equal(torch.cat([piece["pixel_values"] for piece in with_pictures]), batch["pixel_values"])
    expected, found = gradients(model, batch), gradients(model, *pieces)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name
    assert micro_batches.split(batch, 1, config) == [batch]
