"""The model's buffers, kept and put back around what runs a forward once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.distributed.random import RNGState
from distaccum.engines.base import Engine
from distaccum.engines.extra_state import takes_extra


@contextmanager
def state_restored(engine: Engine) -> Iterator[None]:
    """Restores buffers, extra state and random number generators after the block."""
    generators = RNGState.capture(engine.device)
    try:
        with buffers_restored(engine):
            yield
    finally:
        generators.restore()


@contextmanager
def buffers_restored(engine: Engine) -> Iterator[None]:
    """Restores the model's buffers and its modules' extra state after the block."""
    before = Buffers(engine)
    try:
        yield
    finally:
        before.restore()


class Buffers:
    """The model's buffers and its modules' extra state, as they are now."""

    def __init__(self, engine: Engine) -> None:
        modules = list(engine.unwrapped_model.modules())
        self._kept = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._extras = [(module, deepcopy(module.get_extra_state())) for module in modules if takes_extra(module)]

    def restore(self) -> None:
        """Sets them to what they were."""
        for module, name, buffer, copy in self._kept:
            with torch.no_grad():
                buffer.copy_(copy)
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
        for module, extra in self._extras:
            module.set_extra_state(deepcopy(extra))

    def hold(self, within: float = 0.0) -> bool:
        """Whether the buffers still are what they were, up to a relative difference; reads the device."""
        return all(_alike(getattr(module, name), copy, within) for module, name, _, copy in self._kept)


class ChangingBuffers:
    """The buffers that training forwards change, such as running statistics: kept, and put back for a second forward.

    The first forward tells which they are, and is guarded by a copy of all; from then on only they are copied.

    Args:
        engine: whose model it is.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._versions: list[tuple[nn.Module, str, Tensor, int]] = []
        self._changing: list[tuple[nn.Module, str]] | None = None  # None: not known yet

    def keep(self) -> Callable[[], None]:
        """Before a forward; what is returned sets them to what they are now."""
        if self._changing is None:
            self._versions = [(module, name, b, b._version) for module, name, b in _named(self._engine)]
            return Buffers(self._engine).restore
        if not self._changing:
            return _nothing
        return partial(_put_back, [(m, name, getattr(m, name), getattr(m, name).clone()) for m, name in self._changing])

    def learn(self) -> None:
        """After a forward and backward that went well."""
        if self._changing is None:
            changed = [(m, name) for m, name, b, version in self._versions if _changed(m, name, b, version)]
            if not any(takes_extra(module) for module in self._engine.unwrapped_model.modules()):
                self._changing = changed
            self._versions = []


def _nothing() -> None:
    pass


@torch.no_grad()
def _put_back(kept: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    for module, name, buffer, copy in kept:
        buffer.copy_(copy)
        if getattr(module, name) is not buffer:
            setattr(module, name, buffer)


def _named(engine: Engine) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in engine.unwrapped_model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer


def _changed(module: nn.Module, name: str, buffer: Tensor, version: int) -> bool:
    return getattr(module, name, None) is not buffer or buffer._version != version


def _alike(found: Any, expected: Tensor, within: float) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    if not within or not expected.is_floating_point() or not expected.numel():
        return bool(((found == expected) | (found.isnan() & expected.isnan())).all())
    largest = float(expected.abs().nan_to_num().max())
    return torch.allclose(found, expected, rtol=within, atol=within * largest, equal_nan=True)
