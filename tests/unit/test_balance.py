"""Auxiliary loss and Quantile Balancing: values against definitions, what counts, and loads that become even.

Legend: M MoE layers, T tokens, E experts.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.configuration_latentmoe import LatentMoETextConfig
from modeling_latentmoe.moe import Router
from modeling_latentmoe.ops import route
from modeling_latentmoe.training import lora
from modeling_latentmoe.training.balance import (
    BINS,
    QuantileBalancing,
    auxiliary_loss,
    bin_range,
    expert_shares,
    solve,
)
from modeling_latentmoe.training.loading import checkpoint_activations
from modeling_latentmoe.training.monitor import load_figures
from modeling_latentmoe.training.router_bias import BIAS_FILE, read_biases, routers, set_biases, write_biases


class Routers(nn.Module):
    """Nothing but the routers of a model."""

    def __init__(self, layers: int, experts: int, top_k: int):
        super().__init__()
        self.config = text_config(num_experts=experts, num_experts_per_token=top_k)
        self.layers = nn.ModuleList(Router(self.config) for _ in range(layers))
        torch.manual_seed(0)
        for router in self.layers:
            nn.init.normal_(router.e_score_correction_bias, std=0.1)

    def loads(self, router_logits: list[Tensor]) -> Tensor:
        """Tokens of each expert over the even number, [M, E]."""
        loads = []
        for logits_TE, router in zip(router_logits, self.layers, strict=True):
            ids_TS, _ = route(logits_TE, router.e_score_correction_bias, self.config.num_experts_per_token)
            loads.append(torch.bincount(ids_TS.flatten(), minlength=self.config.num_experts))
        load_ME = torch.stack(loads).double()
        return load_ME / load_ME.mean(-1, keepdim=True)


def text_config(**options) -> LatentMoETextConfig:
    values = LatentMoEConfig.tiny(vision=False).to_dict()["text_config"]
    return LatentMoETextConfig(**values | options)


def skewed_logits(layers: int, tokens: int, experts: int, seed: int = 0, std: float = 0.5) -> list[Tensor]:
    """Scores in which some experts are liked by all tokens and others by few."""
    torch.manual_seed(0)
    popularity = std * torch.randn(layers, 1, experts)
    torch.manual_seed(seed)
    return list(popularity + torch.randn(layers, tokens, experts))


def naive_balance(router_logits: list[Tensor], bias_ME: Tensor, top_k: int) -> Tensor:
    """The exact quantiles of the spec of Quantile Balancing in float64, interpolated nowhere and not centred."""
    result = []
    for logits_TE, bias_E in zip(router_logits, bias_ME, strict=True):
        score_TE = logits_TE.double().sigmoid()
        choice_TE = score_TE + bias_E
        needed = [[] for _ in bias_E]
        for score_E, choice_E in zip(score_TE, choice_TE, strict=True):
            cutoff = sorted(choice_E.tolist(), reverse=True)[top_k]
            for e, score in enumerate(score_E.tolist()):
                needed[e].append(cutoff - score)
        place = -(-len(logits_TE) * top_k // len(bias_E))
        result.append([sorted(values)[place - 1] for values in needed])
    return torch.tensor(result, dtype=torch.float64)


# --- auxiliary loss ---


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_auxiliary_loss_is_its_definition(activation: str) -> None:
    """Value and gradient against a loop in float64; rows of padding have zero logits and count for nothing."""
    layers, tokens, experts = 3, 11, 7
    logits = [x.double() for x in skewed_logits(layers, tokens, experts)]
    valid = torch.tensor([True] * 4 + [False] * 3 + [True] * 4)
    logits = [(x * valid.unsqueeze(-1)).requires_grad_() for x in logits]
    shares = expert_shares(torch.randint(0, 50, (layers, experts)))
    config = text_config(num_experts=experts, num_experts_per_token=2, moe_router_activation_func=activation)
    loss = auxiliary_loss(logits, shares, config, valid)
    ours = torch.autograd.grad(loss, logits)
    expected = torch.zeros((), dtype=torch.float64)
    for layer in range(layers):
        for t in range(tokens):
            if valid[t]:
                score = logits[layer][t].sigmoid() if activation == "sigmoid" else logits[layer][t].exp()
                for e in range(experts):
                    expected = expected + experts * shares[layer, e].double() * score[e] / score.sum() / layers
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, logits), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-15)
        assert mine[valid].any() and not mine[~valid].any()


def test_auxiliary_loss_does_not_depend_on_micro_batches() -> None:
    config, logits = text_config(), skewed_logits(2, 30, 16)
    shares = expert_shares(torch.randint(0, 50, (2, 16)))
    whole = auxiliary_loss(logits, shares, config)
    parts = [auxiliary_loss([x[a:b] for x in logits], shares, config) for a, b in ((0, 1), (1, 18), (18, 30))]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=0)


def test_auxiliary_loss_pushes_away_from_busy_experts() -> None:
    """In fp32, also where every score is zero in fp32. The first step, with uniform shares, pushes nowhere."""
    logits = torch.full((5, 16), -300.0, requires_grad=True)
    uniform = expert_shares(torch.zeros(1, 16, dtype=torch.int64))
    loss = auxiliary_loss([logits], uniform, text_config())
    assert loss.item() == pytest.approx(5)
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.abs().max() < 1e-7
    busy = torch.ones(1, 16, dtype=torch.int64)
    busy[0, 3] = 10
    (grad,) = torch.autograd.grad(auxiliary_loss([logits], expert_shares(busy), text_config()), logits)
    assert (grad[:, 3] > 0).all() and (grad[:, :3] < 0).all()


def test_shares_sum_to_one() -> None:
    load = torch.tensor([[3, 1, 0, 4], [0, 0, 0, 0], [2**40, 2**40, 0, 0]])
    assert expert_shares(load).tolist() == [[0.375, 0.125, 0, 0.5], [0.25] * 4, [0.5, 0.5, 0, 0]]


# --- Quantile Balancing on logits ---


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(12, 3, 401), (5, 1, 7), (6, 4, 90)])
def test_histograms_give_the_exact_quantile_within_a_bin(experts: int, top_k: int, tokens: int) -> None:
    model = Routers(2, experts, top_k)
    logits = skewed_logits(2, tokens, experts)
    balancing = QuantileBalancing(model)
    before = balancing.bias_ME.clone()
    exact = naive_balance(logits, before.double(), top_k)
    balancing.observe(logits)
    assert balancing.counts_MEH.sum(-1).eq(tokens).all()
    for layer in range(2):
        low, width = bin_range(before[layer])
        found = solve(balancing.counts_MEH[layer], low, width, top_k)
        assert (found - exact[layer]).abs().max() <= width
        assert width.item() == pytest.approx((2 + before[layer].max() - before[layer].min()).item() / BINS, rel=1e-5)
    balancing.update(torch.zeros(0))
    centred = exact - exact.mean(-1, keepdim=True)
    new = torch.stack([router.e_score_correction_bias for router in model.layers])
    assert (new - centred).abs().max() <= 2 * width
    assert new.mean(-1).abs().max() < 1e-6 and (new - before).abs().max() > 0.05


def test_quantile_of_counts_by_hand() -> None:
    """4 experts, 1 of 4 chosen, 10 tokens each: 2.5 tokens are wanted, the third one decides."""
    counts = torch.zeros(4, 8, dtype=torch.int32)
    counts[:, 0], counts[:, 7] = torch.tensor([0, 1, 2, 3]), 2
    counts[:, 4] = torch.tensor([8, 7, 6, 5])
    found = solve(counts, torch.tensor(-1.0), torch.tensor(0.5), 1)
    expected = [-1 + 0.5 * (4 + 2.5 / 8), -1 + 0.5 * (4 + 1.5 / 7), -1 + 0.5 * (4 + 0.5 / 6), -1 + 0.5 * 2.5 / 3]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_loads_become_even() -> None:
    """From a tenth to three times the even load to within a few percent of it, for tokens that were not seen."""
    model = Routers(3, 32, 4)
    held_out = skewed_logits(3, 40_000, 32, seed=99)
    before = model.loads(held_out)
    assert before.min() < 0.15 and before.max() > 2.5
    balancing, worst = QuantileBalancing(model), []
    for step in range(8):
        balancing.observe(skewed_logits(3, 20_000, 32, seed=step + 1))
        balancing.update(torch.zeros(0))
        worst.append((model.loads(held_out) - 1).abs().max().item())
    assert worst[0] > 0.2 and worst[-1] < 0.08, worst
    assert not any(router.e_score_correction_bias.requires_grad for router in model.layers)


def test_padding_and_the_cut_into_micro_batches_change_nothing() -> None:
    logits = skewed_logits(2, 300, 16)
    whole, cut, wrong = (QuantileBalancing(Routers(2, 16, 4)) for _ in range(3))
    whole.load(cut.biases())
    wrong.load(cut.biases())
    whole.observe(logits)
    padded = [torch.cat([x[:100], torch.zeros(50, 16), x[100:]]) for x in logits]
    valid = torch.tensor([True] * 100 + [False] * 50 + [True] * 200)
    for a, b in ((0, 120), (120, 121), (121, 350)):
        cut.observe([x[a:b] for x in padded], valid[a:b])
    wrong.observe(padded)
    biases = []
    for balancing in (whole, cut, wrong):
        balancing.update(torch.zeros(0))
        biases.append(torch.stack(list(balancing.biases().values())))
        assert not balancing.counts_MEH.any()
    assert torch.equal(biases[0], biases[1])
    assert not torch.equal(biases[0], biases[2])


def test_biases_go_out_and_in() -> None:
    """What a resumed run loads goes on as the interrupted one would have, in the model too."""
    first, second = Routers(2, 16, 4), Routers(2, 16, 4)
    balancing, resumed = QuantileBalancing(first), QuantileBalancing(second)
    balancing.observe(skewed_logits(2, 300, 16))
    balancing.update(torch.zeros(0))
    resumed.observe(skewed_logits(2, 40, 16))
    resumed.load(balancing.biases())
    for each in (balancing, resumed):
        each.observe(skewed_logits(2, 200, 16, seed=1))
        each.update(torch.zeros(0))
    mine, theirs = first.state_dict(), second.state_dict()
    for name, bias in resumed.biases().items():
        assert torch.equal(mine[name], bias) and torch.equal(theirs[name], bias)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is softmax"),
        ({"num_expert_group": 4, "topk_group": 2, "use_grouped_topk": True}, "num_expert_group is 4"),
        ({"num_experts": None, "num_experts_per_token": None}, "num_experts"),
        ({"num_experts_per_token": 16}, "num_experts_per_token and num_experts are both 16"),
    ],
)
def test_routers_that_choose_in_another_way_are_refused(options: dict, field: str) -> None:
    model = nn.Module()
    model.config = text_config(**options)
    with pytest.raises(ValueError, match=f"--balance quantile.*{field}"):
        QuantileBalancing(model)


# --- in a model ---


def small_model(seed: int = 0) -> LatentMoEForConditionalGeneration:
    """Some experts are liked by all tokens: the final norm and biases are not those of a new model."""
    torch.manual_seed(seed)
    model = LatentMoEForConditionalGeneration(LatentMoEConfig.tiny(vision=False))
    for router in routers(model).values():
        nn.init.normal_(router.e_score_correction_bias, std=0.1)
        nn.init.normal_(router.weight, std=0.1)
    return model


def batch(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    mask = torch.ones(12, 50, dtype=torch.int64)
    mask[3, 20:] = mask[7, :31] = 0
    return {"input_ids": torch.randint(0, 250, (12, 50)), "attention_mask": mask}


def test_a_model_becomes_even_and_only_its_biases_change() -> None:
    model = small_model().train()
    before = copy.deepcopy(model.state_dict())
    balancing, inputs = QuantileBalancing(model), batch()
    valid = inputs["attention_mask"].flatten().bool()
    imbalances = []
    for _ in range(8):
        with torch.no_grad():
            output = model(**inputs, output_router_logits=True)
        imbalances.append(load_figures(output.expert_load)["load_imbalance"])
        balancing.observe(output.router_logits, valid)
        assert balancing.counts_MEH.sum(-1).eq(valid.sum()).all()
        balancing.update(torch.zeros(0))
    assert imbalances[0] > 2 and imbalances[-1] < 1.1, imbalances
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == set(routers(model)) and len(changed) == 7
    assert all(f"layers.{layer + 1}." in name for layer, name in enumerate(routers(model)))
    for name, bias in balancing.biases().items():
        assert bias.dtype == torch.float32 and torch.equal(bias, model.state_dict()[name])


def test_recomputed_layers_count_once_and_evaluation_not_at_all() -> None:
    counts = []
    for recompute in (False, True):
        model = small_model().train()
        if recompute:
            checkpoint_activations(model)
        balancing, inputs = QuantileBalancing(model), batch()
        output = model(**inputs, output_router_logits=True)
        balancing.observe(output.router_logits, inputs["attention_mask"].flatten().bool())
        output.logits.square().mean().backward()
        counts.append(balancing.counts_MEH.clone())
        biases = balancing.biases()
        with torch.no_grad():
            model.eval()(**batch(1))
        assert torch.equal(balancing.counts_MEH, counts[-1])
        assert all(torch.equal(bias, balancing.biases()[name]) for name, bias in biases.items())
    assert torch.equal(counts[0], counts[1])


def test_float64_models_get_fp32_biases() -> None:
    """The same values whatever the weights are, so that a file holds them exactly."""
    model = small_model().double().train()
    balancing = QuantileBalancing(model)
    with torch.no_grad():
        balancing.observe(model(**batch(), output_router_logits=True).router_logits)
    balancing.update(torch.zeros(0))
    for name, router in routers(model).items():
        assert router.e_score_correction_bias.dtype == torch.float64
        assert torch.equal(router.e_score_correction_bias, balancing.biases()[name].double())


def test_names_are_those_of_the_checkpoint_with_an_adapter_too(tmp_path: Path) -> None:
    model = small_model()
    model.save_pretrained(tmp_path)
    lora.add_adapter(model, r=2, lora_alpha=4, expert_rank=1)
    names = set(routers(model))
    assert names == {name for name in load_file(tmp_path / "model.safetensors") if name.endswith("correction_bias")}
    balancing = QuantileBalancing(model)
    balancing.load({name: torch.full((16,), 0.5) for name in names})
    assert (model.language_model.model.layers[3].block_sparse_moe.gate.e_score_correction_bias == 0.5).all()


# --- the file ---


def test_file_round_trips(tmp_path: Path) -> None:
    model, other = small_model(), small_model(seed=1)
    assert read_biases(tmp_path, model) == {}
    biases = QuantileBalancing(model).biases()
    write_biases(tmp_path, biases)
    assert [file.name for file in tmp_path.iterdir()] == [BIAS_FILE]
    set_biases(other, read_biases(tmp_path, other))
    for name, router in routers(other).items():
        assert torch.equal(router.e_score_correction_bias, biases[name])
        assert not router.e_score_correction_bias.requires_grad


FAULTS = {
    "no router": (lambda v, n: v.update({"a.b": v[n].clone()}), r"the model has no router with the bias a\.b"),
    "missing": (lambda v, n: v.pop(n), r"layers\.1\.\S+ is missing"),
    "shape": (lambda v, n: v.update({n: v[n][:-1].clone()}), r"is float32 \[15\], the model needs float32 \[16\]"),
    "dtype": (lambda v, n: v.update({n: v[n].bfloat16()}), r"is bfloat16 \[16\], the model needs"),
    "not finite": (lambda v, n: v[n].fill_(float("nan")), r"layers\.1\.\S+ holds NaN or infinite numbers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_do_not_fit_are_refused(fault: str, tmp_path: Path) -> None:
    model = small_model()
    values = QuantileBalancing(model).biases()
    change, message = FAULTS[fault]
    change(values, next(iter(values)))
    save_file(values, tmp_path / BIAS_FILE)
    with pytest.raises(ValueError, match=f"{re.escape(BIAS_FILE)}: .*{message}"):
        read_biases(tmp_path, model)
    (tmp_path / BIAS_FILE).write_bytes((tmp_path / BIAS_FILE).read_bytes()[:-3])
    with pytest.raises(ValueError, match=f"{re.escape(BIAS_FILE)} is damaged or cut short"):
        read_biases(tmp_path, model)
