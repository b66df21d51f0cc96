"""The number of samples in a batch that a stream yields: what all of its parts agree on, or a question."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from distaccum.data.batches import members
from distaccum.errors import DataError

REMEDY = "state it, as in DataSpec(train=stream, batch_size=lambda batch: len(batch['labels']))"
_SCALARS = str | bytes | int | float | complex
_FIELDS = 3  # a list of at most as many like parts is taken for fields, unless a batch before showed otherwise

Path = str
Sizes = frozenset[int]
Vote = tuple[Path, Sizes, int | None]
"""What a part of a batch says: its path, the sizes that it allows, and the length of a list that may be either."""


class BatchSize:
    """Measures batches: the sizes of tensors and arrays along their first dimension, and the lengths of lists.

    Every part has to agree; strings, None, and single numbers say nothing. A list of like parts may hold fields or
    samples: the other parts decide, or else the first batch of ``full`` samples. What none of that decides is asked
    for.

    Args:
        full: samples of a full micro-batch.
        given: the user's own function from a batch to its number of samples; None to measure.
    """

    def __init__(self, full: int, given: Callable[[Any], int] | None = None) -> None:
        self._full, self._given = full, given
        self._lists_hold_samples: bool | None = None  # where both readings are possible; None: not known yet
        self._seen_full = False

    def __call__(self, batch: Any) -> int:
        """The number of samples in ``batch``.

        Raises:
            DataError: its parts disagree or do not say; or the user's function gives no whole number.
        """
        if self._given is not None:
            size = self._given(batch)
            if isinstance(size, Tensor) and not size.dim():
                size = int(size)
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise DataError(f"batch_size() of the DataSpec gives {size!r}: return the number of samples, an int")
            return size
        first = _first_dimension(batch)
        if first is not None and first <= self._full and not self._lists_hold_samples:
            return first
        votes = list(_votes(batch, ""))
        possible, lists = _common(batch, votes)
        fitting = {size for size in possible if size <= self._full} or possible
        size = next(iter(fitting)) if len(fitting) == 1 else self._decided(batch, fitting, lists)
        self._seen_full = self._seen_full or size == self._full
        if not self._seen_full and _looks_like_a_sample(batch):
            _ask(batch, f"may be a batch of {size}, or one sample: it holds single numbers beside tensors")
        return size

    def _decided(self, batch: Any, possible: set[int], lists: list[int]) -> int:
        """One of several ``possible`` sizes; ``lists`` are the lengths of lists that allow both readings."""
        length = lists[0] if lists else 0
        as_fields = possible - {length}
        if length in possible and len(as_fields) == 1:
            if self._lists_hold_samples is None and self._full in possible and length > _FIELDS:
                self._lists_hold_samples = length == self._full
            if self._lists_hold_samples is not None:
                return length if self._lists_hold_samples else as_fields.pop()
            if length <= _FIELDS:
                return as_fields.pop()
        sizes = " or ".join(map(str, sorted(possible)))
        return _ask(batch, f"may hold {sizes} samples: its lists hold fields, or samples")


def _first_dimension(batch: Any) -> int | None:
    """The size of a batch whose parts are all tensors of one size, in one container: most batches."""
    kind = type(batch)
    parts = batch.values() if kind is dict else batch if kind is tuple or kind is list else (batch,)
    found: int | None = None
    for part in parts:
        if not isinstance(part, Tensor) or not part.ndim or (found is not None and part.shape[0] != found):
            return None
        found = int(part.shape[0])
    return found if kind not in (tuple, list) or len(batch) <= _FIELDS else None  # more may be samples


def _votes(part: Any, path: Path) -> Iterator[Vote]:
    """What each part of a batch says about its size."""
    if part is None or isinstance(part, _SCALARS):
        return
    if isinstance(part, PackedSequence):
        yield path, frozenset({int(part.batch_sizes[0]) if len(part.batch_sizes) else 0}), None
    elif (shape := _shape(part)) is not None:
        if len(shape):
            yield path, frozenset({int(shape[0])}), None
    elif (stated := _stated(part)) is not None:
        yield path, frozenset({stated}), None
    elif isinstance(part, Mapping):
        for key, value in part.items():
            yield from _votes(value, f"{path}[{key!r}]")
    elif isinstance(part, tuple) and hasattr(part, "_fields"):
        for name, value in zip(part._fields, part, strict=True):
            yield from _votes(value, f"{path}.{name}")
    elif isinstance(part, list | tuple):
        yield from _votes_of_list(part, path)
    elif hasattr(part, "__dataclass_fields__"):
        for name, value in members(part).items():
            yield from _votes(value, f"{path}.{name}")


def _votes_of_list(part: list[Any] | tuple[Any, ...], path: Path) -> Iterator[Vote]:
    if all(value is None or isinstance(value, _SCALARS) for value in part):
        if part or not path:  # an empty list beside other parts says nothing
            yield path, frozenset({len(part)}), None
        return
    inner = [vote for i, value in enumerate(part) for vote in _votes(value, f"{path}[{i}]")]
    first = part[0]
    kind = (getattr(first, "dtype", None), getattr(first, "ndim", None))
    alike = all(
        type(value) is type(first) and (getattr(value, "dtype", None), getattr(value, "ndim", None)) == kind
        for value in part
    )
    if not alike:  # fields
        yield from inner
        return
    as_fields = frozenset.intersection(*(sizes for _, sizes, _ in inner)) if inner else frozenset[int]()
    sizes = as_fields | {len(part)}
    yield path, sizes, len(part) if len(sizes) > 1 else None


def _shape(part: Any) -> tuple[int, ...] | None:
    """The shape of a tensor, an array or a table."""
    shape = part.shape if isinstance(part, Tensor) else getattr(part, "shape", None)
    return shape if isinstance(shape, tuple) else None


def _stated(part: Any) -> int | None:
    """The size that an object states itself: graphs in a batch, or a ``TensorDict``'s ``batch_size``."""
    for name in ("num_graphs", "batch_size"):
        value = getattr(part, name, None)
        if isinstance(value, tuple) and value:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _common(batch: Any, votes: list[Vote]) -> tuple[set[int], list[int]]:
    """The sizes that every part allows, and the ambiguous lists."""
    if not votes:
        if isinstance(batch, Mapping | list | tuple) and not batch:
            return {0}, []
        _ask(batch, "does not say how many samples it holds")
    common = set(votes[0][1])
    for path, sizes, _ in votes:
        if not common & sizes:
            other, others, _ = next((vote for vote in votes if not vote[1] & sizes), votes[0])
            said = " and ".join(
                f"{where or 'the list'} has {'/'.join(map(str, sorted(has)))}"
                for where, has in ((other, others), (path, sizes))
            )
            _ask(batch, f"does not say how many samples it holds: {said}")
        common &= sizes
    return common, [ambiguous for _, _, ambiguous in votes if ambiguous is not None]


def _looks_like_a_sample(batch: Any) -> bool:
    """Whether single numbers stand beside tensors, as a label does beside an image that nobody collated."""
    if isinstance(batch, Mapping):
        parts: list[Any] = list(batch.values())
        numbers: list[Any] = [
            part for part in parts if isinstance(part, Tensor) and not part.ndim
        ]  # others may be metadata
    elif isinstance(batch, list | tuple):
        parts = list(batch)
        numbers = [part for part in parts if isinstance(part, Tensor | int | float) and not getattr(part, "ndim", 0)]
    else:
        return False
    return bool(numbers) and len(numbers) < len(parts)


def _ask(batch: Any, problem: str) -> NoReturn:
    raise DataError(f"a batch of the stream ({type(batch).__name__}) {problem}: {REMEDY}")
