"""Refuses optimizer steps by anyone but the engine, and zeroing while a window is open."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from distaccum.errors import MisuseError

_ATTRIBUTE = "_distaccum_lock"  # of an optimizer

WindowOpen = Callable[[], bool]


def _always() -> bool:
    return True


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

    def __init__(
        self, optimizers: Iterable[Optimizer], modules: Iterable[nn.Module], window_open: WindowOpen = _always
    ) -> None:
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
