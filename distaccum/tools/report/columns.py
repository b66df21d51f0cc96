"""The series of a run's records, and what is left of them where there are more than a screen has columns of pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distaccum.tools.report.read import Record

AXES = ("step", "samples", "tokens", "hours")
# Of a record: where it is, and which rank is meant; neither is a quantity.
_PLACES = frozenset(("step", "window", "epoch", "samples", "tokens", "slowest_rank"))
_OF_NO_TABLE = _PLACES - {"epoch"} | {"applied"}
_NUMBERS = 90_000  # in one report, of some 20 bytes each
_MOST, _FEWEST = 1000, 50  # parts of a run that are drawn

Number = float | int
Values = list[Number | None]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """A run's series over its records.

    Attributes:
        x: by axis, a number for each point.
        y: by metric, a number for each point; None where the record has none, or one that is not finite.
        bad: by metric, the points that are NaN or infinite.
        records: that the points stand for; more than there are points where they are thinned.
    """

    x: dict[str, list[Number]]
    y: dict[str, Values]
    bad: dict[str, list[tuple[int, str]]]
    records: int

    @property
    def thinned(self) -> bool:
        """Whether points stand for several records."""
        return self.records > len(self.x["step"])


def columns(records: Sequence[Record]) -> Columns:
    """A point for each record.

    A record has no time of its own: ``hours`` add up ``step_time_s`` of the windows, so they are those of training,
    without evaluations and checkpoints.
    """
    x: dict[str, list[Number]] = {axis: [] for axis in AXES}
    seconds, window = 0.0, 0
    for record in records:
        for axis in AXES[:-1]:
            value = finite(record.get(axis))
            x[axis].append(value if value is not None else x[axis][-1] if x[axis] else 0)
        windows = finite(record.get("window")) or window
        seconds += max(0, windows - window) * (finite(record.get("step_time_s")) or 0.0)
        window = int(windows)
        x["hours"].append(seconds / 3600)
    names = [name for name in dict.fromkeys(name for record in records for name in record) if name not in _PLACES]
    y: dict[str, Values] = {}
    bad: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        values = [record.get(name) for record in records]
        found = [finite(value) for value in values]
        odd = [(i, _name(value)) for i, value in enumerate(values) if isinstance(value, float) and found[i] is None]
        if odd or any(value is not None for value in found):
            y[name] = found
        if odd:
            bad[name] = odd
    return Columns(x=x, y=y, bad=bad, records=len(records))


def parts_of(runs: Sequence[Columns]) -> int:
    """Into how many parts each run is cut at most, so that all of them together are a file of two megabytes."""
    widest = max((len(one.y) + len(one.x) for one in runs), default=1)
    return max(_FEWEST, min(_MOST, _NUMBERS // (2 * widest * max(1, len(runs)))))


def thinned(whole: Columns, parts: int) -> Columns:
    """Two points for each of ``parts`` equal parts of the records: the least and the greatest number, as they came.

    A part is narrower than a pixel of most screens, so that curves look as all records drawn. Where ``x`` is, a part
    has its first record's and its last one's. Fewer records than that are left as they are.
    """
    count = whole.records
    if count <= 2 * parts:
        return whole
    cuts = [count * i // parts for i in range(parts + 1)]
    spans = [(cuts[i], cuts[i + 1]) for i in range(parts)]
    x = {axis: [values[i] for lo, hi in spans for i in (lo, hi - 1)] for axis, values in whole.x.items()}
    y: dict[str, Values] = {}
    for name, values in whole.y.items():
        y[name] = []
        for lo, hi in spans:
            y[name] += _extremes(values[lo:hi])
    bad: dict[str, list[tuple[int, str]]] = {}
    for name, odd in whole.bad.items():
        part = 0
        points: dict[int, str] = {}
        for i, kind in odd:
            while i >= cuts[part + 1]:
                part += 1
            points.setdefault(2 * part, kind)
        bad[name] = list(points.items())
    return Columns(x=x, y=y, bad=bad, records=count)


def _extremes(values: Values) -> Values:
    there = [value for value in values if value is not None]
    if not there:
        return [None, None]
    least, greatest = min(there), max(there)
    if least == greatest:
        return [least, None] if len(there) == 1 else [least, greatest]
    return [least, greatest] if there.index(least) < there.index(greatest) else [greatest, least]


def finite(value: Any) -> Number | None:
    """A number of a record that a curve can have; None for NaN, infinity, and other values."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond what a float holds
        return None


def _name(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def final(records: Sequence[Record]) -> Mapping[str, tuple[Any, int]]:
    """By metric the last value, of whatever kind, and its step."""
    found: dict[str, tuple[Any, int]] = {}
    for record in records:
        step = finite(record.get("step")) or 0
        for name, value in record.items():
            if name not in _OF_NO_TABLE and isinstance(value, int | float):
                found[name] = (value, int(step))
    return found
