"""scripts/lora.py on several processes: every layout trains the same adapter, stops together, and goes on in any other.

fp64, so that two layouts agree to roundings that AdamW does not make visible.
"""

import json
import os
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from training_runs import FSDP2, Ended, train

from modeling_latentmoe.training.router_bias import BIAS_FILE

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 texts of 5 to 40 tokens; the pictures are in the first, third, ... row."""
    folder = tmp_path_factory.mktemp("rows")
    from PIL import Image

    Image.new("RGB", (28, 56), (200, 9, 9)).save(folder / "a.png")
    lines = [
        {"prompt": f"{i}?", "completion": " ".join("7" * (1 + i % 5)), "images": ["a.png"] * (i % 2)} for i in range(24)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


def argv(model: Path, rows: Path, output: Path, ep: int, accumulation: int, *more: str) -> list[str]:
    """Four steps of eight rows, a checkpoint after two."""
    settings = ["--model", str(model), "--dataset", str(rows), "--output_dir", str(output), "--dtype", "fp64"]
    settings += ["--batch_size", "2", "--gradient_accumulation", str(accumulation), "--ep", str(ep), "--timeout", "60"]
    return [*settings, "--max_steps", "4", "--save_every", "2", "--r", "4", "--expert_rank", "2", *more]


def succeeded(processes: list[Ended]) -> str:
    """What the first process said."""
    assert [process.code for process in processes] == [0] * len(processes), [process.err for process in processes]
    return processes[0].out


def steps(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def same_run(ours: Path, theirs: Path) -> None:
    """Loss and norms of every step and the adapter, to 1e-9 of their size; expert loads are equal."""
    for mine, other in zip(steps(ours), steps(theirs), strict=True):
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-9), (name, mine["step"])
        assert mine["grad_norms"] == pytest.approx(other["grad_norms"], rel=1e-9)
        for name in ("tokens", "load_imbalance", "idle_experts", "lr", "done"):
            assert mine[name] == other[name]
    same_adapter(ours, theirs)
    loads = [sorted((output / "expert_load").iterdir()) for output in (ours, theirs)]
    assert [file.name for file in loads[0]] == [file.name for file in loads[1]]
    for mine, other in zip(*loads, strict=True):
        assert torch.equal(load_file(mine)["load"], load_file(other)["load"])


def same_adapter(ours: Path, theirs: Path) -> None:
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (ours, theirs))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.dtype == torch.float64 and (ours[name] - value).norm() <= 1e-9 * value.norm(), name


@pytest.fixture(scope="module")
def single(tiny: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("single") / "run"
    out = succeeded(train(output.parent / "said", 1, argv(tiny, rows, output, 1, 4)))
    assert "trainable parameters" in out
    return output


@pytest.mark.slow
def test_a_resumed_layout_may_be_another(tiny: Path, rows: Path, single: Path, tmp_path: Path) -> None:
    """Public reports 36, 41, 44, 45, 56, 90, 92, 103: FSDP2 x EP 2 with a checkpoint, from which EP 2 alone, and one
    process alone, continue; all end where one process that was never interrupted does."""
    output = tmp_path / "run"
    out = succeeded(train(tmp_path / "said", 2, argv(tiny, rows, output, 2, 2), fsdp=True))
    assert "rank 1: efsdp 0, ep 1, experts 8 to 15 of every layer" in out
    same_run(output, single)
    for name, world, ep, accumulation in (("ddp", 2, 2, 2), ("one", 1, 1, 4)):
        other = tmp_path / name
        other.mkdir()
        shutil.copytree(output / "checkpoint-000002", other / "checkpoint-000002")
        shutil.copytree(output / "expert_load", other / "expert_load")
        for file in ("run.yaml", "metrics.jsonl"):
            shutil.copy(output / file, other)
        out = succeeded(train(tmp_path / "said", world, argv(tiny, rows, other, ep, accumulation, "--resume")))
        assert f"continuing from {other / 'checkpoint-000002'}" in out
        same_run(other, single)


def die(rank: int) -> None:
    """The second process is killed in its third step."""
    from scripts import lora

    if rank == 1:
        backpropagate, calls = lora.backpropagate, []

        def dying(*args):
            calls.append(1)
            return backpropagate(*args) if len(calls) < 3 else os._exit(9)

        lora.backpropagate = dying


def test_a_process_that_dies_stops_the_others(tiny: Path, rows: Path, tmp_path: Path) -> None:
    """They say so, in one line, and name what to do; the checkpoint of step 2 is whole."""
    first, second = train(tmp_path / "said", 2, argv(tiny, rows, tmp_path / "run", 2, 2), before=die)
    assert (first.code, second.code) == (2, 9)
    (line,) = (line for line in first.err.splitlines() if line.startswith("error: "))
    assert "another process of this run died" in line and "--resume" in line and "Traceback" not in first.err
    assert (tmp_path / "run" / "checkpoint-000002" / "state.pt").exists()


def reduce_what_hccl_does(rank: int) -> None:
    """As torch-npu does on every Ascend before the 950."""
    all_reduce = dist.all_reduce

    def reducing(tensor: torch.Tensor, *args, **kwargs):
        if tensor.dtype in (torch.float64, torch.uint8, torch.bool):
            raise RuntimeError(f"HCCL allreduce: Unsupported data type {tensor.dtype}")
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = reducing


def test_no_sum_is_one_that_hccl_refuses(tiny: Path, rows: Path, tmp_path: Path) -> None:
    """Of steps, clipping, both evaluations, balancing and checkpoints."""
    more = ["--dtype", "fp32", "--max_steps", "2", "--eval_dataset", str(rows), "--eval_samples", "4"]
    more += ["--max_new_tokens", "2", "--train_indexer", "sparse", "--balance", "quantile"]
    said = tmp_path / "said"
    succeeded(train(said, 2, argv(tiny, rows, tmp_path / "run", 2, 1, *more), before=reduce_what_hccl_does))


def drift(rank: int) -> None:
    """One adapter of the second process changes by one rounding after the first step."""
    from scripts import lora

    backpropagate = lora.backpropagate

    def drifting(accelerator, model, *args):
        if rank == 1:
            param = next(p for name, p in model.named_parameters() if "q_proj.lora_A" in name)
            param.data[0, 0] = torch.nextafter(param.data[0, 0], torch.tensor(9.0, dtype=param.dtype))
        return backpropagate(accelerator, model, *args)

    lora.backpropagate = drifting


def test_copies_that_differ_are_an_error(tiny: Path, rows: Path, tmp_path: Path) -> None:
    """Public report: ranks that diverge are never saved as if they were one."""
    ended = train(tmp_path / "said", 2, argv(tiny, rows, tmp_path / "run", 2, 2), before=drift)
    assert [process.code for process in ended] == [2, 2]
    assert all("q_proj.lora_A" in process.err and "differ between processes" in process.err for process in ended)
    assert not list((tmp_path / "run").glob("checkpoint-??????"))


def unread(rank: int) -> None:
    """Whoever reads a weight fails."""
    from scripts import lora

    def reading(*args):
        raise AssertionError("weights are read")

    lora.load_model = reading


@pytest.mark.parametrize(
    ("ep", "environment", "words"),
    [
        (3, {}, "--ep 3 does not divide the 2 processes"),
        (1, FSDP2, "asks for FSDP"),
        (1, {**FSDP2, "FSDP_VERSION": "1"}, "fsdp_version 1"),
    ],
)
def test_layouts_that_cannot_work_read_no_weight(
    ep: int, environment: dict[str, str], words: str, tiny: Path, rows: Path, tmp_path: Path
) -> None:
    """On CPU Accelerate gives plain processes where FSDP was asked for, without a word."""
    ended = train(
        tmp_path / "said", 2, argv(tiny, rows, tmp_path / "run", ep, 2), environment=environment, before=unread
    )
    assert [process.code for process in ended] == [2, 2]
    assert all(f"error: {words}" in process.err or words in process.err for process in ended)
    assert not (tmp_path / "run").exists()


def differentiate(folder: str, rank: int) -> None:
    """In the second step, writes down the derivative of the loss along a random direction of all factors, from the
    gradients and from two more losses."""
    from scripts import lora

    backpropagate, reduce_gradients, called = lora.backpropagate, lora.reduce_expert_gradients, []

    def remembering(accelerator, model, *args):
        called.append((accelerator, model, *args))
        return backpropagate(accelerator, model, *args)

    def differentiating(model, mesh):
        reduce_gradients(model, mesh)
        if len(called) != 2:
            return
        trained = [param for param in model.parameters() if param.requires_grad]
        gradients = [param.grad.clone() for param in trained]
        # every process has its own experts, and nothing else is trained
        generator = torch.Generator().manual_seed(rank)
        steps = [1e-5 * torch.randn(param.shape, generator=generator, dtype=param.dtype) for param in trained]
        slope = sum((grad * step).sum() for grad, step in zip(gradients, steps, strict=True))
        dist.all_reduce(slope)
        losses = []
        for sign in (1, -2):
            for param, step in zip(trained, steps, strict=True):
                param.data += sign * step
            losses.append(backpropagate(*called[-1]).loss)
        for param, step, grad in zip(trained, steps, gradients, strict=True):
            param.data += step
            param.grad = grad
        Path(folder, f"slope-{rank}.json").write_text(json.dumps([slope.item(), (losses[0] - losses[1]) / 2]))

    lora.backpropagate, lora.reduce_expert_gradients = remembering, differentiating


@pytest.mark.slow
@pytest.mark.parametrize("target", ["experts.gate_up_proj", pytest.param("experts.down_proj", marks=pytest.mark.slow)])
def test_one_stack_of_experts_alone(target: str, tiny: Path, rows: Path, tmp_path: Path) -> None:
    """Public report 39: with either stack alone, EP 2, gradients are what finite differences say, and the norm of this
    target is written down. DDP then has nothing to average."""
    more = ["--target_modules", target, "--train_projector", "false", "--max_steps", "2", "--lr", "0.05"]
    hook = partial(differentiate, str(tmp_path))
    out = succeeded(train(tmp_path / "said", 2, argv(tiny, rows, tmp_path / "run", 2, 1, *more), before=hook))
    assert "(experts " in out and "dense" not in out
    for rank in range(2):
        slope, difference = json.loads((tmp_path / f"slope-{rank}.json").read_text())
        assert abs(slope) > 1e-9 and difference == pytest.approx(slope, rel=1e-4)
    for record in steps(tmp_path / "run"):
        assert record["grad_norms"] == {target: pytest.approx(record["grad_norm"])} and record["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "ep", "fsdp", "batch"),
    [(8, 8, False, 1), (6, 2, True, 2)],
    ids=["EP 8", "FSDP2 of 6 x EP 2"],
)
def test_more_processes(world: int, ep: int, fsdp: bool, batch: int, tiny: Path, rows: Path, tmp_path: Path) -> None:
    """Two steps, of 8 or 12 rows, as one process takes them."""
    one = ["--max_steps", "2", "--batch_size", "1"]
    succeeded(train(tmp_path / "said", 1, argv(tiny, rows, tmp_path / "one", 1, world * batch, *one)))
    more = ["--max_steps", "2", "--batch_size", str(batch)]
    out = succeeded(train(tmp_path / "said", world, argv(tiny, rows, tmp_path / "run", ep, 1, *more), fsdp=fsdp))
    assert out.count("of every layer") == world
    same_run(tmp_path / "run", tmp_path / "one")


@pytest.mark.slow
def test_four_shares_become_two_and_one(tiny: Path, rows: Path, single: Path, tmp_path: Path) -> None:
    """Public report 92: saved at EP 4, resumed at EP 2 and by one process."""
    succeeded(train(tmp_path / "said", 4, argv(tiny, rows, tmp_path / "run", 4, 1)))
    same_run(tmp_path / "run", single)
    for world, accumulation in ((2, 2), (1, 4)):
        other = tmp_path / f"on-{world}"
        shutil.copytree(tmp_path / "run", other, ignore=shutil.ignore_patterns("checkpoint-000004", "adapter*"))
        succeeded(train(tmp_path / "said", world, argv(tiny, rows, other, world, accumulation, "--resume")))
        same_run(other, single)


@pytest.mark.slow
def test_evaluation_ends_together(tiny: Path, rows: Path, tmp_path: Path) -> None:
    """Three held-out rows in batches of one: the second process has one batch less, and no picture in it, but the first
    one needs its experts and shards for loss and answers. What is counted is what one process counts; and the weights
    are sharded again when they are saved, also where FSDP keeps gathered ones."""
    held_out = ["--eval_dataset", str(rows), "--eval_samples", "3", "--batch_size", "1", "--max_new_tokens", "4"]
    found = []
    for world, accumulation, reshard in ((1, 4, ""), (2, 2, "true"), (2, 2, "false")):
        output, environment = tmp_path / f"{world}{reshard}", {"FSDP_RESHARD_AFTER_FORWARD": reshard} if reshard else {}
        settings = argv(tiny, rows, output, world, accumulation, *held_out, "--max_steps", "1")
        succeeded(train(tmp_path / "said", world, settings, fsdp=world > 1, environment=environment))
        found.append([record for record in steps(output) if "eval_loss" in record])
        kinds = Counter(
            name.rpartition(".")[2]
            for name in FileSystemReader(output / "checkpoint-000001" / "trained").read_metadata().state_dict_metadata
        )
        assert set(kinds) == {"value", "step", "exp_avg", "exp_avg_sq"} and len(set(kinds.values())) == 1
    one, *others = found
    for several in others:
        assert [record["eval_samples"] for record in one + several] == [3] * 4
        for mine, theirs in zip(several, one, strict=True):
            assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-9)
            assert mine["eval_accuracy"] == theirs["eval_accuracy"]


def elsewhere(rank: int) -> None:
    """Each process has a working directory of its own, as on machines without a shared file system."""
    folder = Path(os.environ["ELSEWHERE"]) / str(rank)
    folder.mkdir(parents=True)
    os.chdir(folder)


def test_a_folder_that_not_all_see_is_refused(tiny: Path, rows: Path, tmp_path: Path) -> None:
    """A checkpoint would be spread over machines, and none of them could continue from it."""
    environment = {"ELSEWHERE": str(tmp_path / "machines")}
    settings = argv(tiny, rows, Path("out"), 2, 2)
    ended = train(tmp_path / "said", 2, settings, environment=environment, before=elsewhere)
    assert [process.code for process in ended] == [2, 2]
    assert "error: --output_dir out: process 1 does not see it" in ended[1].err
    assert not list(tmp_path.glob("machines/*/out/checkpoint-*"))


@pytest.mark.slow
def test_router_biases_stay_with_the_adapter(tiny: Path, rows: Path, tmp_path: Path) -> None:
    """Learned by Quantile Balancing on two processes, kept by a run that starts from that adapter and does not balance,
    and by its continuation, for which the first adapter is no longer needed."""
    first, second = tmp_path / "first", tmp_path / "second"
    succeeded(train(tmp_path / "said", 2, argv(tiny, rows, first, 2, 2, "--balance", "quantile")))
    learned = load_file(first / BIAS_FILE)
    assert len(learned) > 1 and all(bias.any() for bias in learned.values())
    settings = argv(tiny, rows, second, 1, 4, "--adapter", str(first))
    succeeded(train(tmp_path / "said", 1, settings))
    shutil.rmtree(first)
    shutil.rmtree(second / "checkpoint-000004")
    (second / BIAS_FILE).unlink()
    assert "continuing from" in succeeded(train(tmp_path / "said", 1, [*settings, "--resume"]))
    for folder in (second, second / "checkpoint-000002", second / "checkpoint-000004"):
        kept = load_file(folder / BIAS_FILE)
        assert kept.keys() == learned.keys() and all(torch.equal(kept[name], learned[name]) for name in kept)
