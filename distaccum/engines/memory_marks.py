"""What a rank knows of its memory: which shapes of micro-batches fit, and which did not; what it holds, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distaccum.config.checks import size_of
from distaccum.data.cutting import Shape
from distaccum.engines.modules import to_local

if TYPE_CHECKING:
    from distaccum.engines.base import Engine


class MemoryMarks:
    """Shapes that ran, and shapes that ran out of memory.

    A shape is proven if a larger one ran. It is too large if one that is no larger than it has failed. The last word
    counts: what fails is proven no longer, and what runs has not failed.
    """

    def __init__(self) -> None:
        self._proven: Sequence[Shape] = ()  # the largest ones
        self.failed: Sequence[Shape] = ()
        """The smallest shapes that failed."""
        self.looked = False
        """Whether some samples were looked at in this process, and may be cut."""

    def is_proven(self, shape: Shape) -> bool:
        """Whether it is known to fit."""
        return any(shape.fits_in(proven) for proven in self._proven)

    def is_too_large(self, shape: Shape) -> bool:
        """Whether it is known not to fit."""
        return any(failed.fits_in(shape) for failed in self.failed)

    def parts(self, shape: Shape) -> int:
        """Into how many parts of equal rows it is to be cut: a power of two, or as many as it has rows."""
        parts = 1
        while parts < shape.rows and self.is_too_large(Shape(-(-shape.rows // parts), shape.elements)):
            parts *= 2
        return min(parts, max(shape.rows, 1))

    def prove(self, shape: Shape) -> None:
        """Notes that it ran."""
        if not self.is_proven(shape):
            self.failed = tuple(failed for failed in self.failed if not failed.fits_in(shape))
            self._proven = (*(proven for proven in self._proven if not proven.fits_in(shape)), shape)

    def fail(self, shape: Shape, *, apart: bool = True) -> None:
        """Notes that it ran out of memory; of a single row, or if not ``apart``, nobody can cut it."""
        self._proven = tuple(proven for proven in self._proven if not shape.fits_in(proven))
        if apart and shape.rows > 1 and not self.is_too_large(shape):
            self.failed = (*(failed for failed in self.failed if not shape.fits_in(failed)), shape)

    def state_dict(self) -> dict[str, Any]:
        """The shapes, as values that JSON can hold."""
        return {"proven": list(map(list, self._proven)), "failed": list(map(list, self.failed))}

    def load_state_dict(self, state: Mapping[str, Iterable[Sequence[int]]]) -> None:
        """Restores :meth:`state_dict`; what is missing there is not known."""
        self._proven, self.failed = (tuple(Shape(*one) for one in state.get(name, ())) for name in ("proven", "failed"))


def memory_by_part(engine: Engine) -> str:
    """Weights, gradients and optimizer state of this rank, and what its device holds in all."""
    parameters = list(engine.unwrapped_model.parameters())
    states = [entry for optimizer in engine.optimizers for entry in optimizer.state.values()]
    sizes = {
        "weights": _bytes(parameters),
        "gradients": _bytes(p.grad for p in parameters),
        "optimizer state": sum(_bytes(entry.values()) for entry in states),
    }
    said = ", ".join(f"{name} {size_of(size)}" for name, size in sizes.items())
    if engine.device.type != "cpu":
        free, total = torch.get_device_module(engine.device).mem_get_info(engine.device)
        said += f"; {size_of(total - free)} of the card's {size_of(total)} are taken"
    return f"This rank holds: {said}"


def _bytes(values: Iterable[object]) -> int:
    return sum([to_local(value).nbytes for value in values if isinstance(value, Tensor)])
