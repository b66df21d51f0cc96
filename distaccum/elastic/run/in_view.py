"""What a run among the members of a view is given beside the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from distaccum.accumulation.accumulator import Accumulator
from distaccum.elastic.engine.ddp import resumable
from distaccum.elastic.engine.desk import Desk
from distaccum.elastic.engine.window import run_window
from distaccum.elastic.group.polled_group import ViewChangedError
from distaccum.elastic.run.hand_over import Begin
from distaccum.elastic.run.joining import JoinRider, JoinsError
from distaccum.elastic.run.memory_checkpoint import MemoryCheckpoints

if TYPE_CHECKING:
    from rich.console import Console

    from distaccum.train.loop import Loop


@dataclass(frozen=True, kw_only=True)
class InView:
    """What a run among the members of a view is given beside the rest.

    Args:
        begin: its state, and the window that is open.
        rider: travels with the windows' counts.
        desk: what rank 0 has open from view to view.
        changes: within it an error that a lost rank has caused is a :class:`ViewChangedError`.
        first_to: whether this process is the first of the run to do something.
        note: told why the view has ended before the run.
        memory: checkpoints in memory, of an engine whose windows cannot go on without a rank.
    """

    begin: Begin
    rider: JoinRider
    desk: Desk
    changes: Callable[[], AbstractContextManager[None]]
    first_to: Callable[[str], bool]
    note: Callable[[ViewChangedError], None]
    memory: MemoryCheckpoints | None = None

    def enter(self, accumulator: Accumulator, console: Console | None) -> None:
        """Before the first window; ``console`` is rank 0's. What was carried is in the loop from here on."""
        if self.memory is not None:
            self.memory.forget_handed()
            if console is not None:
                self.memory.tell = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        accumulator.add_rider(self.rider)
        if self.memory is None:
            accumulator.run_windows_by(run_window)
        if self.begin.carried is not None:
            accumulator.trust()
            if self.memory is None:
                resumable(accumulator.engine).take_up(self.begin.kept)
        self.begin.release()

    def leave(self, loop: Loop, error: ViewChangedError) -> None:
        """The view has ended before the run: takes what is carried on from the ``loop``.

        Raises:
            ViewChangedError: a rank is lost while those that are left keep it together.
        """
        self.note(error)
        if self.memory is None:
            self.begin.carried = loop.carried()
        elif isinstance(error, JoinsError):  # so that nothing is computed again
            with self.changes():
                loop.keep_in_memory()

    def end(self, loop: Loop) -> None:
        """The run has ended on this rank, and others may be lost before they know."""
        if self.memory is None:
            self.begin.carried = loop.carried()
