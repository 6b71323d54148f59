"""scripts/lora.py as a whole: what a run leaves, exact resume, Ctrl-C, several processes, the default job."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from modeling_latentmoe.training import lora
from modeling_latentmoe.training.alerts import FIGURES
from modeling_latentmoe.training.arguments import parse
from modeling_latentmoe.training.loading import load_model
from modeling_latentmoe.training.monitor import MEASURED
from scripts import lora as script

from .conftest import save_small_model

ROOT = Path(__file__).parents[2]
FILES = {
    *("adapter_config.json", "adapter_model.safetensors", "base_model.json", "README.md"),
    *("run.yaml", "metrics.jsonl", "training.png"),
}


def argv(model: Path, output: Path, *more: str) -> list[str]:
    settings = ["--model", str(model), "--output_dir", str(output), "--batch_size", "3", "--eval_samples", "6"]
    return [*settings, "--max_new_tokens", "3", "--r", "4", "--expert_rank", "2", *more]


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def without_times(records: list[dict]) -> list[dict]:
    return [{name: value for name, value in record.items() if name not in MEASURED} for record in records]


def trained(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Trained values and moments of a checkpoint, whole, by name."""
    file = checkpoint.parent / f"{checkpoint.name}-trained.pt"
    dcp_to_torch_save(checkpoint / "trained", file)
    values = torch.load(file, weights_only=True)
    file.unlink()
    return values


def same_state(one: Path, two: Path) -> None:
    """Adapter, optimizer, random state, data position and counters of two checkpoints are bit-identical."""
    a, b = trained(one), trained(two)
    assert a.keys() == b.keys() and {name.rpartition(".")[2] for name in a} == {
        "value",
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    for name, value in a.items():
        assert torch.equal(value, b[name]), name
    a, b = (torch.load(folder / "state.pt", weights_only=True) for folder in (one, two))
    assert torch.equal(a["state"].pop("load"), b["state"].pop("load")) and a["state"] == b["state"]
    for mine, theirs in zip(a["processes"], b["processes"], strict=True):
        assert torch.equal(mine["random"], theirs["random"]) and mine["position"] == theirs["position"]
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (one, two))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def straight(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps with checkpoints at three and six."""
    output = tmp_path_factory.mktemp("straight") / "run"
    more = ["--max_steps", "6", "--save_every", "3", "--eval_every", "3", "--gradient_accumulation", "2"]
    assert script.main(argv(small, output, *more)) == 0
    return output


def test_a_run_leaves_everything(straight: Path, small: Path) -> None:
    names = {path.name for path in straight.iterdir()}
    assert names == FILES | {"checkpoint-000003", "checkpoint-000006", "expert_load"}
    records = metrics(straight)
    assert [r["step"] for r in records if "eval_accuracy" in r] == [0, 3, 6]
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    rates = [r["lr"] for r in steps]
    # every figure that an alert can be set on; the peak of this device is not known
    assert all(FIGURES.keys() - {"mfu", "nonfinite"} <= r.keys() and r["memory_by_rank"] for r in steps)
    assert max(rates) <= 3e-3 and rates[-1] < rates[1] and all(r["grad_norm"] > 0 for r in steps)
    settings = yaml.safe_load((straight / "run.yaml").read_text())
    assert settings["max_steps"] == 6 and settings["model"] == str(small)
    card = (straight / "README.md").read_text()
    assert f"--adapter {straight}" in card and "| after |" in card


def test_the_adapter_changes_the_model(straight: Path, small: Path) -> None:
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        plain = load_model(str(small), "fp32").eval()(input_ids=ids).logits
        model = lora.load_adapter(load_model(str(small), "fp32"), str(straight)).eval()
        assert (model(input_ids=ids).logits - plain).abs().max() > 1e-3


def test_resume_is_exact(straight: Path, small: Path, tmp_path: Path) -> None:
    """Three steps, a new start, three more: the same as six, in weights, moments, order and records."""
    output = tmp_path / "run"
    output.mkdir()
    shutil.copytree(straight / "checkpoint-000003", output / "checkpoint-000003")
    for file in ("run.yaml", "metrics.jsonl"):
        shutil.copy(straight / file, output)
    more = ["--max_steps", "6", "--save_every", "3", "--eval_every", "3", "--gradient_accumulation", "2"]
    assert script.main(argv(small, output, *more, "--resume")) == 0
    same_state(straight / "checkpoint-000006", output / "checkpoint-000006")
    assert without_times(metrics(output)) == without_times(metrics(straight))
    assert {path.name for path in output.iterdir()} == {path.name for path in straight.iterdir()}


@pytest.mark.slow
def test_a_new_run_from_an_adapter(straight: Path, small: Path, tmp_path: Path) -> None:
    """Public report 91: the factors are those of the adapter; moments, step, rates and data order are a new run's."""
    more = ["--max_steps", "6", "--save_every", "1", "--keep", "9", "--gradient_accumulation", "2"]
    assert script.main(argv(small, tmp_path / "run", *more, "--adapter", str(straight))) == 0
    ours, before = metrics(tmp_path / "run"), metrics(straight)
    # what the earlier run ended with
    for name in ("eval_loss", "eval_accuracy"):
        assert ours[0][name] == before[-1][name] and ours[0]["step"] == 0
    new, old = ([r for r in records if "loss" in r] for records in (ours, before))
    for name in ("step", "lr", "done", "tokens"):
        assert [r[name] for r in new] == [r[name] for r in old], name
    assert new[0]["loss"] != old[0]["loss"]

    state = trained(tmp_path / "run" / "checkpoint-000001")
    factors = trained(straight / "checkpoint-000006")
    rate = new[0]["lr"]
    for name in (name.removesuffix(".value") for name in state if name.endswith(".value")):
        assert state[f"{name}.step"] == 1
        # of one gradient alone
        first, second = state[f"{name}.exp_avg"] / 0.1, state[f"{name}.exp_avg_sq"] / 0.001
        torch.testing.assert_close(second, first.square(), rtol=1e-4, atol=1e-12)
        expected = factors[f"{name}.value"] - rate * first / (first.abs() + 1e-8)
        torch.testing.assert_close(state[f"{name}.value"], expected, rtol=1e-4, atol=1e-6)


def test_other_settings_cannot_resume(straight: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(argv(small, straight, "--resume", "--max_steps", "7")) == 2
    assert "--max_steps is 7 but the run in" in capsys.readouterr().err


def test_yaml_settings_and_switches(straight: Path) -> None:
    settings = parse(script.Arguments, "", [str(straight / "run.yaml"), "--lr", "0.5", "--target_modules", "q_proj"])
    assert settings.max_steps == 6 and settings.lr == 0.5 and settings.target_modules == ["q_proj"]
    assert (
        settings.epochs == script.Arguments().epochs and settings.train_projector == script.Arguments().train_projector
    )


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for name in script.Arguments.__dataclass_fields__:
        assert f"--{name}" in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_printed_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--overwrite", "true", "--lr", "1", "--resume", "--output_dir", "a b", "--overwrite=true"]
    rest = "scripts/lora.py --lr 1 --output_dir 'a b' --resume"
    several = "accelerate launch --config_file accelerate_configs/multi_node.yaml --num_machines 2"
    for processes, here, fsdp, device, ep, launch in (
        (1, 1, False, "cpu", 1, "accelerate launch"),
        (4, 4, False, "cuda", 2, "accelerate launch --num_processes 4"),
        (2, 2, False, "cpu", 2, "torchrun --nproc_per_node 2 --"),
        (2, 2, True, "cuda", 1, "accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2"),
        (8, 8, True, "cuda", 8, "accelerate launch --config_file accelerate_configs/fsdp2_ep.yaml --num_processes 8"),
        (16, 8, True, "cuda", 8, f"{several} --machine_rank R --main_process_ip HOST --num_processes 16"),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        accelerator = SimpleNamespace(num_processes=processes, is_fsdp2=fsdp, device=torch.device(device))
        assert script.resume_command(script.launch_command(argv, accelerator, ep)) == f"{launch} {rest}"


@pytest.mark.slow
@pytest.mark.filterwarnings("error::FutureWarning")
def test_packing_epochs_and_bf16(small: Path, tmp_path: Path) -> None:
    """One pass over 40 packed text rows: every row is used once, steps follow from the lengths."""
    rows = [{"prompt": f"{i} {'?' * (i % 7)}", "completion": str(i)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["--dataset", str(tmp_path / "rows.jsonl"), "--eval_dataset", str(tmp_path / "rows.jsonl"), "--packing"]
    more += ["--max_length", "64", "--batch_size", "4", "--epochs", "1", "--dtype", "bf16"]
    more += ["--gradient_checkpointing", "full"]
    assert script.main(argv(small, tmp_path / "run", *more)) == 0
    steps = [r for r in metrics(tmp_path / "run") if "loss" in r]
    assert steps[-1]["done"] == pytest.approx(1.0) and 4 <= len(steps) <= 12
    state = torch.load(tmp_path / "run" / f"checkpoint-{len(steps):06d}" / "state.pt", weights_only=True)
    assert state["processes"][0]["position"]["rows_seen"] == 40


def test_a_packed_batch_without_boundaries_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_boundaries(samples):
        batch = whole(samples)
        del batch["cu_seqlens"]
        return batch

    whole = script.data.pack
    monkeypatch.setattr(script.data, "pack", without_boundaries)
    code = script.main(argv(small, tmp_path / "run", "--packing", "--max_steps", "1"))
    assert code == 2 and "`cu_seqlens`" in capsys.readouterr().err


def start(arguments: list[str], launcher: list[str], cwd: Path) -> subprocess.Popen:
    root = Path(script.__file__).resolve().parent.parent
    command = [*launcher, str(root / "scripts" / "lora.py"), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_ctrl_c_saves_and_resume_goes_on(small: Path, tmp_path: Path) -> None:
    """Interrupted anywhere and resumed, a run ends exactly where the uninterrupted one does."""
    steps = ["--max_steps", "16", "--save_every", "100"]
    process = start(argv(small, tmp_path / "cut", *steps), [sys.executable], tmp_path)
    records, deadline = tmp_path / "cut" / "metrics.jsonl", time.monotonic() + 120
    while not records.exists() or '"loss"' not in records.read_text():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    line = next(line for line in err.splitlines() if line.startswith("error: "))
    assert "stopped after step" in line and line.endswith("--resume")
    assert list((tmp_path / "cut").glob("checkpoint-*/state.pt")) and "Traceback" not in err
    assert script.main(argv(small, tmp_path / "cut", *steps, "--resume")) == 0
    assert script.main(argv(small, tmp_path / "whole", *steps)) == 0
    same_state(tmp_path / "cut" / "checkpoint-000016", tmp_path / "whole" / "checkpoint-000016")


# `accelerate launch` starts several processes on CPU only with MPI; torchrun is what it uses elsewhere. The two
# dashes keep torchrun from taking --r for one of its own switches.
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
LAUNCH += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--"]


@pytest.mark.slow
@pytest.mark.dist
def test_a_launcher_of_two_processes(small: Path, tmp_path: Path) -> None:
    """They say everything once, complain once, and a signal that reaches one worker stops both after the same step."""
    process = start(argv(small, tmp_path / "run", "--max_steps", "50", "--save_every", "100"), LAUNCH, tmp_path)
    records, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not records.exists() or '"loss"' not in records.read_text():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children()
    next(w for w in workers if w.environ().get("RANK") == "1").send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode != 0
    for line in ("routed experts", "trainable parameters", "before training"):
        assert out.count(line) == 1, out
    assert err.count("error: stopped after step") == 1, err
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    step = int(saved.name.removeprefix("checkpoint-"))
    assert f"stopped after step {step}," in err and 0 < step < 50
    assert [r["step"] for r in metrics(tmp_path / "run") if "loss" in r] == list(range(1, step + 1))


def test_held_out_chats_without_a_question(small: Path, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": str(i)}]} for i in "12"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["--dataset", str(tmp_path / "rows.jsonl"), "--eval_split", "train", "--max_steps", "1", "--streaming"]
    assert script.main(argv(small, tmp_path / "run", *more)) == 0
    assert [r["eval_samples"] for r in metrics(tmp_path / "run") if "eval_loss" in r] == [2, 2]
    assert '--question "What is this?"' in (tmp_path / "run" / "README.md").read_text()


def test_a_file_named_like_the_digits_holds_nothing_out(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handwritten digits have a split of their own for that, a file would be what is trained on."""
    monkeypatch.chdir(tmp_path)
    Path("digits.jsonl").write_text('{"prompt": "1?", "completion": "2"}\n' * 4)
    assert script.main(argv(small, tmp_path / "run", "--dataset", "digits.jsonl", "--max_steps", "1")) == 0
    assert not any("eval_loss" in record for record in metrics(tmp_path / "run"))


@pytest.mark.slow
def test_a_step_is_saved_once(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last one: writing a checkpoint again would leave none for a moment. Others are removed by renaming them
    first, and what is not named like a checkpoint is none."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1?", "completion": "2"}\n' * 4)
    saved, save = [], script.checkpoint.save_checkpoint

    def counting(*args):
        saved.append(save(*args).name)
        (tmp_path / "run" / "checkpoint-best").mkdir(exist_ok=True)

    monkeypatch.setattr(script.checkpoint, "save_checkpoint", counting)
    more = ["--dataset", str(tmp_path / "rows.jsonl"), "--max_steps", "3", "--save_every", "1", "--keep", "1"]
    assert script.main(argv(small, tmp_path / "run", *more)) == 0
    assert saved == ["checkpoint-000001", "checkpoint-000002", "checkpoint-000003"]
    left = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert left == {"checkpoint-000003", "checkpoint-best"}
    assert script.checkpoint.latest_checkpoint(tmp_path / "run").name == "checkpoint-000003"


def test_dense_text_model(tmp_path: Path) -> None:
    """Without experts and without vision the same script runs."""
    model = save_small_model(tmp_path / "dense", seed=0, vision=False, experts=0)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1?", "completion": "2"}\n' * 4)
    more = ["--dataset", str(tmp_path / "rows.jsonl"), "--max_steps", "2"]
    assert script.main(argv(model, tmp_path / "run", *more)) == 0
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert config["target_parameters"] is None and "q_proj" in config["target_modules"]
    assert (tmp_path / "run" / "training.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_default_job_learns_the_digits(seed: int, tiny: Path, tmp_path: Path) -> None:
    """From chance to 93 %, within five minutes on two free cores and 2 GiB."""
    command = [sys.executable, "scripts/lora.py", "--output_dir", str(tmp_path / "run"), "--seed", str(seed)]
    started = time.monotonic()
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "2"}, check=True)
    assert time.monotonic() - started <= 300
    # kilobytes, of the largest process so far
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= 2 * 2**20
    accuracies = [r["eval_accuracy"] for r in metrics(tmp_path / "run") if "eval_accuracy" in r]
    assert accuracies[0] <= 0.25 and accuracies[-1] >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize("control", ["digits:blank", "digits:shuffled"])
def test_controls_stay_at_chance(control: str, tiny: Path, tmp_path: Path) -> None:
    assert script.main(["--output_dir", str(tmp_path / "run"), "--dataset", control]) == 0
    assert metrics(tmp_path / "run")[-1]["eval_accuracy"] <= 0.15
