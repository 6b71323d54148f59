"""The kernels of this checkout inside the model: as accurate as the torch definitions, forward and backward."""

import pytest
import torch
from small_model import assert_as_accurate, batches, results, small_model

from modeling_latentmoe import kernel_loading

# Those that a dense model uses; the other tests on kernels here are about experts, adapters and sparse attention.
DENSE = sorted(kernel_loading.REPOSITORIES.keys() - {"low_rank", "sparse_attention"})
NAMES = [name for name in DENSE if kernel_loading._checkout(name) is not None]
pytest.importorskip("triton")
if not NAMES:
    pytest.skip("hub_kernels/ has no repository that the model uses", allow_module_level=True)


def check(model_options: dict, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    device = batch["input_ids"].device
    model = small_model(**model_options).to(device=device, dtype=dtype)
    # what the dtype cannot hold is no error of a computation in it
    exact = small_model(**model_options).to(device).double()
    exact.load_state_dict(model.state_dict())
    true = results(exact, batch, "torch")
    plain = {name: value.clone() for name, value in results(model, batch, "torch").items()}
    got = results(model, batch, "auto")
    assert_as_accurate(got, plain, true, dtype)
    assert all(kernel_loading._LOADED[name, "auto"] is not None for name in NAMES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests below run on the GPU")
@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=pytest.mark.slow) for layout in ("packed", "one row", "padded")]
)
def test_in_the_interpreter(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_loading, "DEVICES", ("cpu",))
    monkeypatch.setattr(kernel_loading, "_LOADED", {})
    check({"heads": 1, "layers": 2}, batches(T=18)[layout], torch.float32)


@pytest.mark.slow
def test_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activation checkpointing runs the kernels twice and reads what they saved: the same bits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(kernel_loading, "DEVICES", (device,))
    monkeypatch.setattr(kernel_loading, "_LOADED", {})
    model, batch = small_model(heads=1, layers=2).to(device).train(), batches(device, T=18)["packed"]
    want = {name: value.clone() for name, value in results(model, batch, "auto").items()}
    model.gradient_checkpointing_enable()
    for name, value in results(model, batch, "auto").items():
        assert torch.equal(value, want[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("layout", batches())
def test_on_the_gpu(layout: str, head_dim: int, dtype: torch.dtype) -> None:
    check({"head_dim": head_dim}, batches("cuda")[layout], dtype)


@pytest.mark.gpu
def test_generation_on_the_gpu() -> None:
    """Prefill and decoding with kernels choose the tokens of torch, of left-padded rows too."""
    model, ids = small_model(head_dim=128).to("cuda").eval(), batches("cuda")["padded"]["input_ids"][:, :40]
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    logits = {}
    for choice in ("torch", "auto"):
        model.config.kernels = choice
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits[choice] = torch.stack(out.logits)
    torch.testing.assert_close(logits["auto"], logits["torch"], rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_float64_on_the_gpu_is_torch() -> None:
    model, batch = small_model().to("cuda").double(), batches("cuda")["one row"]
    want, got = ({k: v.clone() for k, v in results(model, batch, choice).items()} for choice in ("torch", "auto"))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match=r'kernels="hub": .*torch\.float64'):
        results(model, batch, "hub")
