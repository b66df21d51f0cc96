"""Optimizers that train with other weights than those to evaluate, as schedule-free ones do.

Source: A. Defazio et al., "The Road Less Scheduled" (2024). Such an optimizer has methods ``train()`` and ``eval()``,
which replace the weights in place. It makes steps after the first, and is evaluated and saved after the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from distaccum.engines.base import Engine, StateLayout
from distaccum.errors import ConfigError


def has_two_weights(optimizer: object) -> bool:
    """Whether it trains with other weights than those to evaluate."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


class EvaluationWeights:
    """Switches those of the optimizers that have two kinds of weights; without any it does nothing.

    A forward outside of a window switches by itself, if the model is in evaluation mode or without gradients.

    Args:
        optimizers: of one run; they are switched to the weights to evaluate.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers: list[Any] = list(filter(has_two_weights, optimizers))
        self.eval()

    def attach(self, engine: Engine, in_window: Callable[[], bool]) -> None:
        """Watches the forwards of the engine's model; those ``in_window`` never switch, as those of a proof.

        Raises:
            ConfigError: there is such an optimizer, and the engine leaves a rank a share only, or weights that are
                roundings: a switch would not reach all weights.
        """
        if not self._optimizers:
            return
        if engine.state_layout is not StateLayout.FULL:
            problem = "its train() and eval() replace the weights, of which this engine gives a rank a share only"
            raise ConfigError("optimizer", type(self._optimizers[0]).__name__, problem, "Use engine=ddp")
        if engine.rounds_weights:
            problem = "its train() and eval() replace the fp32 masters, and forwards compute with their roundings"
            raise ConfigError("optimizer", type(self._optimizers[0]).__name__, problem, "Use precision=bf16")
        self._in_window = in_window
        self._hook = engine.unwrapped_model.register_forward_pre_hook(self._before_forward)

    def train(self) -> None:
        """The weights to train with; where they are in place already, the optimizers do nothing."""
        for optimizer in self._optimizers:
            optimizer.train()

    def eval(self) -> None:
        """The weights to evaluate and to save, until the next window."""
        for optimizer in self._optimizers:
            optimizer.eval()

    def close(self) -> None:
        """Leaves the weights to evaluate in place."""
        if self._optimizers:
            self._hook.remove()
            self.eval()

    def _before_forward(self, model: Any, _: Any) -> None:
        if not self._in_window() and not (model.training and torch.is_grad_enabled()):
            self.eval()
