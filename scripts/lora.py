"""Fine-tune a latent mixture-of-experts vision-language model with LoRA, on attention and on the routed experts.

    accelerate launch scripts/lora.py                         # the tiny model learns handwritten digits, on a laptop
    accelerate launch scripts/lora.py --model org/model --dataset chats.jsonl --output_dir runs/chats
    accelerate launch scripts/lora.py run.yaml --lr 1e-4      # a file of the same settings; switches win over it

Every mistake in the input ends the run with one line and exit code 2. So does Ctrl-C, after the state was saved: the
same command with --resume continues exactly where it stopped.
"""

import dataclasses
import importlib.util
import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
import transformers
import yaml
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from transformers import HfArgumentParser

import modeling_latentmoe
from modeling_latentmoe.mxfp4 import storage_report
from modeling_latentmoe.training import checkpoint, data, lora, monitor
from modeling_latentmoe.training.evaluate import evaluate
from modeling_latentmoe.training.loading import load_model, load_processor
from modeling_latentmoe.training.loss import backpropagate, count_loss_tokens, global_sum

TINY = Path(modeling_latentmoe.__file__).parent / "tiny"


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Arguments:
    model: str = option(str(TINY), "base model: a local folder or a Hub id")
    dataset: str = option("digits", "Hub id, folder, parquet or JSON-lines file; digits[:blank|:shuffled] is built in")
    dataset_config: str | None = option(None, "configuration of a Hub dataset that has several")
    split: str = option("train", "split to train on")
    eval_dataset: str | None = option(None, "held-out dataset; the training dataset if only --eval_split is given")
    eval_split: str | None = option(None, "held-out split; digits are evaluated on their split test")
    streaming: bool = option(False, "read the dataset while training, without downloading it; needs --steps")
    output_dir: str = option("runs/digits", "where adapter, checkpoints, metrics and model card go")
    overwrite: bool = option(False, "replace an earlier run in --output_dir")
    resume: bool = option(False, "continue the run in --output_dir from its newest checkpoint")
    steps: int | None = option(None, "number of optimizer steps; without it --epochs decides")
    epochs: float = option(4, "passes over the training data")
    batch_size: int = option(32, "samples in a micro-batch of one process")
    gradient_accumulation: int = option(1, "micro-batches of one process in a step")
    max_length: int = option(2048, "longest sample in tokens; longer ones are dropped and counted, never cut")
    packing: bool = option(False, "fill rows of batch_size * max_length tokens with several samples, no padding")
    skip_bad_images: bool = option(False, "leave out rows with an unreadable image and count them")
    thinking: bool = option(False, "train and evaluate with the think channel of the chat format")
    dtype: Literal["fp32", "bf16"] = option("fp32", "precision of the frozen weights; adapters are always fp32")
    lr: float = option(3e-3, "peak learning rate of everything without a rate of its own")
    lr_kda: float | None = option(None, "peak learning rate of the linear-attention (KDA) layers")
    lr_attention: float | None = option(None, "peak learning rate of the full and sparse attention layers")
    lr_experts: float | None = option(None, "peak learning rate of the routed experts")
    lr_projector: float | None = option(None, "peak learning rate of the image projector")
    warmup: float = option(0.05, "share of the run in which the rates rise; a cosine to zero follows")
    weight_decay: float = option(0.0, "AdamW weight decay of the adapters")
    max_grad_norm: float = option(1.0, "clip the global gradient norm to this")
    r: int = option(16, "LoRA rank of dense layers")
    lora_alpha: float = option(32.0, "LoRA scale, over --r; the experts have the same scale")
    expert_rank: int = option(4, "LoRA rank of every routed expert")
    target_modules: list[str] | None = option(None, "layers to adapt; default: attention, feed-forward and experts")
    train_projector: bool = option(True, "adapt the image projector too (the vision tower stays frozen)")
    gradient_checkpointing: bool = option(False, "compute activations again in the backward pass, to save memory")
    seed: int = option(0, "seed of the adapters and of the order of the data")
    eval_every: int = option(0, "steps between evaluations; 0: before and after only")
    eval_samples: int = option(400, "held-out rows to evaluate on")
    max_new_tokens: int = option(32, "longest generated answer in an evaluation")
    save_every: int = option(100, "steps between checkpoints")
    keep: int = option(2, "newest checkpoints to keep")
    log_with: Literal["tensorboard", "trackio", "wandb"] | None = option(None, "tracker to log to as well")
    push_to_hub: str | None = option(None, "Hub repository to upload the finished adapter to, as user/name")
    traceback: bool = option(False, "show where in the code an error was raised")


class Parser(HfArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(message)


def parse(argv: Sequence[str]) -> Arguments:
    """Command line, or a YAML file of the same names followed by switches that win over it."""
    argv = list(argv)
    if argv and argv[0].endswith((".yaml", ".yml")):
        try:
            settings = yaml.safe_load(Path(argv[0]).read_text()) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{argv[0]} is not valid YAML: {error}") from error
        if not isinstance(settings, dict):
            raise ValueError(f"{argv[0]} must hold lines `name: value`")
        unknown = settings.keys() - {f.name for f in dataclasses.fields(Arguments)}
        if unknown:
            raise ValueError(f"{argv[0]}: unknown setting {', '.join(sorted(unknown))}")
        given = {name: value for name, value in settings.items() if value is not None}
        switches = [[f"--{name}", *map(str, v if isinstance(v, list) else [v])] for name, v in given.items()]
        argv = [word for switch in switches for word in switch] + argv[1:]
    parser = Parser(Arguments, description=__doc__.split("\n\n")[0], allow_abbrev=False)
    return parser.parse_args_into_dataclasses(argv)[0]


def schedule(progress: float, warmup: float) -> float:
    """Share of the peak learning rate: a linear rise, then a cosine to zero at the end of the run."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    settings = dataclasses.asdict(args)
    command = shlex.join(["accelerate", "launch", "scripts/lora.py", *argv])
    if args.streaming and args.steps is None:
        raise ValueError("--streaming needs --steps: the length of a stream is not known")
    if args.log_with and importlib.util.find_spec(args.log_with) is None:
        raise ValueError(f"--log_with {args.log_with}: it is not installed (pip install {args.log_with})")
    resume_from = checkpoint.check_output(args.output_dir, settings, args.overwrite, args.resume)
    output = Path(args.output_dir)

    # A batch without images leaves the projector without gradients: DDP has to be told that this may happen.
    ddp = DistributedDataParallelKwargs(find_unused_parameters=args.train_projector)
    accelerator = Accelerator(
        mixed_precision="no", log_with=args.log_with, project_dir=args.output_dir, kwargs_handlers=[ddp]
    )
    rank, world, is_main = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
    if not is_main:
        datasets.disable_progress_bars()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    set_seed(args.seed)

    # Data: this process' rows, in an order that depends on the seed alone.
    processor = load_processor(args.model)
    source, folder = data.open_dataset(args.dataset, args.split, args.dataset_config, args.streaming)
    rows = data.Rows(args.dataset, source, rank, world, args.seed)
    batches = data.Batches(
        rows,
        lambda name, row: data.encode_chat(processor, data.read_chat(name, row, folder), args.thinking),
        batch_size=args.batch_size,
        max_length=args.max_length,
        pad_id=processor.tokenizer.pad_token_id,
        packing=args.packing,
        skip_bad_images=args.skip_bad_images,
    )
    eval_split = args.eval_split or ("test" if args.dataset.startswith("digits") else None)
    held_out: list[data.Chat] = []
    if args.eval_dataset or eval_split:
        name = args.eval_dataset or args.dataset
        source, folder = data.open_dataset(name, eval_split or args.split, args.dataset_config)
        share = islice(data.Rows(name, source, rank, world).epoch(0), math.ceil(args.eval_samples / world))
        held_out = [data.read_chat(name, row, folder) for name, row in share]

    # Model: frozen weights, fp32 adapters, one learning rate per kind of layer.
    base = load_model(args.model, args.dtype)
    identity = lora.base_identity(base, args.model)
    storage = storage_report(base)
    model = lora.add_adapter(
        base,
        r=args.r,
        lora_alpha=args.lora_alpha,
        expert_rank=args.expert_rank,
        target_modules=args.target_modules,
        train_projector=args.train_projector,
    )
    if args.gradient_checkpointing:
        base.gradient_checkpointing_enable()
    rates = {"kda": args.lr_kda, "attention": args.lr_attention, "experts": args.lr_experts}
    rates |= {"projector": args.lr_projector, "dense": args.lr}
    groups = lora.parameter_groups(model, {name: args.lr if lr is None else lr for name, lr in rates.items()})
    trained = [parameter for group in groups for parameter in group["params"]]
    accelerator.print(storage, lora.trainable_line(model, groups), sep="\n")
    optimizer = torch.optim.AdamW(groups, weight_decay=args.weight_decay)
    wrapped, optimizer = accelerator.prepare(model, optimizer)

    step, done, load = 0, 0.0, torch.zeros(0)
    accelerator.wait_for_everyone()
    if resume_from is not None:
        position, state = checkpoint.load_checkpoint(accelerator, resume_from, model, optimizer)
        batches.load_state_dict(position)
        step, done, load = state["step"], state["done"], state["load"]
        accelerator.print(f"continuing from {resume_from}")
    elif is_main:
        checkpoint.start_output(output, settings)
    accelerator.wait_for_everyone()
    metrics = monitor.Metrics(output, is_main, first_step=step)
    if args.log_with:
        accelerator.init_trackers("latentmoe", config={name: str(value) for name, value in settings.items()})

    def measure(when: str) -> None:
        if eval_split or args.eval_dataset:
            limits = {"batch_size": args.batch_size, "max_new_tokens": args.max_new_tokens}
            result = evaluate(accelerator, model, processor, held_out, thinking=args.thinking, **limits)
            metrics.add(step=step, **result)
            accelerator.log(result, step=step)
            accuracy, loss, n = result["eval_accuracy"], result["eval_loss"], result["eval_samples"]
            accelerator.print(f"{when}: {accuracy:.1%} of {n} held-out answers are exact, loss {loss:.4f}")

    def save() -> None:
        progress = {"step": step, "done": done, "load": load}
        position = batches.state_dict()
        checkpoint.save_checkpoint(accelerator, model, output, identity, optimizer, position, progress, args.keep)

    if step == 0:
        measure("before training")
    stream, proven, model_mode = iter(batches), None, wrapped.train()
    bar = monitor.Progress(done, is_main)
    with checkpoint.Interrupt() as interrupt:
        while done < 1:
            began, seen_before = time.perf_counter(), batches.rows_seen
            window = [next(stream) for _ in range(args.gradient_accumulation)]
            if args.packing and any("cu_seqlens" not in batch for batch in window):
                raise ValueError("--packing: a packed batch has no `cu_seqlens`, its documents would run together")

            # One exchange before the first forward: trained tokens and rows of all processes, and whether to stop.
            mine = sum(count_loss_tokens(batch["labels"]) for batch in window)
            counts = (mine, batches.rows_seen - seen_before, int(interrupt.asked))
            n_tokens, n_rows, stop = global_sum(accelerator, *counts)
            if stop:
                break
            before = done
            done += 1 / args.steps if args.steps else n_rows / (args.epochs * rows.total)
            factor = schedule((before + done) / 2, args.warmup)
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor

            loss, step_load = backpropagate(accelerator, wrapped, window, n_tokens)
            grad_norm = float(accelerator.clip_grad_norm_(trained, args.max_grad_norm))
            if not math.isfinite(loss + grad_norm):
                break
            # these weights gave a finite loss and finite gradients: they are the ones to keep if the next do not
            proven = lora.snapshot(trained)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
