"""Views that are given up one after the other at the same place: a member takes longer than the others wait for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from distaccum.elastic.engine.shares import LostStateError
from distaccum.elastic.group.polled_group import ViewChangedError
from distaccum.elastic.group.views import Node, Report, View
from distaccum.errors import DistaccumError

_log = logging.getLogger(__name__)

_OVERDUE = "overdue"  # in a report's note: its member has waited for another one for too long
_MOST = 3


class StandstillError(DistaccumError, RuntimeError):
    """Nobody is known to be gone, and a part of the run takes longer than members wait for each other."""


class Standstill:
    """Notices that the run comes no further, though nobody is lost; all members that read the same reports alike.

    Args:
        waits_s: how long members wait for one, ``elastic.expel_after``.
    """

    def __init__(self, waits_s: float) -> None:
        self._waits_s = waits_s
        self._places = dict[str, tuple[int, tuple[Node, ...]]]()
        self._times, self._overdue = 0, False

    def note(self, error: ViewChangedError | LostStateError) -> None:
        """Why this member has left the last view; people are told of what is more than a change of ranks."""
        self._overdue = isinstance(error, ViewChangedError) and error.overdue
        tells = self._overdue or isinstance(error, LostStateError)
        _log.log(logging.WARNING if tells else logging.INFO, "%s", error)

    def told_in(self, report: Report) -> Report:
        """The report on the last view, with what the other members are to know of its end."""
        return replace(report, note={**report.note, _OVERDUE: True}) if self._overdue else report

    def look_at(self, view: View, reports: Mapping[str, Report]) -> None:
        """Looks how far the members of the next view are; whom they have left behind since is not among them.

        Raises:
            StandstillError: they are where they were, and have waited for too long again; on all of them.
        """
        places = {member: (reports[member].position, reports[member].held) for member in view.members}
        overdue = any(reports[member].note.get(_OVERDUE, False) for member in view.members)
        stays = places.items() <= self._places.items()
        self._times = 0 if not overdue else self._times + 1 if stays else 1
        self._places = places
        if self._times >= _MOST:
            raise StandstillError(
                f"the ranks have waited {_MOST} times for longer than elastic.expel_after={self._waits_s:g} s for one "
                "of them at the same place, and nobody is known to be gone: give elastic.expel_after more than any "
                "save, evaluation, callback or micro-batch takes, and go on with resume=auto"
            )
