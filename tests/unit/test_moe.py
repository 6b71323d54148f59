"""Router, grouped expert products and latent mixture of experts, against golden vectors and plain loops."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.autograd import gradcheck

from modeling_latentmoe import ops
from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig, LatentMoETextConfig
from modeling_latentmoe.layers import WideProduct
from modeling_latentmoe.moe import Experts, LatentMoE, Router
from modeling_latentmoe.mxfp4 import assert_packed, decode, encode, storage_report
from modeling_latentmoe.ops import ExpertMatrices, GroupedMatmul, LowRank, expert_mlp, grouped_linear, route

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"


def text_config(packed: bool = False, **changes) -> LatentMoETextConfig:
    """A small configuration whose constants are not the released ones."""
    values = {
        "num_hidden_layers": 2,
        "linear_attn_config": None,
        "hidden_size": 48,
        "routed_expert_hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "activation_situ_beta": 2.5,
        "activation_situ_linear_beta": 7.0,
        "rms_norm_eps": 1e-3,
        "routed_scaling_factor": 1.7,
    }
    quantization = {"quantization_config": {"quant_method": "latentmoe_mxfp4"}} if packed else {}
    return LatentMoETextConfig(**(values | changes), **quantization)


def make_moe(config: LatentMoETextConfig, seed: int = 0) -> LatentMoE:
    torch.manual_seed(seed)
    moe = LatentMoE(config)
    with torch.no_grad():
        for param in moe.parameters():
            if param.is_floating_point():
                param.copy_(torch.randn_like(param) * 0.3 + (param.ndim == 1))
        moe.experts.reset_parameters(0.3)
    return moe


def dequantised(moe: LatentMoE, dtype: torch.dtype) -> LatentMoE:
    """The float twin of a packed block."""
    twin = LatentMoE(text_config(**{key: getattr(moe.config, key) for key in ("num_experts", "num_experts_per_token")}))
    state = {name: value for name, value in moe.state_dict().items() if ".experts" not in f".{name}"}
    for stem in ("gate_up", "down"):
        proj, scale = (getattr(moe.experts, f"{stem}_{leaf}") for leaf in ("proj", "scale"))
        state[f"experts.{stem}_proj"] = decode(proj, scale, dtype)
    twin.load_state_dict(state)
    return twin.to(dtype)


def reference_moe(moe: LatentMoE, x_TD: torch.Tensor) -> torch.Tensor:
    """The block's formulas token by token, expert by expert."""
    config, out = moe.config, []

    def glu(gate, up):
        beta, linear = config.activation_situ_beta, config.activation_situ_linear_beta
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear * torch.tanh(up / linear)

    for x in x_TD:
        score = torch.sigmoid(moe.gate.weight @ x)
        chosen = sorted(range(config.num_experts), key=lambda e: -(score[e] + moe.gate.e_score_correction_bias[e]))
        chosen = chosen[: config.num_experts_per_token]
        total = sum(score[e] for e in chosen)
        latent = moe.routed_expert_down_proj.weight @ x
        mixed = torch.zeros_like(latent)
        for e in chosen:
            gate, up = (moe.experts.gate_up_proj[e] @ latent).chunk(2)
            weight = score[e] / total * config.routed_scaling_factor
            mixed = mixed + weight * (moe.experts.down_proj[e] @ glu(gate, up))
        mixed = mixed * torch.rsqrt(mixed.square().mean() + config.rms_norm_eps) * moe.routed_expert_norm.weight
        y = moe.routed_expert_up_proj.weight @ mixed
        shared = moe.shared_experts
        y = y + shared.down_proj.weight @ glu(shared.gate_proj.weight @ x, shared.up_proj.weight @ x)
        out.append(y)
    return torch.stack(out)


def golden_moe(layer: int) -> LatentMoE:
    """A MoE block with the golden checkpoint's weights, in fp32, experts packed."""
    config = LatentMoEConfig(**json.loads((GOLDEN / "checkpoint" / "config.json").read_text())).text_config
    packed = LatentMoETextConfig(**{**config.to_dict(), "quantization_config": {"quant_method": "latentmoe_mxfp4"}})
    tensors = {}
    for file in (GOLDEN / "checkpoint").glob("*.safetensors"):
        tensors |= load_file(file)
    prefix = f"language_model.model.layers.{layer}.block_sparse_moe."
    tensors = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    state = {name: value for name, value in tensors.items() if not name.startswith("experts.")}

    def stack(matrix: str, leaf: str) -> torch.Tensor:
        return torch.stack([tensors[f"experts.{e}.{matrix}.{leaf}"] for e in range(config.num_experts)])

    for leaf, suffix in (("weight_packed", "proj"), ("weight_scale", "scale")):
        state[f"experts.gate_up_{suffix}"] = torch.cat([stack("w1", leaf), stack("w3", leaf)], dim=1)
        state[f"experts.down_{suffix}"] = stack("w2", leaf)
    moe = LatentMoE(packed)
    moe.load_state_dict(state)
    return moe.eval()


def max_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("layer", [1, 2, 3, 4, 5])
def test_golden_router_and_output(layer):
    golden = load_file(GOLDEN / "text_fp32.safetensors")
    moe = golden_moe(layer)
    x_BTD = golden[f"layer.{layer}.mlp_in"]
    _, ids_TS, weights_TS = moe.gate(x_BTD.flatten(0, 1))
    ids_TS, order_TS = ids_TS.sort(-1)
    assert torch.equal(ids_TS.int(), golden[f"router.{layer}.ids"])
    assert max_error(weights_TS.gather(-1, order_TS), golden[f"router.{layer}.weights"]) < 2e-4
    y_BTD, logits_TE, load_E = moe(x_BTD)
    assert max_error(y_BTD, golden[f"layer.{layer}.mlp_out"]) < 2e-4
    assert logits_TE.dtype == torch.float32 and load_E.dtype == torch.int64
    assert torch.equal(load_E, torch.bincount(ids_TS.flatten(), minlength=16))


@pytest.mark.parametrize(
    "changes", [{}, {"num_experts_per_token": 1}, {"num_experts_per_token": 6}, {"num_experts_per_token": 2}]
)
def test_block_is_its_formula_in_float64(changes):
    moe = make_moe(text_config(**changes)).double()
    x_BTD = torch.randn(2, 5, 48, dtype=torch.float64)
    y_BTD, _, load_E = moe(x_BTD)
    torch.testing.assert_close(y_BTD.flatten(0, 1), reference_moe(moe, x_BTD.flatten(0, 1)), rtol=1e-12, atol=1e-12)
    assert load_E.sum() == 10 * moe.config.num_experts_per_token


def test_block_gradients_are_those_of_its_formula():
    moe = make_moe(text_config()).double()
    x_TD = torch.randn(7, 48, dtype=torch.float64, requires_grad=True)
    names, params = zip(*[(n, p) for n, p in moe.named_parameters() if p.requires_grad], strict=True)
    seed = torch.randn(7, 48, dtype=torch.float64)
    ours = torch.autograd.grad((moe(x_TD[None])[0][0] * seed).sum(), (x_TD, *params))
    theirs = torch.autograd.grad((reference_moe(moe, x_TD) * seed).sum(), (x_TD, *params))
    assert "gate.weight" in names and "experts.gate_up_proj" in names
    for name, a, b in zip(("x", *names), ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=name)


def test_swiglu_without_latent_or_shared_experts():
    config = text_config(routed_expert_hidden_size=None, num_shared_experts=0, hidden_act="silu", hidden_size=64)
    moe = make_moe(config).double()
    assert {name.split(".")[0] for name, _ in moe.named_parameters()} == {"gate", "experts"}
    x_TD = torch.randn(4, 64, dtype=torch.float64)
    _, ids_TS, weights_TS = moe.gate(x_TD)
    expected = torch.zeros_like(x_TD)
    for t in range(4):
        for e, weight in zip(ids_TS[t], weights_TS[t], strict=True):
            gate, up = (moe.experts.gate_up_proj[e] @ x_TD[t]).chunk(2)
            expected[t] += weight * (moe.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(moe(x_TD[None])[0][0], expected, rtol=1e-12, atol=1e-12)


def test_latent_without_norm_and_rounding_of_each_expert_in_bf16():
    moe = make_moe(text_config(latent_moe_use_norm=False, num_shared_experts=0)).bfloat16()
    assert "routed_expert_norm.weight" not in moe.state_dict()
    x_TD = torch.randn(5, 48, dtype=torch.bfloat16)
    _, ids_TS, weights_TS = moe.gate(x_TD)
    assert weights_TS.dtype == torch.float32
    latent = moe.routed_expert_down_proj(x_TD)
    rows = []
    for t in range(5):
        total = torch.zeros(64)
        for e, weight in zip(ids_TS[t], weights_TS[t], strict=True):
            gate, up = (latent[t : t + 1] @ moe.experts.gate_up_proj[e].T).chunk(2, -1)
            hidden = ops.situ_glu(gate, up, 2.5, 7.0)
            expert = hidden @ moe.experts.down_proj[e].T
            assert expert.dtype == torch.bfloat16
            total = total + weight * expert[0].float()
        rows.append(total.bfloat16())
    torch.testing.assert_close(moe(x_TD[None])[0][0], moe.routed_expert_up_proj(torch.stack(rows)), rtol=0, atol=0)


# --- router ---


def test_bias_chooses_but_does_not_weigh():
    logits_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias_E = torch.tensor([0.0, 0.0, 0.0, 5.0])
    ids_TS, weights_TS = route(logits_TE, bias_E, 2, renormalize=False)
    assert ids_TS.tolist() == [[3, 0]]
    torch.testing.assert_close(weights_TS, torch.tensor([[-1.0, 2.0]]).sigmoid())


def test_weights_renormalise_and_scale():
    logits_TE = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    ids_TS, weights_TS = route(logits_TE, torch.zeros(8), 3, scaling_factor=2.5)
    torch.testing.assert_close(weights_TS.sum(-1), torch.full((5,), 2.5))
    score = logits_TE.sigmoid().gather(-1, ids_TS)
    torch.testing.assert_close(weights_TS, 2.5 * score / score.sum(-1, keepdim=True))


def test_softmax_scores():
    logits_TE = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    ids_TS, weights_TS = route(logits_TE, torch.zeros(8), 3, activation="softmax", renormalize=False)
    torch.testing.assert_close(weights_TS, logits_TE.softmax(-1).gather(-1, ids_TS))


def test_groups_limit_the_choice():
    # Best single expert is 0, but group {2, 3} has the best pair, then {4, 5}.
    logits_TE = torch.tensor([[3.0, -9.0, 2.0, 1.9, 1.5, 1.4, -2.0, -2.0]])
    ids_TS, _ = route(logits_TE, torch.zeros(8), 3, groups=4, top_groups=2)
    assert sorted(ids_TS[0].tolist()) == [2, 3, 4]
    # Negative biased scores of kept groups still beat dropped groups.
    ids_TS, _ = route(logits_TE, torch.full((8,), -4.0), 4, groups=4, top_groups=2)
    assert sorted(ids_TS[0].tolist()) == [2, 3, 4, 5]
    ids_TS, _ = route(logits_TE, torch.zeros(8), 3, groups=8, top_groups=3)
    assert sorted(ids_TS[0].tolist()) == [0, 2, 3]


def test_groups_agree_with_transformers():
    from transformers.models.kimi_linear import modeling_kimi_linear as theirs

    config = theirs.KimiLinearConfig(
        hidden_size=32,
        num_local_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_routed_experts=16,
    )
    router = theirs.KimiLinearTopkRouter(config)
    ours = Router(
        text_config(
            hidden_size=32,
            num_experts=16,
            num_experts_per_token=4,
            num_expert_group=4,
            topk_group=2,
            routed_scaling_factor=config.routed_scaling_factor,
        )
    )
    state = {"weight": torch.randn(16, 32), "e_score_correction_bias": torch.randn(16) * 0.2}
    router.load_state_dict(state)
    ours.load_state_dict(state)
    x_TD = torch.randn(200, 32)
    found, expected = ours(x_TD), router(x_TD)
    torch.testing.assert_close(found[0], expected[0])
    by_expert = [
        torch.zeros(200, 16).scatter(-1, ids, weights)
        for ids, weights in ((found[1], found[2]), (expected[2], expected[1]))
    ]
    torch.testing.assert_close(*by_expert)


def test_router_stays_fp32():
    gate = make_moe(text_config()).gate
    bias = gate.e_score_correction_bias.clone()
    gate.bfloat16()
    assert gate.weight.dtype == torch.bfloat16
    assert torch.equal(gate.e_score_correction_bias, bias)
    assert not gate.e_score_correction_bias.requires_grad
    x_TD = torch.randn(9, 48, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_TE, _, weights_TS = gate(x_TD)
    assert weights_TS.dtype == torch.float32
    torch.testing.assert_close(logits_TE, x_TD.float() @ gate.weight.float().T, rtol=1e-6, atol=1e-6)


# --- grouped products ---


def test_gradcheck_of_float_and_packed_products():
    counts = [2, 0, 3, 1]
    x_RI = torch.randn(6, 32, dtype=torch.float64, requires_grad=True)
    weight_EOI = torch.randn(4, 5, 32, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, w: GroupedMatmul.apply(x, w, None, counts), (x_RI, weight_EOI))
    packed, scale = encode(weight_EOI.detach())
    assert gradcheck(lambda x: GroupedMatmul.apply(x, packed, scale, counts), (x_RI,))


@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck_of_expert_mlp_with_adapters(packed):
    torch.manual_seed(0)
    config = text_config()
    x_TL = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    ids_TS = torch.tensor([[0, 2], [2, 3], [3, 0]])
    weights_TS = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    stacks = [
        torch.randn(4, 64, 32, dtype=torch.float64) * 0.2,
        torch.randn(4, 32, 32, dtype=torch.float64) * 0.2,
    ]
    factors = []
    for rows in (64, 32):
        factors += [
            torch.randn(4, 1, 32, dtype=torch.float64),
            torch.randn(4, rows, 1, dtype=torch.float64) * 0.2,
        ]
    for factor in factors:
        factor.requires_grad_()

    def run(x, weights, a1, b1, a2, b2):
        stored = [encode(stack) if packed else (stack, None) for stack in stacks]
        gate_up = ExpertMatrices(*stored[0], (LowRank(a1, b1, 0.5),))
        down = ExpertMatrices(*stored[1], (LowRank(a2, b2, 2.0),))
        return expert_mlp(x, ids_TS, weights, gate_up, down, config)

    assert gradcheck(run, (x_TL, weights_TS, *factors), fast_mode=True)


def test_adapters_equal_folded_weights():
    torch.manual_seed(0)
    counts = [3, 0, 4]
    x_RI, weight_EOI = torch.randn(7, 32), torch.randn(3, 8, 32)
    adapters = tuple(LowRank(torch.randn(3, r, 32), torch.randn(3, 8, r), s) for r, s in ((2, 0.5), (3, -1.5)))
    folded = weight_EOI + sum(s * b @ a for a, b, s in adapters)
    found = grouped_linear(x_RI, ExpertMatrices(weight_EOI, None, adapters), counts)
    torch.testing.assert_close(found, grouped_linear(x_RI, ExpertMatrices(folded), counts), rtol=1e-5, atol=1e-4)


def test_adapters_compute_in_their_master_dtype():
    counts = [4, 4]
    x_RI = torch.randn(8, 32).bfloat16()
    a_ErI, b_EOr = torch.randn(2, 3, 32, requires_grad=True), torch.randn(2, 8, 3, requires_grad=True)
    zero = torch.zeros(2, 8, 32, dtype=torch.bfloat16)
    found = grouped_linear(x_RI, ExpertMatrices(zero, None, (LowRank(a_ErI, b_EOr, 1.0),)), counts)
    exact = torch.cat([x.float() @ a.T @ b.T for x, a, b in zip(x_RI.split(counts), a_ErI, b_EOr, strict=True)])
    assert torch.equal(found, exact.bfloat16())
    found.float().sum().backward()
    assert a_ErI.grad.dtype == b_EOr.grad.dtype == torch.float32
    assert a_ErI.grad.abs().sum() > 0 and b_EOr.grad.abs().sum() > 0


# --- packed experts ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decoded_bytes", [1, 3 * 64 * 64 * 4, 2**30])
@pytest.mark.parametrize("tokens", [1, 11])
def test_packed_equals_dequantised_bit_by_bit(dtype, decoded_bytes, tokens, monkeypatch):
    monkeypatch.setattr(ops, "DECODED_BYTES", decoded_bytes)
    packed = make_moe(text_config(packed=True)).to(dtype)
    # Experts 1 and 4 never receive a token.
    packed.gate.e_score_correction_bias.data[[1, 4]] = -100.0
    twin = dequantised(packed, dtype)
    assert packed.experts.gate_up_proj.dtype == torch.uint8
    x_BTD = torch.randn(1, tokens, 48, dtype=dtype)
    results = []
    for moe in (packed, twin):
        x = x_BTD.clone().requires_grad_()
        y_BTD, _, load_E = moe(x)
        assert load_E[1] == load_E[4] == 0
        dense = [p for n, p in moe.named_parameters() if p.requires_grad and not n.startswith("experts.")]
        grads = torch.autograd.grad((y_BTD * torch.linspace(-1, 1, 48, dtype=dtype)).sum(), (x, *dense))
        results.append((y_BTD, *grads))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_experts_without_rows_get_zero_gradients():
    moe = make_moe(text_config())
    moe.gate.e_score_correction_bias.data[[1, 4]] = -100.0
    moe(torch.randn(1, 3, 48))[0].sum().backward()
    grad = moe.experts.gate_up_proj.grad
    assert grad[[1, 4]].abs().max() == 0
    assert grad[[0, 2, 3, 5]].abs().sum() > 0


def test_only_bytes_are_saved_for_backward():
    saved = []
    experts = make_moe(text_config(packed=True, num_experts=64)).experts
    counts = [1] * 64
    x_RI = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        GroupedMatmul.apply(x_RI, experts.gate_up_proj, experts.gate_up_scale, counts).sum().backward()
    assert {t.data_ptr() for t in saved} == {
        experts.gate_up_proj.data_ptr(),
        experts.gate_up_scale.data_ptr(),
    }
    assert sum(t.nbytes for t in saved) == 64 * 64 * (64 // 2 + 64 // 32)


def test_bytes_never_get_gradients_or_change():
    moe = make_moe(text_config(packed=True))
    before = {name: param.clone() for name, param in moe.experts.named_parameters()}
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.1)
    for _ in range(3):
        moe(torch.randn(2, 4, 48))[0].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in moe.experts.named_parameters():
        assert param.grad is None and not param.requires_grad
        assert torch.equal(param, before[name])


def test_dtype_changes_keep_bytes_and_logical_shapes():
    import copy

    moe = make_moe(text_config(packed=True))
    before = {name: param.clone() for name, param in moe.experts.named_parameters()}
    for changed in (moe.to(torch.float16), moe.to("cpu", torch.bfloat16), moe.double(), copy.deepcopy(moe)):
        for name, param in changed.experts.named_parameters():
            assert torch.equal(param, before[name])
        assert changed.experts.gate_up_proj.ds_shape == (6, 64, 64)
        assert changed.experts.down_proj.ds_shape == (6, 64, 32)
    assert moe.routed_expert_up_proj.weight.dtype == torch.float64
    with torch.device("meta"):
        empty = Experts(text_config(packed=True))
    assert empty.to_empty(device="cpu").gate_up_proj.ds_shape == (6, 64, 64)


def test_fresh_packed_experts_have_the_asked_spread():
    experts = Experts(text_config(packed=True, num_experts=32))
    torch.manual_seed(0)
    experts.reset_parameters(0.05)
    assert decode(experts.down_proj, experts.down_scale, torch.float32).std().item() == pytest.approx(0.05, rel=0.03)


def test_storage_is_asserted_and_reported():
    moe = make_moe(text_config(packed=True))
    assert_packed(moe)
    experts = 6 * (64 * 64 + 64 * 32)
    assert f"routed experts {experts:,} in" in storage_report(moe)
    assert "= 4.25 bits each (uint8); all other weights" in storage_report(moe)
    assert "= 16.00 bits each (bfloat16)" in storage_report(make_moe(text_config()).bfloat16())
    assert "routed experts" not in storage_report(moe.shared_experts)


def test_assert_packed_lists_every_fault():
    moe = make_moe(text_config(packed=True))
    moe.experts.gate_up_scale = torch.nn.Parameter(moe.experts.gate_up_scale.float())
    moe.experts.down_scale = torch.nn.Parameter(moe.experts.down_scale[:, :1].clone(), requires_grad=False)
    with pytest.raises(ValueError, match=r"2 expert tensors.*gate_up_scale is trainable torch.float32.*down_scale"):
        assert_packed(moe)
    with pytest.raises(ValueError, match=r"gate_up_scale does not exist"):
        assert_packed(make_moe(text_config()))


# --- padding ---


@pytest.mark.parametrize("packed", [False, True])
def test_padding_is_not_routed_and_gives_zeros(packed):
    moe = make_moe(text_config(packed=packed))
    x_BTD = torch.randn(2, 6, 48)
    valid_BT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    x_BTD[~valid_BT] = float("nan")
    x_BTD.requires_grad_()
    y_BTD, logits_TE, load_E = moe(x_BTD, valid_BT)
    alone = moe(x_BTD.detach()[valid_BT][None])
    assert torch.equal(y_BTD[valid_BT], alone[0][0])
    assert torch.equal(logits_TE[valid_BT.flatten()], alone[1])
    assert torch.equal(load_E, alone[2]) and load_E.sum() == 7 * 3
    assert y_BTD[~valid_BT].abs().max() == 0 and logits_TE[~valid_BT.flatten()].abs().max() == 0
    y_BTD.sum().backward()
    assert x_BTD.grad[~valid_BT].abs().max() == 0
    assert x_BTD.grad[valid_BT].abs().min() > 0


def test_nothing_but_padding_still_reaches_every_parameter():
    moe = make_moe(text_config())
    y_BTD, _, load_E = moe(torch.randn(1, 4, 48), torch.zeros(1, 4, dtype=torch.bool))
    assert load_E.sum() == 0 and y_BTD.abs().max() == 0
    y_BTD.sum().backward()
    for name, param in moe.named_parameters():
        if param.requires_grad:
            assert param.grad is not None and param.grad.abs().max() == 0, name


def test_same_bits_on_every_run_and_in_any_company():
    moe = make_moe(text_config(packed=True))
    x_BTD = torch.randn(1, 20, 48)
    first, again = moe(x_BTD)[0], moe(x_BTD)[0]
    assert torch.equal(first, again)
    torch.testing.assert_close(moe(x_BTD[:, 7:8])[0], first[:, 7:8], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_wide_product_and_its_gradients(dtype: torch.dtype) -> None:
    """Of the router: logits as of wide copies, gradients that err against float64 no more than those of such copies."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    x, weight = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in ((50, 300), (40, 300))
    )
    grad = torch.randn(50, 40, generator=generator, dtype=wide)
    logits = WideProduct.apply(x, weight)
    assert torch.equal(logits, x.to(wide) @ weight.to(wide).T) and logits.dtype == wide
    plain = torch.autograd.grad(x.to(wide) @ weight.to(wide).T, (x, weight), grad)
    true = grad.double() @ weight.double(), grad.double().T @ x.double()
    for ours, other, exact in zip(torch.autograd.grad(logits, (x, weight), grad), plain, true, strict=True):
        assert ours.dtype == dtype
        errors = [((y.double() - exact).norm() / exact.norm()).item() for y in (ours, other)]
        # Both round to the dtype; before that two bf16 parts of a gradient keep 16 bits of it, which are 2 ** -17 here.
        assert errors[0] <= 1.01 * errors[1]


def test_autocast_does_not_round_the_router_s_gradient() -> None:
    x, weight = torch.randn(6, 30, requires_grad=True), torch.randn(5, 30, requires_grad=True)
    logits = WideProduct.apply(x, weight)
    want = torch.autograd.grad(logits, (x, weight), logits.detach(), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(logits, (x, weight), logits.detach())
    assert all(torch.equal(mine, other) for mine, other in zip(got, want, strict=True))
