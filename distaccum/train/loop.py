"""Runs windows; then logs, evaluates, saves and calls callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.open_window import OpenWindow
from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint.host_memory import HostMemory
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.checks import ROLLBACK
from distaccum.data.held_out import evaluation_workers
from distaccum.data.loader import WindowLoader
from distaccum.data.window import Window
from distaccum.distributed.activity import Phase
from distaccum.engines.base import StateLayout
from distaccum.errors import DistaccumError, MisuseError, NonFiniteError, PeerError, SpikeError
from distaccum.train.background_save import BackgroundSave, clear
from distaccum.train.best import BestCheckpoint
from distaccum.train.callbacks import Callback, watches_updates
from distaccum.train.callbacks import states as callback_states
from distaccum.train.components import TrainingComponents
from distaccum.train.evaluate import Evaluation
from distaccum.train.failure import reason_of
from distaccum.train.held_out_checks import evaluates
from distaccum.train.metrics.flops import Utilization
from distaccum.train.metrics.loggers import Logger
from distaccum.train.metrics.meter import Meter
from distaccum.train.rollback import roll_back
from distaccum.train.run_dir import RunDir, State
from distaccum.train.save_clock import SaveClock
from distaccum.train.time_limit import TimeLimit

_log = logging.getLogger(__name__)

TRAINING = "training"
_RESCUE_S = 20.0  # after an error, for what is still being written; a launcher ends the ranks after 30


def _tell_nobody(_: str) -> None:
    pass


class Loop:
    """Trains until ``total_steps`` updates are applied, or until it is stopped.

    A callback that stops it ends the run. :meth:`preempt` and the time limit stop it for another process to continue.

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
        enter_phase: told what this rank does, for those who find it dead.
    """

    def __init__(
        self,
        components: TrainingComponents,
        accumulator: Accumulator,
        loader: WindowLoader,
        *,
        run_dir: RunDir,
        store: CheckpointStore,
        loggers: Sequence[Logger],
        wandb_id: str,
        time_limit: TimeLimit,
        logged: Mapping[str, int] | None = None,
        utilization: Utilization | None = None,
        enter_phase: Callable[[str], None] = _tell_nobody,
    ) -> None:
        self._components = components
        self._accumulator = accumulator
        self._loader = loader
        self._run_dir = run_dir
        self._store = store
        self._loggers = loggers
        self._wandb_id = wandb_id
        self._logged = dict(logged or {})
        self._time_limit = time_limit
        self._enter_phase = enter_phase
        self._best = BestCheckpoint(components.config.checkpoint, store, accumulator.world)
        self._world = accumulator.world
        minutes = components.config.checkpoint.every_minutes
        self._clock = None if minutes is None else SaveClock(60 * minutes, decides=self._world.is_main)
        if self._clock is not None:
            accumulator.add_rider(self._clock)
        self._background: BackgroundSave | None = None
        if components.config.checkpoint.background:
            self._save_behind()
        self._host_memory = HostMemory(self._world.device)
        self._failed_saves = 0  # in a row, of those in the background
        self._trouble = ""  # of the last save in the background
        self._rolls_back = components.config.trainer.on_spike == ROLLBACK
        self._tracker = accumulator.tracker
        self._meter = Meter(self._world, self.progress, utilization)
        self._is_measured = utilization is None
        self._evaluation: tuple[int, dict[str, float]] | None = None
        self._evaluator = self._make_evaluator() if self._evaluates else None
        # A run from another run's checkpoint has saved none itself.
        self._saved_step = self.progress.step if components.config.resume == "auto" else 0
        self._last: tuple[Window, Outcome] | None = None  # whether it was applied is not read yet
        self._unlogged: tuple[Window, Outcome] | None = None  # an update
        if self._saved_step:
            accumulator.replicas.saved = store.root / f"step-{self._saved_step}"
        self._watched = self._rolls_back or any(map(watches_updates, components.callbacks))
        self._loss_scale = 0.0
        self._reason = ""
        self._preempted_by = ""
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
        try:
            while not self.at_end and (max_epochs is None or self.progress.epoch < max_epochs):
                for window in self._accumulator.windows(self._loader):
                    self.step_window(window)
                    if self.at_end:
                        break
            self._tracker.raise_if_nonfinite()
        except (NonFiniteError, SpikeError):
            self._look_at_last(self._tracker.known_progress)  # what ends the run stands in the log
            self._settle(at_end=True)
            raise
        except BaseException:
            self._rescue()
            raise
        return self._finish()

    def step_window(self, window: OpenWindow) -> None:
        """Trains on one window, then logs, evaluates, saves and calls back where that is due.

        Whether the window was applied is read after the next window, when the device has finished it; or at once where
        something may be due.
        """
        if not self._is_measured:
            self._is_measured = self._meter.measure(window.plain)
        outcome = self._accumulator.step(window, self._components.loss)
        self._time_limit.window_ended()
        self._look_at_last(self._tracker.known_progress)
        self._meter.add(window.plain, outcome)
        self._last = (window.plain, outcome)
        if self._watched or self._is_due(self._tracker.max_possible_step):
            self._tracker.resolve_last_step()
            self._look_at_last(self._tracker.known_progress)
        if self._clock is not None and self._clock.due:
            self._look_at_last(self.progress)
            if not self._is_saved(self.progress.step):
                self._save()
        if self._background is not None and self._background.ready:
            self._settle()
        if self._reason:
            self._accumulator.stop()
        if self._time_limit.is_near and not self._preempted_by:
            self.preempt("trainer.max_time is about to be over")

    def _is_due(self, step: int) -> bool:
        trainer, save_every = self._components.config.trainer, self._components.config.checkpoint.every
        intervals = (trainer.log_every, trainer.eval_every, save_every)
        return step >= self._components.total_steps or any(every and step % every == 0 for every in intervals)

    def _look_at_last(self, progress: Progress) -> None:
        """Finds out whether the last window was applied; ``progress`` includes it."""
        if self._last is None:
            return
        (window, outcome), self._last = self._last, None
        self._watch_loss_scale(outcome)
        if outcome.applied:
            self._after_update(window, outcome, progress)
            return
        self._log(window, outcome, progress, evaluates=False)
        self._call(lambda callback: callback.on_skip(self, outcome))
        if self._rolls_back and outcome.finite:
            self._roll_back()

    def _roll_back(self) -> None:
        spikes = self._accumulator.spikes
        assert spikes is not None
        self._settle()
        self._enter_phase(f"rolling back from step {self.progress.step}")
        self._world.activity.phase = Phase.SAVE
        window = self.progress.window
        folder = roll_back(self._accumulator, spikes, self._store, self._components)
        if folder is not None:
            self._evaluation = self._unlogged = None
            if self._world.is_main:
                self._run_dir.note_rolled_back(self.progress.step, window)
            self._save(again=True)  # whoever resumes goes on with the same data
        self._enter_phase(TRAINING)

    def _watch_loss_scale(self, outcome: Outcome) -> None:
        lowest, before = self._accumulator.engine.min_loss_scale, self._loss_scale
        self._loss_scale = outcome.loss_scale
        if lowest is not None and self._loss_scale <= lowest < before:
            text = f"it has fallen to its minimum, {lowest:g}, at step {self._tracker.known_progress.step}"
            for logger in self._loggers:
                logger.alert("the loss scale has collapsed", text)

    def _after_update(self, window: Window, outcome: Outcome, progress: Progress) -> None:
        trainer, checkpoints, step = self._components.config.trainer, self._components.config.checkpoint, progress.step
        self._unlogged = (window, outcome)
        self._call(lambda callback: callback.on_update(self, outcome))
        evaluates = self._evaluates and (step % trainer.eval_every == 0 or step >= self._components.total_steps)
        # The last update's record comes before its checkpoint: a run that dies between the two makes no update again.
        if evaluates or step % trainer.log_every == 0 or step >= self._components.total_steps:
            self._log(window, outcome, progress, evaluates=evaluates)
            self._unlogged = None
        best = evaluates and self._is_best()
        if best or (checkpoints.every and step % checkpoints.every == 0):
            self._save(best=best)

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
        assert self._evaluator is not None
        self._enter_phase(f"evaluating after step {self.progress.step}")
        self._accumulator.use_evaluation_weights()
        found = self._evaluator.run()
        self._evaluation = (self.progress.step, found)
        self._world.activity.phase = Phase.BETWEEN
        self._call(lambda callback: callback.on_eval(self, found))
        if self._components.callbacks:
            self._ended = self._world.all_reduce_max_host([bool(self._reason)])[0] > 0
        self._meter.restart(self.progress)
        self._time_limit.evaluated()
        self._enter_phase(TRAINING)
        return found

    def _log(self, window: Window, outcome: Outcome, progress: Progress, *, evaluates: bool) -> None:
        lr = float(self._components.optimizers[0].param_groups[0]["lr"])
        record = self._meter.record(window, outcome, progress, lr=lr) | self._accumulator.stragglers.metrics
        if (recompiles := self._accumulator.engine.recompiles) is not None:
            record["recompiles"] = recompiles
        if self._accumulator.spikes is not None:
            record |= self._accumulator.spikes.metrics
        if evaluates:
            assert self._evaluator is not None
            record |= self._evaluate() | self._evaluator.samples
        if self._world.is_main:
            self._run_dir.require_owned()
        for logger in self._loggers:
            logger.log(record)
        self._logged = {"window": progress.window, "step": progress.step}
        self._write_status()

    def _log_evaluation(self) -> None:
        """Evaluates without an update: the record has no window's loss and no rates."""
        assert self._evaluator is not None
        progress = self.progress
        tokens = int(progress.tokens) if float(progress.tokens).is_integer() else progress.tokens
        record = {
            "step": progress.step,
            "window": progress.window,
            "epoch": progress.epoch,
            "samples": progress.samples,
            "tokens": tokens,
            **self._evaluate(),
            **self._evaluator.samples,
        }
        if self._world.is_main:
            self._run_dir.require_owned()
        for logger in self._loggers:
            logger.log(record)

    def _is_best(self) -> bool:
        return self._evaluation is not None and self._best.improves(self._evaluation[1])

    def _is_saved(self, step: int) -> bool:
        """Whether the last save was, or is, of this step."""
        saving = self._background is not None and self._background.pending and self._background.step == step
        return saving or step == self._saved_step

    def _save_behind(self) -> None:
        if self._accumulator.engine.state_layout is StateLayout.EXTERNAL:
            if self._world.is_main:
                _log.warning("checkpoint.background: the engine writes files of its own, so training waits for saves")
            return
        self._background = BackgroundSave(self._world.rank, self._world.size)
        self._accumulator.add_rider(self._background)

    def _save(self, *, best: bool = False, again: bool = False, waits: bool = False) -> None:
        self._settle(at_end=waits)
        self._run_dir.require_owned()
        self._enter_phase(f"saving step {self.progress.step}")
        self._world.activity.phase = Phase.SAVE
        self._accumulator.replicas.check()
        self._accumulator.replicas.check_state()
        self._accumulator.use_evaluation_weights()
        for logger in self._loggers:
            logger.sync()
        spikes = self._accumulator.spikes
        run = checkpoint.RunState(
            progress=self.progress,
            position=self._loader.position,
            wandb_id=self._wandb_id,
            config=self._components.record,
            callbacks=callback_states(self._components.callbacks),
            optimizer_format=self._components.config.optimizer_format(self._world.size),
            facts=self._components.facts if self._world.is_main else {},
            spikes={} if spikes is None else spikes.state_dict(),
            logged=self._logged,
        )
        engine, data, step = self._accumulator.engine, self._loader.state(), self.progress.step
        if self._background is not None and not (best or again or waits):
            folder = self._store.begin(step, self._world)
            self._host_memory.reuse()
            copies = list(checkpoint.contents(engine, run, data, self._world, host=self._host_memory.copy))
            self._host_memory.wait()
            self._background.begin(step, folder, copies)
            if self._clock is not None:
                self._clock.saved()
            self._time_limit.copied()
            self._goes_on()
            return
        path = self._store.save(
            step,
            self._world,
            partial(checkpoint.save, engine=engine, run=run, data=data, world=self._world),
            again=again,
            before_publishing=partial(self._before_publishing, best=best),
        )
        if best and self._evaluation is not None:
            self._best.note(self._evaluation[1])
        if self._clock is not None:
            self._clock.saved()
        self._saved(step, path)
        self._time_limit.saved()
        self._goes_on()

    def _saved(self, step: int, path: Path) -> None:
        """Tells of a checkpoint that is there."""
        self._saved_step, self._accumulator.replicas.saved = step, path
        self._failed_saves, self._trouble = 0, ""
        if self._world.is_main:
            self._run_dir.note_saved(step)
        self._world.activity.phase = Phase.BETWEEN
        self._call(lambda callback: callback.on_checkpoint(self, path))
        _log.info("saved %s", path)

    def _goes_on(self) -> None:
        self._world.activity.phase = Phase.BETWEEN
        self._meter.restart(self.progress)
        self._enter_phase(TRAINING)

    def _settle(self, *, at_end: bool = False) -> None:
        """Publishes what was saved in the background, for whose files this waits; a collective between two windows.

        A failure is a warning, and also an error where the one before has failed too and this is not ``at_end``.
        """
        if self._background is None or not self._background.pending:
            return
        self._enter_phase("publishing a checkpoint")
        self._world.activity.phase = Phase.SAVE
        written = self._background.take()
        error = written.error
        reason = "" if error is None else self._run_dir.hidden(reason_of(self._world.rank, error))
        outcomes = self._world.all_gather_object((dict(written.digests), reason))
        if self._world.is_main and not any(reason for _, reason in outcomes):
            try:
                self._publish(written.step, [digests for digests, _ in outcomes])
            except OSError as failed:
                error, reason = failed, self._run_dir.hidden(reason_of(self._world.rank, failed))
        reasons = [*(reason for _, reason in outcomes if reason), self._world.broadcast_str(reason)]
        first = next(filter(None, reasons), "")
        if not first:
            self._saved(written.step, self._store.root / f"step-{written.step}")
        else:
            self._failed(written.step, first, error, at_end=at_end)
        self._time_limit.saved(behind=written.seconds)
        self._goes_on()

    def _publish(self, step: int, digests: Sequence[Mapping[str, str]]) -> None:
        clear(self._store.folder_of(step))
        self._store.publish(step, digests, before_publishing=self._run_dir.require_owned)

    def _rescue(self) -> None:
        """Publishes what was saved in the background before an error, without a collective: ranks may be gone."""
        if self._background is None or not self._background.pending:
            return
        try:
            written = self._background.take(_RESCUE_S)
            if self._world.is_main and written.error is None:
                folder = self._store.folder_of(written.step)
                self._publish(written.step, self._background.left_by_all(folder, _RESCUE_S))
                self._run_dir.note_saved(written.step)
        except (OSError, ValueError, DistaccumError) as error:
            _log.warning("step %d, which was being saved, is lost (%s)", self._background.step, error)

    def _failed(self, step: int, reason: str, error: Exception | None, *, at_end: bool) -> None:
        """What could not be saved in the background; the checkpoint before is there."""
        self._failed_saves += 1
        self._trouble = f"step {step} could not be saved: {reason}"
        if self._world.is_main:
            self._store.drop(step)
            self._write_status()
            goes_on = "the run goes on, and ends if the next save fails, too"
            ends = goes_on if self._failed_saves == 1 else "it is the second in a row, and the run ends"
            _log.warning("%s; %s", self._trouble, "it is saved once more" if at_end else ends)
        if self._failed_saves > 1 and not at_end:
            raise error or PeerError(reason, "while this rank wrote its part of a checkpoint")

    def _finish(self) -> dict[str, float]:
        """Makes the last update's record, evaluation and checkpoint, unless they were due anyway.

        A preempted run makes the checkpoint alone: the process that continues it makes the rest, and there is no time.
        """
        self._look_at_last(self.progress)
        self._accumulator.replicas.check()  # a checkpoint may not follow
        if self._ended or self._accumulator.stopping:
            self._take_reasons()
        if self.preempted:
            self._save_last()
            return {}
        is_due = self._evaluates and (self._evaluation is None or self._evaluation[0] != self.progress.step)
        if self._unlogged is not None:
            self._log(*self._unlogged, self.progress, evaluates=is_due)
        elif self._components.evaluates_alone:
            self._log_evaluation()
        elif is_due:  # a finished run that is resumed makes no update, but is evaluated
            self._evaluate()
        self._save_last(best=is_due and self._is_best())
        results = self._evaluation[1] if self._evaluation else {}
        self._call(lambda callback: callback.on_end(self, results))
        return results

    def _call(self, hook: Callable[[Callback], None]) -> None:
        """Calls a hook of every callback.

        Raises:
            MisuseError: a callback sets a learning rate, which the schedule would set again before the next step.
        """
        for callback in self._components.callbacks:
            before = self._learning_rates()
            hook(callback)
            after = self._learning_rates()
            if after != before:
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
        if self._saved_step != self.progress.step:
            self._save(best=best, waits=True)
        elif best and self._evaluation is not None:
            if self._world.is_main:
                self._before_publishing(best=best)
            self._best.note(self._evaluation[1])

    def _before_publishing(self, *, best: bool) -> None:
        self._run_dir.require_owned()
        if best and self._evaluation is not None:
            self._best.mark(self._store.root / f"step-{self.progress.step}", self._evaluation[1])

    def _write_status(self) -> None:
        if self._world.is_main:
            self._run_dir.write_status(State.RUNNING, step=self._tracker.known_progress.step, reason=self._trouble)
