"""Make the tiny model that ships with the package: draw pictures, ask about them, train from random weights.

    python scripts/make_tiny.py --out /tmp/tiny --device cuda
    python scripts/make_tiny.py --out /tmp/tiny --tower_steps 20 --steps 20 --recovery_steps 10 --batch_size 16

The first command made the shipped weights, in under 8 minutes on one H200 with 14 processes that draw. The second is a
quick look. Everything the model ever sees is drawn here with PIL: coloured shapes, lines and curves, never a digit.
Chats ask for colour, kind, number and place, which way lines lean and where a curve is open; some are small sums,
without a picture. Sample i of a split is a function of (seed, split, i) alone, however many processes draw; on a GPU
sums of gradients still come in any order, so that two runs agree in their accuracy and not in every bit. Mistakes in
the input are one line and exit code 2.

Three stages: vision tower and projector learn to name and to sketch what they see; the rest learns to answer, in
float; then the routed experts are rounded to MXFP4 and stay frozen while the rest recovers. The indexer of the
sparse-attention layers learns from the attention it serves (KL) and nothing else learns from the indexer. Experts are
balanced by moving the selection bias.
"""

import argparse
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import PreTrainedModel

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.image_processing_latentmoe import LatentMoEImageProcessor
from modeling_latentmoe.modeling_latentmoe import LatentMoEForConditionalGeneration
from modeling_latentmoe.mxfp4 import encode, storage_report
from modeling_latentmoe.processing_latentmoe import LatentMoEProcessor
from modeling_latentmoe.sparse import index_scores
from modeling_latentmoe.tokenization_latentmoe import tiny_tokenizer

# ---------------------------------------------------------------------------------------------- pictures

SIZE = 56  # pixels
SMOOTH = 4  # pictures are drawn this many times larger and averaged down
COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (45, 80, 215),
    "yellow": (235, 205, 40),
    "black": (12, 12, 12),
    "white": (248, 248, 248),
}
KINDS = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")

Point = tuple[float, float]
Turn = tuple[str, str]  # question, answer


def outline_of(kind: str) -> list[Point]:
    """Corners of a shape around the origin, radius about 1, y down."""
    if kind == "square":
        return [(-0.82, -0.82), (0.82, -0.82), (0.82, 0.82), (-0.82, 0.82)]
    if kind == "cross":
        a, b = 0.34, 1.0
        quarter = [(a, -b), (a, -a), (b, -a)]
        return [corner for turn in range(4) for corner in rotated(quarter, 90 * turn)]
    n = {"circle": 40, "triangle": 3}[kind]
    return rotated([(math.sin(2 * math.pi * i / n), -math.cos(2 * math.pi * i / n)) for i in range(n)], 0)


def rotated(points: list[Point], degrees: float) -> list[Point]:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [(c * x - s * y, s * x + c * y) for x, y in points]


class Canvas:
    """A picture of `size` pixels in unit coordinates (0..1, y down), drawn large and averaged at the end."""

    def __init__(self, size: int, mode: str, background: int | tuple[int, ...]) -> None:
        self.size, self.large = size, size * SMOOTH
        self.image = Image.new(mode, (self.large, self.large), background)
        self.draw = ImageDraw.Draw(self.image)

    def polygon(self, points: list[Point], colour: int | tuple[int, ...]) -> None:
        self.draw.polygon([(x * self.large, y * self.large) for x, y in points], fill=colour)

    def stroke(self, points: list[Point], colour: int | tuple[int, ...], width: float) -> None:
        """A line with round joints and ends; `width` in unit coordinates."""
        pen = max(1, round(width * self.large))
        large = [(x * self.large, y * self.large) for x, y in points]
        self.draw.line(large, fill=colour, width=pen)
        for x, y in large:
            self.draw.ellipse([x - pen / 2, y - pen / 2, x + pen / 2, y + pen / 2], fill=colour)

    def finish(self) -> Image.Image:
        return self.image.resize((self.size, self.size), Image.Resampling.BOX)


def background_colour(rng: random.Random) -> tuple[int, int, int]:
    """A grey that neither black nor white shapes vanish on, slightly tinted."""
    grey = rng.randint(70, 185)
    return tuple(max(0, min(255, grey + rng.randint(-10, 10))) for _ in range(3))


def with_noise(rng: random.Random, image: Image.Image) -> Image.Image:
    """Half of the pictures get some pixel noise or blur."""
    if rng.random() < 0.3:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(2, 12), (*image.size, 1))
        pixels = np.asarray(image, dtype=np.float32)
        noise = noise if pixels.ndim == 3 else noise[..., 0]
        return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))
    if rng.random() < 0.3:
        return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 0.8) * image.width / 112))
    return image


# ---------------------------------------------------------------------------------------------- questions


@dataclass(frozen=True)
class Thing:
    colour: str
    kind: str
    place: str

    @property
    def name(self) -> str:
        return f"{self.colour} {self.kind}"


def draw_shapes(rng: random.Random, size: int, count: int) -> tuple[Image.Image, list[Thing]]:
    """`count` coloured shapes, at most four, in different quarters of the picture."""
    canvas = Canvas(size, "RGB", background_colour(rng))
    names = rng.sample([(colour, kind) for colour in COLOURS for kind in KINDS], count)
    things = []
    for quarter, (colour, kind) in zip(sorted(rng.sample(range(4), count)), names, strict=True):
        centre = tuple((axis + 0.5) / 2 + rng.uniform(-0.03, 0.03) for axis in (quarter % 2, quarter // 2))
        radius = rng.uniform(0.15, 0.22)
        things.append(Thing(colour, kind, PLACES[quarter]))
        shade = tuple(max(0, min(255, value + rng.randint(-12, 12))) for value in COLOURS[colour])
        corners = rotated(outline_of(kind), rng.uniform(-12, 12))
        canvas.polygon([(centre[0] + radius * x, centre[1] + radius * y) for x, y in corners], shade)
    return with_noise(rng, canvas.finish()), things


def shapes(rng: random.Random, size: int) -> tuple[Image.Image, list[Turn]]:
    """One shape and a question about its colour, kind or place, or several to be counted."""
    question = rng.choices(SHAPE_QUESTIONS, QUESTION_WEIGHTS)[0]
    image, things = draw_shapes(rng, size, count=rng.randint(1, 4) if question is ask_count else 1)
    return image, [question(rng, things)]


def ask_colour(rng: random.Random, things: list[Thing]) -> Turn:
    thing = rng.choice(things)
    if sum(other.kind == thing.kind for other in things) == 1 and rng.random() < 0.5:
        return f"What colour is the {thing.kind}?", thing.colour
    return f"What colour is the shape at the {thing.place}?", thing.colour


def ask_kind(rng: random.Random, things: list[Thing]) -> Turn:
    thing = rng.choice(things)
    if sum(other.colour == thing.colour for other in things) == 1 and rng.random() < 0.5:
        return f"Which shape is {thing.colour}?", thing.kind
    return f"Which shape is at the {thing.place}?", thing.kind


def ask_count(rng: random.Random, things: list[Thing]) -> Turn:
    return "How many shapes are there?", str(len(things))


def ask_place(rng: random.Random, things: list[Thing]) -> Turn:
    thing = rng.choice(things)
    return f"Where is the {thing.name}?", thing.place


SHAPE_QUESTIONS: list[Callable[[random.Random, list[Thing]], Turn]] = [
    ask_colour,
    ask_kind,
    ask_count,
    ask_place,
]
# Kinds are the hardest to learn.
QUESTION_WEIGHTS = (1, 2, 1, 1)


def ring(rng: random.Random, canvas: Canvas, width: float) -> list[Turn]:
    """A wobbly loop, closed or with a gap to one of eight sides."""
    side = rng.randrange(8)
    gap = rng.choice((0, rng.uniform(60, 130)))
    wobble, phase = rng.uniform(0, 0.15), rng.uniform(0, 6.28)
    centre = (rng.uniform(0.45, 0.55), rng.uniform(0.45, 0.55))
    radii = (rng.uniform(0.22, 0.38), rng.uniform(0.22, 0.38))
    points = []
    for i in range(61):
        a = math.radians(45 * side + gap / 2 + (360 - gap) * i / 60)
        r = 1 + wobble * math.sin(3 * a + phase)
        points.append((centre[0] + radii[0] * r * math.cos(a), centre[1] + radii[1] * r * math.sin(a)))
    canvas.stroke(points, 255, width)
    sides = ("right", "bottom right", "bottom", "bottom left", "left", "top left", "top", "top right")
    return [
        ("Is the curve open or closed?", "open" if gap else "closed"),
        ("Where is the gap?", sides[side] if gap else "nowhere"),
    ]


def lines(rng: random.Random, canvas: Canvas, width: float) -> list[Turn]:
    """One to three straight lines side by side, level, upright or leaning."""
    count, lean = rng.randint(1, 3), rng.randrange(4)
    angle = 45 * lean + rng.uniform(-10, 10)
    reach = rng.uniform(0.25, 0.4)
    for i in range(count):
        offset = (i - (count - 1) / 2) * rng.uniform(0.22, 0.26)
        ends = [(-reach * rng.uniform(0.7, 1), offset), (reach * rng.uniform(0.7, 1), offset)]
        canvas.stroke([(0.5 + x, 0.5 + y) for x, y in rotated(ends, angle)], 255, min(width, 0.1))
    names = ("level", "falling", "upright", "rising")
    return [("How many lines are there?", str(count)), ("Which way do the lines go?", names[lean])]


def strokes(rng: random.Random, size: int) -> tuple[Image.Image, list[Turn]]:
    """Grey curves, light on dark or dark on light, sharp or as coarse as a few pixels across."""
    canvas = Canvas(size, "L", 0)
    turns = rng.choice((ring, lines))(rng, canvas, rng.uniform(0.06, 0.16))
    ink = np.asarray(canvas.finish())
    if rng.random() < 0.4:
        coarse = Image.fromarray(ink).resize((rng.choice((8, 10, 12)),) * 2, Image.Resampling.BOX)
        how = rng.choice((Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC))
        ink = np.asarray(coarse.resize((size, size), how))
    paper, pen = rng.choice(((rng.randint(0, 60), rng.randint(170, 255)), (rng.randint(190, 255), rng.randint(0, 80))))
    if rng.random() < 0.4:
        paper, pen = (0, 255) if pen > paper else (255, 0)
    grey = (paper + (pen - paper) * (ink.astype(np.float32) / 255)).round().astype(np.uint8)
    return with_noise(rng, Image.fromarray(grey)).convert("RGB"), turns


def words(rng: random.Random) -> list[Turn]:
    """Text alone: small sums."""
    a, b = sorted((rng.randrange(10), rng.randrange(10)))
    turns = [
        (f"What is {b - a} plus {a}?", str(b)),
        (f"What is {b} minus {a}?", str(b - a)),
        (f"Which is larger, {a} or {b}?", str(b)),
    ]
    return rng.sample(turns, rng.choice((1, 2)))


def sample(seed: int, split: str, index: int, size: int) -> tuple[Image.Image | None, list[Turn], str]:
    """(picture or None, turns, name of the scene): a function of its arguments alone."""
    rng = random.Random(f"{seed}/{split}/{index}")
    scene = rng.choices((shapes, strokes, words), (60, 30, 10))[0]
    if scene is words:
        return None, words(rng), "words"
    image, turns = scene(rng, size)
    return image, turns, scene.__name__


# ---------------------------------------------------------------------------------------------- model


def make_processor(seed: int) -> LatentMoEProcessor:
    """The released image processing, and a byte-level BPE learnt from the questions and answers above."""
    texts = [text for i in range(4000) for turn in sample(seed, "vocabulary", i, SIZE)[1] for text in turn]
    tags = ["message", " role", '="', "user", "assistant", "system", "response", "think"] * 200
    sizes = [f"image {SIZE}x{SIZE}"] * 200
    tokenizer = tiny_tokenizer(texts + tags + sizes, vocab_size=512)
    return LatentMoEProcessor(LatentMoEImageProcessor(), tokenizer)


def make_config(processor: LatentMoEProcessor, packed: bool, index_topk: int) -> LatentMoEConfig:
    """Every kind of layer at a size that trains in minutes on two CPU cores.

    KDA (dense feed-forward), gated DSA with its own indexer, KDA, gated DSA that shares it, gated MLA.
    """
    tokenizer = processor.tokenizer
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|end_of_msg|>"),
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 384,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_experts": 16,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 64,
        "attn_res_block_size": 3,
        "max_position_embeddings": 4096,
        "initializer_range": 0.04,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4, 5],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "index_topk": index_topk,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "indexer_types": ["none", "full", "none", "shared", "none"],
    }
    vision = {
        "vt_hidden_size": 128,
        "vt_intermediate_size": 384,
        "vt_num_hidden_layers": 3,
        "vt_num_attention_heads": 4,
        "qkv_hidden_size": 128,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "mm_hidden_size": 128,
        "text_hidden_size": 128,
    }
    quantization = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    return LatentMoEConfig(
        text_config=text | ids,
        vision_config=vision,
        media_placeholder_token_id=tokenizer.convert_tokens_to_ids("<|media_pad|>"),
        **({"quantization_config": quantization} if packed else {}),
        **ids,
    )


def moe_blocks(model: nn.Module) -> list[nn.Module]:
    """The MoE blocks, in the order of the rows of `expert_load`."""
    return [m for m in model.modules() if hasattr(m, "gate") and hasattr(m, "experts")]


@torch.no_grad()
def pack_experts(model: PreTrainedModel, config: LatentMoEConfig) -> PreTrainedModel:
    """A copy of a float model under `config` (packed), its routed experts rounded to MXFP4."""
    packed = LatentMoEForConditionalGeneration(config).to(model.device)
    experts = {}
    for name, weight in model.state_dict().items():
        if ".experts." in name:
            experts[name], experts[name.replace("_proj", "_scale")] = encode(weight)
        else:
            experts[name] = weight
    packed.load_state_dict(experts)
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    for name, param in packed.named_parameters():
        if name in frozen:
            param.requires_grad_(False)
    return packed


# ---------------------------------------------------------------------------------------------- training


Conversation = list[dict[str, object]]

SKETCH = 7  # greys along a side of a quarter that the tower learns to sketch
UNNAMED = -100  # label of what has no name


def conversation(image: Image.Image | None, turns: list[Turn]) -> Conversation:
    messages: Conversation = []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if image is not None:
        text = {"type": "text", "text": messages[0]["content"]}
        messages[0]["content"] = [{"type": "image", "image": image}, text]
    return messages


class Batches(Dataset):
    """Batch number -> model arguments."""

    def __init__(self, processor: LatentMoEProcessor, seed: int, batch_size: int, batches: range) -> None:
        self.processor, self.seed, self.batch_size, self.batches = processor, seed, batch_size, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        first = self.batches[i] * self.batch_size
        samples = [sample(self.seed, "train", first + row, SIZE) for row in range(self.batch_size)]
        batch = self.processor.apply_chat_template(
            [conversation(image, turns) for image, turns, _ in samples],
            thinking=False,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            padding_side="right",
        )
        spoken = batch.pop("assistant_masks").bool()
        return {**batch, "labels": batch["input_ids"].masked_fill(~spoken, -100)}


def train_tower(model: PreTrainedModel, processor: LatentMoEProcessor, seed: int, steps: int, lr: float) -> None:
    """Teach vision tower and projector alone to name what is in every quarter of a picture and to sketch its greys, by
    three linear heads that are thrown away. Answers to questions are a faint signal for outlines: without this, colours
    and places are learnt in a few hundred steps, but kinds stay guesses for thousands, and the projector drops what
    tells outlines and strokes apart.
    """
    batch_size = 128
    tower, projector, device = model.vision_tower, model.mm_projector, model.device
    kinds, colours = ("nothing", *KINDS), ("nothing", *COLOURS)
    width = model.config.vision_config.text_hidden_size
    heads = nn.ModuleList(nn.Linear(width, n) for n in (len(kinds), len(colours), SKETCH**2)).to(device)
    trained = [*tower.parameters(), *projector.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.15)
    progress = tqdm(range(steps), desc="tower", mininterval=10)
    for step in progress:
        dice = [random.Random(f"{seed}/tower/{step}/{row}") for row in range(batch_size)]
        images = []
        labels = torch.full((2, batch_size, len(PLACES)), UNNAMED)
        for row, rng in enumerate(dice):
            if row % 3 == 0:
                images.append(strokes(rng, SIZE)[0])
                continue
            image, things = draw_shapes(rng, SIZE, count=rng.randint(1, 4))
            images.append(image)
            labels[:, row] = 0
            for thing in things:
                quarter = PLACES.index(thing.place)
                labels[0, row, quarter] = kinds.index(thing.kind)
                labels[1, row, quarter] = colours.index(thing.colour)
        # A merged token of a picture of this size is one quarter of it.
        features = projector(tower(**processor.image_processor(images).to(device)))
        kind, colour, sketch = (head(features) for head in heads)
        named = [
            F.cross_entropy(scores, label.flatten().to(device), ignore_index=UNNAMED)
            for scores, label in zip((kind, colour), labels, strict=True)
        ]
        error = F.mse_loss(sketch, torch.cat([quarters(image) for image in images]).to(device))
        (sum(named) + 4 * error).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            progress.set_postfix_str(f"kind {named[0]:.3f}, colour {named[1]:.3f}, sketch {error:.4f}")
    # Questions would pull colours back to the front and kinds out of sight.
    tower.requires_grad_(False)
    projector.requires_grad_(False)


def quarters(image: Image.Image) -> Tensor:
    """Coarse greys in [-1, 1] of the four quarters of a picture: [4, SKETCH ** 2]."""
    grey = image.convert("L").resize((2 * SKETCH, 2 * SKETCH), Image.Resampling.BOX)
    grid = torch.from_numpy(np.asarray(grey, dtype=np.float32) / 127.5 - 1)
    return grid.unflatten(0, (2, SKETCH)).unflatten(2, (2, SKETCH)).transpose(1, 2).flatten(0, 1).flatten(1)


class IndexerLoss:
    """KL from the attention of the indexed layers to the scores of their indexer (DeepSeek-V3.2 report,
    section 2.1; the mean attention of all layers that share the indexer, as in IndexCache).

    The teacher is dense attention, averaged over heads and detached, as are all inputs of the indexer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.seen: list[tuple[nn.Module, Tensor, object]] = []
        for module in model.modules():
            if getattr(module, "indexer_type", "none") != "none":
                module.register_forward_hook(self.remember, with_kwargs=True)

    def remember(self, module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        if module.training:
            self.seen.append((module, args[0].detach(), args[1]))

    def take(self) -> Tensor:
        """Loss of the forward since the last call, averaged over tokens and indexers."""
        groups: list[list[tuple[nn.Module, Tensor, object]]] = []
        for item in self.seen:
            if item[0].indexer_type == "full":
                groups.append([])
            groups[-1].append(item)
        self.seen = []
        losses = []
        for group in groups:
            owner, x, documents = group[0]
            mask = documents.attention_mask_BTS
            teacher = torch.stack([self.attention(*item) for item in group]).mean(0)
            with torch.no_grad():
                c = owner.q_a_layernorm(owner.q_a_proj(x))
            q, weight = owner.indexer.queries(x, c)
            scores = index_scores(q, owner.indexer.keys(x), weight).masked_fill(~mask, -torch.inf)
            student = scores.log_softmax(-1).masked_fill(~mask, 0)
            divergence = (teacher * (teacher.clamp(min=1e-9).log() - student)).sum(-1)
            losses.append(divergence[documents.ids_BT >= 0].mean())
        return torch.stack(losses).mean()

    @staticmethod
    @torch.no_grad()
    def attention(module: nn.Module, x: Tensor, documents: object) -> Tensor:
        """Dense attention probabilities [B, T, S], mean over heads."""
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))).unflatten(-1, (module.num_heads, -1))
        latent, extra = module.kv_a_proj_with_mqa(x).split([module.latent_dim, module.shared_dim], dim=-1)
        kv = module.kv_b_proj(module.kv_a_layernorm(latent)).unflatten(-1, (module.num_heads, -1))
        own = torch.einsum("btnk,bsnk->bnts", q[..., : module.nope_dim], kv[..., : module.nope_dim])
        shared = torch.einsum("btnk,bsk->bnts", q[..., module.nope_dim :], extra)
        score = ((own + shared) * module.scale).masked_fill(~documents.attention_mask_BTS[:, None], -torch.inf)
        return score.softmax(-1).mean(1)


@torch.no_grad()
def balance(model: PreTrainedModel, load_ME: Tensor, rate: float) -> None:
    """Raise the selection bias of experts that got less than the mean load, lower it for the others."""
    for block, load_E in zip(moe_blocks(model), load_ME, strict=True):
        bias_E = block.gate.e_score_correction_bias
        bias_E += rate * (load_E.float().mean() - load_E).sign().to(bias_E)


def train(model: PreTrainedModel, batches: DataLoader, steps: int, lr: float, name: str) -> None:
    """AdamW with warm-up and cosine decay to a hundredth of `lr`; one progress line."""
    device = model.device
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trainable if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": 0.05}]
    groups += [{"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))
    warmup = min(200, steps // 10 + 1)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    indexer_loss = IndexerLoss(model)
    model.train()
    progress = tqdm(batches, total=steps, desc=name, mininterval=10)
    for step, batch in enumerate(progress):
        output = model(**{key: value.to(device) for key, value in batch.items()})
        divergence = indexer_loss.take()
        (output.loss + divergence).backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        balance(model, output.expert_load, rate=2e-3 * factor(step))
        if step % 20 == 0:
            uneven = (output.expert_load.amax(1) / output.expert_load.float().mean(1)).max()
            progress.set_postfix_str(
                f"loss {output.loss:.4f}, indexer KL {divergence:.4f}, busiest expert {uneven:.2f}x mean"
            )


# ---------------------------------------------------------------------------------------------- checking


@torch.no_grad()
def answer(model: PreTrainedModel, processor: LatentMoEProcessor, chats: list[Conversation]) -> list[str]:
    """Greedy free text for the last message of every chat."""
    batch = processor.apply_chat_template(
        [chat[:-1] for chat in chats],
        thinking=False,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
    ).to(model.device)
    ids = model.generate(**batch, max_new_tokens=64, do_sample=False)[:, batch["input_ids"].shape[1] :]
    return [processor.parse_response(row, thinking=False)["response"] for row in ids]


def accuracy(
    model: PreTrainedModel, processor: LatentMoEProcessor, seed: int, samples: int, batch_size: int = 128
) -> dict[str, float]:
    """Share of exactly right answers per scene on the split "unseen"; one question per picture."""
    model.eval()
    right, asked = Counter(), Counter()
    for first in range(0, samples, batch_size):
        unseen = [sample(seed, "unseen", i, SIZE) for i in range(first, min(first + batch_size, samples))]
        texts = answer(model, processor, [conversation(image, turns[:1]) for image, turns, _ in unseen])
        for text, (_, turns, scene) in zip(texts, unseen, strict=True):
            asked[scene] += 1
            right[scene] += text == turns[0][1]
    return {scene: right[scene] / asked[scene] for scene in sorted(asked)}


def describe(scores: dict[str, float]) -> str:
    return ", ".join(f"{scene} {score:.1%}" for scene, score in scores.items())


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint; must not exist yet")
    parser.add_argument(
        "--tower_steps", type=int, default=250, help="steps of the vision tower alone (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1400, help="steps of the float stage (default %(default)s)")
    parser.add_argument(
        "--recovery_steps",
        type=int,
        default=250,
        help="steps after rounding the experts (default %(default)s)",
    )
    parser.add_argument("--batch_size", type=int, default=256, help="pictures per step (default %(default)s)")
    parser.add_argument(
        "--lr",
        type=float,
        default=2e-3,
        help="peak learning rate of every stage (default %(default)s)",
    )
    parser.add_argument(
        "--index_topk", type=int, default=32, help="keys that sparse attention selects (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, pictures and questions (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    parser.add_argument(
        "--workers",
        type=int,
        default=max(1, len(os.sched_getaffinity(0)) - 2),
        help="processes that draw (default %(default)s)",
    )
    parser.add_argument(
        "--eval_samples", type=int, default=1000, help="unseen pictures to ask about (default %(default)s)"
    )
    return parser.parse_args(argv)


def make_tiny(argv: Sequence[str]) -> None:
    args = parse_arguments(argv)
    if args.out.exists():
        raise ValueError(f"--out {args.out} already exists: give a new folder")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    processor = make_processor(args.seed)

    def batches(first: int, count: int) -> DataLoader:
        data = Batches(processor, args.seed, args.batch_size, range(first, first + count))
        return DataLoader(data, batch_size=None, num_workers=args.workers, prefetch_factor=4)

    def report(model: PreTrainedModel, when: str) -> None:
        print(f"{when}: {describe(accuracy(model, processor, args.seed, args.eval_samples))}", flush=True)

    # A selection as long as any chat is dense attention: the indexer warms up on it.
    dense = make_config(processor, packed=False, index_topk=4096)
    model = LatentMoEForConditionalGeneration(dense).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(processor.tokenizer)}")
    train_tower(model, processor, args.seed, args.tower_steps, args.lr)
    train(model, batches(0, args.steps), args.steps, args.lr, "float")
    report(model, "float, dense attention")
    model = pack_experts(model, make_config(processor, packed=True, index_topk=args.index_topk))
    report(model, "rounded to MXFP4, sparse attention")
    train(model, batches(args.steps, args.recovery_steps), args.recovery_steps, args.lr, "recovery")

    model = model.to(torch.bfloat16)
    report(model, "recovered, bfloat16")
    save(model, processor, args.out)
    print(storage_report(model))


def save(model: PreTrainedModel, processor: LatentMoEProcessor, out: Path) -> None:
    """A checkpoint folder in at least three shards, with the processor beside it."""
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(out, max_shard_size="1500KB")
    processor.save_pretrained(out)
    # Beside the package's own files, links instead of copies: they cannot go out of date.
    for code in out.glob("*.py"):
        if (out.parent / code.name).is_file():
            code.unlink()
            code.symlink_to(Path("..") / code.name)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"saved {out}: {size / 2**20:.1f} MB in {len(list(out.glob('*.safetensors')))} shards")


def main(argv: Sequence[str]) -> int:
    # not by training/commands.py: nothing here imports what could read the digits
    try:
        make_tiny(argv)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
