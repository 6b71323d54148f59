"""What a run says and writes down: progress bar, metrics.jsonl, a picture, the model card, one voice for errors.

Legend: L MoE layers, E experts.
"""

import json
import os
import re
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from modeling_latentmoe.training.arguments import parse
from modeling_latentmoe.training.commands import report_error
from modeling_latentmoe.training.files import LOAD_FOLDER, TEMPORARY, write_text
from modeling_latentmoe.training.timing import PARTS, TRAVEL

T = TypeVar("T")
# figures of a step that depend on the machine and not on what is computed
MEASURED = frozenset(
    {"tokens_per_s", "tokens_per_s_per_device", "throughput_drop", "tflops", "mfu", "step_s"}
    | {"memory_gib", "memory_gib_min", "memory_share", "memory_by_rank"}
    | {f"{part}_s" for part in (*PARTS, *TRAVEL)}
    | {f"{part}_{kind}" for part in TRAVEL for kind in ("share", "gb_per_s")}
    | {"experts_moved_s", "experts_exposed_s", "experts_hidden"}
)
LOAD_FILE = re.compile(rf"step-(\d+)\.safetensors({re.escape(TEMPORARY)})?")
# alerts that the legend of the picture has room for
NAMED = 8
BAR = "{percentage:3.0f}%|{bar:24}| {desc} [{elapsed}<{remaining}]"


class Metrics:
    """Records of a run, one JSON object a line in metrics.jsonl; only the process with `active` writes."""

    def __init__(self, folder: Path, active: bool, first_step: int = 0) -> None:
        self.file, self.active = folder / "metrics.jsonl", active
        self.records: list[dict[str, Any]] = []
        if first_step and active:
            # steps after the checkpoint are done again
            self.records = [record for record in read_records(self.file) if record["step"] <= first_step]
            write_text(self.file, "".join(json.dumps(record) + "\n" for record in self.records))

    def add(self, **values: float) -> None:
        self.records.append(values)
        if self.active:
            with self.file.open("a") as file:
                file.write(json.dumps(values) + "\n")

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of all records that hold `name`."""
        records = [record for record in self.records if name in record]
        return [record["step"] for record in records], [record[name] for record in records]


class Loads:
    """How many rows every expert got in every step: expert_load/step-000100.safetensors holds the steps of the run up
    to 100 that no earlier file holds, int32 [steps, MoE layers, E].

    Written with the checkpoints, so that a continued run leaves what an uninterrupted one would.
    """

    def __init__(self, folder: Path, active: bool, first_step: int = 0) -> None:
        self.folder, self.active = folder / LOAD_FOLDER, active
        self.steps: list[Tensor] = []
        if active and self.folder.is_dir():
            for file in self.folder.iterdir():
                # steps after the checkpoint are done again
                if (name := LOAD_FILE.fullmatch(file.name)) and (name[2] or int(name[1]) > first_step):
                    file.unlink()

    def file(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.safetensors"

    def add(self, load_LE: Tensor) -> None:
        if self.active and load_LE.numel():
            self.steps.append(load_LE.int())

    def write(self, step: int) -> None:
        if self.steps:
            self.folder.mkdir(exist_ok=True)
            file = self.file(step)
            partial = file.with_name(file.name + TEMPORARY)
            save_file({"load": torch.stack(self.steps)}, partial)
            os.replace(partial, file)
            self.steps = []


def read_records(file: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; ValueError naming the line where one is damaged.

    A last line without its end is left out: the process that wrote it was killed, after the last checkpoint.
    """
    try:
        *whole, _ = file.read_text().split("\n")
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing, which has the run's records; copy the whole folder") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text: {error}") from error
    records = []
    for number, line in enumerate(whole, start=1):
        try:
            record = json.loads(line)
            record["step"] = int(record["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file} line {number} is not a record of a step: repair or remove the line") from error
        records.append(record)
    return records


class Progress:
    """A progress bar over the share of the run that is done, with loss, speed and time left."""

    def __init__(self, done: float, active: bool) -> None:
        # a log file gets a line now and then instead of an animation
        interval = 0.1 if sys.stderr.isatty() else 10
        self.bar = tqdm(total=1.0, initial=done, bar_format=BAR, disable=not active, mininterval=interval)

    def update(self, record: dict[str, Any]) -> None:
        self.bar.set_description_str(progress_line(record), refresh=False)
        self.bar.update(min(record["done"], 1.0) - self.bar.n)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()


def progress_line(record: dict[str, Any]) -> str:
    """A step in a line: speed, where its time went in percent (`a2a` and `gather` lie inside of forward and backward),
    memory of the processes with the least and the most, busiest expert over the average one."""
    share = {part: f"{record[f'{part}_s'] / record['step_s']:.0%}" for part in (*PARTS, *TRAVEL)}
    speed = f"{record['tokens_per_s']:,.0f} tokens/s, {record['tokens_per_s_per_device']:,.0f} a device"
    parts = [f"data {share['data']} fwd {share['forward']} bwd {share['backward']} opt {share['optimizer']}"]
    parts += [
        f"{name} {share[part]}"
        for name, part in (("a2a", "all_to_all"), ("gather", "all_gather"))
        if record[f"{part}_s"]
    ]
    return "  ".join(
        [
            f"step {record['step']}  loss {record['loss']:.4f}  {speed}",
            *([f"MFU {record['mfu']:.1%}"] if "mfu" in record else []),
            f"{record['step_s']:.2f} s ({', '.join(parts)})",
            f"{record['memory_gib_min']:.1f}-{record['memory_gib']:.1f} GiB",
            f"load x{record['load_imbalance']:.1f}",
        ]
    )


def speed_figures(
    step_s: float, n_tokens: int, n_read: int, flops: float, world: int, peak: float | None
) -> dict[str, float]:
    """Of a step on `world` devices that learned from `n_tokens` of `n_read` tokens, with so many FLOP: speed, TFLOP/s
    of all devices, and the share of their `peak` TFLOP/s where that is known."""
    speed, tflops = n_read / step_s, flops / step_s / 1e12
    figures = {"tokens": n_tokens, "tokens_per_s": speed, "tokens_per_s_per_device": speed / world, "tflops": tflops}
    return figures if peak is None else figures | {"mfu": tflops / world / peak}


def memory_figures(device: torch.device) -> dict[str, float]:
    """Most memory that this process has had on its device, and what the device has, in GiB; on CPU of the process, and
    of the machine."""
    if device.type == "cpu":
        peak, limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10, psutil.virtual_memory().total
    else:
        module = torch.get_device_module(device)
        peak, limit = module.max_memory_allocated(device), module.mem_get_info(device)[1]
    return {"memory_gib": peak / 2**30, "memory_limit_gib": limit / 2**30}


def memory_of_all(processes: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Of the `memory_figures` of all processes: the most, the least, the largest share of a device, and each."""
    by_rank = [figures["memory_gib"] for figures in processes]
    return {
        "memory_gib": max(by_rank),
        "memory_gib_min": min(by_rank),
        "memory_share": max(figures["memory_gib"] / figures["memory_limit_gib"] for figures in processes),
        "memory_by_rank": {str(rank): peak for rank, peak in enumerate(by_rank)},
    }


def load_figures(load: Tensor) -> dict[str, Any]:
    """Of a load [MoE layers, E]: busiest expert over the average one in the worst layer and in each, and experts that
    got nothing; zeros without experts."""
    if not load.numel():
        return {"load_imbalance": 0.0, "idle_experts": 0}
    imbalance = (load.amax(-1) / load.double().mean(-1).clamp(min=1)).tolist()
    return {
        "load_imbalance": max(imbalance),
        "load_imbalance_by_layer": {str(layer): value for layer, value in enumerate(imbalance)},
        "idle_experts": int((load == 0).sum()),
    }


def draw(metrics: Metrics, load: Tensor, path: Path) -> None:
    """A picture of the run: loss, accuracy, expert load (int64 [MoE layers, E], rows routed in the whole run), where
    the time of a step went, speed and memory; alerts are marked."""
    try:
        import matplotlib
    except ImportError:
        print(f"matplotlib is not installed: {path.name} is not drawn", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = plot(metrics, load, pyplot)
    partial = path.with_name(path.name + TEMPORARY)
    figure.savefig(partial, format="png", dpi=110)
    pyplot.close(figure)
    os.replace(partial, path)


def plot(metrics: Metrics, load: Tensor, pyplot: Any) -> Any:
    """The figure of `draw`."""
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), layout="constrained")
    (left, middle, right), (time, speed, memory) = axes
    left.plot(*metrics.series("loss"), label="training")
    left.plot(*metrics.series("eval_loss"), "o-", label="held out")
    left.set(xlabel="step", ylabel="loss per token", title="Loss")
    middle.plot(*metrics.series("eval_accuracy"), "o-")
    middle.set(xlabel="step", ylabel="exact answers", ylim=(0, 1), title="Held-out accuracy")
    if load.numel():
        share = load.double() / load.double().mean(-1, keepdim=True).clamp(min=1)
        image = right.imshow(share.numpy(), aspect="auto", vmin=0)
        figure.colorbar(image, label="rows, relative to the layer's mean")
    right.set(xlabel="expert", ylabel="MoE layer", title="Expert load")
    steps, _ = metrics.series("step_s")
    if steps:
        time.stackplot(steps, *(metrics.series(f"{part}_s")[1] for part in PARTS), labels=PARTS, alpha=0.6)
        for part, style in zip(TRAVEL, ("k-", "k:"), strict=True):
            time.plot(*metrics.series(f"{part}_s"), style, linewidth=1, label=f"{part}, inside of these")
        time.legend()
    time.set(xlabel="step", ylabel="seconds", title="Time of a step")
    speed.plot(*metrics.series("tokens_per_s_per_device"))
    speed.set(xlabel="step", ylabel="tokens/s per device", title="Speed")
    used, mfu = metrics.series("mfu")
    if used:
        twin = speed.twinx()
        twin.plot(used, mfu, "C1")
        twin.set(ylabel="MFU", ylim=(0, 1))
    for name, label in (("memory_gib", "process with the most"), ("memory_gib_min", "with the least")):
        memory.plot(*metrics.series(name), label=label)
    memory.set(xlabel="step", ylabel="GiB, peak so far", title="Memory", ylim=(0, None))
    memory.legend()
    mark_alerts(metrics, left, (time, speed, memory))
    left.legend()
    return figure


def mark_alerts(metrics: Metrics, loss: Any, others: Sequence[Any]) -> None:
    """A marked point on the curve of the loss for every step with alerts, and a line through the other axes; the first
    NAMED of them are named."""
    steps, losses = metrics.series("loss")
    for number, (step, alerts) in enumerate(zip(*metrics.series("alerts"), strict=True)):
        # a step that was not finite has no loss: beside the last one
        height = next((value for at, value in zip(reversed(steps), reversed(losses), strict=True) if at <= step), 0.0)
        loss.plot([step], [height], "rv", label=f"step {step}: {', '.join(alerts)}" if number < NAMED else None)
        for axis in others:
            axis.axvline(step, color="red", linewidth=0.8)


CARD = """---
{base_model}library_name: peft
pipeline_tag: image-text-to-text
tags:
- lora
- latentmoe
---

# {title}

A LoRA adapter of `{base}`, trained on `{dataset}` for {steps} steps.

{table}
Ask it something:

```bash
python scripts/generate.py --model {base} --adapter {adapter} --image picture.png --question "{question}"
```

or, with nothing but transformers and PEFT:

```python
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

base = AutoModelForImageTextToText.from_pretrained("{base}", trust_remote_code=True)
processor = AutoProcessor.from_pretrained("{base}", trust_remote_code=True)
model = PeftModel.from_pretrained(base, "{adapter}")

question = [{{"type": "image", "image": Image.open("picture.png")}}, {{"type": "text", "text": "{question}"}}]
inputs = processor.apply_chat_template(
    [{{"role": "user", "content": question}}],
    add_generation_prompt=True, thinking={thinking}, tokenize=True, return_dict=True, return_tensors="pt",
)
output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
print(processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
```

It was made by

```bash
{command}
```

Settings are in `run.yaml`, every step in `metrics.jsonl`.

![loss, accuracy, expert load, time, speed and memory](training.png)
"""


def model_card(
    metrics: Metrics, *, base: str, adapter: str, dataset: str, question: str, thinking: bool, command: str
) -> str:
    """README.md of an adapter: results, and the exact commands to use it and to make it again."""
    evaluations = [record for record in metrics.records if "eval_accuracy" in record]
    steps = max((record["step"] for record in metrics.records), default=0)
    table = ""
    if evaluations:
        rows = [("before", evaluations[0]), ("after", evaluations[-1])][: len(evaluations)]
        cells = (
            f"| {when} | {r['eval_accuracy']:.1%} | {r['eval_loss']:.4f} | {r['eval_samples']} |\n" for when, r in rows
        )
        table = "| | exact answers | loss per token | held-out samples |\n|---|---|---|---|\n" + "".join(cells)
    return CARD.format(
        # only a Hub id is a valid link there
        base_model="" if Path(base).exists() else f"base_model: {base}\n",
        base=base,
        adapter=adapter,
        title=adapter.rstrip("/").split("/")[-1],
        dataset=dataset,
        steps=steps,
        table=table,
        question=question.replace('"', "'").replace("\n", " "),
        thinking=thinking,
        command=command,
    )


def run_script(
    run: Callable[[T, Sequence[str]], None], settings: type[T], description: str, argv: Sequence[str]
) -> int:
    """Call `run` with the settings that `argv` gives and with `argv`; the exit code of the script.

    It is 0, or 2 after one line about a mistake in the input or an interruption. Settings with `traceback`
    let the error through instead.
    """
    traceback = False
    try:
        args = parse(settings, description, argv)
        traceback = args.traceback
        run(args, argv)
    except (ValueError, OSError, ImportError, FloatingPointError, KeyboardInterrupt) as error:
        if traceback:
            raise
        report_error(error)
        return 2
    return 0
