"""Every mistake a user can make: one line that names the file, field or switch, exit code 2, nothing half
written."""

import json
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from PIL import Image
from safetensors.torch import load_file, save_file

from modeling_latentmoe.training import checkpoint, files, lora, monitor
from modeling_latentmoe.training.arguments import parse
from modeling_latentmoe.training.loading import load_model
from scripts import generate
from scripts import lora as lora_script

CHAT = [{"role": "user", "content": "Which digit is this?"}, {"role": "assistant", "content": "3"}]

# argv -> what the script printed about the mistake
Failing = Callable[..., str]


@pytest.fixture
def failing(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Failing:
    """Runs the training script with small settings, expects exit code 2 and one line, and returns that
    line."""

    def run(*argv: str, model: Path = small, untouched: bool = True) -> str:
        output = tmp_path / "run"
        before = sorted(output.rglob("*")) if output.exists() else None
        common = ["--model", str(model), "--output_dir", str(output), "--batch_size", "2", "--eval_samples", "2"]
        code = lora_script.main([*common, "--max_new_tokens", "2", *argv])
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(lines) == 1, lines
        if untouched:
            assert (sorted(output.rglob("*")) if output.exists() else None) == before, "something was written"
        return lines[0]

    return run


def jsonl(folder: Path, *rows: dict) -> str:
    """A JSON-lines file of rows, beside an image of each name that does not start with "no"."""
    folder.mkdir(exist_ok=True)
    for row in rows:
        for name in row.get("images", []):
            if not name.startswith("no"):
                Image.new("RGB", (28, 28), (9, 9, 9)).save(folder / name)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


# --- the command line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--r", "0"], "--r 0 must be"),
        (["--expert_rank", "-1"], "--expert_rank -1 must be"),
        (["--push_to_hub", "a/b/c"], "--push_to_hub a/b/c"),
        (["--learning_rate", "1"], "--learning_rate"),
        (["--r", "sixteen"], "--r: invalid int value: 'sixteen'"),
        (["--dtype", "fp8"], "--dtype: invalid choice: 'fp8'"),
        (["--streaming"], "--streaming needs --max_steps"),
        (["--r", "0"], "--r 0"),
        (["--batch_size", "0"], "--batch_size 0 must be at least 1"),
        (["--epochs", "0"], "--epochs"),
        (["--max_grad_norm", "-1"], "--max_grad_norm -1.0 must be above 0"),
        (["--max_grad_norm", "nan"], "--max_grad_norm nan must be above 0"),
        (["--lr", "nan"], "--lr nan must be a number above 0"),
        (["--lr", "0"], "--lr 0.0 must be a number above 0"),
        (["--lr", "-1"], "--lr -1.0 must be a number above 0"),
        (["--lr_kda", "inf"], "--lr_kda inf must be a number above 0"),
        (["--lr_attention", "0"], "--lr_attention 0.0 must be a number above 0"),
        (["--lr_experts", "-1"], "--lr_experts -1.0 must be a number above 0"),
        (["--lr_projector", "nan"], "--lr_projector nan must be a number above 0"),
        (["--lr_indexer", "1e-3"], "--lr_indexer 0.001 needs --train_indexer"),
        (["--ep_chunks", "2"], "--ep_chunks 2: at --ep 1 nothing travels"),
        (["--ep", "8", "--ep_node_size", "3"], "--ep_node_size 3 must divide --ep 8"),
        (["--eval_every", "-1"], "--eval_every -1 must be at least 0"),
        (["--experts_in", "disk:1"], "--experts_in disk:1 must be device, auto, host:LAYERS or file:LAYERS"),
        (["--experts_in", "host:0-9"], "--experts_in host:0-9: the last layer of "),
        (["--experts_in", "host:0"], "--experts_in host:0: no routed experts in these layers of "),
        (["--warmup", "1"], "--warmup 1.0 must be a share"),
        (["--warmup", "-0.1"], "--warmup -0.1 must be a share"),
        (["--weight_decay", "-1"], "--weight_decay -1.0 must be at least 0"),
        (["--batch_size", "auto", "--ep", "8", "--ep_chunks", "2"], "--batch_size auto tries what may not fit"),
        (["--batch_size", "many"], "--batch_size many must be a number or auto"),
        (["--alert", "imbalance>4"], "--alert 'imbalance>4' must be FIGURE>NUMBER or FIGURE<NUMBER"),
        (["--alert", "loss>9", "--alert", "loss"], "--alert 'loss' must be FIGURE>NUMBER"),
        (["--alert", "mfu<0.3"], "--alert mfu: the peak of this device is not known, give --peak_tflops"),
        (["--prometheus", "nowhere/run.prom"], "--prometheus nowhere/run.prom: its folder does not exist"),
        (["--peak_tflops", "0"], "--peak_tflops 0.0 must be a number above 0"),
        (["--resume"], "--resume: there is no checkpoint"),
        (["--target_modules", "q_proj", "qq"], "--target_modules qq: the model has no such module; it has "),
        (["--target_modules", "gate"], "is the router"),
        (["--target_modules", "indexer.wq_b"], "--target_modules indexer.wq_b: LoRA adapts no indexer"),
    ],
)
def test_switches(argv: list[str], words: str, failing: Failing) -> None:
    assert words in failing(*argv)


def test_a_tracker_that_is_not_installed(failing: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_script.importlib.util, "find_spec", lambda name: None)
    assert "--log_with wandb: it is not installed" in failing("--log_with", "wandb", "--max_steps", "1")


def test_traceback_is_shown_however_it_is_asked_for(failing: Failing, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("traceback: true\ndataset: digits:grey\n")
    with pytest.raises(ValueError, match="digits:grey"):
        lora_script.main([str(file)])
    assert "digits:grey" in failing("--dataset", "digits:grey", "--traceback", "false")


def test_yaml_files(failing: Failing, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"

    def message(text: str, *argv: str) -> str:
        file.write_text(text)
        with pytest.raises(ValueError) as error:
            parse(lora_script.Arguments, "", [str(file), *argv])
        return str(error.value)

    assert "run.yaml: unknown setting learning_rate" in message("lr: 1\nlearning_rate: 2\n")
    assert "run.yaml is not valid YAML" in message("lr: [1\n")
    assert "must hold lines `name: value`" in message("- lr\n")
    assert "--r: invalid int value: 'many'" in message("r: many\n")
    assert lora_script.main([str(tmp_path / "absent.yaml")]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run here")
def test_kernels_that_cannot_run(failing: Failing) -> None:
    assert 'kernels="hub": kernels run on cuda devices, the tensors are on cpu' in failing("--kernels", "hub")


def test_output_folder_that_cannot_be_made(failing: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the model is loaded."""
    monkeypatch.setattr(lora_script, "load_model", None)
    assert "--output_dir /proc/x/run cannot be written" in failing("--output_dir", "/proc/x/run")


def test_output_folder_in_use(failing: Failing, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    assert f"--output_dir {tmp_path / 'run'} is in use" in failing("--max_steps", "1")


# --- the model


def damaged(small: Path, folder: Path) -> tuple[Path, Path]:
    """A copy of the small model, and its second shard."""
    shutil.copytree(small, folder)
    return folder, sorted(folder.glob("*.safetensors"))[1]


def test_missing_shard(small: Path, failing: Failing, tmp_path: Path) -> None:
    model, shard = damaged(small, tmp_path / "missing")
    shard.unlink()
    assert shard.name in failing("--max_steps", "1", model=model)


def test_truncated_shard(small: Path, failing: Failing, tmp_path: Path) -> None:
    model, shard = damaged(small, tmp_path / "truncated")
    shard.write_bytes(shard.read_bytes()[:-100])
    assert shard.name in failing("--max_steps", "1", model=model)


def test_no_such_model(failing: Failing, tmp_path: Path) -> None:
    assert "nowhere" in failing("--max_steps", "1", model=tmp_path / "nowhere")
    assert "model nowhere: neither a folder here nor at hand from the Hub" in failing(model=Path("nowhere"))


# --- the data


def test_missing_columns(failing: Failing, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d", {"images": ["a.png"], "text": "x"})
    message = failing("--dataset", data)
    assert "rows.jsonl" in message and "`messages`" in message and "only images, text" in message


def test_placeholders_that_do_not_match(failing: Failing, tmp_path: Path) -> None:
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}]
    data = jsonl(tmp_path / "d", {"images": ["a.png"], "messages": [{"role": "user", "content": parts}, CHAT[1]]})
    message = failing("--dataset", data, "--max_steps", "1", untouched=False)
    assert "rows.jsonl, row 0: `messages` has 2 image placeholders but `images` holds 1" in message


@pytest.mark.slow
def test_unreadable_image(failing: Failing, tmp_path: Path, small: Path, capsys) -> None:
    rows = [{"images": [name], "messages": CHAT} for name in ("a.png", "b.png", "no.png")]
    data = jsonl(tmp_path / "d", *rows)
    message = failing("--dataset", data, "--epochs", "1", untouched=False)
    assert "rows.jsonl, row 2" in message and "no.png" in message
    argv = ["--model", str(small), "--dataset", data, "--epochs", "1", "--skip_bad_images"]
    assert lora_script.main([*argv, "--output_dir", str(tmp_path / "skipped")]) == 0
    assert "1 unreadable image" in capsys.readouterr().out


@pytest.mark.slow
def test_samples_over_the_limit(failing: Failing, tmp_path: Path, small: Path, capsys) -> None:
    rows = [{"messages": [CHAT[0], {"role": "assistant", "content": "3" * n}]} for n in (1, 1, 300)]
    data = jsonl(tmp_path / "d", *rows)
    assert "3 samples exceed --max_length 9" in failing("--dataset", data, "--max_length", "9", untouched=False)
    argv = ["--model", str(small), "--dataset", data, "--epochs", "1", "--max_length", "200"]
    assert lora_script.main([*argv, "--output_dir", str(tmp_path / "dropped")]) == 0
    assert "left out: 1 sample" in capsys.readouterr().out


def test_empty_dataset(failing: Failing, tmp_path: Path) -> None:
    assert "rows.jsonl" in failing("--dataset", jsonl(tmp_path / "d"))


@pytest.mark.parametrize("streaming", [[], ["--streaming", "--max_steps", "1"]])
def test_dataset_of_blank_lines(streaming: list[str], failing: Failing, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n\n")
    assert re.search(f"dataset {file}(: no row is in it| is empty)$", failing("--dataset", str(file), *streaming))


def test_unknown_kind_of_file(failing: Failing, tmp_path: Path) -> None:
    file = tmp_path / "rows.zip"
    file.touch()
    assert f"error: dataset {file}: unknown file type, expected" in failing("--dataset", str(file))


def test_switches_that_a_file_has_no_use_for(failing: Failing, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "data", {"messages": CHAT})
    assert "--split test[:9]: --dataset" in failing("--dataset", file, "--split", "test[:9]")
    assert "--dataset_config en: dataset" in failing("--dataset", file, "--dataset_config", "en")
    assert "--dataset_config en: dataset digits has no" in failing("--dataset_config", "en")


def test_empty_held_out_dataset(failing: Failing, tmp_path: Path) -> None:
    assert "rows.jsonl" in failing("--eval_dataset", jsonl(tmp_path / "d"), "--max_steps", "1")


def test_one_file_holds_nothing_out(failing: Failing, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "data", {"messages": CHAT})
    assert "--eval_split test" in failing("--dataset", file, "--eval_split", "test")


def test_damage_that_only_a_stream_meets(failing: Failing, tmp_path: Path) -> None:
    file = Path(jsonl(tmp_path / "data", {"messages": CHAT}, {"messages": CHAT}))
    file.write_text(file.read_text() + "{bad\n")
    line = failing("--dataset", str(file), "--streaming", "--max_steps", "1", untouched=False)
    assert str(file) in line and "JSON parse error" in line


def test_text_that_is_not_utf8(failing: Failing, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps({"messages": CHAT}).replace("digit", "Größe").encode("latin-1") + b"\n")
    assert f"{file}, row 0" in failing("--dataset", str(file), untouched=False)


@pytest.mark.parametrize(
    ("file", "content"),
    [("config.json", "[]"), ("config.json", "{"), ("tokenizer.json", "{"), ("tokenizer.json", "[" * 100_000)]
    + [("model.safetensors.index.json", content) for content in ("{}", "[]", "{")],
)
def test_json_of_a_model_that_is_damaged(
    file: str, content: str, small: Path, failing: Failing, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small, folder)
    (folder / file).write_text(content)
    assert file in failing(model=folder)


def test_no_such_dataset(failing: Failing, tmp_path: Path) -> None:
    assert "elsewhere.parquet" in failing("--dataset", str(tmp_path / "elsewhere.parquet"))
    assert "digits:grey" in failing("--dataset", "digits:grey")


def test_held_out_rows_are_streamed_and_keep_their_own_configuration(
    failing: Failing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, data = [], jsonl(tmp_path / "d", {"messages": CHAT})
    other = jsonl(tmp_path / "other", {"messages": CHAT})

    def recording(source, split, config=None, streaming=False):
        calls.append((source, split, config, streaming))
        dataset, folder = open_dataset(source, split, None, streaming)
        assert streaming == isinstance(dataset, IterableDataset)
        return dataset, folder

    open_dataset = lora_script.open_dataset
    monkeypatch.setattr(lora_script, "open_dataset", recording)
    common = ["--dataset", data, "--dataset_config", "en", "--eval_split", "train", "--target_modules", "no"]
    for more in (["--streaming", "--max_steps", "1"], ["--eval_dataset", other]):
        failing(*common, *more)
    assert calls == [
        *[(data, "train", "en", True)] * 2,
        (data, "train", "en", False),
        (other, "train", None, False),
    ]


# --- while it runs


def test_loss_that_is_not_finite_keeps_the_last_good_adapter(
    failing: Failing, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth step has a NaN: what is kept are the weights that still gave a finite loss in the third."""
    losses, kept = [], []

    def breaking(*args):
        kept.append([p.detach().clone() for name, p in args[1].named_parameters() if "lora_" in name])
        step = backpropagate(*args)
        losses.append(step.loss if len(losses) < 3 else float("nan"))
        return step._replace(loss=losses[-1])

    backpropagate = lora_script.backpropagate
    monkeypatch.setattr(lora_script, "backpropagate", breaking)
    message = failing("--max_steps", "20", untouched=False)
    output = tmp_path / "run"
    assert "step 4: loss nan, gradient norm" in message and f"the adapter of step 2 is in {output}" in message
    assert not list(output.rglob(f"*{files.TEMPORARY}"))
    model = lora.load_adapter(load_model(str(small), "fp32"), str(output))
    factors = [p for name, p in model.named_parameters() if "lora_" in name]
    assert all(torch.equal(a, b) for a, b in zip(factors, kept[2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(factors, kept[1], strict=True))


@pytest.mark.parametrize(
    ("owner", "writer"),
    [(monitor.Loads, "write"), (checkpoint, "save_trained_state"), (torch, "save")],
)
def test_a_full_disk_is_one_line(
    owner: Any, writer: str, failing: Failing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries that write have errors of their own for it. No file can become longer once `writer` begins."""
    write, limit = getattr(owner, writer), resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(*args: Any, **kwargs: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limit[1]))
        return write(*args, **kwargs)

    monkeypatch.setattr(owner, writer, full)
    try:
        message = failing("--max_steps", "2", "--save_every", "1", untouched=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "File too large" in message
    assert not (tmp_path / "run" / "checkpoint-000001").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    ["state.pt", *(pytest.param(f"trained/{name}", marks=pytest.mark.slow) for name in ("__0_0.distcp", ".metadata"))],
)
def test_resume_from_a_damaged_checkpoint_or_a_bad_one(
    file: str,
    failing: Failing,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    output = tmp_path / "run"
    argv = ["--max_steps", "4", "--save_every", "1"]
    stop = {"after": 2}

    def breaking(*args):
        stop["after"] -= 1
        step = backpropagate(*args)
        return step if stop["after"] >= 0 else step._replace(loss=float("nan"))

    backpropagate = lora_script.backpropagate
    monkeypatch.setattr(lora_script, "backpropagate", breaking)
    assert "the adapter of step 1 is in" in failing(*argv, untouched=False)
    # the first step after the checkpoint is not finite: the adapter kept by the first failure is the good one
    newest, adapter = output / "checkpoint-000002", output / "adapter_model.safetensors"
    kept = adapter.read_bytes()
    message = failing(*argv, "--resume", untouched=False)
    assert f"{newest} is bad, the last good adapter is in {output}. " in message and adapter.read_bytes() == kept
    adapter.unlink()
    message = failing(*argv, "--resume", untouched=False)
    assert f"the last good adapter is in {output / 'checkpoint-000001'}; delete {newest}" in message
    damaged = newest / file
    damaged.write_bytes(damaged.read_bytes()[:-100])
    message = failing(*argv, "--resume")
    named = file if file.endswith(".metadata") else Path(file).parts[0]
    assert f"--resume: {newest / named} is damaged" in message and f"delete {newest} to" in message
    assert "Traceback" not in caplog.text


# --- generate.py


def test_generate(small: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = load_model(str(small), "fp32")
    identity = lora.base_identity(base, "org/small")
    (tmp_path / "adapter").mkdir()
    adapter = lora.add_adapter(base, r=2, lora_alpha=2, expert_rank=1)
    checkpoint.save_adapter(adapter, tmp_path / "adapter", identity)
    (tmp_path / "text.png").write_text("not an image")
    for name in ("cut", "json", "type"):
        shutil.copytree(tmp_path / "adapter", tmp_path / name)
    weights = tmp_path / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "json" / "adapter_config.json").write_text('{"peft_type": ')
    (tmp_path / "type" / "adapter_config.json").write_text('{"peft_type": "LORAX"}')
    model = ["--model", str(small), "--question", "?"]
    for argv, words in (
        (["--model", str(small)], "--question"),
        ([*model, "--image", str(tmp_path / "no.png")], "no.png"),
        ([*model, "--image", str(tmp_path / "text.png")], "text.png"),
        ([*model, "--adapter", str(tmp_path)], "adapter_config.json is missing"),
        (
            ["--model", str(other), "--question", "?", "--adapter", str(tmp_path / "adapter")],
            "was made for another base model (org/small)",
        ),
        ([*model, "--max_new_tokens", "0"], "--max_new_tokens 0"),
        ([*model, "--adapter", str(tmp_path / "cut")], f"{tmp_path / 'cut' / 'adapter_model.safetensors'} is damaged"),
        ([*model, "--adapter", str(tmp_path / "json")], f"{tmp_path / 'json' / 'adapter_config.json'} is not valid"),
        ([*model, "--adapter", str(tmp_path / "type")], f"{tmp_path / 'type' / 'adapter_config.json'} is not an"),
    ):
        assert generate.main(argv) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and words in lines[0], lines
    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    good = [*model, "--image", str(tmp_path / "a.png"), "--adapter", str(tmp_path / "adapter")]
    assert generate.main([*good, "--max_new_tokens", "3"]) == 0
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("r", "16", "does not fit the model"),
        ("lora_alpha", None, "does not fit the model"),
        ("lora_alpha", float("nan"), "lora_alpha / r"),
        ("target_modules", "(", "does not fit the model"),
        ("rank_pattern", [1], "does not fit the model"),
        (None, None, "holds NaN"),
    ],
)
def test_adapter_that_would_answer_nonsense(
    field: str | None, value: object, words: str, small: Path, tmp_path: Path
) -> None:
    model, folder = load_model(str(small), "fp32"), tmp_path / "adapter"
    peft_model = lora.add_adapter(model, r=2, lora_alpha=4.0, expert_rank=1)
    if field is None:
        next(p for name, p in peft_model.named_parameters() if "lora_B" in name).data.fill_(float("nan"))
    peft_model.save_pretrained(folder)
    if field is not None:
        config = json.loads((folder / "adapter_config.json").read_text()) | {field: value}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        lora.load_adapter(load_model(str(small), "fp32"), str(folder))


def test_an_adapter_of_whole_numbers(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    lora.add_adapter(load_model(str(small), "fp32"), r=2, lora_alpha=4.0, expert_rank=1).save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    factors = load_file(file)
    name = min(factors)
    save_file(factors | {name: factors[name].int()}, file)
    with pytest.raises(ValueError, match=f"adapter_model.safetensors: {name} holds I32"):
        lora.check_files(folder)
