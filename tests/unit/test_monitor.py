"""Records, picture, model card, one voice for errors; and what may be written where."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from modeling_latentmoe.training import checkpoint, commands, monitor
from modeling_latentmoe.training.trained_state import load_trained_state


def recorded(folder: Path) -> monitor.Metrics:
    metrics = monitor.Metrics(folder, active=True)
    metrics.add(step=0, eval_loss=3.0, eval_accuracy=0.1, eval_samples=50)
    for step in range(1, 5):
        metrics.add(step=step, loss=2.0 / step, lr=1e-3)
    metrics.add(step=4, eval_loss=0.5, eval_accuracy=0.9, eval_samples=50)
    return metrics


def test_records_are_on_disk_at_once_and_cut_back_on_resume(tmp_path: Path) -> None:
    metrics = recorded(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == metrics.records and len(lines) == 6
    assert metrics.series("loss") == ([1, 2, 3, 4], [2.0, 1.0, 2 / 3, 0.5])
    resumed = monitor.Metrics(tmp_path, active=True, first_step=2)
    resumed.add(step=3, loss=9.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and lines[-1]["loss"] == 9.0


def test_a_record_cut_by_a_kill_is_done_again_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert monitor.Metrics(tmp_path, active=True, first_step=1).records == [{"step": 1, "loss": 2.0}]
    assert file.read_text() == '{"step": 1, "loss": 2.0}\n'
    for damaged in ('{"step": 1, "lo\n', "[]\n", "{}\n", '{"step": "x"}\n'):
        file.write_text('{"step": 0}\n' + damaged)
        with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 is not a record"):
            monitor.Metrics(tmp_path, active=True, first_step=1)


@pytest.mark.parametrize("text", ["a: [1", "- 1", ""])
def test_damaged_settings_of_a_run_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"--resume: .*run\.yaml"):
        checkpoint.check_same_run(tmp_path, {})


def test_files_of_a_run_that_are_missing_or_no_text_are_named(tmp_path: Path) -> None:
    for file, read in (
        (tmp_path / "run.yaml", lambda: checkpoint.check_same_run(tmp_path, {})),
        (tmp_path / "metrics.jsonl", lambda: monitor.Metrics(tmp_path, active=True, first_step=1)),
    ):
        with pytest.raises(ValueError, match=rf"{file} is missing, .*; copy the whole folder"):
            read()
        file.write_bytes(b"a: \xff\n")
        with pytest.raises(ValueError, match=rf"{file} is not"):
            read()


@pytest.mark.parametrize("content", [None, b"", b"junk", b"\x80\x04K\x01."])
def test_description_of_a_trained_state(content: bytes | None, tmp_path: Path) -> None:
    """Missing, empty, junk, a pickle of a number: found before torch reads it, which would print a traceback."""
    if content is not None:
        (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata is damaged, cut short or missing"):
        load_trained_state(tmp_path, None, None, None)


def test_only_the_active_process_writes(tmp_path: Path) -> None:
    monitor.Metrics(tmp_path, active=False).add(step=1, loss=1.0)
    assert not list(tmp_path.iterdir())


def test_picture(tmp_path: Path) -> None:
    monitor.draw(recorded(tmp_path), torch.tensor([[1, 2, 3], [0, 6, 0]]), tmp_path / "training.png")
    with Image.open(tmp_path / "training.png") as image:
        assert image.width > 800 and len(set(image.convert("L").resize((64, 32)).tobytes())) > 5
    monitor.draw(recorded(tmp_path), torch.zeros(0), tmp_path / "dense.png")
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "training.png", "dense.png"}


def test_load_figures_are_those_of_the_worst_layer() -> None:
    load = torch.tensor([[4, 4, 4, 4], [8, 4, 4, 0]])
    assert monitor.load_figures(load) == {
        "load_imbalance": 2.0,
        "load_imbalance_by_layer": {"0": 1.0, "1": 2.0},
        "idle_experts": 1,
    }
    assert monitor.load_figures(torch.zeros(0)) == {"load_imbalance": 0.0, "idle_experts": 0}


def test_loads_of_every_step_survive_a_resume(tmp_path: Path) -> None:
    """Steps 1 to 5 with checkpoints after 2 and 4; continued from 2: the file of steps 3 and 4 is written again."""
    load = torch.arange(6).view(2, 3)
    loads = monitor.Loads(tmp_path, active=True)
    for step in range(1, 6):
        loads.add(load * step)
        if step % 2 == 0:
            loads.write(step)
    found = {file.name: load_file(file)["load"] for file in (tmp_path / monitor.LOAD_FOLDER).iterdir()}
    assert found.keys() == {"step-000002.safetensors", "step-000004.safetensors"}
    expected = torch.stack([load * 3, load * 4]).int()
    assert torch.equal(found["step-000004.safetensors"], expected) and expected.dtype == torch.int32
    monitor.Loads(tmp_path, active=True, first_step=2)
    assert [file.name for file in (tmp_path / monitor.LOAD_FOLDER).iterdir()] == ["step-000002.safetensors"]
    for name in ("step-1000000.safetensors", "step-1000002.safetensors", "step-000002.safetensors.partial", "text"):
        (tmp_path / monitor.LOAD_FOLDER / name).touch()
    monitor.Loads(tmp_path, active=True, first_step=999999)
    left = {file.name for file in (tmp_path / monitor.LOAD_FOLDER).iterdir()}
    assert left == {"step-000002.safetensors", "text"}
    monitor.Loads(tmp_path, active=False).add(load)


def card(folder: Path, base: str) -> str:
    return monitor.model_card(
        recorded(folder),
        base=base,
        adapter="user/digits",
        dataset="digits",
        question='Which "digit"?',
        thinking=False,
        command="accelerate launch scripts/lora.py --lr 1",
    )


def test_card_has_results_and_commands(tmp_path: Path) -> None:
    text = card(tmp_path, "org/base")
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model"] == "org/base" and front["library_name"] == "peft"
    assert "| before | 10.0% | 3.0000 | 50 |\n| after | 90.0% | 0.5000 | 50 |" in text
    assert "for 4 steps" in text and "accelerate launch scripts/lora.py --lr 1" in text
    assert "--adapter user/digits --image picture.png --question \"Which 'digit'?\"" in text
    code = text.split("```python")[1].split("```")[0]
    compile(code, "card", "exec")
    assert 'PeftModel.from_pretrained(base, "user/digits")' in code


def test_card_links_no_local_folder(tmp_path: Path) -> None:
    front = yaml.safe_load(card(tmp_path, str(tmp_path)).split("---")[1])
    assert "base_model" not in front


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    commands.report_error(ValueError("first\nsecond   third"))
    commands.report_error(KeyboardInterrupt())
    assert capsys.readouterr().err == (
        "error: first second third\nerror: interrupted, nothing was saved since the last checkpoint\n"
    )


def test_one_of_several_processes_speaks() -> None:
    store = torch.distributed.TCPStore("localhost", 0, is_master=True)
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
    environment["MASTER_PORT"] = str(store.port)
    assert [commands.first_to_speak(environment) for _ in range(3)] == [True, False, False]


# --- the output folder


def test_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    settings = {"lr": 1.0, "resume": False}
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"--output_dir .* is in use.*--resume.*--overwrite"):
        checkpoint.check_output(str(tmp_path), settings, overwrite=False, resume=False)
    assert (tmp_path / "notes.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="is a file"):
        checkpoint.check_output(str(tmp_path / "notes.txt"), settings, overwrite=True, resume=False)
    assert checkpoint.check_output(str(tmp_path / "new"), settings, False, False) is None
    assert not (tmp_path / "new").exists()


def test_overwriting_removes_the_old_run_and_nothing_else(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "adapter_model.safetensors", "notes.txt"):
        (tmp_path / name).write_text("old")
    (tmp_path / "checkpoint-000003").mkdir()
    (tmp_path / "checkpoint-000004.partial").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    checkpoint.start_output(tmp_path, {"lr": 1.0})
    assert {file.name for file in tmp_path.iterdir()} == {"notes.txt", "run.yaml", "checkpoint-best"}
    assert yaml.safe_load((tmp_path / "run.yaml").read_text()) == {"lr": 1.0}


def test_resume_needs_a_checkpoint_and_the_same_settings(tmp_path: Path) -> None:
    settings = {"lr": 1.0, "resume": True, "overwrite": False}
    with pytest.raises(ValueError, match="--resume: there is no checkpoint in --output_dir"):
        checkpoint.check_output(str(tmp_path / "nowhere"), settings, False, True)
    checkpoint.start_output(tmp_path, {"lr": 1.0, "resume": False, "overwrite": True})
    (tmp_path / "checkpoint-000002").mkdir()
    (tmp_path / "checkpoint-000010").mkdir()
    (tmp_path / "checkpoint-000011.partial").mkdir()
    assert checkpoint.check_output(str(tmp_path), settings, False, True).name == "checkpoint-000010"
    changed = {**settings, "traceback": True}
    assert checkpoint.check_output(str(tmp_path), changed, False, True).name == "checkpoint-000010"
    with pytest.raises(ValueError, match=r"--lr is 2\.0 but the run in .* has 1\.0"):
        checkpoint.check_output(str(tmp_path), {**settings, "lr": 2.0}, False, True)


def test_without_a_checkpoint_the_way_on_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="to start anew, leave it out"):
        checkpoint.latest_checkpoint(tmp_path)
    checkpoint.start_output(tmp_path, {})
    with pytest.raises(ValueError, match="to start anew, give --overwrite in its place"):
        checkpoint.latest_checkpoint(tmp_path)


def test_checkpoints_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    for step in (999_998, 999_999, 1_000_000):
        (tmp_path / f"checkpoint-{step:06d}").mkdir()
    bad = checkpoint.latest_checkpoint(tmp_path)
    assert bad.name == "checkpoint-1000000"
    assert f"is in {tmp_path / 'checkpoint-999999'}; delete {bad}" in checkpoint.last_good_adapter(tmp_path, bad)


def test_first_interrupt_is_a_wish_the_second_an_order() -> None:
    # a shell that starts tests in the background makes them ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), checkpoint.Interrupt() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.asked
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
