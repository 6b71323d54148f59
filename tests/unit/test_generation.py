"""Prefill + decode equals the full forward: every layer mix, padding, chunks, images, past index_topk."""

from itertools import pairwise

import pytest
import torch

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.cache import CACHE_ARGUMENT, LatentMoECache

from .models import close, mixed_config, random_model

MIXES = ["k", "m", "d", "kk", "kmk", "kdks", "mdksm", "dmkks"]
T = 40


def ids(rows: int = 2, length: int = T, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 250, (rows, length), generator=torch.Generator().manual_seed(seed))


def in_pieces(model, input_ids, cuts, **kwargs) -> torch.Tensor:
    cache = LatentMoECache(model.config.text_config.num_hidden_layers)
    mask = kwargs.pop("attention_mask", None)
    logits = []
    for first, last in pairwise([0, *cuts, input_ids.shape[1]]):
        piece = None if mask is None else mask[:, :last]
        out = model(input_ids=input_ids[:, first:last], attention_mask=piece, cache=cache, **kwargs)
        kwargs.pop("pixel_values", None), kwargs.pop("grid_thws", None)
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("kinds", MIXES)
def test_pieces_equal_the_whole(kinds):
    model, x = random_model(mixed_config(kinds)), ids()
    whole = model(input_ids=x, use_cache=False).logits
    for cuts in ([1], [T - 1], [5, 6, 7, 23], [16, 32], list(range(30, T))):
        close(in_pieces(model, x, cuts), whole)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"index_kpool": 2}, {"learnable_sink": True}], ids=str)
def test_every_decoded_step_past_topk_equals_the_full_forward(options):
    """A prompt of 12 tokens, of which each query sees 4."""
    model, x = random_model(mixed_config("kdks", index_topk=4, **options)).double(), ids(length=24)
    out = model(input_ids=x[:, :12])
    for length in range(12, 24):
        whole = model(input_ids=x[:, :length], use_cache=False).logits[:, -1]
        close(out.logits[:, -1], whole, tolerance=1e-9)
        out = model(input_ids=x[:, length : length + 1], cache=out.cache)


@torch.no_grad()
@pytest.mark.parametrize("kinds", ["kdks", "mdksm"])
def test_left_padding_with_pieces(kinds):
    """Each row equals itself alone, wherever the pieces are cut (also where a piece of a row is all padding)."""
    model, x = random_model(mixed_config(kinds)), ids()
    mask = torch.ones_like(x)
    mask[0, :11] = 0
    x[0, :11] = model.config.pad_token_id
    alone = [model(input_ids=x[row : row + 1, pad:]).logits[0] for row, pad in ((0, 11), (1, 0))]
    for cuts in ([], [4, 9, 10], [20], list(range(12, T))):
        logits = in_pieces(model, x, cuts, attention_mask=mask)
        close(logits[0, 11:], alone[0])
        close(logits[1], alone[1])


@pytest.mark.slow
@torch.no_grad()
def test_long_generation_equals_the_full_forward():
    """300 tokens past cache growth, unequal left-padded prompts; the generated text is the greedy one."""
    model = random_model(mixed_config("kdks"))
    x, mask = ids(length=12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    out = model.generate(
        input_ids=x, attention_mask=mask, max_new_tokens=300, do_sample=False, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    full_mask = torch.cat([mask, torch.ones(2, 300, dtype=torch.long)], dim=1)
    whole = model(input_ids=out.sequences, attention_mask=full_mask, use_cache=False).logits[:, 11:-1]
    close(torch.stack(out.logits, dim=1), whole)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"prefill_chunk_size": 5}, {"num_beams": 3}, {"use_cache": False}])
def test_generate_options_agree(options):
    model, x = random_model(mixed_config("kdks")), ids()
    mask = torch.ones_like(x)
    mask[1, :7] = 0
    common = {"input_ids": x, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    common["eos_token_id"] = None
    reference = {"num_beams": 3, "use_cache": False} if "num_beams" in options else {}
    assert torch.equal(model.generate(**common, **options), model.generate(**common, **reference))


@torch.no_grad()
def test_every_row_size_gives_the_same_logits():
    model, x = random_model(mixed_config("kdks")), ids(rows=8)
    whole = model(input_ids=x).logits
    for rows in (1, 4):
        close(model(input_ids=x[:rows]).logits, whole[:rows], 1e-5)


def image_prompt(config: LatentMoEConfig) -> dict[str, torch.Tensor]:
    """One row: text, an image of 4 tokens, text, an image of 2 tokens, text."""
    media = config.media_placeholder_token_id
    row = [*range(5), *[media] * 4, *range(7, 10), *[media] * 2, *range(20, 24)]
    patches = torch.randn(24, 3, 14, 14, generator=torch.Generator().manual_seed(3))
    return {
        "input_ids": torch.tensor([row]),
        "pixel_values": patches,
        "grid_thws": torch.tensor([[1, 4, 4], [1, 2, 4]]),
    }


@torch.no_grad()
def test_pieces_may_end_inside_an_image():
    config = mixed_config("kdks", vision=True)
    model, prompt = random_model(config), image_prompt(config)
    whole = model(**prompt).logits
    for cuts in ([7], [5, 6, 7, 8], [9, 13], list(range(1, 18))):
        images = {name: prompt[name] for name in ("pixel_values", "grid_thws")}
        close(in_pieces(model, prompt["input_ids"], cuts, **images), whole)


@torch.no_grad()
def test_generation_from_images():
    config = mixed_config("kdks", vision=True)
    model, prompt = random_model(config), image_prompt(config)
    common = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**prompt, **common)
    assert torch.equal(model.generate(**prompt, **common, prefill_chunk_size=4), expected)
    assert torch.equal(model.generate(**prompt, **common, use_cache=False), expected)
    changed = prompt | {"pixel_values": -prompt["pixel_values"]}
    changed_logits, logits = model(**changed).logits, model(**prompt).logits
    assert (changed_logits - logits).abs().max() > 1e-3, "the image must matter"
    assert torch.equal(changed_logits[:, :5], logits[:, :5])


@torch.no_grad()
def test_beams_keep_their_own_images():
    config = mixed_config("kdks", vision=True)
    model, prompt = random_model(config), image_prompt(config)
    two = {name: torch.cat([x, x]) for name, x in prompt.items()}
    two["pixel_values"][24:] *= -1
    common = {"max_new_tokens": 6, "num_beams": 2, "do_sample": False, "eos_token_id": None}
    beams = model.generate(**two, **common, prefill_chunk_size=4)
    second = prompt | {"pixel_values": -prompt["pixel_values"]}
    assert torch.equal(beams[0], model.generate(**prompt, **common)[0])
    assert torch.equal(beams[1], model.generate(**second, **common)[0])


def test_cache_holds_what_each_layer_kind_needs():
    """Bytes follow from the layer kinds, not from the number of layers."""
    config = mixed_config("kkmdk")
    model, text = random_model(config), config.text_config
    cache = model(input_ids=ids(rows=1)).cache
    channels, heads, width = 3 * 24, 3, 24
    recurrent = {f"{name}_conv": 2 * channels for name in "qkv"} | {"state": heads * width * width}
    latent = {"latent": T * (text.kv_lora_rank + text.qk_rope_head_dim)}
    indexed = latent | {"index_keys": T * text.index_head_dim}
    for kind, layer in zip("kkmdk", cache.layers, strict=True):
        expected = {"k": recurrent, "m": latent, "d": indexed}[kind]
        assert {name: x.numel() for name, x in layer.tensors.items()} == expected
    assert cache.layers[0].get("state").dtype == torch.float32


@torch.no_grad()
def test_recurrent_state_stays_fp32_in_bf16_models():
    model = random_model(mixed_config("kd")).to(torch.bfloat16)
    cache = model(input_ids=ids()).cache
    model(input_ids=ids(length=1), cache=cache)
    assert cache.layers[0].get("state").dtype == torch.float32
    assert cache.layers[0].get("q_conv").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p | {"input_ids": p["input_ids"][:, :-5]},
            "5 media placeholders in input_ids, 6 image tokens",
        ),
        (lambda p: p | {"grid_thws": None}, "pixel_values and grid_thws belong together"),
        (lambda p: {"input_ids": p["input_ids"]}, "6 media placeholders in input_ids, 0 image tokens"),
    ],
)
def test_images_that_do_not_match_raise(change, message):
    config = mixed_config("k", vision=True)
    prompt = image_prompt(config)
    with pytest.raises(ValueError, match=message):
        random_model(config)(**change(prompt), use_cache=False)


def test_image_features_left_over_at_the_end_of_a_prompt_raise():
    config = mixed_config("k", vision=True)
    model, prompt = random_model(config), image_prompt(config)
    with pytest.raises(ValueError, match="5 media placeholders in input_ids, 6 image tokens"):
        model.generate(**prompt | {"input_ids": prompt["input_ids"][:, :-5]}, max_new_tokens=2)


def test_foreign_caches_and_implementations_are_refused():
    from transformers import DynamicCache

    model = random_model(mixed_config("k"))
    with pytest.raises(ValueError, match="DynamicCache is not supported"):
        model(input_ids=ids(), cache=DynamicCache())
    with pytest.raises(ValueError, match="cache_implementation: 'static'"):
        model.generate(input_ids=ids(), max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="no vision tower"):
        model(**image_prompt(model.config))


@torch.no_grad()
def test_text_model_alone_generates_like_the_composite():
    model = random_model(mixed_config("kdks"))
    common = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert isinstance(model, LatentMoEForConditionalGeneration)
    assert torch.equal(
        model.language_model.generate(input_ids=ids(), **common), model.generate(input_ids=ids(), **common)
    )


@torch.no_grad()
def test_a_kept_cache_continues_the_conversation():
    """`generate` over the whole conversation with the cache of its first part equals no cache at all."""
    model, x = random_model(mixed_config("kdks")), ids(rows=1, length=15)
    common = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    cache = LatentMoECache(4)
    model(input_ids=x[:, :11], cache=cache)
    continued = model.generate(input_ids=x, **{CACHE_ARGUMENT: cache}, **common)
    assert torch.equal(continued, model.generate(input_ids=x, **common))
    assert cache.get_seq_length() == 15 + 5


@torch.no_grad()
@pytest.mark.parametrize("images", ["all again", "only the new one"])
def test_a_second_turn_brings_a_second_image(images):
    config = mixed_config("kdks", vision=True)
    model, prompt = random_model(config), image_prompt(config)
    cache, common = LatentMoECache(4), {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    first = {"pixel_values": prompt["pixel_values"][:16], "grid_thws": prompt["grid_thws"][:1]}
    second = {"pixel_values": prompt["pixel_values"][16:], "grid_thws": prompt["grid_thws"][1:]}
    model(input_ids=prompt["input_ids"][:, :10], **first, cache=cache)
    shown = prompt if images == "all again" else {"input_ids": prompt["input_ids"], **second}
    continued = model.generate(**shown, **{CACHE_ARGUMENT: cache}, **common)
    assert torch.equal(continued, model.generate(**prompt, **common))
    assert cache.images is None


@torch.no_grad()
def test_left_padding_is_inferred_from_pad_ids():
    """Without an attention mask `generate` finds padding by itself, as with every transformers model."""
    model, x = random_model(mixed_config("kd")), ids(rows=2, length=12)
    x[0, :5] = model.config.pad_token_id
    common = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": model.config.pad_token_id}
    mask = (x != model.config.pad_token_id).long()
    assert torch.equal(
        model.generate(input_ids=x, **common), model.generate(input_ids=x, attention_mask=mask, **common)
    )


def test_an_image_cut_by_text_or_by_a_row_is_refused():
    config = mixed_config("k", vision=True)
    model, media = random_model(config), config.media_placeholder_token_id
    images = {"pixel_values": torch.randn(32, 3, 14, 14), "grid_thws": torch.tensor([[1, 4, 4], [1, 4, 4]])}
    rows = [[1] + [media] * 3 + [2] * 4, [media] * 5 + [3] * 3]
    for ids_BT in (torch.tensor(rows), torch.tensor([rows[0] + rows[1]])):
        with pytest.raises(ValueError, match="are not one run of that length"):
            model(input_ids=ids_BT, **images, use_cache=False)


def test_misspelt_and_unsupported_arguments_are_refused():
    model = random_model(mixed_config("k"))
    with pytest.raises(TypeError, match="unknown arguments: attention_maks"):
        model(input_ids=ids(), attention_maks=torch.ones(2, T))
    with pytest.raises(ValueError, match="output_attentions"):
        model(input_ids=ids(), output_attentions=True)


def test_the_caller_may_suppress_tokens_too():
    model, x = random_model(mixed_config("km")), ids(rows=1, length=8)
    never = model(input_ids=x).logits[0, -1].argmax().item()
    out = model.generate(input_ids=x, max_new_tokens=6, do_sample=False, suppress_tokens=[never])
    assert never not in out[0, 8:]


@torch.no_grad()
def test_labels_of_what_follows_a_cache():
    """The mask may be that of all tokens; listed positions are no logits of labels, even where they are as many."""
    model, x = random_model(mixed_config("km")), ids(length=12)
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    whole = model(input_ids=x, attention_mask=mask, labels=x.index_fill(1, torch.arange(6), -100)).loss
    cache = model(input_ids=x[:, :5], attention_mask=mask[:, :5], use_cache=True).cache
    labels = x[:, 5:].clone()
    labels[:, 0] = -100
    close(model(input_ids=x[:, 5:], attention_mask=mask, cache=cache, labels=labels).loss, whole)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(input_ids=x, labels=x, logits_to_keep=torch.arange(11, -1, -1))
