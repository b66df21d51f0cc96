"""Data parallel engines whose open window goes on where ranks are lost: what a rank has sent is kept until the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.data.plan.units import UnitAssignment
from distaccum.distributed.world import World
from distaccum.elastic.engine.mirror import Mirror
from distaccum.elastic.engine.shares import Share, Shares
from distaccum.elastic.engine.tree import KeptTree, PartialWindow
from distaccum.engines.base import Engine, EngineState, Restart
from distaccum.engines.context import EngineContext
from distaccum.engines.ddp.communicating import uncounted
from distaccum.engines.ddp.engine import DDPEngine
from distaccum.engines.ddp.stepper import WholeStepper
from distaccum.engines.ddp.zero1 import ZeRO1
from distaccum.engines.modules import clean
from distaccum.engines.state import copy_in_place


class MirroredZeRO1(ZeRO1):
    """Shards of which each has a copy on another rank; what a step does in which order is in :mod:`.mirror`."""

    place = "on one rank each, with a copy on another"
    mirror: Mirror
    """The engine sets it, once it has the weights."""

    def take_in(self) -> None:
        """See :class:`ZeRO1`; what the step changes in place is kept."""
        super().take_in()
        self.mirror.before_step()

    def broadcast(self) -> None:
        """See :class:`ZeRO1`; the state goes to its keeper before, so that who has all weights knows of both."""
        self.mirror.exchange()
        super().broadcast()
        self.mirror.commit()

    def _ends_alone(self) -> bool:
        """See :class:`ZeRO1`: always, since others may be gone."""
        return True


class ElasticDDPEngine(DDPEngine):
    """A :class:`DDPEngine` whose reduction comes after the last backward, in :meth:`reduce`, and may fail.

    Args:
        model, optimizers, world, context: as there.
        tree: the reducer.
        mirrored: which rank steps which parameters, and has a copy of which others' state; None: each steps all.
        keepers: then, by rank, which one keeps a copy of its shard; empty: the next one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        world: World,
        context: EngineContext,
        *,
        tree: KeptTree,
        mirrored: MirroredZeRO1 | None,
        keepers: Sequence[int],
    ) -> None:
        super().__init__(model, optimizers, world, context, reducer=tree, stepper=mirrored or WholeStepper())
        self._sums, self._mirrored = tree, mirrored
        if mirrored is not None:
            mirrored.mirror = self._make_mirror(mirrored, keepers)

    def _make_mirror(self, shards: MirroredZeRO1, keepers: Sequence[int]) -> Mirror:
        names = {id(parameter): name for name, parameter in self._named.items()}
        every = {clean(name): p for name, p in self._model.named_parameters(remove_duplicate=False)}
        aliases = {name: names[id(p)] for name, p in every.items() if id(p) in names and name not in self._named}
        stepped, masters = self._stepped_state, self._weights
        return Mirror(self._world, shards, self._named, aliases, stepped, masters=masters, keepers=keepers)

    def _stepped_state(self) -> EngineState:
        with self._stepper.groups:
            return self._optimizer_step.state({}, owns=lambda _: True)

    def _take_assignment(self, assignment: UnitAssignment | None) -> None:
        super()._take_assignment(assignment)
        self._unused.used = [*self._sums.taken_up.used] or [0] * len(self._unused.used)

    def _boundary(self, loss: Tensor) -> None:
        self._backward_alone(loss)

    def _join_with_zeros(self) -> None:
        self._sums.reduce_kept()

    @property
    def restart(self) -> Restart:
        """See :class:`Engine`; not a window that began with other ranks' sums, which are spent."""
        return Restart.REFUSED if self._sums.resumed else super().restart

    def reduce(self) -> None:
        """The window's reduction, after its last micro-step. DDP has no part in it: all that is reduced is kept."""
        if self._missing:
            self._reduce_late()
            return
        self._watch.check()
        with uncounted():
            self._sums.reduce_kept()
        self._reduced = True
        self._watch.note()

    def send_along(self, numbers: Tensor) -> None:
        """Has fp64 ``numbers``, of one shape on all ranks, travel with :meth:`reduce`."""
        self._sums.send_along(numbers)

    @property
    def received(self) -> Tensor:
        """The sum over the ranks of what :meth:`send_along` was given, after :meth:`reduce`."""
        return self._sums.received

    @property
    def kept(self) -> PartialWindow:
        """What this rank has of the open window, also after a reduction that failed."""
        return replace(self._sums.kept, used=tuple(self._unused.used))

    def take_up(self, kept: PartialWindow) -> None:
        """Gives the window that begins next what another engine has :attr:`kept` of it on this rank."""
        self._sums.taken_up = kept

    @property
    def shares(self) -> Shares | None:
        """What this rank has of a state that is sharded; None: each rank has all of it."""
        return None if self._mirrored is None else self._mirrored.mirror.shares

    def load_state(self, state: EngineState) -> None:
        """See :class:`Engine`."""
        super().load_state(state)
        if self._mirrored is not None:
            self._mirrored.mirror.load(state)

    def load_dealt(self, state: EngineState, share: Share, *, torn: bool) -> None:
        """Restores the state of an engine of other ranks, of which each has a share; a collective.

        Args:
            state: weights and what else every rank has.
            share: what this rank has of one moment's state.
            torn: whether some rank's weights are of another moment, so that those of the shares are taken.

        Raises:
            LostStateError, PeerError: as :func:`~distaccum.elastic.engine.shares.dealt`.
        """
        assert self._mirrored is not None
        self.load_state(self._mirrored.mirror.completed(state, share, torn=torn))


def resumable(engine: Engine) -> ElasticDDPEngine:
    """The engine of a run whose windows go on where ranks are lost, which has no other."""
    return cast(ElasticDDPEngine, engine)


def shares_of(engine: Engine) -> Shares | None:
    """What this rank has of a state that is sharded where ranks may be lost; None: each rank has all of it."""
    shares: Shares | None = getattr(engine, "shares", None)
    return shares


def own_state(engine: Engine, shares: Shares) -> EngineState:
    """A copy of what every rank has, on this rank; the optimizers' state is in its ``shares``, and the loss scale's."""
    model = dict(engine.state().model)
    copy_in_place(model)
    return EngineState(model=model, optimizer={}, optimizer_values={}, scaler=shares.scaler)
