"""What outlives a window of micro-steps that run out of memory: whether they may be cut, and how."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from distaccum.accumulation.batch_norm import batch_statistics
from distaccum.data.window import Window
from distaccum.distributed.sliced_random import Slice, SlicedRandom
from distaccum.engines.base import Engine
from distaccum.engines.buffers import ChangingBuffers
from distaccum.verification.parts import Parts

_log = logging.getLogger(__name__)
_LOOKS = 8
_RISING = 2  # windows in a row in which the allocator had to try again
_STATISTICS = "its batch normalization is over the micro-batch, and parts of it have other statistics"
_MOVES = "its forward changes buffers, and parts of it would change them once each"


class Recovery:
    """What outlives a window of the micro-steps that an engine runs, and that are finished if memory runs out.

    Args:
        engine: only where it ``repairs``; elsewhere an error is raised as it is.
        retries: gives the allocations that the device's allocator had to try again since the start.
    """

    def __init__(self, engine: Engine, *, retries: Callable[[], int] | None = None) -> None:
        self.engine, self.buffers = engine, ChangingBuffers(engine)
        self.draws: bool | None = None
        """Whether forwards draw random numbers; None: not known yet."""
        self.draws_elsewhere: bool | None = None
        """Whether they draw from Python's or NumPy's generators; None: not known yet."""
        self.parts: Parts | None = None
        """What looks at some samples have found; None: nobody has looked."""
        self.looks = _LOOKS
        """That are left: what is no sum in some samples may be one in others."""
        self.repaired = 0
        """Micro-steps that ran out of memory, and were finished."""
        if retries is None and engine.device.type == "cuda":
            retries = _allocation_retries(engine.device)
        self._retries, self._retried, self._rising = retries, 0, 0

    @classmethod
    def of(cls, engine: Engine) -> Recovery:
        """The engine's own: the same for all of its windows."""
        if not isinstance(engine.recovery, cls):
            engine.recovery = cls(engine)
        return engine.recovery

    def note(self, found: Parts) -> None:
        """Adds what a look has found; micro-batches that may not be cut are not cut from then on."""
        self.looks -= 1
        known = self.parts or Parts()
        self.parts = Parts(
            differs=known.differs or found.differs,
            changes=known.changes or found.changes,
            again=known.again or found.again,
            draws_elsewhere=known.draws_elsewhere or found.draws_elsewhere,
            slices=None if known.slices is None else found.slices,
        )
        if self.whole or self.parts.again:
            self.looks = 0
            self.engine.memory_marks.keep_whole()

    @property
    def whole(self) -> str:
        """Why micro-batches are not cut, in words; empty if they are, as far as is known."""
        if batch_statistics(self.engine.unwrapped_model):
            return _STATISTICS
        if self.parts is None:
            return ""
        return self.parts.differs or (_MOVES if self.parts.changes else "")

    @property
    def slices(self) -> Sequence[Slice]:
        """How what forwards draw is cut; nothing, if they draw nothing, or if it is not."""
        return () if self.parts is None else self.parts.slices or ()

    @property
    def draws_uncut(self) -> bool:
        """Whether forwards draw what cannot be cut, as far as is known."""
        return self.parts is not None and self.parts.slices is None

    def cannot_slice(self, why: str) -> None:
        """From here on parts draw the numbers of smaller micro-batches."""
        assert self.parts is not None
        self.parts = replace(self.parts, slices=None)
        _log.warning("parts of micro-batches have the random numbers of smaller micro-batches from here on: %s", why)

    @property
    def watches(self) -> bool:
        """Whether the allocator's retries are counted."""
        return self._retries is not None

    def runs_short(self) -> bool:
        """Whether the allocator has had to try again in two windows in a row; asked after each.

        A device that is nearly full frees its cache and tries again, which is slow.
        """
        if self._retries is None:
            return False
        found = self._retries()
        self._rising = self._rising + 1 if found > self._retried else 0
        self._retried = found
        if self._rising < _RISING:
            return False
        self._rising = 0
        return True

    def random_of(self, window: Window, i: int) -> tuple[int | None, SlicedRandom | None]:
        """The key of a micro-batch's random numbers, and what cuts them where it is a part of a larger one."""
        part = window.parts[i] if window.parts and self.slices else None
        if part is not None:
            return part.key, SlicedRandom(part.rows, self.slices, strict=False)
        return window.keys[i] if window.keys else None, None


def _allocation_retries(device: torch.device) -> Callable[[], int]:
    return lambda: int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
