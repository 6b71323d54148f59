"""Packed rows are their documents alone: forward, backward, loss, routing; nothing leaks and padding never counts."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from .models import close, mixed_config, random_model

LENGTHS = [9, 1, 17, 3]
MIXES = ["k", "m", "d", "kdks", "mdksm"]


def documents(seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 250, (1, n), generator=generator) for n in LENGTHS]


def pack(docs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    borders = torch.tensor([0, *(d.shape[1] for d in docs)]).cumsum(0)
    return {"input_ids": torch.cat(docs, dim=1), "cu_seqlens": borders.to(torch.int32)}


@torch.no_grad()
@pytest.mark.parametrize("kinds", MIXES)
def test_packed_forward_equals_documents_alone(kinds):
    model, docs = random_model(mixed_config(kinds)), documents()
    alone = torch.cat([model(input_ids=d).logits for d in docs], dim=1)
    row = pack(docs)
    close(model(**row).logits, alone)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    close(model(input_ids=row["input_ids"], position_ids=positions).logits, alone)
    ones = torch.ones_like(row["input_ids"])
    close(model(**row, attention_mask=ones).logits, alone)
    flattened = {"input_ids": row["input_ids"], "cu_seq_lens_q": row["cu_seqlens"]}
    close(model(**flattened).logits, alone)


@pytest.mark.parametrize("kinds", ["kdks", "mdksm"])
def test_packed_backward_and_loss_equal_documents_alone(kinds):
    """Loss sums over documents; the first token of a document is not predicted from the document before."""
    model, docs = random_model(mixed_config(kinds)).train(), documents()
    tokens = sum(LENGTHS) - len(LENGTHS)
    loss = sum(
        model(input_ids=d, labels=d, num_items_in_batch=tokens).loss for d in docs if d.shape[1] > 1
    )  # a document of one token predicts nothing
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    row = pack(docs)
    packed_loss = model(**row, labels=row["input_ids"]).loss
    packed_loss.backward()
    assert abs(packed_loss.item() - loss.item()) < 1e-5
    largest = max(g.abs().max() for g in expected.values())
    for name, param in model.named_parameters():
        if name in expected:
            assert (param.grad - expected[name]).abs().max() <= 1e-4 * largest, name


@pytest.mark.parametrize("train", [False, True])
def test_changing_a_document_leaves_its_successor_bit_identical(train):
    """Logits from the first token on, and gradients of a loss on the second document."""
    model = random_model(mixed_config("kdks")).train(train)
    first, second = torch.randint(0, 250, (1, 20)), torch.randint(0, 250, (1, 15))
    results = []
    for replaced in (first, 249 - first):
        row = pack([replaced, second])
        labels = row["input_ids"].clone()
        labels[:, :20] = -100
        model.zero_grad()
        out = model(**row, labels=labels)
        out.loss.backward()
        grad = model.get_input_embeddings().weight.grad
        results.append((out.logits[:, 20:].detach(), out.loss.detach(), grad[second[0].unique()].clone()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_empty_documents_are_merged():
    """Boundaries doubled by sequence sharding: [0, 5, 5, 8, 8] is two documents, and nothing becomes NaN."""
    model, x = random_model(mixed_config("kdks")), torch.randint(0, 250, (1, 8))
    doubled = model(input_ids=x, cu_seqlens=torch.tensor([0, 5, 5, 8, 8])).logits
    assert torch.equal(doubled, model(input_ids=x, cu_seqlens=torch.tensor([0, 5, 8])).logits)
    close(doubled[:, 5:], model(input_ids=x[:, 5:]).logits)


def test_padded_packed_row_counts_no_padding():
    """Packed boundaries and a padding mask together: routing, loss and gradients are those without padding."""
    model = random_model(mixed_config("kdks")).train()
    docs = documents()
    row = pack(docs)
    bare = model(**row, labels=row["input_ids"])
    bare.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    real = row["input_ids"].shape[1]
    tail = torch.full((1, 6), model.config.pad_token_id)
    ids = torch.cat([row["input_ids"], tail], dim=1)
    mask = torch.cat([torch.ones(1, real), torch.zeros(1, 6)], dim=1).long()
    borders = torch.cat([row["cu_seqlens"], torch.tensor([real + 6], dtype=torch.int32)])
    labels = ids.masked_fill(mask == 0, -100)
    padded = model(input_ids=ids, cu_seqlens=borders, attention_mask=mask, labels=labels, output_router_logits=True)
    padded.loss.backward()
    assert torch.equal(padded.expert_load, bare.expert_load)
    assert int(bare.expert_load[0].sum()) == real * model.config.text_config.num_experts_per_token
    assert abs(padded.loss.item() - bare.loss.item()) < 1e-6
    close(padded.logits[:, :real], bare.logits)
    largest = max(g.abs().max() for g in expected.values())
    for name, param in model.named_parameters():
        if name in expected:
            assert (param.grad - expected[name]).abs().max() <= 1e-4 * largest, name


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cu_seqlens": [0, 5]}, "must rise from 0 to the row length 8"),
        ({"cu_seqlens": [1, 8]}, "must rise from 0"),
        ({"cu_seqlens": [0, 6, 5, 8]}, "must rise from 0"),
        ({"cu_seqlens": [0, 5, 8], "use_cache": True}, "packed rows cannot be cached"),
        ({"seq_idx": [[0, 0, 0, 1, 1, 1, 1, 1]]}, "pass the document borders as cu_seqlens"),
        ({"attention_mask": [[1, 1]]}, "attention_mask: shape"),
        ({"inputs_embeds": [[0.0]]}, "exactly one"),
    ],
)
def test_contradictory_boundaries_raise(kwargs, message):
    model = random_model(mixed_config("k"))
    tensors = {k: v if isinstance(v, bool) else torch.tensor(v) for k, v in kwargs.items()}
    with pytest.raises(ValueError, match=message):
        model.language_model(input_ids=torch.zeros(1, 8, dtype=torch.long), **tensors)


def test_several_rows_with_boundaries_raise():
    model = random_model(mixed_config("k"))
    with pytest.raises(ValueError, match="packed into one row, got 2 rows"):
        model(input_ids=torch.zeros(2, 8, dtype=torch.long), cu_seqlens=torch.tensor([0, 4, 8]))


def test_isolation_holds_with_lora_in_training():
    """The second document's logits and the adapters' gradients from it do not see the first, bit for bit."""
    model = random_model(mixed_config("kdks"))
    targets = {"target_modules": ["q_proj", "o_proj"], "target_parameters": ["experts.gate_up_proj"]}
    model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **targets)).train()
    first, second = torch.randint(0, 250, (1, 20)), torch.randint(0, 250, (1, 15))
    logits, gradients = [], []
    for replaced in (first, 249 - first):
        row = pack([replaced, second])
        labels = torch.cat([torch.full_like(first, -100), second], dim=1)
        output = model(**row, labels=labels)
        output.loss.backward()
        logits.append(output.logits[:, 20:])
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
        model.zero_grad()
    assert torch.equal(*logits)
    assert len(gradients[0]) > 8 and any(grad.any() for grad in gradients[0])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


@torch.no_grad()
def test_packed_documents_with_several_images():
    """Images of a packed row go to their own documents, in order."""
    config = mixed_config("kdks", vision=True)
    model, media = random_model(config), config.media_placeholder_token_id
    docs = [[1, *[media] * 4, 2, *[media] * 2, 3], [4, 5, 6], [*[media] * 4, 7]]
    grids = torch.tensor([[1, 4, 4], [1, 2, 4], [1, 4, 4]])
    patches = torch.randn(40, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    alone = [
        model(input_ids=torch.tensor([docs[0]]), pixel_values=patches[:24], grid_thws=grids[:2]).logits,
        model(input_ids=torch.tensor([docs[1]])).logits,
        model(input_ids=torch.tensor([docs[2]]), pixel_values=patches[24:], grid_thws=grids[2:]).logits,
    ]
    row = pack([torch.tensor([d]) for d in docs])
    close(model(**row, pixel_values=patches, grid_thws=grids).logits, torch.cat(alone, dim=1))


def test_padding_carries_no_loss_and_no_labels_give_zero():
    model, x = random_model(mixed_config("kd")), torch.randint(0, 250, (2, 12))
    mask = torch.ones_like(x)
    mask[0, 8:] = 0
    clean = x.masked_fill(mask == 0, -100)
    losses = [model(input_ids=x, attention_mask=mask, labels=labels).loss for labels in (x, clean)]
    assert torch.equal(*losses)
    none = model(input_ids=x, labels=torch.full_like(x, -100)).loss
    none.backward()
    assert none == 0


def test_a_batch_of_padding_keeps_every_parameter_in_the_graph():
    model = random_model(mixed_config("kd", experts=0)).train()
    x = torch.zeros(2, 6, dtype=torch.long)
    model(input_ids=x, attention_mask=torch.zeros_like(x)).logits.sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None and ".indexer." not in name}
    # The first layer has nothing to mix: its mixture is never read, whatever the batch.
    first = "language_model.model.layers.0.self_attention_res_"
    assert without == {f"{first}norm.weight", f"{first}proj.weight"}


def test_positions_that_fit_no_document_raise():
    model, x = random_model(mixed_config("k")), torch.zeros(1, 6, dtype=torch.long)
    with pytest.raises(ValueError, match="position_ids: must count up"):
        model(input_ids=x, position_ids=torch.tensor([[0, 1, 1, 1, 2, 3]]))
    with pytest.raises(ValueError, match="not additive values"):
        model(input_ids=x, attention_mask=torch.tensor([[0.0, 0.0, -1e9, 0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("padded", [False, True])
def test_autocast_keeps_what_must_stay_fp32(padded):
    """bf16 autocast over fp32 weights: finite, close to fp32, and backward works."""
    model, x = random_model(mixed_config("kdks")).train(), torch.randint(0, 250, (2, 20))
    mask = torch.ones_like(x)
    if padded:
        mask[0, :6] = 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(input_ids=x, attention_mask=mask, labels=x)
    out.loss.backward()
    exact = model(input_ids=x, attention_mask=mask, labels=x).loss
    assert abs(out.loss - exact) < 0.1 * exact
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
