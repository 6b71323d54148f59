"""Image preprocessing against golden vectors, an independent loop with other constants, and odd files."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from modeling_latentmoe.image_processing_latentmoe import (
    KIMI_K3_MEDIA_PROC_CFG,
    LatentMoEImageProcessor,
    load_image,
)

GOLDEN = Path(__file__).resolve().parents[1] / "fixtures" / "golden"
SIZES = json.loads((GOLDEN / "preprocess_sizes.json").read_text())
PIXELS = load_file(GOLDEN / "preprocess_pixels.safetensors")
# Nothing here is a released value.
OTHER = {
    **KIMI_K3_MEDIA_PROC_CFG,
    "patch_size": 5,
    "merge_kernel_size": 3,
    "in_patch_limit": 40,
    "patch_limit_on_one_side": 9,
    "image_mean": [0.1, 0.4, 0.7],
    "image_std": [0.3, 0.6, 0.9],
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 3,
        "chessboard_square_on_top_left": False,
        "chessboard_white_value": 200,
        "chessboard_gray_value": 40,
    },
}


def processor_with(limits: dict[str, int]) -> LatentMoEImageProcessor:
    names = ("in_patch_limit", "patch_limit_on_one_side")
    return LatentMoEImageProcessor({**KIMI_K3_MEDIA_PROC_CFG, **{name: limits[name] for name in names}})


GROUPS = [
    ("", SIZES),
    ("lim12_5.", SIZES["images_with_small_limits"]),
    ("lim4_2.", SIZES["rgba_with_limits_4_2"]),
]
PICTURES = [
    pytest.param(prefix, group["limits"], row["image"], id=prefix + row["image"])
    for prefix, group in GROUPS
    for row in group["images"]
    if "image" in row
]


@pytest.mark.parametrize(("prefix", "limits", "name"), PICTURES)
def test_golden_pixels(prefix: str, limits: dict[str, int], name: str) -> None:
    batch = processor_with(limits)(Image.fromarray(PIXELS[f"image.{name}"].numpy()))
    assert torch.equal(batch["pixel_values"], PIXELS[f"{prefix}pixel_values.{name}"])
    assert torch.equal(batch["grid_thws"], PIXELS[f"{prefix}grid_thw.{name}"][None])
    assert batch["pixel_values"].dtype == torch.float32 and batch["grid_thws"].dtype == torch.int64


@pytest.mark.parametrize(("limits", "row"), [(group["limits"], row) for _, group in GROUPS for row in group["images"]])
def test_golden_sizes(limits: dict[str, int], row: dict) -> None:
    processor = processor_with(limits)
    size = row["width"], row["height"]
    assert processor.resized(*size) == tuple(row["resized"])
    assert processor.grid(*size) == tuple(row["grid_thw"])
    assert processor.num_tokens(*size) == row["tokens"]


def expected_patches(image: Image.Image, processor: LatentMoEImageProcessor) -> torch.Tensor:
    """The same by loops over patches and pixels, in float64."""
    cfg = processor.media_proc_cfg
    patch, background = cfg["patch_size"], cfg["transparent_bg_config"]
    image = image.convert("RGBA").resize(processor.resized(*image.size), Image.Resampling.BICUBIC)
    _, rows, columns = processor.grid(*image.size)
    patches = []
    for row in range(rows):
        for column in range(columns):
            values = torch.zeros(3, patch, patch, dtype=torch.float64)
            for y in range(patch):
                for x in range(patch):
                    top, left = row * patch + y, column * patch + x
                    inside = top < image.height and left < image.width
                    *rgb, alpha = image.getpixel((left, top)) if inside else (0, 0, 0, 255)
                    odd = (
                        top // background["chessboard_square_size"] + left // background["chessboard_square_size"]
                    ) % 2
                    gray = bool(odd) == background["chessboard_square_on_top_left"]
                    board = background["chessboard_gray_value" if gray else "chessboard_white_value"]
                    for c in range(3):
                        level = (alpha * rgb[c] + (255 - alpha) * board) // 255
                        values[c, y, x] = (level / 255 - cfg["image_mean"][c]) / cfg["image_std"][c]
            patches.append(values)
    return torch.stack(patches)


@pytest.mark.parametrize("size", [(1, 1), (14, 15), (31, 16), (60, 20), (7, 90)])
@pytest.mark.parametrize("alpha", [False, True])
def test_every_constant_comes_from_the_config(size: tuple[int, int], alpha: bool) -> None:
    rng = np.random.default_rng(size[0])
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 4), dtype=np.uint8))
    if not alpha:
        image = image.convert("RGB")
    processor = LatentMoEImageProcessor(OTHER)
    batch = processor(image)
    expected = expected_patches(image, processor)
    difference = (batch["pixel_values"] - expected).abs()
    # fp32 compositing may truncate one level below the exact quotient, and nothing may differ without alpha.
    assert difference.max() < ((1.01 / 255 / 0.3) if alpha else 1e-6)
    assert (difference > 1e-6).float().mean() < 0.02


def test_unlike_images_follow_each_other() -> None:
    processor = LatentMoEImageProcessor()
    images = [Image.new("RGB", size, "red") for size in ((30, 10), (57, 90), (1, 1))]
    together = processor(images)
    alone = [processor(image) for image in images]
    for name in ("pixel_values", "grid_thws"):
        assert torch.equal(together[name], torch.cat([batch[name] for batch in alone]))
    assert together["grid_thws"].prod(1).sum() == len(together["pixel_values"])


def test_released_file_round_trip(tmp_path: Path) -> None:
    released = GOLDEN / "checkpoint" / "preprocessor_config.json"
    processor = LatentMoEImageProcessor.from_pretrained(released.parent)
    processor.save_pretrained(tmp_path)
    assert json.loads(released.read_text()) == {"media_proc_cfg": KIMI_K3_MEDIA_PROC_CFG}
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert written["media_proc_cfg"] == KIMI_K3_MEDIA_PROC_CFG
    LatentMoEImageProcessor(OTHER).save_pretrained(tmp_path)
    assert LatentMoEImageProcessor.from_pretrained(tmp_path).media_proc_cfg == OTHER


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens"),
        ({"transparent_bg_fill_stage": "before_resize"}, "transparent_bg_fill_stage"),
        ({"transparent_bg_config": {"pattern": "white"}}, "transparent_bg_config.pattern"),
    ],
)
def test_unsupported_config_is_named(change: dict, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        LatentMoEImageProcessor({**KIMI_K3_MEDIA_PROC_CFG, **change})
    with pytest.raises(ValueError, match=r"missing .*in_patch_limit"):
        LatentMoEImageProcessor({"patch_size": 14})


def dotted(mode: str) -> Image.Image:
    """One picture in several modes: a dark, a light and a transparent third."""
    rgba = np.zeros((12, 30, 4), dtype=np.uint8)
    rgba[:, :10] = (60, 60, 60, 255)
    rgba[:, 10:20] = (210, 210, 210, 255)
    image = Image.fromarray(rgba)
    if mode == "P":
        indexed = Image.new("P", image.size, 2)
        indexed.putpalette([60, 60, 60, 210, 210, 210, 90, 90, 90])
        indexed.paste(0, (0, 0, 10, 12))
        indexed.paste(1, (10, 0, 20, 12))
        buffer = io.BytesIO()
        indexed.save(buffer, "PNG", transparency=2)
        return Image.open(buffer)
    if mode == "RGB":
        opaque = Image.new("RGB", image.size, (90, 90, 90))
        opaque.paste(image, mask=image)
        buffer = io.BytesIO()
        opaque.save(buffer, "PNG", transparency=(90, 90, 90))
        return Image.open(buffer)
    return image.convert(mode)


@pytest.mark.parametrize("mode", ["P", "RGB", "LA"])
def test_every_kind_of_transparency_shows_the_chessboard(mode: str) -> None:
    image = dotted(mode)
    assert image.mode == mode
    processor = LatentMoEImageProcessor()
    batch = processor(image)
    assert torch.equal(batch["pixel_values"], processor(dotted("RGBA"))["pixel_values"])
    levels = set(((batch["pixel_values"] + 1) * 127.5).round().int().flatten().tolist())
    assert levels == {0, 60, 210, 180, 255}


def test_opaque_modes_and_sources(tmp_path: Path) -> None:
    rgb = Image.fromarray(PIXELS["image.rgb_80x50"].numpy())
    path = tmp_path / "picture.png"
    rgb.save(path)
    data = path.read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    arrays = np.asarray(rgb)
    for source in (
        path,
        str(path),
        path.as_uri(),
        data,
        url,
        arrays,
        {"bytes": data, "path": None},
        {"path": path},
    ):
        assert np.array_equal(np.asarray(load_image(source)), arrays)
    gray = rgb.convert("L")
    for mode in ("L", "RGB"):
        assert np.array_equal(np.asarray(load_image(gray.convert(mode))), np.asarray(gray.convert("RGB")))
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    assert deep.mode == "I;16"
    assert np.array_equal(np.asarray(load_image(deep)), np.asarray(gray.convert("RGB")))


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20), "red")
    image.paste("blue", (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "phone.png"
    image.save(path, exif=exif)
    upright = load_image(path)
    assert upright.size == (20, 40)
    # Orientation 6 is shown turned clockwise: what was left is on top.
    assert upright.getpixel((10, 5)) == (0, 0, 255) and upright.getpixel((10, 35)) == (255, 0, 0)
    assert load_image(upright).size == (20, 40)


def test_unreadable_images_are_named(tmp_path: Path) -> None:
    good = io.BytesIO()
    Image.effect_noise((64, 64), 80).convert("RGB").save(good, "JPEG")
    files = {"text.png": b"not a picture", "empty.jpg": b"", "cut.jpg": good.getvalue()[:700]}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"cannot read image .*{name}"):
            LatentMoEImageProcessor()([tmp_path / name])
    with pytest.raises(ValueError, match=r"cannot read image .*absent\.png"):
        load_image(tmp_path / "absent.png")
    with pytest.raises(ValueError, match="mode 'F'"):
        load_image(Image.new("F", (4, 4)))
    with pytest.raises(ValueError, match="given as Tensor"):
        load_image(torch.zeros(3, 4, 4))


def test_only_images() -> None:
    image = Image.new("RGB", (4, 4))
    with pytest.raises(ValueError, match="videos"):
        LatentMoEImageProcessor()([image], videos=[[image]])
    with pytest.raises(ValueError, match="return_tensors"):
        LatentMoEImageProcessor()([image], return_tensors="np")
    with pytest.raises(ValueError, match="empty"):
        LatentMoEImageProcessor()([])


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="has no pixels"):
        LatentMoEImageProcessor().num_tokens(*size)
