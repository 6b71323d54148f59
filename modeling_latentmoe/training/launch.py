"""What `accelerate launch` asks for: how many processes, and how Accelerate shards all but the experts over them."""

from typing import NamedTuple

import yaml
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import patch_environment
from accelerate.utils.launch import prepare_extend_env_parallelism_config, prepare_multi_gpu_env
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Launch(NamedTuple):
    """machines, processes: how many, in all. plugin, parallelism: Accelerate's settings, None where not asked for."""

    machines: int
    processes: int
    plugin: FullyShardedDataParallelPlugin | None
    parallelism: ParallelismConfig | None

    @property
    def copies(self) -> int:
        """How often everything but the experts is held: once under FSDP, `dp_replicate` times if that is asked for."""
        if self.plugin is None:
            return self.processes
        return 1 if self.parallelism is None else self.parallelism.dp_replicate_size


def copies_of(accelerator: Accelerator) -> int:
    """`Launch.copies` of the launch that this process belongs to."""
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    return Launch(1, accelerator.num_processes, plugin, accelerator.parallelism_config).copies


def launch_environment(config_file: str, switches: list[str]) -> tuple[int, int, dict[str, str]]:
    """Machines, processes, and the variables that `accelerate launch --config_file ... [switches]` sets in them.

    Accelerate's own code decides, defaults and precedence included; nothing is started. ValueError or OSError, with
    the name of the file, for one that Accelerate does not take or that has a setting which it would ignore.
    """
    parser = launch_command_parser()
    # the port is free: this is not the machine that the launch will listen on
    command = ["--config_file", config_file, *switches, "--main_process_port", "0", "script.py"]
    try:
        config = load_config_from_file(config_file)
        # the second one is taken without a switch of its name
        known = vars(parser.parse_args(["script.py"])).keys() | {"fsdp_ignored_modules"}
        for section in ("fsdp_config", "parallelism_config"):
            for key in getattr(config, section).keys() - known:
                raise ValueError(f"{section} has no setting {key}, Accelerate would ignore it")
        args, _, _ = _validate_launch_command(parser.parse_args(command))
        if args.use_deepspeed or args.use_megatron_lm or args.tpu:
            raise ValueError(f"distributed_type {config.distributed_type.value} is not supported, set it to FSDP")
        if min(args.num_processes, args.num_machines) < 1:
            raise ValueError(f"num_processes {args.num_processes}, num_machines {args.num_machines}: below 1")
        if args.num_processes % args.num_machines:
            raise ValueError(f"num_machines {args.num_machines} does not divide num_processes {args.num_processes}")
        environment = prepare_multi_gpu_env(args)
        if args.use_parallelism_config:
            environment = prepare_extend_env_parallelism_config(args, environment)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config_file {config_file}: {error}") from error
    return args.num_machines, args.num_processes, environment


def read_launch(config_file: str, switches: list[str]) -> Launch:
    """What `accelerate launch --config_file ... [switches]` asks for. ValueError where it cannot work, as above."""
    machines, processes, environment = launch_environment(config_file, switches)
    with patch_environment(**environment):
        try:
            plugin = parallelism = None
            if environment.get("ACCELERATE_USE_FSDP") == "true":
                # first, because the settings of version 1 look for a device
                check_version(int(environment["FSDP_VERSION"]))
                plugin = FullyShardedDataParallelPlugin()
            if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
                parallelism = ParallelismConfig()
            check_plugin(plugin, parallelism)
        except (ValueError, KeyError) as error:
            raise ValueError(f"--config_file {config_file}: {error}") from error
    if parallelism is not None and parallelism.total_size != processes:
        raise ValueError(
            f"--config_file {config_file}: parallelism_config_dp_replicate_size {parallelism.dp_replicate_size} times "
            f"parallelism_config_dp_shard_size {parallelism.dp_shard_size} is not num_processes {processes}"
        )
    return Launch(machines, processes, plugin, parallelism)


def check_version(fsdp_version: int) -> None:
    """As `check_plugin`, of the one setting that a plugin cannot even be made with."""
    if fsdp_version != 2:
        raise ValueError(
            f"fsdp_version {fsdp_version}: it lays frozen and trained weights into one tensor, set it to 2"
        )


def check_plugin(plugin: FullyShardedDataParallelPlugin | None, parallelism: ParallelismConfig | None) -> None:
    """ValueError, which names the setting of the launch configuration, where training would be wrong or impossible.

    plugin, parallelism: `accelerator.state.fsdp_plugin`, before `prepare`, and `accelerator.parallelism_config`.
    """
    if parallelism is not None:
        for axis, kind in (("tp", "tensor"), ("cp", "context"), ("sp", "sequence")):
            size = getattr(parallelism, f"{axis}_size")
            if size > 1:
                raise ValueError(
                    f"parallelism_config_{axis}_size {size}: the layers do not support {kind} parallelism, leave it out"
                )
    if plugin is None:
        return
    check_version(plugin.fsdp_version)
    faults = (
        (
            plugin.cpu_ram_efficient_loading,
            "fsdp_cpu_ram_efficient_loading: only the first process would have weights, but it does not have the "
            "experts of the others, set it to false",
        ),
        (
            plugin.activation_checkpointing,
            "fsdp_activation_checkpointing: tokens could choose other experts when they are computed again, set it to "
            "false and give the script --gradient_checkpointing",
        ),
        (
            isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            "fsdp_offload_params: the norm of gradients on the CPU cannot be summed over devices, set it to false",
        ),
        (
            plugin.ignored_modules is not None,
            "fsdp_ignored_modules: the script makes FSDP leave the experts alone and nothing else, leave it out",
        ),
        (
            plugin.auto_wrap_policy is not transformer_auto_wrap_policy,
            "fsdp_auto_wrap_policy: the whole model would be gathered at once, set it to TRANSFORMER_BASED_WRAP",
        ),
    )
    for wrong, message in faults:
        if wrong:
            raise ValueError(message)
