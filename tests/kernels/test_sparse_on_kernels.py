"""The kernels of this checkout inside sparse attention: as accurate as torch, and a choice that is made once."""

import pytest
import torch
from recorder import Recorder
from small_model import assert_as_accurate, batches, results, small_model

from modeling_latentmoe import kernel_loading, ops

pytest.importorskip("triton")
OPTIONS = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 64, "kv_lora_rank": 16, "qk_rope_head_dim": 16}


@pytest.fixture(autouse=True)
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of sparse attention alone, for small latents; "hub" would refuse the CPU."""
    loaded = dict.fromkeys((name, "auto") for name in kernel_loading.REPOSITORIES)
    loaded["sparse_attention", "auto"] = kernel_loading.load("sparse_attention", "auto")
    monkeypatch.setattr(kernel_loading, "_LOADED", loaded)
    monkeypatch.setattr(ops, "SPARSE_KERNEL_WIDTHS", (32, 16))
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernel_loading, "DEVICES", ("cpu",))


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def model_of(dtype: torch.dtype, device: str, **more: object):
    model = small_model(layers=2, **OPTIONS, **more).train()
    model.config.indexer_loss = True
    return model.to(device, dtype)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"learnable_sink": True, "index_kpool": 4}, id="sinks and pools"),
    ],
)
def test_as_accurate_as_torch(more: dict, device: str) -> None:
    """One row holds documents of 5, 1 and 14 tokens: two of them fit into index_topk."""
    batch = batches(device, T=20)["packed"]
    model = model_of(torch.float32, device, **more)
    true = results(model_of(torch.float64, device, **more), batch, "torch")
    plain = {name: value.clone() for name, value in results(model, batch, "torch").items()}
    got = results(model, batch, "auto")
    assert any(not torch.equal(got[name], plain[name]) for name in got)
    assert_as_accurate(got, plain, true, torch.float32)


def test_recomputation_does_not_choose_again(device: str) -> None:
    model = model_of(torch.float32, device)
    model.config.kernels = "auto"
    model.gradient_checkpointing_enable()
    with Recorder() as recorder:
        output = model(**batches(device, T=12)["one row"], return_logits=False)
        (output.loss + output.indexer_loss).backward()
    calls = {operator.name().partition("::")[2]: n for operator, n in recorder.calls.items()}
    assert calls["index_topk"] == 1 and calls["forward"] == 2 and calls["backward"] == 1


@pytest.mark.slow
@torch.no_grad()
def test_pieces_equal_the_whole(device: str) -> None:
    """With a cache, where queries are fewer than keys and rows are padded."""
    model = model_of(torch.float32, device, learnable_sink=True).eval()
    model.config.kernels = "auto"
    ids, mask = batches(device, T=14)["one row"]["input_ids"].repeat(2, 1), torch.ones(2, 14, device=device)
    mask[1, :3] = 0
    whole = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    first = model(input_ids=ids[:, :10], attention_mask=mask[:, :10], use_cache=True)
    pieces = [first.logits]
    for t in range(10, 14):
        step = model(input_ids=ids[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=first.cache)
        pieces.append(step.logits)
    torch.testing.assert_close(torch.cat(pieces, 1)[mask > 0], whole[mask > 0], rtol=1e-4, atol=1e-5)
