"""Tells whether anybody but the engine has written into reduced gradients that are shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from distaccum.engines.fsdp2 import internals
from distaccum.engines.gradient_watch import CHANGED_BY_HAND
from distaccum.engines.host_copy import HostCopy

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ShardWatch:
    """Compares the shards' norms: operators on many shards at once, as ``clip_grad_norm_``'s, leave versions alone.

    The device compares, and nothing is read back: where a shard has changed the gradient becomes NaN, so that no rank
    steps. This costs two more reads of this rank's part of the gradient.

    Args:
        gradients: those of the shards, reduced; None for one that has none.
    """

    def __init__(self, gradients: Callable[[], Iterable[Tensor | None]]) -> None:
        self._gradients = gradients
        self._norms: Tensor | None = None
        self._changed: Tensor | None = None

    def note(self) -> None:
        """Called by the engine after it has changed gradients."""
        self._norms = self._measure()

    def look(self) -> None:
        """Called by the engine in an open window before it changes gradients itself."""
        norms = self._measure()
        if norms is None or self._norms is None:
            return
        kind = _BITS[norms.element_size()]  # NaN is not equal to itself
        changed = (norms.view(kind) != self._norms.view(kind)).any()
        self._changed = changed if self._changed is None else self._changed | changed

    def spoil(self) -> list[tuple[HostCopy, str]]:
        """Makes a gradient NaN that has been changed; see ``StepOutput.late_faults``."""
        changed, self._changed = self._changed, None
        if changed is None:
            return []
        shards = internals.local_shards(self._gradients())
        shards[0].mul_(torch.where(changed, torch.nan, 1.0).to(shards[0].dtype))
        return [(HostCopy(changed.reshape(1).float()), CHANGED_BY_HAND)]

    def forget(self) -> None:
        """Called when the gradients are dropped."""
        self._norms = self._changed = None

    def _measure(self) -> Tensor | None:
        shards = internals.local_shards(self._gradients())
        return torch.stack(torch._foreach_norm(shards)) if shards else None
