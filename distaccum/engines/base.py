"""The protocol that every engine fulfils. Ask it what it does, never what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distaccum.engines.host_copy import HostCopy


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What the boundary found and did; the same on every rank.

    ``grad_norm`` is the 2-norm of the global gradient, unscaled and before clipping: 0-dim, on the device, and NaN or
    infinite where the step was skipped. ``underflow`` is the share of gradient elements that fp16 flushed to zero:
    0-dim, on the device, where it was sampled.
    """

    grad_norm: Tensor
    decision: HostCopy
    """``[applied, loss_scale]``."""
    nonfinite: Callable[[], Sequence[str]]
    """The parameters whose gradient is NaN or infinite, by name; reads the device."""
    underflow: Tensor | None = None

    @property
    def applied(self) -> bool:
        """Whether the optimizers stepped; waits for the device to have come so far."""
        return bool(self.decision.read()[0])

    @property
    def loss_scale(self) -> float:
        """The scale of this window's gradients, 1.0 without a loss scaler; waits as :attr:`applied` does."""
        return float(self.decision.read()[1])


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What a checkpoint keeps of an engine: named tensors, and named plain values that JSON can hold."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    optimizer_values: Mapping[str, Any]
    scaler: Mapping[str, Any] = field(default_factory=dict)


NO_ARTIFACTS: Mapping[str, Mapping[str, Any]] = {}


class StateLayout(Enum):
    """What ``Engine.state`` gives on a rank."""

    FULL = "the whole state"
    SHARDED = "its share of the state"
    EXTERNAL = "the weights; optimizer state goes to files"


LocalGradients = Callable[[], AbstractContextManager[Callable[[], Mapping[str, Tensor]]]]


class Engine(Protocol):
    """Owner of parameters, gradients and optimizer state on one rank."""

    device: torch.device
    gradient_divide_factor: int
    """By what the engine itself divides the summed gradient: the world size where it averages, 1 where it sums."""
    min_loss_scale: float | None
    """Where the loss scale cannot fall any further; None where there is no scale that could."""
    forward_communicates: bool
    """Whether a forward is a collective, so that all ranks have to run as many, also in an evaluation."""
    state_layout: StateLayout
    artifacts: Mapping[str, Mapping[str, Any]]
    """By file name: what the run directory keeps of how the engine was set up, as JSON."""

    @property
    def model(self) -> nn.Module:
        """What a training forward calls."""

    @property
    def unwrapped_model(self) -> nn.Module:
        """The user's model, for evaluation: its forward communicates nothing, unless :attr:`forward_communicates`."""

    @property
    def local_gradients(self) -> LocalGradients | None:
        """Within it no micro-step reduces, and its function gives, by name, what this rank has accumulated.

        None where hooks on the parameters see that.
        """

    def describe(self) -> str:
        """One line for people: what a rank holds, and what a window sends."""

    def sync_buffers(self) -> None:
        """Sets buffers (running statistics) to rank 0's, so that all ranks evaluate one model; a collective."""

    def begin_window(self, micro_steps: int) -> None:
        """Before a window's first micro-step, given how many this rank has in it.

        Where a forward communicates, a rank that has fewer than another one now runs the missing ones on an earlier
        input, for nothing: what they accumulate is zero. A collective there; nothing elsewhere.
        """

    def micro_step(self, *, sync: bool) -> AbstractContextManager[object]:
        """Around one forward and backward. With ``sync`` the backward reduces all that the window accumulated."""

    def autocast(self) -> AbstractContextManager[object]:
        """Around a forward and its loss, also in an evaluation: what the precision policy computes in."""

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradient of a 0-dim loss that is already divided by the window's count; scales it for fp16.

        Raises:
            MisuseError: the forward did not go through :attr:`model`, so that its gradients would not be reduced.
        """

    def set_lr_factor(self, factor: float) -> None:
        """Sets every group's learning rate to ``factor`` times the one it was built with."""

    def shadow_micro_step(self, *, sync: bool = True) -> None:
        """The boundary of a rank that has no micro-batch in a window: it takes part, and adds nothing.

        Without ``sync`` only in what other ranks' forwards and backwards communicate.
        """

    def step(self, *, divisor: float = 1.0) -> StepOutput:
        """After the boundary, one transaction over all ranks and optimizers: unscale, clip, step or skip, move the loss
        scale, zero in place.

        The gradient is what was accumulated over ``divisor``: the count, where it was not known before the backward.
        Where it is NaN or infinite anywhere, no optimizer steps on any rank.
        """

    def zero_gradients(self) -> None:
        """Zeroes in place, for a window that is not applied."""

    def state(self) -> EngineState:
        """This rank's part of the state to save; a collective where state is sharded.

        Tensors are whole. Each is given by one rank at least; where by several, they give the same.
        """

    def load_state(self, state: EngineState) -> None:
        """Takes up the whole of a saved state, of which it reads what this rank holds, before the first window."""

    def save_files(self, folder: Path) -> None:
        """Writes what the engine keeps in a format of its own into ``folder``; a collective. Most write nothing."""

    def load_files(self, folder: Path) -> None:
        """Takes up what :meth:`save_files` wrote, before the first window; a collective."""
