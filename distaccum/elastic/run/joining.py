"""The word that somebody waits to join, which ends a view between two windows."""

from __future__ import annotations

from contextlib import suppress
from threading import Event, Thread
from types import TracebackType

from distaccum.data.hooks import WindowHook
from distaccum.elastic.group.membership import Membership
from distaccum.elastic.group.polled_group import ViewChangedError
from distaccum.errors import DistaccumError

_LOOK_S = 0.5


class JoinsError(ViewChangedError):  # what happens, not what is wrong
    """The view ends between two windows, on all its ranks alike, for somebody who waits: its group is whole."""


class JoinHook(WindowHook):
    """Tells all ranks with a window's count that a member waits to join; a thread asks the store, within the block."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._wished, self._ended = membership, False, Event()
        self._thread = Thread(target=self._look, name="elastic-candidates", daemon=True)

    def __enter__(self) -> JoinHook:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            with suppress(DistaccumError):
                self._wished = self._membership.wishes()

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """Whether this rank knows of one."""
        return [float(self._wished)]

    def incoming(self, sums: list[float]) -> None:
        """Ends the view before its next window where any rank does: on all of them.

        Raises:
            JoinsError: somebody waits to join.
        """
        if sums[0]:
            raise JoinsError("a member waits to join")
