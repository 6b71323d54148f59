"""The loopback Hub, and fresh processes that talk to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub


@pytest.fixture(scope="session")
def hub() -> Iterator[LoopbackHub]:
    server = LoopbackHub()
    yield server
    server.close()


@pytest.fixture
def hub_env(hub: LoopbackHub, tmp_path: Path) -> dict[str, str]:
    """Environment by which a subprocess takes the loopback server for the Hub, with empty caches."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf_loopback",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf_home"),
        "HF_DATASETS_CACHE": str(tmp_path / "hf_home" / "datasets"),
    }
