"""The exponential moving average of the weights: kept, saved, evaluated and exported next to those that train.

Source: B. T. Polyak, A. B. Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992); the warm-up is
that of TensorFlow's ``ExponentialMovingAverage``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.accumulation.step import Outcome
from distaccum.checkpoint.tensors import TensorFiles
from distaccum.config.schema import RunConfig
from distaccum.engines.base import Engine
from distaccum.engines.modules import clean, full_tensor, shard_like, to_local
from distaccum.errors import CheckpointError, ConfigError, shorten
from distaccum.train.callbacks import Callback, Run

KIND = "ema"
"""A checkpoint's files of it: ``ema.safetensors``, or ``ema-R.safetensors`` where several ranks write some each."""


class EMA(Callback):
    """Averages the trained weights exponentially: ``average = decay * average + (1 - decay) * weights`` an update.

    It begins as the weights that the run starts from, and moves with applied updates only: a skipped window leaves it
    as it is. It is of fp32, or of fp64 where weights are, and sharded where these are. A checkpoint holds it whole, so
    that another engine on any number of ranks goes on with it. Buffers, and parameters that are not trained, have no
    average: beside it stand those of the model.

    Args:
        decay: Decay of the average, at least 0 and below 1.
        warmup: Use ``(1 + n) / (10 + n)`` as decay at step n while that is smaller.
        evaluate: Evaluate the average, also for the best checkpoint and early stopping, instead of the trained weights.

    Raises:
        ConfigError: a decay that is out of range.
    """

    def __init__(self, *, decay: float = 0.999, warmup: bool = False, evaluate: bool = False) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            problem, remedy = "must be a number from 0, and below 1", "Use 0.999, or 0.9999 for a long run"
            raise ConfigError("callbacks.ema.decay", decay, problem, remedy)
        self._decay, self._warmup, self.evaluates = float(decay), warmup, evaluate
        self.kind = KIND
        self._updates = 0
        self._weights: dict[str, nn.Parameter] = {}
        self._averages: dict[str, Any] = {}  # tied weights have one
        self._engine: Engine | None = None

    def begin(self, engine: Engine) -> None:
        """The average is that of the weights as they are now.

        Raises:
            ConfigError: none of them is trained, or one is of 16 bits.
        """
        named = engine.unwrapped_model.named_parameters(remove_duplicate=False)
        self._engine, self._weights = engine, {clean(name): p for name, p in named if p.requires_grad}
        small = [name for name, p in self._weights.items() if p.dtype.itemsize < torch.float32.itemsize]
        if small or not self._weights:
            problem = f"{shorten(small)} has 16 bits" if small else "no weight of the model is trained"
            raise ConfigError("callbacks", "ema", problem, "Train weights in fp32, or leave it out")
        copies = {id(p): p.detach().clone() for p in self._weights.values()}
        self._averages = {name: copies[id(p)] for name, p in self._weights.items()}

    def on_update(self, run: Run, outcome: Outcome) -> None:
        """Moves the average."""
        self._updates += 1
        decay = self._decay
        if self._warmup:
            decay = min(decay, (1 + self._updates) / (10 + self._updates))
        with torch.no_grad():
            torch._foreach_lerp_(*self._pairs(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model has the average for its weights; afterwards it has them again, bit by bit."""
        assert self._engine is not None
        exchanged: list[tuple[Tensor, Tensor]] = []
        try:
            for average, weight in zip(*self._pairs(), strict=True):
                _exchange(average, weight)
                exchanged.append((average, weight))
            self._engine.weights_changed()
            yield
        finally:
            for average, weight in exchanged:
                _exchange(average, weight)
            self._engine.weights_changed()

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's averages, and its weights; each once."""
        once = {id(p): (to_local(self._averages[name]), to_local(p.detach())) for name, p in self._weights.items()}
        return [average for average, _ in once.values()], [weight for _, weight in once.values()]

    def whole(self, owns: Callable[[int], bool]) -> dict[str, Tensor]:
        """The averages by name, those of the numbers that this rank ``owns``; a collective where they are sharded."""
        found: dict[str, Tensor] = {}
        for i, (name, average) in enumerate(self._averages.items()):
            whole = full_tensor(average)
            if owns(i):
                found[name] = whole
        return found

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restores :meth:`whole`.

        Raises:
            CheckpointError: it is of another model.
        """
        if saved.keys() != self._averages.keys():
            names = shorten(sorted(saved.keys() ^ self._averages.keys()))
            raise CheckpointError(f"its {KIND} is of other weights than are trained ({names})")
        for name, average in self._averages.items():
            if tuple(saved[name].shape) != tuple(average.shape):
                shapes = f"{list(saved[name].shape)}, and the model's is {list(average.shape)}"
                raise CheckpointError(f"its {KIND} of {name} has the shape {shapes}")
            to_local(average).copy_(to_local(shard_like(saved[name], average)))

    def state_dict(self) -> dict[str, Any]:
        """The number of updates, and whether it is evaluated; the average itself has files of its own."""
        return {"updates": self._updates, "evaluate": self.evaluates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the number of updates."""
        self._updates = state["updates"]


@torch.no_grad()
def _exchange(a: Tensor, b: Tensor) -> None:
    kept = b.clone()  # if there is no memory for it, nothing has changed yet
    b.copy_(a)
    a.copy_(kept)


def check(callbacks: Sequence[Callback], config: RunConfig) -> None:
    """Refuses averages that would be of something else than the weights.

    Raises:
        ConfigError: there are two, or the engine has the weights elsewhere.
    """
    found = [callback for callback in callbacks if isinstance(callback, EMA)]
    if len(found) > 1:
        raise ConfigError("callbacks", "ema", f"there are {len(found)} of them", "Give one")
    if found and not config.engine.holds_weights(config.precision):
        problem = f"with precision={config.precision.name} the engine has the fp32 weights elsewhere, or in parts"
        remedy = "Use engine=ddp, zero1 or fsdp2 and a precision other than bf16-weights, or leave it out"
        raise ConfigError("callbacks", "ema", f"{problem} (engine={config.engine.name})", remedy)


def begin(callbacks: Sequence[Callback], engine: Engine, folder: Path | None) -> str:
    """Begins the average of a run, or goes on with that of the checkpoint in ``folder``.

    Returns:
        A note for people: what the checkpoint has not; empty where it has all that is asked for.

    Raises:
        CheckpointError: the checkpoint's is of another model, or damaged.
    """
    average = of(callbacks)
    if average is None:
        return ""
    average.begin(engine)
    if folder is None:
        return ""
    if not any(folder.glob(f"{KIND}*.safetensors")):
        return f"the average ({KIND}) begins with the weights of {folder.name}"
    average.load(TensorFiles(folder, KIND))
    return ""


def of(callbacks: Sequence[Callback]) -> EMA | None:
    """The one that averages, if any does."""
    return next((callback for callback in callbacks if isinstance(callback, EMA)), None)


def evaluated(callbacks: Sequence[Callback]) -> Any:
    """A context in which the model has the weights to evaluate."""
    average = of(callbacks)
    return average.in_place() if average is not None and average.evaluates else nullcontext()
