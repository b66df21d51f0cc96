"""How a run goes on whose members have its whole state between them: with the very window that is open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch.optim import Optimizer

from distaccum.checkpoint.state import SavedState
from distaccum.distributed.world import World
from distaccum.elastic.group.views import Report, View
from distaccum.elastic.run.going_back import Anew, newest
from distaccum.elastic.run.hand_over import Begin, hand_over
from distaccum.elastic.run.memory_checkpoint import MemoryCheckpoints
from distaccum.elastic.run.trained import Trained
from distaccum.train.components import TrainingComponents
from distaccum.train.run_dir import RunDir


class Beginnings:
    """The settings of the optimizers' groups as the run began with them, which an engine reckons from.

    Args:
        optimizers: not stepped yet.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._settings = [
            {name: deepcopy(value) for name, value in group.items() if name != "params"} for group in self._groups()
        ]

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)

    def put_back(self) -> None:
        """Before an engine is made of them again."""
        for group, settings in zip(self._groups(), self._settings, strict=True):
            for name in group.keys() - settings.keys() - {"params"}:
                del group[name]  # it has come since, so that it is state, and comes back with that
            group.update(deepcopy(settings))


class GoesOn:
    """Begins each view with what the members have; see :class:`~distaccum.elastic.run.views.Continuity`.

    Where a part of a sharded state is gone, the run goes back to the newest checkpoint on disk.

    Args:
        anew: what is built of it then.
    """

    memory: MemoryCheckpoints | None = None

    def __init__(self, anew: Anew) -> None:
        self._anew, self._components = anew, anew.take()
        self._beginnings, self._needed = Beginnings(self._components.optimizers), Trained(self._components.model)
        self._begin, self._trained, self._reached = Begin(), False, 0

    def report(self, member: str) -> Report:
        """What the other members are told."""
        return self._begin.report(member)

    def begin(
        self, saved: SavedState | None, view: View, reports: Mapping[str, Report], world: World, run_dir: RunDir
    ) -> tuple[TrainingComponents, SavedState | None, Begin]:
        """The components, what a first view begins from, and the state of a later one; a collective of its group."""
        self._note_state()
        self._begin = hand_over(view, reports, view.members[world.rank], self._begin.carried, world)
        self._note_state()
        if self._begin.carried is None and view.generation > 0:
            return self._back(world, run_dir)
        self._needed.check()
        self._beginnings.put_back()
        return self._components, saved if view.generation == 0 else None, self._begin

    def _note_state(self) -> None:
        if self._begin.carried is not None:
            self._trained, self._reached = True, self._begin.carried.run.progress.window

    def _back(self, world: World, run_dir: RunDir) -> tuple[TrainingComponents, SavedState | None, Begin]:
        """Nobody has a state: the run has not begun, or a part of the state is gone."""
        if self._trained:
            self._components = self._anew.take()
            self._beginnings, self._needed = Beginnings(self._components.optimizers), Trained(self._components.model)
        self._beginnings.put_back()
        goes, saved = newest(self._components, run_dir, world)
        if self._trained:
            goes.tell(world, reached=self._reached)
        self._trained = False
        return goes.configured(self._components), saved, self._begin

    def left(self, *, lost: bool) -> None:
        """Where a part of the state is ``lost``, what this member has is of no use."""
        if lost:
            self._note_state()
            self._begin, self._trained = Begin(), True
