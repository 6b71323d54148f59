"""Kernel repositories on the Hub: packed, pushed, and fetched by `kernels` and by the model's own loader."""

import json
from collections.abc import Callable
from pathlib import Path

import kernel_repositories
import pytest
from kernel_repositories import AS_ON_CUDA, write_toy
from loopback_hub import LoopbackHub

from scripts import pack_kernels

PUSH = """
import os
from huggingface_hub import HfApi
api = HfApi()
api.create_repo(os.environ["REPOSITORY"], repo_type="kernel")
api.upload_folder(repo_id=os.environ["REPOSITORY"], repo_type="kernel", folder_path=os.environ["FOLDER"])
api.create_branch(os.environ["REPOSITORY"], branch="v1", repo_type="kernel")
"""
GET = """
import kernels
module = kernels.get_kernel(os.environ["REPOSITORY"], version=1, trust_remote_code=True)
assert all(hasattr(module, name) for name in module.__all__) and module.layers
print(module.__name__)
"""
OWN_LOADER = """
from huggingface_hub.constants import HF_HUB_OFFLINE
from modeling_latentmoe import kernel_loading
kernel_loading.REPOSITORIES["toy"] = os.environ["REPOSITORY"]
kernel_loading.logging.set_verbosity_info()
"""
FETCH = """
assert kernel_loading.load("toy", "auto") is None
module = kernel_loading.load("toy", "hub")
assert module.scale(torch.ones(1)).item() == 3
"""
CACHED = """
assert HF_HUB_OFFLINE
for choice in ("auto", "hub"):
    assert kernel_loading.load("toy", choice).scale(torch.ones(1)).item() == 3
"""


@pytest.fixture
def push(hub: LoopbackHub, hub_env: dict[str, str], tmp_path: Path, fresh_process: Callable[..., str]) -> Callable:
    """`push(folder, repository)` packs a repository (None: the toy) and uploads it; returns its id in a process."""

    def run(folder: Path | None, repository: str) -> str:
        source = folder or write_toy(tmp_path / "toy-kernel")
        assert pack_kernels.main([str(source), "--output", str(tmp_path / "packed")]) == 0
        packed = tmp_path / "packed" / source.name
        fresh_process(PUSH, env={**hub_env, "REPOSITORY": repository, "FOLDER": str(packed)})
        files = hub.files(repository, "kernels")
        assert "README.md" in files
        return json.loads(files["build/torch-cuda/metadata.json"].data)["id"]

    return run


@kernel_repositories.TOY_FIRST
def test_get_kernel(
    folder: Path | None, push: Callable, hub_env: dict[str, str], fresh_process: Callable[..., str]
) -> None:
    repository = f"user/{'toy' if folder is None else folder.name.replace('_', '-')}"
    name = push(folder, repository)
    # `kernels` sends an empty user agent otherwise, which is not valid HTTP
    env = {**hub_env, "HF_HUB_DISABLE_TELEMETRY": "0", "REPOSITORY": repository}
    assert fresh_process(AS_ON_CUDA + GET, env=env).split()[-1] == name


@pytest.mark.slow
def test_the_models_own_loader(
    hub: LoopbackHub, push: Callable, hub_env: dict[str, str], fresh_process: Callable[..., str]
) -> None:
    """Public report 93: only "hub" downloads; what it left in the cache serves both choices without a connection."""
    push(None, "user/own")
    env = {**hub_env, "REPOSITORY": "user/own"}
    began = len(hub.requests)
    fresh_process(AS_ON_CUDA + OWN_LOADER + 'assert kernel_loading.load("toy", "auto") is None', env=env, package=True)
    assert hub.requests[began:] == []
    fresh_process(AS_ON_CUDA + OWN_LOADER + FETCH, env=env, package=True)
    assert any("/resolve/" in path for _, path in hub.requests[began:])
    fresh_process(AS_ON_CUDA + OWN_LOADER + CACHED, env={**env, "HF_HUB_OFFLINE": "1"}, package=True)


@pytest.mark.slow
def test_what_is_not_on_the_hub_is_an_error(hub_env: dict[str, str], fresh_process: Callable[..., str]) -> None:
    code = """
try:
    kernel_loading.load("toy", "hub")
except ValueError as error:
    print(error)
"""
    printed = fresh_process(AS_ON_CUDA + OWN_LOADER + code, env={**hub_env, "REPOSITORY": "user/absent"}, package=True)
    assert 'kernels="hub": toy: user/absent, revision v1, was not fetched' in printed


@pytest.mark.slow
def test_another_revision_is_not_taken(
    push: Callable, hub_env: dict[str, str], fresh_process: Callable[..., str]
) -> None:
    """Public report 96: without a connection only the revision that the model is written to counts, and is named."""
    push(None, "user/pinned")
    env = {**hub_env, "REPOSITORY": "user/pinned"}
    fetch_main = 'kernel_loading.REVISION = "main"\nassert kernel_loading.load("toy", "hub") is not None'
    fresh_process(AS_ON_CUDA + OWN_LOADER + fetch_main, env=env, package=True)
    code = """
kernel_loading.REVISION = "v2"
assert kernel_loading.load("toy", "auto") is None
try:
    kernel_loading.load("toy", "hub")
except ValueError as error:
    print(error)
"""
    env["HF_HUB_OFFLINE"] = "1"
    printed = fresh_process(AS_ON_CUDA + OWN_LOADER + code, env=env, package=True)
    assert 'kernels="hub": toy: user/pinned, revision v2, was not fetched' in printed
