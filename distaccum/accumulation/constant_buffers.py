"""Buffers that a forward changes depend on the micro-batches that their rank has seen, and so on the ranks."""

from __future__ import annotations

from torch import Tensor

from distaccum.engines.base import Engine
from distaccum.errors import MisuseError, shorten


class ConstantBuffers:
    """Looks, for an engine that is ``reproducible``, whether a window's forwards have changed the model's buffers.

    Args:
        engine: whose model it is.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._on = engine, engine.reproducible
        self._kept: dict[str, tuple[Tensor, int, Tensor]] = {}  # the buffer, its version, and a copy

    def begin(self) -> None:
        """Before a window: what somebody has set in between is as good as what was there."""
        if not self._on:
            return
        for name, buffer in self._engine.unwrapped_model.named_buffers():
            known = self._kept.get(name)
            if known is None or known[0] is not buffer or known[1] != buffer._version:
                self._kept[name] = buffer, buffer._version, buffer.detach().clone()

    def check(self) -> None:
        """Before the window's step.

        Raises:
            MisuseError: a buffer was changed in place to another value.
        """
        if not self._on:
            return
        changed = []
        for name, (buffer, version, copy) in self._kept.items():
            if buffer._version != version and not buffer.equal(copy):
                changed.append(name)
            self._kept[name] = buffer, buffer._version, copy
        if changed:
            problem = f"a forward has changed the buffer {shorten(changed)}, which each rank changes by its own units"
            raise MisuseError(f"{problem}: numerics=reproducible needs a model without such, or use numerics=fast")
