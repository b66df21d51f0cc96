"""The evaluations of a run: when one is due, and what its record holds of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.data.held_out import evaluation_workers
from distaccum.data.window import Window
from distaccum.distributed.activity import Phase
from distaccum.errors import MisuseError, shorten
from distaccum.train import ema
from distaccum.train.evaluate import Evaluation, evaluates
from distaccum.train.metrics.loggers import TEXTS
from distaccum.train.parts.base import Done, Every, Part

if TYPE_CHECKING:
    from distaccum.train.loop import Loop, TrainingRun


class Evaluations(Part):
    """Evaluates after every ``trainer.eval_every``-th update or at the end of each epoch, and after the last update.

    Args:
        run: whose model is evaluated.
    """

    def __init__(self, run: TrainingRun) -> None:
        components, trainer = run.components, run.components.config.trainer
        self._components, self._accumulator = components, run.accumulator
        self._evaluates = evaluates(components.data, components.config)
        self._every = Every(trainer.eval_every, components.plan)
        self.by_epoch = self._every.by_epoch
        self._trained = False  # since the last evaluation
        self._evaluation = Evaluation(
            run.accumulator.engine,
            components.data,
            components.loss,
            run.accumulator.world,
            micro_batch_size=components.plan.micro_batch_size,
            workers=evaluation_workers(components.data, trainer.num_workers, asdict(trainer.loader)),
            limit=trainer.eval_samples,
            metrics=components.metrics,
            seed=components.config.seed,
        )

    def due(self, progress: Progress) -> bool:
        """So is one after the last update."""
        return self._evaluates and (progress.step >= self._components.total_steps or self._every(progress))

    wants_record = due

    def adds(self, run: Loop, done: Done | None) -> Mapping[str, Any]:
        """Evaluates, if that is due after this window; an evaluation has a record only if it is made here."""
        is_due = done is None or (done.outcome.applied and (self.due(done.progress) or run.over or self.owes(run)))
        return self._evaluate(run) if self._evaluates and is_due else {}

    def on_window(self, run: Loop, window: Window, outcome: Outcome) -> None:
        """Notes that there was one."""
        self._trained = True

    def owes(self, run: Loop) -> bool:
        """An evaluation, where an epoch is over whose last window was no update."""
        if not (self._evaluates and self.by_epoch and self._trained) or run.progress.epoch_window:
            return False
        return run.results_of(run.progress.step) is None

    def ends(self, run: Loop) -> None:
        """Evaluates, if nobody has since the last update, as in a finished run that is resumed."""
        if self._evaluates and run.results_of(run.progress.step) is None:
            self._evaluate(run)

    def _evaluate(self, run: Loop) -> dict[str, Any]:
        """Evaluates and calls the parts; a collective. Gives what a record has of it.

        Raises:
            MisuseError: a result and the texts have one name.
        """
        self._trained, step = False, run.progress.step
        with run.paused(f"evaluating after step {step}"):
            self._accumulator.use_evaluation_weights()
            with ema.evaluated(self._components.callbacks):
                found = run.results_of(step)  # another group of ranks may have made it
                found = self._evaluation.run() if found is None else found
                write = self._components.texts
                texts = {} if write is None else {TEXTS: write(self._accumulator.engine)}
            tables = self._evaluation.tables
            if twice := (found.keys() | tables.keys()) & texts.keys():
                problem = f"{shorten(twice)} are the texts of an evaluation, and a result of it too"
                raise MisuseError(f"{problem}: give the metric or the score another name")
            self._accumulator.world.activity.phase = Phase.BETWEEN
            run.note_evaluation(step, found)
        return {**found, **self._evaluation.samples, **tables, **texts}
