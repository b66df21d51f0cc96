"""What every engine of our own does with a reduced gradient: one transaction over all optimizers, told afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.engines import optimizer_state
from distaccum.engines.base import EngineState, StepOutput
from distaccum.engines.dtensor import to_local
from distaccum.engines.fused_update import FusedUpdate, underflow_fraction
from distaccum.engines.guard import StepGuard
from distaccum.engines.host_copy import HostCopy
from distaccum.precision.scaler import LossScaler

_WRAPPERS = ("_orig_mod",)  # torch.compile's, in names


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that need a gradient, by their names in the model as it was written."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[".".join(part for part in name.split(".") if part not in _WRAPPERS)] = parameter
    return found


class OptimizerStep:
    """Optimizers, loss scaler and clipping of one rank, whatever reduced the gradient.

    Args:
        optimizers: over disjoint sets of the parameters.
        parameters: those whose gradients make up the global one, by name.
        modules: the model, and what wraps it: their ``zero_grad`` is refused.
        clip_norm: largest norm of the global gradient; None: no clipping by norm.
        clip_value: largest absolute value of its elements; None: no clipping by value.
        scaler: of the loss, where gradients pass through fp16.
        underflow_every: with a scaler, attempts between two samples of the share that is flushed to zero; 0: none.
        add_up: sums a tensor in place over the ranks that hold the gradient's shards; None where it is whole.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, nn.Parameter],
        modules: Sequence[nn.Module],
        *,
        clip_norm: float | None,
        clip_value: float | None,
        scaler: LossScaler | None,
        underflow_every: int,
        all_reduce_shards: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.parameters = parameters
        self.min_loss_scale = scaler.min_scale if scaler and scaler.dynamic else None
        self._optimizers, self._scaler, self._all_reduce_shards = optimizers, scaler, all_reduce_shards
        self._underflow_every, self._attempts = underflow_every, 0
        self._update = FusedUpdate(
            optimizers, parameters, clip_norm=clip_norm, clip_value=clip_value, all_reduce_shards=all_reduce_shards
        )
        self._guard = StepGuard(optimizers, modules)
        for group in self._groups():
            group.setdefault("initial_lr", group["lr"])
        self._settings = optimizer_state.settings_of(optimizers)

    def scaled(self, loss: Tensor) -> Tensor:
        """What a backward starts from."""
        return self._scaler.scale(loss) if self._scaler else loss

    def set_lr_factor(self, factor: float) -> None:
        """Sets every group's ``lr`` to ``factor`` times its ``initial_lr``."""
        for group in self._groups():
            group["lr"] = group["initial_lr"] * factor

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def step(self, divisor: float, *, among: AbstractContextManager[None] | None = None) -> StepOutput:
        """Steps on the gradients over ``divisor`` and the loss scale, within ``among``; they are not zeroed yet."""
        scale: float | Tensor | None = None if divisor == 1.0 else divisor
        if self._scaler:
            scale = self._scaler.current * divisor
        with self._guard, among or nullcontext():
            found = self._update.step(scale)
        underflow = self._sample_underflow()
        loss_scale = self._scaler.current if self._scaler else torch.ones_like(found.applied)
        decision = HostCopy(torch.stack((found.applied, loss_scale.to(found.applied.dtype))))
        if self._scaler:
            self._scaler.advance(1.0 - found.applied)
        return StepOutput(grad_norm=found.grad_norm, decision=decision, nonfinite=found.nonfinite, underflow=underflow)

    def _sample_underflow(self) -> Tensor | None:
        self._attempts += 1
        if not (self._scaler and self._underflow_every and self._attempts % self._underflow_every == 0):
            return None
        gradients = [to_local(p.grad) for p in self.parameters.values() if p.grad is not None]
        return underflow_fraction(gradients, self._all_reduce_shards) if gradients else None

    def state(self, model: Mapping[str, Tensor], *, owns: Callable[[int], bool]) -> EngineState:
        """With the ``model``'s tensors; ``owns`` says whether this rank gives the n-th parameter's optimizer state."""
        tensors, values = optimizer_state.collect(self._optimizers, self.parameters, owns=owns)
        # Some optimizers count in their groups: what has changed since the start is state, and the rest this run's own.
        groups = optimizer_state.settings_of(self._optimizers)
        values |= {name: value for name, value in groups.items() if self._settings.get(name, not value) != value}
        scaler = self._scaler.state_dict() if self._scaler else {}
        return EngineState(model=model, optimizer=tensors, optimizer_values=values, scaler=scaler)

    def load_state(self, state: EngineState) -> None:
        """Takes up the optimizers' and the scaler's state.

        Raises:
            KeyError: it is of parameters that there are not.
        """
        optimizer_state.load(self._optimizers, self.parameters, state.optimizer, state.optimizer_values)
        self._update.forget()
        if self._scaler and state.scaler:
            self._scaler.load_state_dict(dict(state.scaler))
