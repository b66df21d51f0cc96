"""Callbacks of a run: the base, early stopping, and a learning rate that falls where an evaluation stays."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.config.checks import require_choice, require_count
from distaccum.config.direction import MODES, known_mode, mode_of
from distaccum.errors import CheckpointError, ConfigError, near_misses, shorten


class Run(Protocol):
    """What a callback sees of the run."""

    @property
    def progress(self) -> Progress:
        """The run's progress."""

    @property
    def model(self) -> nn.Module:
        """The model without the engine's wrapper, to look at; its parameters are sharded where the engine shards."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Over the model's parameters, to look at; rates are changed by :attr:`Callback.lr_factor`."""

    def log(self, numbers: Mapping[str, float | Tensor]) -> None:
        """Adds rank 0's numbers to the next record: to ``metrics.jsonl``, every tracker and the report.

        That is the record of this update or evaluation, if it has one; between two records the last value of a name
        stands. A tensor (0-dim) is read when the record is made. Sums over ranks are a loss's to log: see ``Loss``.

        Raises:
            MisuseError: it is no number, or the name is one of a record's own.
        """

    def stop(self, reason: str) -> None:
        """Asks all ranks to stop; one rank that asks is enough.

        After an evaluation the run ends at once, else before the next window, or after it where the data is a stream.
        """


class Callback:
    """Inherit from it, and write the methods you want; every rank calls them, in the order of the callbacks."""

    needs_evaluation: ClassVar[bool] = False
    """Whether it does nothing in a run without evaluations, which then is refused."""
    watched_result: str | None = None
    """The result of an evaluation that it looks at, such as ``eval_loss``; one of no held-out set is refused."""

    @property
    def lr_factor(self) -> float:
        """A factor of every learning rate, next to the schedule's; the same on every rank, and read at each step."""
        return 1.0

    def forget(self) -> None:
        """Called as a run begins, before a checkpoint's state is restored: an object may have seen another run."""

    def on_update(self, run: Run, outcome: Outcome) -> None:
        """Called after an applied update. With this or :meth:`on_skip` the host waits for each window."""

    def on_skip(self, run: Run, outcome: Outcome) -> None:
        """Called after a window that was not applied, since its gradient was NaN or infinite, or spiked."""

    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        """Called after an evaluation; the results are the same on every rank."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Called after a checkpoint is complete at ``path``.

        ``run.progress`` is the checkpoint's. The model is some updates ahead with ``checkpoint.background=true``; with
        ``auto`` it is the checkpoint's, too, since training waits for saves that a callback is called with.
        """

    def on_end(self, run: Run, results: Mapping[str, float]) -> None:
        """Called with the last evaluation's results at the end of a run that neither failed nor was preempted."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as values that JSON can hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`, before the first update or at a rollback."""


def looks_at_checkpoints(callback: Callback) -> bool:
    """Whether the callback is called with each checkpoint."""
    return type(callback).on_checkpoint is not Callback.on_checkpoint


def watches_updates(callback: Callback) -> bool:
    """Whether the callback has to know of every window whether it was applied."""
    kind = type(callback)
    return kind.on_update is not Callback.on_update or kind.on_skip is not Callback.on_skip


def check(callbacks: Sequence[Any], *, evaluates: bool) -> None:
    """Refuses what would never be called, or be called in vain.

    Raises:
        ConfigError: no callback, a hook that is misspelt or takes other arguments, state that is not JSON, or one that
            waits for evaluations in a run without.
    """
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in callbacks:
        kind = type(callback)
        if not isinstance(callback, Callback):
            shown = f"the class {callback.__name__}" if inspect.isclass(callback) else kind.__name__
            remedy = "Inherit from distaccum.Callback, and give an object of the class"
            raise ConfigError("callbacks", shown, "is no callback", remedy)
        unknown = [name for name in dir(kind) if name.startswith("on_") and name not in hooks]
        if unknown:
            problem = f"nobody calls {shorten(unknown)}{near_misses(unknown[0], hooks)}"
            remedy = f"The hooks are {', '.join(hooks)}; begin the name of a method of yours otherwise"
            raise ConfigError("callbacks", kind.__name__, problem, remedy)
        for name in hooks:
            _check_signature(callback, name)
        _as_json(callback, kind.__name__)
        if callback.needs_evaluation and not evaluates:
            problem = "waits for evaluations, and this run makes none"
            remedy = "Give the data an eval_dataset and trainer.eval_every, or leave it out"
            raise ConfigError("callbacks", kind.__name__, problem, remedy)


def _check_signature(callback: Callback, name: str) -> None:
    wanted = list(inspect.signature(getattr(Callback, name)).parameters)[1:]
    try:
        inspect.signature(getattr(callback, name)).bind(*wanted)
    except TypeError as error:
        remedy = f"Write def {name}(self, {', '.join(wanted)})"
        raise ConfigError("callbacks", type(callback).__name__, f"{name} takes other arguments", remedy) from error


def _as_json(callback: Callback, name: str) -> dict[str, Any]:
    state = callback.state_dict()
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        problem = f"its state_dict() holds what JSON cannot ({error})"
        raise ConfigError(
            "callbacks", name, problem, "Give numbers, texts, lists and dicts: tensor.tolist()"
        ) from error
    return state


def states(callbacks: Sequence[Callback]) -> dict[str, dict[str, Any]]:
    """What a checkpoint keeps of the callbacks, by their names.

    Raises:
        CheckpointError: a callback's state is not JSON.
    """
    try:
        return {name: _as_json(callback, name) for name, callback in named(callbacks).items()}
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def restore(callbacks: Sequence[Callback], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Gives the callbacks the :func:`states` of a checkpoint by their names; one that it has not stays as it is.

    A callback that judges a metric takes the first state that is left of its class and of the same metric and mode.
    """
    left = dict(states)
    for name, callback in named(callbacks).items():
        fitting = [name] if name in left else []
        if isinstance(callback, Judging):
            kind = name.rpartition("-")[0]
            fitting = [key for key in left if key.rpartition("-")[0] == kind and callback.is_of(left[key])]
        if fitting:
            callback.load_state_dict(left.pop(fitting[0]))


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The callbacks by the name of their class and a number, which checkpoints keep their state under."""
    found: dict[str, Callback] = {}
    for callback in callbacks:
        # "EarlyStop" was the name of EarlyStopping when the checkpoints' format 3 began.
        kind = "EarlyStop" if type(callback) is EarlyStopping else type(callback).__name__
        found[f"{kind}-{sum(name.startswith(f'{kind}-') for name in found)}"] = callback
    return found


class Judging(Callback):
    """Asks of each evaluation whether a result has improved.

    Args:
        key: of its settings, for messages.
        metric: of the evaluation, such as ``eval_loss``.
        mode (min | max | null): which value is the better one; None: what the metric's name says.
        larger_is_better: the older word for it; true is ``max``.

    Raises:
        ConfigError: no such mode, or two that differ.
    """

    needs_evaluation = True

    def __init__(self, key: str, metric: str, mode: str | None, larger_is_better: bool | None) -> None:
        if larger_is_better is not None:
            older = "max" if larger_is_better else "min"
            if mode not in (None, older):
                problem = f"and larger_is_better={larger_is_better}"
                raise ConfigError(f"{key}.mode", mode, problem, "State the mode alone")
            mode = older
        require_choice(f"{key}.mode", mode, (*MODES, None))
        self.watched_result = self._metric = metric
        self._key, self._mode = key, mode or known_mode(metric)

    def require_mode(self) -> None:
        """Raises ConfigError where there is no mode, and the metric's name does not say what is better."""
        mode_of(f"{self._key}.mode", self._metric, self._mode)

    def state_dict(self) -> dict[str, Any]:
        """What the state is of."""
        return {"metric": self._metric, "mode": self._mode}

    def is_of(self, state: Mapping[str, Any]) -> bool:
        """Whether a saved state, where it says so, is of the same metric and mode."""
        return all(state.get(key, own) == own for key, own in Judging.state_dict(self).items())

    def _result(self, results: Mapping[str, float]) -> float:
        self.require_mode()
        if self._metric not in results:
            remedy = f"Use one of {', '.join(results)}"
            raise ConfigError(f"{self._key}.metric", self._metric, "the evaluation has no such result", remedy)
        return results[self._metric]


class EarlyStopping(Judging):
    """Stops a run whose evaluations no longer improve.

    Args:
        metric: Result of the evaluation to watch, such as ``eval_loss``.
        patience: Stop after this many evaluations in a row without an improvement.
        min_delta: Smallest change that counts as an improvement, in the metric's own unit.
        mode (min | max | null): ``min`` if smaller values are better, ``max`` if larger. null: by the metric's name, as
            for a loss or an accuracy.
        larger_is_better: Older name of ``mode``: true is ``max``.

    Raises:
        ConfigError: a patience below 1, or no such mode.
    """

    def __init__(
        self,
        *,
        metric: str = "eval_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str | None = None,
        larger_is_better: bool | None = None,
    ) -> None:
        if patience < 1:
            remedy = "Use a whole number from 1"
            raise ConfigError("callbacks.early_stop.patience", patience, "must be at least 1", remedy)
        super().__init__("callbacks.early_stop", metric, mode, larger_is_better)
        self._patience, self._min_delta = patience, min_delta
        self.forget()

    def forget(self) -> None:
        """Forgets a run before."""
        self._best, self._waited = float("inf"), 0

    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        """Raises ConfigError if there is no such metric."""
        value = (-1 if self._mode == "max" else 1) * self._result(results)
        if value < self._best - self._min_delta:
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            run.stop(f"{self._metric} has not improved in {self._waited} evaluations")

    def state_dict(self) -> dict[str, Any]:
        """The best value so far (with ``max`` its negative), how long ago it was, and what it is of."""
        return {"best": self._best, "waited": self._waited} | super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the best value and the count."""
        self._best, self._waited = state["best"], state["waited"]


class ReduceLROnPlateau(Judging):
    """Multiplies every learning rate by ``factor`` where an evaluation's result no longer improves.

    It counts as ``torch.optim.lr_scheduler.ReduceLROnPlateau`` does, next to the schedule: what it has found is a
    factor of the schedule's rate, and a checkpoint keeps it.

    Args:
        metric: Result of the evaluation to watch, such as ``eval_loss``.
        factor: Multiply the learning rate by this, between 0 and 1.
        patience: Evaluations in a row without an improvement that are tolerated; the next one reduces the rate.
        threshold: Smallest change that counts as an improvement: a share of the best result, or a difference from it.
        threshold_mode (rel | abs): Whether ``threshold`` is a share (``rel``) or a difference (``abs``).
        cooldown: Evaluations after a reduction that are not counted.
        min_factor: Lower limit of the product of all reductions.
        mode (min | max | null): ``min`` if smaller values are better, ``max`` if larger. null: by the metric's name, as
            for a loss or an accuracy.
        larger_is_better: Older name of ``mode``: true is ``max``.

    Raises:
        ConfigError: a value out of range, or no such mode.
    """

    def __init__(
        self,
        *,
        metric: str = "eval_loss",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_factor: float = 0.0,
        mode: str | None = None,
        larger_is_better: bool | None = None,
    ) -> None:
        key = "callbacks.plateau"
        for name, value in (("factor", factor), ("min_factor", min_factor)):
            if not 0 <= value < 1:
                raise ConfigError(f"{key}.{name}", value, "not from 0 to 1", "Give the share of the rate that is left")
        require_count(f"{key}.patience", patience)
        require_count(f"{key}.cooldown", cooldown)
        require_choice(f"{key}.threshold_mode", threshold_mode, ("rel", "abs"))
        super().__init__(key, metric, mode, larger_is_better)
        self._factor, self._patience = factor, patience
        self._threshold, self._relative = threshold, threshold_mode == "rel"
        self._cooldown, self._min_factor = cooldown, min_factor
        self.forget()

    def forget(self) -> None:
        """Forgets a run before."""
        self._best = -float("inf") if self._mode == "max" else float("inf")
        self._bad, self._cooling, self._reached = 0, 0, 1.0

    @property
    def lr_factor(self) -> float:
        """The product of all reductions."""
        return self._reached

    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        """Raises ConfigError if there is no such metric."""
        value = self._result(results)
        if self._improves(value):
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        if self._cooling > 0:
            self._cooling, self._bad = self._cooling - 1, 0
        if self._bad > self._patience:
            self._reached = max(self._reached * self._factor, self._min_factor)
            self._cooling, self._bad = self._cooldown, 0

    def _improves(self, value: float) -> bool:
        sign = 1 if self._mode == "max" else -1
        if self._relative:
            return sign * value > sign * self._best * (1 + sign * self._threshold)
        return sign * value > sign * self._best + self._threshold

    def state_dict(self) -> dict[str, Any]:
        """The best result, what was counted since, the factor so far, and what they are of."""
        counted = {"best": self._best, "bad": self._bad, "cooling": self._cooling, "reached": self._reached}
        return counted | super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self._best, self._bad, self._cooling = state["best"], state["bad"], state["cooling"]
        self._reached = state["reached"]
