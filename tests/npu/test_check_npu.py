"""The check for a real card, on the fake one: every operation is asked for, agrees, and a wrong one is found."""

import fake_npu
import pytest
import torch

from modeling_latentmoe import npu, npu_sparse
from scripts import check_npu

CPU = torch.device("cpu")
SMALL = check_npu.Sizes(60, 60, 96, 8, 16, 8, 64, 32)


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss lists at least 1024 keys; here, 16 must do. And one repetition."""
    monkeypatch.setattr(npu_sparse, "LOSS_KEYS", (16,))
    monkeypatch.setattr(fake_npu, "LOSS_KEYS", (16,))
    monkeypatch.setattr(check_npu, "REPEATS", 0)
    monkeypatch.setattr(check_npu.statistics, "median", lambda samples: 0.0)
    monkeypatch.setattr(npu, "chunk_kernel", lambda: (None, "fla-core is not here"))


def test_everything_agrees(card: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    assert check_npu.check(list(check_npu.GROUPS), CPU, SMALL) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 17 and sum(line.endswith("agrees") for line in lines) == 13
    # Triton-Ascend is not here either
    compiled = [line.split()[0] for line in lines if "not used: triton-ascend does not load" in line]
    assert compiled == ["glu", "attn_residual", "gated_rms_norm"]
    assert any(line.startswith("kda_chunk") and line.endswith("not used: fla-core is not here") for line in lines)
    # every operator that the model uses was called
    assert {*card} == fake_npu.IMPLEMENTATIONS.keys()


def test_a_wrong_operator_is_found(
    card: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    right = npu.rms_norm
    monkeypatch.setattr(check_npu.ops, "rms_norm_npu", lambda x, eps: 1.05 * right(x, eps))
    assert check_npu.check(["small"], CPU, SMALL) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "DIFFERS" in line] == ["rms_norm"]


def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if npu.torch_npu_problem() is None:
        pytest.skip("a card is here")
    assert check_npu.main([]) == 2
    assert 'torch-npu is not installed or does not load: pip install -e ".[npu]"' in capsys.readouterr().err
    assert check_npu.main(["sparce"]) == 2
    assert "there is no group sparce, but small, kernels, sparse" in capsys.readouterr().err
