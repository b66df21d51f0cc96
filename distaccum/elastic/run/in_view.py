"""A run among the members of a view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from time import monotonic, time
from types import TracebackType
from typing import TYPE_CHECKING, cast

from distaccum.accumulation.accumulator import Accumulator
from distaccum.checkpoint.state import SavedState
from distaccum.distributed.world import World
from distaccum.elastic.engine.ddp import resumable
from distaccum.elastic.engine.window import run_window
from distaccum.elastic.group.polled_group import ViewChangedError
from distaccum.elastic.run.hand_over import Begin
from distaccum.elastic.run.joining import JoinHook, JoinsError
from distaccum.elastic.run.loop import ElasticLoop
from distaccum.elastic.run.memory_checkpoint import MemoryCheckpoints
from distaccum.elastic.run.restore import RestoreCarried
from distaccum.train.components import TrainingComponents
from distaccum.train.loop import Loop, TrainingRun
from distaccum.train.metrics.loggers import Logger
from distaccum.train.parts.base import Part
from distaccum.train.run_dir import RunDir
from distaccum.train.session import Restored, Session, opened

if TYPE_CHECKING:
    from rich.console import Console

    from distaccum.train.run import Start


class Rank0Resources:
    """The loggers of a run, which rank 0 opens once and keeps from view to view; closed at the end of the block."""

    def __init__(self) -> None:
        self._closing = ExitStack()
        self._loggers: Sequence[Logger] | None = None

    def __enter__(self) -> Rank0Resources:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, traceback)

    def loggers(self, make: Callable[[], Sequence[Logger]]) -> Sequence[Logger]:
        """Those that are open, or else what ``make`` opens."""
        if self._loggers is None:
            self._loggers = opened(make, self._closing)
        return self._loggers


class InView(Session):
    """A view's part of a run: it goes on from what the members have, and ends where ranks are lost or come.

    Args:
        start, run_dir, world: as :class:`Session` has them.
        saved: the checkpoint that this view goes on from, as its rank 0 has it.
        begin: its state, and the window that is open.
        rider: travels with the windows' counts.
        resources: what rank 0 has open from view to view.
        changes: within it an error that a lost rank has caused is a :class:`ViewChangedError`.
        first_to: whether this process is the first of the run to do something.
        note: told why the view has ended before the run.
        memory: checkpoints in memory, of an engine whose windows cannot go on without a rank.
    """

    closes_alone = True

    def __init__(
        self,
        start: Start,
        run_dir: RunDir,
        world: World,
        *,
        saved: SavedState | None,
        begin: Begin,
        rider: JoinHook,
        resources: Rank0Resources,
        changes: Callable[[], AbstractContextManager[None]],
        first_to: Callable[[str], bool],
        note: Callable[[ViewChangedError], None],
        memory: MemoryCheckpoints | None = None,
    ) -> None:
        super().__init__(start, run_dir, world)
        self.saved = saved
        self._begin, self._rider, self._resources, self._memory = begin, rider, resources, memory
        self._changes, self._first_to, self._note = changes, first_to, note
        self._before = begin.carried
        self.step = 0 if self._before is None else self._before.run.progress.step
        self.saved_step = None if self._before is None else self._before.saved_step
        self.is_first = self._before is None

    def restore(self, components: TrainingComponents) -> Restored:
        """From what was carried, if anything was."""
        if self._before is None:
            return super().restore(components)
        return RestoreCarried(self._before, components.callbacks)

    def verify(self, stated: str) -> str:
        """A first window that is proven is not proven again."""
        return "never" if stated == "first" and self._before is not None and self._before.verified else stated

    def prepare(self, accumulator: Accumulator, closing: ExitStack) -> None:
        """Other ranks may be lost before there is anything to carry on."""
        closing.callback(accumulator.close, alone=True)

    def loggers(self, make: Callable[[], Sequence[Logger]], _: ExitStack) -> Sequence[Logger]:
        """They stay open while this process is rank 0."""
        return self._resources.loggers(make)

    def first_to(self, what: str) -> bool:
        """Whether no process of the job has asked for this before."""
        return self._first_to(what)

    def saved_ago_s(self) -> float:
        """Seconds since the checkpoint was saved, or since the run began if there is none."""
        if self._before is None:
            return 0.0
        with suppress(OSError):
            if self._before.saved_step:
                saved = self.run_dir.checkpoints / f"step-{self._before.saved_step}"
                return max(0.0, time() - saved.stat().st_mtime)
        return monotonic() - self.began

    def loop(self, run: TrainingRun, parts: Sequence[Part]) -> Loop:
        """One that is told what the view before has left to do; what was carried is in it from here on."""
        before, self._before = self._before, None
        return ElasticLoop(run, parts, before=before, memory=self._memory)

    def enter(self, accumulator: Accumulator, console: Console | None) -> None:
        """Before the first window; ``console`` is rank 0's."""
        if self._memory is not None:
            self._memory.forget_handed()
            if console is not None:
                self._memory.tell = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        accumulator.add_hook(self._rider)
        if self._memory is None:
            accumulator.run_windows_by(run_window)
        if self._begin.carried is not None:
            accumulator.trust()
            if self._memory is None:
                resumable(accumulator.engine).take_up(self._begin.kept)
        self._begin.release()

    def fit(self, loop: Loop) -> dict[str, float] | None:
        """Trains; takes what is carried on from the ``loop``, also at the end, after which others may be lost.

        Raises:
            ViewChangedError: a rank is lost while those that are left keep it together.
        """
        mine = cast(ElasticLoop, loop)
        try:
            with self._changes():
                found = mine.fit()
        except ViewChangedError as error:
            self._note(error)
            if self._memory is None:
                self._begin.carried = mine.carried()
            elif isinstance(error, JoinsError):  # so that nothing is computed again
                with self._changes():
                    mine.keep_in_memory()
            return None
        if self._memory is None:
            self._begin.carried = mine.carried()
        return found

    def ended(self) -> None:
        """Where a rank is lost after this, the next view comes here once more."""
        self.run_dir.require_owned()
        self.run_dir.forget_failure()  # of a rank that woke after the others had gone on without it
