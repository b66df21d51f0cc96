"""The protocol that every engine fulfils. Ask it what it does, never what it is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the boundary found. 0-dim device tensors, the same on every rank.

    ``grad_norm`` is the 2-norm of the global gradient before clipping; ``finite`` is 1.0 if it is finite, else 0.0.
    """

    grad_norm: Tensor
    finite: Tensor


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What a checkpoint keeps of an engine: named tensors, and named plain values that JSON can hold."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    optimizer_values: Mapping[str, Any]


class Engine(Protocol):
    """Owner of parameters, gradients and optimizer state on one rank."""

    device: torch.device
    averages_over: int
    """By what the engine itself divides the summed gradient: the world size where it averages, 1 where it sums."""

    @property
    def model(self) -> nn.Module:
        """What a training forward calls."""

    @property
    def bare_model(self) -> nn.Module:
        """The user's model, for evaluation: its forward communicates nothing."""

    def sync_buffers(self) -> None:
        """Sets buffers (running statistics) to rank 0's, so that all ranks evaluate one model; a collective."""

    def micro_step(self, *, sync: bool) -> AbstractContextManager[object]:
        """Around one forward and backward. With ``sync`` the backward reduces all that the window accumulated."""

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradient of a 0-dim loss that is already divided by the window's count.

        Raises:
            MisuseError: the forward did not go through :attr:`model`, so that its gradients would not be reduced.
        """

    def set_lr_factor(self, factor: float) -> None:
        """Sets every group's learning rate to ``factor`` times the one it was built with."""

    def stand_in(self) -> None:
        """The boundary of a rank that has no micro-batch in a window: it takes part, and adds nothing."""

    def step(self, clip_norm: float | None, *, divisor: float = 1.0) -> StepResult:
        """After the boundary: clips the reduced gradient to ``clip_norm`` if given, steps, zeroes in place.

        The gradient is what was accumulated over ``divisor``: the count, where it was not known before the backward.
        """

    def zero_gradients(self) -> None:
        """Zeroes in place, for a window that is not applied."""

    def state(self) -> EngineState:
        """The state to save; a collective where state is sharded."""

    def load_state(self, state: EngineState) -> None:
        """Takes up a saved state, before the first window."""
