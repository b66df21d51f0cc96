"""Refuses optimizer steps and zeroing by anyone but the engine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from distaccum.errors import MisuseError


class StepGuard:
    """Within the ``with`` block the optimizers step; anywhere else ``step`` and ``zero_grad`` raise MisuseError.

    A step in between would use a part of a gradient, and a ``zero_grad`` would lose one: silently, on one rank only.
    The same holds for the modules' ``zero_grad``.

    Args:
        optimizers: that only the engine steps.
        modules: the model, and what wraps it.
    """

    def __init__(self, optimizers: Iterable[Optimizer], modules: Iterable[nn.Module]) -> None:
        self._locks = [_Lock.of(optimizer) for optimizer in optimizers]
        for module in modules:
            module.zero_grad = partial(_refuse, "model.zero_grad")  # type: ignore[method-assign]

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.open = True

    def __exit__(self, *_: object) -> None:
        for lock in self._locks:
            lock.open = False


class _Lock:
    """The guard of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.open = False
        self._zero_grad = optimizer.zero_grad
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.zero_grad = self._guarded_zero_grad  # type: ignore[method-assign]  # there is no hook for it

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Lock:
        """The one lock of an optimizer, which a second engine may wrap after the first."""
        lock = getattr(optimizer, "_distaccum_lock", None)
        if not isinstance(lock, cls):
            lock = cls(optimizer)
            optimizer._distaccum_lock = lock  # type: ignore[attr-defined]
        return lock

    def _before_step(self, *_: Any) -> None:
        if not self.open:
            _refuse("optimizer.step")

    def _guarded_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if not self.open:
            _refuse("optimizer.zero_grad")
        self._zero_grad(*args, **kwargs)


def _refuse(method: str, **_: object) -> NoReturn:
    remedy = "delete the line, as the window's end steps and zeroes by itself"
    raise MisuseError(f"{method}() was called by hand: {remedy}")
