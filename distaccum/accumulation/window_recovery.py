"""A micro-step that runs out of memory is finished in parts; the window's gradient stays the same.

An error in the middle of a backward leaves some parameters added to and others not. Running the parts for all of them
would count the first ones twice; so the parts add to those alone that were not reached. The loss is a sum over samples,
and so is its gradient with respect to each parameter: it does not matter for which parameters it was computed at once,
and for which in parts.

That holds where a forward gives a sample the same in whatever company. Where it draws random numbers (dropout), its
parts take their rows of what the whole draws (``distributed.sliced_random``). Where nobody can say which these are, the
whole is run again with the same numbers and its activations on the host; or else all of it is run in parts that draw
their own, from the gradient as it was before the micro-step. Where the gradient is no sum over samples (batch
statistics, buffers that each forward moves), no part gives what the whole does: the whole is run again, or the window
is refused.

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
from distaccum.accumulation.recovery import Recovery
from distaccum.data.batches import to_device
from distaccum.data.cutting import CannotCutError, cut, rows_of, shape_of
from distaccum.data.window import Window
from distaccum.distributed.memory import is_out_of_memory
from distaccum.distributed.random import KeyedRandom, OtherGenerators
from distaccum.distributed.sliced_random import CannotSliceError, Rows, SlicedRandom
from distaccum.engines.buffers import nothing
from distaccum.engines.memory_marks import Shape
from distaccum.engines.memory_report import memory_by_part
from distaccum.engines.modules import trained
from distaccum.errors import ResourceError
from distaccum.losses.base import Loss
from distaccum.losses.normalize import Counts, LossSum, as_loss_sums
from distaccum.verification.parts import Parts, look_at_rows, losses_differ, rounding_of

_log = logging.getLogger(__name__)
_NO_COUNTS: Counts = {}  # of a part: its loss may be a constant
_UNKNOWN = "nobody can tell whether its gradient is a sum over samples"
_SINGLE = "it is a single sample"
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

    def recording(self, loss: Loss) -> Loss:
        """``loss``, noting what it takes to run it again."""

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
    reached: bool = False
    """Whether something was added to."""
    drawn: bool = False
    """Whether the forward has drawn from torch's generators."""
    loss_sums: Mapping[str, Tensor] | None = None
    """Where the forward came to its end."""
    unlike: bool = False
    """Whether it is not memory that was over: a part draws what cannot be cut."""


class _TornError(Exception):
    """Some parameters have a gradient of a forward that cannot be had again."""

    def __init__(self, failure: _Failure) -> None:
        super().__init__(failure.said)
        self.failure = failure


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
        self._failed: list[Shape] = []  # marked when the window has ended
        self._i = 0
        self._aside: Sequence[Tensor] | None = None  # the gradient before the micro-step, where it may be put back
        self._interrupted = False
        self._touched = False  # whether a part of the micro-batch's gradient was added to some parameter
        self._apart = False  # whether its parts draw the random numbers of micro-batches of their own
        self._key: int | None = None  # of the last forward's random numbers; None: they have none
        self._of_whole: tuple[int | None, SlicedRandom | None] = None, None  # of the first: its key, and what cuts it
        self._first: OtherGenerators | None = None  # before the first forward, where forwards draw from them
        self._others: OtherGenerators | None = None  # before the last one

    def may_reduce_in(self, i: int) -> bool:
        """Whether the backward of micro-batch ``i`` may reduce as it goes, as its shape is known to fit."""
        return not self._repairs or self._marks.is_proven(self._shapes[i])

    @property
    def owes_reduction(self) -> bool:
        """Whether the last micro-step was interrupted, so that its backward has not reduced."""
        return self._interrupted

    def end(self) -> None:
        """After the window's last micro-step: lowers the mark where the allocator runs short more and more."""
        for shape in self._failed:
            self._marks.fail(shape, apart=not self._of_all.whole)
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
        counts, self._i = self._window.micro_batches[i].counts, i
        self._key, random = self._window.keys[i] if self._window.keys else None, None
        if self._window.parts:
            self._key, random = self._of_all.random_of(self._window, i)
            self._seed()
        self._of_whole = self._key, random
        if not self._repairs:
            return [self._once(batch, counts, random)]
        self._interrupted = self._touched = self._apart = False
        sizes = self._shapes[i]
        known = sizes in self._marks.seen or self._marks.is_proven(sizes)
        if not known and self._marks.is_too_large(Shape(*sizes)) and (rows := self._rows_if_any()):
            self._look(_Failure("it has before"))
            if not self._of_all.whole:
                return self._known_too_large(Shape(*sizes), rows)
        self._aside = self._set_aside() if not (synced or known) else () if i == 0 and not synced else None
        self._first = self._others = OtherGenerators() if self._of_all.draws_elsewhere is not False else None
        buffers = nothing if self._of_all.buffers.none else self._of_all.buffers.keep()
        mark = None if self._records is None else self._records.mark()
        failure = None
        try:  # no call of ours around it
            total = self._micro_step(batch, counts) if random is None else self._cut(batch, counts, None, random)
        except Exception as error:
            failure = self._failure(error, None)
        # Outside of the handler: the error's frames hold what the forward has made.
        found = total if failure is None else self._what_is_left(failure, buffers, mark)
        if not isinstance(found, _Failure):
            self._aside = None
            if not known or self._of_all.draws is None:
                self._ran(Shape(*sizes))
            return [found]
        shape = Shape(*sizes)
        del batch
        self._marks.fail(shape, apart=False)
        place = str(self._engine.activity.now())
        self._look(found)
        try:
            totals = self._finish(found)
        except _TornError as torn:
            everything = None if found.missing is None else self._everything()
            totals = self._anew(torn.failure, everything, buffers, mark)
        if self._of_all.draws_uncut and not self._apart:  # the window's others would draw other numbers in parts
            self._failed.append(shape)
        else:
            self._marks.fail(shape, apart=not self._of_all.whole)
        self._of_all.repaired += 1
        self._tell(place, len(totals))
        return totals

    def _known_too_large(self, shape: Shape, rows: int) -> list[LossSum]:
        """The losses of a micro-batch that is run in parts at once."""
        self._aside, self._apart = self._set_aside(), self._of_all.draws_uncut
        self._first = OtherGenerators() if self._of_all.draws_elsewhere is not False else None
        buffers = self._of_all.buffers.keep()
        mark = None if self._records is None else self._records.mark()
        try:
            return self._in_parts((0, rows), None, self._marks.parts(shape))
        except _TornError as torn:
            return self._anew(torn.failure, None, buffers, mark)

    def _finish(self, failure: _Failure) -> list[LossSum]:
        """The losses of what is left of a micro-batch, with the random numbers that its forward had.

        Raises:
            _TornError: it is not finished.
        """
        if failure.reached and self._of_all.draws_elsewhere and self._first is None:  # since later than that forward
            raise _TornError(failure)
        if self._of_all.whole or ((failure.drawn or self._of_all.draws_uncut) and not self._slices):
            return [self._again(None, failure)]
        touched, self._touched = self._touched, False
        try:
            totals = self._rest((0, self._rows(failure)), failure)
            self._expect_sum(failure, totals)
        except _TornError:
            if self._touched:
                raise
            return [self._again(None, failure)]
        finally:
            self._touched |= touched
        return totals

    def _once(self, batch: Any, counts: Counts, random: SlicedRandom | None) -> LossSum:
        """Where an error ends the window; its shape is known then to whoever begins again."""
        try:
            return self._micro_step(batch, counts) if random is None else self._cut(batch, counts, None, random)
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
            self._of_all.draws = bool(self._of_all.draws_elsewhere) or self._has_drawn()

    def _set_aside(self) -> Sequence[Tensor] | None:
        """The gradient before a shape that may fail; None where it will not be put back."""
        if self._i == 0:
            return ()  # nothing has accumulated
        anew = self._of_all.draws is not False and not self._of_all.whole and not self._slices
        return self._engine.copy_gradients() if anew else None

    def _failure(self, error: Exception, wanted: Sequence[nn.Parameter] | None) -> _Failure:
        """What an error has left of a micro-step; raises it where memory is not what it is about."""
        unlike = isinstance(error, CannotSliceError)
        if not unlike and not (is_out_of_memory(error) and self._engine.repairs):
            raise error
        said = (str(error).splitlines() or [type(error).__name__])[0]
        reached = set(map(id, self._engine.interrupted()))
        loss, self._micro_step.loss = self._micro_step.loss, None  # its graph holds the activations
        drawn = self._has_drawn()
        if loss is None:  # in the forward
            return _Failure(said, wanted, drawn=drawn, unlike=unlike)
        sums = {name: part.detach() for name, part in as_loss_sums(loss).items()}
        everything = self._everything() if wanted is None else wanted
        missing = [parameter for parameter in everything if id(parameter) not in reached]
        return _Failure(said, missing, reached=bool(reached), drawn=drawn, loss_sums=sums, unlike=unlike)

    def _what_is_left(self, failure: _Failure, buffers: Callable[[], None], mark: Any) -> Any:
        """The failure, or the losses where the backward had reached everything.

        Buffers and records are put back to what they were before the forward.

        Raises:
            _TornError: a part's random numbers cannot be cut.
        """
        self._interrupted = True
        self._touched |= failure.reached
        if failure.missing is not None and not failure.missing:
            return failure.loss_sums
        buffers()
        if self._records is not None:
            self._records.reset(mark)
        gc.collect()
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()
        if failure.unlike:
            self._of_all.cannot_slice(failure.said)
            raise _TornError(failure)
        return failure

    def _cut(self, batch: Any, counts: Counts, wanted: Sequence[nn.Parameter] | None, random: SlicedRandom) -> LossSum:
        """A micro-step of a part, whose random numbers are those that its rows have in the whole."""
        with random:
            total = self._micro_step(batch, counts, wanted)
        if random.lost:
            self._of_all.cannot_slice(random.lost)
        return total

    def _everything(self) -> Sequence[nn.Parameter]:
        return list(trained(self._engine.unwrapped_model).values())

    # --- random numbers

    @property
    def _slices(self) -> bool:
        """Whether parts have the random numbers that their rows have in the whole."""
        return bool(self._of_all.slices and self._window.keys) and not self._apart

    def _seed(self) -> None:
        if self._key is not None:
            self._random.again(self._key)

    def _begin(self, span: Span | None) -> SlicedRandom | None:
        """Seeds the generators for a part of the micro-batch, or for all of it; gives what cuts its numbers."""
        key, whole = self._of_whole
        random = None if whole is None else whole.anew()
        if span is not None and self._slices:
            rows = Rows(*span, rows_of(self._window, self._i))
            random = SlicedRandom(rows if whole is None else rows.within(whole.rows), self._of_all.slices)
        elif span is not None:
            key, random = self._window.own_key(self._i, span[0]), None
        self._key = key
        self._seed()
        return random

    def _has_drawn(self) -> bool:
        """Whether torch has, since the last forward began. Without keys nobody can tell, nor draw the same again."""
        return self._key is None or self._random.has_drawn(self._key, self._engine.device)

    # --- the rest

    def _rest(self, span: Span, failure: _Failure) -> list[LossSum]:
        """The losses of these rows, whose gradient is added to what is missing."""
        elsewhere = self._apart and self._of_all.draws_elsewhere
        if failure.reached and (failure.drawn or elsewhere) and not self._slices:
            return [self._again(span, failure)]
        if span[1] - span[0] <= 1:
            raise self._refusal(failure.said, _SINGLE)
        return self._in_parts(span, failure.missing, 2)

    def _in_parts(self, span: Span, wanted: Sequence[nn.Parameter] | None, parts: int) -> list[LossSum]:
        spans = _divided(span, parts)
        if self._records is not None:
            self._records.replace_next([self._host(one) for one in spans])
        totals: list[LossSum] = []
        for one in spans:
            batch = to_device(self._host(one), self._engine.device)
            found = self._attempt_part(one, batch, wanted)
            if isinstance(found, _Failure):
                self._marks.fail(Shape(*shape_of(batch)))
                del batch
                totals += self._rest(one, found)
            else:
                self._marks.prove(Shape(*shape_of(batch)))
                totals.append(found)
        return totals

    def _attempt_part(self, span: Span | None, batch: Any, wanted: Sequence[nn.Parameter] | None) -> Any:
        random = self._begin(span)
        if self._first is not None and not self._apart:
            self._first.restore()
        self._interrupted = True  # from here on the micro-step is local
        self._others = None if self._of_all.draws_elsewhere is False else OtherGenerators()
        buffers = self._of_all.buffers.keep()
        mark = None if self._records is None else self._records.mark()
        try:
            if random is not None:
                total = self._cut(batch, _NO_COUNTS, wanted, random)
            else:
                total = self._micro_step(batch, _NO_COUNTS, wanted)
        except Exception as error:
            failure = self._failure(error, wanted)
        else:
            self._touched = True
            return total
        del batch
        return self._what_is_left(failure, buffers, mark)

    def _again(self, span: Span | None, failure: _Failure) -> LossSum:
        """The same rows, or all, with the same random numbers; on a GPU their activations wait on the host.

        Raises:
            _TornError: memory is over again.
        """
        if self._key is None:
            raise _TornError(failure)
        cuda = self._engine.device.type == "cuda"
        host: AbstractContextManager[object] = torch.autograd.graph.save_on_cpu() if cuda else nullcontext()
        whole = self._window.micro_batches[self._i].batch
        batch = to_device(whole if span is None else self._host(span), self._engine.device)
        if self._others is not None:
            self._others.restore()
        with host:
            found = self._attempt_part(span, batch, failure.missing)
        if isinstance(found, _Failure):
            raise _TornError(found)
        total: LossSum = found
        return total

    def _anew(
        self, failure: _Failure, wanted: Sequence[nn.Parameter] | None, buffers: Callable[[], None], mark: Any
    ) -> list[LossSum]:
        """All of the micro-batch in more and more parts, from the gradient as it was before it.

        ``wanted`` are all parameters, by name where a backward has begun that reduces: its hooks may not fire again.
        """
        if self._of_all.whole:
            raise self._refusal(failure.said, self._of_all.whole)
        rows, parts, self._apart = self._rows(failure), 2, True
        while parts < 2 * rows and not (self._touched and self._aside is None):
            if self._touched and self._aside is not None:
                self._engine.put_gradients(self._aside)
            buffers()
            if self._records is not None:
                self._records.reset(mark)
            try:
                return self._in_parts((0, rows), wanted, min(parts, rows))
            except _TornError as torn:
                failure = torn.failure
            parts *= 2
        raise self._refusal(failure.said, _NOT_TWICE if self._touched else _SINGLE)

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
        if len(totals) == 1:
            return
        for name, loss in (whole.loss_sums or {}).items():
            parts = [float(as_loss_sums(total)[name].detach()) for total in totals]
            if said := losses_differ(float(loss), parts, rounding_of(self._engine)):
                if self._slices:
                    self._of_all.cannot_slice(said)
                    raise _TornError(whole)
                raise self._refusal(whole.said, said)

    def _tell(self, place: str, parts: int) -> None:
        how = f"in {parts} parts" if parts > 1 else "by running it again"
        apart = ", with random numbers of their own" if self._of_all.draws_uncut else ""
        _log.warning(
            "out of memory in %s, micro-batch %d of %d (%s) on this rank: finished %s, and the gradient is the same%s",
            place,
            self._i + 1,
            len(self._shapes),
            Shape(*self._shapes[self._i]),
            how,
            "" if self._of_all.whole else "; from here on such micro-batches are run in parts" + apart,
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
