"""Tells whether anybody but the engine has changed the gradients of an open window."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter, is_

from torch import Tensor

from distaccum.errors import MisuseError

CHANGED_BY_HAND = (
    "gradients were changed by hand inside a window (clip_grad_norm_, a backward() past the accumulator, "
    "zeroing or writing .grad), which makes the window's gradient another one: delete the line. Clip with "
    "clip_norm= or clip_value=; run other backwards between two windows, or as torch.autograd.grad(...)"
)

_VERSION = attrgetter("_version")  # mapped: a Python call a gradient would cost more than the comparison


class GradientWatch:
    """Compares gradients with those that the engine left: which tensors they are, and their versions.

    A tensor's version counts what was written into it. The host knows both, so no device is read. Views of one buffer
    share a version: a change of one is a change of all.

    Args:
        gradients: gives the tensors in which the window accumulates, always in the same order; None for one that is not
            there.
    """

    def __init__(self, gradients: Callable[[], Iterable[Tensor | None]]) -> None:
        self._gradients = gradients
        self._left: list[Tensor | None] = []
        self._versions: list[int] = []

    def note(self) -> None:
        """Called by the engine after it has changed gradients."""
        self._left = list(self._gradients())
        try:
            self._versions = list(map(_VERSION, self._left))
        except AttributeError:  # of None
            self._versions = _versions(self._left)

    @property
    def unchanged(self) -> bool:
        """Whether nobody has changed a gradient since :meth:`note`."""
        now = list(self._gradients())
        if len(now) != len(self._left) or not all(map(is_, now, self._left)):
            return False
        try:
            return list(map(_VERSION, now)) == self._versions
        except AttributeError:  # of None
            return _versions(now) == self._versions

    @property
    def writes(self) -> int:
        """How often the gradient that was written most often was, since :meth:`note`."""
        found = zip(self._gradients(), self._left, _versions(self._left), self._versions, strict=True)
        return max((now - left for gradient, known, now, left in found if gradient is known), default=0)

    def check(self) -> None:
        """Called by the engine in an open window before it changes gradients itself.

        Raises:
            MisuseError: somebody has changed a gradient since :meth:`note`.
        """
        if not self.unchanged:
            raise MisuseError(CHANGED_BY_HAND)

    def forget(self) -> None:
        """Releases the gradients; the next call is :meth:`note`."""
        self._left = []


def _versions(gradients: list[Tensor | None]) -> list[int]:
    return [0 if gradient is None else gradient._version for gradient in gradients]
