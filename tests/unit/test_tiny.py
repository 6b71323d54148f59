"""The shipped tiny model, and the script that made it."""

import ast
import importlib.util
import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from modeling_latentmoe.documents import Documents
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.mxfp4 import assert_packed
from modeling_latentmoe.processing_latentmoe import LatentMoEProcessor

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_tiny.py"


@pytest.fixture(scope="module")
def make_tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tiny", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    sys.modules["make_tiny"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def shipped(tiny: Path) -> tuple[LatentMoEForConditionalGeneration, LatentMoEProcessor]:
    model = LatentMoEForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32)
    return model.eval(), LatentMoEProcessor.from_pretrained(tiny, trust_remote_code=True)


# ------------------------------------------------------------------------------------------- shipped model


def test_folder_is_small_and_sharded(tiny: Path):
    # symbolic links to the code do not count twice
    size = sum(file.stat().st_size for file in tiny.iterdir() if not file.is_symlink())
    assert size <= 8 * 2**20
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) >= 3
    assert all((tiny / shard).is_file() for shard in shards)


def test_every_kind_of_layer(shipped):
    model, _ = shipped
    text = model.config.text_config
    assert set(text.layer_types) == {"linear_attention", "full_attention", "indexed_attention"}
    assert set(text.indexer_types) == {"none", "full", "shared"}
    assert not text.is_moe_layer(0) and text.is_moe_layer(1)
    assert text.num_hidden_layers > text.attn_res_block_size
    assert model.config.vision_config is not None
    assert_packed(model)


def test_answers_about_unseen_pictures_and_sums(make_tiny, shipped):
    """Shapes, strokes and text alone: none was forgotten for another."""
    model, processor = shipped
    scores = make_tiny.accuracy(model, processor, seed=1, samples=240, batch_size=80)
    assert set(scores) == {"shapes", "strokes", "words"}
    assert min(scores.values()) >= 0.9, scores


def test_selection_is_active_on_an_ordinary_question(make_tiny, shipped):
    model, processor = shipped
    image, turns, _ = next(found for i in range(100) if (found := make_tiny.sample(0, "unseen", i, 56))[2] == "shapes")
    chosen = []
    for layer in model.language_model.model.layers:
        if getattr(layer.self_attn, "indexer_type", "none") != "none":
            layer.self_attn.register_forward_hook(lambda module, args, output: chosen.append(output[1]))
    batch = processor.apply_chat_template(
        make_tiny.conversation(image, turns[:1]), thinking=False, tokenize=True, return_dict=True
    )
    with torch.no_grad():
        model(**batch)
    topk, length = model.config.text_config.index_topk, batch["input_ids"].shape[1]
    assert topk < length
    assert len(chosen) == 2
    for choice in chosen:
        assert choice.index_Mk.shape == (length, topk)
        # the last query leaves keys out
        assert len(set(choice.index_Mk[-1].tolist())) == topk


# ------------------------------------------------------------------------------------------- the script


def test_no_digit_data_and_no_glyphs():
    tree = ast.parse(SCRIPT.read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported |= {node.module, *(alias.name for alias in node.names)}
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("text", "multiline_text", "load_digits"), ast.unparse(node)
    roots = {name.split(".")[0] for name in imported}
    assert not roots & {"sklearn", "torchvision", "datasets", "matplotlib", "ImageFont"}
    assert not any("training" in name for name in imported)


def test_samples_depend_on_seed_split_and_index_alone(make_tiny):
    def pixels(*arguments):
        image, turns, scene = make_tiny.sample(*arguments)
        return None if image is None else np.asarray(image).tobytes(), turns, scene

    assert pixels(0, "train", 7, 56) == pixels(0, "train", 7, 56)
    others = [(1, "train", 7, 56), (0, "unseen", 7, 56), (0, "train", 8, 56)]
    assert all(pixels(*other) != pixels(0, "train", 7, 56) for other in others)


def test_pictures_show_what_the_answers_say(make_tiny):
    """A shape has its colour in its quarter of the picture, and its outline decides how much of it."""
    covered = {kind: [] for kind in make_tiny.KINDS}
    for i in range(200):
        image, things = make_tiny.draw_shapes(random.Random(i), 112, count=1 + i % 4)
        pixels = np.asarray(image, dtype=float)
        for thing in things:
            place = make_tiny.PLACES.index(thing.place)
            row, column = place // 2 * 56, place % 2 * 56
            colour = np.array(make_tiny.COLOURS[thing.colour])
            distance = np.abs(pixels[row : row + 56, column : column + 56] - colour).max(-1)
            covered[thing.kind].append((distance < 45).mean())
    assert all(min(shares) > 0.03 for shares in covered.values())
    means = {kind: np.mean(shares) for kind, shares in covered.items()}
    assert means["triangle"] < means["circle"] and means["cross"] < means["square"]


def test_questions_about_things(make_tiny):
    things = [make_tiny.Thing("red", "circle", "top left"), make_tiny.Thing("blue", "cross", "bottom right")]
    seen = set()
    for i in range(200):
        rng = random.Random(i)
        seen |= {ask(rng, things) for ask in make_tiny.SHAPE_QUESTIONS}
    assert seen == {
        ("What colour is the circle?", "red"),
        ("What colour is the cross?", "blue"),
        ("What colour is the shape at the top left?", "red"),
        ("What colour is the shape at the bottom right?", "blue"),
        ("Which shape is red?", "circle"),
        ("Which shape is blue?", "cross"),
        ("Which shape is at the top left?", "circle"),
        ("Which shape is at the bottom right?", "cross"),
        ("How many shapes are there?", "2"),
        ("Where is the red circle?", "top left"),
        ("Where is the blue cross?", "bottom right"),
    }


def test_gap_of_a_ring_is_where_the_answer_says(make_tiny):
    sides = ("right", "bottom right", "bottom", "bottom left", "left", "top left", "top", "top right")
    for i in range(100):
        canvas = make_tiny.Canvas(84, "L", 0)
        (_, state), (_, gap) = make_tiny.ring(random.Random(i), canvas, 0.06)
        assert (state == "closed") == (gap == "nowhere")
        ink = np.asarray(canvas.finish()) > 128
        y, x = np.indices(ink.shape) - 41.5
        sector = np.round(np.arctan2(y, x) / (math.pi / 4)).astype(int) % 8
        shares = [ink[sector == k].sum() for k in range(8)]
        assert gap == "nowhere" or np.argmin(shares) == sides.index(gap)


@pytest.fixture(scope="module")
def small(make_tiny):
    processor = make_tiny.make_processor(0)
    torch.manual_seed(0)
    return processor, LatentMoEForConditionalGeneration(make_tiny.make_config(processor, False, 4096)).double()


def test_indexer_loss_trains_the_indexer_only(make_tiny, small):
    processor, model = small
    batch = make_tiny.Batches(processor, 0, 2, range(1))[0]
    loss = make_tiny.IndexerLoss(model.train())
    model(**batch)
    divergence = loss.take()
    divergence.backward()
    assert divergence > 0
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched and all(".indexer." in name for name in touched)
    assert len(touched) == 5
    model.zero_grad()


def test_teacher_is_the_attention_of_the_layer(make_tiny, small):
    _, model = small
    attention = model.language_model.model.layers[1].self_attn
    x = torch.randn(2, 9, 128, dtype=torch.float64)
    documents = Documents(torch.zeros(2, 9, dtype=torch.int64))
    teacher = make_tiny.IndexerLoss.attention(attention, x, documents)
    # Values that name their position turn the layer's own output into its probabilities.
    spelled = torch.eye(9, attention.value_dim, dtype=torch.float64).expand(2, 4, 9, attention.value_dim)
    with torch.no_grad():
        c = attention.q_a_layernorm(attention.q_a_proj(x))
        q = attention.q_b_proj(c).unflatten(-1, (4, -1)).transpose(1, 2)
        latent, extra = attention.kv_a_proj_with_mqa(x).split([attention.latent_dim, attention.shared_dim], dim=-1)
        *parts, _ = attention._expand(torch.cat([attention.kv_a_layernorm(latent), extra], dim=-1))
        own = torch.nn.functional.scaled_dot_product_attention(
            q, torch.cat(parts, dim=-1), spelled, attn_mask=documents.attention_mask_BTS[:, None], scale=attention.scale
        )
    torch.testing.assert_close(teacher, own.mean(1)[..., :9], rtol=0, atol=1e-12)


def test_balancing_moves_the_bias_towards_idle_experts(make_tiny, small):
    _, model = small
    blocks = make_tiny.moe_blocks(model)
    load = torch.full((len(blocks), 16), 5)
    load[:, 3], load[:, 4] = 0, 10
    make_tiny.balance(model, load, rate=0.25)
    for block in blocks:
        bias = block.gate.e_score_correction_bias
        assert bias[3] == 0.25 and bias[4] == -0.25 and bias.count_nonzero() == 2


def test_packing_rounds_the_experts_and_keeps_the_rest(make_tiny, small):
    processor, model = small
    model.vision_tower.requires_grad_(False)
    packed = make_tiny.pack_experts(model, make_tiny.make_config(processor, True, 32))
    assert_packed(packed)
    assert not any(p.requires_grad for p in packed.vision_tower.parameters())
    assert packed.language_model.lm_head.weight.requires_grad
    before, after = model.state_dict(), packed.state_dict()
    for name, weight in after.items():
        if ".experts." not in name:
            torch.testing.assert_close(weight.double(), before[name].double(), rtol=1e-6, atol=1e-7)
    assert packed.language_model.model.layers[1].self_attn.indexer.topk == 32


def test_sketch_of_a_picture_is_its_quarters(make_tiny):
    size = 8 * make_tiny.SKETCH
    pixels = np.zeros((size, size), dtype=np.uint8)
    half = size // 2
    pixels[:half, half:], pixels[half:, :half], pixels[-1, -1] = 255, 51, 255
    sketch = make_tiny.quarters(Image.fromarray(pixels))
    assert sketch.shape == (4, make_tiny.SKETCH**2)
    assert (sketch[0] == -1).all() and (sketch[1] == 1).all()
    torch.testing.assert_close(sketch[2], torch.full_like(sketch[2], -0.6))
    # one of the 16 pixels behind the last grey is white, and greys are bytes
    assert (sketch[3, :-1] == -1).all() and sketch[3, -1].item() == pytest.approx(2 / 16 - 1, abs=1 / 127)


@pytest.mark.slow
def test_tower_learns_from_its_heads(make_tiny):
    """A few steps move the tower and nothing else."""
    processor = make_tiny.make_processor(0)
    torch.manual_seed(0)
    model = LatentMoEForConditionalGeneration(make_tiny.make_config(processor, False, 4096))
    before = {name: p.clone() for name, p in model.named_parameters()}
    make_tiny.train_tower(model, processor, seed=0, steps=4, lr=1e-3)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(name.startswith(("vision_tower.", "mm_projector.")) for name in moved)


@pytest.mark.slow
def test_script_runs_from_start_to_end(make_tiny, tmp_path, capsys):
    out = tmp_path / "model"
    arguments = ["--out", str(out), "--tower_steps", "2", "--steps", "2", "--recovery_steps", "1", "--batch_size", "4"]
    assert make_tiny.main([*arguments, "--eval_samples", "4", "--workers", "1"]) == 0
    assert "3 shards" in capsys.readouterr().out
    assert_packed(LatentMoEForConditionalGeneration.from_pretrained(out))


def test_a_folder_in_use_is_one_line(make_tiny, tmp_path, capsys):
    assert make_tiny.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: --out {tmp_path} already exists: give a new folder\n"
