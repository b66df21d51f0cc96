"""zero1's copies of optimizer state: each rank has its own parameters' and its predecessor's, of before a step too.

The order of a step is what makes it whole or undone, wherever ranks are lost. A rank steps its parameters, sends their
state to its successor and receives its predecessor's; only then it broadcasts its weights. Who has all broadcasts
knows, therefore, that every rank has both states of after the step: if one such rank is left, all that are left go on
from there. If none is, nobody has told of the step, and all go back to before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distaccum.distributed.world import World
from distaccum.engines.shares import Share


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What a rank has of the state when ranks are lost.

    Args:
        now: of the last step that was made, with the weights of its parameters.
        ahead: of the next one, if this rank has its own part and its predecessor's.
        torn: whether some weights may be the next step's.
        scaler: the loss scale's state, of ``now``.
    """

    now: Share
    ahead: Share | None = None
    torn: bool = False
    scaler: Mapping[str, Any] = field(default_factory=dict)


class Mirror:
    """The copies on one rank.

    Args:
        world: this rank.
        weights: by the rank that steps them, by name; those that travel with the state are not among them.
        own: this rank's share, as it is: its tensors are read at once.
        scaler: the loss scale's state.
    """

    def __init__(
        self,
        world: World,
        weights: Callable[[int], dict[str, Tensor]],
        own: Callable[[], Share],
        scaler: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._world, self._own, self._read_scaler = world, own, scaler
        self._weights = weights(world.rank) | weights((world.rank - 1) % world.size)
        self._before = {name: torch.empty_like(weight) for name, weight in self._weights.items()}
        self._sent, self._received = own().packed(), Share().packed()
        self._next: tuple[Tensor, Tensor] | None = None
        self._steps, self._scaler = False, scaler()

    @property
    def bytes(self) -> int:
        """Sent in the last step."""
        return self._sent.nbytes

    def load(self, of_predecessor: Share) -> None:
        """The state of now, this rank's being in its optimizers."""
        self._sent = self._own().packed()
        self._received = of_predecessor.packed()

    @torch.no_grad()
    def before_step(self) -> None:
        """Keeps weights that the step, or a broadcast after it, changes in place."""
        torch._foreach_copy_(list(self._before.values()), list(self._weights.values()))
        self._scaler = self._read_scaler()
        self._steps = True

    def exchange(self) -> None:
        """After the step, and before any weight is sent: the state goes to the successor, and the predecessor's comes.

        Raises:
            ViewChangedError: a rank is lost; where the weights are not sent, nobody else gets beyond this either.
        """
        content = self._own().packed()
        self._next = content, _to_successor(content, self._world)

    def commit(self) -> None:
        """All weights have come."""
        assert self._next is not None
        self._sent, self._received = self._next
        self._next, self._steps = None, False

    @property
    def shares(self) -> Shares:
        """What there is, in memory that later steps leave alone."""
        now = Share.unpacked(self._sent) | Share.unpacked(self._received)
        weights = self._before if self._steps else {n: weight.detach().clone() for n, weight in self._weights.items()}
        ahead = None if self._next is None else Share.unpacked(self._next[0]) | Share.unpacked(self._next[1])
        scaler = self._scaler if self._steps else self._read_scaler()
        return Shares(now=now | Share(model=weights), ahead=ahead, torn=self._steps, scaler=scaler)


def _to_successor(content: Tensor, world: World) -> Tensor:
    """Each rank's bytes go to the next rank, the last one's to the first; what comes from the one before."""
    if world.size == 1:
        return Share().packed()
    successor, predecessor = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    length = torch.empty(1, dtype=torch.int64)
    _ring(length, torch.tensor([len(content)]), world.size, to=successor, of=predecessor)
    received = torch.empty(int(length), dtype=torch.uint8)
    _ring(received, content, world.size, to=successor, of=predecessor)
    return received


def _ring(received: Tensor, content: Tensor, ranks: int, *, to: int, of: int) -> None:
    outgoing = [len(content) if rank == to else 0 for rank in range(ranks)]
    arriving = [len(received) if rank == of else 0 for rank in range(ranks)]
    dist.all_to_all_single(received, content, output_split_sizes=arriving, input_split_sizes=outgoing)
