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

from distaccum.data.plan.summation_tree import Node
from distaccum.data.plan.units import Deal
from distaccum.distributed.world import World
from distaccum.engines.partial_sums import BlockClock, PartialSums, add_up
from distaccum.errors import ConfigError

_IN_FLIGHT = 2  # buckets; what a rank receives of one is as large as the bucket
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it


@dataclass
class Received:
    """Shards of the nodes of one bucket, on their way: of each round those of the ranks that send one."""

    bucket: Tensor
    rounds: list[tuple[Any, Tensor]]


class TreeAllReduce:
    """A communication hook for DDP that sums, and what it needs to know of each window.

    Args:
        world: this rank.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._ranks = world.rank, world.size
        self._clock = BlockClock(world.rank)
        self._buckets: dict[int, Tensor] = {}
        self._partial = PartialSums(lambda: [self._buckets[number] for number in sorted(self._buckets)])
        self._pending: deque[Received] = deque()
        self._placed = self._given_up = False

    def placed(self, gradients: Sequence[Tensor | None]) -> None:
        """Told that gradients lie in their buckets, which DDP keeps from here on.

        Raises:
            ConfigError: this torch's DDP gives its hooks other tensors.
        """
        memory = {bucket.untyped_storage().data_ptr() for bucket in self._buckets.values()}
        if any(gradient is None or gradient.untyped_storage().data_ptr() not in memory for gradient in gradients):
            raise _other_torch("does not give its hooks the buckets that gradients lie in")
        self._placed = True

    def begin(self, deal: Deal | None) -> None:
        """A window begins."""
        self._clock.begin(deal)
        self._partial.drop()
        self._given_up = False

    def expect_deal(self) -> None:
        """Raises MisuseError where nobody said how the units of the window are dealt, so that it cannot be reduced."""
        self._clock.expect_deal()

    def micro_step_ended(self) -> None:
        """Called after each micro-step but the window's last."""
        sums = self._clock.micro_step_ended()
        if sums is not None:
            self._partial.end_block(sums)

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
            while len(self._pending) >= _IN_FLIGHT:
                self._finish(self._pending.popleft())
            self._send(number, whole)
        ready: torch.futures.Future[Tensor] = torch.futures.Future()
        ready.set_result(whole)
        return ready

    def finish(self) -> None:
        """After the last bucket: the sums of all are in their places."""
        while self._pending:
            self._finish(self._pending.popleft())

    def _send(self, number: int, whole: Tensor) -> None:
        sums = self._partial.sums
        if not (self._given_up or self._clock.nodes_of(self._rank)):
            whole.zero_()  # a rank without units adds nothing, whatever hooks have made of its zeros
        if self._given_up:
            own = [whole] * max(1, len(self._clock.nodes_of(self._rank)))
        else:
            last = self._clock.last_sums
            for kept in reversed(sums[len(sums) - last :]):
                whole.add_(kept[number])
            own = [*(kept[number] for kept in sums[: len(sums) - last]), whole]
            assert len(own) == max(1, len(self._clock.nodes_of(self._rank)))
        if self._ranks == 1:
            return
        size = -(-whole.numel() // self._ranks)
        cuts = [max(0, min(size, whole.numel() - rank * size)) for rank in range(self._ranks)]
        counts = [max(1, len(self._clock.nodes_of(rank))) for rank in range(self._ranks)]
        nothing, rounds = whole.new_empty(0), list[tuple[Any, Tensor]]()
        for i in range(max(counts)):
            sent = i < len(own)
            arriving = [cuts[self._rank] if i < count else 0 for count in counts]
            received = whole.new_empty(sum(arriving))
            work = dist.all_to_all_single(
                received,
                own[i] if sent else nothing,
                output_split_sizes=arriving,
                input_split_sizes=cuts if sent else [0] * self._ranks,
                async_op=True,
            )
            rounds.append((work, received))
        self._pending.append(Received(whole, rounds))

    def _finish(self, received: Received) -> None:
        whole = received.bucket
        size = -(-whole.numel() // self._ranks)
        own = max(0, min(size, whole.numel() - self._rank * size))
        nodes = [self._clock.nodes_of(rank) for rank in range(self._ranks)]
        values, idle = dict[Node, Tensor](), list[Tensor]()
        for i, (work, shards) in enumerate(received.rounds):
            work.wait()
            senders = [each for each in nodes if i < max(1, len(each))]
            for each, shard in zip(senders, torch.split(shards, own) if own else [shards] * len(senders), strict=True):
                if each:
                    values[each[i]] = shard
                else:
                    idle.append(shard)  # zeros, or NaN of a rank that has given the window up
        total = add_up(values, self._clock.expect_deal().blocks) if values else idle.pop()
        for zeros in idle:
            total.add_(zeros)
        if whole.numel() == size * self._ranks:
            _all_gather(whole, total)
            return
        padded, part = whole.new_empty(size * self._ranks), whole.new_zeros(size)
        part[:own] = total
        _all_gather(padded, part)
        whole.copy_(padded[: whole.numel()])


def _other_torch(problem: str) -> ConfigError:
    remedy = "Use numerics=fast, or a torch from 2.8 to 2.15"
    return ConfigError("torch", torch.__version__, f"its DistributedDataParallel {problem}", remedy)
