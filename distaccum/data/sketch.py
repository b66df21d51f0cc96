"""A few numbers of an item, which tell two items apart without sending either."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distaccum.data.batches import members

_NUMBERS, _MOST_READ = 8, 2**16  # of each tensor or array: in a sketch, and for its mean
_MOST_PARTS = 64
_ALIKE = 0.02  # of the largest: decoders and processors differ by less, two samples by more
_TELLING = 4  # distinct numbers

Leaf = tuple[str, str, tuple[float, ...]]
"""A part of an item: its path; its type, and its shape or text; numbers of it, the mean first."""

Sketch = tuple[Leaf, ...]


def sketch(item: Any) -> Sketch | None:
    """The parts of an item that can be compared, in order; None where there is none."""
    found = tuple(islice(_leaves(item, ""), _MOST_PARTS))
    return found or None


def same(one: Sketch | None, other: Sketch | None, *, exactly: bool = False) -> bool | None:
    """Whether two items are the same, up to rounding unless ``exactly``; None where a sketch is missing."""
    if one is None or other is None:
        return None
    if exactly or len(one) != len(other):
        return one == other
    return all(
        (path, kind) == (others_path, others_kind) and _close(kind, numbers, others_numbers)
        for (path, kind, numbers), (others_path, others_kind, others_numbers) in zip(one, other, strict=True)
    )


def is_telling(sketches: Sequence[Sketch | None]) -> bool:
    """Whether items with equal sketches are the same: constant ones, as of a benchmark, may be equal by chance."""
    return len({number for one in sketches for _, _, numbers in one or () for number in numbers}) >= _TELLING


def _close(kind: str, numbers: tuple[float, ...], others: tuple[float, ...]) -> bool:
    if not kind.startswith(("float", "uint8", "bfloat", "complex")):
        return numbers == others
    scale = max(map(abs, (*numbers, *others)), default=0.0)
    return all(abs(a - b) <= _ALIKE * scale for a, b in zip(numbers, others, strict=True))


def _leaves(item: Any, path: str) -> Iterator[Leaf]:
    if isinstance(item, str | bytes):
        text = item.encode(errors="replace") if isinstance(item, str) else item
        yield path, f"text of {len(text)}: {zlib.crc32(text):08x}", tuple(map(float, text[:_NUMBERS]))
    elif isinstance(item, bool | int | float):
        yield path, type(item).__name__, (float(item),)
    elif isinstance(item, Tensor):
        yield from _numbers(item, path)
    elif isinstance(item, np.ndarray | np.generic):
        if item.dtype.kind in "biufc":
            yield from _numbers(torch.from_numpy(np.array(item)), path)
    elif isinstance(item, list) and len(item) > _NUMBERS and {*map(type, item)} <= {int, float, bool}:
        yield from _numbers(torch.tensor(item, dtype=torch.float64), path)
    else:
        for name, value in _parts(item):
            yield from _leaves(value, f"{path}{name}")


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a container, with their names; of anything else none."""
    if isinstance(item, Mapping):
        yield from ((f"[{key!r}]", item[key]) for key in item)
    elif isinstance(item, list | tuple):
        yield from ((f"[{i}]", value) for i, value in enumerate(item))
    elif hasattr(item, "__dataclass_fields__") and not isinstance(item, type):
        yield from ((f".{name}", value) for name, value in members(item).items())


def _numbers(tensor: Tensor, path: str) -> Iterator[Leaf]:
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        return
    name = f"{tensor.dtype}".removeprefix("torch.") + f" {tuple(tensor.shape)}"
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = values.detach().reshape(-1)
    flat = flat[:: max(1, len(flat) // _MOST_READ)].to(torch.float64)
    few = flat[torch.linspace(0, len(flat) - 1, min(_NUMBERS, len(flat))).long()] if len(flat) else flat
    numbers = (float(flat.mean()), *few.tolist()) if len(flat) else ()
    yield path, name, tuple(0.0 if number != number else number for number in numbers)  # noqa: PLR0124  NaN is no number
