"""The run from the first window to the last: orchestration, no arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from distaccum.build import Parts
from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint.store import CheckpointStore
from distaccum.clocks import Clocks
from distaccum.data.loader import WindowLoader
from distaccum.engines.base import Engine
from distaccum.errors import DataError
from distaccum.evaluate import evaluate
from distaccum.metrics.meter import Meter
from distaccum.metrics.sinks import Sink
from distaccum.run_dir import RunDir, State
from distaccum.window import Outcome, Window, run_window
from distaccum.world import World


class Trainer:
    """Trains what ``parts`` describe until ``total_steps`` updates are applied.

    Args:
        parts: model, data, loss, optimizer, schedule, plan.
        engine: owns the model from here on.
        world: this rank.
        run_dir: where status and checkpoints go.
        store: of the checkpoints.
        sinks: of the records; empty on all ranks but 0.
        clocks: where to start; all zero for a new run.
        wandb_id: kept in every checkpoint.
    """

    def __init__(
        self, parts: Parts, engine: Engine, world: World, *, run_dir: RunDir, store: CheckpointStore,
        sinks: Sequence[Sink], clocks: Clocks, wandb_id: str,
    ) -> None:  # fmt: skip
        self._parts, self._engine, self._world = parts, engine, world
        self._run_dir, self._store, self._sinks = run_dir, store, sinks
        self._clocks, self._wandb_id = clocks, wandb_id
        self._meter = Meter(world)
        self._evaluation: tuple[int, dict[str, float]] | None = None
        self._saved_step = clocks.step
        self._skipped_in_a_row = 0
        self._unlogged: tuple[Window, Outcome, float] | None = None

    @property
    def clocks(self) -> Clocks:
        """How far the run has come."""
        return self._clocks

    def fit(self) -> dict[str, float]:
        """Trains to the end; returns the last evaluation, empty without one.

        Raises:
            NonFiniteError: a window's gradient was NaN or infinite; on every rank alike, before anything is saved.
        """
        parts, trainer = self._parts, self._parts.config.trainer
        self._write_status()
        loader = WindowLoader(
            parts.source.train, parts.plan, self._world,
            loss=parts.loss, seed=parts.config.seed, source=parts.source, num_workers=trainer.num_workers,
        )  # fmt: skip
        self._engine.model.train()
        last_window = None if trainer.max_epochs is None else trainer.max_epochs * parts.plan.windows_per_epoch
        if self._clocks.step < parts.total_steps:
            self._meter.restart()
            for window in loader.windows(self._clocks.window, last_window):
                self._attempt(window)
                if self._clocks.step == parts.total_steps:
                    break
        return self._finish()

    def _attempt(self, window: Window) -> None:
        """One window: an update, or a skip where there is nothing that it counts."""
        applied = window.count > 0
        outcome: Outcome | None = None
        factor = self._parts.schedule(self._clocks.step)
        if applied:
            self._engine.set_lr_factor(factor)
            clip_norm = self._parts.config.optim.clip_norm
            outcome = run_window(self._engine, window, self._parts.loss, self._parts.policy, clip_norm=clip_norm)
        self._clocks = self._clocks.after(samples=window.samples, tokens=window.count, applied=applied)
        self._meter.add(window, outcome)
        if outcome is None:
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row == self._parts.plan.windows_per_epoch:
                raise DataError(f"{self._skipped_in_a_row} windows in a row, a whole epoch, count nothing for the loss")
        else:
            self._skipped_in_a_row = 0
            self._after_update(window, outcome, lr=self._parts.config.optim.lr * factor)

    def _after_update(self, window: Window, outcome: Outcome, *, lr: float) -> None:
        trainer, checkpoints, step = self._parts.config.trainer, self._parts.config.checkpoint, self._clocks.step
        self._unlogged = (window, outcome, lr)
        evaluates = self._evaluates and step % trainer.eval_every == 0
        if evaluates or step % trainer.log_every == 0:
            self._log(evaluates=evaluates)
        if checkpoints.every and step % checkpoints.every == 0:
            self._save()

    @property
    def _evaluates(self) -> bool:
        return self._parts.source.held_out is not None and self._parts.config.trainer.eval_every > 0

    def _evaluate(self) -> dict[str, float]:
        parts = self._parts
        found = evaluate(
            self._engine, parts.source, parts.loss, parts.policy, self._world, micro_size=parts.plan.micro_size
        )
        self._evaluation = (self._clocks.step, found)
        self._meter.restart()
        return found

    def _log(self, *, evaluates: bool) -> None:
        """Logs the last update."""
        assert self._unlogged is not None
        window, outcome, lr = self._unlogged
        record = self._meter.record(window, outcome, self._clocks, lr=lr)
        self._unlogged = None
        if evaluates:
            record |= self._evaluate()
        for sink in self._sinks:
            sink.log(record)
        self._write_status()

    def _save(self) -> None:
        self._meter.check_finite()
        run = checkpoint.RunState(
            clocks=self._clocks,
            position=position(self._parts),
            wandb_id=self._wandb_id,
            config=asdict(self._parts.config),
        )
        write = partial(checkpoint.save, engine=self._engine, run=run, world=self._world)
        self._store.save(self._clocks.step, self._world, write)
        self._saved_step = self._clocks.step
        self._meter.restart()

    def _finish(self) -> dict[str, float]:
        """The last update's record, evaluation and checkpoint, where they were not due anyway."""
        self._meter.check_finite()
        evaluates = self._evaluates and (self._evaluation is None or self._evaluation[0] != self._clocks.step)
        if self._unlogged is not None:
            self._log(evaluates=evaluates)
        elif evaluates:  # a finished run that is resumed makes no update, and still says how good it is
            self._evaluate()
        if self._parts.config.checkpoint.every and self._saved_step != self._clocks.step:
            self._save()
        return self._evaluation[1] if self._evaluation else {}

    def _write_status(self) -> None:
        if self._world.is_main:
            self._run_dir.write_status(State.RUNNING, step=self._clocks.step)


def position(parts: Parts) -> dict[str, int]:
    """The numbers that give a window's index its meaning: where they differ, a checkpoint's data position is void."""
    return {
        "batch.global_size": parts.plan.global_size,
        "samples": parts.plan.samples,
        "seed": parts.config.seed,
    }
