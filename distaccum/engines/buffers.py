"""The model's buffers, kept and put back around what runs a forward once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.distributed.random import RNGState
from distaccum.engines.base import Engine
from distaccum.engines.state import takes_extra
from distaccum.errors import ResourceError

_version = attrgetter("_version")  # no call of ours, as this is asked before every micro-step


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

    def changed(self) -> Sequence[tuple[nn.Module, str]]:
        """Those that are no longer what they were; reads the device. A batch norm's kernel counts no version."""
        return [
            (module, name)
            for module, name, buffer, copy in self._kept
            if getattr(module, name, None) is not buffer or not torch.equal(buffer, copy)
        ]

    def hold(self, within: float = 0.0) -> bool:
        """Whether the buffers still are what they were, up to a relative difference; reads the device."""
        return all(_alike(getattr(module, name), copy, within) for module, name, _, copy in self._kept)


class ChangingBuffers:
    """The buffers that training forwards change, such as running statistics: kept, and put back for a second forward.

    The first forward tells which they are, and is guarded by a copy of all; from then on only they are copied. Where
    another one is changed in place later on, a second forward is refused.

    Args:
        engine: whose model it is.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: Buffers | None = None
        self._changing: list[tuple[nn.Module, str]] | None = None  # None: not known yet
        self._constant: list[tuple[nn.Module, str]] = []
        self._tensors: list[Tensor] = []  # of those
        self.none = False
        """Whether the model is known to have no buffers."""

    def keep(self) -> Callable[[], None]:
        """Before a forward; what is returned sets them to what they are now.

        Raises:
            ResourceError: by what is returned: a buffer has changed of which there is no copy.
        """
        if self._changing is None:
            self._before = Buffers(self._engine)
            return self._before.restore
        if self.none:
            return nothing
        kept = _copies(self._changing) if self._changing else []
        return partial(self._put_back, kept, list(map(_version, self._tensors)))

    def learn(self) -> None:
        """After a forward and backward that went well."""
        if self._before is None:
            return
        if not any(takes_extra(module) for module in self._engine.unwrapped_model.modules()):
            self._changing = list(self._before.changed())
            known = {(id(module), name) for module, name in self._changing}
            constant = [one for one in _named(self._engine) if (id(one[0]), one[1]) not in known]
            self._constant = [(module, name) for module, name, _ in constant]
            self._tensors = [buffer for _, _, buffer in constant]
            self.none = not self._changing and not self._constant
        self._before = None

    @torch.no_grad()
    def _put_back(self, kept: Sequence[tuple[nn.Module, str, Tensor, Tensor]], versions: Sequence[int]) -> None:
        for (module, name), buffer, version in zip(self._constant, self._tensors, versions, strict=True):
            if buffer._version != version:
                problem = (
                    f"the forward has changed the buffer {name} of {type(module).__name__}, and not in the first one"
                )
                raise ResourceError(f"memory has run out, and {problem}: it is not run again. Lower batch.micro_size")
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
        for module, name, buffer, copy in kept:
            buffer.copy_(copy)
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)


def nothing() -> None:
    """Puts no buffers back."""


def _copies(changing: Sequence[tuple[nn.Module, str]]) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
    return [(module, name, getattr(module, name), getattr(module, name).clone()) for module, name in changing]


def _named(engine: Engine) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in engine.unwrapped_model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer


def _alike(found: Any, expected: Tensor, within: float) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    if not within or not expected.is_floating_point() or not expected.numel():
        return bool(((found == expected) | (found.isnan() & expected.isnan())).all())
    largest = float(expected.abs().nan_to_num().max())
    return torch.allclose(found, expected, rtol=within, atol=within * largest, equal_nan=True)
