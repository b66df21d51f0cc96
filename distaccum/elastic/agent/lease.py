"""Whose agent is silent: the other nodes' beats, each with a lease that its next beat renews."""

from __future__ import annotations

from collections.abc import Callable

LEASE_S = 10.0
"""Ten beats. An agent needs next to no time, but a machine whose cores and disks are all taken may hold it up."""


class Lease:
    """The beats of all nodes but this one; a node that has not come has no lease, and cannot lose it."""

    def __init__(self, nnodes: int, node: int, beats: Callable[[int], int]) -> None:
        self._beats = beats
        self._last: dict[int, tuple[int, float]] = {one: (0, 0.0) for one in range(nnodes) if one != node}

    def silent(self, now: float) -> list[int]:
        """Looks at every beat; returns the nodes of which none has come for ``LEASE_S``.

        What has moved while this agent itself stood still counts as just come.
        """
        found = []
        for node, (before, moved_at) in self._last.items():
            beats = self._beats(node)
            if beats != before:
                self._last[node] = (beats, now)
            elif beats and now - moved_at > LEASE_S:
                found.append(node)
        return found
