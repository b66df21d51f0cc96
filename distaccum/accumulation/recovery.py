"""A micro-step that runs out of memory is finished in parts; the window's gradient stays the same.

An error in the middle of a backward leaves some parameters added to and others not. Running the parts for all of them
would count the first ones twice; so the parts add to those alone that were not reached. The loss is a sum over samples,
and so is its gradient with respect to each parameter: it does not matter for which parameters it was computed at once,
and for which in parts.

That holds where a forward gives a sample the same in whatever company. Where it draws random numbers (dropout), what
is left of a backward has to come of the same forward: the same samples are run again, with the same random numbers and
their activations on the host; or else all of it is run in parts, from the gradient as it was before the micro-step.
Where the gradient is no sum over samples (batch statistics, buffers that each forward moves), no part gives what the
whole does: the whole is run again, or the window is refused.

Some samples are looked at for that before anything is done, once: ``verification.parts``.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distaccum.accumulation.batch_norm import batch_statistics
from distaccum.data.batches import to_device
from distaccum.data.cutting import CannotCutError, cut, rows_of, shape_of
from distaccum.data.window import Window
from distaccum.distributed.memory import is_out_of_memory
from distaccum.distributed.random import KeyedRandom, OtherGenerators, keys_of
from distaccum.engines.base import Engine
from distaccum.engines.buffers import ChangingBuffers
from distaccum.engines.memory_marks import Shape
from distaccum.engines.memory_report import memory_by_part
from distaccum.engines.modules import trained
from distaccum.errors import ResourceError
from distaccum.losses.base import Loss
from distaccum.losses.normalize import Counts, LossSum, as_loss_sums
from distaccum.verification.parts import Parts, look_at_rows, losses_differ, rounding_of

_log = logging.getLogger(__name__)
_LOOKS = 8
_RISING = 2  # windows in a row in which the allocator had to try again
_NO_COUNTS: Counts = {}  # of a part: its loss may be a constant
_UNKNOWN = "nobody can tell whether its gradient is a sum over samples"
_STATISTICS = "its batch normalization is over the micro-batch, and parts of it have other statistics"
_MOVES = "its forward changes buffers, and parts of it would change them once each"
_NOT_TWICE = "some parameters have their gradient already, and a second forward would draw other random numbers for it"

Span = tuple[int, int]
"""Rows of a micro-batch, from the first to before the second."""


class MicroStep(Protocol):
    """One forward, loss and backward."""

    compute: Loss
    """Of a micro-batch, by the model."""
    loss: LossSum | None
    """What the loss of the last run gave; None where it did not get so far."""

    def __call__(self, batch: Any, own_counts: Counts, parameters: Sequence[nn.Parameter] | None = None) -> LossSum:
        """Runs it on a batch that is on the device; adds to ``parameters`` alone, if they are given."""


class Records(Protocol):
    """Notes of how a window is run, to run it once more."""

    def mark(self) -> Any:
        """What was noted so far."""

    def reset(self, mark: Any) -> None:
        """Forgets what was noted since ``mark``."""

    def replace_next(self, batches: Sequence[Any]) -> None:
        """These are run in place of the micro-batch that comes next."""


@dataclass
class _Failure:
    said: str
    missing: Sequence[nn.Parameter] | None = None
    """What is still to be added to; None: everything, as the backward had not begun."""
    drawn: bool = False
    """Whether the rest has to come of a forward with the same random numbers."""
    loss_sums: Mapping[str, Tensor] | None = None
    """Where everything was reached."""


class _TornError(Exception):
    """Some parameters have a gradient of a forward that cannot be had again."""

    def __init__(self, failure: _Failure) -> None:
        super().__init__(failure.said)
        self.failure = failure


class Recovery:
    """What outlives a window of the micro-steps that an engine runs, and that are finished if memory runs out.

    Args:
        engine: only where it ``repairs``; elsewhere an error is raised as it is.
        retries: gives the allocations that the device's allocator had to try again since the start.
    """

    def __init__(self, engine: Engine, *, retries: Callable[[], int] | None = None) -> None:
        self.engine, self.buffers = engine, ChangingBuffers(engine)
        self.draws: bool | None = None
        """Whether forwards draw random numbers; None: not known yet."""
        self.draws_elsewhere: bool | None = None
        """Whether they draw from Python's or NumPy's generators; None: not known yet."""
        self.parts: Parts | None = None
        """What looks at some samples have found; None: nobody has looked."""
        self.looks = _LOOKS
        """That are left: what is no sum in some samples may be one in others."""
        self.repaired = 0
        """Micro-steps that ran out of memory, and were finished."""
        if retries is None and engine.device.type == "cuda":
            retries = _allocation_retries(engine.device)
        self._retries, self._retried, self._rising = retries, 0, 0

    @classmethod
    def of(cls, engine: Engine) -> Recovery:
        """The engine's own: the same for all of its windows."""
        if not isinstance(engine.recovery, cls):
            engine.recovery = cls(engine)
        return engine.recovery

    def note(self, found: Parts) -> None:
        """Adds what a look has found; micro-batches that may not be cut are not cut from then on."""
        self.looks -= 1
        known = self.parts or Parts()
        self.parts = Parts(
            differs=known.differs or found.differs,
            changes=known.changes or found.changes,
            again=known.again or found.again,
            draws_elsewhere=known.draws_elsewhere or found.draws_elsewhere,
        )
        if self.whole or self.parts.again:
            self.looks = 0
            self.engine.memory_marks.keep_whole()

    @property
    def whole(self) -> str:
        """Why micro-batches are not cut, in words; empty if they are, as far as is known."""
        if batch_statistics(self.engine.unwrapped_model):
            return _STATISTICS
        if self.parts is None:
            return ""
        return self.parts.differs or (_MOVES if self.parts.changes else "")

    @property
    def watches(self) -> bool:
        """Whether the allocator's retries are counted."""
        return self._retries is not None

    def runs_short(self) -> bool:
        """Whether the allocator has had to try again in two windows in a row; asked after each.

        A device that is nearly full frees its cache and tries again, which is slow.
        """
        if self._retries is None:
            return False
        found = self._retries()
        self._rising = self._rising + 1 if found > self._retried else 0
        self._retried = found
        if self._rising < _RISING:
            return False
        self._rising = 0
        return True


class WindowRecovery:
    """Runs the micro-steps of one window, and finishes those that run out of memory.

    Args:
        recovery: of the engine.
        window: has not begun.
        micro_step: of the window.
        random: around each micro-step.
        records: of the window; None where nobody notes how it is run.
    """

    def __init__(
        self, recovery: Recovery, window: Window, micro_step: MicroStep, random: KeyedRandom, records: Records | None
    ) -> None:
        self._of_all, self._window, self._micro_step = recovery, window, micro_step
        self._random, self._records = random, records
        self._engine, self._marks = recovery.engine, recovery.engine.memory_marks
        self._repairs = self._engine.repairs
        self._shapes = [shape_of(micro.batch) for micro in window.micro_batches] if self._repairs else []
        self._i = 0
        self._aside: Sequence[Tensor] | None = None  # the gradient before the micro-step, where it may be put back
        self._interrupted = False
        self._others: OtherGenerators | None = None  # before the last forward, where forwards draw from them

    def may_reduce_in(self, i: int) -> bool:
        """Whether the backward of micro-batch ``i`` may reduce as it goes, as its shape is known to fit."""
        return not self._repairs or self._marks.is_proven(self._shapes[i])

    @property
    def owes_reduction(self) -> bool:
        """Whether the last micro-step was interrupted, so that its backward has not reduced."""
        return self._interrupted

    def end(self) -> None:
        """After the window's last micro-step: lowers the mark where the allocator runs short more and more."""
        if self._shapes and self._of_all.watches and self._of_all.runs_short():
            largest = Shape(*max(self._shapes, key=lambda shape: shape[0] * shape[1]))
            with suppress(ResourceError):  # then they stay as they are
                self._look(_Failure("the allocator tries again"))
                if largest.rows > 1 and not self._of_all.whole:
                    self._marks.fail(largest)
                    _log.warning("memory is short: micro-batches from %s on are run in parts from here on", largest)

    def run(self, i: int, batch: Any, *, synced: bool) -> list[LossSum]:
        """The losses of micro-batch ``i``, which is on the device: of the whole, or of its parts.

        Args:
            i: its number in the window.
            batch: on the device.
            synced: whether its backward reduces.

        Raises:
            ResourceError: memory is over for a single sample, or the micro-batch cannot be finished.
        """
        counts = self._window.micro_batches[i].counts
        if not self._repairs:
            return [self._once(batch, counts)]
        self._i, self._interrupted, shape = i, False, Shape._make(self._shapes[i])
        known = self._marks.is_proven(shape)
        if not known and self._marks.is_too_large(shape) and (rows := self._rows_if_any()):
            self._look(_Failure("it has before"))
            if not self._of_all.whole:
                return self._in_parts((0, rows), None, self._marks.parts(shape))
        self._aside = self._set_aside() if not (synced or known) else () if i == 0 and not synced else None
        self._others = OtherGenerators() if self._of_all.draws_elsewhere is not False else None
        buffers = self._of_all.buffers.keep()
        mark = None if self._records is None else self._records.mark()
        found = self._attempt(batch, counts, None, buffers=buffers, mark=mark)
        if type(found) is not _Failure:
            self._aside = None
            if not known or self._of_all.draws is None:
                self._ran(shape)
            return [found]
        del batch
        self._marks.fail(shape, apart=False)
        place = str(self._engine.activity.now())
        self._look(found)
        try:
            whole = found.drawn or self._of_all.whole
            totals = [self._again(None, found)] if whole else self._rest((0, self._rows(found)), found)
            self._expect_sum(found, totals)
        except _TornError as torn:
            totals = self._anew(torn.failure, buffers, mark)
        self._marks.fail(shape, apart=not self._of_all.whole)
        self._of_all.repaired += 1
        self._tell(place, len(totals))
        return totals

    def _once(self, batch: Any, counts: Counts) -> LossSum:
        """Where an error ends the window; its shape is known then to whoever begins again."""
        try:
            return self._micro_step(batch, counts)
        except Exception as error:
            if is_out_of_memory(error):
                self._marks.fail(Shape(*shape_of(batch)), apart=not self._of_all.whole)
            raise

    def _look(self, failure: _Failure) -> None:
        """Looks at some samples, a few times, for whether this micro-batch may be cut, or run again.

        Raises:
            ResourceError: nobody can tell, or it may not.
        """
        if self._of_all.looks:
            rows = self._rows(failure)
            found = self._looked_at(rows, failure)
            if rows > 1 or found.again:
                self._of_all.note(found)
            self._of_all.draws_elsewhere = bool(self._of_all.draws_elsewhere or found.draws_elsewhere)
            failure.drawn |= found.draws_elsewhere and self._others is None and failure.missing is not None
        if self._of_all.parts is not None and self._of_all.parts.again:
            raise self._refusal(failure.said, self._of_all.parts.again)

    def _looked_at(self, rows: int, failure: _Failure) -> Parts:
        mark = None if self._records is None else self._records.mark()
        apart = not batch_statistics(self._engine.unwrapped_model)
        try:
            return look_at_rows(
                self._engine, self._micro_step.compute, lambda *span: self._host(span), rows, apart=apart
            )
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise self._refusal(failure.said, f"{_UNKNOWN}, some of which end in {why}") from error
        finally:
            if self._records is not None:
                self._records.reset(mark)

    # --- one attempt

    def _ran(self, shape: Shape) -> None:
        self._marks.prove(shape)
        self._of_all.buffers.learn()
        if self._of_all.draws is None:
            if self._others is not None:
                self._of_all.draws_elsewhere = self._others.have_drawn()
            self._of_all.draws = self._has_drawn(0)

    def _set_aside(self) -> Sequence[Tensor] | None:
        """The gradient before a shape that may fail; None where it will not be put back."""
        if self._i == 0:
            return ()  # nothing has accumulated
        anew = self._of_all.draws is not False and not self._of_all.whole
        return self._engine.copy_gradients() if anew else None

    def _attempt(
        self,
        batch: Any,
        counts: Counts,
        wanted: Sequence[nn.Parameter] | None,
        *,
        buffers: Callable[[], None],
        mark: Any,
        row: int = 0,
    ) -> Any:
        """The losses of a micro-batch, or of its part from ``row`` on; a failure, if memory runs out in it.

        ``buffers`` and the records are then put back to what they were before.
        """
        try:
            return self._micro_step(batch, counts, wanted)
        except Exception as error:
            if not (is_out_of_memory(error) and self._engine.repairs):
                raise
            failure = self._failure((str(error).splitlines() or [type(error).__name__])[0], wanted, row)
        # Outside of the handler: the error's frames hold what the forward has made.
        self._interrupted = True
        if failure.missing is not None and not failure.missing:
            return failure.loss_sums  # the backward had reached everything
        buffers()
        if self._records is not None:
            self._records.reset(mark)
        del batch
        gc.collect()
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()
        return failure

    def _failure(self, said: str, wanted: Sequence[nn.Parameter] | None, row: int) -> _Failure:
        reached = set(map(id, self._engine.interrupted()))
        loss, self._micro_step.loss = self._micro_step.loss, None  # its graph holds the activations
        if loss is None:  # in the forward
            return _Failure(said, wanted)
        sums = {name: part.detach() for name, part in as_loss_sums(loss).items()}
        everything = list(trained(self._engine.unwrapped_model).values()) if wanted is None else wanted
        missing = [parameter for parameter in everything if id(parameter) not in reached]
        return _Failure(said, missing, drawn=bool(reached) and self._has_drawn(row), loss_sums=sums)

    def _has_drawn(self, row: int) -> bool:
        """Without keys nobody can tell, nor draw the same again."""
        key = self._key(row)
        if self._others is not None and self._others.have_drawn():
            return True
        return key is None or self._random.has_drawn(key, self._engine.device)

    def _key(self, row: int) -> int | None:
        """Of the part of the micro-batch that begins with this row."""
        keys = self._window.keys
        if not keys or row == 0:
            return keys[self._i] if keys else None
        if self._window.key_at is not None:
            return self._window.key_at(self._i, row)
        return keys_of([row], keys[self._i])[0]

    # --- the rest

    def _rest(self, span: Span, failure: _Failure) -> list[LossSum]:
        """The losses of these rows, whose gradient is added to what is missing."""
        if failure.drawn:
            return [self._again(span, failure)]
        if span[1] - span[0] <= 1:
            raise self._refusal(failure.said, "it is a single sample")
        return self._in_parts(span, failure.missing, 2)

    def _in_parts(self, span: Span, wanted: Sequence[nn.Parameter] | None, parts: int) -> list[LossSum]:
        spans = _divided(span, parts)
        if self._records is not None:
            self._records.replace_next([self._host(one) for one in spans])
        totals: list[LossSum] = []
        for one in spans:
            batch = to_device(self._host(one), self._engine.device)
            found = self._attempt_part(one[0], batch, wanted)
            if isinstance(found, _Failure):
                self._marks.fail(Shape(*shape_of(batch)))
                del batch
                totals += self._rest(one, found)
            else:
                self._marks.prove(Shape(*shape_of(batch)))
                totals.append(found)
        return totals

    def _attempt_part(self, row: int, batch: Any, wanted: Sequence[nn.Parameter] | None) -> Any:
        if (key := self._key(row)) is not None:
            self._random.again(key)
        self._interrupted = True  # from here on the micro-step is local
        self._others = None if self._of_all.draws_elsewhere is False else OtherGenerators()
        buffers = self._of_all.buffers.keep()
        mark = None if self._records is None else self._records.mark()
        return self._attempt(batch, _NO_COUNTS, wanted, buffers=buffers, mark=mark, row=row)

    def _again(self, span: Span | None, failure: _Failure) -> LossSum:
        """The same rows, or all, with the same random numbers; on a GPU their activations wait on the host.

        Raises:
            _TornError: memory is over again.
        """
        first = 0 if span is None else span[0]
        elsewhere = self._of_all.draws_elsewhere and self._others is None  # since later than the first forward
        if self._key(first) is None or elsewhere:
            raise _TornError(failure)
        cuda = self._engine.device.type == "cuda"
        host: AbstractContextManager[object] = torch.autograd.graph.save_on_cpu() if cuda else nullcontext()
        whole = self._window.micro_batches[self._i].batch
        batch = to_device(whole if span is None else self._host(span), self._engine.device)
        if self._others is not None:
            self._others.restore()
        with host:
            found = self._attempt_part(first, batch, failure.missing)
        if isinstance(found, _Failure):
            raise _TornError(found)
        total: LossSum = found
        return total

    def _anew(self, failure: _Failure, buffers: Callable[[], None], mark: Any) -> list[LossSum]:
        """All of the micro-batch in more and more parts, from the gradient as it was before it."""
        if self._of_all.whole:
            raise self._refusal(failure.said, self._of_all.whole)
        rows, parts = self._rows(failure), 2
        while self._aside is not None and parts < 2 * rows:
            self._engine.put_gradients(self._aside)
            buffers()
            if self._records is not None:
                self._records.reset(mark)
            try:
                return self._in_parts((0, rows), None, min(parts, rows))
            except _TornError as torn:
                failure = torn.failure
            parts *= 2
        raise self._refusal(failure.said, _NOT_TWICE)

    def _host(self, span: Span) -> Any:
        return cut(self._window.micro_batches[self._i].batch, *span, rows_of(self._window, self._i))

    def _rows(self, failure: _Failure) -> int:
        try:
            return rows_of(self._window, self._i)
        except CannotCutError as error:
            raise self._refusal(failure.said, f"it cannot be cut in halves: {error}") from None

    def _rows_if_any(self) -> int:
        """More than one, or 0."""
        try:
            rows = rows_of(self._window, self._i)
        except CannotCutError:
            return 0
        return rows if rows > 1 else 0

    # --- words

    def _expect_sum(self, whole: _Failure, totals: Sequence[LossSum]) -> None:
        """Raises ResourceError where the parts' losses do not add up to that of the whole; reads the device.

        What was looked at are other samples than these, and a term of a few of them may not show there.
        """
        if whole.drawn or self._of_all.draws or len(totals) == 1:
            return
        for name, loss in (whole.loss_sums or {}).items():
            parts = [float(as_loss_sums(total)[name].detach()) for total in totals]
            if said := losses_differ(float(loss), parts, rounding_of(self._engine)):
                raise self._refusal(whole.said, said)

    def _tell(self, place: str, parts: int) -> None:
        how = f"in {parts} parts" if parts > 1 else "by running it again"
        _log.warning(
            "out of memory in %s, micro-batch %d of %d (%s) on this rank: finished %s, and the gradient is the same%s",
            place,
            self._i + 1,
            len(self._shapes),
            Shape(*self._shapes[self._i]),
            how,
            "" if self._of_all.whole else "; from here on such micro-batches are run in parts",
        )

    def _refusal(self, said: str, why: str) -> ResourceError:
        rows, elements = self._shapes[self._i]
        lower = "lower batch.micro_size (the global batch and its gradient stay the same), " if rows > 1 else ""
        remedy = f"{lower}use activation checkpointing, or an engine that shards the model (fsdp2, deepspeed)"
        return ResourceError(
            f"out of memory in {self._engine.activity.now()}, micro-batch {self._i + 1} of this rank: {said}. It has "
            f"{rows} x {elements} elements and cannot be finished in parts: {why}. {memory_by_part(self._engine)}. "
            f"{remedy[0].upper()}{remedy[1:]}"
        )


def _divided(span: Span, parts: int) -> list[Span]:
    """The span in so many parts, of which none is empty."""
    rows = span[1] - span[0]
    ends = [span[0] + rows * n // parts for n in range(parts + 1)]
    return [(start, stop) for start, stop in pairwise(ends) if stop > start]


def _allocation_retries(device: torch.device) -> Callable[[], int]:
    return lambda: int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
