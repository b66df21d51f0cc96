"""The parts of a batch: mapped one by one, in containers that keep their types."""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from distaccum.errors import DataError

# Of an object that is searched for tensors: containers within each other, and items of each.
_DEEPEST, _MOST_SEARCHED = 8, 1000


def _same(value: Any) -> Any:
    return value


def map_tensors(batch: Any, function: Callable[[Tensor], Any], other: Callable[[Any], Any] = _same) -> Any:
    """``batch`` with ``function`` applied to every tensor, in new containers of the same types.

    Containers are mappings, lists, (named) tuples, dataclasses and ``PackedSequence``. A container that moves itself,
    by a method ``to``, counts as one value; dicts never do.

    Args:
        batch: of any structure.
        function: from a tensor to what takes its place.
        other: the same for values that are neither tensors nor containers, such as strings, arrays and objects.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    kind = type(batch)
    if kind is dict:
        return {key: map_tensors(value, function, other) for key, value in batch.items()}
    if kind is list or kind is tuple:
        return kind([map_tensors(value, function, other) for value in batch])
    rebuild = None if batch is None or isinstance(batch, str | int | float) else rebuilder(batch)
    return other(batch) if rebuild is None else rebuild(batch, lambda part: map_tensors(part, function, other))


Apply = Callable[[Any], Any]


def rebuilder(batch: Any) -> Callable[[Any, Apply], Any] | None:
    """What makes a container of this type again, from its parts; None for what is none."""
    if isinstance(batch, PackedSequence):
        return _repacked
    if isinstance(batch, dict | UserDict):
        return _refilled
    if isinstance(batch, list):
        return _relisted
    if isinstance(batch, tuple):
        return _retupled
    if callable(getattr(batch, "to", None)) or isinstance(batch, type):
        return None
    return _remapped if isinstance(batch, Mapping) else _copied if is_dataclass(batch) else None


def _repacked(batch: PackedSequence, apply: Apply) -> Any:
    """The sizes stay on the host, where torch wants them; its constructor would look at what ``apply`` returns."""
    data, order, inverse = (
        None if part is None else apply(part) for part in (batch.data, batch.sorted_indices, batch.unsorted_indices)
    )
    return tuple.__new__(type(batch), (data, batch.batch_sizes, order, inverse))


def _refilled(batch: Any, apply: Apply) -> Any:
    found = copy.copy(batch)  # with its attributes, such as a default factory or a tokenizer's encodings
    for key, value in batch.items():
        found[key] = apply(value)
    return found


def _relisted(batch: list[Any], apply: Apply) -> Any:
    found = copy.copy(batch)
    found[:] = [apply(value) for value in batch]
    return found


def _retupled(batch: Any, apply: Apply) -> Any:
    parts = [apply(value) for value in batch]
    return batch._make(parts) if hasattr(batch, "_make") else type(batch)(parts)


def _remapped(batch: Any, apply: Apply) -> Any:
    return type(batch)({key: apply(value) for key, value in batch.items()})


def _copied(batch: Any, apply: Apply) -> Any:
    found = copy.copy(batch)
    for name, value in members(batch).items():
        object.__setattr__(found, name, apply(value))  # it may be frozen
    return found


def members(batch: Any) -> dict[str, Any]:
    """The values of a dataclass's fields, by name; a field that was never set is left out."""
    return {field.name: getattr(batch, field.name) for field in fields(batch) if hasattr(batch, field.name)}


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with its tensors on ``device``, in containers of the same types.

    Copies from pinned memory do not block the host. Objects with a method ``to(device)`` move themselves; arrays,
    strings and numbers stay.

    Raises:
        DataError: an object holds tensors that would stay where they are.
    """
    return map_tensors(
        batch, lambda tensor: tensor.to(device, non_blocking=True), lambda value: moved_object(value, device)
    )


def moved_object(value: Any, device: torch.device) -> Any:
    """``value``, no tensor and no container, on ``device``: by its own ``to``, or as it is if it holds no tensor.

    Raises:
        DataError: it holds tensors, and has no method ``to(device)``.
    """
    if value is None or device.type == "cpu" or isinstance(value, str | bytes | int | float | type):
        return value
    move = getattr(value, "to", None)
    if callable(move):
        try:
            moved = move(device)
        except Exception:  # a method of that name which converts something else, such as a time to a zone
            if next(_hidden(value, _DEEPEST), None) is not None:
                raise
            return value
        return value if moved is None else moved  # None: it moved in place
    for path, tensor in _hidden(value, _DEEPEST):
        if tensor.device != device:
            kind = type(value).__name__
            problem = f"a batch holds a tensor in {kind}{path}, which would not be moved to {device}"
            remedy = f"give {kind} a method to(device), or make it a dataclass, a dict, a list or a tuple"
            raise DataError(f"{problem}: {remedy}")
    return value


def _hidden(value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an object's attributes and first items, with their paths."""
    if isinstance(value, Tensor):
        yield "", value
    elif depth and not isinstance(value, str | bytes | int | float | type):
        parts: Iterable[tuple[str, Any]]
        if isinstance(value, Mapping):
            parts = ((f"[{key!r}]", part) for key, part in value.items())
        elif isinstance(value, list | tuple | set | frozenset | deque):
            parts = ((f"[{i}]", part) for i, part in enumerate(value))
        else:
            slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
            attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
            parts = ((f".{name}", part) for name, part in (attributes | getattr(value, "__dict__", {})).items())
        for path, part in islice(parts, _MOST_SEARCHED):
            for inner, tensor in _hidden(part, depth - 1):
                yield f"{path}{inner}", tensor


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)
