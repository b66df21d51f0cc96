"""zero1's copies of optimizer state: each rank has its own parameters' and another rank's, of before a step too.

The order of a step is what makes it whole or undone, wherever ranks are lost. A rank steps its parameters, sends their
state to its keeper, and receives that of the rank whose keeper it is; only then it broadcasts its weights. Who has all
broadcasts knows, therefore, that every rank has both states of after the step: if one such rank is left, all that are
left go on from there. If none is, nobody has told of the step, and all go back to before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distaccum.distributed.world import World
from distaccum.elastic.engine.shares import Share, Shares, dealt
from distaccum.engines.base import EngineState
from distaccum.engines.ddp.masters import Masters
from distaccum.engines.ddp.zero1 import ZeRO1


class Mirror:
    """The copies on one rank. Making it is a collective.

    Args:
        world: this rank.
        shards: who steps what.
        weights: the trained parameters by name, where they stay.
        aliases: other names of theirs, as of tied weights, with the one in ``weights``.
        stepped: the optimizers' state on this rank, and the loss scale's: its tensors are read at once.
        masters: what is stepped of the weights.
        keepers: by rank, which one keeps a copy of its state; empty: the next one.
    """

    def __init__(
        self,
        world: World,
        shards: ZeRO1,
        weights: Mapping[str, nn.Parameter],
        aliases: Mapping[str, str],
        stepped: Callable[[], EngineState],
        *,
        masters: Masters,
        keepers: Sequence[int] = (),
    ) -> None:
        self._world, self._aliases, self._masters, self._stepped = world, aliases, masters, stepped
        ranks = range(world.size)
        owners = {name: shards.owner(parameter) for name, parameter in weights.items()}
        self._names = [frozenset(name for name, owner in owners.items() if owner == rank) for rank in ranks]
        keepers = keepers or [(rank + 1) % world.size for rank in ranks]
        self._wanted = [self._names[rank] | self._names[keepers.index(rank)] for rank in ranks]
        self._keeper, self._kept = keepers[world.rank], keepers.index(world.rank)
        kept = self._wanted[world.rank] - self._rounded
        self._weights = {name: weight.detach() for name, weight in weights.items() if name in kept}
        self._before = {name: torch.empty_like(weight) for name, weight in self._weights.items()}
        self._sent = self._own().packed()
        self._received = self._exchanged(self._sent)
        self._next: tuple[Tensor, Tensor] | None = None
        self._steps, self._scaler = False, stepped().scaler

    @property
    def _rounded(self) -> frozenset[str]:
        """Weights whose masters travel with the state."""
        return self._masters.names

    def _own(self) -> Share:
        state = self._stepped()
        return Share(
            parameters=self._names[self._world.rank],
            model={name: p.detach() for name, p in self._masters.by_name()},
            optimizer=state.optimizer,
            values=state.optimizer_values,
        )

    def load(self, state: EngineState) -> None:
        """Takes the other rank's part of a state that is loaded, of which it needs that and this rank's own."""
        whole = Share(
            parameters=frozenset().union(*self._names),
            model=state.model,
            optimizer=state.optimizer,
            values=state.optimizer_values,
        )
        names = self._names[self._kept]
        self._sent, self._received = self._own().packed(), whole.of(names, weights=names & self._rounded).packed()

    def completed(self, state: EngineState, share: Share, *, torn: bool) -> EngineState:
        """The state that this rank loads, with its parts from whoever has them: see ``Engine.load_dealt``."""
        found = dealt(share, self._wanted, self._world, weights=torn or self._masters.rounded)
        model = {**state.model, **found.model}
        model |= {alias: model[name] for alias, name in self._aliases.items() if name in found.model}
        return replace(state, model=model, optimizer=found.optimizer, optimizer_values=found.values)

    @torch.no_grad()
    def before_step(self) -> None:
        """Keeps the weights that the step, or a broadcast after it, changes in place."""
        if self._weights:  # with masters there are none
            torch._foreach_copy_(list(self._before.values()), list(self._weights.values()))
        self._steps, self._scaler = True, self._stepped().scaler

    def exchange(self) -> None:
        """After the step, and before any weight is sent: the state goes to its keeper, and another one's comes.

        Raises:
            ViewChangedError: a rank is lost. This one sends no weights then, so that nobody makes the window.
        """
        content = self._own().packed()
        self._next = content, self._exchanged(content)

    def commit(self) -> None:
        """All weights have come."""
        assert self._next is not None
        self._sent, self._received = self._next
        self._next, self._steps = None, False

    @property
    def shares(self) -> Shares:
        """What there is, in memory that later steps leave alone."""
        now = Share.unpacked(self._sent) | Share.unpacked(self._received)
        weights = self._before if self._steps else {n: weight.clone() for n, weight in self._weights.items()}
        ahead = None if self._next is None else Share.unpacked(self._next[0]) | Share.unpacked(self._next[1])
        scaler = self._scaler if self._steps else self._stepped().scaler
        return Shares(now=now | Share(model=weights), ahead=ahead, torn=self._steps, scaler=scaler)

    def _exchanged(self, content: Tensor) -> Tensor:
        """Each rank's bytes go to its keeper; those that come."""
        if self._world.size == 1:
            return Share().packed()
        length = torch.empty(1, dtype=torch.int64)
        _send(torch.tensor([len(content)]), length, self._world.size, to=self._keeper, of=self._kept)
        received = torch.empty(int(length), dtype=torch.uint8)
        _send(content, received, self._world.size, to=self._keeper, of=self._kept)
        return received


def _send(content: Tensor, received: Tensor, ranks: int, *, to: int, of: int) -> None:
    outgoing = [len(content) if rank == to else 0 for rank in range(ranks)]
    arriving = [len(received) if rank == of else 0 for rank in range(ranks)]
    dist.all_to_all_single(received, content, output_split_sizes=arriving, input_split_sizes=outgoing)
