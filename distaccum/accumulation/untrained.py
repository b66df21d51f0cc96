"""Names parameters that the loss never gave a gradient: a frozen branch, a head no loss uses, a detached path."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from distaccum.engines.base import StepOutput
from distaccum.engines.host_copy import HostCopy
from distaccum.errors import UntrainedParameterWarning, shorten

WINDOWS = 16  # looked at


class UntrainedParameters:
    """Adds up the gradients' norms on the device over the first windows, and looks at the sum once.

    A gradient of 0.0 counts as none: an engine whose gradients are buckets has one for every parameter.

    Args:
        names: of the parameters that need a gradient.
        windows: to look at.
    """

    def __init__(self, names: Iterable[str], windows: int = WINDOWS) -> None:
        self._untrained = set(names)
        self._left = windows
        self._seen: list[str] | None = None
        self._norms: Tensor | None = None
        self._copy: HostCopy | None = None

    def note(self, step: StepOutput) -> None:
        """Adds one window's step; warns in the window after the last one, when the numbers have arrived."""
        if self._left < 0:
            return
        self._left -= 1
        if self._left < 0:
            self._warn()
            return
        names = list(step.names)
        if self._norms is None:
            self._seen, self._norms = names, step.norms
        elif names == self._seen:
            self._norms = torch.maximum(self._norms, step.norms)
        else:  # used now, and not before, or the other way round
            self._untrained.difference_update(set(names) ^ set(self._seen or ()))
            return
        if self._left == 0:
            self._copy = HostCopy(self._norms)

    def _warn(self) -> None:
        norms = self._copy.read() if self._copy is not None else []
        trained = {name for name, norm in zip(self._seen or (), norms, strict=False) if norm != 0.0}
        if self._copy is None:  # parameters came and went: those that were ever named
            trained = set(self._seen or ())
        names = sorted(self._untrained - trained)
        self._norms = self._copy = None
        if names and trained:
            problem = f"no window has given {shorten(names)} a gradient so far"
            warnings.warn(f"{problem}: set requires_grad=False, or use it in the loss", UntrainedParameterWarning, 2)
