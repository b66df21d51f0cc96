"""The part of a run that one process group trains: from its start to its end, unless ranks come and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from distaccum.accumulation.accumulator import Accumulator
from distaccum.distributed.world import World
from distaccum.train.components import TrainingComponents
from distaccum.train.loop import Loop, TrainingRun, tell_nobody
from distaccum.train.metrics.loggers import Logger
from distaccum.train.parts.base import Part
from distaccum.train.resume import Restore
from distaccum.train.run_dir import RunDir

if TYPE_CHECKING:
    from rich.console import Console

    from distaccum.train.run import Start


def opened(make: Callable[[], Sequence[Logger]], closing: ExitStack) -> Sequence[Logger]:
    """The loggers that ``make`` opens, which are closed with ``closing``, and told whether the run has failed."""
    loggers = make()
    for logger in loggers:
        closing.push(partial(_close, logger))
    return loggers


def _close(logger: Logger, kind: type[BaseException] | None, *_: object) -> None:
    logger.close(failed=kind is not None)


class Restored(Protocol):
    """What a run goes on from, as :class:`~distaccum.train.resume.Restore` restores it from a checkpoint."""

    def after_wrap(self, accumulator: Accumulator, *, wandb_id: str) -> tuple[str, str]:
        """Restores what an engine has wrapped; gives the id of the W&B run, and a note for the header."""

    @property
    def memory(self) -> Mapping[str, Any]:
        """What the run knows of memory."""

    @property
    def logged(self) -> Mapping[str, int]:
        """Window and step of the last record."""


class Session:
    """A run in one process group, from a checkpoint or from zero to its end.

    Where ranks come and go, each group has a session; its class is in the ring of elastic runs.

    Args:
        start: of the run; its components are the caller's.
        run_dir: as rank 0 names it.
        world: this rank in the group.
        enter_phase: told what this rank does.
    """

    step = 0
    """The updates that are known to be done, before anything is restored."""
    is_first = True
    """Whether no group has trained this run before in these processes."""
    saved_step: int | None = None
    """Of the newest checkpoint of this run; None: that of ``saved``."""
    closes_alone = False
    """Whether other ranks may be gone by the end."""

    def __init__(
        self, start: Start, run_dir: RunDir, world: World, *, enter_phase: Callable[[str], None] = tell_nobody
    ) -> None:
        self.saved, self.beginning, self.began = start.saved, start.beginning, start.began
        self.run_dir, self.world, self.enter_phase = run_dir, world, enter_phase
        self.before: Mapping[str, Any] = run_dir.status() if world.is_main else {}
        """The status that the process before left."""

    @property
    def says(self) -> str:
        """What the screen says of the start."""
        return "starting" if self.saved is None else f"restoring {self.saved.folder.name}"

    def restore(self, components: TrainingComponents) -> Restored:
        """What is gone on from."""
        return Restore(self.saved, components, self.world)

    def verify(self, stated: str) -> str:
        """Which windows are proven, where ``trainer.verify`` is ``stated``."""
        return stated

    def prepare(self, accumulator: Accumulator, closing: ExitStack) -> None:
        """Once there is an engine; ``closing`` is left at the end."""

    def loggers(self, make: Callable[[], Sequence[Logger]], closing: ExitStack) -> Sequence[Logger]:
        """Rank 0's, opened by ``make`` until ``closing``."""
        return opened(make, closing)

    def first_to(self, _: str) -> bool:
        """Whether no process of the run has done something before."""
        return True

    def saved_ago_s(self) -> float:
        """Seconds since the last checkpoint was saved, from which the run goes on."""
        return 0.0

    def loop(self, run: TrainingRun, parts: Sequence[Part]) -> Loop:
        """Makes the loop."""
        return Loop(run, parts)

    def enter(self, accumulator: Accumulator, console: Console | None) -> None:
        """Before the first window; ``console`` is rank 0's."""

    def fit(self, loop: Loop) -> dict[str, float] | None:
        """Trains; returns the last evaluation, or None where another session goes on with the run."""
        return loop.fit()

    def ended(self) -> None:
        """The run has ended; on rank 0, before it says so."""
