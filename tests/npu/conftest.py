"""The model on a fake card: torch.ops.npu on CPU, and the package told that the CPU is the NPU."""

import fake_npu
import pytest
import torch

from modeling_latentmoe import npu


@pytest.fixture(scope="session")
def operators():
    with fake_npu.library():
        yield


@pytest.fixture(params=["Ascend910B3"])
def card(request: pytest.FixtureRequest, operators: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An Ascend A2 unless a test asks for another chip; the operators called so far."""
    monkeypatch.setattr(npu, "DEVICES", ("cpu",))
    monkeypatch.setattr(npu, "device_name", lambda: request.param)
    monkeypatch.setattr(fake_npu, "CHIP", request.param)
    monkeypatch.setattr(npu, "SAID", set())
    fake_npu.CALLS.clear()
    npu.causal_mask.cache_clear()
    return fake_npu.CALLS


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
