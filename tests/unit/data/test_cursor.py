"""The cursor of a loop: which data are loaders already, and which saved positions fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distaccum.data.counter import GlobalCounter
from distaccum.data.cursor import DataCursor, position_mismatch
from distaccum.data.loader import WindowLoader
from distaccum.data.window import Window
from distaccum.errors import CheckpointError


class Windows(WindowLoader):
    """A loader of a user's own."""

    restored: Any = None

    @property
    def position(self) -> dict[str, Any]:
        return {"samples": 8}

    def windows(self, epoch: int, start: int, counter: GlobalCounter) -> Iterator[Window]:
        raise NotImplementedError

    def load_state(self, state: Any) -> None:
        self.restored = state


class LooksLikeOne:
    """Has the methods of a loader for a reason of its own."""

    position: Any = None
    windows = state = load_state = None


def _cursor(built: list[Any]) -> DataCursor:
    return DataCursor(lambda data: (built.append(data), Windows())[1])


def test_only_a_subclass_is_a_loader() -> None:
    built: list[Any] = []
    own, other = Windows(), LooksLikeOne()
    assert _cursor(built).as_loader(own) is own
    assert built == []
    assert _cursor(built).as_loader(other) is not other
    assert built == [other]


def test_a_loader_is_kept_from_epoch_to_epoch() -> None:
    built: list[Any] = []
    cursor, data = _cursor(built), [1, 2]
    assert cursor.as_loader(data) is cursor.as_loader(data)
    cursor.as_loader([1, 2])
    assert len(built) == 2


def test_a_restored_state_reaches_the_next_loader_once() -> None:
    cursor, loader, later = _cursor([]), Windows(), Windows()
    assert cursor.state() == {"position": {}, "data": None}
    cursor.restore({"samples": 8}, "there")
    assert cursor.state() == {"position": {"samples": 8}, "data": "there"}
    assert cursor.as_loader(loader) is loader
    cursor.as_loader(later)
    assert (loader.restored, later.restored) == ("there", None)
    assert cursor.state() == {"position": {"samples": 8}, "data": None}


def test_a_position_of_other_data_is_refused() -> None:
    cursor = _cursor([])
    cursor.restore({"samples": 9}, None)
    with pytest.raises(CheckpointError, match="saved with samples=9, and this loop has samples=8: its data position"):
        cursor.as_loader(Windows())


def test_positions_are_compared_by_the_current_keys() -> None:
    assert position_mismatch({"a": 1, "b": 2}, {"a": 1}) is None
    assert position_mismatch({"a": 1}, {"a": 1, "b": 2}) == ("b", None, 2)
    assert position_mismatch({"a": 1, "b": 3}, {"b": 2, "a": 0}) == ("b", 3, 2)
