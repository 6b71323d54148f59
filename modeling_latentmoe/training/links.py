"""How rows get from every rank of a group to every other: in one all-to-all, or by way of the ranks of a node.

Legend: N ranks of the group, K figures about the rows of two ranks, R rows, W bytes or values of a row.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

Entry = TypeVar("Entry")


class Sizes(NamedTuple):
    """How many rows: that leave for every rank, that come from every rank, and those on the way (see `Nodes`)."""

    sent: list[int]
    received: list[int]
    passed: list[int]


def all_to_all(out: Tensor, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> dist.Work:
    """Start to fill `out` with the rows [R, W] that all ranks have for this one."""
    # bytes: not every backend knows every dtype
    out, rows = out.view(torch.uint8), rows.contiguous().view(torch.uint8)
    return dist.all_to_all_single(out, rows, received, sent, group=group, async_op=True)


class Direct:
    """Every rank sends to every other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def counts(self, sent_NK: Tensor) -> Tensor:
        """A row for every rank -> the rows that all ranks have for this one, [N, K]."""
        received_NK = torch.empty_like(sent_NK)
        dist.all_to_all_single(received_NK, sent_NK, group=self.group)
        return received_NK

    def there(self, out: Tensor, rows: Tensor, sizes: Sizes) -> Callable[[], object]:
        """Start to send rows, sorted by destination, into `out` of others; call what is returned before `out` is read.

        Whatever else this device is told before that call runs at the same time.
        """
        return all_to_all(out, rows, sizes.received, sizes.sent, self.group).wait

    def back(self, out: Tensor, rows: Tensor, sizes: Sizes) -> Callable[[], object]:
        """The same for rows that return to where those came from that `there` brought."""
        return all_to_all(out, rows, sizes.sent, sizes.received, self.group).wait


class Nodes:
    """Within every node, then between nodes: a rank talks to its node, and to its likes on other nodes.

    A row for local rank j of node b goes to local rank j of its own node first, which sends what its node has for rank
    j of node b in one piece. Ranks are in the order of nodes. Rows and their order are those of `Direct`.
    """

    def __init__(self, inner: dist.ProcessGroup, outer: dist.ProcessGroup) -> None:
        self.inner, self.outer = inner, outer
        self.local, self.nodes = dist.get_world_size(inner), dist.get_world_size(outer)
        self.ranks, self.rank = self.local * self.nodes, dist.get_rank(outer) * self.local + dist.get_rank(inner)

    def counts(self, sent_NK: Tensor) -> Tensor:
        """As `Direct.counts`, behind them N rows more: those that pass through this rank, from every local rank i, for
        its like on every node b, in the order (i, b)."""
        passed, received = torch.empty_like(sent_NK), torch.empty_like(sent_NK)
        by_rank = sent_NK.unflatten(0, (self.nodes, self.local)).transpose(0, 1).contiguous()
        dist.all_to_all_single(passed, by_rank.flatten(0, 1), group=self.inner)
        by_node = passed.unflatten(0, (self.local, self.nodes)).transpose(0, 1).contiguous()
        dist.all_to_all_single(received, by_node.flatten(0, 1), group=self.outer)
        return torch.cat([received, passed])

    def there(self, out: Tensor, rows: Tensor, sizes: Sizes) -> Callable[[], object]:
        """As `Direct.there`. Only the way between nodes runs beside other work."""
        rows = _regrouped(rows, sizes.sent, self.nodes)
        passing = rows.new_empty(sum(sizes.passed), rows.shape[1])
        self._within(passing, rows, sizes, back=False).wait()
        passing = _regrouped(passing, sizes.passed, self.local)
        from_nodes, to_nodes = (
            _sums(sizes.received, self.nodes),
            _sums(_transposed(sizes.passed, self.local), self.nodes),
        )
        return all_to_all(out, passing, from_nodes, to_nodes, self.outer).wait

    def back(self, out: Tensor, rows: Tensor, sizes: Sizes) -> Callable[[], object]:
        passing = rows.new_empty(sum(sizes.passed), rows.shape[1])
        from_nodes, to_nodes = (
            _sums(_transposed(sizes.passed, self.local), self.nodes),
            _sums(sizes.received, self.nodes),
        )
        all_to_all(passing, rows, from_nodes, to_nodes, self.outer).wait()
        passing = _regrouped(passing, _transposed(sizes.passed, self.local), self.nodes)
        last = torch.empty_like(out)
        arrival = self._within(last, passing, sizes, back=True)

        def finish() -> None:
            arrival.wait()
            out.copy_(_regrouped(last, _transposed(sizes.sent, self.nodes), self.local))

        return finish

    def _within(self, out: Tensor, rows: Tensor, sizes: Sizes, back: bool) -> dist.Work:
        sent = _sums(_transposed(sizes.sent, self.nodes), self.local)
        received = _sums(sizes.passed, self.local)
        if back:
            sent, received = received, sent
        return all_to_all(out, rows, received, sent, self.inner)


def make_nodes(mesh: DeviceMesh, node_size: int) -> Nodes:
    """The link over nodes of `node_size` ranks each of the "ep" axis of `mesh`. A collective: every rank calls it."""
    ranks = mesh.mesh.unflatten(1, (-1, node_size))
    grid = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("efsdp", "node", "local"))
    # torch makes these groups with its default, whatever the others have
    timeout = mesh.get_group("ep")._get_backend(torch.device(mesh.device_type)).options._timeout
    for axis in ("node", "local"):
        _set_pg_timeout(timeout, grid.get_group(axis))
    return Nodes(grid.get_group("local"), grid.get_group("node"))


def _transposed(entries: list[Entry], rows: int) -> list[Entry]:
    """A matrix with so many rows, written row by row -> column by column."""
    columns = len(entries) // rows
    return [entries[row * columns + column] for column in range(columns) for row in range(rows)]


def _sums(sizes: list[int], rows: int) -> list[int]:
    """Of every row of a matrix with so many rows."""
    columns = len(sizes) // rows
    return [sum(sizes[row * columns : (row + 1) * columns]) for row in range(rows)]


def _regrouped(rows_RW: Tensor, sizes: list[int], rows: int) -> Tensor:
    """Pieces of these sizes, a matrix of them with so many rows, column by column."""
    return torch.cat(_transposed(list(rows_RW.split(sizes)), rows))
