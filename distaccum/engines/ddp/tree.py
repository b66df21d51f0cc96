"""DDP's reduction in the order of a summation tree: the same bits on any number of ranks.

Each rank gives the nodes of the tree that it holds. For each bucket every rank gets its shard of all nodes
(all-to-all), adds them in the tree's order, and the sums are gathered. A rank with one node sends what a ring sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from distaccum.data.plan.units import Node, UnitAssignment
from distaccum.distributed.world import World
from distaccum.engines.ddp.reducer import BucketReducer
from distaccum.engines.partial_sums import BlockClock, PartialSums, add_up
from distaccum.errors import ConfigError

_IN_FLIGHT = 2  # buckets; what a rank receives of one is as large as the bucket
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it


@dataclass
class Received:
    """Shards of the nodes of one bucket, on their way: of each round those of the ranks that send one."""

    bucket: Tensor
    rounds: list[tuple[Any, Tensor]]


class TreeReducer(BucketReducer):
    """A communication hook for DDP that sums, and what it needs to know of each window.

    Args:
        world: this rank.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._rank, self._ranks = world.rank, world.size
        self._clock = BlockClock(world.rank)
        self._buckets: dict[int, Tensor] = {}
        self._in_order: list[Tensor] = []  # the buckets, once gradients lie in them
        self._partial = PartialSums(self._in_order.copy)
        self._pending: deque[Received] = deque()
        self._placed = self._given_up = False

    def attach(self, ddp: DistributedDataParallel) -> None:
        """See :class:`BucketReducer`."""

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP accepts its own annotations, as types, or none
            return self.hook(state, bucket)

        ddp.register_comm_hook(None, hook)

    def placed(self, gradients: Sequence[Tensor | None]) -> None:
        """Told that gradients lie in their buckets, which DDP keeps from here on.

        Raises:
            ConfigError: this torch's DDP gives its hooks other tensors.
        """
        memory = {bucket.untyped_storage().data_ptr() for bucket in self._buckets.values()}
        if any(gradient is None or gradient.untyped_storage().data_ptr() not in memory for gradient in gradients):
            raise _other_torch("does not give its hooks the buckets that gradients lie in")
        self._in_order += [self._buckets[number] for number in sorted(self._buckets)]
        self._placed = True

    def begin(self, assignment: UnitAssignment | None) -> None:
        """A window begins."""
        self._clock.begin(assignment)
        self._partial.drop()
        self._given_up = False

    def expect_assignment(self) -> None:
        """Raises MisuseError where nobody said how the units of the window are dealt, so that it cannot be reduced."""
        self._clock.expect_assignment()

    def micro_step_ended(self) -> None:
        """Called after each micro-step but the window's last."""
        ended = self._clock.micro_step_ended()
        if ended is not None:
            self._partial.end_block(*ended)

    def give_up(self) -> None:
        """The window's gradient is NaN on this rank, wherever it stopped."""
        self._given_up = True

    def hook(self, _: object, bucket: Any) -> torch.futures.Future[Tensor]:
        """Sends a bucket that is ready; DDP calls it for the buckets in one order on all ranks."""
        number, whole = bucket.index(), bucket.buffer()
        if not self._placed:
            self._buckets[number] = whole
        elif self._buckets[number].data_ptr() != whole.data_ptr():
            raise _other_torch("moves its buckets between two windows")
        else:
            self._ready(number, whole)
        ready: torch.futures.Future[Tensor] = torch.futures.Future()
        ready.set_result(whole)
        return ready

    def finish(self) -> None:
        """After the last bucket: the sums of all are in their places."""
        while self._pending:
            self._finish(self._pending.popleft())

    def _ready(self, number: int, whole: Tensor) -> None:
        """A bucket has all of this rank's gradients."""
        while len(self._pending) >= _IN_FLIGHT:
            self._finish(self._pending.popleft())
        self._send(number, whole)

    def _send(self, number: int, whole: Tensor) -> None:
        own = self._own(number, whole)
        if self._ranks == 1:
            if own[0] is not whole:
                whole.copy_(own[0])
            return
        size = -(-whole.numel() // self._ranks)
        cuts = [max(0, min(size, whole.numel() - rank * size)) for rank in range(self._ranks)]
        counts = [max(1, len(self._clock.nodes_of(rank))) for rank in range(self._ranks)]
        nothing, rounds = whole.new_empty(0), list[tuple[Any, Tensor]]()
        for i in range(max(counts)):
            content = own[i] if i < len(own) else nothing
            splits = cuts if i < len(own) else [0] * self._ranks
            arriving = [cuts[self._rank] if i < count else 0 for count in counts]
            rounds.append(self._exchange(content, splits, arriving, first=i == 0))
        self._pending.append(Received(whole, rounds))

    def _exchange(
        self, content: Tensor, cuts: Sequence[int], arriving: Sequence[int], *, first: bool
    ) -> tuple[Any, Tensor]:
        """Sends each rank its shard of ``content``; gives the work, and what it fills with the ranks' shards."""
        received = content.new_empty(sum(arriving))
        work = dist.all_to_all_single(
            received, content, output_split_sizes=list(arriving), input_split_sizes=list(cuts), async_op=True
        )
        return work, received

    def _own(self, number: int, whole: Tensor) -> list[Tensor]:
        """This rank's part of each of its nodes; the last block's, with what is added to it, is in the bucket."""
        nodes, last = self._clock.nodes_of(self._rank), self._clock.last
        if self._given_up:
            return [whole] * max(1, len(nodes))
        sums = self._partial.sums
        if last is None:
            whole.zero_()  # a rank without units adds nothing, whatever hooks have made of its zeros
            return [whole]
        block, others = last
        for other in others:
            whole.add_(sums[other][number])
        return [whole if node[0] <= block < node[1] else sums[node][number] for node in nodes]

    def _finish(self, received: Received) -> None:
        whole = received.bucket
        size = -(-whole.numel() // self._ranks)
        own = max(0, min(size, whole.numel() - self._rank * size))
        nodes = [self._clock.nodes_of(rank) for rank in range(self._ranks)]
        values, idle = dict[Node, Tensor](), list[Tensor]()
        for i, (work, shards) in enumerate(received.rounds):
            work.wait()
            senders = [each for each in nodes if i < max(1, len(each))]
            for each, shard in zip(
                senders, self._apart(shards.view(len(senders), shards.numel() // len(senders)), own), strict=True
            ):
                if each:
                    values[each[i]] = shard
                else:
                    idle.append(shard)  # zeros, or NaN of a rank that has given the window up
        total = add_up(values, self._clock.expect_assignment().blocks) if values else idle.pop()
        for zeros in idle:
            total.add_(zeros)
        if whole.numel() == size * self._ranks:
            _all_gather(whole, total)
            return
        padded, part = whole.new_empty(size * self._ranks), whole.new_zeros(size)
        part[:own] = total
        _all_gather(padded, part)
        whole.copy_(padded[: whole.numel()])

    def _apart(self, received: Tensor, own: int) -> Sequence[Tensor]:
        """The shards, one of each rank that has sent one, each of ``own`` elements."""
        return received.unbind()


def _other_torch(problem: str) -> ConfigError:
    remedy = "Use numerics=fast, or a torch from 2.8 to 2.15"
    return ConfigError("torch", torch.__version__, f"its DistributedDataParallel {problem}", remedy)
