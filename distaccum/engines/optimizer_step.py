"""Steps the optimizers through ``FusedUpdate``; saves and loads their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.engines import optimizer_state
from distaccum.engines.base import EngineState, StepOutput
from distaccum.engines.dtensor import to_local
from distaccum.engines.fused_update import FusedUpdate, StepOptions, underflow_fraction
from distaccum.engines.group_settings import GroupSettings
from distaccum.engines.guard import StepGuard


class OptimizerStep:
    """Optimizers, loss scale and clipping of one rank, whatever reduced the gradient.

    An engine makes it once the model is wrapped: wrapping replaces or moves the parameters.

    Args:
        optimizers: over disjoint sets of the parameters.
        parameters: those whose gradients make up the global one, by name.
        modules: the model, and what wraps it: their ``zero_grad`` is refused while a window is open.
        options: clipping and the loss scale.
        settings: of the optimizers' groups.
        window_open: whether one is.
        all_reduce_shards: sums a tensor in place over the ranks that hold the gradient's shards; None where the
            gradient is whole.
        reduced: what else has reduced gradients: weights, where ``parameters`` are their masters.
        whole_norms: see ``FusedUpdate``.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, nn.Parameter],
        modules: Sequence[nn.Module],
        options: StepOptions,
        settings: GroupSettings,
        *,
        window_open: Callable[[], bool] = lambda: True,
        all_reduce_shards: Callable[[Tensor], Tensor] | None = None,
        reduced: Sequence[nn.Parameter] = (),
        whole_norms: Callable[[Sequence[nn.Parameter]], Tensor] | None = None,
    ) -> None:
        self.parameters = parameters
        self._optimizers = optimizers
        self._scaler = options.scaler
        self._underflow_every = options.underflow_every if options.scaler else 0
        self._attempts = 0
        self._all_reduce_shards = all_reduce_shards
        self._update = FusedUpdate(
            optimizers,
            parameters,
            options,
            all_reduce_shards=all_reduce_shards,
            reduced=reduced,
            whole_norms=whole_norms,
        )
        self._guard = StepGuard(optimizers, modules, window_open)
        self._settings = settings

    def step(
        self, divisor: float, norm_bound: float, *, among: AbstractContextManager[None] | None = None
    ) -> StepOutput:
        """Steps on the gradients over ``divisor`` and the loss scale, within ``among``; they are not zeroed yet."""
        with self._guard, among or nullcontext():
            output = self._update.step(divisor, norm_bound)
        self._attempts += 1
        if not (self._underflow_every and self._attempts % self._underflow_every == 0):
            return output
        gradients = [to_local(p.grad) for p in self.parameters.values() if p.grad is not None]
        sampled = underflow_fraction(gradients, self._all_reduce_shards) if gradients else None
        return replace(output, underflow=sampled)

    def expect_known(self) -> None:
        """Raises MisuseError where an optimizer holds a gradient that is not reduced, as :meth:`step` does."""
        self._update.expect_known()

    def release(self) -> None:
        """Gives the optimizers and modules back unguarded."""
        self._guard.release()

    def state(self, model: Mapping[str, Tensor], *, owns: Callable[[int], bool]) -> EngineState:
        """With the ``model``'s tensors; ``owns`` says whether this rank gives the n-th parameter's optimizer state."""
        tensors, values = optimizer_state.collect(self._optimizers, self.parameters, owns=owns)
        values |= self._settings.changed()
        scaler = self._scaler.state_dict() if self._scaler else {}
        return EngineState(model=model, optimizer=tensors, optimizer_values=values, scaler=scaler)

    def load_state(self, state: EngineState) -> None:
        """Restores the optimizers' and the loss scale's state.

        Raises:
            KeyError: it names a parameter that the model has not.
            ValueError: it has settings of a group that is not there.
        """
        optimizer_state.load(
            self._optimizers, self.parameters, state.optimizer, state.optimizer_values, model=state.model
        )
        self._settings.restore(state.optimizer_values)
        self._update.forget()
        if self._scaler and state.scaler:
            self._scaler.load_state_dict(dict(state.scaler))
