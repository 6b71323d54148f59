"""The launch configurations: what Accelerate makes of them, and which ones cannot work."""

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from modeling_latentmoe.training.launch import check_plugin, launch_environment, read_launch
from scripts import layout as script

CONFIGS = Path(__file__).resolve().parents[2] / "accelerate_configs"
FSDP_FILES = ("fsdp2.yaml", "fsdp2_ep.yaml", "multi_node.yaml", "npu_fsdp2_ep.yaml")
PROBE = "import json, os; open(os.environ['OUT'] + os.environ['RANK'], 'w').write(json.dumps(dict(os.environ)))"


@pytest.mark.parametrize(
    ("name", "kind", "processes", "machines"),
    [
        ("single.yaml", "NO", 1, 1),
        ("fsdp2.yaml", "FSDP", 8, 1),
        ("fsdp2_ep.yaml", "FSDP", 8, 1),
        ("multi_node.yaml", "FSDP", 128, 16),
        ("npu_fsdp2_ep.yaml", "FSDP", 8, 1),
    ],
)
def test_accelerate_knows_every_key(name: str, kind: str, processes: int, machines: int) -> None:
    """Accelerate refuses unknown keys at the top only: those of a section it would ignore."""
    config = load_config_from_file(str(CONFIGS / name))
    assert isinstance(config, ClusterConfig) and config.distributed_type.value == kind
    assert (config.num_processes, config.num_machines, config.mixed_precision) == (processes, machines, "no")
    assert not config.use_cpu and not config.parallelism_config
    assert config.fsdp_config.keys() <= vars(launch_command_parser().parse_args(["script.py"])).keys()


@pytest.mark.parametrize("name", FSDP_FILES)
def test_what_the_files_mean(name: str) -> None:
    launch = read_launch(str(CONFIGS / name), [])
    plugin = launch.plugin
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy and plugin.transformer_cls_names_to_wrap is None
    assert plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
    assert type(plugin.cpu_offload).__name__ == "OffloadPolicy" and plugin.mixed_precision_policy is None
    assert not plugin.cpu_ram_efficient_loading and not plugin.activation_checkpointing
    assert launch.parallelism is None and launch.copies == 1


def test_one_process() -> None:
    launch = read_launch(str(CONFIGS / "single.yaml"), [])
    assert launch == (1, 1, None, None)


@pytest.mark.parametrize("name", ["single.yaml", *FSDP_FILES])
def test_the_comment_shows_the_command(name: str) -> None:
    """It names this file and the script, and its switches are the launcher's."""
    comment = " ".join(line[1:].strip() for line in (CONFIGS / name).read_text().splitlines() if line[:1] == "#")
    command = shlex.split(
        re.search(r"accelerate launch (.*?scripts/lora\.py( --ep \d+)?)", comment.replace("\\", ""))[1]
    )
    args = launch_command_parser().parse_args(["3" if word == "R" else word for word in command])
    assert args.config_file == f"accelerate_configs/{name}" and args.training_script == "scripts/lora.py"
    degree = {"fsdp2_ep.yaml": 8, "npu_fsdp2_ep.yaml": 8, "multi_node.yaml": 64}
    assert args.training_script_args == (["--ep", str(degree[name])] if name in degree else [])
    if name == "multi_node.yaml":
        assert (args.machine_rank, args.main_process_ip) == (3, "HOST")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launched(name: str, switches: list[list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Environments of all processes, by rank, of one launcher for each list of switches."""
    monkeypatch.setenv("OUT", f"{folder}/")
    probe = folder / "probe.py"
    probe.write_text(PROBE)
    start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / name)]
    running = [
        subprocess.Popen([*start, *more, str(probe)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for more in switches
    ]
    for launcher in running:
        output, _ = launcher.communicate(timeout=240)
        assert launcher.returncode == 0, output
    return [json.loads(file.read_text()) for file in sorted(folder.glob("[0-9]*"))]


def settings(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(("FSDP_", "ACCELERATE_"))}


@pytest.mark.dist
def test_the_launcher_tells_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `read_launch` reads is what `accelerate launch` really sets."""
    found = launched("fsdp2.yaml", [["--num_processes", "2", "--main_process_port", "0"]], tmp_path, monkeypatch)
    assert [(env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) for env in found] == [("0", "2", "0"), ("1", "2", "1")]
    machines, processes, expected = launch_environment(str(CONFIGS / "fsdp2.yaml"), ["--num_processes", "2"])
    assert (machines, processes) == (1, 2)
    for env in found:
        assert settings(env) == settings(expected)
        chosen = {
            "ACCELERATE_USE_FSDP": "true",
            "ACCELERATE_MIXED_PRECISION": "no",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_RESHARD_AFTER_FORWARD": "true",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
            "FSDP_OFFLOAD_PARAMS": "false",
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
            "FSDP_ACTIVATION_CHECKPOINTING": "false",
        }
        assert settings(env).items() >= chosen.items()
        assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in env and "ACCELERATE_USE_PARALLELISM_CONFIG" not in env


@pytest.mark.slow
@pytest.mark.dist
def test_several_machines_are_one_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """multi_node.yaml with the switches that its comment gives, as two machines of two processes on this one."""
    world = ["--num_machines", "2", "--num_processes", "4", "--main_process_port", str(free_port())]
    where = [[*world, "--main_process_ip", "127.0.0.1", "--machine_rank", str(rank)] for rank in range(2)]
    found = launched("multi_node.yaml", where, tmp_path, monkeypatch)
    assert [(env["RANK"], env["GROUP_RANK"], env["LOCAL_RANK"]) for env in found] == [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "1", "0"),
        ("3", "1", "1"),
    ]
    assert all(env["WORLD_SIZE"] == "4" and env["FSDP_VERSION"] == "2" for env in found)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("fsdp_config", {"fsdp_version": 1}, "fsdp_version 1: it lays"),
        ("fsdp_config", {"fsdp_cpu_ram_efficient_loading": True}, "fsdp_cpu_ram_efficient_loading: only the first"),
        # left out, it is true
        ("fsdp_config", {"fsdp_cpu_ram_efficient_loading": None}, "fsdp_cpu_ram_efficient_loading: only the first"),
        ("fsdp_config", {"fsdp_activation_checkpointing": True}, "give the script --gradient_checkpointing"),
        ("fsdp_config", {"fsdp_offload_params": True}, "fsdp_offload_params: "),
        ("fsdp_config", {"fsdp_auto_wrap_policy": None}, "set it to TRANSFORMER_BASED_WRAP"),
        ("fsdp_config", {"fsdp_ignored_modules": ".*experts"}, "fsdp_ignored_modules: the script"),
        ("fsdp_config", {"fsdp_reshard": True}, "fsdp_config has no setting fsdp_reshard"),
        ("fsdp_config", {"fsdp_state_dict_type": "HALF"}, "HALF"),
        ("parallelism_config", {"parallelism_config_tp_size": 2}, "parallelism_config_tp_size 2: the layers do not"),
        ("parallelism_config", {"parallelism_config_cp_size": 2}, "context parallelism"),
        ("parallelism_config", {"parallelism_config_sp_size": 2}, "sequence parallelism"),
        ("parallelism_config", {"tp_size": 2}, "parallelism_config has no setting tp_size"),
        ("parallelism_config", {"parallelism_config_dp_replicate_size": 2}, "is not num_processes 8"),
        (None, {"distributed_type": "DEEPSPEED"}, "distributed_type DEEPSPEED is not supported"),
        (None, {"experts": 8}, "unknown keys (['experts'])"),
    ],
)
def test_what_cannot_work_ends_the_dry_run(
    section: str | None, change: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any weight is read, with the name of the file and of the setting."""
    values = yaml.safe_load((CONFIGS / "fsdp2_ep.yaml").read_text())
    part = values if section is None else values.setdefault(section, {})
    part.update(change)
    for name in [name for name, value in part.items() if value is None]:
        del part[name]
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(values))
    assert script.main(["--config_file", str(file)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and str(file) in printed.err and not printed.out


def test_copies_of_the_dense_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hybrid sharding: two copies of four shards, beside the same expert mesh."""
    values = yaml.safe_load((CONFIGS / "fsdp2_ep.yaml").read_text())
    values["parallelism_config"] = {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 4,
    }
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(values))
    assert read_launch(str(file), []).copies == 2
    assert script.main(["--config_file", str(file), "--ep", "8"]) == 0
    printed = capsys.readouterr().out
    assert "dense mesh: dp_replicate 2 x dp_shard 4" in printed and "expert mesh: efsdp 1 x ep 8" in printed
    assert "all ranks together hold 2 x " in printed


@pytest.mark.parametrize("text", ["", "[1, 2]", "distributed_type: [", "num_processes: 8"])
def test_files_that_are_no_configuration(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"--config_file {file}: ")):
        read_launch(str(file), [])


def plugin(**settings) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **settings)


def test_live_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objects that a running process has, not read from a file."""
    # the plugin leaves its setting in the environment
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    check_plugin(None, None)
    check_plugin(plugin(), None)
    check_plugin(plugin(), ParallelismConfig(dp_replicate_size=2, dp_shard_size=4))
    with pytest.raises(ValueError, match="fsdp_offload_params"):
        check_plugin(plugin(cpu_offload=True), None)
    with pytest.raises(ValueError, match="fsdp_activation_checkpointing"):
        check_plugin(plugin(activation_checkpointing=True), None)
    with pytest.raises(ValueError, match="tp_size 2"):
        check_plugin(plugin(), ParallelismConfig(tp_size=2))
    with pytest.raises(ValueError, match="fsdp_cpu_ram_efficient_loading"):
        check_plugin(plugin(cpu_ram_efficient_loading=True), None)
