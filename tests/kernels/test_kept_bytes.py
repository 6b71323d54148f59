"""What layers of the released model keep for backward with kernels in use, as footprint.py says: counted with tensors
that have no contents."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from recorder import Recorder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration, kernel_loading
from modeling_latentmoe.documents import Documents
from modeling_latentmoe.training.footprint import Work, kept_bytes, layer_bytes
from modeling_latentmoe.training.loading import checkpoint_activations
from modeling_latentmoe.training.lora import add_adapter

pytest.importorskip("triton")

TOKENS, WIDTH, EXPERTS = 32768, 7168, 112


class FusedNorm(torch.autograd.Function):
    """As torch has it on a GPU."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


class FusedAttention(torch.autograd.Function):
    """As torch has it on a GPU."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        B, N, T, _ = q.shape
        out = q.new_empty(B, T, N, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(B, N, T, dtype=torch.float32))
        return out


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels take tensors without contents for those of a GPU."""
    monkeypatch.setattr(kernel_loading, "DEVICES", ("cpu",))
    monkeypatch.setattr(kernel_loading, "_LOADED", {})
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, eps: FusedNorm.apply(x))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: FusedAttention.apply(q, k, v))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def slice_of_k3() -> nn.Module:
    """Layers 0 to 3 of the released model, adapters on all that scripts/lora.py adapts."""
    released = LatentMoEConfig.kimi_k3()
    linear = {**released.text_config.linear_attn_config, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    text = {"num_hidden_layers": 4, "num_experts": EXPERTS, "linear_attn_config": linear, "vocab_size": 8, **ids}
    packing = {"quantization_config": released.quantization_config}
    config = LatentMoEConfig(text_config=text, media_placeholder_token_id=3, **ids, **packing)
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(config).to(torch.bfloat16)
    return add_adapter(model, r=16, lora_alpha=32, expert_rank=2).train()


def one_document() -> Documents:
    documents = Documents(torch.zeros(1, TOKENS, dtype=torch.int64))
    # What the layers ask of it, asked while there are contents.
    assert documents.valid_BT is None and documents.cu_seqlens is None and not documents.packed
    return documents


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_layers_keep_what_is_counted(checkpointing: str, request: pytest.FixtureRequest) -> None:
    model, documents = slice_of_k3(), one_document()
    request.getfixturevalue("fake")
    if checkpointing == "full":
        checkpoint_activations(model)
    inner = model.get_base_model().language_model.model
    inner.config.kernels = "auto"
    with Recorder() as recorder:
        for module in inner.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                given = torch.empty(parameter.shape, dtype=parameter.dtype)
                setattr(module, name, nn.Parameter(given, requires_grad=parameter.requires_grad))
        stream = torch.empty(1, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        snapshots, choice, before = (), None, recorder.live_bytes()
        for place, layer in enumerate(inner.layers):
            stream, snapshots, choice, _, _ = layer(stream, snapshots, choice, documents)
            held = recorder.live_bytes()
            count = layer_bytes if checkpointing == "none" else kept_bytes
            expected = count(inner.config, place, Work(TOKENS, 1, checkpointing))
            # low-rank rows of adapters and factors of experts are not counted
            assert (held - before) / TOKENS == pytest.approx(expected, rel=0.01), place
            before = held
