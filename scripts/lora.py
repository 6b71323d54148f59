"""Fine-tune a latent mixture-of-experts vision-language model with LoRA, on attention and on routed experts.

    accelerate launch scripts/lora.py                      # the tiny model learns handwritten digits
    accelerate launch scripts/lora.py --model org/model --dataset chats.jsonl --output_dir runs/chats
    accelerate launch scripts/lora.py run.yaml --lr 1e-4   # a file of the same settings; switches win over it
    accelerate launch --config_file accelerate_configs/fsdp2_ep.yaml scripts/lora.py --ep 8   # eight devices

Every mistake in the input ends the run with one line and exit code 2. So does Ctrl-C, after the state was
saved: the same command with --resume continues exactly where it stopped.
"""

import dataclasses
import importlib.util
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Literal

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from modeling_latentmoe.kernel_loading import check_choice
from modeling_latentmoe.mxfp4 import storage_report
from modeling_latentmoe.training import checkpoint, data, files, lora, memory, monitor, timing
from modeling_latentmoe.training.agreement import check_same_start
from modeling_latentmoe.training.alerts import Alerts, check_alerts, check_mfu
from modeling_latentmoe.training.arguments import option
from modeling_latentmoe.training.attention_mass import attention_of, describe, evaluate_choice
from modeling_latentmoe.training.balance import AuxiliaryLoss, Balancing, QuantileBalancing, check_router
from modeling_latentmoe.training.collectives import Collectives
from modeling_latentmoe.training.evaluate import evaluate
from modeling_latentmoe.training.expert_adapters import initialise_adapters
from modeling_latentmoe.training.expert_homes import keep_off_device
from modeling_latentmoe.training.expert_parallel import Travel, check_travel, saving_line
from modeling_latentmoe.training.flops import peak_tflops, step_flops
from modeling_latentmoe.training.gradients import clip_grad_norm, reduce_expert_gradients
from modeling_latentmoe.training.indexer import (
    INDEXER_FILE,
    indexer_parameters,
    read_indexers,
    set_indexers,
    train_indexers,
)
from modeling_latentmoe.training.loading import (
    DTYPES,
    SHIPPED_MODEL,
    checkpoint_activations,
    load_config,
    load_model,
    load_processor,
)
from modeling_latentmoe.training.loss import Step, backpropagate, count_loss_tokens, global_sum
from modeling_latentmoe.training.mesh import build_mesh, check_layout, rank_map
from modeling_latentmoe.training.micro_batches import MicroBatches, check_device
from modeling_latentmoe.training.offload import offload_activations
from modeling_latentmoe.training.parallelize import parallelize, start_processes, told_failures
from modeling_latentmoe.training.placement import check_placement, decide, parse_placement
from modeling_latentmoe.training.prometheus import Textfile
from modeling_latentmoe.training.router_bias import BIAS_FILE, read_biases, set_biases
from modeling_latentmoe.training.rows import Rows, is_digits, open_dataset
from modeling_latentmoe.training.tiers import Tiers
from modeling_latentmoe.training.trained_state import prepare_moments
from modeling_latentmoe.training.values import full_value


@dataclass(frozen=True)
class Arguments:
    model: str = option(SHIPPED_MODEL, "base model, a local folder or a Hub id")
    dataset: str = option("digits", "Hub id, folder, parquet or JSON-lines file, or digits[:blank|:shuffled]")
    dataset_config: str | None = option(None, "configuration of a Hub dataset that has several")
    split: str = option("train", "split to train on")
    eval_dataset: str | None = option(None, "held-out dataset; default: --eval_split of the same one")
    eval_split: str | None = option(None, "held-out split; default for digits: test")
    streaming: bool = option(False, "read the dataset while training, without a download; needs --max_steps")
    output_dir: str = option("runs/digits", "where adapter, checkpoints, metrics and model card go")
    overwrite: bool = option(False, "replace an earlier run in --output_dir")
    resume: bool = option(False, "continue the run in --output_dir from its newest checkpoint")
    max_steps: int | None = option(None, "number of optimizer steps; default: as many as --epochs take")
    epochs: float = option(6, "passes over the training data")
    batch_size: str = option("32", "samples in a micro-batch of one process, or auto: as many of --max_length as fit")
    gradient_accumulation: int = option(1, "micro-batches of one process in a step")
    max_length: int = option(2048, "longest sample in tokens; longer ones are dropped and counted, never cut")
    packing: bool = option(False, "fill rows of batch_size * max_length tokens with samples, no padding")
    skip_bad_images: bool = option(False, "leave out rows with an unreadable image and count them")
    thinking: bool = option(False, "train and evaluate with the think channel of the chat format")
    dtype: Literal["fp32", "bf16", "fp64"] = option("fp32", "precision of frozen weights; adapters: fp32, or fp64 too")
    kernels: Literal["auto", "torch", "hub"] = option(
        "auto", "fused operations on CUDA: kernels that are at hand, none, or those on the Hub, downloaded"
    )
    experts_in: str = option(
        "device", "where the experts of some layers live: host:0-30, file:0-30, or auto (by free memory)"
    )
    ep: int = option(1, "expert-parallel degree: so many processes share the experts of every layer")
    ep_chunks: int = option(0, "tokens travel to experts in so many parts, one while they work on another; 0: off")
    ep_rows: Literal["fp8", "int8"] | None = option(None, "form in which tokens travel to experts; default: --dtype")
    ep_sums: Literal["bf16", "fp8", "int8"] | None = option(None, "form in which results travel back; default: fp32")
    ep_node_size: int = option(0, "tokens travel within nodes of so many processes, then between nodes; 0: off")
    capacity_factor: float | None = option(None, "drop a process' tokens beyond this times an expert's even share")
    balance: Literal["none", "auxiliary", "quantile"] = option(
        "none", "even loads of experts: a loss, or Quantile Balancing of the routers' selection biases"
    )
    auxiliary_coefficient: float = option(1e-3, "weight of the loss of --balance auxiliary")
    train_indexer: Literal["warmup", "sparse"] | None = option(
        None, "train the indexers of sparse attention: first alone under dense attention, then with the adapter"
    )
    timeout: int = option(1800, "seconds until a process that does not answer is given up")
    lr: float = option(1.5e-3, "peak learning rate of everything without a rate of its own")
    lr_kda: float | None = option(None, "peak learning rate of the linear-attention (KDA) layers")
    lr_attention: float | None = option(None, "peak learning rate of the full and sparse attention layers")
    lr_indexer: float | None = option(None, "peak learning rate of the indexers of sparse attention")
    lr_experts: float | None = option(None, "peak learning rate of the routed experts")
    lr_projector: float | None = option(None, "peak learning rate of the image projector")
    warmup: float = option(0.05, "share of the run in which the rates rise; a cosine to zero follows")
    weight_decay: float = option(0.0, "AdamW weight decay of the adapters")
    adam_epsilon: float = option(1e-8, "AdamW epsilon; gradients far below it do not move a weight")
    max_grad_norm: float = option(1.0, "clip the global gradient norm to this")
    r: int = option(16, "LoRA rank of dense layers")
    lora_alpha: float = option(32.0, "every adapter is scaled by lora_alpha / r, those of the experts too")
    expert_rank: int = option(4, "LoRA rank of every routed expert")
    target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "layers to adapt; default: attention, feed-forward and routed experts"},
    )
    adapter: str | None = option(
        None, "start from this adapter, a folder or a Hub id, with a new optimizer and schedule"
    )
    train_projector: bool = option(True, "adapt the image projector too, if there is one (never the tower)")
    gradient_checkpointing: Literal["none", "full", "selective"] = option(
        "none", "recompute activations in the backward pass to save memory; selective: but attention and what travelled"
    )
    offload_activations: bool = option(False, "keep activations for the backward pass in host memory")
    seed: int = option(0, "seed of the adapters and of the order of the data")
    eval_every: int = option(0, "steps between evaluations; 0: before and after only")
    eval_samples: int = option(400, "held-out rows to evaluate on")
    max_new_tokens: int = option(32, "longest generated answer in an evaluation")
    save_every: int = option(100, "steps between checkpoints")
    keep: int = option(2, "newest checkpoints to keep")
    log_with: Literal["tensorboard", "trackio", "wandb"] | None = option(None, "tracker to log to as well")
    prometheus: str | None = option(None, "text file for the node exporter of Prometheus, *.prom, to keep up to date")
    peak_tflops: float | None = option(None, "bf16 TFLOP/s of a device, for the MFU; default: that of a known one")
    alert: list[str] | None = field(
        default=None,
        metadata={"help": 'condition to tell of when it begins, such as "load_imbalance>4"', "action": "extend"},
    )
    alert_command: str | None = option(None, "shell command to run for every alert, which finds it in $ALERT_CONDITION")
    push_to_hub: str | None = option(None, "Hub repository to upload the adapter to at the end, user/name")
    traceback: bool = option(False, "show where in the code an error was raised")

    def __post_init__(self) -> None:
        if self.batch_size != "auto":
            # a number from here on, in run.yaml too
            try:
                object.__setattr__(self, "batch_size", int(self.batch_size))
            except ValueError as error:
                raise ValueError(f"--batch_size {self.batch_size} must be a number or auto") from error
        counts = ("gradient_accumulation", "max_length", "eval_samples", "max_new_tokens", "save_every")
        for name in ("batch_size", *counts, "keep", "max_steps", "ep", "timeout", "r", "expert_rank"):
            if getattr(self, name) not in (None, "auto") and getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")
        rates = ("lr", "lr_kda", "lr_attention", "lr_indexer", "lr_experts", "lr_projector")
        others = ("lora_alpha", "capacity_factor", "auxiliary_coefficient", "adam_epsilon", "peak_tflops")
        for name in ("epochs", *rates, *others):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name} {value} must be a number above 0")
        if not self.max_grad_norm > 0:
            raise ValueError(f"--max_grad_norm {self.max_grad_norm} must be above 0 (inf: no clipping)")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"--warmup {self.warmup} must be a share of the run, at least 0 and below 1")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"--weight_decay {self.weight_decay} must be at least 0")
        if self.timeout > 10**6:
            raise ValueError(f"--timeout {self.timeout} is longer than a million seconds")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed {self.seed} must be at least 0 and below 2**32")
        parse_placement(self.experts_in)
        check_travel(self.travel, self.ep)
        if self.batch_size == "auto" and not self.recoverable:
            raise ValueError(
                "--batch_size auto tries what may not fit, which cannot be undone with --gradient_checkpointing full "
                "at --ep above 1, --ep_chunks or --ep_node_size: give a number, scripts/plan.py has one"
            )
        check_alerts(self.alert or (), self.alert_command)
        if self.prometheus and not Path(self.prometheus).resolve().parent.is_dir():
            raise ValueError(f"--prometheus {self.prometheus}: its folder does not exist")
        if self.push_to_hub:
            try:
                validate_repo_id(self.push_to_hub)
            except HFValidationError as error:
                raise ValueError(f"--push_to_hub {self.push_to_hub}: {error}") from error
        if self.split != "train" and Path(self.dataset).is_file():
            raise ValueError(f"--split {self.split}: --dataset {self.dataset} is one file, which has no splits")
        other_split = self.eval_split not in (None, self.split)
        if other_split and not self.eval_dataset and Path(self.dataset).is_file():
            # a file has one split, whatever it is called: the rows that are trained on
            raise ValueError(
                f"--eval_split {self.eval_split}: --dataset {self.dataset} is one file, all of which is trained on; "
                "name a held-out file with --eval_dataset"
            )
        if self.lr_indexer is not None and self.train_indexer is None:
            raise ValueError(f"--lr_indexer {self.lr_indexer} needs --train_indexer, without it no indexer trains")
        if self.train_indexer == "warmup":
            if self.adapter:
                raise ValueError("--train_indexer warmup learns from the attention of the base, leave out --adapter")
            if self.balance != "none":
                raise ValueError(f"--train_indexer warmup: routers are frozen, leave out --balance {self.balance}")
        if self.adapter and Path(self.output_dir).resolve() in (path := Path(self.adapter).resolve(), *path.parents):
            raise ValueError(f"--adapter {self.adapter} lies in --output_dir, which a new run clears")
        if self.eval_every < 0:
            raise ValueError(f"--eval_every {self.eval_every} must be at least 0")
        if self.streaming and self.max_steps is None:
            raise ValueError("--streaming needs --max_steps: the length of a stream is not known")

    @property
    def recoverable(self) -> bool:
        """Whether a process whose memory is used up in a step can join the others again, see collectives.py."""
        again = self.ep > 1 and self.gradient_checkpointing == "full"
        return not (again or self.ep_chunks or self.ep_node_size)

    @property
    def travel(self) -> Travel:
        return Travel(self.ep_chunks, self.ep_rows, self.ep_sums, self.ep_node_size)


def schedule(progress: float, warmup: float) -> float:
    """Share of the peak learning rate: a linear rise, then a cosine to zero at the end of the run."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def launch_command(argv: Sequence[str], accelerator: Accelerator, ep: int) -> str:
    """What to type for this run."""
    processes, fsdp = accelerator.num_processes, accelerator.is_fsdp2
    machines = processes // int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    launch = ["accelerate", "launch"]
    if machines > 1:
        launch += ["--config_file", "accelerate_configs/multi_node.yaml", "--num_machines", str(machines)]
        launch += ["--machine_rank", "R", "--main_process_ip", "HOST"]
    elif fsdp:
        launch += ["--config_file", f"accelerate_configs/fsdp2{'_ep' if ep > 1 else ''}.yaml"]
    elif processes > 1 and accelerator.device.type == "cpu":
        # Accelerate starts several processes on CPU with MPI only; the dashes keep torchrun off the script's switches
        return shlex.join(["torchrun", "--nproc_per_node", str(processes), "--", "scripts/lora.py", *argv])
    several = ["--num_processes", str(processes)] if processes > 1 else []
    return shlex.join([*launch, *several, "scripts/lora.py", *argv])


def resume_command(command: str) -> str:
    """The command that continues the run of `command`."""
    return re.sub(r" --(overwrite|resume)([ =](?!--)\S+)?(?= |$)", "", command) + " --resume"


@told_failures()
def train(args: Arguments, argv: Sequence[str]) -> None:
    settings = dataclasses.asdict(args)
    if args.log_with and importlib.util.find_spec(args.log_with) is None:
        raise ValueError(f"--log_with {args.log_with}: it is not installed (pip install {args.log_with})")
    resume_from = checkpoint.check_output(args.output_dir, settings, args.overwrite, args.resume)
    output = Path(args.output_dir)

    # Processes, and the mesh of those that share the experts.
    accelerator = start_processes(args.output_dir, args.log_with, args.timeout)
    rank, world, is_main = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
    check_choice(args.kernels, accelerator.device, DTYPES[args.dtype])
    if args.batch_size == "auto":
        check_device(accelerator.device)
    base_config = load_config(args.model)
    check_layout(base_config, world, args.ep)
    placement = parse_placement(args.experts_in)
    check_placement(placement, base_config, args.model)
    balancing: Balancing | None = None
    if args.balance == "auxiliary":
        balancing = AuxiliaryLoss(base_config.get_text_config(), args.auxiliary_coefficient)
    elif args.balance == "quantile":
        check_router(base_config.get_text_config())
    if args.adapter and resume_from is None:
        # before the weights, which take long to read
        lora.check_files(lora.adapter_folder(args.adapter))
    peak = args.peak_tflops or peak_tflops(timing.device_name(accelerator.device))
    check_mfu(args.alert or (), peak)
    mesh = build_mesh(world, args.ep, accelerator.device.type, timedelta(seconds=args.timeout))
    if is_main:
        # before the weights; once no other process looks whether the folder is empty
        checkpoint.check_writable(output)
    command = launch_command(argv, accelerator, args.ep)
    if world > 1:
        accelerator.print(rank_map(base_config, world, args.ep))
    if args.ep > 1:
        text = base_config.get_text_config()
        accelerator.print(saving_line(text.num_experts, text.num_experts_per_token, args.ep))
    if not is_main:
        datasets.disable_progress_bars()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    set_seed(args.seed)

    # Data: this process' rows, in an order that depends on the seed alone.
    processor = load_processor(args.model)
    source, folder = open_dataset(args.dataset, args.split, args.dataset_config, args.streaming)
    rows = Rows(args.dataset, source, rank, world, args.seed)
    batches = data.Batches(
        rows,
        lambda name, row: data.encode_chat(processor, data.read_chat(name, row, folder), args.thinking),
        batch_size=1 if args.batch_size == "auto" else args.batch_size,
        max_length=args.max_length,
        pad_id=processor.tokenizer.pad_token_id,
        packing=args.packing,
        skip_bad_images=args.skip_bad_images,
    )
    eval_split = args.eval_split or ("test" if is_digits(args.dataset) else None)
    held_out = None
    if args.eval_dataset or eval_split:
        name = args.eval_dataset or args.dataset
        config = args.dataset_config if name == args.dataset else None
        eval_source, eval_folder = open_dataset(name, eval_split or args.split, config, args.streaming)
        limit = len(range(rank, args.eval_samples, world))
        held_out = data.Chats(Rows(name, eval_source, rank, world), eval_folder, limit, args.skip_bad_images)

    # Model: frozen weights, fp32 adapters, one learning rate per kind of layer.
    base = load_model(args.model, args.dtype, mesh.get_local_rank("ep"), args.ep, args.kernels, placement.on_disk)
    identity = lora.base_identity(base, args.model)
    check_same_start({**settings, **identity, "checkpoint": str(resume_from)})
    storage = storage_report(base)
    model = lora.add_adapter(
        base,
        r=args.r,
        lora_alpha=args.lora_alpha,
        expert_rank=args.expert_rank,
        target_modules=args.target_modules,
        train_projector=args.train_projector,
    )
    if args.gradient_checkpointing != "none":
        checkpoint_activations(base, selective=args.gradient_checkpointing == "selective")
    if args.offload_activations:
        offload_activations(base)
    initialise_adapters(model, args.seed)
    given = {BIAS_FILE: {}, INDEXER_FILE: {}}
    if args.adapter and resume_from is None:
        given = lora.fill_adapter(model, args.adapter, identity)
    elif resume_from is not None:
        given = {BIAS_FILE: read_biases(resume_from, base), INDEXER_FILE: read_indexers(resume_from, base)}
        set_indexers(base, given[INDEXER_FILE])
    if args.train_indexer:
        train_indexers(base, alone=args.train_indexer == "warmup")
    rates = {"kda": args.lr_kda, "attention": args.lr_attention, "indexer": args.lr_indexer}
    rates |= {"experts": args.lr_experts, "projector": args.lr_projector, "dense": args.lr}
    groups = lora.parameter_groups(model, {name: args.lr if lr is None else lr for name, lr in rates.items()})
    accelerator.print(storage, lora.trainable_line(model, groups), sep="\n")
    optimizer = torch.optim.AdamW(groups, eps=args.adam_epsilon, weight_decay=args.weight_decay)
    placement = decide(placement, model, accelerator, args.ep)
    room = memory.Room(model, accelerator, args.ep, placement, args.gradient_checkpointing, args.offload_activations)
    homes = keep_off_device(model, placement, accelerator.device)
    wrapped, optimizer = parallelize(accelerator, model, optimizer, mesh, args.capacity_factor, args.travel)
    tiers = Tiers(homes, accelerator.device)
    prepare_moments(optimizer)
    clock = timing.Clock(accelerator.device)
    collectives = Collectives(wrapped, clock, args.recoverable)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    step, rows_done, done, load = 0, 0, 0.0, torch.zeros(0, dtype=torch.int64)
    if args.balance == "quantile":
        balancing = QuantileBalancing(base)
    accelerator.wait_for_everyone()
    if resume_from is not None:
        state, positions = checkpoint.load_checkpoint(resume_from, model, mesh, optimizer)
        step, rows_done, done, load = (state[name] for name in ("step", "rows_done", "done", "load"))
        position, repeated = data.reshard(positions, rows)
        batches.load_state_dict(position)
        batches.batch_size = state.get("batch_size", batches.batch_size)
        # else --epochs would end early by these rows
        rows_done -= repeated
        set_biases(base, given[BIAS_FILE])
        if balancing is not None:
            balancing.load(state["balancing"])
        accelerator.print(f"continuing from {resume_from}")
        if repeated:
            accelerator.print(f"{repeated} rows of packed batches under way are read again")
    elif is_main:
        checkpoint.start_output(output, settings)
    accelerator.wait_for_everyone()
    if not (output / "run.yaml").is_file():
        raise ValueError(f"--output_dir {output}: process {rank} does not see it; machines must share its file system")
    loads = monitor.Loads(output, is_main, first_step=step)
    metrics = monitor.Metrics(output, is_main, first_step=step)
    textfile = Textfile(args.prometheus if is_main else None, accelerator.print)
    if args.log_with:
        accelerator.init_trackers("latentmoe", config={name: str(value) for name, value in settings.items()})

    def measure(when: str) -> None:
        if held_out is not None:
            what = accelerator, model, processor, held_out
            how = {"batch_size": batches.batch_size, "thinking": args.thinking}
            with attention_of(base, dense=False):
                result = evaluate(*what, max_new_tokens=args.max_new_tokens, **how)
            if args.train_indexer:
                result |= evaluate_choice(*what, **how)
            result |= tiers.figures()
            metrics.add(step=step, **result)
            accelerator.log(result, step=step)
            accuracy, loss, n = (result[f"eval_{name}"] for name in ("accuracy", "loss", "samples"))
            accelerator.print(f"{when}: {accuracy:.1%} of {n} held-out answers are exact, loss {loss:.4f}")
            if args.train_indexer:
                accelerator.print(describe(result))

    def biases() -> dict[str, torch.Tensor]:
        return (balancing.biases() if balancing else {}) or given[BIAS_FILE]

    def learned(biases: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """What lies beside the adapter; every process calls it."""
        indexers = given[INDEXER_FILE]
        if args.train_indexer:
            indexers = {name: full_value(value) for name, value in indexer_parameters(base).items()}
        return {BIAS_FILE: biases, INDEXER_FILE: indexers}

    saved = step

    def save() -> None:
        nonlocal saved
        if saved == step:
            return
        # first: a file without its checkpoint is written again, a checkpoint without its file would lack these steps
        loads.write(step)
        state = {"step": step, "rows_done": rows_done, "done": done, "load": load, "batch_size": batches.batch_size}
        state["balancing"] = balancing.state() if balancing else {}
        position = batches.state_dict()
        checkpoint.save_checkpoint(
            accelerator, model, mesh, output, identity, optimizer, learned(biases()), state, position, args.keep
        )
        saved = step

    def keep_last_good() -> str:
        if last_good is not None:
            values, good_biases = last_good
            lora.restore(trained, values)
            checkpoint.save_whole_adapter(model, mesh, output, identity, learned(good_biases))
            return f"the adapter of step {step - 1} is in {output}"
        if resume_from is not None:
            # the checkpoint's own weights gave this loss
            return f"{resume_from} is bad, {checkpoint.last_good_adapter(output, resume_from)}"
        return "there was no good step"

    def attempt(window: list[dict[str, torch.Tensor]], *counts: int) -> Step:
        return backpropagate(accelerator, wrapped, window, *counts, balancing, args.capacity_factor, collectives)

    micro_batches = MicroBatches(attempt, optimizer, balancing, base_config, accelerator.device)
    wrapped.train()
    if args.batch_size == "auto" and resume_from is None:
        accelerator.print(room.check(args.max_length, "--max_length"))
        limit = 1024 if rows.total is None else max(1, rows.total // (world * args.gradient_accumulation))
        with collectives:
            batches.batch_size = micro_batches.largest(args.max_length, room.most_rows(args.max_length, limit))
        accelerator.print(f"--batch_size auto: {batches.batch_size}, the largest that fits")
    seen, stream, last_good = batches.rows_seen, iter(batches), None
    # before the evaluation: a run that cannot fit ends at once
    first = next(stream)
    accelerator.print(room.check(first["input_ids"].numel(), "--batch_size or --max_length"))
    stream = chain([first], stream)
    if step == 0:
        measure("before training")
    alerts = Alerts(args.alert or (), args.alert_command, args.output_dir, is_main, accelerator.print, metrics.records)
    with monitor.Progress(done, is_main) as bar, checkpoint.Interrupt() as interrupt, collectives, alerts:
        while done < 1:
            clock.begin()
            with clock.span("data"):
                window = [data.with_images(next(stream), base_config) for _ in range(args.gradient_accumulation)]
            if args.packing and any("cu_seqlens" not in batch for batch in window):
                raise ValueError("--packing: a packed batch has no `cu_seqlens`, its documents would mix")

            # One exchange before the first forward: what all processes read, and whether one must stop.
            mine = sum(count_loss_tokens(batch["labels"]) for batch in window)
            read = sum(map(data.count_tokens, window))
            n_tokens, n_read, n_rows, stop = global_sum(
                accelerator, mine, read, batches.rows_seen - seen, interrupt.asked
            )
            if not n_tokens:
                raise ValueError(f"--dataset {args.dataset}: no row of step {step + 1} has a token to learn")
            rows_done, seen = rows_done + n_rows, batches.rows_seen
            before = done
            done = (step + 1) / args.max_steps if args.max_steps else rows_done / (args.epochs * rows.total)
            factor = schedule((before + done) / 2, args.warmup)
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor

            loss, step_load, auxiliary, indexer, dropped, _ = micro_batches.step(
                window, n_tokens, n_read, accelerator.print
            )
            with clock.span("optimizer"):
                reduce_expert_gradients(model, mesh)
                norms = clip_grad_norm(model, mesh, args.max_grad_norm)
            if not math.isfinite(loss + indexer + norms.total):
                record = alerts.watch({"step": step + 1, "nonfinite": 1})
                metrics.add(**record)
                textfile.write(record, [], load, last=True)
                if is_main:
                    monitor.draw(metrics, load, output / "training.png")
                what = f"step {step + 1}: loss {loss}, gradient norm {norms.total}, loss of indexers {indexer}"
                raise FloatingPointError(f"{what}; {keep_last_good()}. Lower --lr")
            # These weights gave a finite loss and finite gradients: kept in case the next ones do not.
            with clock.span("optimizer"):
                last_good = lora.snapshot(trained), biases()
                optimizer.step()
                optimizer.zero_grad()
            if balancing is not None:
                balancing.update(step_load)
            step += 1

            load = step_load + (load if load.numel() else 0)
            loads.add(step_load)
            # waits for the device, so that times are whole
            mine = clock.finish() | monitor.memory_figures(accelerator.device)
            processes = timing.of_all_processes(mine, accelerator.device)
            record = {"step": step, "loss": loss, "grad_norm": norms.total, "grad_norms": norms.targets}
            record |= {"lr": args.lr * factor, "done": done, "dropped": dropped, "auxiliary_loss": auxiliary}
            record["nonfinite"] = 0
            if args.train_indexer:
                record["indexer_loss"] = indexer
            record |= timing.split(processes) | monitor.memory_of_all(processes)
            record |= monitor.load_figures(step_load) | tiers.figures()
            # A packed batch may hold nothing but samples that were read for the one before.
            flops = step_flops(base.config.get_text_config(), n_read, n_tokens, round(n_read / max(1, n_rows)))
            record |= monitor.speed_figures(record["step_s"], n_tokens, n_read, flops, world, peak)
            record = alerts.watch(record)
            metrics.add(**record)
            accelerator.log(record, step=step)
            textfile.write(record, processes, load, last=done >= 1 or bool(stop))
            bar.update(record)
            if args.eval_every and step % args.eval_every == 0 and done < 1:
                measure(f"step {step}")
            if stop or step % args.save_every == 0:
                save()
            if stop:
                raise InterruptedError(
                    f"stopped after step {step}, everything is saved; to go on: {resume_command(command)}"
                )

    measure("after training")
    save()
    too_long, bad_images = global_sum(accelerator, batches.too_long, batches.bad_images)
    accelerator.print(f"left out: {too_long} samples over --max_length, {bad_images} unreadable images")
    for line in tiers.summary():
        accelerator.print(line)
    checkpoint.save_whole_adapter(model, mesh, output, identity, learned(biases()))
    if is_main:
        monitor.draw(metrics, load, output / "training.png")
        card = monitor.model_card(
            metrics,
            base=args.model,
            adapter=args.push_to_hub or args.output_dir,
            dataset=args.dataset,
            question=(held_out and held_out.question()) or "What is this?",
            thinking=args.thinking,
            command=command,
        )
        files.write_text(output / "README.md", card)
        print(f"adapter, metrics, picture and model card are in {output}")
        if args.push_to_hub:
            print(f"uploaded to {checkpoint.push(output, args.push_to_hub)}")
    # DDP must not outlive the process group: its destructor would wait, holding the interpreter, for a thread of
    # the group that waits for the interpreter.
    wrapped, optimizer = accelerator.free_memory(wrapped, optimizer)
    accelerator.end_training()


def main(argv: Sequence[str]) -> int:
    return monitor.run_script(train, Arguments, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
