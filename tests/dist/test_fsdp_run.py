"""One run of scripts/lora.py under FSDP2 and EP 2, watched from inside: in bf16, with text on the first process beside
pictures on the second."""

import hashlib
import json
import os
from collections import Counter
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import Ended, train

from modeling_latentmoe.mxfp4 import storage_report
from modeling_latentmoe.training.loading import load_model
from modeling_latentmoe.training.lora import load_adapter
from modeling_latentmoe.training.merge import merge

pytestmark = pytest.mark.dist

STEPS = 3
LAYERS, BLOCKS = 5, 3


def packed_hash(model: torch.nn.Module) -> str:
    """Of all packed bytes and their scales, which no process shards."""
    parts = {name: param for name, param in model.named_parameters() if param.dtype == torch.uint8}
    assert len(parts) == 4 * (LAYERS - 1) and not any(isinstance(part, DTensor) for part in parts.values())
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts.values())).hexdigest()


class Gathers(TorchDispatchMode):
    """Counts collectives of the kind that FSDP2 gathers weights with."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.c10d._allgather_base_.default
        return func(*args, **(kwargs or {}))


def fp32_dtypes(found: set, module: torch.nn.Module, args: tuple) -> None:
    """In the forward, where the layer's parameters are whole."""
    for name in module.float32_parameters:
        found.add((type(module).__name__, name, module._parameters[name].dtype))


def watch(folder: str, rank: int) -> None:
    """Let the script write what happened in this process to a file."""
    from scripts import lora

    found = {"hashes": [], "computed": set(), "gathers": [], "images": [], "gradients": [], "backends": []}
    read_chat, parallelize, backpropagate = lora.data.read_chat, lora.parallelize, lora.backpropagate
    clip, save = lora.clip_grad_norm, lora.checkpoint.save_whole_adapter
    new_group = distributed_c10d._new_group_with_tag
    rows = count()

    def reading(name, row, folder):
        """Pictures: first process in its fourth row alone, second one in every other row."""
        number = next(rows)
        with_image = number == 3 if rank == 0 else number % 2 == 0
        return read_chat(name, {**row, "images": row["images"] if with_image else []}, folder)

    def parallelizing(accelerator, model, *args):
        wrapped, optimizer = parallelize(accelerator, model, *args)
        units = [module for module in wrapped.modules() if isinstance(module, FSDPModule)]
        found["units"] = Counter(type(unit).__name__.removeprefix("FSDP") for unit in units)
        for module in wrapped.modules():
            if getattr(module, "float32_parameters", ()):
                module.register_forward_pre_hook(partial(fp32_dtypes, found["computed"]))
        trained = [param for param in wrapped.parameters() if param.requires_grad]
        found["sharded"] = {isinstance(param, DTensor) for param in trained}
        found["hashes"].append(packed_hash(wrapped))
        return wrapped, optimizer

    def backpropagating(accelerator, model, window, *args):
        found["images"].append([len(batch["pixel_values"]) > 0 for batch in window])
        with Gathers() as gathers:
            step = backpropagate(accelerator, model, window, *args)
        found["gathers"].append(gathers.count)
        return step

    def clipping(model, *args):
        gradients = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
                gradients[name] = bool(grad.isfinite().all()), bool(grad.any())
        found["gradients"].append(gradients)
        return clip(model, *args)

    def saving(model, *args):
        found["hashes"].append(packed_hash(model))
        found["storage"] = storage_report(model)
        torch.save(found, f"{folder}/found-{rank}.pt")
        return save(model, *args)

    def grouping(ranks, timeout, backend, *args, **kwargs):
        found["backends"].append(backend)
        return new_group(ranks, timeout, backend, *args, **kwargs)

    lora.data.read_chat, lora.parallelize, lora.backpropagate = reading, parallelizing, backpropagating
    lora.clip_grad_norm, lora.checkpoint.save_whole_adapter = clipping, saving
    distributed_c10d._new_group_with_tag = grouping


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    Image.new("RGB", (28, 56), (200, 9, 9)).save(folder / "a.png")
    lines = [{"prompt": f"{i}?", "completion": "7 " * (1 + i % 5), "images": ["a.png"]} for i in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


def argv(model: Path, rows: Path, output: Path, *more: str) -> list[str]:
    settings = ["--model", str(model), "--dataset", str(rows), "--output_dir", str(output), "--timeout", "60"]
    settings += ["--batch_size", "1", "--gradient_accumulation", "2", "--max_steps", str(STEPS), "--r", "4"]
    return [*settings, "--expert_rank", "2", "--lr", "1e-2", *more]


def codes(ended: list[Ended]) -> list[int]:
    assert all(process.code == 0 for process in ended), [process.err for process in ended]
    return [process.code for process in ended]


@pytest.fixture(scope="module")
def run(tiny: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """The folder of the run, and what happened in its two processes."""
    folder = tmp_path_factory.mktemp("watched")
    more = ["--dtype", "bf16", "--ep", "2"]
    codes(train(folder, 2, argv(tiny, rows, folder / "run", *more), fsdp=True, before=partial(watch, str(folder))))
    return folder / "run", [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(2)]


def test_units_and_gathers(run: tuple[Path, list[dict]]) -> None:
    """Public reports 54, 107: fp32 factors beside bf16 weights do not need units of their own.

    The forward gathers each unit once; the backward again those that were freed and have gradients to compute, which
    are the decoder layers and the rest.
    """
    for found in run[1]:
        assert found["units"] == {
            "LatentMoEDecoderLayer": LAYERS,
            "LatentMoEVisionBlock": BLOCKS,
            **dict.fromkeys(("Embedding", "LanguageModelHead", "PeftModel"), 1),
        }
        assert found["gathers"] == [2 * (found["units"].total() + LAYERS + 1)] * STEPS


def test_packed_experts_stay_as_they_are(run: tuple[Path, list[dict]]) -> None:
    """Public reports 52, 53: bytes and scales are the same after three steps, and 4.25 bits a weight."""
    for found in run[1]:
        assert len(found["hashes"]) >= 3 and len(set(found["hashes"])) == 1
        assert "4.25 bits each (uint8)" in found["storage"]
    assert run[1][0]["hashes"][0] != run[1][1]["hashes"][0]


def test_dtypes(run: tuple[Path, list[dict]]) -> None:
    """Public report 50: what must be fp32 is so where it is computed with, in a bf16 run."""
    for found in run[1]:
        assert {dtype for _, _, dtype in found["computed"]} == {torch.float32}
        assert {(kind, name) for kind, name, _ in found["computed"]} >= {
            ("KimiDeltaAttention", "A_log"),
            ("KimiDeltaAttention", "dt_bias"),
            ("ShortConvolution", "weight"),
            ("GatedHeadNorm", "weight"),
        }


def test_gradients(run: tuple[Path, list[dict]]) -> None:
    """Public reports 47, 49, 87, 88: every factor has a finite gradient on both processes in every step, and one that
    is not zero as soon as the second factors are not; pictures alternate between micro-batches and processes."""
    first, second = (found["images"] for found in run[1])
    assert first == [[False, False], [False, True], [False, False]] and second == [[True, False]] * STEPS
    for found in run[1]:
        assert len(found["gradients"]) == STEPS
        for step, gradients in enumerate(found["gradients"]):
            assert all(finite for finite, _ in gradients.values())
            assert any("mm_projector" in name for name in gradients)
            zero = {name for name, (_, some) in gradients.items() if not some}
            assert zero == ({name for name in gradients if "lora_A" in name} if step == 0 else set())


def test_sharded_beside_whole(run: tuple[Path, list[dict]]) -> None:
    """Public reports 34, 43: clipping, AdamW and saving with both kinds; the norms of all targets are written down."""
    assert all(found["sharded"] == {True, False} for found in run[1])
    records = [json.loads(line) for line in (run[0] / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == STEPS
    for record in records:
        squares = [norm**2 for norm in record["grad_norms"].values()]
        assert sum(squares) ** 0.5 == pytest.approx(record["grad_norm"]) and min(squares) > 0
        assert record["all_to_all_gb_per_s"] > 0 and record["all_gather_gb_per_s"] > 0
        assert 0 < record["all_to_all_share"] < 1 and record["memory_by_rank"].keys() == {"0", "1"}


def test_groups(run: tuple[Path, list[dict]]) -> None:
    """Public report 103: there are more groups than the first one, and none names a backend."""
    for found in run[1]:
        assert found["backends"] and set(found["backends"]) == {None}


def test_one_process_merges_the_adapter(run: tuple[Path, list[dict]], tiny: Path, tmp_path: Path) -> None:
    """Public report 35."""
    merge(tiny, run[0], tmp_path / "merged", "bf16")
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        plain = load_model(str(tiny), "fp32").eval()(input_ids=ids).logits
        adapted = load_adapter(load_model(str(tiny), "fp32"), str(run[0])).eval()(input_ids=ids).logits
        merged = load_model(str(tmp_path / "merged"), "fp32").eval()(input_ids=ids).logits
    # merged weights are rounded to bf16
    assert (merged - adapted).norm() < 0.2 * (adapted - plain).norm()
    assert (adapted - plain).norm() > 0.1 * plain.norm()


def unread(rank: int) -> None:
    """Whoever reads a weight fails."""
    from scripts import lora

    def reading(*args):
        os._exit(7)

    lora.load_model = reading


def test_the_first_process_does_not_read_for_the_others(tiny: Path, rows: Path, tmp_path: Path) -> None:
    """Public report 19: it hung where processes disagreed on dtypes; here all refuse it, at once."""
    environment = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    more = {"fsdp": True, "environment": environment, "before": unread}
    ended = train(tmp_path, 2, argv(tiny, rows, tmp_path / "run"), **more)
    assert [process.code for process in ended] == [2, 2]
    assert all("error: fsdp_cpu_ram_efficient_loading" in process.err for process in ended)
