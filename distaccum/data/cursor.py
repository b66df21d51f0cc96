"""Where a loop is in its data: the feed it takes windows from, or the state of one to go on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distaccum.data.loader import WindowLoader
from distaccum.errors import CheckpointError


def find_mismatch(position: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Compares a plan's position with a saved one, whose windows must mean the same.

    Returns:
        The first key whose values differ, the value in ``position`` and the one in ``saved``; None if all are the same.
    """
    different = (key for key, value in position.items() if saved.get(key) != value)
    return next(((key, position[key], saved.get(key)) for key in different), None)


class DataCursor:
    """The feed of the data that a loop names, kept from epoch to epoch.

    Args:
        planned: makes the feed of what is none yet.
    """

    def __init__(self, planned: Callable[[Any], WindowLoader]) -> None:
        self._planned = planned
        self._current: tuple[Any, WindowLoader] | None = None
        self._resumed: Mapping[str, Any] | None = None

    def as_loader(self, data: Any) -> WindowLoader:
        """The feed of ``data``, which goes on from a state that was taken up before.

        Raises:
            CheckpointError: that state is of other data or sizes.
        """
        if self._current is None or self._current[0] is not data:
            feed = data if isinstance(data, WindowLoader) else self._planned(data)
            if self._resumed is not None and self._resumed["position"]:
                mismatch = find_mismatch(feed.position, self._resumed["position"])
                if mismatch is not None:
                    key, value, saved = mismatch
                    problem = f"the state was saved with {key}={saved}"
                    raise CheckpointError(f"{problem}, and this loop has {key}={value}: its data position is void")
                feed.load_state(self._resumed["data"])
            self._current, self._resumed = (data, feed), None
        return self._current[1]

    def state(self) -> Mapping[str, Any]:
        """The feed's position and state, or those that were taken up and not gone on from yet."""
        if self._current is None:
            return self._resumed or {"position": {}, "data": None}
        return {"position": self._current[1].position, "data": self._current[1].state()}

    def restore(self, position: Mapping[str, Any], data: Any) -> None:
        """The next feed goes on from there."""
        self._current, self._resumed = None, {"position": position, "data": data}
