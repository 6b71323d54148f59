"""Vision tower and projector against golden vectors and an independent float64 definition."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_latentmoe.configuration_latentmoe import LatentMoEVisionConfig
from modeling_latentmoe.vision import TOWER_NORM_EPS, Projector, VisionTower

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden"
CASES = ["two_images", "rgba", "table_size", "video_t3"]


@pytest.fixture(scope="module")
def vectors() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "vision.safetensors")


@pytest.fixture(scope="module")
def golden() -> tuple[LatentMoEVisionConfig, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Config and the weights of tower and projector, under their names on disk without the prefix."""
    config = json.loads((GOLDEN / "checkpoint" / "config.json").read_text())["vision_config"]
    weights = {}
    for shard in sorted((GOLDEN / "checkpoint").glob("*.safetensors")):
        weights |= load_file(shard)
    tower, projector = (
        {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        for prefix in ("vision_tower.", "mm_projector.")
    )
    return LatentMoEVisionConfig(**config), tower, projector


def load(golden, dtype: torch.dtype) -> tuple[VisionTower, Projector]:
    config, tower_weights, projector_weights = golden
    tower, projector = VisionTower(config), Projector(config)
    tower.load_state_dict(tower_weights)
    projector.load_state_dict(projector_weights)
    return tower.to(dtype), projector.to(dtype)


def relative_l2(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


@pytest.mark.parametrize("case", CASES)
def test_fp32_equals_golden(golden, vectors, case):
    tower, projector = load(golden, torch.float32)
    merged = tower(vectors[f"{case}.pixel_values"], vectors[f"{case}.grid_thws"])
    for got, name in ((merged, "tower"), (projector(merged), "projector")):
        want = vectors[f"{case}.fp32.{name}"]
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        # The constant that older torch put in for bf16 would be far outside.
        other = vectors[f"{case}.fp32_alt_eps2^-7.{name}"]
        assert (got - other).abs().max() > 1e-3 * other.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_bf16_is_as_close_as_the_reference_bf16(golden, vectors, case):
    tower, projector = load(golden, torch.bfloat16)
    merged = tower(vectors[f"{case}.pixel_values"], vectors[f"{case}.grid_thws"])
    for got, name in ((merged, "tower"), (projector(merged), "projector")):
        fp32, bf16 = vectors[f"{case}.fp32.{name}"], vectors[f"{case}.bf16.{name}"]
        assert got.dtype == torch.bfloat16
        assert relative_l2(got, fp32) < 1.5 * relative_l2(bf16, fp32)
        assert relative_l2(got, bf16) < 0.015


def small_config(**changes) -> LatentMoEVisionConfig:
    """Sizes that share no value with each other or with the released ones."""
    values = {
        "patch_size": 6,
        "vt_hidden_size": 20,
        "vt_intermediate_size": 28,
        "vt_num_hidden_layers": 3,
        "vt_num_attention_heads": 3,
        "qkv_hidden_size": 24,
        "init_pos_emb_height": 5,
        "init_pos_emb_width": 7,
        "init_pos_emb_time": 6,
        "merge_kernel_size": [3, 2],
        "mm_hidden_size": 20,
        "projector_ln_eps": 0.25,
        "text_hidden_size": 18,
    }
    return LatentMoEVisionConfig(**(values | changes))


def small_tower(config: LatentMoEVisionConfig) -> VisionTower:
    torch.manual_seed(0)
    tower = VisionTower(config).double()
    for name, parameter in tower.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return tower


def pixels(config: LatentMoEVisionConfig, grids: list[tuple[int, int, int]]) -> torch.Tensor:
    patches = sum(math.prod(grid) for grid in grids)
    generator = torch.Generator().manual_seed(1)
    size = (patches, 3, config.patch_size, config.patch_size)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def norm(x, weight, eps):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def reference_item(w: dict, config, patches: torch.Tensor, t: int, h: int, width: int) -> torch.Tensor:
    """One item in float64, rotary pairs as complex numbers, attention as an explicit softmax."""
    heads = config.vt_num_attention_heads
    dim = config.qkv_hidden_size // heads
    conv = torch.nn.functional.conv2d(patches, w["patch_embed.proj.weight"], stride=config.patch_size)
    x = conv.flatten(1)
    table = w["patch_embed.pos_emb.weight"]
    position = torch.empty(t, h, width, x.shape[1], dtype=torch.float64)
    for row in range(h):
        for column in range(width):
            # Half-pixel centres, clamped at the border.
            y = min(max((row + 0.5) * table.shape[0] / h - 0.5, 0), table.shape[0] - 1)
            z = min(max((column + 0.5) * table.shape[1] / width - 0.5, 0), table.shape[1] - 1)
            y0, z0 = int(y), int(z)
            y1, z1 = min(y0 + 1, table.shape[0] - 1), min(z0 + 1, table.shape[1] - 1)
            top = table[y0, z0] * (1 - z + z0) + table[y0, z1] * (z - z0)
            bottom = table[y1, z0] * (1 - z + z0) + table[y1, z1] * (z - z0)
            position[:, row, column] = top * (1 - y + y0) + bottom * (y - y0)
    if t > 1:
        half = x.shape[1] // 2
        for k in range(t):
            angle = torch.tensor([k * 10000 ** (-d / half) for d in range(half)], dtype=torch.float64)
            position[k] += torch.cat([angle.sin(), angle.cos()])
    x = x + position.flatten(0, 2)
    angle = torch.empty(t, h, width, dim // 2, dtype=torch.float64)
    for i in range(dim // 4):
        theta = 10000 ** (-4 * i / dim)
        angle[..., 2 * i] = torch.arange(width, dtype=torch.float64) * theta
        angle[..., 2 * i + 1] = torch.arange(h, dtype=torch.float64)[:, None] * theta
    turn = torch.polar(torch.ones_like(angle), angle).flatten(0, 2)[:, None]
    for b in range(config.vt_num_hidden_layers):
        p = f"encoder.blocks.{b}."
        qkv = norm(x, w[p + "norm0.weight"], TOWER_NORM_EPS) @ w[p + "wqkv.weight"].T
        q, k, v = (part.reshape(-1, heads, dim) for part in qkv.chunk(3, dim=-1))
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.reshape(-1, heads, dim // 2, 2)) * turn).flatten(-2)
            for y in (q, k)
        )
        probabilities = (torch.einsum("inh,jnh->nij", q, k) / math.sqrt(dim)).softmax(-1)
        x = x + torch.einsum("nij,jnh->inh", probabilities, v).flatten(1) @ w[p + "wo.weight"].T
        hidden = norm(x, w[p + "norm1.weight"], TOWER_NORM_EPS) @ w[p + "mlp.fc0.weight"].T
        gelu = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + gelu @ w[p + "mlp.fc1.weight"].T
    x = norm(x, w["encoder.final_layernorm.weight"], TOWER_NORM_EPS).view(t, h, width, -1)
    kh, kw = config.merge_kernel_size
    tokens = [
        torch.stack([x[:, r + i, c + j].mean(0) for i in range(kh) for j in range(kw)])
        for r in range(0, h, kh)
        for c in range(0, width, kw)
    ]
    return torch.stack(tokens)


@pytest.mark.parametrize("grid", [(1, 5, 7), (1, 6, 4), (1, 3, 10), (2, 6, 2), (6, 3, 2)])
def test_tower_equals_float64_definition(grid):
    merge = [1, 1] if grid == (1, 5, 7) else [3, 2]
    config = small_config(merge_kernel_size=merge)
    tower = small_tower(config)
    x = pixels(config, [grid])
    want = reference_item(tower.state_dict(), config, x, *grid)
    got = tower(x, torch.tensor([grid]))
    assert got.shape == (grid[1] * grid[2] // math.prod(merge), math.prod(merge), config.vt_hidden_size)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_rotation_is_computed_above_bf16(golden, vectors):
    tower, _ = load(golden, torch.bfloat16)
    seen = []
    tower.encoder.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[1].dtype))
    tower(vectors["rgba.pixel_values"], vectors["rgba.grid_thws"])
    assert seen == [torch.float32]


def test_projector_equals_definition():
    config = small_config()
    torch.manual_seed(0)
    projector = Projector(config).double()
    merged = torch.randn(5, 6, config.mm_hidden_size, dtype=torch.float64)
    w = projector.state_dict()
    assert sorted(w) == ["post_norm.weight", "proj.0.weight", "proj.2.weight"]
    hidden = merged.reshape(5, -1) @ w["proj.0.weight"].T
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    want = norm(hidden @ w["proj.2.weight"].T, w["post_norm.weight"], config.projector_ln_eps)
    torch.testing.assert_close(projector(merged), want, rtol=0, atol=1e-12)


def test_items_do_not_see_each_other():
    config = small_config()
    tower = small_tower(config)
    grids = [(1, 3, 4), (1, 6, 2), (1, 6, 2), (2, 3, 4), (1, 3, 4)]
    x = pixels(config, grids)
    alone = [
        tower(part, torch.tensor([grid]))
        for part, grid in zip(x.split([math.prod(g) for g in grids]), grids, strict=True)
    ]
    together = tower(x, torch.tensor(grids))
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)
    changed = x.clone()
    changed[:12] += 1
    moved = (tower(changed, torch.tensor(grids)) - together).abs().amax((1, 2))
    assert (moved[:2] > 1e-3).all()
    assert (moved[2:] == 0).all()


def test_no_images_runs_every_layer():
    config = small_config()
    tower, projector = small_tower(config), Projector(config).double()
    empty = torch.zeros(0, 3, config.patch_size, config.patch_size)
    features = projector(tower(empty, torch.zeros(0, 3, dtype=torch.int64)))
    assert features.shape == (0, config.text_hidden_size)
    features.sum().backward()
    for name, parameter in [*tower.named_parameters(), *projector.named_parameters()]:
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_names_are_those_of_the_released_checkpoint():
    config = LatentMoEVisionConfig()
    with torch.device("meta"):
        tower, projector = VisionTower(config), Projector(config)
    shapes = {name: list(w.shape) for name, w in tower.state_dict().items()}
    assert shapes.pop("patch_embed.proj.weight") == [1024, 3, 14, 14]
    assert shapes.pop("patch_embed.pos_emb.weight") == [64, 64, 1024]
    assert shapes.pop("encoder.final_layernorm.weight") == [1024]
    for b in range(27):
        block = {
            "norm0.weight": [1024],
            "norm1.weight": [1024],
            "wqkv.weight": [4608, 1024],
            "wo.weight": [1024, 1536],
            "mlp.fc0.weight": [4096, 1024],
            "mlp.fc1.weight": [1024, 4096],
        }
        for name, shape in block.items():
            assert shapes.pop(f"encoder.blocks.{b}.{name}") == shape
    assert shapes == {}
    assert {name: list(w.shape) for name, w in projector.state_dict().items()} == {
        "proj.0.weight": [4096, 4096],
        "proj.2.weight": [7168, 4096],
        "post_norm.weight": [7168],
    }


def test_position_table_is_resampled_in_its_own_dtype():
    table = small_tower(small_config()).patch_embed.pos_emb.bfloat16()
    got = table.spatial(6, 4)
    assert got.dtype == torch.bfloat16
    want = torch.nn.functional.interpolate(table.weight.permute(2, 0, 1)[None], size=(6, 4), mode="bilinear")
    assert torch.equal(got, want[0].permute(1, 2, 0).flatten(0, 1))


@pytest.mark.parametrize(
    ("grid", "patches", "message"),
    [
        ((1, 4, 4), 16, "grid_thws.*merge_kernel_size"),
        ((7, 3, 2), 42, "grid_thws.*init_pos_emb_time"),
        ((1, 3, 4), 13, "pixel_values has 13 patches, but grid_thws describes 12"),
    ],
)
def test_wrong_input_is_named(grid, patches, message):
    config = small_config()
    x = torch.zeros(patches, 3, config.patch_size, config.patch_size, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        small_tower(config)(x, torch.tensor([grid]))


@pytest.mark.slow
def test_largest_image_fits_in_memory():
    """65536 patches, the limit of the released processor: the attention must not form the [P, P] matrix."""
    config = LatentMoEVisionConfig(
        vt_hidden_size=8, vt_intermediate_size=8, vt_num_hidden_layers=1, vt_num_attention_heads=1,
        qkv_hidden_size=8, mm_hidden_size=8, patch_size=2,
    )  # fmt: skip
    with torch.no_grad():
        out = VisionTower(config)(torch.zeros(65536, 3, 2, 2), torch.tensor([[1, 256, 256]]))
    assert out.shape == (16384, 4, 8)
