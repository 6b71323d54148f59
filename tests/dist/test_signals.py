"""Two processes under DDP, pictures in few rows: what they say, how a signal stops them, and how they go on."""

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from training_runs import records, same_bits, signal_in_step, train

pytestmark = pytest.mark.dist

STEPS, STOPPED_IN = 5, 3


def argv(model: Path, folder: Path, output: Path) -> list[str]:
    settings = ["--model", str(model), "--dataset", str(folder / "rows.jsonl"), "--output_dir", str(output)]
    settings += ["--eval_dataset", str(folder / "rows.jsonl"), "--eval_samples", "2", "--max_new_tokens", "2"]
    settings += ["--batch_size", "1", "--max_steps", str(STEPS), "--timeout", "60", "--r", "4", "--expert_rank", "2"]
    return settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    Image.new("RGB", (28, 28), (200, 9, 9)).save(folder / "a.png")
    rows = [{"prompt": f"{i}?", "completion": str(i), "images": ["a.png"] * (i % 4 == 0)} for i in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def watch(folder: str, rank: int) -> None:
    """Writes down, for every step, whether this process has a picture, and its own gradients of the projector's
    factors: before DDP averages them, whether each is not zero."""
    from scripts import lora

    found, parallelize, backpropagate = [], lora.parallelize, lora.backpropagate

    def parallelizing(accelerator, model, *args):
        for name, param in model.named_parameters():
            if "mm_projector" in name and param.requires_grad:
                param.register_hook(lambda grad, name=name: found[-1]["gradients"].update({name: bool(grad.any())}))
        return parallelize(accelerator, model, *args)

    def backpropagating(accelerator, model, window, *args):
        found.append({"image": len(window[0]["pixel_values"]) > 0, "gradients": {}})
        step = backpropagate(accelerator, model, window, *args)
        Path(folder, f"found-{rank}.json").write_text(json.dumps(found))
        return step

    lora.parallelize, lora.backpropagate = parallelizing, backpropagating


@pytest.fixture(scope="module")
def straight(tiny: Path, folder: Path) -> Path:
    """A run that nobody stops."""
    output = folder / "straight"
    first, second = train(folder / "said", 2, argv(tiny, folder, output), before=partial(watch, str(folder)))
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    for line in ("routed experts", "trainable parameters", "before training", "after training", "left out"):
        assert first.out.count(line) == 1 and line not in second.out
    return output


def test_what_two_processes_leave(straight: Path) -> None:
    assert [record["step"] for record in records(straight) if "loss" in record] == [1, 2, 3, 4, 5]
    assert [record["eval_samples"] for record in records(straight) if "eval_loss" in record] == [2, 2]
    state = torch.load(straight / f"checkpoint-{STEPS:06d}" / "state.pt", weights_only=True)
    assert [process["position"]["rows_seen"] for process in state["processes"]] == [STEPS, STEPS]


def test_text_beside_pictures(straight: Path, folder: Path) -> None:
    """Public reports 87, 88: a process without a picture has gradients of the projector, of zeros, and nobody waits."""
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]
    together = {tuple(process["image"] for process in step) for step in zip(*found, strict=True)}
    assert together & {(True, False), (False, True)} and (False, False) in together, together
    for process in found:
        for number, step in enumerate(process):
            assert len(step["gradients"]) == 4
            for name, some in step["gradients"].items():
                # first factors have no gradient while the second ones are zero
                assert some == (step["image"] and (number > 0 or "lora_B" in name)) or "lora_A" in name, (number, name)
                assert step["image"] or not some
    trained = load_file(straight / "adapter_model.safetensors")
    factors = [value for name, value in trained.items() if "mm_projector" in name and "lora_B" in name]
    assert len(factors) == 2 and all(value.any() for value in factors)


@pytest.mark.parametrize(
    ("number", "ranks"),
    [(signal.SIGINT, (1,)), pytest.param(signal.SIGTERM, (0, 1), marks=pytest.mark.slow)],
    ids=["ctrl-c", "term"],
)
def test_a_signal_saves_and_resume_goes_on(
    number: signal.Signals, ranks: tuple[int, ...], tiny: Path, folder: Path, straight: Path, tmp_path: Path
) -> None:
    """One process is interrupted, or the launcher ends all: both stop after the next step, and say how to go on."""
    output = tmp_path / "cut"
    stop = partial(signal_in_step, STOPPED_IN, number, ranks)
    ended = train(tmp_path / "said", 2, argv(tiny, folder, output), before=stop)
    assert [process.code for process in ended] == [2, 2]
    # whoever was asked during a step tells the others before the next one
    step = STOPPED_IN + 1
    for process in ended:
        (line,) = (line for line in process.err.splitlines() if line.startswith("error: "))
        assert f"stopped after step {step}, everything is saved" in line and line.endswith("--resume")
        assert "Traceback" not in process.err
    assert [path.name for path in output.glob("checkpoint-*")] == [f"checkpoint-{step:06d}"]
    assert [record["step"] for record in records(output) if "loss" in record] == list(range(1, step + 1))
    ended = train(tmp_path / "said", 2, [*argv(tiny, folder, output), "--resume"])
    assert [process.code for process in ended] == [0, 0], ended
    same_bits(output, straight, f"checkpoint-{STEPS:06d}")
