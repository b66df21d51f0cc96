"""Runs windows; then logs, evaluates, saves and calls callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.open_window import OpenWindow
from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.checks import ROLLBACK
from distaccum.data.held_out import evaluation_workers
from distaccum.data.loader import WindowLoader
from distaccum.data.window import Window
from distaccum.distributed.activity import Phase
from distaccum.errors import MisuseError, NonFiniteError, SpikeError, shorten
from distaccum.train import ema
from distaccum.train.callbacks import Callback, Run, watches_updates
from distaccum.train.components import TrainingComponents
from distaccum.train.evaluate import Evaluation
from distaccum.train.generation import texts_writer
from distaccum.train.held_out_checks import evaluates
from distaccum.train.metrics.flops import Utilization
from distaccum.train.metrics.loggers import Logger
from distaccum.train.metrics.meter import Meter
from distaccum.train.metrics.status import TRAINING
from distaccum.train.part import Part
from distaccum.train.rollback import roll_back
from distaccum.train.run_dir import RunDir, State
from distaccum.train.saving import Saver
from distaccum.train.time_limit import TimeLimit


def _tell_nobody(*_: object) -> None:
    pass


def _numbers_of(accumulator: Accumulator) -> dict[str, Any]:
    """What a record has of what not every run has: recompilations and spikes."""
    compiled, spikes = accumulator.engine.compiled, accumulator.spikes
    found = {} if compiled is None else {"recompiles": compiled.recompiles}
    return found if spikes is None else found | spikes.metrics


class _Then:
    """A run as callbacks see it that are told of a checkpoint, which it made some windows ago."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self._run, self._progress = run, progress

    @property
    def progress(self) -> Progress:
        """The checkpoint's."""
        return self._progress

    def stop(self, reason: str) -> None:
        """See :class:`Run`."""
        self._run.stop(reason)


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
        time_limit: says when the run has to save.
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
    loggers: Sequence[Logger]
    wandb_id: str
    time_limit: TimeLimit
    logged: Mapping[str, int] = field(default_factory=dict)
    utilization: Utilization | None = None
    saved_step: int | None = None
    saved_ago_s: float = 0.0
    enter_phase: Callable[[str], None] = _tell_nobody
    tell_saved: Callable[[int, Path], None] = _tell_nobody


class Loop:
    """Trains until ``total_steps`` updates are applied, or until it is stopped.

    A callback that stops it ends the run. :meth:`preempt` and the time limit stop it for another process to continue.

    Args:
        run: what is trained.
        parts: called in this order, before what the loop itself does; the same on every rank.
    """

    _passes: tuple[type[BaseException], ...] = ()
    """Errors that leave :meth:`fit` as they are: nothing is rescued and nothing is written."""

    def __init__(self, run: TrainingRun, parts: Sequence[Part] = ()) -> None:
        self._components, self._accumulator, self._loader = run.components, run.accumulator, run.loader
        self._run_dir, self._store, self._loggers = run.run_dir, run.store, run.loggers
        self._logged, self._time_limit = dict(run.logged), run.time_limit
        self._enter_phase, self._tell_saved = run.enter_phase, run.tell_saved
        self._parts = parts
        components, accumulator = run.components, run.accumulator
        self._world = accumulator.world
        # A run from another run's checkpoint has saved none itself.
        resumed_step = accumulator.progress.step if components.config.resume == "auto" else 0
        self._saver = Saver(
            components,
            accumulator,
            run.loader,
            run_dir=run.run_dir,
            store=run.store,
            time_limit=run.time_limit,
            wandb_id=run.wandb_id,
            saved_step=resumed_step if run.saved_step is None else run.saved_step,
            saved_ago_s=run.saved_ago_s,
            on_saved=self._on_checkpoint,
        )
        self._rolls_back = components.config.trainer.on_spike == ROLLBACK
        self._tracker = accumulator.tracker
        self._meter = Meter(self._world, self.progress, run.utilization)
        self._evaluation: tuple[int, dict[str, float]] | None = None  # the last one, with its step
        self._evaluator = self._make_evaluator()
        self._write_texts = texts_writer(accumulator.engine, components.prompts, components.config.eval)
        self._texts: dict[str, Any] = {}
        self._last: tuple[Window, Outcome] | None = None  # whether it was applied is not read yet
        self._unlogged: tuple[Window, Outcome] | None = None  # an update
        self._watched = self._rolls_back or any(map(watches_updates, components.callbacks))
        self._reason = ""
        self._preempted_by = ""
        self._saves_best = False
        self._ended = False
        self.stop_reason = ""
        """The reasons of all ranks that asked to stop or to be preempted; known at the end."""
        self.preempted = False
        """Whether another process is to continue the run: the same on every rank, known at the end."""

    @property
    def progress(self) -> Progress:
        """The run's progress, the last window included, for whose end this waits."""
        return self._tracker.progress

    def stop(self, reason: str) -> None:
        """For callbacks: see ``distaccum.train.callbacks.Run``."""
        self._reason = reason or "a callback asked to stop"

    def preempt(self, reason: str) -> None:
        """Asks all ranks to save and leave before the next window; may be called by a signal's handler."""
        self._preempted_by = reason
        self._accumulator.stop()

    @property
    def known_progress(self) -> Progress:
        """The progress as far as the host knows it; never waits."""
        return self._tracker.known_progress

    @property
    def min_loss_scale(self) -> float | None:
        """The engine's, below which its loss scale does not fall; None where it has none."""
        return self._accumulator.engine.facts.min_loss_scale

    @property
    def waited_s(self) -> float:
        """Seconds that training has waited for data so far; never waits."""
        return self._meter.waited_s

    @property
    def at_end(self) -> bool:
        """Whether no further window is to be trained on; the same on every rank, and nothing waits."""
        steps = self._tracker.known_progress.step
        return self._ended or self._accumulator.stopping or steps >= self._components.total_steps

    def fit(self) -> dict[str, float]:
        """Trains to the end; returns the last evaluation, empty without one.

        Raises:
            NonFiniteError: too many gradients were NaN or infinite, on every rank; the weights are untouched.
            SpikeError: too many windows in a row were skipped for their gradient norms, or the run was rolled back too
                often; on every rank.
            VerificationError: the ranks' weights or optimizer state differ, or a gradient is wrong; on every rank.
            DataError: an epoch gives nothing to train on.
        """
        self._write_status()
        self._enter_phase(TRAINING)
        # Pretrained models come in evaluation mode. One in training mode may have frozen modules: it stays as it is.
        if not self._accumulator.engine.unwrapped_model.training:
            self._accumulator.model.train()
        self._meter.restart(self.progress)
        max_epochs = self._components.config.trainer.max_epochs
        for part in self._parts:
            part.begins(self)
        try:
            self._begin()
            while not self.at_end and (max_epochs is None or self.progress.epoch < max_epochs):
                for window in self._accumulator.windows(self._loader):
                    self.step_window(window)
                    if self.at_end:
                        break
            self._tracker.raise_if_nonfinite()
        except self._passes:
            raise
        except (NonFiniteError, SpikeError):
            self._look_at_last(self._tracker.known_progress)  # what ends the run stands in the log
            self._settle(at_end=True)
            raise
        except BaseException:
            if (rescued := self._saver.rescue()) is not None:
                step, path = rescued  # whoever goes on from it tells of later ones alone
                for logger in self._loggers:
                    logger.checkpoint(path, step=step, best=False)
            raise
        return self._finish()

    def step_window(self, window: OpenWindow) -> None:
        """Trains on one window, then logs, evaluates, saves and calls back where that is due.

        Whether the window was applied is read after the next window, when the device has finished it; or at once where
        something may be due.
        """
        self._meter.measure(window.plain)
        for part in self._parts:
            part.window_begins(self, window.plain)
        outcome = self._accumulator.step(window, self._components.loss)
        self._time_limit.window_ended()
        self._look_at_last(self._tracker.known_progress)
        self._meter.add(window.plain, outcome)
        for part in self._parts:
            part.on_window(self, window.plain, outcome)
        self._last = (window.plain, outcome)
        if self._watched or self._is_due(self._tracker.max_possible_step):
            self.resolve()
        if self._saver.due:
            self._look_at_last(self.progress)
            if not self._saver.is_saved(self.progress.step):
                self._save()
        if self._saver.ready:
            self._settle()
        if self._reason:
            self._accumulator.stop()
        if self._time_limit.is_near and not self._preempted_by:
            self.preempt("trainer.max_time is about to be over")
        for part in self._parts:
            part.between_windows(self)

    def resolve(self) -> None:
        """Waits for the last window, and does what it is owed."""
        self._tracker.resolve_last_step()
        self._look_at_last(self._tracker.known_progress)

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Of the block people see ``phase``, and its time is no window's."""
        self._enter_phase(phase)
        yield
        self._goes_on()

    def alert(self, title: str, text: str) -> None:
        """Has the loggers alert people."""
        for logger in self._loggers:
            logger.alert(title, text)

    def _is_due(self, step: int) -> bool:
        trainer, save_every = self._components.config.trainer, self._components.config.checkpoint.every
        intervals = (trainer.log_every, trainer.eval_every, save_every)
        return step >= self._components.total_steps or any(every and step % every == 0 for every in intervals)

    def _look_at_last(self, progress: Progress) -> None:
        """Finds out whether the last window was applied; ``progress`` includes it."""
        if self._last is None:
            return
        (window, outcome), self._last = self._last, None
        for part in self._parts:
            part.on_outcome(self, outcome)
        if outcome.applied:
            self._pay(window, outcome, progress)
            return
        self._pay_skip(window, outcome, progress)
        if self._rolls_back and outcome.finite:
            self._roll_back()

    def _roll_back(self) -> None:
        self._settle()
        self._enter_phase(f"rolling back from step {self.progress.step}")
        self._world.activity.phase = Phase.SAVE
        window = self.progress.window
        folder = roll_back(self._accumulator, self._store, self._components)
        if folder is not None:
            self._evaluation = self._unlogged = None
            if self._world.is_main:
                self._run_dir.note_rolled_back(self.progress.step, window)
            self._save(again=True)  # whoever resumes goes on with the same data
        self._enter_phase(TRAINING)

    def _pay(self, window: Window, outcome: Outcome, progress: Progress) -> None:
        """Does what is due after an update."""
        trainer, checkpoints, step = self._components.config.trainer, self._components.config.checkpoint, progress.step
        ends = step >= self._components.total_steps
        evaluates = self._evaluates and (ends or step % trainer.eval_every == 0)
        is_due = evaluates or ends or step % trainer.log_every == 0
        self._unlogged = (window, outcome)
        called = partial(self._call, "on_update", lambda callback: callback.on_update(self, outcome))
        logged = partial(self._log, window, outcome, progress, evaluates=evaluates)
        # The last update's record comes before its checkpoint: a run that dies between the two makes no update again.
        self._do(called, logged) if is_due else self._do(called)
        if is_due:
            self._unlogged = None
        best = evaluates and self._is_best()
        if best or (checkpoints.every and step % checkpoints.every == 0):
            self._save(best=best)

    def _pay_skip(self, window: Window, outcome: Outcome, progress: Progress) -> None:
        """As :meth:`_pay`, of a window that was not applied: its record is due in any case, and comes first."""
        logged = partial(self._log, window, outcome, progress, evaluates=False)
        self._do(logged, partial(self._call, "on_skip", lambda callback: callback.on_skip(self, outcome)))

    def _do(self, *steps: Callable[[], None]) -> None:
        """What a window is owed, one after the other."""
        for step in steps:
            step()

    def _begin(self) -> None:
        """Before the first window."""

    @property
    def _evaluates(self) -> bool:
        return evaluates(self._components.data, self._components.config)

    def _make_evaluator(self) -> Evaluation:
        components, trainer = self._components, self._components.config.trainer
        return Evaluation(
            self._accumulator.engine,
            components.data,
            components.loss,
            self._world,
            micro_batch_size=components.plan.micro_batch_size,
            workers=evaluation_workers(components.data, trainer.num_workers, asdict(trainer.loader)),
            limit=trainer.eval_samples,
            prefetch=trainer.prefetch,
            metrics=components.metrics,
            seed=components.config.seed,
        )

    def _evaluate(self) -> dict[str, float]:
        self._enter_phase(f"evaluating after step {self.progress.step}")
        self._accumulator.use_evaluation_weights()
        step = self.progress.step
        with ema.evaluated(self._components.callbacks):
            found = self._results(step)
            self._texts = self._write_texts()
        if twice := found.keys() & self._texts.keys():
            problem = f"{shorten(twice)} are the texts of an evaluation, and a result of it too"
            raise MisuseError(f"{problem}: give the metric or the score another name")
        self._world.activity.phase = Phase.BETWEEN
        self._tell_results(step, found)
        self._evaluation = (step, found)
        if self._components.callbacks:
            self._ended = self._world.all_reduce_max_host([bool(self._reason)])[0] > 0
        self._meter.restart(self.progress)
        self._time_limit.evaluated()
        self._enter_phase(TRAINING)
        return found

    def _results(self, step: int) -> dict[str, float]:
        """The evaluation's after this step; a collective."""
        return self._evaluator.run()

    def _tell_results(self, step: int, found: dict[str, float]) -> None:
        """Calls callbacks with what was found after this step."""
        self._call("on_eval", lambda callback: callback.on_eval(self, found))

    def _log(self, window: Window, outcome: Outcome, progress: Progress, *, evaluates: bool) -> None:
        record = self._meter.record(window, outcome, progress, lr=self._lr) | self._accumulator.stragglers.metrics
        record |= {**self._facts, **_numbers_of(self._accumulator)}
        if evaluates:
            record |= self._evaluate() | self._evaluator.samples | self._texts
        self._write(record)
        self._logged = {"window": progress.window, "step": progress.step}
        self._write_status()

    def _write(self, record: Mapping[str, Any]) -> None:
        if not self._world.is_main:
            return
        self._run_dir.require_owned()
        for logger in self._loggers:
            logger.log(record)

    @property
    def _facts(self) -> Mapping[str, Any]:
        """What each record says beside the window."""
        return {}

    @property
    def _lr(self) -> float:
        """The learning rate of the last window."""
        return float(self._components.optimizers[0].param_groups[0]["lr"])

    def _log_evaluation(self) -> None:
        """Evaluates without an update: the record has no window's loss and no rates."""
        progress = self.progress
        tokens = int(progress.tokens) if float(progress.tokens).is_integer() else progress.tokens
        record = {
            "step": progress.step,
            "window": progress.window,
            "epoch": progress.epoch,
            "samples": progress.samples,
            "tokens": tokens,
            **(found := self._evaluate()),
            **self._evaluator.samples,
            **self._texts,
        }
        if self._world.is_main:
            self._run_dir.require_owned()
            written = {"step": progress.step, "window": progress.window, **found}
            if self._is_written(written):
                return
        for logger in self._loggers:
            logger.log(record)

    def _is_written(self, _: Mapping[str, Any]) -> bool:
        """Whether the last record has these values already."""
        return False

    def _is_best(self) -> bool:
        known = self._may_be_saved
        return self._evaluation is not None and self._saver.improves(self._evaluation[1], known=known)

    @property
    def _may_be_saved(self) -> bool:
        """Whether others may have saved the present state."""
        return False

    def _save(self, *, best: bool = False, again: bool = False, waits: bool = False) -> None:
        self._settle(at_end=waits)
        self._enter_phase(f"saving step {self.progress.step}")
        for logger in self._loggers:
            logger.sync()
        for part in self._parts:
            part.before_save(self)
        evaluation = self._evaluation[1] if best and self._evaluation else None
        self._saves_best = best
        self._saver.save(self._logged, best=evaluation, again=again, waits=waits, known=self._may_be_saved)
        self._saves_best = False
        self._goes_on()

    def _settle(self, *, at_end: bool = False) -> None:
        """Publishes what was saved in the background, if anything was: see :meth:`Saver.settle`."""
        if self._saver.pending:
            self._enter_phase("publishing a checkpoint")
            self._saver.settle(at_end=at_end)
            self._goes_on()

    def _on_checkpoint(self, path: Path, progress: Progress) -> None:
        for logger in self._loggers:
            logger.checkpoint(path, step=progress.step, best=self._saves_best)
        self._tell_saved(progress.step, path)
        run: Run = self if progress == self.progress else _Then(self, progress)
        self._call("on_checkpoint", lambda callback: callback.on_checkpoint(run, path))

    def _goes_on(self) -> None:
        self._world.activity.phase = Phase.BETWEEN
        self._meter.restart(self.progress)
        self._enter_phase(TRAINING)

    def _finish(self) -> dict[str, float]:
        """Makes the last update's record, evaluation and checkpoint, unless they were due anyway.

        A preempted run makes the checkpoint alone: the process that continues it makes the rest, and there is no time.
        """
        self._look_at_last(self.progress)
        for part in self._parts:
            part.windows_ended(self)
        self._accumulator.replicas.check()  # a checkpoint may not follow
        if self._ended or self._accumulator.stopping:
            self._take_reasons()
        if self.preempted:
            self._save_last()
        for part in self._parts:
            part.leaves(self)
        if self.preempted:
            return {}
        is_evaluated = self._evaluation is not None and self._evaluation[0] == self.progress.step
        # One that was made for a record which is still owed is in no record yet, and in no best checkpoint.
        is_due = self._evaluates and (not is_evaluated or self._unlogged is not None)
        if self._unlogged is not None:
            self._log(*self._unlogged, self.progress, evaluates=is_due)
        elif self._components.evaluates_alone:
            self._log_evaluation()
        elif is_due:  # a finished run that is resumed makes no update, but is evaluated
            self._evaluate()
        unsaved = self._may_be_saved and self._saver.saved_step != self.progress.step
        self._save_last(best=(is_due or unsaved) and self._is_best())
        results = self._evaluation[1] if self._evaluation else {}
        self._call("on_end", lambda callback: callback.on_end(self, results))
        return results

    def _call(self, _: str, hook: Callable[[Callback], None]) -> None:
        """Calls a hook of every callback."""
        for callback in self._components.callbacks:
            self._call_one(callback, hook)

    def _call_one(self, callback: Callback, hook: Callable[[Callback], None]) -> None:
        """Calls a hook of one.

        Raises:
            MisuseError: the callback sets a learning rate, which the schedule would set again before the next step.
        """
        before = self._learning_rates()
        hook(callback)
        if self._learning_rates() != before:
            problem = f"{type(callback).__name__} sets a learning rate by hand"
            remedy = "give the callback the property lr_factor, or state the rate as a schedule"
            raise MisuseError(f"{problem}, which the schedule sets before every step: {remedy}")

    def _learning_rates(self) -> list[Any]:
        rates = [group["lr"] for optimizer in self._components.optimizers for group in optimizer.param_groups]
        return [(id(rate), rate._version) if isinstance(rate, Tensor) else rate for rate in rates]  # no device is read

    def _take_reasons(self) -> None:
        """Gathers the reasons to stop; without one before the last step, the run is preempted."""
        reasons = self._world.all_gather_names([self._reason] if self._reason else [])
        if not reasons and self.progress.step < self._components.total_steps:
            reasons = self._world.all_gather_names([self._preempted_by] if self._preempted_by else [])
            self.preempted = True
        self.stop_reason = "; ".join(reasons)

    def _save_last(self, *, best: bool = False) -> None:
        if not self._components.config.checkpoint.saves or self._components.evaluates_alone:
            return
        self._settle(at_end=True)
        if self._saver.saved_step != self.progress.step:
            self._save(best=best, waits=True)
        elif best and self._evaluation:
            self._saver.mark_best(self._evaluation[1])
            for logger in self._loggers:
                path = self._store.root / f"step-{self._saver.saved_step}"
                logger.checkpoint(path, step=self._saver.saved_step, best=True)

    def _write_status(self) -> None:
        if self._world.is_main:
            self._run_dir.write_status(
                State.RUNNING, step=self._tracker.known_progress.step, reason=self._saver.trouble
            )
