"""Layouts that fit and how fast they would be: counts and times by hand, limits, and the files that are written."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from torch import nn

from modeling_latentmoe import LatentMoEConfig
from modeling_latentmoe.training import placement
from modeling_latentmoe.training.flops import forward_flops_per_token
from modeling_latentmoe.training.footprint import Work, experts_on_device, moe_layers, ranks_of_token
from modeling_latentmoe.training.launch import read_launch
from modeling_latentmoe.training.layout import Adapter, build_share, shares
from modeling_latentmoe.training.lora import DENSE_TARGETS
from modeling_latentmoe.training.plan import GIB, Wish, chosen_layers, of_degree, plan
from modeling_latentmoe.training.step_time import (
    OPTIMIZER_BYTES,
    Machine,
    Sizes,
    all_gather,
    all_to_all,
    counts,
    expert_counts,
    from_host,
    matrices,
    micro_batch,
    optimizer_step,
    read_operators,
    reference_counts,
)
from scripts import lora as training
from scripts import plan as script

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = read_operators(ROOT / "results" / "operators.json")
K3 = LatentMoEConfig.kimi_k3().get_text_config()
TINY = LatentMoEConfig.tiny(experts=64)
NO_SIZES = Sizes(0, [], 1, 0, 0, 0)
ADAPTER = Adapter(4, 2)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build_share(TINY, torch.bfloat16, ADAPTER, 0, 1)


def wish(devices: int = 4, memory: float = 3.0, host: float = 0.0, tokens: int = 4096, per_machine: int = 8) -> Wish:
    return Wish(Machine(devices, per_machine), int(memory * GIB), int(host * GIB), tokens, 1024, 1.0)


# ---------------------------------------------------------------------------------------------- counts


def test_products_are_the_model_s(model: nn.Module) -> None:
    config = TINY.get_text_config()
    for number, layer in enumerate(model.get_base_model().language_model.model.layers):
        found = []
        for name, module in layer.named_modules():
            leaf = name.removesuffix(".base_layer").rpartition(".")[2]
            if isinstance(module, nn.Linear) and "lora_" not in name and "_res_proj" not in name:
                found.append((module.in_features, module.out_features, leaf in DENSE_TARGETS))
        assert sorted(found) == sorted(matrices(config, number)), f"layer {number}"


def test_weights_of_the_released_mixers() -> None:
    """443,740,416 and 232,196,096 parameters: without convolutions, norms, decay rates and their biases."""
    shared_and_latent = 3 * 7168 * 6144 + 2 * 7168 * 3584
    found = [sum(i * o for i, o, _ in matrices(K3, layer)) - shared_and_latent for layer in (1, 3)]
    assert 443_740_416 - found[0] in (3 * 12288 * 4 + 12288 + 128 + heads for heads in (96, 128))
    assert 232_196_096 - found[1] == 1536 + 512


def test_counts_of_the_measured_step() -> None:
    found, T = reference_counts(4, 8192, 112), 8192
    assert found["KDA"] == 3 * T * 12288
    assert found["attention"] == T * 4096.5 * 96 * (192 + 128)
    assert found["experts"] == 3 * (16 * T + 64 * 112) * 3 * 3584 * 3072
    assert found["held experts"] == 3 * 112 * 3 * 3584 * 3072
    assert found["router"] == 3 * T * 7168 * 896
    assert found["head"] == T * 7168 * 163840
    # 7 mixtures of two sources; what the first layer's attention reads is one tensor
    assert found["mixtures"] == 7 * (3 * 2 + 2) * T * 7168
    assert (found["other"], found["launches"]) == (4 * T * 7168, 4)
    assert found["indexer"] == T * 4096.5 * 64 * 128
    keys = (2048 * 2049 / 2 + (T - 2048) * 2048) / T
    assert found["sparse attention"] == pytest.approx(T * keys * 96 * 320)


def test_products_are_those_of_flops() -> None:
    """Dense products, router, attention and routed experts are all that flops.py counts beside KDA's recurrence."""
    T = 4096
    found = counts(K3, Work(T, packed=False), T, 0)
    routed = 92 * 16 * T * 3 * 3584 * 3072
    recurrence = 69 * 96 * (3 * 128 * 128 + 3 * 64 * 128) * T
    ours = found["dense products"] + found["router"] + found["attention"] + routed + recurrence
    assert 2 * ours / T == pytest.approx(forward_flops_per_token(K3, T, head=False))


def test_rows_of_experts() -> None:
    """All devices have as many rows as one alone would, and a part of the experts."""
    weight = 3 * 3584 * 3072
    for ep, held in ((1, 896), (64, 14)):
        expected = {"experts": (16 * 512 + 64 * held) * weight, "held experts": held * weight}
        assert expert_counts(K3, Work(512, ep)) == expert_counts(K3, Work(512, ep, packed=False)) == expected


# ---------------------------------------------------------------------------------------------- times


def test_the_measured_steps_take_what_was_measured() -> None:
    """339.3 and 434.8 ms of one device with 112 and 896 experts; the second one gave experts and router only. Twice the
    tokens take twice as long, attention four times, and what is paid for every expert is paid once."""
    for experts, ms, parts in ((112, 339.3, [119, 24, 15, 127]), (896, 434.8, [119, 24, 15, 225])):
        config = script.first_layers(4, experts)
        split = micro_batch(config, OPERATORS, Machine(1), NO_SIZES, Work(8192), 8192, 0)
        assert 1e3 * split.total == pytest.approx(ms, rel=0.02)
        assert [round(1e3 * part) for part in split[:4]] == parts
    twice = micro_batch(config, OPERATORS, Machine(1), NO_SIZES, Work(16384), 16384, 0)
    assert twice.dense == pytest.approx(2 * split.dense) and twice.kda == pytest.approx(2 * split.kda)
    assert twice.attention == pytest.approx(4 * split.attention, rel=1e-3)
    assert split.experts < twice.experts < 2 * split.experts


def recorded(experts: int, latent_moe: float, dense: float) -> dict:
    parts = {"latent_moe": latent_moe, "dense products": dense, "kda": 20.0, "attention": 10.0, "low_rank": 5.0}
    parts |= {"residual": 3.0, "other": 2.0}
    row = {"op": "K3 slice, LoRA step", "shape": f"T=1024, {experts} experts", "parts_ms": parts}
    other = row | {"shape": f"T=1024, full recompute, {experts} experts", "parts_ms": {}}
    return {"device": "A", "commit": "b", "rows": [row | {"ours_ms": sum(parts.values()) + 4.0}, other]}


def test_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of experts take 1 ms a 1024, experts 10 us, columns of the router 20 us."""

    def measured(experts: int) -> dict:
        rows = 16 * 1024 + 64 * experts
        return recorded(experts, rows / 1024 + 0.01 * experts, 50 + 0.02 * experts)

    operators, records = tmp_path / "mine.json", tmp_path / "records.json"
    operators.write_text((ROOT / "results" / "operators.json").read_text())
    records.write_text(json.dumps([measured(896), measured(112)]))
    assert script.main(["--calibrate", str(records), "--operators", str(operators)]) == 0
    values = json.loads(operators.read_text())
    found = {name: entry["ms"] for name, entry in values["operators"].items()}
    assert found["experts"] == pytest.approx(16 + 7) and found["held experts"] == pytest.approx(1.12)
    assert found["dense products"] == pytest.approx(50) and found["router"] == pytest.approx(17.92)
    assert (found["KDA"], found["mixtures"], found["launches"]) == (20, 3, pytest.approx(4))
    assert found["head"] == json.loads((ROOT / "results" / "operators.json").read_text())["operators"]["head"]["ms"]
    assert values["measured_at"] == {"layers": 4, "tokens": 1024, "experts": 112} and values["device"] == "A"
    split = micro_batch(
        script.first_layers(4, 112), read_operators(operators), Machine(1), NO_SIZES, Work(1024), 1024, 0
    )
    assert 1e3 * split.total == pytest.approx(sum(measured(112)["rows"][0]["parts_ms"].values()) + 4)
    records.write_text(json.dumps([measured(112)]))
    assert script.main(["--calibrate", str(records), "--operators", str(operators)]) == 2
    assert "two steps are needed" in capsys.readouterr().err
    records.write_text(json.dumps([measured(896) | {"commit": "c"}, measured(112)]))
    assert script.main(["--calibrate", str(records), "--operators", str(operators)]) == 2
    assert "are of commits b and c: measure both at one" in capsys.readouterr().err


def test_computing_again() -> None:
    """All of forward once more; selective keeps attention, and what travelled."""
    config, work = script.first_layers(4, 896), Work(8192, 2)
    none, selective, full = (
        micro_batch(config, OPERATORS, Machine(2), NO_SIZES, work._replace(checkpointing=how), 8192, 0)
        for how in ("none", "selective", "full")
    )
    assert full.dense == selective.dense == pytest.approx(1.5 * none.dense)
    assert full.attention == pytest.approx(1.21 * none.attention) and selective.attention == none.attention
    assert full.all_to_all > selective.all_to_all == none.all_to_all


def test_dispatch_and_combine() -> None:
    """Two devices of one machine: one row a token leaves; 64 devices of eight machines: 56 / 64 of 14.4 rows do."""
    layers, T, L = 92, 8192, 3584
    rows = [T * ranks_of_token(K3, ep) for ep in (2, 64)]
    hops = (2 * L + 8 * 16, 4 * L, 2 * L, 2 * L + 4 * 16)
    link, far, memory = (OPERATORS.bandwidth[name] for name in ("all_to_all", "machines", "memory"))
    fixed = 4 * OPERATORS.collective_s + OPERATORS.counts_s
    near = layers * (fixed + sum(hops) * rows[0] / 2 / link + 84 * L * rows[0] / memory)
    assert all_to_all(K3, OPERATORS, Machine(2), Work(T, 2)) == pytest.approx(near)
    wide = layers * (fixed + sum(hops) * rows[1] * 56 / 64 / far + 84 * L * rows[1] / memory)
    assert all_to_all(K3, OPERATORS, Machine(64), Work(T, 64)) == pytest.approx(wide)
    assert all_to_all(K3, OPERATORS, Machine(8), Work(T, 1)) == 0


def test_a_gather_hides_behind_a_layer() -> None:
    link = OPERATORS.bandwidth["all_gather"]
    sizes = Sizes(10**9, [2 * 10**9, 10**9, 4 * 10**9], 8, 0, 0, 0)
    once = [OPERATORS.collective_s + nbytes * 7 / 8 / link for nbytes in (10**9, 2 * 10**9, 10**9, 4 * 10**9)]
    # a layer computes as long as the gather of 10^9 bytes takes: of the last one a part shows
    found = all_gather(OPERATORS, Machine(8), sizes, (once[0], 1.0))
    assert found == pytest.approx(2 * (once[0] + once[1]) + once[3] - once[0])
    assert all_gather(OPERATORS, Machine(1), sizes._replace(shards=1), (0.0, 0.0)) == 0


def test_experts_from_the_host() -> None:
    """Of 23 of 92 layers, four layers apart."""
    coming = 10**9 / OPERATORS.bandwidth["host"]
    sizes = NO_SIZES._replace(expert_layer=10**9)
    assert from_host(K3, OPERATORS, sizes, 23, (coming, coming)) == 0
    assert from_host(K3, OPERATORS, sizes, 23, (coming / 8, coming / 4)) == pytest.approx(23 * coming / 2)
    assert from_host(K3, OPERATORS, sizes, 0, (0.0, 0.0)) == 0


def test_optimizer() -> None:
    sizes = NO_SIZES._replace(adapters=8 * 10**8, expert_adapters=4 * 10**8)
    update = 2 * 10**8 * OPTIMIZER_BYTES / OPERATORS.bandwidth["memory"]
    assert optimizer_step(K3, OPERATORS, Machine(8), sizes, 8) == pytest.approx(update)
    # two devices hold the same experts: each sends and gets half, twice
    shared = 4 * 92 * OPERATORS.collective_s + 4 * 10**8 / OPERATORS.bandwidth["machines"]
    assert optimizer_step(K3, OPERATORS, Machine(16), sizes, 8) == pytest.approx(update + shared)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop("device"), "not a table of measured operators"),
        (lambda values: values["operators"].pop("KDA"), "no time of KDA"),
        (lambda values: values["gb_per_s"].pop("host"), "no time of host"),
        (lambda values: values["operators"].update(KDA=3), "not a table of measured operators"),
    ],
)
def test_damaged_tables(change, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads((ROOT / "results" / "operators.json").read_text())
    change(values)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(values))
    assert script.main(["--check", "--operators", str(file)]) == 2
    printed = capsys.readouterr().err
    assert f"{file}: {message}" in printed and len(printed.splitlines()) == 1


# ---------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("ep", [1, 4, 16])
def test_shares_of_a_degree(ep: int, model: nn.Module) -> None:
    """Packed and in bf16, as a model that is built so has them."""
    whole = next(shares(model, 16, 1))
    for packed in (True, False):
        built = build_share(LatentMoEConfig.tiny(experts=64, packed=packed), torch.bfloat16, ADAPTER, 0, ep)
        expected = next(shares(built, 16, ep))
        assert of_degree(whole, ep, unpacked=not packed)[4:] == expected[4:]


def test_all_layouts(model: nn.Module) -> None:
    """Degrees 1, 2, 4; packed and bf16; micro-batches of 1, 2, 4 rows; three kinds of checkpointing."""
    found = plan(model, OPERATORS, wish(memory=8.0))
    assert len(found) == 3 * 2 * 3 * 3 and len({layout[:8] for layout in found}) == len(found)
    assert [layout.step.total for layout in found] == sorted(layout.step.total for layout in found)
    assert all(layout.rows * layout.accumulation == 4 and layout.efsdp * layout.ep == 4 for layout in found)
    assert found == plan(model, OPERATORS, wish(memory=8.0))


def test_less_memory_leaves_fewer(model: nn.Module) -> None:
    every = {layout[:8]: layout for layout in plan(model, OPERATORS, wish())}
    totals = sorted(layout.footprint.total for layout in every.values())
    middle = totals[len(totals) // 2] / GIB
    fewer = plan(model, OPERATORS, wish(memory=middle))
    assert {layout[:8] for layout in fewer} == {
        key for key, layout in every.items() if layout.footprint.total <= int(middle * GIB)
    }
    with pytest.raises(ValueError, match=r"no layout of 4 devices fits. The smallest needs .* 0.1 more .*--ep 4"):
        plan(model, OPERATORS, wish(memory=totals[0] / GIB - 0.1))
    # to the byte
    assert len(plan(model, OPERATORS, wish()._replace(memory=totals[0]))) >= 1
    with pytest.raises(ValueError, match="no layout"):
        plan(model, OPERATORS, wish()._replace(memory=totals[0] - 1))


def test_experts_leave_where_they_must() -> None:
    """As few layers as fit, and no more than host memory takes."""
    model = build_share(LatentMoEConfig.tiny(experts=1024), torch.bfloat16, ADAPTER, 0, 1)
    config, share = model.config.get_text_config(), next(shares(model, 1, 1))
    layer, layers = share.expert_bytes // 7, moe_layers(config)
    assert layers == 7
    (least, *_) = sorted(plan(model, OPERATORS, wish(1)), key=lambda layout: layout.footprint.total)
    # room for all experts of the smallest layout but those of two layers, and these two pass through two more
    tight = wish(1, host=1)._replace(memory=least.footprint.total - 2 * layer)
    (found, *_) = [x for x in plan(model, OPERATORS, tight) if x[:7] == least[:7]]
    assert found.layers_out == 4
    assert found.footprint.experts == experts_on_device(config, share.expert_bytes, 4) == 5 * layer
    assert chosen_layers(config, 4) == [1, 3, 5, 7]
    with pytest.raises(ValueError, match="no layout"):
        plan(model, OPERATORS, tight._replace(host_memory=4 * layer - 1))


def test_shards_of_one_machine(model: nn.Module) -> None:
    """Two machines: all but the experts over all devices, or once on each machine."""
    found = plan(model, OPERATORS, wish(8, per_machine=4, memory=4))
    assert {(layout.copies, layout.shards) for layout in found} == {(1, 8), (2, 4)}
    assert {layout.ep for layout in found} == {1, 2, 4, 8}


def test_no_degree_divides(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="no --ep above 1 divides 3 devices and 64 experts"):
        plan(model, OPERATORS, wish(3, memory=1.0))


# ---------------------------------------------------------------------------------------------- the script


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        (["--devices", "1"], (1, 1, 1)),
        (["--devices", "4"], (1, 4, 1)),
        (["--devices", "8", "--per_machine", "4"], (2, 8, None)),
    ],
)
def test_the_written_configuration(
    switches: list[str], expected: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accelerate reads what was meant from it, and every switch of the printed command is one of lora.py."""
    file, machines = tmp_path / "mine.yaml", expected[0]
    command = ["--model", "tiny", "--memory", "8GiB", "--tokens", "1024", "--max_length", "512", "--write", str(file)]
    for pick in ("1", "4"):
        assert script.main([*command, *switches, "--pick", pick]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("PREDICTION") and f"{file} is written" in printed
        line = next(line for line in printed.splitlines() if line.strip().startswith(f"{pick} "))
        (copies, shards), ep = map(int, line.split()[1].split("x")), int(line.split()[2])
        launch = read_launch(str(file), [])
        assert (launch.machines, launch.processes) == expected[:2] and launch.processes == copies * shards
        assert launch.copies == copies or launch.processes == 1
        words = shlex.split(printed.splitlines()[-1].replace(" R ", " 0 "))
        given = launch_command_parser().parse_args(words[2:])
        assert given.config_file == str(file) and given.training_script == "scripts/lora.py"
        assert (given.main_process_ip == "HOST") == (machines > 1)
        fields = {field.name for field in dataclasses.fields(training.Arguments)}
        switched = [word[2:] for word in given.training_script_args if word.startswith("--")]
        assert set(switched) <= fields
        assert f"--ep {ep} " in printed.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"]


def test_layers_are_named_as_the_loop_reads_them() -> None:
    assert script.spans([1, 2, 3, 5, 7, 8]) == "1-3,5,7-8"
    for count in (3, 50, 92):
        layers = chosen_layers(K3, count)
        assert len(layers) == count
        assert placement.parse_placement(f"host:{script.spans(layers)}").layers == frozenset(layers)


def test_a_check_is_printed_before_it_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0
    first = capsys.readouterr().out
    assert script.main(["--check"]) == 0
    assert capsys.readouterr().out == first and first.startswith("PREDICTION")
    assert "devices 1, --ep 1, experts 112, T=8192, again none: 339 ms" in first
    (ms,) = re.findall("devices 2, --ep 2, experts 896, T=32768, again none: ([0-9,]+) ms", first)
    assert f"devices: {ms.replace(',', '')} ms" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (["--devices", "0"], "--devices 0 must be at least 1"),
        (["--devices", "12"], "--per_machine 8 does not divide --devices 12"),
        (["--tokens", "1000", "--max_length", "300"], "--max_length 300 does not divide --tokens 1000"),
        (["--memory", "64"], "64 must be a number and one of MB, GB"),
        (["--memory", "many GiB"], "many GiB must be a number and one of MB, GB"),
        (["--learned", "1.5"], "--learned 1.5 must be a share"),
        (["--model", "nowhere"], "nowhere does not exist"),
        (["--operators", "nowhere.json"], "nowhere.json: not a table of measured operators"),
        (["--model", "tiny", "--memory", "1GiB"], "--memory 1.0GiB: no layout of 8 devices fits. The smallest needs"),
        (["--model", "tiny", "--pick", "999"], "--pick 999: only "),
    ],
)
def test_mistakes_are_one_line(switches: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(switches) == 2
    printed = capsys.readouterr().err
    assert message in printed and len(printed.splitlines()) == 1


def test_the_released_model() -> None:
    """128 devices of 64 GiB hold it at --ep 64 and 128 only; 8 of 141 GB only with experts in host memory. At 128 dense
    layers are shared out over all, or over the 8 of a machine."""
    model = build_share(LatentMoEConfig.kimi_k3(), torch.bfloat16, Adapter(16, 4), 0, 1)
    many = Wish(Machine(128), 64 * GIB, 0, 32768, 8192, 1.0)
    assert [(x.ep, x.rows, x.checkpointing, x.packed) for x in plan(model, OPERATORS, many)] == [
        (64, 1, "full", True),
        (128, 1, "full", True),
        (128, 1, "full", True),
    ]
    few = many._replace(machine=Machine(8), memory=141 * 10**9)
    with pytest.raises(ValueError, match="is experts: what helps is more devices"):
        plan(model, OPERATORS, few)
    found = plan(model, OPERATORS, few._replace(host_memory=2 * 10**12))
    assert all(layout.layers_out > 2 and layout.packed and layout.ep == 8 for layout in found)
