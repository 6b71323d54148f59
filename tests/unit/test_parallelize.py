"""What several processes raise, in words for users."""

import pytest
import torch
import torch.distributed as dist

from modeling_latentmoe.training.parallelize import told_failures


@pytest.mark.parametrize(
    ("raised", "told", "words"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"),
            OSError,
            "--gradient_checkpointing full",
        ),
        (dist.DistBackendError("NCCL error"), ConnectionError, "another process of this run died"),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1"), ConnectionError, "--resume"),
        (RuntimeError("[unbound_buffer.cc:84] Timed out waiting 1800000ms for recv"), ConnectionError, "--timeout"),
        (RuntimeError("shapes do not match"), RuntimeError, "^shapes do not match$"),
        (ValueError("--ep 3"), ValueError, "^--ep 3$"),
    ],
)
def test_failures_are_told_in_one_line(raised: Exception, told: type[Exception], words: str) -> None:
    @told_failures()
    def run() -> None:
        raise raised

    with pytest.raises(told, match=words) as caught:
        run()
    assert type(caught.value) is told and "\n" not in str(caught.value)
