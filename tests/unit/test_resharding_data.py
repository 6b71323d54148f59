"""Which rows each process reads: the same ones in a step whatever the number of processes, and each row of an epoch
once even where that number changes in the middle."""

import io
from collections import Counter
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from datasets import Dataset

from modeling_latentmoe.training import data
from modeling_latentmoe.training.rows import Rows, remaining

SEED = 5
MAX_LENGTH = 9


@cache
def table(n: int) -> Dataset:
    return Dataset.from_dict({"messages": [[{"role": "user", "content": str(i)}] for i in range(n)]})


@cache
def order(n: int, epoch: int) -> list[int]:
    return list(Dataset.from_dict({"row": range(n)}).shuffle(seed=SEED + epoch)["row"])


def is_bad(row: int) -> bool:
    return row % 11 == 4


def is_long(row: int) -> bool:
    return row % 7 == 3 and not is_bad(row)


def encode(name: str, row: dict[str, Any]) -> data.Sample:
    """Every token of a sample is its row's number; lengths are uneven."""
    number = int(row["messages"][0]["content"])
    ids = torch.full((2 + number % 5,), number)
    return data.Sample(ids, ids)


def encode_or_leave_out(name: str, row: dict[str, Any]) -> data.Sample:
    """Some rows are too long, some have an unreadable image."""
    sample = encode(name, row)
    number = int(sample.input_ids[0])
    if is_bad(number):
        raise data.UnreadableImageError(name)
    ids = torch.full((MAX_LENGTH + 1,), number) if is_long(number) else sample.input_ids
    return data.Sample(ids, ids)


class Run:
    """All processes of a run, in this one."""

    def __init__(self, n: int, world: int, states: list[dict[str, Any]] | None = None, **options: Any) -> None:
        defaults = {"encode": encode, "batch_size": 2, "max_length": MAX_LENGTH, "pad_id": -1, "skip_bad_images": True}
        dataset = table(n)
        self.processes = [
            data.Batches(Rows("d", dataset, rank, world, SEED), **(defaults | options)) for rank in range(world)
        ]
        self.repeated = 0
        if states is not None:
            # through a file, as checkpoints are
            file = io.BytesIO()
            torch.save(states, file)
            states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            found = [data.reshard(states, process.rows) for process in self.processes]
            for process, (state, _) in zip(self.processes, found, strict=True):
                process.load_state_dict(state)
            (self.repeated,) = {repeated for _, repeated in found}
        self.streams = [iter(process) for process in self.processes]

    def step(self, micro_batches: int = 1) -> list[tuple[int, int]]:
        """Epoch and number of each row that this step's micro-batches hold, on all processes."""
        return [
            (process.epoch, row)
            for process, stream in zip(self.processes, self.streams, strict=True)
            for _ in range(micro_batches)
            for row in numbers(next(stream))
        ]

    def states(self) -> list[dict[str, Any]]:
        return [process.state_dict() for process in self.processes]

    def total(self, counter: str) -> int:
        return sum(getattr(process, counter) for process in self.processes)


def numbers(batch: dict[str, torch.Tensor]) -> Iterator[int]:
    """Numbers of the rows of a batch, padded or packed."""
    if "cu_seqlens" in batch:
        yield from batch["input_ids"][0, batch["cu_seqlens"][:-1].long()].tolist()
    else:
        yield from batch["input_ids"][:, 0].tolist()


# --- the order


def test_one_process_reads_the_seeds_order() -> None:
    for epoch in (0, 3):
        rows = [
            (name, int(row["messages"][0]["content"])) for name, row in Rows("d", table(23), seed=SEED).epoch(epoch)
        ]
        assert rows == [(f"d, row {number}", number) for number in order(23, epoch)]
    assert [name for name, _ in Rows("d", table(3)).epoch(4)] == ["d, row 0", "d, row 1", "d, row 2"]
    assert order(8, 0) == [1, 4, 2, 3, 7, 5, 6, 0] != order(8, 1)


def test_what_remains_of_an_order() -> None:
    rows = list(range(10))
    assert remaining(rows, []) == rows
    # of 0 3 6 9 | 1 4 7 | 2 5 8
    assert remaining(rows, [[2, 0, 3]]) == [1, 4, 6, 7, 9]
    # of these then 1 6 9 | 4 7
    assert remaining(rows, [[2, 0, 3], [1, 2]]) == [6, 9]
    assert remaining(rows, [[4, 3, 3]]) == remaining(rows, [[10]]) == []
    assert remaining(rows, [[2, 2, 2]]) == [6, 7, 8, 9]


def test_later_processes_take_every_nth_of_the_rest() -> None:
    history = [[2, 0, 3]]
    shares = [[name for name, _ in Rows("d", table(10), rank, 2).epoch(0, history=history)] for rank in range(2)]
    assert shares == [["d, row 1", "d, row 6", "d, row 9"], ["d, row 4", "d, row 7"]]
    rest = Rows("d", table(10), 0, 2).epoch(0, 2, history)
    assert [name for name, _ in rest] == ["d, row 9"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_step_holds_the_same_rows_on_any_number_of_processes(batch_size: int) -> None:
    n = 4 * batch_size * 5
    runs = [(Run(n, world, batch_size=batch_size), 4 // world) for world in (1, 2, 4)]
    for step in range(12):
        first, *others = (sorted(run.step(micro_batches)) for run, micro_batches in runs)
        assert all(other == first for other in others)
        at = step % 5 * 4 * batch_size
        assert first == sorted((step // 5, row) for row in order(n, step // 5)[at : at + 4 * batch_size])


@pytest.mark.parametrize("n", [40, 37, 8])
def test_all_processes_have_rows_of_their_own(n: int) -> None:
    """Public report 58: expert-parallel peers get distinct samples, and together all rows once."""
    run = Run(n, 8)
    seen = [
        (rank, int(row["messages"][0]["content"])) for rank in range(8) for _, row in run.processes[rank].rows.epoch(2)
    ]
    assert sorted(row for _, row in seen) == list(range(n))
    assert sorted(Counter(rank for rank, _ in seen).values()) == sorted(len(range(rank, n, 8)) for rank in range(8))
    step = run.step()
    assert len(set(step)) == len(step) == min(n, 16)


# --- continuing


@pytest.mark.parametrize("packing", [False, True])
def test_resumed_processes_read_the_same_batches(packing: bool) -> None:
    """Public report 90: 6 steps straight or 3 and then 3 more, the order of the data is equal."""
    options = {"packing": packing, "encode": encode_or_leave_out}
    straight = Run(41, 2, **options)
    before = [straight.step(2) for _ in range(3)]
    states = straight.states()
    after = [straight.step(2) for _ in range(3)]
    assert before != after
    resumed = Run(41, 2, states, **options)
    assert resumed.repeated == 0
    assert [resumed.step(2) for _ in range(3)] == after
    assert resumed.states() == straight.states()


def test_fewer_processes_go_on_with_the_same_steps() -> None:
    """Public report 92: saved by 4 processes, resumed by 2 and then by 1, every step holds what one process
    would have read; and on to 4 again."""
    expected, run = Run(40, 1), Run(40, 4)
    for world in (4, 2, 1, 4):
        run = Run(40, world, run.states())
        assert run.repeated == 0
        for _ in range(3):
            assert sorted(run.step(4 // world)) == sorted(expected.step(4))
        assert run.total("rows_seen") == expected.total("rows_seen")


def taken(state: dict[str, Any], n: int) -> list[tuple[int, int]]:
    """Epoch and number of each row that lies behind a state for another number of processes."""
    finished = [(epoch, row) for epoch in range(state["epoch"]) for row in range(n)]
    opened = [
        (epoch, row)
        for epoch, history in state["history"].items()
        for row in set(range(n)) - set(remaining(order(n, epoch), history))
    ]
    return finished + opened


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_once_through_any_changes(seed: int, packing: bool) -> None:
    """Rows are left out, so that processes drift apart by epochs; their number changes at random places."""
    random, n = Random(seed), 21 + seed
    kept = {row for row in range(n) if not is_bad(row) and not is_long(row)}
    options = {"packing": packing, "encode": encode_or_leave_out, "max_length": 6}
    run, given, repeated = Run(n, 4, **options), Counter(), 0
    for world in (2, 3, 1, 5, 2, 2, 4, 3):
        for _ in range(random.randrange(8)):
            given.update(run.step(random.randrange(1, 3)))
        states = run.states()
        elsewhere = Rows("d", table(n), 0, len(states) + 1, SEED)
        state, again = data.reshard(states, elsewhere)
        behind = taken(state, n)
        assert len(set(behind)) == len(behind) == state["rows_seen"]
        assert state["too_long"] == sum(is_long(row) for _, row in behind)
        assert state["bad_images"] == sum(is_bad(row) for _, row in behind)
        to_learn = {place for place in behind if place[1] in kept}
        assert given.keys() >= to_learn and given.total() == len(to_learn) + repeated + again
        assert packing or (again == 0 and given.keys() == to_learn)
        run = Run(n, world, states, **options)
        assert run.repeated == (0 if world == len(states) else again)
        assert [run.total(name) for name in ("too_long", "bad_images")] == [state["too_long"], state["bad_images"]]
        assert run.total("rows_seen") == state["rows_seen"] + again - run.repeated
        repeated += run.repeated
    while (finished := min(process.epoch for process in run.processes)) < 3:
        given.update(run.step())
    for epoch in range(finished):
        times = Counter({row: given[epoch, row] for row in range(n) if given[epoch, row]})
        assert times.keys() == kept
        assert packing or set(times.values()) == {1}
    # what was announced may still lie ahead in an open epoch
    assert given.total() - len(given) <= repeated


def test_an_open_packed_window_is_read_again() -> None:
    """2 processes have 17 rows of 6 tokens each; 8 packed rows of 12 tokens are filled together."""
    whole = {"encode": lambda name, row: data.Sample(*[encode(name, row).input_ids[:1].repeat(6)] * 2)}
    options = whole | {"packing": True, "max_length": 6}
    run = Run(34, 2, **options)
    # each process has given the first packed row of its open window
    first = run.step()
    assert len(first) == 4
    resumed = Run(34, 1, run.states(), **options)
    assert resumed.repeated == 4 and resumed.total("rows_seen") == 0
    # a whole window of 16 rows is finished with its eighth packed row, and nothing is read again
    for _ in range(7):
        run.step()
    resumed = Run(34, 1, run.states(), **options)
    assert resumed.repeated == 0 and resumed.total("rows_seen") == 32
    assert sorted(row for _, row in resumed.step()) == sorted(order(34, 0)[32:])


def test_more_processes_than_rows_left_in_an_epoch() -> None:
    """Those without a row of the old epoch begin the next one."""
    run = Run(9, 1)
    first = [row for _ in range(4) for _, row in run.step()]
    assert first == order(9, 0)[:8]
    step = Run(9, 3, run.states()).step()
    assert [epoch for epoch, _ in step] == [0, 1, 1, 1, 1]
    assert step[0][1] == order(9, 0)[8]
    # and an epoch without any row left
    run.step()
    assert [epoch for epoch, _ in Run(9, 3, run.states()).step()] == [1] * 6


def test_a_stream_continues_on_as_many_processes_only() -> None:
    stream = table(12).to_iterable_dataset(num_shards=2)
    processes = [
        data.Batches(Rows("d", stream, rank, 2), encode, batch_size=1 + rank, max_length=9, pad_id=0)
        for rank in range(2)
    ]
    assert all(next(iter(process)) for process in processes)
    states = [process.state_dict() for process in processes]
    assert data.reshard(states, Rows("d", stream, 1, 2)) == (states[1], 0)
    with pytest.raises(ValueError, match=r"--streaming continues on the same number of processes, 2, not 3"):
        data.reshard(states, Rows("d", stream, 0, 3))
