"""scripts/lora.py where one process of two runs out of memory in the middle of a step: all do the step again, in
smaller micro-batches, and the run ends where one with enough memory does."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import Ended, train

pytestmark = pytest.mark.dist

STEPS = 2


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Uneven lengths; the last batch of the 22 rows has one for the first process and two for the second."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    lines = [{"prompt": f"{i}?", "completion": " ".join("7" * (1 + i % 5))} for i in range(24)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def argv(model: Path, rows: Path, output: Path, *more: str) -> list[str]:
    settings = ["--model", str(model), "--dataset", str(rows), "--output_dir", str(output), "--timeout", "60"]
    settings += ["--batch_size", "4", "--gradient_accumulation", "2", "--max_steps", str(STEPS), "--r", "4"]
    # Adam divides by the size of a gradient: where that is rounding alone, so would be the difference of two runs
    return [*settings, "--expert_rank", "2", "--adam_epsilon", "1e-4", *more]


def run_out(failures: dict[int, tuple[int, str]], rank: int) -> None:
    """Let the second process run out of memory in these calls of `backpropagate` (counted from 1): in which layer, and
    whether in its "forward", its "recomputation" or its "backward"."""
    from scripts import lora

    backpropagate, calls = lora.backpropagate, []

    def fail(*_) -> None:
        raise torch.OutOfMemoryError("injected")

    def failing(accelerator, model, window, *args):
        calls.append(len(window))
        if rank == 0 or len(calls) not in failures:
            return backpropagate(accelerator, model, window, *args)
        place, when = failures[len(calls)]
        layer = next(
            module
            for name, module in model.named_modules()
            if name.endswith(f"layers.{place}.post_attention_layernorm")
        )
        # a layer that is computed again runs twice
        runs, handles = 2 if when == "recomputation" else 1, []

        def once(module, inputs, output):
            nonlocal runs
            runs -= 1
            if runs:
                return
            handles.pop().remove()
            if when == "backward":
                output.register_hook(fail)
            else:
                fail()

        handles.append(layer.register_forward_hook(once))
        return backpropagate(accelerator, model, window, *args)

    lora.backpropagate = failing


def try_on_cpu(failures: dict[int, tuple[int, str]], rank: int) -> None:
    """As `run_out`, where --batch_size auto may try: a CPU, which tells nothing, is refused else."""
    from scripts import lora

    lora.check_device = lambda device: None
    run_out(failures, rank)


def adapter(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "adapter_model.safetensors")


def steps(output: Path) -> list[dict]:
    return [record for record in map(json.loads, (output / "metrics.jsonl").open()) if "loss" in record]


def succeeded(processes: list[Ended]) -> str:
    assert [process.code for process in processes] == [0] * len(processes), [process.err for process in processes]
    return processes[0].out


def same_run(ours: Path, theirs: Path) -> None:
    mine, others = adapter(ours), adapter(theirs)
    assert mine.keys() == others.keys()
    for name, value in others.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=2e-5, msg=name)
    assert len(steps(ours)) == len(steps(theirs)) == STEPS
    for one, two in zip(steps(ours), steps(theirs), strict=True):
        for name in ("tokens", "done", "lr", "dropped"):
            assert one[name] == two[name], name
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("fsdp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_shared_experts(fsdp: bool, tiny: Path, rows: Path, tmp_path: Path) -> None:
    """EP 2: in a forward pass, and in the backward pass of the smaller micro-batches."""
    straight, cut = tmp_path / "straight" / "run", tmp_path / "cut" / "run"
    more = ["--ep", "2", "--gradient_accumulation", "2" if fsdp else "1"]
    succeeded(train(straight.parent, 2, argv(tiny, rows, straight, *more), fsdp=fsdp))
    more += ["--prometheus", str(tmp_path / "run.prom")]
    failures = {1: (3, "forward"), 3: (2, "backward")}
    out = succeeded(train(cut.parent, 2, argv(tiny, rows, cut, *more), fsdp=fsdp, before=partial(run_out, failures)))
    for parts in (2, 4):
        assert out.count(f"micro-batches are halved, every batch is computed in {parts} from now on") == 1
    same_run(cut, straight)
    for record in steps(cut):
        assert record["all_to_all_s"] > 0 and (record["all_gather_s"] > 0) == fsdp
        assert record["all_to_all_gb_per_s"] > 0 and 0 < record["all_to_all_share"] < 1
        assert record["memory_by_rank"].keys() == {"0", "1"}
        assert record["step_s"] >= record["forward_s"] + record["backward_s"] + record["optimizer_s"]
    text = (tmp_path / "run.prom").read_text()
    assert 'latentmoe_memory_gib{rank="1"}' in text and f"latentmoe_step {STEPS}\n" in text


@pytest.mark.slow
def test_the_largest_micro_batch(tiny: Path, rows: Path, tmp_path: Path) -> None:
    """Both processes agree on one number although only one of them fails, and keep it when they resume."""
    output = tmp_path / "cut" / "run"
    more = ["--ep", "2", "--batch_size", "auto", "--max_length", "48", "--save_every", "1"]
    before = partial(try_on_cpu, {1: (4, "backward"), 3: (0, "forward")})
    out = succeeded(train(output.parent, 2, argv(tiny, rows, output, *more), before=before))
    # of at most 6, which is an accumulated step of all rows: 6 fails, 3 fits, 4 fails, no other is tried
    assert "--batch_size auto: 3, the largest that fits" in out
    state = torch.load(output / f"checkpoint-{STEPS:06d}" / "state.pt", weights_only=True)
    assert state["state"]["batch_size"] == 3
    assert [process["position"]["rows_seen"] for process in state["processes"]] == [2 * 3 * STEPS] * 2
    shutil.rmtree(output / f"checkpoint-{STEPS:06d}")
    out = succeeded(train(tmp_path / "resumed", 2, argv(tiny, rows, output, *more, "--resume"), before=before))
    assert "the largest that fits" not in out and len(steps(output)) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "more"),
    [
        ("none", []),
        ("full", []),
        ("none", ["--ep", "2"]),
        ("selective", ["--ep", "2"]),
        ("selective", ["--ep", "2", "--packing", "--max_length", "32"]),
    ],
)
@pytest.mark.parametrize("failure", [(0, "forward"), (4, "forward"), (4, "backward"), (0, "backward")])
def test_copies(more: list[str], checkpointing: str, failure: tuple, tiny: Path, rows: Path, tmp_path: Path) -> None:
    """Without FSDP: all weights on both processes, or the experts shared."""
    straight, cut = tmp_path / "straight" / "run", tmp_path / "cut" / "run"
    more = [*more, "--gradient_checkpointing", checkpointing]
    if failure[1] == "backward" and checkpointing != "none":
        failure = (failure[0], "recomputation")
    succeeded(train(straight.parent, 2, argv(tiny, rows, straight, *more)))
    before = partial(run_out, {2: failure})
    assert "micro-batches are halved" in succeeded(train(cut.parent, 2, argv(tiny, rows, cut, *more), before=before))
    same_run(cut, straight)
