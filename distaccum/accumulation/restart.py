"""A window that runs out of memory begins again with smaller micro-batches: any micro-batch gives the same gradient.

Nothing of a window leaves its rank before the boundary, so beginning again is local. The boundary's backward reduces as
it goes only where its shape is known to fit; otherwise the reduction follows it. If memory runs out in a boundary that
has begun to reduce, the rank sends NaN for the rest, and no rank steps on the window.

Parts of a micro-batch draw the random numbers of micro-batches of their own. Where the gradient is no sum over samples,
nothing is cut, and the window ends in a ResourceError: ``verification.parts`` looks at samples of the micro-batch.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distaccum.accumulation.batch_norm import batch_statistics
from distaccum.accumulation.step import LossSums, Outcome, run_window
from distaccum.data.cutting import CannotCutError, cut, rows_of, shape_of
from distaccum.data.window import MicroBatch, Window
from distaccum.distributed.activity import Phase
from distaccum.distributed.memory import is_out_of_memory, out_of_memory
from distaccum.engines.base import Engine, Restart
from distaccum.engines.memory_marks import memory_by_part
from distaccum.errors import ResourceError
from distaccum.losses.base import InOrder, Loss

if TYPE_CHECKING:
    from distaccum.verification.recorded import RecordedWindow

_log = logging.getLogger(__name__)
_STATISTICS = "its batch normalization is over the micro-batch, and parts of it have other statistics"
_SINGLE = "it is a single sample"


class Restarting:
    """Runs windows, and begins one again with smaller micro-batches where memory runs out.

    Args:
        engine: runs the micro-steps. Where it does not restart windows, an error is raised as it is, and its shape is
            marked for the next start.
        run: one window.
    """

    def __init__(self, engine: Engine, run: Callable[..., Outcome] = run_window) -> None:
        self._engine, self._run, self._marks = engine, run, engine.memory_marks

    def run(self, window: Window, loss: Loss, records: RecordedWindow | None = None, **options: Any) -> Outcome:
        """Runs ``window``, as often as memory runs out in it.

        Args:
            window: has not begun.
            loss: of a micro-batch.
            records: of what is run; None where nobody notes it.
            options: of ``run``.

        Raises:
            ResourceError: a micro-batch that does not fit cannot be cut.
        """
        engine, marks = self._engine, self._marks
        restarts = engine.restart is not Restart.REFUSED
        while True:
            plan = fitting(window, engine) if restarts else window
            shapes = [shape_of(micro.batch) for micro in plan.micro_batches] if restarts else []
            engine.defer_reduction = bool(shapes) and not marks.is_proven(shapes[-1])
            if records is not None:
                records.begin(plan)
            try:
                outcome = self._run(engine, plan, loss if records is None else records.recording(loss), **options)
                break
            except Exception as error:
                said = self._said(error, plan, loss)
            gc.collect()  # outside of the handler: the error's frames hold what the forward has made
            if engine.device.type != "cpu":
                torch.get_device_module(engine.device).empty_cache()
            if engine.restart is Restart.TOO_LATE:
                return self._give_up(plan, said)
            self._mark(plan, loss, said)
            engine.zero_gradients()
        for shape in set(shapes):
            marks.prove(shape)
        return outcome

    def _said(self, error: Exception, plan: Window, loss: Loss) -> str:
        """The error in a line; raises it where the window does not begin again."""
        engine = self._engine
        if not is_out_of_memory(error):
            raise error
        stepped = engine.activity.phase is Phase.STEP  # weights may have moved
        broken = isinstance(error, dist.DistBackendError)  # its communicator is, too
        whole = stepped or broken or not plan.micro_batches or isinstance(loss, InOrder)  # nothing is cut
        if engine.restart is Restart.REFUSED and not whole:
            shape = shape_of(plan.micro_batches[engine.activity.done].batch)
            self._marks.fail(shape, apart=not batch_statistics(engine.unwrapped_model))
        if whole or engine.restart is Restart.REFUSED:
            raise out_of_memory(error, engine.world) from error
        return (str(error).splitlines() or [type(error).__name__])[0]

    def _mark(self, plan: Window, loss: Loss, said: str) -> None:
        """Marks the shape of the micro-batch that failed as too large; ResourceError where it cannot be cut."""
        i, place = self._engine.activity.done, self._engine.activity.now()
        shape = shape_of(plan.micro_batches[i].batch)
        why = why_whole(self._engine, plan, i, loss, [micro.batch for micro in plan.micro_batches[:i]])
        self._marks.fail(shape, apart=not why)
        if why:
            same = "the global batch and its gradient stay the same"
            lower = f"Lower batch.micro_size ({same}), use" if shape.rows > 1 else "Use"
            raise ResourceError(
                f"out of memory in {place}, micro-batch {i + 1} of this rank: {said}. It has {shape.rows} x "
                f"{shape.elements} elements and cannot be finished in parts: {why}. {memory_by_part(self._engine)}. "
                f"{lower} activation checkpointing, or an engine that shards the model (fsdp2, deepspeed)"
            )
        self._marks.looked = True
        _log.warning(
            "out of memory in %s, micro-batch %d of %d (%s) on this rank: the step begins again, and the gradient is "
            "the same; from here on such micro-batches are run in parts",
            place,
            i + 1,
            len(plan.micro_batches),
            shape,
        )

    def _give_up(self, plan: Window, said: str) -> Outcome:
        """Ends a window of which the other ranks have a part: they get NaN for the rest, and no rank steps."""
        engine, place = self._engine, self._engine.activity.now()
        self._marks.fail(shape_of(plan.micro_batches[-1].batch), apart=False)  # which defers its reduction
        engine.give_up()
        why = f"rank {engine.world.rank} gave up its window, out of memory in {place}: {said}"
        step = replace(engine.step(), given_up=why)
        return LossSums(engine.device, plan.assignment).outcome(plan.counts, step)


def why_whole(engine: Engine, window: Window, i: int, loss: Loss, before: Sequence[Any] = ()) -> str:
    """In words, why micro-batch ``i`` cannot be cut; empty where it can.

    Runs the model on some of its samples, and on the batches that have been run ``before`` it.
    """
    if batch_statistics(engine.unwrapped_model):
        return _STATISTICS
    try:
        rows = rows_of(window, i)
    except CannotCutError as error:
        return f"it cannot be cut in halves: {error}"
    if rows <= 1:
        return _SINGLE
    from distaccum.verification.parts import why_not_cut  # noqa: PLC0415  few windows run out of memory

    batch = window.micro_batches[i].batch
    return why_not_cut(engine, loss, lambda start, stop: cut(batch, start, stop, rows), before)


def check_marks(engine: Engine, window: Window, loss: Loss) -> None:
    """Looks at some samples before windows are cut by marks of an earlier process; once, a collective where a forward
    is one. Where some rank has no samples in the window, that waits for the next one.

    Raises:
        ResourceError: parts of a micro-batch do not give what the whole does; on all ranks where a forward is a
            collective.
    """
    together, world = engine.facts.forward_communicates, engine.world
    rows = _rows(window)
    most = max(rows, default=0)
    if together:  # as many forwards on every rank
        most = -world.all_reduce_max_host([-most])[0]
    if most <= 1:
        return
    why = why_whole(engine, window, rows.index(max(rows)), loss)
    said = world.all_gather_names([why] if why else []) if together else [why] if why else []
    if said:
        raise ResourceError(
            f"micro-batches of {', '.join(map(str, engine.memory_marks.failed))} have run out of memory before, and "
            f"parts of them would give another gradient: {said[0]}. Lower batch.micro_size"
        )
    engine.memory_marks.looked = True


def fitting(window: Window, engine: Engine, count: Callable[[Any], MicroBatch] | None = None) -> Window:
    """The window with micro-batches that fit, as far as the engine's marks say; the counts stay the same.

    Where a forward is a collective all ranks run as many parts of their n-th micro-batch, which is a collective too.
    Micro-batches that cannot be cut stay whole.

    Args:
        window: has not begun.
        engine: knows the marks.
        count: of a part; None where the window's is enough, as a part's loss may be a constant.
    """
    marks = engine.memory_marks
    if not marks.failed or engine.facts.numerics.fixed_order:  # a part would have other bits
        return window
    rows = _rows(window)
    numbers = [marks.parts(shape_of(micro.batch)) for micro in window.micro_batches]
    if engine.facts.forward_communicates:
        (most,) = engine.world.all_reduce_max_host([len(numbers)])
        numbers = engine.world.all_reduce_max_host([*numbers, *[1] * (most - len(numbers))])
    spans = [
        (i, start, stop)
        for i, size in enumerate(rows)
        for start, stop in pairwise(size * n // min(numbers[i], size) for n in range(min(numbers[i], size) + 1))
    ]
    if len(spans) == len(window.micro_batches):
        return window
    parts = []
    for i, start, stop in spans:
        whole = window.micro_batches[i]
        if stop - start < rows[i]:
            part = cut(whole.batch, start, stop, rows[i])
            whole = count(part) if count else MicroBatch(part, {})
        parts.append(whole)
    if count and not _same_counts(window.micro_batches, parts):
        return window

    def ids() -> list[Sequence[int]]:
        """The samples of each part; of rows that hold several each, those of the whole."""
        whole = list(window.ids())
        return [whole[i][start:stop] if len(whole[i]) == rows[i] else whole[i] for i, start, stop in spans]

    def rows_of_part(n: int) -> int | None:
        i, start, stop = spans[n]
        assert window.rows is not None
        return stop - start if stop - start < rows[i] else window.rows(i)  # perhaps one that cannot be cut

    return replace(
        window,
        micro_batches=parts,
        ids=ids,
        keys=[window.own_key(i, start) or 0 for i, start, _ in spans] if window.keys else (),
        key_at=lambda n, place: window.own_key(spans[n][0], spans[n][1] + place) or 0,
        rows=rows_of_part,
    )


def _rows(window: Window) -> list[int]:
    """Of each micro-batch; 1 of one that cannot be cut."""
    found = []
    for i in range(len(window.micro_batches)):
        try:
            found.append(rows_of(window, i))
        except CannotCutError:
            found.append(1)
    return found


def _same_counts(whole: Sequence[MicroBatch], parts: Sequence[MicroBatch]) -> bool:
    """Whether what is counted is the same: what counts a micro-batch and no sample must not be divided."""
    return all(
        math.isclose(*(sum(micro.counts.get(name, 0.0) for micro in micros) for micros in (whole, parts)), rel_tol=1e-6)
        for name in {name for micro in (*whole, *parts) for name in micro.counts}
    )
