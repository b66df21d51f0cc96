"""Keeps everyone but the engine from stepping an optimizer."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.optim import Optimizer

from distaccum.errors import MisuseError


class StepGuard:
    """Within the ``with`` block the optimizer steps; anywhere else ``step`` and ``zero_grad`` raise MisuseError.

    A step in between would use a part of a gradient, and a ``zero_grad`` lose one: silently, and on one rank alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._open = False
        self._zero_grad = optimizer.zero_grad
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.zero_grad = self._guarded_zero_grad  # type: ignore[method-assign]  # there is no hook for it

    def __enter__(self) -> None:
        self._open = True

    def __exit__(self, *_: object) -> None:
        self._open = False

    def _before_step(self, *_: Any) -> None:
        if not self._open:
            self._refuse("step")

    def _guarded_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if not self._open:
            self._refuse("zero_grad")
        self._zero_grad(*args, **kwargs)

    def _refuse(self, method: str) -> NoReturn:
        raise MisuseError(
            f"optimizer.{method}() was called by hand: delete the line, as the window's end steps and zeroes by itself"
        )
