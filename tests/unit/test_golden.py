"""The whole model against vectors of an independent implementation of the architecture (tests/fixtures/golden).

Tolerances are relative to the largest reference value: correct fp32 implementations differ by 1e-5 to 5e-5.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.documents import Documents

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"
STATES, GRADS = 2e-4, 1e-3


def load(dtype: torch.dtype, attention: str = "sdpa", **kwargs) -> LatentMoEForConditionalGeneration:
    return LatentMoEForConditionalGeneration.from_pretrained(
        GOLDEN / "checkpoint", dtype=dtype, attn_implementation=attention, **kwargs
    ).eval()


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request) -> LatentMoEForConditionalGeneration:
    return load(torch.float32, request.param)


def check(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = STATES) -> None:
    assert actual.shape == expected.shape
    error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"


def capture(model, name: str, found: dict) -> list:
    """Hooks that record inputs and outputs of every layer's mixer and feed-forward."""
    hooks = []
    for i, layer in enumerate(model.language_model.model.layers):
        feed_forward = layer.block_sparse_moe if layer.is_moe else layer.mlp
        for part, module in (("attn", layer.self_attn), ("mlp", feed_forward)):

            def record(_, args, out, i=i, part=part):
                found[f"layer.{i}.{part}_in"] = args[0]
                found[f"layer.{i}.{part}_out"] = out[0] if isinstance(out, tuple) else out

            hooks.append(module.register_forward_hook(record))
        if layer.is_moe:
            gate = layer.block_sparse_moe.gate
            hooks.append(gate.register_forward_hook(lambda _, args, out, i=i: found.update({f"router.{i}": out})))
    return hooks


@torch.no_grad()
def test_every_state_of_the_text_model(model):
    golden, found = load_file(GOLDEN / "text_fp32.safetensors"), {}
    hooks = capture(model, "text", found)
    out = model(input_ids=golden["input_ids"], output_hidden_states=True, output_router_logits=True)
    for hook in hooks:
        hook.remove()
    check(out.logits, golden["logits"])
    check(out.hidden_states[-1], golden["final_norm"])
    for i in range(model.config.text_config.num_hidden_layers - 1):
        check(out.hidden_states[i + 1], golden[f"layer.{i}.p"])
    layer_states = [name for name in golden if name.startswith("layer.") and not name.endswith(".p")]
    assert len(layer_states) == 24
    for name in layer_states:
        check(found[name], golden[name])
    for i in range(1, 6):
        _, ids, weights = found[f"router.{i}"]
        ids, order = ids.sort(dim=1)
        assert torch.equal(ids, golden[f"router.{i}.ids"].long())
        check(weights.gather(1, order), golden[f"router.{i}.weights"])
        load_E = torch.bincount(golden[f"router.{i}.ids"].flatten(), minlength=16)
        assert torch.equal(out.expert_load[i - 1], load_E)
    assert len(out.router_logits) == 5


@torch.no_grad()
@pytest.mark.parametrize("by", ["cu_seqlens", "position_ids", "cu_seqlens_and_mask"])
def test_packed_documents(model, by):
    golden = load_file(GOLDEN / "packed_fp32.safetensors")
    first, second = golden["doc_lens"].tolist()
    boundaries = torch.tensor([0, first, first + second], dtype=torch.int32)
    positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
    kwargs = {
        "cu_seqlens": {"cu_seqlens": boundaries},
        "position_ids": {"position_ids": positions},
        "cu_seqlens_and_mask": {"cu_seqlens": boundaries, "attention_mask": torch.ones(1, first + second)},
    }[by]
    check(model(input_ids=golden["input_ids"], **kwargs).logits, golden["logits"])


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model, side):
    golden = load_file(GOLDEN / "padded_fp32.safetensors")
    mask = golden[f"{side}.attention_mask"]
    out = model(input_ids=golden[f"{side}.input_ids"], attention_mask=mask)
    check(out.logits[mask.bool()], golden[f"{side}.logits_valid_only"][mask.bool()])
    tokens = int(mask.sum()) * model.config.text_config.num_experts_per_token
    assert out.expert_load.sum(1).tolist() == [tokens] * 5


@torch.no_grad()
def test_multimodal(model):
    golden = load_file(GOLDEN / "multimodal_fp32.safetensors")
    images = {"pixel_values": golden["pixel_values"], "grid_thws": golden["grid_thws"]}
    check(model._embed(golden["input_ids_expanded"], **images, cache=None), golden["embeds"])
    check(model(input_ids=golden["input_ids_expanded"], **images).logits, golden["logits"])


def test_loss_and_gradients():
    """Gradients of all text parameters, experts on their dequantised weights."""
    golden = load_file(GOLDEN / "grads_fp32.safetensors")
    config = LatentMoEConfig.from_pretrained(GOLDEN / "checkpoint")
    config.quantization_config["dequantize"] = True
    model = load(torch.float32, config=config).train()
    for name, param in model.named_parameters():
        param.requires_grad_("e_score_correction_bias" not in name and "language_model" in name)
    loss = model(input_ids=golden["input_ids"], labels=golden["labels"]).loss
    loss.backward()
    assert abs(loss.item() - golden["loss"].item()) < 1e-5
    params = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    expert = model.language_model.model.layers[3].block_sparse_moe.experts
    prefix, hidden = "language_model.model.layers.3.block_sparse_moe.experts.5.", 32
    params[f"{prefix}w1.weight"] = expert.gate_up_proj.grad[5, :hidden]
    params[f"{prefix}w3.weight"] = expert.gate_up_proj.grad[5, hidden:]
    params[f"{prefix}w2.weight"] = expert.down_proj.grad[5]
    names = [name for name in golden if name.startswith("grad.")]
    assert len(names) == 66
    for name in names:
        actual = params[name.removeprefix("grad.")]
        if name.endswith("A_log"):
            assert not actual[len(golden[name]) :].any(), "padding heads must not learn"
            actual = actual[: len(golden[name])]
        check(actual.reshape(golden[name].shape), golden[name], GRADS)
    squares = sum(grad.double().square().sum() for name, grad in params.items() if not name.startswith(prefix))
    assert abs(squares.sqrt().item() / golden["grad_norm_all_text_params"].item() - 1) < GRADS


@torch.no_grad()
def test_every_layer_in_bf16():
    """Each layer alone, from bf16 states: median token error < 3e-3, at most 2 % of tokens routed differently."""
    golden = load_file(GOLDEN / "layerwise_bf16.safetensors")
    model = load(torch.bfloat16, "eager")
    config = model.config.text_config
    documents = Documents.of_batch(golden["input_ids"].shape, torch.device("cpu"))
    for i, layer in enumerate(model.language_model.model.layers):
        found = {}
        hooks = capture(model, "bf16", found)
        pushed = -(-i // config.attn_res_block_size)
        snapshots = tuple(golden["bank"][:, :, j] for j in range(pushed))
        found[f"layer.{i}.p"] = layer(golden[f"layer.{i}.p_in"], snapshots, None, documents)[0]
        for hook in hooks:
            hook.remove()
        for part in ("p", "attn_out", "mlp_out"):
            actual, expected = found[f"layer.{i}.{part}"], golden[f"layer.{i}.{part}"]
            assert actual.dtype == torch.bfloat16
            error = (actual - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
            assert error.median() < 3e-3, f"layer {i} {part}: {error.median():.1e}"
        if layer.is_moe:
            ids = found[f"router.{i}"][1].sort(dim=1).values
            same = (ids == golden[f"router.{i}.ids"].long()).all(dim=1).float().mean()
            assert same > 0.98


@torch.no_grad()
def test_bf16_run_has_the_size_of_bf16_error():
    """Router flips accumulate, so bf16 logits are only a scale: ours are as far from fp32 as the reference's."""
    golden, exact = (load_file(GOLDEN / f"text_{kind}.safetensors") for kind in ("bf16", "fp32"))
    logits = load(torch.bfloat16)(input_ids=exact["input_ids"]).logits.float()
    ours = (logits - exact["logits"]).norm() / exact["logits"].norm()
    theirs = (golden["logits"].float() - exact["logits"]).norm() / exact["logits"].norm()
    assert ours <= 1.5 * theirs
