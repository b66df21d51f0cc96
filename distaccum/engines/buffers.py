"""A program's state, kept and put back around what runs a forward once more: buffers, and what Python holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.distributed.random import RNGState
from distaccum.engines.base import Engine
from distaccum.engines.state import takes_extra


@contextmanager
def state_restored(engine: Engine, *others: object) -> Iterator[None]:
    """Restores buffers, plain attributes, extra state and random number generators after the block.

    Args:
        engine: of the model.
        others: objects beside the model whose plain attributes a forward may change: the loss.
    """
    from distaccum.program import PLAIN_STATE, load  # noqa: PLC0415  in windows that are looked at

    generators = RNGState.capture(engine.device)
    plain = load(PLAIN_STATE)([*engine.unwrapped_model.modules(), *others])
    try:
        with buffers_restored(engine):
            yield
    finally:
        generators.restore()
        plain.restore()


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


def _alike(found: Any, expected: Tensor, within: float) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    if not within or not expected.is_floating_point() or not expected.numel():
        return bool(((found == expected) | (found.isnan() & expected.isnan())).all())
    largest = float(expected.abs().nan_to_num().max())
    return torch.allclose(found, expected, rtol=within, atol=within * largest, equal_nan=True)
