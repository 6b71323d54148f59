"""The shipped tiny model, and the script that made it."""

import ast
import importlib.util
import json
import math
import random
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

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
    return model.eval(), LatentMoEProcessor.from_pretrained(tiny)


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


def test_answers_about_unseen_shapes(make_tiny, shipped):
    model, processor = shipped
    scores = make_tiny.accuracy(model, processor, seed=1, samples=240, batch_size=80)
    assert scores["shapes"] >= 0.9, scores


def test_selection_is_active_on_an_ordinary_question(make_tiny, shipped):
    model, processor = shipped
    image, turns, _ = next(found for i in range(100) if (found := make_tiny.sample(0, "unseen", i, 84))[2] == "shapes")
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
    for index in chosen:
        assert index.shape == (1, length, topk)
        # the last query leaves keys out
        assert len(set(index[0, -1].tolist())) == topk


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
    """A filled shape has its colour at its place, and an empty ninth has none."""
    checked = 0
    for i in range(300):
        rng = random.Random(i)
        image, turns = make_tiny.shapes(rng, 112)
        pixels = np.asarray(image, dtype=float)
        for question, answer in turns:
            if not question.startswith("What is at the ") or answer == "nothing":
                continue
            place = make_tiny.PLACES.index(question.removeprefix("What is at the ").removesuffix("?"))
            colour = np.array(make_tiny.COLOURS[answer.split()[1]])
            row, column = place // 3 * 37, place % 3 * 37
            distance = np.abs(pixels[row : row + 38, column : column + 38] - colour).max(-1)
            assert (distance < 40).sum() >= 20, (i, question, answer)
            checked += 1
    assert checked > 20


def test_questions_about_things(make_tiny):
    red = make_tiny.Thing("red", "circle", 0, (0.2, 0.2), True)
    blue = make_tiny.Thing("blue", "star", 5, (0.8, 0.5), False)
    things = [red, blue]
    seen = set()
    for i in range(200):
        rng = random.Random(i)
        seen |= {ask(rng, things) for ask in make_tiny.SHAPE_QUESTIONS}
    expected = {
        ("What colour is the star?", "blue"),
        ("What shape is at the top left?", "circle"),
        ("How many shapes are there?", "two"),
        ("How many red shapes are there?", "one"),
        ("How many green shapes are there?", "zero"),
        ("Where is the blue star?", "right"),
        ("What is at the right?", "a blue star"),
        ("What is at the bottom?", "nothing"),
        ("Is the red circle filled?", "yes"),
        ("Is the blue star filled?", "no"),
        ("Is the red circle left of the blue star?", "yes"),
        ("Is the red circle above the blue star?", "yes"),
        ("Is the blue star left of the red circle?", "no"),
        ("Describe the picture.", "a red circle at the top left, a blue star at the right"),
    }
    assert expected <= seen
    answers = {}
    for question, answer in seen:
        assert answers.setdefault(question, answer) == answer


def test_ink_is_counted_in_rows_and_columns(make_tiny):
    ink = np.zeros((56, 56), dtype=np.uint8)
    ink[7:14, 21:56] = 255  # second row, from the fourth cell on
    ink[7:14, 21:28] = 128
    turns = set()
    for i in range(100):
        turns |= set(make_tiny.ink_turns(random.Random(i), ink))
    assert len(turns) == 16
    assert ("Show row 2.", "0 0 0 2 4 4 4 4") in turns
    assert ("Show row 1.", "0 0 0 0 0 0 0 0") in turns
    assert ("Show column 4.", "0 2 0 0 0 0 0 0") in turns


def test_trace_passes_only_the_named_ninths(make_tiny):
    for i in range(200):
        canvas = make_tiny.Canvas(84, "L", 0)
        (_, path), (_, ends) = make_tiny.trace(random.Random(i), canvas, 0.04)
        places = [make_tiny.PLACES.index(name) for name in path.split(", ")]
        assert len(set(places)) == len(places)
        assert ends == f"{make_tiny.PLACES[places[0]]} and {make_tiny.PLACES[places[-1]]}"
        assert places[0] < places[-1]
        for here, there in pairwise(places):
            middle = ((here % 3 + there % 3) / 2, (here // 3 + there // 3) / 2)
            assert (
                not all(x.is_integer() for x in middle) or math.dist((here % 3, here // 3), (there % 3, there // 3)) < 2
            )


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
        k, _ = attention._expand(torch.cat([attention.kv_a_layernorm(latent), extra], dim=-1))
        own = torch.nn.functional.scaled_dot_product_attention(
            q, k, spelled, attn_mask=documents.attention_mask_BTS[:, None], scale=attention.scale
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
    packed = make_tiny.pack_experts(model, make_tiny.make_config(processor, True, 32))
    assert_packed(packed)
    before, after = model.state_dict(), packed.state_dict()
    for name, weight in after.items():
        if ".experts." not in name:
            torch.testing.assert_close(weight.double(), before[name].double(), rtol=1e-6, atol=1e-7)
    assert packed.language_model.model.layers[1].self_attn.indexer.topk == 32


@pytest.mark.slow
def test_script_runs_from_start_to_end(make_tiny, tmp_path, monkeypatch, capsys):
    out = tmp_path / "model"
    arguments = ["--out", str(out), "--steps", "2", "--recovery-steps", "1", "--batch-size", "4"]
    monkeypatch.setattr(sys, "argv", ["make_tiny.py", *arguments, "--eval-samples", "4", "--workers", "1"])
    make_tiny.main()
    assert "4 shards" in capsys.readouterr().out
    assert_packed(LatentMoEForConditionalGeneration.from_pretrained(out))
    with pytest.raises(ValueError, match=r"--out .* already exists"):
        make_tiny.main()
