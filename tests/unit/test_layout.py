"""The dry run of a launch: what torch makes of every rank on a fake process group, against what is computed."""

import json
from pathlib import Path

import pytest
import torch

from modeling_latentmoe import LatentMoEConfig, LatentMoEForConditionalGeneration
from modeling_latentmoe.training import layout, streaming
from modeling_latentmoe.training.layout import Adapter, build_share, check_complete, dense_bytes, fake_share, shares
from modeling_latentmoe.training.lora import add_adapter
from modeling_latentmoe.training.mesh import is_expert
from scripts import layout as script

ROOT = Path(__file__).resolve().parents[2]
RELEASED = str(ROOT / "tests" / "fixtures" / "k3")
CONFIGS = ROOT / "accelerate_configs"
ADAPTER = Adapter(r=4, expert_rank=2)


@pytest.mark.parametrize(
    ("world", "ep", "copies", "ranks"),
    [
        (1, 1, 1, [0]),
        (2, 1, 1, [1]),
        (2, 2, 1, [0, 1]),
        (4, 2, 1, range(4)),
        pytest.param(8, 8, 1, range(8), marks=pytest.mark.slow),
        # two copies of the dense weights, of four shards each
        pytest.param(8, 4, 2, [0, 3, 4, 7], marks=pytest.mark.slow),
        # no shards, as under DDP
        (4, 4, 4, [3]),
        pytest.param(128, 16, 1, [0, 70, 127], marks=pytest.mark.slow),
    ],
)
def test_torch_holds_what_is_computed(world: int, ep: int, copies: int, ranks: list[int]) -> None:
    config, dtype = LatentMoEConfig.tiny(), torch.bfloat16
    model = build_share(config, dtype, ADAPTER, 0, ep)
    computed = list(shares(model, world, ep, copies))
    check_complete(computed, 16, dense_bytes(model), copies)
    for rank in ranks:
        assert fake_share(config, dtype, ADAPTER, rank, world, ep, copies) == computed[rank]


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (6, 2), (128, 64)])
def test_bytes_of_every_rank(world: int, ep: int) -> None:
    """They add up: experts and their adapters once per row, everything else once; moments two for each weight."""
    config = LatentMoEConfig.tiny(experts=64)
    with torch.device("meta"):
        whole = LatentMoEForConditionalGeneration(config)
        whole = add_adapter(whole, r=4, lora_alpha=8, expert_rank=2, train_projector=True)
    found = list(shares(build_share(config, torch.float32, ADAPTER, 0, ep), world, ep))
    expected = {True: 0, False: 0}
    for name, param in whole.named_parameters():
        expected[is_expert(name)] += param.nbytes
    assert sum(s.expert_bytes + s.expert_adapter_bytes for s in found) == expected[True] * world // ep
    assert sum(s.dense_bytes + s.dense_adapter_bytes for s in found) == expected[False]
    if ep == world:
        trained = sum(param.nbytes for param in whole.parameters() if param.requires_grad)
        assert sum(s.gradient_bytes for s in found) == trained and sum(s.moment_bytes for s in found) == 2 * trained
    for row in range(world // ep):
        assert [e for share in found if share.efsdp == row for e in share.experts] == list(range(64))


def test_without_experts() -> None:
    config = LatentMoEConfig.tiny(experts=0)
    model = build_share(config, torch.float32, ADAPTER, 0, 1)
    computed = list(shares(model, 2, 1))
    check_complete(computed, 0, dense_bytes(model))
    assert fake_share(config, torch.float32, ADAPTER, 1, 2, 1) == computed[1]
    assert computed[1].expert_bytes == 0 and not computed[1].experts


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        (lambda rank, degree, experts: range(0, 4), "row 0 of the mesh holds expert 0 of every layer 4 times"),
        (lambda rank, degree, experts: range(rank * 4, rank * 4 + 3), "expert 3 of every layer 0 times"),
        (lambda rank, degree, experts: range(rank * 4 + 1, rank * 4 + 5), "expert 0 of every layer 0 times"),
    ],
)
def test_wrong_owners_are_found(owner, message: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(layout, "owned_experts", owner)
    assert script.main(["--ep", "4"]) == 2
    assert message in capsys.readouterr().err


def test_a_rank_that_holds_other_experts_is_found(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The computed shares are right, the model of one rank is not."""
    monkeypatch.setattr(streaming, "owned_experts", lambda rank, degree, experts: range(0, 4))
    assert script.main(["--ep", "4"]) == 2
    assert "error: rank 7 holds Share(rank=7, efsdp=1, ep=3, experts=range(0, 4)" in capsys.readouterr().err


def test_unsharded_weights_are_found(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(layout, "shard_dense", lambda model, mesh: None)
    assert script.main([]) == 2
    assert "error: rank 0 holds" in capsys.readouterr().err


def test_missing_dense_bytes_are_found() -> None:
    model = build_share(LatentMoEConfig.tiny(), torch.float32, ADAPTER, 0, 2)
    with pytest.raises(ValueError, match="bytes of dense weights"):
        check_complete(shares(model, 4, 2), 16, dense_bytes(model) + 1)


def test_the_script_prints_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Public report 58: the map of eight ranks is shown, and comes from the library."""
    assert script.main(["--ep", "4", "--r", "4", "--expert_rank", "2"]) == 0
    printed = capsys.readouterr().out
    assert "dense mesh: dp_replicate 1 x dp_shard 8" in printed and "expert mesh: efsdp 2 x ep 4" in printed
    assert "rank 6: efsdp 1, ep 2, experts 8 to 11 of every layer" in printed
    assert "each row of the expert mesh holds every one of 16 experts once" in printed
    assert "ranks 0, 4, 7: built, and they hold what was computed" in printed


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (["--ep", "3"], "--ep 3 does not divide the 8 processes"),
        (["--ep", "3", "--num_processes", "6"], "--ep 3 does not divide the 16 experts"),
        (["--num_processes", "0"], "num_processes 0, num_machines 1: below 1"),
        (["--num_processes", "9", "--num_machines", "2"], "num_machines 2 does not divide num_processes 9"),
        (["--r", "0"], "--r 0 and --expert_rank 4 must be at least 1"),
        (["--config_file", "nowhere.yaml"], "`nowhere.yaml` does not exist"),
    ],
)
def test_what_cannot_work_is_one_line(switches: list[str], message: str, capsys) -> None:
    assert script.main(switches) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and not printed.out


@pytest.mark.parametrize("ep", [8, 64])
def test_bytes_of_the_released_model(ep: int) -> None:
    """A rank's experts and all dense weights: what a load of that share was measured to own."""
    config = LatentMoEConfig.from_pretrained(RELEASED)
    with torch.device("meta"):
        model = LatentMoEForConditionalGeneration(config).to(torch.bfloat16)
    streaming.restrict_experts(model, 0, ep)
    computed = list(shares(model.requires_grad_(False), ep, ep))
    records = json.loads((ROOT / "results" / "scale.json").read_text())
    rows = [row for record in records for row in record["rows"] if row["shape"] == f"EP{ep}"]
    assert computed[0].expert_bytes + sum(share.dense_bytes for share in computed) == rows[0]["owned"]


@pytest.mark.slow
def test_the_released_model_on_128_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """The launch of multi_node.yaml, to the rank."""
    file = str(CONFIGS / "multi_node.yaml")
    assert script.main(["--config_file", file, "--model", RELEASED, "--ep", "64", "--dtype", "bf16"]) == 0
    printed = capsys.readouterr().out
    assert "processes 128, machines 16" in printed
    assert "ranks 64 to 127: efsdp 1, ep 0 to 63, experts 0 to 895 of every layer, 14 each" in printed
    (first,) = (line.split() for line in printed.splitlines() if line.strip().startswith("0  "))
    assert first == ["0", "22.60", "0.34", "0.90", "0.03", "0.37", "0.74", "24.97"]
    assert "ranks 0, 64, 127: built, and they hold what was computed" in printed


def test_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 8}')
    assert script.main(["--model", str(tmp_path), "--ep", "4"]) == 2
    assert f"{tmp_path / 'config.json'}: model_type is 'bert'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "it must be a JSON object"),
        ('{"model_type": "latentmoe", "text_config": []}', "text_config: [], must be an object or null"),
        ('{"model_type": "latentmoe", "text_config": {}, "vision_config": []}', "vision_config: [], must be"),
        ('{"model_type": "latentmoe", "text_config": {"linear_attn_config": []}}', "linear_attn_config: [], must be"),
    ],
)
def test_a_damaged_config_is_named(config: str, message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(config)
    assert script.main(["--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'config.json'}" in error and message in error


def test_a_model_that_is_nowhere_is_named(capsys) -> None:
    assert script.main(["--model", "nowhere"]) == 2
    assert "model nowhere: neither a folder here" in capsys.readouterr().err
