"""Steps the optimizers through ``FusedUpdate``; saves and loads their state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.engines import optimizer_state
from distaccum.engines.base import EngineState, StepOutput
from distaccum.engines.group_settings import GroupSettings
from distaccum.engines.modules import HostCopy, to_local
from distaccum.engines.rules import foreign_hooks
from distaccum.errors import MisuseError
from distaccum.precision.loss_scale import LossScale

# The arithmetic of a step on reduced gradients: norm, decision, unscaling, clipping, step, loss scale.
#
# By hand that is six walks over gradient memory: unscale (read, write), norm (read), clip (read, write), step (read).
# Here the norm is read once, and is the overflow check too; an optimizer with a fused kernel then takes the decision as
# ``found_inf``, and the loss scale, the count and the clip coefficient in one number, its ``grad_scale``.

_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s own, so that clipped gradients equal its
_LARGE = 2**17  # elements


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What is done to a reduced gradient on its way into the weights.

    Args:
        clip_norm: largest norm of the global gradient; None: no clipping by norm.
        clip_value: largest absolute value of its elements; None: no clipping by value.
        scaler: of the loss, where gradients pass through fp16.
        underflow_every: with a scaler, attempts between two samples of the fraction that fp16 flushed to zero; 0: none.
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    scaler: LossScale | None = None
    underflow_every: int = 0


class FusedUpdate:
    """One step of all optimizers, or of none: none moves where any gradient is NaN or infinite.

    Args:
        optimizers: over disjoint sets of the parameters.
        parameters: those whose gradients make up the global one, by name.
        options: clipping and the loss scale.
        all_reduce_shards: sums a tensor in place over the ranks that hold the gradient's shards; None where the
            gradient is whole.
        reduced: what else has reduced gradients: weights, where ``parameters`` are their masters.
        whole_norms: of parameters whose gradients are sharded: the norm of each whole gradient on one rank, and 0 on
            the others; a collective. None: each rank takes the norm of its shard.
        stepped: by the same names what the optimizers' state is of, where it is other tensors.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, nn.Parameter],
        options: StepOptions,
        *,
        all_reduce_shards: Callable[[Tensor], Tensor] | None = None,
        reduced: Sequence[nn.Parameter] = (),
        whole_norms: Callable[[Sequence[nn.Parameter]], Tensor] | None = None,
        stepped: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.optimizers, self.parameters, self.options = optimizers, parameters, options
        self.stepped = parameters if stepped is None else stepped
        self.all_reduce_shards, self._whole_norms = all_reduce_shards, whole_norms
        self._known = frozenset(map(id, (*parameters.values(), *reduced)))
        self._begun: set[int] = set()  # the parameters that have optimizer state

    def forget(self) -> None:
        """Called after the optimizers' state was replaced: which parameters have one is unknown again."""
        self._begun.clear()

    def expect_known(self) -> set[int]:
        """The ``id`` of each parameter with a gradient that the optimizers hold.

        Raises:
            MisuseError: one of them is none of the parameters.
        """
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        held = {id(p) for parameters in groups for p in parameters if p.grad is not None}
        if not held <= self._known:
            raise MisuseError("a parameter was unfrozen after wrapping, and is not reduced: unfreeze it before")
        return held

    def step(self, divisor: float = 1.0, norm_bound: float = math.inf) -> StepOutput:
        """Steps on the gradients over ``divisor`` and the loss scale, clipped; then moves the loss scale.

        No optimizer steps where the norm is not below ``norm_bound``.

        A fused step reads nothing back, except a parameter's first: with ``found_inf`` set, a kernel would
        leave the momentum uninitialised. The host has to leave out an unfused step.

        Raises:
            MisuseError: an optimizer holds a gradient that is none of the parameters'.
        """
        held = self.expect_known()
        with_gradient = {name: p for name, p in self.parameters.items() if p.grad is not None}
        found = [p.grad for p in with_gradient.values() if p.grad is not None]
        if self.all_reduce_shards is not None:
            found = [to_local(gradient) for gradient in found]
        gradients = [torch.view_as_real(g) if g.is_complex() else g for g in found]  # no call for each
        norms = norms_of(gradients) if self._whole_norms is None else self._whole_norms(list(with_gradient.values()))
        if self.all_reduce_shards is not None:  # in fp64: squares leave fp32's range where the norms do not
            norms = self.all_reduce_shards(norms.double().square()).sqrt().to(norms.dtype)
            held = self.expect_known()  # without what no rank has used, whose zeros are gone
        norm = torch.linalg.vector_norm(norms) if gradients else norms.sum()
        scaler = self.options.scaler
        scale: float | Tensor | None = scaler.current * divisor if scaler else None if divisor == 1.0 else divisor
        norm = norm if scale is None else norm / scale
        applied = finite = (norm < math.inf).to(norm.dtype)  # NaN is not less
        if norm_bound < math.inf:
            applied = (norm < norm_bound).to(norm.dtype)
        self._apply(held, self._clipped(gradients, norm, scale), applied)
        loss_scale = scaler.current.to(applied.dtype) if scaler else torch.ones_like(applied)
        decision = HostCopy(torch.stack((applied, loss_scale, norm)))
        if scaler:
            scaler.advance(1.0 - finite)
        return StepOutput(
            grad_norm=norm,
            decision=decision,
            names=list(with_gradient),
            norms=norms,
            norms_scale=1.0 if scale is None else scale,
        )

    def _apply(self, held: set[int], remaining: Tensor | None, applied: Tensor) -> None:
        """Has the optimizers step on the gradients of ``held`` over ``remaining``, where ``applied`` is 1.0."""
        begun = held <= self._begun
        fused = list(map(_is_fused, self.optimizers))
        if not ((begun and all(fused)) or HostCopy(applied).read() == 1.0):
            return
        for optimizer, folds in zip(self.optimizers, fused, strict=True):
            # The kernels read the divisor as fp32: fp64 gradients would lose digits; and hooks see gradients.
            divides = folds and applied.dtype == torch.float32 and not foreign_hooks(optimizer)
            if not divides:
                _divide(_gradients_of(optimizer), remaining)
            if folds:
                _step_fused(optimizer, remaining if divides else None, 1.0 - applied)
            else:
                optimizer.step()
        if not begun:
            self._begun |= held

    def _clipped(self, gradients: list[Tensor], norm: Tensor, scale: float | Tensor | None) -> Tensor | None:
        """The remaining divisor of the gradients; None: 1. Clipping by value is done here, in place."""
        if self.options.clip_value is not None:
            bound = torch.zeros_like(norm) + self.options.clip_value * (1.0 if scale is None else scale)
            for gradient in gradients:
                gradient.clamp_(-bound.to(gradient.dtype), bound.to(gradient.dtype))
        if self.options.clip_norm is None:
            return None if scale is None else torch.ones_like(norm) * scale
        excess = ((norm + _CLIP_EPSILON) / self.options.clip_norm).clamp_(min=1.0)
        return excess if scale is None else excess * scale


def norms_of(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each, in fp64 where any of them is, else in fp32: one read of each."""
    wide = torch.float64 if torch.float64 in {gradient.dtype for gradient in gradients} else torch.float32
    if not gradients:
        return torch.zeros(0, dtype=wide)
    # On the CPU torch adds up all squares of a tensor in one go, in one thread: of 50,000 x 1,024 that is off by 4e-3,
    # and takes twice as long as row by row.
    parts = [
        _row_norms(g, wide) if g.numel() > _LARGE and g.is_cpu and g.ndim > 1 and g.is_contiguous() else g
        for g in gradients
    ]
    return torch.stack(torch._foreach_norm(parts, 2, wide))


def _row_norms(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(gradient, dim=tuple(range(1, gradient.ndim)), dtype=dtype)
    return norms


def _is_fused(optimizer: Any) -> bool:
    """Not where a rule of the user's is around the kernel: it would see gradients undivided, and steps left out."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and optimizer.step.__module__.startswith("torch.")


def _step_fused(optimizer: Any, divisor: Tensor | None, found_inf: Tensor) -> None:
    optimizer.grad_scale = None if divisor is None else divisor.float()
    optimizer.found_inf = found_inf.float()
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _divide(gradients: list[Tensor], divisor: Tensor | None) -> None:
    """In place, in one walk over them."""
    if divisor is not None and gradients:
        torch._foreach_div_(gradients, divisor)


def _gradients_of(optimizer: Optimizer) -> list[Tensor]:
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [to_local(p.grad) for p in parameters if p.grad is not None]


def zero_in_place(parameters: Sequence[nn.Parameter]) -> None:
    """Zeroes gradients where they lie, so that those in DDP's buckets stay there: one operator for all."""
    torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])


def underflow_fraction(
    gradients: Sequence[Tensor], all_reduce_shards: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The fraction of elements that are 0.0, but for rows that are 0.0 as a whole: 0-dim; one read of each gradient.

    In gradients that came through fp16 these are the elements too small for it at the window's loss scale, since others
    are hardly ever exactly 0. Whole rows are: those of an embedding whose token did not occur.
    ``all_reduce_shards`` as :class:`FusedUpdate` takes it.
    """
    zeros = looked_at = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for gradient in gradients:
        rows = gradient.flatten(1) if gradient.ndim > 1 else gradient.reshape(1, -1)
        nonzero = torch.count_nonzero(rows, dim=1)
        elements = (nonzero > 0).sum() * rows.shape[1]
        looked_at = looked_at + elements
        zeros = zeros + elements - nonzero.sum()
    both = torch.stack((zeros, looked_at))
    zeros, looked_at = both if all_reduce_shards is None else all_reduce_shards(both)
    fraction: Tensor = zeros / looked_at.clamp(min=1)
    return fraction


# Refuses optimizer steps by anyone but the engine, and zeroing while a window is open.

_ATTRIBUTE = "_distaccum_lock"  # of an optimizer

WindowOpen = Callable[[], bool]


def is_guarded(optimizer: Optimizer) -> bool:
    """Whether an engine steps it."""
    return _ATTRIBUTE in vars(optimizer)


class StepGuard:
    """Within the ``with`` block the optimizers step; anywhere else ``step`` raises MisuseError.

    So does ``zero_grad``, the modules' as well, while a window is open: a step in between would use a part of a
    gradient, and zeroing would lose one, silently, on one rank only. Between two windows ``zero_grad`` does what it
    does in torch. A copy of a module or an optimizer, by ``deepcopy`` or pickle, is not guarded.

    Args:
        optimizers: that only the engine steps.
        modules: the model, and what wraps it.
        window_open: whether the engine's window is open.
    """

    def __init__(self, optimizers: Iterable[Optimizer], modules: Iterable[nn.Module], window_open: WindowOpen) -> None:
        self._window_open = window_open
        self._locks = [_OptimizerLock.of(optimizer) for optimizer in optimizers]
        self._modules = [_ModuleLock.of(module) for module in modules]
        locks: tuple[_OptimizerLock | _ModuleLock, ...] = (*self._locks, *self._modules)
        for lock in locks:
            lock.owners.append(window_open)

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.open = True

    def __exit__(self, *_: object) -> None:
        for lock in self._locks:
            lock.open = False

    def release(self) -> None:
        """Removes the guard; what another engine guards too stays guarded by that one."""
        locks: tuple[_OptimizerLock | _ModuleLock, ...] = (*self._locks, *self._modules)
        for lock in locks:
            lock.disown(self._window_open)
        self._locks, self._modules = [], []


class _OptimizerLock:
    """The guard of one optimizer, and the engines that own it: each says whether its window is open."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.open = False
        self.owners: list[WindowOpen] = []
        self._optimizer, self._zero_grad, self._own = optimizer, optimizer.zero_grad, _own_zero_grad(optimizer)
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        optimizer.zero_grad = self._guarded_zero_grad  # type: ignore[method-assign]  # there is no hook for it

    @classmethod
    def of(cls, optimizer: Optimizer) -> _OptimizerLock:
        """The one lock of an optimizer, which a second engine may wrap after the first."""
        lock = getattr(optimizer, _ATTRIBUTE, None)
        if not isinstance(lock, cls):
            lock = cls(optimizer)
            setattr(optimizer, _ATTRIBUTE, lock)
        return lock

    def disown(self, owner: WindowOpen) -> None:
        """Forgets one engine; without any left the optimizer is as it was."""
        self.owners.remove(owner)
        if not self.owners:
            self._hook.remove()
            del vars(self._optimizer)["zero_grad"], vars(self._optimizer)[_ATTRIBUTE]
            vars(self._optimizer).update(self._own)

    def _before_step(self, *_: Any) -> None:
        if not self.open:
            _refuse("optimizer.step")

    def _guarded_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if not self.open and any(window_open() for window_open in self.owners):
            _refuse("optimizer.zero_grad")
        self._zero_grad(*args, **kwargs)


class _ModuleLock:
    """A module's ``zero_grad``, in its instance's dictionary. In a copy of the module the class's own takes its place.

    Pickle and ``deepcopy`` ask for :meth:`__reduce__`, when the copy exists and its dictionary is still empty.
    """

    def __init__(self, module: nn.Module) -> None:
        self.owners: list[WindowOpen] = []
        self._module, self._zero_grad, self._own = module, module.zero_grad, _own_zero_grad(module)
        vars(module)["zero_grad"] = self  # past __setattr__: a compiled module would pass it on

    @classmethod
    def of(cls, module: nn.Module) -> _ModuleLock:
        """The one lock of a module."""
        lock = vars(module).get("zero_grad")
        return lock if isinstance(lock, cls) else cls(module)

    def disown(self, owner: WindowOpen) -> None:
        """Forgets one engine; without any left the module is as it was."""
        self.owners.remove(owner)
        if not self.owners:
            del vars(self._module)["zero_grad"]
            vars(self._module).update(self._own)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if any(window_open() for window_open in self.owners):
            _refuse("model.zero_grad")
        self._zero_grad(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "zero_grad")


def _own_zero_grad(owner: object) -> dict[str, Any]:
    """An instance's ``zero_grad``, where it has one that is not its class's; a module looks up attributes elsewhere."""
    return {name: value for name, value in vars(owner).items() if name == "zero_grad"}


def _refuse(method: str) -> NoReturn:
    remedy = "delete the line, as the window's end steps and zeroes by itself"
    raise MisuseError(f"{method}() was called by hand: {remedy}")


class OptimizerStep:
    """Optimizers, loss scale and clipping of one rank, whatever reduced the gradient.

    An engine makes it once the model is wrapped: wrapping replaces or moves the parameters.

    Args:
        update: the arithmetic of a step.
        modules: the model, and what wraps it: their ``zero_grad`` is refused while a window is open.
        settings: of the optimizers' groups.
        window_open: whether one is.
    """

    def __init__(
        self,
        update: FusedUpdate,
        modules: Sequence[nn.Module],
        settings: GroupSettings,
        *,
        window_open: Callable[[], bool],
    ) -> None:
        self._update, self._settings = update, settings
        self._scaler = update.options.scaler
        self._underflow_every = update.options.underflow_every if self._scaler else 0
        self._attempts = 0
        self._guard = StepGuard(update.optimizers, modules, window_open)

    def step(
        self, divisor: float, norm_bound: float, *, among: AbstractContextManager[None] | None = None
    ) -> StepOutput:
        """Steps on the gradients over ``divisor`` and the loss scale, within ``among``; they are not zeroed yet."""
        with self._guard, among or nullcontext():
            output = self._update.step(divisor, norm_bound)
        self._attempts += 1
        if not (self._underflow_every and self._attempts % self._underflow_every == 0):
            return output
        gradients = [to_local(p.grad) for p in self._update.parameters.values() if p.grad is not None]
        sampled = underflow_fraction(gradients, self._update.all_reduce_shards) if gradients else None
        return replace(output, underflow=sampled)

    def expect_known(self) -> None:
        """Raises MisuseError where an optimizer holds a gradient that is not reduced, as :meth:`step` does."""
        self._update.expect_known()

    def release(self) -> None:
        """Gives the optimizers and modules back unguarded."""
        self._guard.release()

    def state(self, model: Mapping[str, Tensor], *, owns: Callable[[int], bool]) -> EngineState:
        """With the ``model``'s tensors; ``owns`` says whether this rank gives the n-th parameter's optimizer state."""
        tensors, values = optimizer_state.collect(self._update.optimizers, self._update.stepped, owns=owns)
        values |= self._settings.changed()
        scaler = self._scaler.state_dict() if self._scaler else {}
        return EngineState(model=model, optimizer=tensors, optimizer_values=values, scaler=scaler)

    def load_state(self, state: EngineState) -> None:
        """Restores the optimizers' and the loss scale's state.

        Raises:
            KeyError: it names a parameter that the model has not.
            ValueError: it has settings of a group that is not there.
        """
        own, values = self._update, state.optimizer_values
        optimizer_state.load(own.optimizers, own.stepped, state.optimizer, values, model=state.model)
        self._settings.restore(values)
        self._update.forget()
        if self._scaler and state.scaler:
            self._scaler.load_state_dict(dict(state.scaler))
