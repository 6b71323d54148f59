"""MoonViT vision tower and the projector into the text width, as in the released Kimi-K3 checkpoint.

A media item is one image (t = 1) or one short clip (t frames).

Legend: P patches of all media items, D tower width, N heads, H head width, G items of equal length L that are computed
        together, M merged tokens.
"""

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .configuration_latentmoe import LatentMoEVisionConfig

# The reference builds its tower norms without an eps; torch then takes finfo(float32).eps, also for bf16.
# Written out, because older torch took 2^-7 for bf16, which moves image features by several per cent.
TOWER_NORM_EPS = 1.1920929e-07
# Base of both fixed position codes (rotary and temporal); the released config has no field for it.
POSITION_BASE = 10000.0


def rope_angles(t: int, h: int, w: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Angles [t*h*w, head_dim/2] of an item: even channel pairs turn with the column, odd with the row."""
    frequencies = POSITION_BASE ** (-torch.arange(0, head_dim, 4, dtype=dtype, device=device) / head_dim)
    row = torch.arange(h, dtype=dtype, device=device).repeat_interleave(w)
    column = torch.arange(w, dtype=dtype, device=device).repeat(h)
    angles = torch.stack([column.outer(frequencies), row.outer(frequencies)], dim=-1).flatten(1)
    return angles.repeat(t, 1)


def apply_rope(x_PNH: Tensor, angles_PH: Tensor) -> Tensor:
    """Rotate adjacent channel pairs (2p, 2p+1) by angles [P, H/2], in the dtype of the angles."""
    even, odd = x_PNH.to(angles_PH.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles_PH.cos()[:, None], angles_PH.sin()[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x_PNH.dtype)


class PositionEmbedding(nn.Module):
    """Learned table [height, width, D], resampled to each grid, plus a fixed code for frames of a clip."""

    def __init__(self, config: LatentMoEVisionConfig) -> None:
        super().__init__()
        self.mode = config.pos_emb_interpolation_mode
        self.weight = nn.Parameter(
            torch.empty(config.init_pos_emb_height, config.init_pos_emb_width, config.vt_hidden_size)
        )

    def spatial(self, h: int, w: int) -> Tensor:
        """[h*w, D] in the dtype of the weight."""
        if (h, w) == self.weight.shape[:2]:
            return self.weight.flatten(0, 1)
        table = F.interpolate(self.weight.permute(2, 0, 1)[None], size=(h, w), mode=self.mode)
        return table[0].flatten(1).T

    def temporal(self, t: int) -> Tensor:
        """[t, D]: sin and cos of the frame number, in the dtype of the weight."""
        dtype, width = torch.promote_types(self.weight.dtype, torch.float32), self.weight.shape[-1]
        half = torch.arange(width // 2, dtype=dtype, device=self.weight.device)
        frame = torch.arange(t, dtype=dtype, device=self.weight.device)
        angles = frame.outer(POSITION_BASE ** (-half / (width // 2)))
        return torch.cat([angles.sin(), angles.cos()], dim=-1).to(self.weight.dtype)

    def forward(self, grids: list[tuple[int, int, int]]) -> Tensor:
        """One row per patch, [P, D]."""
        tables = {(h, w): self.spatial(h, w) for _, h, w in grids}
        rows = [self.weight.flatten(0, 1)[:0]]
        for t, h, w in grids:
            if t == 1:
                rows.append(tables[h, w])
            else:
                rows.append((tables[h, w] + self.temporal(t)[:, None]).flatten(0, 1))
        return torch.cat(rows)


class PatchProjection(nn.Conv2d):
    """[P, 3, patch, patch] -> [P, D]: a convolution over one window is a matrix product, and far faster as one."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        return F.linear(pixel_values.flatten(1), self.weight.flatten(1))


class PatchEmbed(nn.Module):
    def __init__(self, config: LatentMoEVisionConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.proj = PatchProjection(3, config.vt_hidden_size, size, stride=size, bias=False)
        self.pos_emb = PositionEmbedding(config)

    def forward(self, pixel_values: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
        return self.proj(pixel_values) + self.pos_emb(grids)


class VisionMLP(nn.Module):
    def __init__(self, config: LatentMoEVisionConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.vt_hidden_size, config.vt_intermediate_size, bias=False)
        self.fc1 = nn.Linear(config.vt_intermediate_size, config.vt_hidden_size, bias=False)
        self.activation = ACT2FN[config.activation_func]

    def forward(self, x_PD: Tensor) -> Tensor:
        return self.fc1(self.activation(self.fc0(x_PD)))


class LatentMoEVisionBlock(nn.Module):
    """Pre-norm block: attention among all patches of one item, then a two-layer MLP."""

    def __init__(self, config: LatentMoEVisionConfig) -> None:
        super().__init__()
        width, inner = config.vt_hidden_size, config.qkv_hidden_size
        self.num_heads = config.vt_num_attention_heads
        self.norm0 = nn.RMSNorm(width, eps=TOWER_NORM_EPS)
        self.norm1 = nn.RMSNorm(width, eps=TOWER_NORM_EPS)
        self.wqkv = nn.Linear(width, 3 * inner, bias=False)
        self.wo = nn.Linear(inner, width, bias=False)
        self.mlp = VisionMLP(config)

    def attention(self, x_PD: Tensor, angles_PH: Tensor, lengths: list[int]) -> Tensor:
        q_PNH, k_PNH, v_PNH = self.wqkv(x_PD).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q_PNH, k_PNH = apply_rope(q_PNH, angles_PH), apply_rope(k_PNH, angles_PH)
        runs = [(length, len(list(same))) for length, same in groupby(lengths)]
        outputs, start = [v_PNH[:0].flatten(1)], 0
        for length, items in runs:
            rows = slice(start, start + items * length)
            q_GNLH, k_GNLH, v_GNLH = (
                x[rows].unflatten(0, (items, length)).transpose(1, 2) for x in (q_PNH, k_PNH, v_PNH)
            )
            o_GNLH = F.scaled_dot_product_attention(q_GNLH, k_GNLH, v_GNLH)
            outputs.append(o_GNLH.transpose(1, 2).flatten(2).flatten(0, 1))
            start = rows.stop
        return self.wo(torch.cat(outputs))

    def forward(self, x_PD: Tensor, angles_PH: Tensor, lengths: list[int]) -> Tensor:
        """x [P, D], angles [P, H/2], lengths: the number of patches of each item, in order."""
        x_PD = x_PD + self.attention(self.norm0(x_PD), angles_PH, lengths)
        return x_PD + self.mlp(self.norm1(x_PD))


class VisionEncoder(nn.Module):
    def __init__(self, config: LatentMoEVisionConfig) -> None:
        super().__init__()
        self.head_dim = config.qkv_hidden_size // config.vt_num_attention_heads
        self.blocks = nn.ModuleList(LatentMoEVisionBlock(config) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = nn.RMSNorm(config.vt_hidden_size, eps=TOWER_NORM_EPS)

    def forward(self, x_PD: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
        dtype = torch.promote_types(x_PD.dtype, torch.float32)
        angles = {grid: rope_angles(*grid, self.head_dim, dtype, x_PD.device) for grid in grids}
        no_angles = torch.empty(0, self.head_dim // 2, dtype=dtype, device=x_PD.device)
        angles_PH = torch.cat([no_angles, *(angles[grid] for grid in grids)])
        lengths = [t * h * w for t, h, w in grids]
        for block in self.blocks:
            x_PD = block(x_PD, angles_PH, lengths)
        return self.final_layernorm(x_PD)


class VisionTower(nn.Module):
    """Patches to merged tokens; every item is seen alone, whatever else is in the call.

    A call with no items runs every layer on zero rows and returns an empty tensor that is part of the graph,
    so that all ranks of a sharded tower can take part when only some of them hold images.
    """

    def __init__(self, config: LatentMoEVisionConfig) -> None:
        super().__init__()
        self.merge = tuple(config.merge_kernel_size)
        self.max_frames = config.init_pos_emb_time
        self.patch_embed = PatchEmbed(config)
        self.encoder = VisionEncoder(config)

    def forward(self, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        """pixel_values [P, 3, patch, patch] (any float dtype), row-major over (t, h, w), item after item;
        grid_thws int64 [items, 3] in patches. Returns [M, kh*kw, D] with M = sum of (h/kh)(w/kw): the
        sub-patches of a token in row-major order, frames averaged. ValueError when the grids do not fit.
        """
        grids = [tuple(grid) for grid in grid_thws.tolist()]
        self.check(grids, len(pixel_values))
        x_PD = self.patch_embed(pixel_values.to(self.patch_embed.proj.weight.dtype), grids)
        x_PD = self.encoder(x_PD, grids)
        kh, kw = self.merge
        merged = [x_PD[:0].view(0, kh * kw, x_PD.shape[-1])]
        for item, (t, h, w) in zip(x_PD.split([t * h * w for t, h, w in grids]), grids, strict=True):
            cells = item.view(t, h // kh, kh, w // kw, kw, -1).transpose(2, 3)
            merged.append(cells.mean(0).flatten(2, 3).flatten(0, 1))
        return torch.cat(merged)

    def check(self, grids: list[tuple[int, int, int]], patches: int) -> None:
        kh, kw = self.merge
        for t, h, w in grids:
            if t < 1 or h < 1 or w < 1 or h % kh or w % kw:
                raise ValueError(f"grid_thws: {(t, h, w)} is not a multiple of merge_kernel_size {(kh, kw)}")
            if t > self.max_frames:
                raise ValueError(f"grid_thws: {t} frames, but init_pos_emb_time is {self.max_frames}")
        expected = sum(t * h * w for t, h, w in grids)
        if expected != patches:
            raise ValueError(f"pixel_values has {patches} patches, but grid_thws describes {expected}")


class Projector(nn.Module):
    """Two layers from the joined sub-patches of a token to the text width, then a norm ("patchmergerv2")."""

    def __init__(self, config: LatentMoEVisionConfig) -> None:
        super().__init__()
        kh, kw = config.merge_kernel_size
        width = kh * kw * config.mm_hidden_size
        self.proj = nn.Sequential(
            nn.Linear(width, width, bias=False),
            ACT2FN[config.projector_hidden_act],
            nn.Linear(width, config.text_hidden_size, bias=False),
        )
        self.post_norm = nn.RMSNorm(config.text_hidden_size, eps=config.projector_ln_eps)

    def forward(self, merged: Tensor) -> Tensor:
        """[M, kh*kw, D] -> [M, text_hidden_size]."""
        return self.post_norm(self.proj(merged.flatten(1)))
