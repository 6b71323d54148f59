"""Start the processes of a run, and put a model on all of them.

Accelerate shards everything but the experts over all processes (FSDP2), or copies it to all of them (DDP). The experts
are shared out over "ep", a second mesh over the same processes (mesh.py), and their tokens travel
(expert_parallel.py).
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method

from modeling_latentmoe.training.expert_parallel import PLAIN, Travel, expert_parallel
from modeling_latentmoe.training.gradients import exclude_experts_from_ddp
from modeling_latentmoe.training.launch import check_plugin, check_version
from modeling_latentmoe.training.mesh import is_expert

# full names of the modules that FSDP leaves alone, a pattern
EXPERT_MODULES = r".*\.block_sparse_moe\.experts"
# how gloo words the loss of a peer, which raises a plain RuntimeError
LOST = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe", "timed out after")


def start_processes(output_dir: str, log_with: str | None, timeout: int) -> Accelerator:
    """Join the other processes of this launch; every one of them must be alive within `timeout` seconds, always.

    Raises ValueError where the launcher asked for something that Accelerate does not give or that cannot work.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        mixed_precision="no",
        log_with=log_with,
        project_dir=output_dir,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))],
    )
    if accelerator.num_processes != launched:
        raise ValueError(f"{launched} processes were launched but Accelerate knows {accelerator.num_processes}")
    check_fsdp(accelerator)
    if not dist.is_initialized():
        # one process: a group of its own, so that no code below asks how many there are
        backend = dist.get_default_backend_for_device(accelerator.device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return accelerator


def check_fsdp(accelerator: Accelerator) -> None:
    """ValueError where FSDP was asked for and is not there, or has settings under which training is wrong."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        check_version(int(os.environ.get("FSDP_VERSION", "1")))
        if not accelerator.is_fsdp2:
            given, device = accelerator.distributed_type.value, accelerator.device.type
            raise ValueError(
                f"the launch configuration asks for FSDP, but Accelerate gives {given} on {device}: FSDP needs "
                "accelerators, set distributed_type to MULTI_CPU to train without"
            )
    kind = accelerator.distributed_type.value
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise ValueError(f"distributed_type {kind} of the launch configuration is not supported, set it to FSDP")
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    check_plugin(plugin, accelerator.parallelism_config)


def parallelize(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    capacity_factor: float | None = None,
    travel: Travel = PLAIN,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Put `model`, which has its adapters and this process' experts, and its optimizer on all processes."""
    expert_parallel(model, mesh, capacity_factor, travel)
    if accelerator.is_fsdp2:
        accelerator.state.fsdp_plugin.ignored_modules = EXPERT_MODULES
        # the snapshots that a layer hands on are views of its inputs to FSDP; nothing here writes in place
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        # `generate` reads parameters of the root before it calls any layer
        register_fsdp_forward_method(wrapped, "generate")
        return wrapped, optimizer
    exclude_experts_from_ddp(model)
    # DDP refuses a model without any gradient to average
    averages = any(param.requires_grad and not is_expert(name) for name, param in model.named_parameters())
    wrapped = accelerator.prepare_model(model, evaluation_mode=not averages)
    return wrapped, accelerator.prepare_optimizer(optimizer)


@contextmanager
def told_failures() -> Iterator[None]:
    """Turns what is raised where memory or disk is used up or another process is gone into an OSError of one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = str(error).splitlines()[0][:200]
        raise OSError(
            f"the accelerator's memory is used up ({what}): lower --batch_size or --max_length, set "
            "--gradient_checkpointing full or --experts_in auto, or use more devices; --resume continues from the "
            "newest checkpoint"
        ) from error
    except SafetensorError as error:
        raise OSError(f"a file of weights could not be read or written ({error})") from error
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(words in str(error) for words in LOST):
            raise
        raise ConnectionError(
            "another process of this run died (its message is above, if it left one) or did not answer within "
            "--timeout; start again with --resume to continue from the newest checkpoint"
        ) from error
