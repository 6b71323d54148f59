"""What surrounds the products for Hopper: tiles of rows, rows of tokens, factors in the order of lanes."""

import pytest
import torch
from latent_moe import hopper, low_rank, mlp
from latent_moe.sorting import sort_slots


@pytest.mark.parametrize("counts", [(0, 1, 256, 0, 257, 700), (0, 0), (5,), tuple([1] * 70)])
def test_tiles_cover_every_row_once(counts, device):
    offset = torch.tensor((0, *counts), device=device).cumsum(0).int()
    rows = sum(counts)
    expected = []
    for e, (start, end) in enumerate(zip(offset.tolist(), offset.tolist()[1:], strict=False)):
        expected += [[e, first, end] for first in range(start, end, hopper.BM)]
    # More slots than rows: those without an expert.
    count, *tiles = hopper.row_tiles(offset, rows + 300).tolist()
    assert count[0] == len(expected)
    assert [tile[:3] for tile in tiles[: len(expected)]] == expected


@pytest.mark.parametrize("ordered", [False, True])
def test_rows_of_tokens(ordered, device):
    x = torch.randn(7, 96, device=device)
    rows = sort_slots(torch.randint(-1, 3, (7, 4), device=device), 3)
    y = hopper.gathered(x, rows.slot_R, rows.offset, 4, ordered)
    used = int(rows.offset[-1])
    expected = x[rows.slot_R[:used] // 4]
    if ordered:
        expected = expected.view(used, 3, 4, 2, 4).permute(0, 1, 4, 2, 3).reshape(used, 96)
    assert torch.equal(y[:used], expected)


def test_factors_in_the_order_of_lanes(device):
    """Thread q of four has rows 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of every 16."""
    E, N, G = 2, 192, 35
    scale = torch.randint(0, 256, (E, N, G), dtype=torch.uint8, device=device)
    scale[:, :2] = torch.tensor([[0], [255]], dtype=torch.uint8, device=device)
    found = hopper.lane_factors(scale).view(torch.bfloat16).reshape(E, G, N // 64, 4, 4, 4)
    rows = [[[16 * block + 2 * q + r for r in (0, 1, 8, 9)] for block in range(4)] for q in range(4)]
    value = torch.exp2(scale.double() - 127).masked_fill(scale == 255, torch.nan)
    expected = value.transpose(1, 2).reshape(E, G, N // 64, 64)[..., torch.tensor(rows, device=device)]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rank", [1, 4, 6])
def test_low_rank_rows_are_padded_for_the_copy_engine(rank, device):
    """Rows of a multiple of 16 bytes, with zeros behind the rank."""
    x, factor = torch.randn(5, 32, device=device), torch.randn(1, rank, 32, device=device)
    offset = torch.tensor([0, 5], dtype=torch.int32, device=device)
    low = low_rank.low_rank(x, None, offset, factor, 1, 5)
    assert low.shape == (5, 4 if rank <= 4 else 8)
    assert not low[:, rank:].any()
    torch.testing.assert_close(low[:, :rank], x @ factor[0].T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_float_weights_of_another_dtype_have_other_kernels(dtype, monkeypatch):
    """Those for Hopper multiply the bits as bf16."""
    monkeypatch.setattr(mlp.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    x, weight = torch.ones(3, 64, dtype=torch.bfloat16), torch.ones(2, 64, 64, dtype=torch.bfloat16)
    assert mlp.on_hopper(x, mlp.Matrices(weight, None, None, None, 1.0), 3)
    assert not mlp.on_hopper(x, mlp.Matrices(weight.to(dtype), None, None, None, 1.0), 3)
