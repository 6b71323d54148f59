"""The package without torch-npu, with one that does not load, and with something else of its name."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORT = "import modeling_latentmoe; from modeling_latentmoe import npu; print(npu.torch_npu_problem())"
# What the real one does where CANN is missing: torch calls its entry point, and that import fails.
BROKEN = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"
ENTRY = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"


def run(folder: Path, code: str = IMPORT, **environment: str) -> subprocess.CompletedProcess:
    """A new process that finds what is in `folder` first."""
    paths = f"{folder}:{ROOT}"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def install(folder: Path, code: str) -> None:
    """A distribution torch-npu whose entry point torch loads."""
    (folder / "torch_npu.py").write_text(code)
    described = folder / "torch_npu-2.14.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.14.0\n")
    (described / "entry_points.txt").write_text(ENTRY)


def test_absent(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torch-npu is not installed or does not load" in done.stdout or "sees no device" in done.stdout


def test_present_and_broken(tmp_path: Path) -> None:
    """`import torch` fails then, whoever asks; here with what to do. Whoever does not want it is not in its way."""
    install(tmp_path, BROKEN)
    done = run(tmp_path)
    assert done.returncode == 1 and done.stderr.rstrip().splitlines()[-1].startswith(
        "ImportError: torch-npu is installed but does not load: set the environment of CANN"
    )
    done = run(tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch-npu is not installed or does not load")


def test_shadowed(tmp_path: Path) -> None:
    """A file of that name beside the script."""
    (tmp_path / "torch_npu.py").write_text("")
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{tmp_path / 'torch_npu.py'} is not torch-npu and hides it: rename it"


# Programs that time kernels.
MEASURE = {"bench.py", "bench_step.py", "bench_dispatch.py"}


def test_nothing_of_the_package_names_cuda() -> None:
    """Devices are `torch.accelerator`'s: kernels, their measurements and the checks of them are another matter."""
    files = [*(ROOT / "modeling_latentmoe").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    named = [str(file) for file in files if "torch.cuda" in file.read_text() and file.name not in MEASURE]
    assert not named


def test_no_process_group_is_asked_for_by_name() -> None:
    """Of a card's processes there is one backend, the default of its device: nothing makes groups of another."""
    files = [*(ROOT / "modeling_latentmoe").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    text = "".join(file.read_text() for file in files if file.name not in MEASURE)
    assert not any(f'"{backend}"' in text for backend in ("nccl", "gloo", "hccl")) and "new_group(" not in text
