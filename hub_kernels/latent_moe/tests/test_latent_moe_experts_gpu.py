"""What only a GPU can show: bf16 at the released model's widths, equal bits from run to run, no waiting."""

import pytest
import torch
from latent_moe import mlp
from latent_moe.experts import expert_mlp
from latent_moe.sorting import sort_slots
from test_latent_moe_experts import SITU, Case, check

pytestmark = pytest.mark.gpu
L, F = 3584, 3072
RAGGED = (0, 1, 15, 16, 17, 127, 128, 129)


@pytest.fixture(autouse=True, params=[True, False], ids=("hopper", "any"))
def kernels(request, monkeypatch):
    """The kernels of the device, and on Hopper also those of other devices."""
    if not request.param:
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("has no others")
        monkeypatch.setattr(mlp, "hopper", None)


@pytest.mark.parametrize("rank", [0, 1, 2, 16, 64])
@pytest.mark.parametrize("packed", [True, False])
def test_released_widths(packed, rank):
    check(Case(RAGGED, L, F, torch.bfloat16, "cuda", packed, rank, factors=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_float_weights_of_another_dtype(dtype):
    """As where autocast runs on weights in fp32."""
    case = Case(RAGGED, 512, 256, torch.bfloat16, "cuda", packed=False, rank=2)
    case.gate_up, case.down = (m._replace(weight=m.weight.to(dtype)) for m in (case.gate_up, case.down))
    check(case)


@pytest.mark.parametrize("rows", [0, 10**9], ids=("large tiles", "small tiles"))
def test_both_sizes_of_tiles(rows, monkeypatch):
    monkeypatch.setattr(mlp, "SMALL_TILE_ROWS", rows)
    check(Case(RAGGED, 1024, 512, torch.bfloat16, "cuda", rank=2))


def test_workspace(monkeypatch):
    monkeypatch.setattr(mlp, "WORKSPACE_ROWS", 0)
    check(Case(RAGGED, L, F, torch.bfloat16, "cuda", rank=2))


@pytest.mark.parametrize("counts", [(3000, 0, 0, 0), (5,), tuple([1] * 896)], ids=("skewed", "one", "896"))
def test_distributions(counts):
    check(Case(counts, 512, 256, torch.bfloat16, "cuda", rank=2))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("L", "F"), [(96, 96), (160, 96), (224, 96), (64, 64), (192, 320)])
def test_widths_that_fill_no_tile(L, F, packed):
    check(Case((70, 0, 200), L, F, torch.bfloat16, "cuda", packed, rank=3))


def test_every_part_of_a_tile():
    """Rows around every multiple of 64, up to more than the largest tile."""
    counts = [64 * n + d for n in range(5) for d in (0, 1, 63)]
    check(Case(counts, 256, 192, torch.bfloat16, "cuda", rank=2))


def test_equal_bits_from_run_to_run():
    case = Case(RAGGED, 1024, 512, torch.bfloat16, "cuda", rank=16)
    first = case.run(expert_mlp)
    for _ in range(29):
        for x, y in zip(case.run(expert_mlp), first, strict=True):
            assert torch.equal(x, y)


def test_no_host_synchronisation():
    case = Case(RAGGED, 512, 256, torch.bfloat16, "cuda", rank=2)
    case.run(expert_mlp)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(expert_mlp)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_row_offsets_beyond_32_bits():
    """500k rows of 8192 gates and ups."""
    case = Case((250_000, 250_000), 64, 4096, torch.bfloat16, "cuda")
    kept, recomputed = case.run(expert_mlp), case.run(expert_mlp, save_activations=False)
    for x, y in zip(kept, recomputed, strict=True):
        assert x.isfinite().all() and torch.equal(x, y)
    # The tokens of the last rows, alone.
    last = case.rows.slot_R[: int(case.rows.offset[-1])][-64:].long() // 2
    alone = expert_mlp(
        case.x[last], sort_slots(case.ids_TS[last], 2), case.weights[last], case.gate_up, case.down, **SITU
    )
    torch.testing.assert_close(kept[0][last], alone, rtol=1e-2, atol=1e-3)
