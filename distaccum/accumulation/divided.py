"""Windows whose micro-batches are known to be too large are run in parts from the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from distaccum.data.counter import GlobalCounter
from distaccum.data.cutting import CannotCutError, cut, rows_of, shape_of
from distaccum.data.window import MicroBatch, PartOf, Window
from distaccum.distributed.sliced_random import Rows
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.memory_marks import Shape

_Part = tuple[int, int, int]  # the micro-batch, and its rows from the second number to before the third


def divided(window: Window, engine: Engine, counter: GlobalCounter, world: World) -> Window:
    """The window with micro-batches that fit, as far as the engine's marks say; the counts stay the same.

    Where a forward is a collective all ranks run as many parts of their n-th micro-batch, which is a collective too.
    Micro-batches that cannot be cut stay whole.
    """
    marks = engine.memory_marks
    if not marks.any_failed:
        return window
    if engine.reproducible:  # a part would have other bits
        return window
    numbers = [marks.parts(Shape(*shape_of(micro.batch))) for micro in window.micro_batches]
    rows = [_rows(window, i) for i in range(len(numbers))]
    if engine.forward_communicates:
        (most,) = world.all_reduce_max_host([len(numbers)])
        numbers = world.all_reduce_max_host([*numbers, *[1] * (most - len(numbers))])
    spans = [
        (i, start, stop) for i, size in enumerate(rows) for start, stop in pairwise(_ends(size, min(numbers[i], size)))
    ]
    if len(spans) == len(window.micro_batches):
        return window
    micro_batches = [_part(window, part, rows[part[0]], counter) for part in spans]
    if not _same_counts(window.micro_batches, micro_batches):
        return window
    return replace(
        window,
        micro_batches=micro_batches,
        ids=partial(_ids, window, spans, rows),
        keys=[window.own_key(i, start) or 0 for i, start, _ in spans] if window.keys else (),
        key_at=lambda n, place: window.own_key(spans[n][0], spans[n][1] + place) or 0,
        parts=[_part_of(window, part, rows[part[0]]) for part in spans] if window.keys else (),
        rows=None if window.rows is None else partial(_rows_of_part, window, spans, rows),
    )


def _rows(window: Window, i: int) -> int:
    try:
        return rows_of(window, i)
    except CannotCutError:
        return 1


def _rows_of_part(window: Window, spans: Sequence[_Part], rows: Sequence[int], n: int) -> int | None:
    i, start, stop = spans[n]
    if stop - start < rows[i]:
        return stop - start
    return None if window.rows is None else window.rows(i)  # perhaps one that cannot be cut


def _part(window: Window, part: _Part, rows: int, counter: GlobalCounter) -> MicroBatch:
    i, start, stop = part
    whole = window.micro_batches[i]
    return whole if (start, stop) == (0, rows) else counter.micro_batch(cut(whole.batch, start, stop, rows))


def _part_of(window: Window, part: _Part, rows: int) -> PartOf | None:
    i, start, stop = part
    return None if (start, stop) == (0, rows) else PartOf(Rows(start, stop, rows), window.keys[i])


def _ends(rows: int, parts: int) -> list[int]:
    return [rows * n // parts for n in range(parts + 1)]


def _ids(window: Window, spans: Sequence[_Part], rows: Sequence[int]) -> Iterator[Sequence[int]]:
    """The samples of each part; of rows that hold several each, those of the whole."""
    whole = list(window.ids())
    for i, start, stop in spans:
        yield whole[i][start:stop] if len(whole[i]) == rows[i] else whole[i]


def _same_counts(whole: Sequence[MicroBatch], parts: Sequence[MicroBatch]) -> bool:
    """Whether what is counted is the same: what counts a micro-batch and no sample must not be divided."""
    names = {name for micro in (*whole, *parts) for name in micro.counts}
    for name in names:
        before, after = (sum(micro.counts.get(name, 0.0) for micro in micros) for micros in (whole, parts))
        if abs(before - after) > 1e-6 * max(before, after):
            return False
    return True
