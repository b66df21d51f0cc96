"""The run from the first window to the last: orchestration, no arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint.store import CheckpointStore
from distaccum.data.loader import WindowLoader
from distaccum.data.window import Window
from distaccum.errors import NonFiniteError
from distaccum.train.callbacks import named, watches_updates
from distaccum.train.components import TrainingComponents
from distaccum.train.evaluate import evaluate
from distaccum.train.metrics.loggers import Logger
from distaccum.train.metrics.meter import Meter
from distaccum.train.run_dir import RunDir, State
from distaccum.train.time_limit import Deadline


class Loop:
    """Trains what ``parts`` describe until ``total_steps`` updates are applied, or until it is stopped: by a callback,
    which is an end too, or by :meth:`preempt` or the deadline, after which another process is to go on.

    Args:
        parts: data, loss, schedule, callbacks, metrics.
        accumulator: has the model and the optimizer, and the clocks to start from.
        feed: of the training data.
        run_dir: where status and checkpoints go.
        store: of the checkpoints.
        sinks: of the records; empty on all ranks but 0.
        wandb_id: kept in every checkpoint.
        deadline: by when to have saved.
    """

    def __init__(
        self,
        parts: TrainingComponents,
        accumulator: Accumulator,
        feed: WindowLoader,
        *,
        run_dir: RunDir,
        store: CheckpointStore,
        loggers: Sequence[Logger],
        wandb_id: str,
        deadline: Deadline,
    ) -> None:
        self._parts, self._accumulator, self._feed = parts, accumulator, feed
        self._run_dir, self._store, self._sinks, self._wandb_id = run_dir, store, loggers, wandb_id
        self._deadline = deadline
        self._world, self._tracker = accumulator.world, accumulator.tracker
        self._meter = Meter(self._world, self.progress)
        self._evaluation: tuple[int, dict[str, float]] | None = None
        # A run from another's checkpoint has none of its own yet.
        self._saved_step = self.progress.step if parts.config.resume == "auto" else 0
        self._attempt: tuple[Window, Outcome] | None = None  # not looked at yet
        self._unlogged: tuple[Window, Outcome] | None = None  # an update
        self._watched = any(map(watches_updates, parts.callbacks))
        self._loss_scale = 0.0
        self._reason, self._preempted_by, self._ended = "", "", False
        self.stop_reason = ""  # of all ranks that asked to stop, or to be preempted: known at the end
        self.preempted = False  # whether it is to be continued: all ranks', known at the end

    @property
    def progress(self) -> Progress:
        """How far the run has come; waits for the last window's end."""
        return self._tracker.progress

    def stop(self, reason: str) -> None:
        """For callbacks: see ``distaccum.train.callbacks.Run``."""
        self._reason = reason

    def preempt(self, reason: str) -> None:
        """Asks all ranks to save and leave before the next window; may be called by a signal's handler."""
        self._preempted_by = reason
        self._accumulator.stop()

    def fit(self) -> dict[str, float]:
        """Trains to the end; returns the last evaluation, empty without one.

        Raises:
            NonFiniteError: too many gradients were NaN or infinite; on every rank alike. The weights are untouched.
            DataError: an epoch gives nothing to train on.
        """
        self._write_status()
        if not self._accumulator.engine.unwrapped_model.training:  # as pretrained models come; else parts may be frozen
            self._accumulator.model.train()
        self._meter.restart(self.progress)
        max_epochs = self._parts.config.trainer.max_epochs
        try:
            while not self._at_end and (max_epochs is None or self.progress.epoch < max_epochs):
                for window in self._accumulator.windows(self._feed):
                    self._after_attempt(window.plain, self._accumulator.step(window, self._parts.loss))
                    if self._at_end:
                        break
            self._tracker.raise_if_nonfinite()
        except NonFiniteError:
            self._look_at_attempt(self._tracker.known_progress)  # what ends the run stands in the log
            raise
        return self._finish()

    @property
    def _at_end(self) -> bool:
        return self._ended or self._accumulator.stopping or self._tracker.known_progress.step >= self._parts.total_steps

    def _after_attempt(self, window: Window, outcome: Outcome) -> None:
        """Looks at the attempt before, whose end nobody waits for any more; and at this one where it may matter now."""
        self._deadline.window_ended()
        self._look_at_attempt(self._tracker.known_progress)
        self._meter.add(window, outcome)
        self._attempt = (window, outcome)
        if self._watched or self._is_due(self._tracker.max_possible_step):
            self._tracker.resolve_last_step()
            self._look_at_attempt(self._tracker.known_progress)
        if self._reason:
            self._accumulator.stop()
        if self._deadline.is_near and not self._preempted_by:
            self.preempt("trainer.max_time is about to be over")

    def _is_due(self, step: int) -> bool:
        trainer, save_every = self._parts.config.trainer, self._parts.config.checkpoint.every
        intervals = (trainer.log_every, trainer.eval_every, save_every)
        return step >= self._parts.total_steps or any(every and step % every == 0 for every in intervals)

    def _look_at_attempt(self, progress: Progress) -> None:
        """Finds out whether it was applied; ``progress`` are those after it."""
        if self._attempt is None:
            return
        (window, outcome), self._attempt = self._attempt, None
        self._watch_loss_scale(outcome)
        if outcome.applied:
            self._after_update(window, outcome, progress)
            return
        self._log(window, outcome, progress, evaluates=False)
        for callback in self._parts.callbacks:
            callback.on_skip(self, outcome)

    def _watch_loss_scale(self, outcome: Outcome) -> None:
        lowest, before = self._accumulator.engine.min_loss_scale, self._loss_scale
        self._loss_scale = outcome.loss_scale
        if lowest is not None and self._loss_scale <= lowest < before:
            text = f"it has fallen to its minimum, {lowest:g}, at step {self._tracker.known_progress.step}"
            for logger in self._sinks:
                logger.alert("the loss scale has collapsed", text)

    def _after_update(self, window: Window, outcome: Outcome, progress: Progress) -> None:
        trainer, checkpoints, step = self._parts.config.trainer, self._parts.config.checkpoint, progress.step
        self._unlogged = (window, outcome)
        for callback in self._parts.callbacks:
            callback.on_update(self, outcome)
        evaluates = self._evaluates and (step % trainer.eval_every == 0 or step >= self._parts.total_steps)
        if evaluates or step % trainer.log_every == 0:
            self._log(window, outcome, progress, evaluates=evaluates)
            self._unlogged = None
        if checkpoints.every and step % checkpoints.every == 0:
            self._save()

    @property
    def _evaluates(self) -> bool:
        return self._parts.source.eval_dataset is not None and self._parts.config.trainer.eval_every > 0

    def _evaluate(self) -> dict[str, float]:
        parts = self._parts
        found = evaluate(
            self._accumulator.engine,
            parts.source,
            parts.loss,
            self._world,
            micro_batch_size=parts.plan.micro_batch_size,
            metrics=parts.metrics,
        )
        self._evaluation = (self.progress.step, found)
        for callback in parts.callbacks:
            callback.on_eval(self, found)
        if parts.callbacks:
            self._ended = self._world.all_reduce_max_host([bool(self._reason)])[0] > 0
        self._meter.restart(self.progress)
        self._deadline.evaluated()
        return found

    def _log(self, window: Window, outcome: Outcome, progress: Progress, *, evaluates: bool) -> None:
        lr = float(self._parts.optimizers[0].param_groups[0]["lr"])
        record = self._meter.record(window, outcome, progress, lr=lr)
        if evaluates:
            record |= self._evaluate()
        for logger in self._sinks:
            logger.log(record)
        self._write_status()

    def _save(self) -> None:
        run = checkpoint.RunState(
            progress=self.progress,
            position=self._feed.position,
            wandb_id=self._wandb_id,
            config=asdict(self._parts.config),
            callbacks={name: callback.state_dict() for name, callback in named(self._parts.callbacks).items()},
            optimizer_format=self._parts.config.optimizer_format(self._world.size),
        )
        engine, data = self._accumulator.engine, self._feed.state()
        path = self._store.save(
            self.progress.step,
            self._world,
            partial(checkpoint.save, engine=engine, run=run, data=data, world=self._world),
        )
        self._saved_step = self.progress.step
        for callback in self._parts.callbacks:
            callback.on_checkpoint(self, path)
        self._meter.restart(self.progress)
        self._deadline.saved()

    def _finish(self) -> dict[str, float]:
        """The last update's record, evaluation and checkpoint, where they were not due anyway.

        Of a run that is to be continued the checkpoint alone: its record and evaluation are for whoever makes the next
        update, and there is no time.
        """
        self._look_at_attempt(self.progress)
        if self._ended or self._accumulator.stopping:
            self._take_reasons()
        if self.preempted:
            self._save_the_last()
            return {}
        evaluates = self._evaluates and (self._evaluation is None or self._evaluation[0] != self.progress.step)
        if self._unlogged is not None:
            self._log(*self._unlogged, self.progress, evaluates=evaluates)
        elif evaluates:  # a finished run that is resumed makes no update, and still says how good it is
            self._evaluate()
        self._save_the_last()
        results = self._evaluation[1] if self._evaluation else {}
        for callback in self._parts.callbacks:
            callback.on_end(self, results)
        return results

    def _take_reasons(self) -> None:
        """Whose wish it was to stop, and whether that is an end."""
        reasons = self._world.all_gather_names([self._reason] if self._reason else [])
        if not reasons and self.progress.step < self._parts.total_steps:
            reasons = self._world.all_gather_names([self._preempted_by] if self._preempted_by else [])
            self.preempted = True
        self.stop_reason = "; ".join(reasons)

    def _save_the_last(self) -> None:
        if self._parts.config.checkpoint.every and self._saved_step != self.progress.step:
            self._save()

    def _write_status(self) -> None:
        if self._world.is_main:
            self._run_dir.write_status(State.RUNNING, step=self._tracker.known_progress.step)
