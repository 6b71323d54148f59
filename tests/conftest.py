"""Fixtures shared by every test: paths, and fresh processes that cannot see the installed package."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

# Children inherit these: several small processes on few cores are fastest single-threaded and quiet.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # transformers copies remote code into this cache without a lock: one for every worker
    os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="hf_modules-")

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "modeling_latentmoe" / "tiny"

# Makes `import modeling_latentmoe` fail however it was installed (editable hook, .pth file or wheel), so
# that a model which still loads does so by remote code alone.
_HIDE_PACKAGE = """
import importlib.abc, sys
class _Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("modeling_latentmoe", "scripts"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, _Hidden())
try:
    import modeling_latentmoe
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("the installed package is visible in a process that must not see it")
"""


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The shipped model directory."""
    return TINY


@pytest.fixture
def fresh_process(tmp_path: Path) -> Callable[..., str]:
    """`fresh_process(code, env={}, package=False, timeout=240)` runs `code` in a new interpreter.

    The child works in an empty directory with its own remote-code cache and offline unless `env` says
    otherwise; `package=False` hides the installed package from it. Returns what it printed; a non-zero exit
    fails the test with both streams.
    """

    def run(code: str, env: dict[str, str] | None = None, package: bool = False, timeout: float = 240) -> str:
        workdir = tmp_path / "cwd"
        workdir.mkdir(exist_ok=True)
        child = {
            **os.environ,
            "HF_MODULES_CACHE": str(tmp_path / "hf_modules"),
            "HF_HUB_OFFLINE": "1",
            **(env or {}),
        }
        if not package:
            child.pop("PYTHONPATH", None)
            child.update({key: value for key, value in (env or {}).items() if key == "PYTHONPATH"})
        done = subprocess.run(
            [sys.executable, "-P", "-c", code if package else _HIDE_PACKAGE + code],
            cwd=workdir,
            env=child,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
