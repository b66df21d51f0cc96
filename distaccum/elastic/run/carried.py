"""A run between two views of an elastic job: what a resume reads from a checkpoint, in memory, and the open window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint.state import RunState
from distaccum.data.plan.units import UnitAssignment
from distaccum.data.window import Window
from distaccum.distributed.random import RNGState
from distaccum.elastic.engine.shares import Shares
from distaccum.elastic.engine.tree import PartialWindow
from distaccum.elastic.group.views import Report
from distaccum.engines.base import EngineState
from distaccum.errors import DistaccumError
from distaccum.train.parts.base import Done

_PARTS = 1024  # more than a run has parts
PER_WINDOW = _PARTS * _PARTS
"""Positions from one window to the next: the part that does what a window is owed, and one that is called by that."""

NOT_BEGUN = 0
"""The position of a member that was started with the run, and has not come to its first window."""


def plain(done: Done, lr: float) -> Done:
    """A window that has run, without its batches; with this rate, unless its own is known."""
    window = done.window
    kept = Window(epoch=window.epoch, samples=window.samples, counts=window.counts, micro_batches=(), data_wait_s=0.0)
    return replace(done, window=kept, lr=lr if done.lr is None else done.lr)


NO_STATE = EngineState(model={}, optimizer={}, optimizer_values={})


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The open window of a rank: which, its counts, how many units and blocks, and what the rank has of it."""

    epoch: int
    window: int
    counts: Mapping[str, float]
    units: int
    blocks: int
    kept: PartialWindow

    @classmethod
    def of(cls, progress: Progress, window: Window, assignment: UnitAssignment, kept: PartialWindow) -> Begun:
        """The window that comes after ``progress``."""
        if kept.along is None:  # not run to its end here
            kept = PartialWindow()
        return cls(
            epoch=progress.epoch,
            window=progress.epoch_window,
            counts=window.counts,
            units=assignment.units,
            blocks=assignment.blocks,
            kept=kept,
        )

    @property
    def note(self) -> dict[str, Any]:
        """For a report."""
        return {
            "epoch": self.epoch,
            "window": self.window,
            "counts": dict(self.counts),
            "units": self.units,
            "blocks": self.blocks,
        }


@dataclass(frozen=True, kw_only=True)
class Carried:
    """The state of a run after a window, on one rank.

    ``record`` is the last one, which rank 0 may not have written before it was lost; ``stop`` is why the run is to end,
    and ``ends`` the error that it ends with. ``owed`` is a window to which not all is done yet; ``told`` says of each
    method that the run's parts were being called by how many had ended. ``unlogged`` is the last update, where its
    record was not due. ``shares`` is what this rank has of a state that is sharded, which is then not in ``engine``.
    ``counted`` is what batches count, by name. ``stopping`` says that all ranks know that one has asked to stop, or to
    leave; that one alone may know why.
    """

    run: RunState
    saved_step: int
    evaluation: tuple[int, dict[str, float]] | None
    verified: bool
    engine: EngineState = NO_STATE
    shares: Shares | None = None
    average: Mapping[str, Tensor] | None = None
    record: Mapping[str, Any] | None = None
    stop: str = ""
    stopping: bool = False
    counted: Sequence[str] = ()
    ends: DistaccumError | None = None
    owed: Done | None = None
    told: Mapping[str, int] = field(default_factory=dict)
    unlogged: Done | None = None
    skips_in_a_row: int = 0
    random: RNGState | None = None
    begun: Begun | None = None

    @property
    def position(self) -> int:
        """How far the run has come here."""
        after, within = _PARTS - 1, 0
        for name, ended in self.told.items():
            if name in ("on_update", "on_skip"):
                after = ended
            else:
                within = ended
        if self.owed is not None and not self.told.keys() & {"on_update", "on_skip"}:
            after = 0
        return self.run.progress.window * PER_WINDOW + after * _PARTS + within

    def report(self, member: str) -> Report:
        """What the other members are told."""
        begun, torn = self.begun, self.shares is not None and self.shares.torn
        note = {name: True for name, holds in ((TORN, torn), (AVERAGE, self.average is not None)) if holds}
        if begun is None:
            return Report(member=member, position=self.position, note=note)
        held = tuple(sorted(begun.kept.sums))
        return Report(member=member, position=self.position, held=held, note=begun.note | note)


TORN, AVERAGE = "torn", "average"
"""Noted by a member some of whose weights may be those of after a step that is not made; that it keeps an average."""
