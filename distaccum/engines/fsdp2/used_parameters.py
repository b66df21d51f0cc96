"""Which sharded parameters a rank has used in a window: one that no rank has used must not move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class UsedParameters:
    """Marks parameters that got a gradient, to be summed over the ranks with the norms of a step.

    A reduction holds zeros for a parameter that a rank has not used, and a gradient of zero is not none: momentum and
    weight decay would move it. Only a rank that has used less than all has to ask the device whether others have.

    Args:
        shards: all of the model's, in the same order on every rank.
    """

    def __init__(self, shards: Sequence[nn.Parameter]) -> None:
        self._shards = shards
        self._numbers = {id(shard): number for number, shard in enumerate(shards)}
        self._used: set[int] = set()
        self._sent: tuple[frozenset[int], Tensor] | None = None  # the last window's marks, usually this one's too

    def add(self, shard: nn.Parameter) -> None:
        """Marks a parameter."""
        self._used.add(self._numbers[id(shard)])

    def forget(self) -> None:
        """Called after a step or a dropped window."""
        self._used.clear()

    def marks(self, like: Tensor) -> Tensor:
        """1.0 for each parameter that this rank has used, else 0.0; of the type and on the device of ``like``."""
        if self._sent is None or self._sent[0] != self._used or self._sent[1].device != like.device:
            marks = [float(number in self._used) for number in range(len(self._shards))]
            self._sent = frozenset(self._used), torch.tensor(marks, dtype=like.dtype, device=like.device)
        return self._sent[1]

    def drop_unused(self, sums: Tensor) -> bool:
        """Drops the zeros of parameters that no rank has used, given the sums of :meth:`marks` over the ranks.

        Returns:
            whether some rank has used some parameter.
        """
        unsure = [
            number for number, shard in enumerate(self._shards) if shard.grad is not None and number not in self._used
        ]
        if not unsure:
            return True
        found = sums.tolist()  # waits for the device
        for number in unsure:
            if not found[number]:
                self._shards[number].grad = None
        return any(found)
