"""Hooks on DeepSpeed's model that cast, and a lock on its engine's methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from distaccum.engines.guard import StepGuard
from distaccum.errors import MisuseError


def compute_in(dtype: torch.dtype, model: nn.Module) -> None:
    """Casts a model's floating inputs to ``dtype``, which DeepSpeed does not, and its outputs to fp32.

    Losses are sums, for which 16 bits are too few.
    """

    def to(wanted: torch.dtype, values: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.to(wanted) if t.is_floating_point() else t, values)

    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return to(dtype, (args, kwargs))

    def widen(_: nn.Module, __: Any, output: Any) -> Any:
        return to(torch.float32, output)

    model.register_forward_pre_hook(cast, with_kwargs=True)
    model.register_forward_hook(widen)


class EngineLock:
    """Within the ``with`` block DeepSpeed's engine and its optimizer step; anywhere else both raise MisuseError.

    DeepSpeed's ``zero_grad`` raises while a window is open only: between two windows it drops what no window counts.
    """

    def __init__(self, engine: Any, guard: StepGuard, window_open: Callable[[], bool]) -> None:
        self._guard, self._window_open = guard, window_open
        self._open = False
        for name in ("step", "backward", "zero_grad"):
            setattr(engine, name, partial(self._guarded, name, getattr(engine, name)))

    def __enter__(self) -> None:
        self._open = True
        self._guard.__enter__()

    def release(self) -> None:
        """Removes the guards of model and optimizer; DeepSpeed's engine stays locked."""
        self._guard.release()

    def __exit__(self, *error: object) -> None:
        self._open = False
        self._guard.__exit__(*error)

    def _guarded(self, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._open and (name != "zero_grad" or self._window_open()):
            remedy = "delete the line, as the window's end steps and zeroes by itself"
            raise MisuseError(f"{name}() of DeepSpeed's engine was called by hand: {remedy}")
        return method(*args, **kwargs)
