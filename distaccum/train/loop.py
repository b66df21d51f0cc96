"""Runs windows, and calls the parts of the run: what it logs, evaluates and saves, and the callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.open_window import OpenWindow
from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.checkpoint.store import CheckpointStore
from distaccum.data.loader import WindowLoader
from distaccum.data.window import Window
from distaccum.distributed.activity import Phase
from distaccum.errors import MisuseError, NonFiniteError, SpikeError, shorten
from distaccum.losses.normalize import as_python, is_number
from distaccum.train.components import TrainingComponents
from distaccum.train.metrics.loggers import Logger, refuse_taken
from distaccum.train.metrics.meter import Utilization
from distaccum.train.parts.base import Done, Part
from distaccum.train.run_dir import RunDir
from distaccum.train.screen import TRAINING

_log = logging.getLogger(__name__)


def tell_nobody(*_: object) -> None:
    """Stands for what is told of something, where nobody is."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run that has all it takes: what a loop trains.

    Args:
        components: data, loss, schedule, callbacks, metrics.
        accumulator: has the model, the optimizer and the progress to start from.
        loader: of the training data.
        run_dir: for the status.
        store: for the checkpoints.
        loggers: take the records; empty on all ranks but 0.
        wandb_id: kept in every checkpoint.
        began: when the run began, as ``time.monotonic`` gives it.
        logged: window and step of the last record of the run's own past.
        utilization: of the cards, on the rank that logs.
        saved_step: of the last checkpoint; None: of the one that is resumed, if any.
        saved_ago_s: how long ago that was saved.
        enter_phase: told what this rank does, for those who find it dead, and for the live line.
        tell_saved: told the step and the folder of each checkpoint that is there.
    """

    components: TrainingComponents
    accumulator: Accumulator
    loader: WindowLoader
    run_dir: RunDir
    store: CheckpointStore
    loggers: Sequence[Logger] = ()
    wandb_id: str
    began: float
    logged: Mapping[str, int] = field(default_factory=dict)
    utilization: Utilization | None = None
    saved_step: int | None = None
    saved_ago_s: float = 0.0
    enter_phase: Callable[[str], None] = tell_nobody
    tell_saved: Callable[[int, Path], None] = tell_nobody


class Loop:
    """Trains until ``total_steps`` updates are applied, or until it is stopped.

    A callback that stops it ends the run. :meth:`preempt` and the time limit stop it for another process to continue.

    Args:
        run: what is trained.
        parts: called in this order; the same on every rank.
    """

    # ``passes``, ``may_be_saved``, ``pay`` and ``tell`` are what the loop of elastic runs has otherwise.

    passes: tuple[type[BaseException], ...] = ()
    """Errors that leave :meth:`fit` as they are: nothing is rescued and nothing is written."""

    def __init__(self, run: TrainingRun, parts: Sequence[Part] = ()) -> None:
        self._components, self._accumulator, self._loader = run.components, run.accumulator, run.loader
        self._loggers, self._run_dir = run.loggers, run.run_dir
        self._tracker, self._world = run.accumulator.tracker, run.accumulator.world
        self.enter_phase = run.enter_phase
        """Shows people what this rank does from now on."""
        self.parts = parts
        self._last: tuple[Window, Outcome] | None = None  # whether it was applied is not read yet
        self.stopped = False
        """Whether a callback has asked to stop after an evaluation: the same on every rank."""
        self.reason = ""
        """Why a callback of this rank has asked to stop."""
        self.preempted_by = ""
        """Why this rank was asked to save and leave."""
        self.stop_reason = ""
        """The reasons of all ranks that asked to stop or to be preempted; known at the end."""
        self.preempted = False
        """Whether another process is to continue the run: the same on every rank, known at the end."""
        self.over = False
        """Whether the last window is done, with all that it was owed."""
        self.logged: Mapping[str, int] = run.logged
        """Window and step of the last record."""
        self.unlogged: Done | None = None
        """The last update, while it has no record."""
        self.evaluation: tuple[int, dict[str, float]] | None = None
        """The last one, with its step."""
        self.waited_s = 0.0
        """Seconds that training has waited for data so far."""
        self._own: dict[str, Any] = {}  # numbers of callbacks, for the next record

    @property
    def model(self) -> nn.Module:
        """For callbacks: see ``distaccum.train.callbacks.Run``; so is :attr:`optimizers`."""
        return self._accumulator.engine.unwrapped_model

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The run's."""
        return self._components.optimizers

    @property
    def progress(self) -> Progress:
        """The run's progress, the last window included, for whose end this waits."""
        return self._tracker.progress

    @property
    def known_progress(self) -> Progress:
        """The progress as far as the host knows it; never waits."""
        return self._tracker.known_progress

    @property
    def may_be_saved(self) -> bool:
        """Whether others may have saved the present state."""
        return False

    @property
    def at_end(self) -> bool:
        """Whether no further window is to be trained on; the same on every rank, and nothing waits."""
        steps = self._tracker.known_progress.step
        return self.stopped or self._accumulator.stopping or steps >= self._components.total_steps

    def stop(self, reason: str) -> None:
        """For callbacks: see ``distaccum.train.callbacks.Run``."""
        self.reason = reason or "a callback asked to stop"

    def preempt(self, reason: str) -> None:
        """Asks all ranks to save and leave before the next window; may be called by a signal's handler."""
        self.preempted_by = reason
        self._accumulator.stop()

    def fit(self) -> dict[str, float]:
        """Trains to the end; returns the last evaluation, empty without one.

        Raises:
            NonFiniteError: too many gradients were NaN or infinite, on every rank; the weights are untouched.
            SpikeError: too many windows in a row were skipped for their gradient norms, or the run was rolled back too
                often; on every rank.
            VerificationError: the ranks' weights or optimizer state differ, or a gradient is wrong; on every rank.
            DataError: an epoch gives nothing to train on.
        """
        self.enter_phase(TRAINING)
        # Pretrained models come in evaluation mode. One in training mode may have frozen modules: it stays as it is.
        if not self._accumulator.engine.unwrapped_model.training:
            self._accumulator.model.train()
        max_epochs = self._components.config.trainer.max_epochs
        try:
            for part in self.parts:
                part.begins(self)
            while not self.at_end and (max_epochs is None or self.progress.epoch < max_epochs):
                for window in self._accumulator.windows(self._loader):
                    self.step_window(window)
                    if self.at_end:
                        break
                else:
                    self._end_epoch()
            self._tracker.raise_if_nonfinite()
        except self.passes:
            raise
        except BaseException as error:
            if isinstance(error, NonFiniteError | SpikeError):
                self._look_back(self.known_progress)  # what ends the run stands in the log
            for part in self.parts:
                part.fails(self, error)
            raise
        return self._finish()

    def step_window(self, window: OpenWindow) -> None:
        """Trains on one window, then has the parts do what is due.

        Whether the window was applied is read after the next window, when the device has finished it; or at once where
        a part watches every window, or something may be due.
        """
        for part in self.parts:
            part.window_begins(self, window.plain)
        outcome = self._accumulator.step(window, self._components.loss)
        self._look_back(self.known_progress)
        for part in self.parts:
            part.on_window(self, window.plain, outcome)
        self._last = (window.plain, outcome)
        progress = self._tracker.if_applied
        if any(part.watches or part.due(progress) for part in self.parts):
            self.resolve()
        for part in self.parts:
            part.between_windows(self)
        if self.reason:
            self._accumulator.stop()

    def resolve(self) -> None:
        """Waits for the last window, and does what it is owed."""
        self._tracker.resolve_last_step()
        self._look_back(self.known_progress)

    def _end_epoch(self) -> None:
        """Does what the last window of the epoch is owed, and what is due there though that was no update."""
        if not any(part.by_epoch for part in self.parts):
            return
        self.resolve()
        for part in () if self.at_end else self.parts:
            part.epoch_ended(self)

    def _look_back(self, progress: Progress) -> None:
        """Does what the last window is owed, which is known to be applied or not; ``progress`` includes it."""
        if (last := self.take_last()) is not None:
            window, outcome = last
            self.pay(Done(window=window, outcome=outcome, progress=progress))

    def take_last(self) -> tuple[Window, Outcome] | None:
        """The last window, which this forgets, if nobody has looked whether it was applied."""
        last, self._last = self._last, None
        return last

    def pay(self, done: Done) -> None:
        """Does what a window is owed."""
        if done.outcome.applied:
            self.tell("on_update", lambda part: part.on_update(self, done))
        else:
            self.tell("on_skip", lambda part: part.on_skip(self, done))

    def tell(self, name: str, call: Callable[[Part], None]) -> None:
        """Calls the parts' method ``name``, of every part."""
        for part in self.parts:
            call(part)

    @property
    def lr(self) -> float:
        """The learning rate of the last window."""
        return float(self._components.optimizers[0].param_groups[0]["lr"])

    def log(self, numbers: Mapping[str, float | Tensor]) -> None:
        """For callbacks: see ``distaccum.train.callbacks.Run``."""
        refuse_taken(numbers, "run.log() is given")
        for name, value in numbers.items():
            if not is_number(value):
                problem = f"run.log() is given {name!r}: {value!r:.80}, which is no number"
                raise MisuseError(f"{problem}: sums with counts over all ranks are what a loss returns to be logged")
            self._own[name] = value.detach().clone() if isinstance(value, Tensor) else value

    def write(self, record: Mapping[str, Any]) -> None:
        """Has the loggers write a record, with the numbers of callbacks since the last one."""
        own, self._own = self._own, {}
        if twice := own.keys() & record.keys():
            raise MisuseError(f"a callback and the loss both log {shorten(twice)}: give one of them another name")
        if not self._world.is_main:
            return
        self._run_dir.require_owned()
        record = {**record, **{name: as_python(value) for name, value in own.items()}}  # a host read of a logged step
        for logger in self._loggers:
            logger.log(record)

    def alert(self, title: str, text: str) -> None:
        """Has the loggers alert people."""
        for logger in self._loggers:
            logger.alert(title, text)

    def results_of(self, step: int) -> dict[str, float] | None:
        """The evaluation's after this update; None where there is none."""
        return self.evaluation[1] if self.evaluation is not None and self.evaluation[0] == step else None

    def note_evaluation(self, step: int, found: dict[str, float]) -> None:
        """Tells the parts of an evaluation, after which a callback may end the run; a collective."""
        self.evaluation = (step, found)
        self.tell("on_eval", lambda part: part.on_eval(self, found))
        self.agree_to_stop()

    def agree_to_stop(self) -> None:
        """Ends the run where a callback has asked to on any rank; a collective."""
        if self._components.callbacks:
            self.stopped = self._world.all_reduce_max_host([bool(self.reason)])[0] > 0

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Of the block people see ``phase``, and its time is no window's."""
        self.enter_phase(phase)
        yield
        self._world.activity.phase = Phase.BETWEEN
        for part in self.parts:
            part.resumes(self)
        self.enter_phase(TRAINING)

    def _finish(self) -> dict[str, float]:
        """Ends the run; a preempted one saves alone: the process that continues it does the rest."""
        self._look_back(self.progress)
        self.over = True
        for part in self.parts:
            part.windows_ended(self)
        self._accumulator.replicas.check()  # a checkpoint may not follow
        if self.stopped or self._accumulator.stopping:
            self.agree_on_the_end()
        for part in self.parts if self.preempted else ():
            part.preempted(self)
        for part in self.parts:
            part.leaves(self)
        if self.preempted:
            return {}
        for part in self.parts:
            part.ends(self)
        results = {} if self.evaluation is None else self.evaluation[1]
        self.tell("on_end", lambda part: part.on_end(self, results))
        if self._own and self._world.is_main:
            _log.warning("%s is logged after the last record, and in none: use on_eval", shorten(self._own))
        return results

    def agree_on_the_end(self) -> None:
        """Gathers the reasons to stop; without one before the last step, the run is preempted."""
        reasons = self._world.all_gather_names([self.reason] if self.reason else [])
        if not reasons and self.progress.step < self._components.total_steps:
            reasons = self._world.all_gather_names([self.preempted_by] if self.preempted_by else [])
            self.preempted = True
        self.stop_reason = "; ".join(reasons)
