"""Images to vision-tower patches, as the released Kimi-K3 preprocessor makes them (Kimi-K3 report, config).

An image is scaled down until it fits the patch limits (never up), composited on a chessboard where it is
transparent, padded with black on the right and bottom to whole merge blocks, normalised, and cut into patches
in row-major order. The work is PIL and numpy: no torchvision.
"""

import copy
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import BaseImageProcessor, BatchFeature

# The `media_proc_cfg` of the released preprocessor_config.json.
KIMI_K3_MEDIA_PROC_CFG: dict[str, Any] = {
    "in_patch_limit": 65536,
    "patch_size": 14,
    "merge_kernel_size": 2,
    "patch_limit_on_one_side": 512,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "in_patch_limit_each_frame": 16384,
    "sample_fps": 8.0,
    "temporal_merge_kernel_size": 4,
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}
_EXIF_ORIENTATION = 0x0112

ImageSource = Image.Image | np.ndarray | str | Path | bytes | Mapping[str, Any]


def load_image(source: ImageSource) -> Image.Image:
    """Decode one image to 8 bits: RGBA where it has alpha or a transparent colour, RGB otherwise.

    `source` is a PIL image, a uint8 array [H, W], [H, W, 3] or [H, W, 4], encoded bytes, a path, a URL (http,
    https, file, data), or a mapping with "bytes" or "path" (an undecoded `datasets` image). The image is
    turned upright by its EXIF orientation, so that its size is the one a viewer shows; of an animation the
    first frame is taken. Raises ValueError that names the file when it cannot be read.
    """
    if isinstance(source, Mapping):
        name = source.get("path")
        source = source.get("bytes") or name
    else:
        name = source if isinstance(source, str | Path) else None
    name = str(name)[:200] if name else f"an image given as {type(source).__name__}"
    # Decoders raise many unrelated exception types on damaged files, so every one of them is translated.
    try:
        image = _open(source)
        image.load()
        if image.getexif().get(_EXIF_ORIENTATION, 1) != 1:
            image = ImageOps.exif_transpose(image)
        return _to_8_bits(image)
    except Exception as error:
        raise ValueError(f"cannot read image {name}: {error}") from error


def _open(source: Any) -> Image.Image:
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        return Image.fromarray(source)
    if isinstance(source, str) and source.startswith(("http://", "https://", "file://", "data:")):
        with urlopen(source, timeout=30) as reply:
            source = reply.read()
    if isinstance(source, bytes):
        return Image.open(io.BytesIO(source))
    if isinstance(source, str | Path):
        return Image.open(source)
    raise TypeError(f"{type(source).__name__} is not a PIL image, array, path, URL or bytes")


def _to_8_bits(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # PIL would clip 16-bit greys at 255; keep the high byte instead.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"image mode {image.mode!r} has no defined white point; convert it to 8 bits first")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


class LatentMoEImageProcessor(BaseImageProcessor):
    """Reads and writes the released `preprocessor_config.json`; every constant is in `media_proc_cfg`.

    ```python
    batch = LatentMoEImageProcessor()(["cat.png"])  # pixel_values [P, 3, 14, 14], grid_thws [n, 3]
    ```
    """

    model_input_names = ["pixel_values", "grid_thws"]  # noqa: RUF012

    def __init__(self, media_proc_cfg: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """`media_proc_cfg` None is the released Kimi-K3. ValueError names a missing or unsupported field."""
        super().__init__(**kwargs)
        cfg = KIMI_K3_MEDIA_PROC_CFG if media_proc_cfg is None else media_proc_cfg
        missing = [name for name in _USED_FIELDS if name not in cfg]
        if missing:
            raise ValueError(f"media_proc_cfg: missing {', '.join(missing)}")
        background = cfg["transparent_bg_config"]
        for name, value, supported in (
            ("fixed_output_tokens", cfg["fixed_output_tokens"], None),
            ("transparent_bg_fill_stage", cfg["transparent_bg_fill_stage"], "after_resize"),
            ("transparent_bg_config.pattern", background.get("pattern"), "chessboard"),
        ):
            if value != supported:
                raise ValueError(f"media_proc_cfg.{name}: {value!r} is not supported, expected {supported!r}")
        self.media_proc_cfg = copy.deepcopy(cfg)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels that the image is scaled to before padding; never larger than before."""
        cfg = self.media_proc_cfg
        patch, side = cfg["patch_size"], cfg["patch_limit_on_one_side"] * cfg["patch_size"]
        if min(width, height) < 1:
            raise ValueError(f"an image of {width} x {height} pixels has no pixels")
        area = math.sqrt(cfg["in_patch_limit"] / (max(1, width // patch) * max(1, height // patch)))
        scale = min(1.0, area, side / width, side / height)
        return min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side)

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Patches (frames = 1, rows, columns) of an image of this size in pixels, padding included."""
        patch, merge = self.media_proc_cfg["patch_size"], self.media_proc_cfg["merge_kernel_size"]
        columns, rows = (math.ceil(size / (patch * merge)) * merge for size in self.resized(width, height))
        return 1, rows, columns

    def num_tokens(self, width: int, height: int) -> int:
        """Rows that an image of this size takes in the text sequence: one per merged block of patches."""
        _, rows, columns = self.grid(width, height)
        return rows * columns // self.media_proc_cfg["merge_kernel_size"] ** 2

    def preprocess(
        self, images: ImageSource | list[ImageSource], return_tensors: str = "pt", videos: Any = None
    ) -> BatchFeature:
        """Anything that `load_image` takes -> pixel_values [P, 3, p, p] fp32, grid_thws [n, 3] int64.

        The patches of all images follow each other; P is the sum of the products of the rows of grid_thws.
        """
        if videos is not None:
            raise ValueError("videos: this model takes images only")
        if return_tensors != "pt":
            raise ValueError(f"return_tensors: {return_tensors!r} is not supported, expected 'pt'")
        images = images if isinstance(images, list | tuple) else [images]
        if not images:
            raise ValueError("images: the list is empty")
        patches, grids = zip(*(self._patches(load_image(image)) for image in images), strict=True)
        return BatchFeature({"pixel_values": torch.cat(patches), "grid_thws": torch.tensor(grids)})

    def _patches(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int, int]]:
        cfg = self.media_proc_cfg
        patch = cfg["patch_size"]
        grid = _, rows, columns = self.grid(*image.size)
        # PIL scales RGBA with premultiplied alpha, so colours under full transparency do not bleed out.
        image = image.resize(self.resized(*image.size), Image.Resampling.BICUBIC)
        pixels = np.asarray(image)
        if image.mode == "RGBA":
            pixels = _fill_transparent(pixels, cfg["transparent_bg_config"])
        canvas = np.zeros((rows * patch, columns * patch, 3), dtype=np.uint8)
        canvas[: pixels.shape[0], : pixels.shape[1]] = pixels
        blocks = canvas.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        values = np.ascontiguousarray(blocks, dtype=np.float32).reshape(-1, 3, patch, patch)
        values /= np.float32(255)
        values -= np.asarray(cfg["image_mean"], dtype=np.float32)[:, None, None]
        values /= np.asarray(cfg["image_std"], dtype=np.float32)[:, None, None]
        return torch.from_numpy(values), grid


_USED_FIELDS = (
    "in_patch_limit",
    "patch_size",
    "merge_kernel_size",
    "patch_limit_on_one_side",
    "fixed_output_tokens",
    "image_mean",
    "image_std",
    "transparent_bg_config",
    "transparent_bg_fill_stage",
)


def _fill_transparent(rgba: np.ndarray, background: dict[str, Any]) -> np.ndarray:
    """Composite uint8 [H, W, 4] on the chessboard -> uint8 [H, W, 3], truncated from fp32 as released."""
    rows, columns = np.indices(rgba.shape[:2], dtype=np.int32) // background["chessboard_square_size"]
    gray = (rows + columns) % 2 == (1 if background["chessboard_square_on_top_left"] else 0)
    board = np.where(gray, background["chessboard_gray_value"], background["chessboard_white_value"])
    alpha = rgba[..., 3:].astype(np.float32) / np.float32(255)
    return (alpha * rgba[..., :3] + (1 - alpha) * board[..., None].astype(np.float32)).astype(np.uint8)


LatentMoEImageProcessor.register_for_auto_class("AutoImageProcessor")
