"""The loop of an elastic run: what a window is still owed when ranks are lost is done by those that are left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distaccum.accumulation.progress import Progress
from distaccum.distributed.random import RNGState
from distaccum.elastic.engine.ddp import own_state, resumable, shares_of
from distaccum.elastic.engine.shares import Shares
from distaccum.elastic.group.polled_group import ViewChangedError
from distaccum.elastic.run.carried import Begun, Carried, plain
from distaccum.elastic.run.memory_checkpoint import MemoryCheckpoints
from distaccum.engines.state import whole_state
from distaccum.errors import DistaccumError, MisuseError, NonFiniteError, SpikeError
from distaccum.losses.base import is_window_loss
from distaccum.program import LAST_WINDOW, load
from distaccum.train import ema
from distaccum.train.loop import Loop, TrainingRun
from distaccum.train.metrics.loggers import records_of
from distaccum.train.parts.base import Done, Part
from distaccum.train.parts.checkpoints import Checkpoints

_ASKED = "a rank that is lost asked to stop"


class ElasticLoop(Loop):
    """Trains among the ranks of a view; what a window is owed is done before the next one.

    What is still owed when a rank is lost is a place in the list of parts: of each method that parts were being called
    by, how many had ended.

    Args:
        run: what is trained.
        parts: see :class:`~distaccum.train.loop.Loop`.
        before: what the view before has left to do; its weights and optimizer state are not kept here.
        memory: where a lost rank takes a part of the state with it: checkpoints in memory.
    """

    passes = (ViewChangedError,)

    def __init__(
        self, run: TrainingRun, parts: Sequence[Part], *, before: Carried | None, memory: MemoryCheckpoints | None
    ) -> None:
        super().__init__(run, [*parts, _InView(self)])
        self._run, self._memory = run, memory
        (self._checkpoints,) = (part for part in parts if isinstance(part, Checkpoints))
        self._told: dict[str, int] = {}  # of each method that parts are being called by, how many have ended
        self._owed: Done | None = None  # a window to which all is not done yet
        # Of the view before, until a window is run here:
        self._begun_before: tuple[Begun, Progress] | None = None
        self._shares_before: tuple[Shares, Progress] | None = None
        self._begins_at = None if before is None else self.progress  # with what the view before has left
        self._ends: DistaccumError | None = None
        self._record: Mapping[str, Any] | None = None  # the last one, which nobody may have written
        self._written, self._proven = 0, False
        if before is not None:
            self._go_on_from(before)

    def _go_on_from(self, before: Carried) -> None:
        """What the view before has left to do; see :class:`Carried`."""
        self._owed, self.unlogged, self._told = before.owed, before.unlogged, dict(before.told)
        if before.begun is not None:
            self._begun_before = before.begun, self.progress
        if before.shares is not None:
            self._shares_before = before.shares, self.progress
        self.evaluation, self._record = before.evaluation, before.record
        self._ends, self.reason, self._proven = before.ends, before.stop, before.verified
        if before.stopping and not before.stop:
            self.preempted_by = _ASKED

    def begin(self) -> None:
        """Does what the view before has left: its last record, what its last window is owed, and its error.

        A stop that was asked for stays so.
        """
        if self.reason or self.preempted_by:
            self._run.accumulator.stop()
        if self._run.accumulator.world.is_main:
            self._written = load(LAST_WINDOW)(self._run.run_dir.metrics)
            if self._record is not None:
                self.write(self._record)
        if self._memory is not None:  # what was kept before is of other ranks
            self.keep_in_memory()
        if self._owed is not None:
            super().pay(replace(self._owed, progress=self.progress))
            self._owed = None
        elif "on_checkpoint" in self._told:  # of a save that no window is owed, as the last one
            self._checkpoints.save(
                self, best=self._checkpoints.improves(self, self.progress.step, known=self.may_be_saved)
            )
        if self._ends is not None:
            raise self._ends

    def window_ended(self) -> None:
        """Between two windows: makes the checkpoint in memory that is due."""
        if self._memory is not None and self._memory.window_ended(self.progress.window, self._checkpoints.saved_step):
            self.keep_in_memory()

    def pay(self, done: Done) -> None:
        """Where a rank is lost meanwhile, those of the next view go on at the part that it was lost in."""
        self._begun_before = self._shares_before = None
        self._owed = done
        super().pay(done)
        self._owed = None

    def tell(self, name: str, call: Callable[[Part], None]) -> None:
        """Where a rank was lost in a part's method of this name, calls the parts from that one on."""
        for number in range(self._told.setdefault(name, 0), len(self.parts)):
            call(self.parts[number])
            self._told[name] = number + 1
        if name != "on_end":  # which is not called again, if a rank is lost from there on
            del self._told[name]

    def note_evaluation(self, step: int, found: dict[str, float]) -> None:
        """Those that parts were told of in the view before are not told again."""
        if self.results_of(step) is not None and "on_eval" not in self._told:
            self.agree_to_stop()
        else:
            super().note_evaluation(step, found)

    def write(self, record: Mapping[str, Any]) -> None:
        """The view before may have written it."""
        if "loss" in record:
            self._record = record
            if record["window"] > self._written:
                super().write(record)
        elif not self._is_written():
            super().write(record)

    def _is_written(self) -> bool:
        """Whether the last record is that of this evaluation, which the view before was to write."""
        if self._begins_at is None or self.evaluation is None or not self._run.accumulator.world.is_main:
            return False
        (last,) = deque(records_of(self._run.run_dir.metrics), maxlen=1) or ({},)
        values = {"step": self.progress.step, "window": self.progress.window, **self.evaluation[1]}
        return all(key in last and last[key] == value for key, value in values.items())

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._run.accumulator.world.size

    @property
    def may_be_saved(self) -> bool:
        """Whether the view before may have saved the present state: nothing has been run here since."""
        return self._begins_at is not None and self._begins_at == self.progress

    def carried(self) -> Carried:
        """What this rank has, where another one was lost; no collective."""
        accumulator, random = self._run.accumulator, RNGState.capture(self._run.accumulator.world.device)
        tracker, engine = accumulator.tracker, accumulator.engine
        begun, stepped = accumulator.interrupted(), self.take_last()
        if isinstance(begun, tuple):
            begun, stepped = None, begun
        progress = tracker.progress
        if stepped is not None:
            self._owed = Done(window=stepped[0], outcome=stepped[1], progress=progress)
        kept = None
        if begun is not None and begun.assignment is not None and not is_window_loss(self._run.components.loss):
            kept = Begun.of(progress, begun, begun.assignment, resumable(engine).kept)
        elif self._begun_before is not None and self._begun_before[1] == progress:  # nobody has begun it again
            kept, _ = self._begun_before
        average = ema.of(self._run.components.callbacks)
        shares = shares_of(engine)
        if shares is not None and self._shares_before is not None and self._shares_before[1] == progress:
            shares = shares.with_those_of(self._shares_before[0])
        whole = whole_state(engine, accumulator.world) if shares is None else own_state(engine, shares)
        return replace(
            self._state(),
            engine=whole,
            shares=shares,
            average=None if average is None else {n: t.clone() for n, t in average.whole(lambda _: True).items()},
            owed=None if self._owed is None else plain(self._owed, self.lr),
            told=dict(self._told),
            ends=self._ends or self._what_ends_it(),
            stop=self._agreed_stop or self.reason,
            stopping=accumulator.stopping,
            random=random,
            begun=kept,
        )

    def keep_in_memory(self) -> None:
        """Makes a checkpoint in memory, with all that was due done; a collective between two windows."""
        assert self._memory is not None
        self._memory.take(self._share)

    def _share(self) -> Carried:
        """What this rank keeps of the run, for all of them; a collective."""
        average, world = ema.of(self._run.components.callbacks), self._run.accumulator.world
        return replace(
            self._state(),
            engine=self._run.accumulator.engine.state(),
            average=None if average is None else average.whole(lambda i: i % world.size == world.rank),
        )

    def _state(self) -> Carried:
        """The run's, without the engine's."""
        accumulator = self._run.accumulator
        return Carried(
            run=self._checkpoints.run_state(self.logged),
            unlogged=None if self.unlogged is None else plain(self.unlogged, self.lr),
            skips_in_a_row=accumulator.tracker.skips_in_a_row,
            saved_step=self._checkpoints.saved_step,
            evaluation=self.evaluation,
            record=self._record,
            stop=self.reason,
            counted=accumulator.counted,
            verified=self._proven or bool(accumulator.verified),
            random=RNGState.capture(accumulator.world.device),
        )

    @property
    def _agreed_stop(self) -> str:
        """Why the run stops, where all ranks know that it does; the one that knows more may be lost."""
        if self.preempted:
            return ""
        return self.stop_reason or (_ASKED if self.stopped else "")

    def _what_ends_it(self) -> DistaccumError | None:
        """The error that all ranks were about to raise together; as far as this one can tell of it."""
        try:
            self._run.accumulator.tracker.raise_if_nonfinite(together=False)
        except NonFiniteError as error:
            return NonFiniteError(f"{error}. A rank was lost before all had told what they know of it")
        except (SpikeError, MisuseError) as error:
            return type(error)(*error.args)  # without the frames, which hold the engine
        return None


class _InView(Part):
    """What a view adds to its run: at the beginning what the view before has left, then checkpoints in memory."""

    watches = True

    def __init__(self, loop: ElasticLoop) -> None:
        self._loop = loop

    def begins(self, run: Loop) -> None:
        """See :meth:`ElasticLoop.begin`."""
        self._loop.begin()

    def adds(self, run: Loop, done: Done | None) -> Mapping[str, Any]:
        """How many ranks a window ran on."""
        return {} if done is None else {"ranks": self._loop.ranks}

    def between_windows(self, run: Loop) -> None:
        """See :meth:`ElasticLoop.window_ended`."""
        self._loop.window_ended()
