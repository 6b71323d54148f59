"""The collectives that a model takes in forward and backward: timed, counted, and made up for by who fell out.

Processes that share experts or weights take the same collectives, in the same order, in every micro-batch. One whose
memory is used up in the middle would let the others wait for ever. It therefore goes through that micro-batch once
more, with a batch of nothing but padding, which needs next to no memory, and leaves out as many collectives as it had
taken: what it computes until it has caught up is meaningless and thrown away, and so is the step, by all of them.

Weights and gradients have the same sizes whatever the batch. Rows that travel to experts do not: others know from the
counts of a layer, which they exchange first, how many this process said it would send and get. Those it keeps to, with
rows of zeros. In the second pass the counts of such a layer, the i-th of the micro-batch, read as "i rows from
yourself", which padding never sends, and by that its exchanges are known, forward and backward.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from modeling_latentmoe.training.timing import Clock

# torch 2.13 gave them new names
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """What `model`, which is wrapped for all processes, exchanges while this context is open.

    recoverable: whether a process that fell out can catch up. It cannot where a layer that is computed again exchanges
    its rows again: if its first forward left an exchange out, the repeated one would get another number of rows. Nor
    where rows travel in parts or by way of other ranks, whose counts say more than one number.
    """

    def __init__(self, model: nn.Module, clock: Clock, recoverable: bool = True) -> None:
        self.model, self.clock, self.recoverable = model, clock, recoverable
        # of this micro-batch, by kind
        self.taken: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        # between begin and end of a micro-batch
        self.noting = False
        # rows for every rank and from every rank, [ranks] each, as said in this micro-batch, and before it failed
        self.counts: list[tuple[Tensor, Tensor]] = []
        self.promised: list[tuple[list[int], list[int]]] = []

    def __enter__(self) -> "Collectives":
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(AllGather(self))
                module.set_custom_reduce_scatter(ReduceScatter(self))
        # Whatever travels to experts, and however, ends in this function of torch.
        self.exchange = dist.all_to_all_single
        dist.all_to_all_single = self.all_to_all
        return self

    def __exit__(self, *exception: object) -> None:
        dist.all_to_all_single = self.exchange

    def begin(self) -> None:
        """A micro-batch begins, in which what is taken is noted."""
        self.noting = True
        for noted in (self.taken, self.left_out, self.counts, self.promised):
            noted.clear()

    def end(self) -> None:
        """What follows, such as an evaluation, is only passed through."""
        self.noting = False

    def catch_up(self) -> None:
        """The micro-batch begins once more, on this process alone: what it took is left out, the rest it takes.

        Raises OutOfMemoryError where it cannot be, and where FSDP cannot be used again after a failure,
        which needs torch 2.13.
        """
        if not self.recoverable:
            raise torch.OutOfMemoryError("what travels to experts this way cannot go on after a failure")
        if isinstance(self.model, FSDPModule):
            if not hasattr(self.model, "reset_iter_state"):
                raise torch.OutOfMemoryError("FSDP of this torch cannot go on after a failure")
            self.model.reset_iter_state()
        self.left_out, self.taken = self.taken, Counter()
        self.promised, self.counts = [(sent.tolist(), received.tolist()) for sent, received in self.counts], []
        if torch.accelerator.is_available():
            torch.get_device_module().empty_cache()

    def take(self, kind: str, nbytes: int, output: Tensor, collective: Callable[[], Any]) -> Any:
        """Do `collective`, with which `nbytes` leave this process, or leave it out: `output` is then zeros."""
        if self.left_out[kind]:
            self.left_out[kind] -= 1
            output.zero_()
            return None
        with self.clock.span(kind, nbytes):
            work = collective()
        if self.noting:
            self.taken[kind] += 1
        return work

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """`torch.distributed.all_to_all_single`: of counts [ranks, ...], rows first, or of rows, which have sizes."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if input_split_sizes is None:
            return self._counts(output, input, group, rank, ranks)
        sizes = self._promise(input_split_sizes, output_split_sizes, rank)
        theirs = output
        if sizes is not None:
            # what others expect, instead of nothing
            input_split_sizes, output_split_sizes = sizes
            input = input.new_zeros(sum(input_split_sizes), *input.shape[1:])
            theirs = output.zero_().new_empty(sum(output_split_sizes), *output.shape[1:])
        # the launch counts bytes; with `async_op` time passes until what follows waits
        end = self.clock.start_span("all_to_all") if async_op else None
        work = self.take(
            "all_to_all",
            leaving(input, input_split_sizes[rank]),
            theirs,
            lambda: self.exchange(theirs, input, output_split_sizes, input_split_sizes, group, async_op),
        )
        return UnderWay(work, end) if end else work

    def _counts(self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None, rank: int, ranks: int) -> None:
        said = bool(self.left_out["all_to_all"])
        nbytes = leaving(input, len(input) // ranks)
        self.take("all_to_all", nbytes, output, lambda: self.exchange(output, input, group=group))
        if self.noting:
            self.counts.append((input.reshape(ranks, -1)[:, 0].clone(), output.view(ranks, -1)[:, 0].clone()))
        if said:
            output.view(ranks, -1)[rank, 0] = len(self.counts)

    def _promise(self, sent: list[int], received: list[int], rank: int) -> tuple[list[int], list[int]] | None:
        """What was said of the layer of this exchange before the micro-batch failed; None if nothing was."""
        # padding sends nothing, and least of all to itself
        if self.promised and received[rank]:
            return self.promised[received[rank] - 1]
        if self.promised and sent[rank]:
            return self.promised[sent[rank] - 1][::-1]
        return None


class UnderWay:
    """A collective, or None in place of one that was left out; timed until what follows waits for it."""

    def __init__(self, work: dist.Work | None, end: Callable[[], None]) -> None:
        self.work, self.end = work, end

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.end()


def leaving(rows: Tensor, stay: int) -> int:
    """Bytes of `rows` that go to other ranks, if `stay` of them do not."""
    return (len(rows) - stay) * (rows.nbytes // max(1, len(rows)))


class Comm:
    """How FSDP communicates, see torch.distributed.fsdp."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        # to each of the others
        nbytes = input_tensor.nbytes * (group.size() - 1)
        return self.collectives.take(
            "all_gather",
            nbytes,
            output_tensor,
            lambda: GATHER(output_tensor, input_tensor, group=group, async_op=async_op),
        )


class ReduceScatter(Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        return self.collectives.take(
            "reduce_scatter",
            input_tensor.nbytes - output_tensor.nbytes,
            output_tensor,
            lambda: REDUCE(output_tensor, input_tensor, op=op, group=group, async_op=async_op),
        )
