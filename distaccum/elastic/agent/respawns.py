"""When a worker that has ended is followed by another, and when its place is given up."""

from __future__ import annotations

PAUSE_S = 0.5
"""First the others go on with what they have; then a new process takes its share of the cores."""
SHORT_S, MOST_SHORT = 20.0, 3
"""So many in a row that end so soon, and the next would, too."""


class Respawns:
    """The places of a node whose workers have ended, each with its time."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._short: dict[int, int] = {}

    def note(self, local: int, ran_s: float, now: float) -> bool:
        """A worker has ended after so many seconds; returns whether another is to come."""
        self._short[local] = self._short.get(local, 0) + 1 if ran_s < SHORT_S else 0
        if self._short[local] >= MOST_SHORT:
            return False
        self._due[local] = now + PAUSE_S
        return True

    def due(self, now: float) -> list[int]:
        """Takes the places whose time has come."""
        found = sorted(local for local, at in self._due.items() if at <= now)
        for local in found:
            del self._due[local]
        return found

    def next(self) -> float | None:
        """When the next one is due."""
        return min(self._due.values(), default=None)

    def drop(self) -> None:
        """Nobody is to come any more."""
        self._due.clear()
