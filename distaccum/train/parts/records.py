"""The records of a run's windows: measured, completed by the other parts, and written; and the status that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.data.window import Window
from distaccum.train.metrics.meter import Meter
from distaccum.train.parts.base import Done, Part
from distaccum.train.run_dir import State

if TYPE_CHECKING:
    from distaccum.train.loop import Loop, TrainingRun


class Records(Part):
    """Makes a record of every ``trainer.log_every``-th update, of what another part wants one of, and of the last.

    A record is measured here; then the other parts add to it. So an evaluation's results stand in the record of the
    update that it follows, whose times and memory are not the evaluation's.

    Args:
        run: whose windows are measured.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._accumulator, self._run_dir, self._loggers = run.accumulator, run.run_dir, run.loggers
        self._log_every, self._total_steps = run.components.config.trainer.log_every, run.components.total_steps
        self._evaluates_alone = run.components.evaluates_alone
        self._meter = Meter(run.accumulator.world, run.accumulator.progress, run.utilization)

    def due(self, progress: Progress) -> bool:
        """So is the last update."""
        return progress.step >= self._total_steps or progress.step % self._log_every == 0

    wants_record = due

    def begins(self, run: Loop) -> None:
        """Begins to measure."""
        self.write_status(run)
        self._meter.restart(run.progress)

    def window_begins(self, run: Loop, window: Window) -> None:
        """Counts its operations, if nobody has."""
        self._meter.measure(window)

    def on_window(self, run: Loop, window: Window, outcome: Outcome) -> None:
        """Measures it."""
        self._meter.add(window, outcome)
        run.waited_s = self._meter.waited_s

    def resumes(self, run: Loop) -> None:
        """Measures from here on."""
        self._meter.restart(run.progress)

    def on_update(self, run: Loop, done: Done) -> None:
        """Makes the record, if it is due."""
        run.unlogged = done
        if any(part.wants_record(done.progress) for part in run.parts):
            self.make(run, done)
            run.unlogged = None

    def before_save(self, run: Loop) -> None:
        """Forces them to the disk: a checkpoint goes on after them."""
        for logger in self._loggers:
            logger.sync()

    def ends(self, run: Loop) -> None:
        """Makes the last update's record; or that of a run without an update, which has no window's loss or rates."""
        if run.unlogged is not None:
            self.make(run, replace(run.unlogged, progress=run.progress))
        elif self._evaluates_alone:
            self._make_alone(run, run.progress)

    def epoch_ended(self, run: Loop) -> None:
        """Makes the record of the epoch's last update, or of what is added alone, if another part owes it one."""
        if not any(part.owes(run) for part in run.parts):
            return
        progress = replace(run.progress, epoch=run.progress.epoch - 1)
        if run.unlogged is not None:
            self.make(run, replace(run.unlogged, progress=progress))
            run.unlogged = None
        else:
            self._make_alone(run, progress)

    def _make_alone(self, run: Loop, progress: Progress) -> None:
        record = {
            "step": progress.step,
            "window": progress.window,
            "epoch": progress.epoch,
            "samples": progress.samples,
            "tokens": int(progress.tokens) if float(progress.tokens).is_integer() else progress.tokens,
        }
        run.write(record | self._added(run, None))

    def make(self, run: Loop, done: Done) -> None:
        """Makes the record of a window; a collective."""
        lr = run.lr if done.lr is None else done.lr
        record = self._meter.record(done.window, done.outcome, done.progress, lr=lr)
        run.write({**record, **_numbers_of(self._accumulator), **self._added(run, done)})
        run.logged = {"window": done.progress.window, "step": done.progress.step}
        self.write_status(run)

    def _added(self, run: Loop, done: Done | None) -> dict[str, Any]:
        added: dict[str, Any] = {}
        for part in run.parts:
            added |= part.adds(run, done)
        return added

    def write_status(self, run: Loop) -> None:
        """Rank 0 writes how far the run has come."""
        if self._accumulator.world.is_main:
            trouble = "; ".join(filter(None, (part.trouble for part in run.parts)))
            self._run_dir.write_status(State.RUNNING, step=run.known_progress.step, reason=trouble)


class SkipRecords(Part):
    """Makes the record of every window that was not applied.

    It has a place of its own: before the callbacks, so that what ends a run stands in the log. An update's record comes
    after the callbacks, as its evaluation does, which is of weights that a callback may average.

    Args:
        records: makes it.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    def on_skip(self, run: Loop, done: Done) -> None:
        """Makes it."""
        self._records.make(run, done)


def _numbers_of(accumulator: Accumulator) -> Mapping[str, Any]:
    """What a record has of what not every run has: numbers of hooks, recompilations and spikes."""
    compiled, spikes = accumulator.engine.compiled, accumulator.spikes
    found = {} if compiled is None else {"recompiles": compiled.recompiles}
    return {**accumulator.engine.hooks.metrics, **found, **({} if spikes is None else spikes.metrics)}
