"""Where the time of a step goes: sleeps that are found again, bytes that leave, the figures of all processes."""

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from modeling_latentmoe.configuration_latentmoe import LatentMoEConfig
from modeling_latentmoe.training import flops, monitor
from modeling_latentmoe.training.collectives import Collectives, leaving
from modeling_latentmoe.training.timing import Clock, of_all_processes, split

CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sleeps_are_found_again() -> None:
    clock = Clock(CPU)
    with clock.span("data", 10**12):
        time.sleep(0.01)
    clock.begin()
    for part, seconds in (("data", 0.02), ("forward", 0.03), ("forward", 0.02), ("backward", 0.04)):
        with clock.span(part):
            time.sleep(seconds)
            if part == "backward":
                with clock.span("all_to_all", 3 * 10**6):
                    time.sleep(0.03)
    figures = clock.finish()
    # what came before the step does not count
    expected = {"data_s": 0.02, "forward_s": 0.05, "backward_s": 0.07, "all_to_all_s": 0.03, "step_s": 0.14}
    for name, seconds in expected.items():
        assert seconds <= figures[name] < seconds + 0.3, name
    assert figures["optimizer_s"] == figures["all_gather_s"] == 0
    assert figures["all_to_all_gb"] == 0.003 and figures["all_gather_gb"] == 0


def test_exchanges_that_overlap_count_once() -> None:
    """Two under way at once, one of them inside of the other, and a third after a pause."""
    clock = Clock(CPU)
    clock.begin()
    first = clock.start_span("all_to_all", 10**6)
    second = clock.start_span("all_to_all", 10**6)
    time.sleep(0.02)
    second()
    time.sleep(0.02)
    first()
    time.sleep(0.05)
    with clock.span("all_to_all"):
        time.sleep(0.01)
    figures = clock.finish()
    assert 0.05 <= figures["all_to_all_s"] <= figures["step_s"] - 0.05
    assert figures["all_to_all_gb"] == 0.002


def test_a_step_that_did_not_end_is_forgotten() -> None:
    clock = Clock(CPU)
    clock.begin()
    with pytest.raises(RuntimeError), clock.span("forward"):
        raise RuntimeError
    with clock.span("backward"):
        time.sleep(0.01)
    clock.begin()
    assert clock.finish()["backward_s"] == 0


def test_shares_and_rates_of_two_processes() -> None:
    """Means over processes; the rate is that of the bytes of both over the time of both."""
    zeros = dict.fromkeys(("data_s", "forward_s", "backward_s", "optimizer_s", "all_gather_s", "all_gather_gb"), 0.0)
    one = {"step_s": 2.0, **zeros, "all_to_all_s": 0.5, "all_to_all_gb": 100.0, "forward_s": 1.0}
    two = {"step_s": 2.0, **zeros, "all_to_all_s": 0.3, "all_to_all_gb": 60.0, "forward_s": 0.5}
    record = split([one, two])
    assert record["step_s"] == 2 and record["forward_s"] == 0.75
    assert record["all_to_all_share"] == pytest.approx(0.2)
    assert record["all_to_all_gb_per_s"] == pytest.approx(200)
    assert record["all_gather_gb_per_s"] == 0 == record["all_gather_share"]


def test_bytes_that_leave() -> None:
    """8192 tokens with 16 copies of 3584 bf16 numbers, half of them for the other rank: 470 MB."""
    rows = torch.empty(16 * 8192, 3584, dtype=torch.bfloat16, device="meta")
    assert leaving(rows, 8 * 8192) == 469_762_048
    assert leaving(rows[:0], 0) == 0


def test_exchanges_are_seen_while_watched(alone: None) -> None:
    before = dist.all_to_all_single
    clock = Clock(CPU)
    collectives = Collectives(nn.Linear(1, 1), clock)
    with collectives:
        clock.begin()
        collectives.begin()
        counts, rows = torch.tensor([[3, 1]]), torch.arange(6.0).view(3, 2)
        received, there = torch.empty_like(counts), torch.empty_like(rows)
        dist.all_to_all_single(received, counts)
        dist.all_to_all_single(there, rows, [3], [3])
        assert torch.equal(received, counts) and torch.equal(there, rows)
        assert collectives.taken["all_to_all"] == 2
        figures = clock.finish()
        assert figures["all_to_all_s"] > 0 and figures["all_to_all_gb"] == 0
    assert dist.all_to_all_single is before


def test_what_was_said_before_a_failure_is_kept_to(alone: None) -> None:
    """Counts that were exchanged are left out, and mark their layer; its rows, which others wait for, are zeros."""
    collectives = Collectives(nn.Linear(1, 1), Clock(CPU))
    with collectives:
        collectives.begin()
        for n in (5, 2):
            counts = torch.tensor([[n, 1]])
            dist.all_to_all_single(torch.empty_like(counts), counts)
        collectives.catch_up()
        taken, exchange = [], collectives.exchange
        collectives.exchange = lambda output, input, *args, **kwargs: taken.append((len(output), len(input)))
        nothing = torch.zeros(1, 2, dtype=torch.int64)
        for layer in (1, 2):
            received = torch.empty_like(nothing)
            dist.all_to_all_single(received, nothing)
            assert received.tolist() == [[layer, 0]]
        assert not taken
        # second layer: to the experts, and back
        dist.all_to_all_single(torch.empty(2, 4), torch.empty(0, 4), [2], [0])
        dist.all_to_all_single(torch.empty(0, 4), torch.empty(2, 4), [0], [2])
        dist.all_to_all_single(torch.empty(0, 4), torch.empty(1, 4), [0], [1])
        assert taken == [(2, 2), (2, 2), (5, 5)]
        collectives.exchange = exchange


def test_no_catching_up_where_rows_are_exchanged_again() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="cannot go on after a failure"):
        Collectives(nn.Linear(1, 1), Clock(CPU), recoverable=False).catch_up()


def test_figures_of_all_processes(alone: None) -> None:
    figures = {"step_s": 1.5, "memory_gib": 2.0}
    assert of_all_processes(figures, CPU) == [figures]


def test_mfu_by_hand() -> None:
    """Forward and input gradients of 1000 tokens, 100 of them learned, in documents of 50, in 2 s on 4 devices."""
    config = LatentMoEConfig.kimi_k3().text_config
    body = flops.forward_flops_per_token(config, 50, head=False)
    total = 2 * (1000 * body + 100 * 2 * config.hidden_size * config.vocab_size)
    assert flops.step_flops(config, 1000, 100, 50) == pytest.approx(total, rel=1e-12)
    figures = monitor.speed_figures(2.0, 100, 1000, total, 4, 989.0)
    assert figures["mfu"] == pytest.approx(total / 2 / 4 / 989e12) and figures["tflops"] == pytest.approx(total / 2e12)
    assert figures["tokens_per_s"] == 500 and figures["tokens_per_s_per_device"] == 125 and figures["tokens"] == 100
    assert "mfu" not in monitor.speed_figures(2.0, 100, 1000, total, 4, None)


def test_peaks_of_devices() -> None:
    names = {"NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA A100-SXM4-80GB": 312}
    assert {name: flops.peak_tflops(name) for name in names} == names
    assert flops.peak_tflops("CPU") is None and flops.peak_tflops("NVIDIA GeForce RTX 4090") is None


def test_progress_line() -> None:
    parts = {"data_s": 0.1, "forward_s": 0.6, "backward_s": 1.2, "optimizer_s": 0.1}
    travel = {"all_to_all_s": 0.2, "all_gather_s": 0.0}
    record = {"step": 7, "loss": 1.25, "tokens_per_s": 2000.0, "tokens_per_s_per_device": 1000.0, "mfu": 0.413}
    record |= {"step_s": 2.0, "memory_gib_min": 70.0, "memory_gib": 91.44, "load_imbalance": 2.34, **parts, **travel}
    assert monitor.progress_line(record) == (
        "step 7  loss 1.2500  2,000 tokens/s, 1,000 a device  MFU 41.3%  "
        "2.00 s (data 5% fwd 30% bwd 60% opt 5%, a2a 10%)  70.0-91.4 GiB  load x2.3"
    )


def test_memory_of_all() -> None:
    processes = [{"memory_gib": 30.0, "memory_limit_gib": 40.0}, {"memory_gib": 20.0, "memory_limit_gib": 20.0}]
    assert monitor.memory_of_all(processes) == {
        "memory_gib": 30.0,
        "memory_gib_min": 20.0,
        "memory_share": 1.0,
        "memory_by_rank": {"0": 30.0, "1": 20.0},
    }
    here = monitor.memory_figures(CPU)
    assert 0.05 < here["memory_gib"] < here["memory_limit_gib"]
