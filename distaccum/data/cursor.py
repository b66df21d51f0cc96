"""The position of a loop in its data: the loader it takes windows from, or a saved state to continue from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from distaccum.data.loader import WindowLoader
from distaccum.data.spec import DataSpec
from distaccum.errors import CheckpointError


def position_mismatch(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first key of a loader's ``current`` position whose ``saved`` value differs, with both values.

    Returns:
        ``(key, saved value, current value)``; None where a window's number means the same in both.
    """
    for key, value in current.items():
        if saved.get(key) != value:
            return key, saved.get(key), value
    return None


def has_grown(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether two positions differ in how much data there is, and in nothing else; the data's weights go with it."""
    before, now = (str(one.get("seed")).partition(", of weights")[:2] for one in (saved, current))
    amount = {"samples", "tokens in all samples", *(["seed"] if before == now and now[1] else [])}
    differs = {key for key in saved.keys() | current.keys() if saved.get(key) != current.get(key)}
    return "samples" in saved.keys() & current.keys() and amount >= differs > {"seed"} & differs


class DataCursor:
    """Keeps the loader of a loop's data from epoch to epoch.

    Args:
        build: makes a loader of data that is none yet.
        adjust: called with each loader before its position is looked at.
    """

    def __init__(
        self, build: Callable[[Any], WindowLoader], adjust: Callable[[WindowLoader], None] = lambda _: None
    ) -> None:
        self._build, self._adjust = build, adjust
        self._current: tuple[Any, WindowLoader] | None = None
        self._resumed: Mapping[str, Any] | None = None

    def as_loader(self, data: Any) -> WindowLoader:
        """The loader of ``data``, in the state that was restored before, if any.

        Raises:
            CheckpointError: that state is of other data or sizes.
        """
        if self._current is None or self._current[0] is not data:
            loader = self._loader_of(data)
            if self._resumed is not None and self._resumed["position"]:
                if mismatch := position_mismatch(self._resumed["position"], loader.position):
                    key, saved, current = mismatch
                    problem = f"the state was saved with {key}={saved}"
                    raise CheckpointError(f"{problem}, and this loop has {key}={current}: its data position is void")
                loader.load_state(self._resumed["data"])
            self._current, self._resumed = (data, loader), None
        return self._current[1]

    def turns_to(self, data: Any) -> bool:
        """Whether a loader is to be made of ``data``, which is a collective, or to take the place of another one."""
        return not isinstance(data, WindowLoader) if self._current is None else self._current[0] is not data

    def leaves_epoch(self, data: Any) -> bool:
        """Whether ``data`` is other data than that of the loader, so that its windows are none of the same epoch.

        The same object is the same data; so is another ``DataLoader`` of the same map-style dataset and order.
        """
        if self._current is None or self._current[0] is data:
            return False
        before, loader = self._current
        if _dataset(before) is not _dataset(data) or loader.state() is not None:
            return True
        return self._loader_of(data).position != loader.position

    def _loader_of(self, data: Any) -> WindowLoader:
        loader = data if isinstance(data, WindowLoader) else self._build(data)
        self._adjust(loader)
        return loader

    @property
    def loader(self) -> WindowLoader | None:
        """The loader of the data that windows were taken from last."""
        return self._current[1] if self._current else None

    def state(self) -> Mapping[str, Any]:
        """The loader's position and state; the restored ones until a loader has taken them."""
        if self._current is None:
            return self._resumed or {"position": {}, "data": None}
        return {"position": self._current[1].position, "data": self._current[1].state()}

    def restore(self, position: Mapping[str, Any], data: Any) -> None:
        """Sets the position and state that the next loader continues from."""
        self._current, self._resumed = None, {"position": position, "data": data}


def _dataset(data: Any) -> Any:
    """What a ``DataLoader`` or a ``DataSpec`` holds; anything else is itself."""
    if isinstance(data, DataLoader):
        return data.dataset
    return data.train if isinstance(data, DataSpec) else data
