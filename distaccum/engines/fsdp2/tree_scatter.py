"""FSDP2's reductions: in another number format than the gradients', or in the order of a summation tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distaccum.data.plan.units import Node, UnitAssignment
from distaccum.distributed.world import World
from distaccum.engines.fsdp2.internals import ShardedModel
from distaccum.engines.partial_sums import BlockClock, add_up
from distaccum.errors import MisuseError

# torch 2.13 gave it a new name, and warns of the old one.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ReduceScatterInDtype:
    """A reduce-scatter for FSDP2: sends in ``dtype`` what is accumulated in a wider format; divides before it casts.

    Args:
        dtype: None: the input's own.
        zero_contribution: while it is not empty, this rank adds zeros, whatever its input is.
    """

    def __init__(self, dtype: torch.dtype | None, *, zero_contribution: Sequence[object] = ()) -> None:
        self._dtype = dtype
        self._zero_contribution = zero_contribution

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates FSDP2's input and output buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fills ``output_tensor`` with this rank's part of the sum."""
        assert not async_op
        if self._zero_contribution:
            input_tensor.zero_()
        if self._dtype is None:
            _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return
        sent = (input_tensor / group.size()).to(self._dtype)
        received = torch.empty_like(output_tensor, dtype=self._dtype)
        _reduce_scatter(received, sent, op=op, group=group)
        output_tensor.copy_(received).mul_(group.size())


Sums = list[Tensor | None]
"""Of each parameter; None where no unit has used it."""


class TreeSums:
    """The sums of a window's blocks on this rank, of parameters whose gradients are accumulated whole.

    Args:
        world: this rank; its process group is the one over which parameters are sharded.
        for_nothing: whether a micro-step is run with gradients of zero, for the sake of other ranks.
    """

    def __init__(self, world: World, for_nothing: Callable[[], bool]) -> None:
        self._for_nothing = for_nothing
        self.rank, self.ranks = world.rank, world.size
        self.clock = BlockClock(world.rank)
        self.shapes: Sequence[torch.Size] = ()
        """Of the parameters, whole."""
        self._sums: list[Sums] = []
        self._reduced: set[int] = set()
        self._next: Sequence[int] = ()  # the parameters of the reduction that comes

    def begin(self, assignment: UnitAssignment | None) -> None:
        """A window begins."""
        self.clock.begin(assignment)
        self._sums, self._reduced = [], set()

    def end_last_block(self, numbers: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Before a reduction: adds, in place, to the last block's sums those that the tree has next to them.

        Args:
            numbers: the parameters that are reduced, of those of :meth:`micro_step_ended`.
            gradients: theirs.

        Raises:
            MisuseError: one of them is reduced for the second time.
        """
        self._next = numbers
        if not self.clock.nodes_of(self.rank) or self._for_nothing():
            return
        if not self._reduced.isdisjoint(numbers):
            problem = "a block is run more than once in a micro-step, and FSDP2 reduces its gradients as often"
            remedy = "use engine=ddp or zero1, or numerics=fast"
            raise MisuseError(f"{problem}, which numerics=reproducible cannot add up in a fixed order: {remedy}")
        self._reduced.update(numbers)
        torch._foreach_add_(list(gradients), 0.0)
        times = self._last_sums
        for sums in reversed(self._sums[len(self._sums) - times :]):
            for number, gradient in zip(numbers, gradients, strict=True):
                if (one := sums[number]) is not None:
                    gradient.add_(one)

    def micro_step_ended(self, model: ShardedModel) -> Sequence[bool]:
        """After each micro-step but the window's last: takes what a block has accumulated away, at its end.

        Returns:
            Whether each parameter has got a gradient in the block; empty in the midst of one.
        """
        ended = self.clock.micro_step_ended()
        if ended is None:
            return ()
        _, others = ended
        # Zeros without a sign, as sums of them are: it would tell whether nothing or zeros were added.
        sums: Sums = [None if one is None else _wide(one) + 0.0 for one in model.whole_gradients()]
        used = [one is not None for one in sums]
        for _ in others:
            sums = [_both(*pair) for pair in zip(self._sums.pop(), sums, strict=True)]
        self._sums.append(sums)
        model.drop_gradients()
        return used

    @property
    def _last_sums(self) -> int:
        """How many of the sums are added to this rank's last block."""
        return 0 if self.clock.last is None else len(self.clock.last[1])

    def nodes(self, last: Tensor) -> list[Tensor]:
        """What this rank gives to a reduction, each laid out as ``last`` is: shard after shard.

        Args:
            last: the sum of the rank's last block, and of what :meth:`end_last_block` has added.
        """
        given = len(self.clock.nodes_of(self.rank))
        if not given or self._for_nothing():  # the others wait for as many, though this rank has dropped its window
            return [last.zero_()] * given
        kept = self._sums[: len(self._sums) - self._last_sums]
        return [*(self._packed([sums[number] for number in self._next], last) for sums in kept), last]

    def _packed(self, sums: Sums, like: Tensor) -> Tensor:
        """Each rank's shards, one after the other: along dimension 0, filled up with zeros to one size."""
        shapes = [self.shapes[number] for number in self._next]
        rows = [-(-shape[0] // self.ranks) * self.ranks for shape in shapes]
        packed = like.new_zeros(self.ranks, like.numel() // self.ranks)
        begin = 0
        for one, shape, size in zip(sums, shapes, rows, strict=True):
            width = size // self.ranks * shape[1:].numel()
            if one is not None:
                whole = one.new_zeros((size, *shape[1:]))
                whole[: shape[0]] = one
                packed[:, begin : begin + width] = whole.view(self.ranks, width)
            begin += width
        return packed.view(-1)


def _wide(gradient: Tensor) -> Tensor:
    """In fp32 where it is in 16 bits, as those that are accumulated are."""
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient


def _both(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)


class TreeReduceScatter(ReduceScatterInDtype):
    """A reduce-scatter for FSDP2, of the parameters of one block.

    Args:
        sums: of the window.
        zero_contribution: while it is not empty, this rank adds nothing.
    """

    def __init__(self, sums: TreeSums, zero_contribution: Sequence[object]) -> None:
        super().__init__(None, zero_contribution=zero_contribution)
        self._sums = sums

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fills ``output_tensor`` with this rank's part of the sum."""
        assert not async_op
        sums = self._sums
        assignment = sums.clock.expect_assignment()
        of_ranks = [sums.clock.nodes_of(rank) for rank in range(sums.ranks)]
        own = sums.nodes(input_tensor)
        assert len(own) == len(of_ranks[sums.rank])
        values = dict(self._received(own, of_ranks, input_tensor, group))
        output_tensor.copy_(add_up(values, assignment.blocks).view_as(output_tensor))

    def _received(
        self, own: Sequence[Tensor], of_ranks: Sequence[Sequence[Node]], like: Tensor, group: dist.ProcessGroup
    ) -> Iterator[tuple[Node, Tensor]]:
        """This rank's shard of each node."""
        size, ranks = like.numel() // len(of_ranks), len(of_ranks)
        for i in range(max(map(len, of_ranks))):
            senders = [nodes for nodes in of_ranks if i < len(nodes)]
            shards = like.new_empty(len(senders) * size)
            dist.all_to_all_single(
                shards,
                own[i] if i < len(own) else like.new_empty(0),
                output_split_sizes=[size if i < len(nodes) else 0 for nodes in of_ranks],
                input_split_sizes=[size if i < len(own) else 0] * ranks,
                group=group,
            )
            yield from zip([nodes[i] for nodes in senders], shards.view(len(senders), size), strict=True)
