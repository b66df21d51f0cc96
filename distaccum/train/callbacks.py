"""Callbacks of a run: the base, and early stopping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.errors import ConfigError


class Run(Protocol):
    """What a callback sees of the run."""

    @property
    def progress(self) -> Progress:
        """The run's progress."""

    def stop(self, reason: str) -> None:
        """Asks all ranks to stop; one rank that asks is enough.

        After an evaluation the run ends at once, else before the next window, or after it where the data is a stream.
        """


class Callback:
    """Inherit from it, and write the methods you want; every rank calls them, in the order of the callbacks."""

    def on_update(self, run: Run, outcome: Outcome) -> None:
        """Called after an applied update. With this or :meth:`on_skip` the host waits for each window."""

    def on_skip(self, run: Run, outcome: Outcome) -> None:
        """Called after a window that was not applied, since its gradient was NaN or infinite."""

    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        """Called after an evaluation; the results are the same on every rank."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Called after a checkpoint is complete at ``path``."""

    def on_end(self, run: Run, results: Mapping[str, float]) -> None:
        """Called with the last evaluation's results at the end of a run that neither failed nor was preempted."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as values that JSON can hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`, before the first update."""


def watches_updates(callback: Callback) -> bool:
    """Whether the callback has to know of every window whether it was applied."""
    kind = type(callback)
    return kind.on_update is not Callback.on_update or kind.on_skip is not Callback.on_skip


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The callbacks by the name of their class and a number, which checkpoints keep their state under."""
    found: dict[str, Callback] = {}
    for callback in callbacks:
        # "EarlyStop" was the name of EarlyStopping when the checkpoints' format 3 began.
        kind = "EarlyStop" if type(callback) is EarlyStopping else type(callback).__name__
        found[f"{kind}-{sum(name.startswith(f'{kind}-') for name in found)}"] = callback
    return found


class EarlyStopping(Callback):
    """Stops a run whose evaluations no longer improve.

    Args:
        metric: of the evaluation, such as ``eval_loss``.
        patience: evaluations in a row without an improvement.
        min_delta: what counts as an improvement, in the metric's own unit.
        larger_is_better: as for an accuracy.

    Raises:
        ConfigError: a patience below 1.
    """

    def __init__(
        self, *, metric: str = "eval_loss", patience: int = 3, min_delta: float = 0.0, larger_is_better: bool = False
    ) -> None:
        if patience < 1:
            remedy = "Use a whole number from 1"
            raise ConfigError("callbacks.early_stop.patience", patience, "must be at least 1", remedy)
        self._metric, self._patience, self._min_delta = metric, patience, min_delta
        self._sign = -1.0 if larger_is_better else 1.0
        self._best, self._waited = float("inf"), 0

    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        """Raises ConfigError if there is no such metric."""
        if self._metric not in results:
            remedy = f"Use one of {', '.join(results)}"
            raise ConfigError("callbacks.early_stop.metric", self._metric, "the evaluation has no such result", remedy)
        value = self._sign * results[self._metric]
        if value < self._best - self._min_delta:
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            run.stop(f"{self._metric} has not improved in {self._waited} evaluations")

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, and how long ago it was."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the best value and the count."""
        self._best, self._waited = state["best"], state["waited"]
