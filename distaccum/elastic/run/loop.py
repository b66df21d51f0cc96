"""The loop of an elastic run: what a window is still owed when ranks are lost is done by those that are left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distaccum.accumulation.open_window import OpenWindow
from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.data.window import Window
from distaccum.distributed.random import RNGState
from distaccum.elastic.engine.ddp import own_state, resumable, shares_of
from distaccum.elastic.engine.shares import Shares
from distaccum.elastic.group.polled_group import ViewChangedError
from distaccum.elastic.run.carried import Begun, Carried, Tail
from distaccum.elastic.run.memory_checkpoint import MemoryCheckpoints
from distaccum.engines.state import whole_state
from distaccum.errors import DistaccumError, MisuseError, NonFiniteError, SpikeError
from distaccum.losses.base import is_window_loss
from distaccum.train import ema
from distaccum.train.callbacks import Callback
from distaccum.train.loop import Loop, TrainingRun
from distaccum.train.metrics.loggers import last_window, records_of
from distaccum.train.part import Part

_ASKED = "a rank that is lost asked to stop"


class ElasticLoop(Loop):
    """Trains among the ranks of a view; what a window is owed is done before the next one.

    Args:
        run: what is trained.
        parts: see :class:`~distaccum.train.loop.Loop`.
        before: what the view before has left to do; its weights and optimizer state are not kept here.
        memory: where a lost rank takes a part of the state with it: checkpoints in memory.
    """

    _passes = (ViewChangedError,)

    def __init__(
        self, run: TrainingRun, parts: Sequence[Part], *, before: Carried | None, memory: MemoryCheckpoints | None
    ) -> None:
        super().__init__(run if before is None else replace(run, saved_step=before.saved_step), parts)
        self._watched = True
        self._telling: tuple[int, dict[str, float]] | None = None  # one that callbacks are still to be told of
        self._called = ("", 0)  # the hook that callbacks are being called by, and of how many it was
        self._owed: tuple[Window, Outcome] | None = None  # what is still to be done for it: see ``STAGES``
        self._stage = 0
        # Of the view before, until a window is run here:
        self._lr_before: float | None = None
        self._begun_before: tuple[Begun, Progress] | None = None
        self._shares_before: tuple[Shares, Progress] | None = None
        self._begins_at = None if before is None else self._accumulator.progress  # with what the view before has left
        self._ends: DistaccumError | None = None
        self._record: Mapping[str, Any] | None = None  # the last one, which nobody may have written
        self._written, self._proven = 0, False
        self._memory = memory
        if before is not None:
            self._go_on_from(before)

    def _go_on_from(self, before: Carried) -> None:
        """What the view before has left to do; see :class:`Carried`."""
        if before.tail is not None:
            self._owed, self._stage = before.tail.of, before.tail.stage
        if before.unlogged is not None:
            self._unlogged = before.unlogged.of
        if (last := before.tail or before.unlogged) is not None:
            self._lr_before = last.lr
        if before.begun is not None:
            self._begun_before = before.begun, self._accumulator.progress
        if before.shares is not None:
            self._shares_before = before.shares, self._accumulator.progress
        self._evaluation, self._telling, self._called = before.evaluation, before.telling, before.called
        self._record, self._ends, self._reason, self._proven = before.record, before.ends, before.stop, before.verified
        if before.stopping and not before.stop:
            self._preempted_by = _ASKED

    def _begin(self) -> None:
        """Does what the view before has left: its last record, what its last window is owed, and its error.

        A stop that was asked for stays so.
        """
        if self._reason or self._preempted_by:
            self._accumulator.stop()
        if self._world.is_main:
            self._written = last_window(self._run_dir.metrics)
            if self._record is not None:
                self._write(self._record)
        if self._memory is not None:  # what was kept before is of other ranks
            self.keep_in_memory()
        if self._owed is not None:
            window, outcome = self._owed
            (super()._pay if outcome.applied else super()._pay_skip)(window, outcome, self.progress)
            self._owed = None
        elif self._called[0] == "on_checkpoint":  # of a save that no window is owed, as the last one
            self._save(best=self._is_best())
        if self._ends is not None:
            raise self._ends

    def step_window(self, window: OpenWindow) -> None:
        """See :class:`~distaccum.train.loop.Loop`."""
        super().step_window(window)
        if self._memory is not None and self._memory.window_ended(self.progress.window, self._saver.saved_step):
            self.keep_in_memory()

    def _pay(self, window: Window, outcome: Outcome, progress: Progress) -> None:
        self._owe(window, outcome)
        super()._pay(window, outcome, progress)
        self._owed = None

    def _pay_skip(self, window: Window, outcome: Outcome, progress: Progress) -> None:
        self._owe(window, outcome)
        super()._pay_skip(window, outcome, progress)
        self._owed = None

    def _owe(self, window: Window, outcome: Outcome) -> None:
        self._lr_before = self._begun_before = self._shares_before = None
        self._owed, self._stage = (window, outcome), 0

    def _do(self, *steps: Callable[[], None]) -> None:
        """Where ranks are lost meanwhile, those of the next view go on at this stage."""
        for number, step in enumerate(steps):
            if number >= self._stage:
                step()
                self._stage = number + 1

    def _call(self, name: str, hook: Callable[[Callback], None]) -> None:
        """Where a rank was lost in a hook, calls it of those that come after the last that ended."""
        if self._called[0] != name:
            self._called = (name, 0)
        for number, callback in enumerate(self._components.callbacks):
            if number >= self._called[1]:
                self._call_one(callback, hook)
                self._called = (name, number + 1)
        self._called = ("", 0)

    def _results(self, step: int) -> dict[str, float]:
        """This step's evaluation, where the ranks of the view before have made it, is not made again."""
        known = (one for one in (self._evaluation, self._telling) if one is not None and one[0] == step)
        found = next(known, None)
        return super()._results(step) if found is None else found[1]

    def _tell_results(self, step: int, found: dict[str, float]) -> None:
        if self._evaluation is None or self._evaluation[0] != step:  # else they were told in the view before
            self._telling = (step, found)
            super()._tell_results(step, found)
            self._telling = None

    @property
    def _facts(self) -> Mapping[str, Any]:
        return {"ranks": self._world.size}

    @property
    def _lr(self) -> float:
        return super()._lr if self._lr_before is None else self._lr_before

    def _write(self, record: Mapping[str, Any]) -> None:
        self._record = record
        if record["window"] > self._written:
            super()._write(record)

    def _is_written(self, values: Mapping[str, Any]) -> bool:
        """Whether the last record has these values, by which it is the one that the view before was to write."""
        if self._begins_at is None:
            return False
        (last,) = deque(records_of(self._run_dir.metrics), maxlen=1) or ({},)
        return all(key in last and last[key] == value for key, value in values.items())

    @property
    def _may_be_saved(self) -> bool:
        """Whether the view before may have saved the present state: nothing has been run here since."""
        return self._begins_at is not None and self._begins_at == self.progress

    def _finish(self) -> dict[str, float]:
        results = super()._finish()
        if not self.preempted:
            self._called = ("on_end", len(self._components.callbacks))  # not again, if a rank is lost from here on
        return results

    def carried(self) -> Carried:
        """What this rank has, where another one was lost; no collective."""
        accumulator, random = self._accumulator, RNGState.capture(self._world.device)
        begun, stepped = accumulator.interrupted(), self._last
        self._last = None
        if isinstance(begun, tuple):
            begun, stepped = None, begun
        progress = self._tracker.progress
        if stepped is not None:
            self._owed, self._stage, self._lr_before = stepped, 0, None
        lr, kept = self._lr, None
        if begun is not None and begun.deal is not None and not is_window_loss(self._components.loss):
            kept = Begun.of(progress, begun, begun.deal, resumable(accumulator.engine).kept)
        elif self._begun_before is not None and self._begun_before[1] == progress:  # nobody has begun it again
            kept, _ = self._begun_before
        average = ema.of(self._components.callbacks)
        engine = accumulator.engine
        shares = shares_of(engine)
        if shares is not None and self._shares_before is not None and self._shares_before[1] == progress:
            shares = shares.with_those_of(self._shares_before[0])
        return Carried(
            run=self._saver.run_state(self._logged),
            engine=whole_state(engine, self._world) if shares is None else own_state(engine, shares),
            shares=shares,
            average=None if average is None else {n: t.clone() for n, t in average.whole(lambda _: True).items()},
            tail=None if self._owed is None else Tail.after(*self._owed, lr, self._stage),
            unlogged=None if self._unlogged is None else Tail.after(*self._unlogged, lr),
            called=self._called,
            telling=self._telling,
            skips_in_a_row=self._tracker.skips_in_a_row,
            ends=self._ends or self._what_ends_it(),
            saved_step=self._saver.saved_step,
            evaluation=self._evaluation,
            record=self._record,
            stop=self._agreed_stop or self._reason,
            stopping=accumulator.stopping,
            counted=accumulator.counted,
            verified=self._proven or bool(accumulator.verified),
            random=random,
            begun=kept,
        )

    def keep_in_memory(self) -> None:
        """Makes a checkpoint in memory, with all that was due done; a collective between two windows."""
        assert self._memory is not None
        self._memory.take(self._share)

    def _share(self) -> Carried:
        """What this rank keeps of the run, for all of them; a collective."""
        average = ema.of(self._components.callbacks)
        size, rank = self._world.size, self._world.rank
        return Carried(
            run=self._saver.run_state(self._logged),
            engine=self._accumulator.engine.state(),
            average=None if average is None else average.whole(lambda i: i % size == rank),
            tail=None,
            unlogged=None if self._unlogged is None else Tail.after(*self._unlogged, super()._lr),
            skips_in_a_row=self._tracker.skips_in_a_row,
            saved_step=self._saver.saved_step,
            evaluation=self._evaluation,
            record=self._record,
            stop=self._reason,
            counted=self._accumulator.counted,
            verified=self._proven or bool(self._accumulator.verified),
            random=RNGState.capture(self._world.device),
        )

    @property
    def _agreed_stop(self) -> str:
        """Why the run stops, where all ranks know that it does; the one that knows more may be lost."""
        if self.preempted:
            return ""
        return self.stop_reason or (_ASKED if self._ended else "")

    def _what_ends_it(self) -> DistaccumError | None:
        """The error that all ranks were about to raise together; as far as this one can tell of it."""
        try:
            self._tracker.raise_if_nonfinite(together=False)
        except NonFiniteError as error:
            return NonFiniteError(f"{error}. A rank was lost before all had told what they know of it")
        except (SpikeError, MisuseError) as error:
            return type(error)(*error.args)  # without the frames, which hold the engine
        return None
