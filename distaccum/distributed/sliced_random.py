"""Random numbers of a part of a micro-batch: its rows of what the whole draws.

A mask of dropout is drawn in one piece for a micro-batch, in the order in which its elements lie in memory. So that
each sample of a part has the numbers that it has in the whole, an operator that draws does so for the whole, and the
part takes its rows of it; the generator then goes on as in the whole. Which dimension the rows are in is learned from
forwards of more and of fewer rows (``slices_of``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distaccum.distributed.memory import is_out_of_memory

DROPOUT = ("p", "dropout_p", "dropout")  # arguments of operators that draw if they are not 0
_FILLS = frozenset(
    f"aten::{name}"
    for name in (
        "bernoulli_.float",
        "uniform_",
        "normal_",
        "random_",
        "random_.from",
        "random_.to",
        "exponential_",
        "geometric_",
        "log_normal_",
        "cauchy_",
    )
)
_LIKE = frozenset(
    f"aten::{name}" for name in ("bernoulli.p", "rand_like", "randn_like", "randint_like", "randint_like.low_dtype")
)
_SIZED = frozenset(f"aten::{name}" for name in ("rand", "randn", "randint", "randint.low"))
_OF_VALUES = frozenset(  # of each element by itself
    f"aten::{name}"
    for name in ("bernoulli", "bernoulli_.Tensor", "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
)
_DROPOUT = "aten::native_dropout"
_KNOWN = _FILLS | _LIKE | _SIZED | _OF_VALUES | {_DROPOUT}


class CannotSliceError(Exception):
    """Something draws of which nobody can say which numbers are a part's; says what, in words."""


class Rows(NamedTuple):
    """Of a micro-batch, a part: from the first to before the second, of so many."""

    start: int
    stop: int
    of: int

    def within(self, outer: Rows | None) -> Rows:
        """The same rows, where the micro-batch is itself ``outer``, of a larger one."""
        return self if outer is None else Rows(outer.start + self.start, outer.start + self.stop, outer.of)


@dataclass(frozen=True)
class Drawn:
    """What an operator has drawn: its name, the shape, and the dimensions from the outermost in memory on."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def by(cls, function: Any, found: Any) -> Drawn:
        """Of an operator that gives one or more tensors."""
        tensor = found if isinstance(found, Tensor) else next((one for one in found if isinstance(one, Tensor)), None)
        if tensor is None:
            return cls(function.name(), (), ())
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
        return cls(function.name(), tuple(tensor.shape), tuple(order))


@dataclass(frozen=True)
class Slice:
    """How the n-th draw of a forward is cut: in the dimension ``dim``; None: the same numbers for all parts."""

    name: str
    dim: int | None
    order: tuple[int, ...]


def draws(function: Any, given: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers, given its arguments by name."""
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):  # of operators alone
        return False
    return is_fill(function) or not (
        given.get("train") is False or any(given[name] == 0.0 for name in DROPOUT if name in given)
    )


def is_fill(function: Any) -> bool:
    """Whether an operator gives nothing but random numbers, whatever its arguments ``DROPOUT`` are."""
    return function.name() in _KNOWN - {_DROPOUT}


def by_name(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that an operator is given."""
    schema = getattr(function, "_schema", None)
    return {} if schema is None else dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)


def slices_of(whole: Sequence[Drawn], rows: int, parts: Sequence[tuple[Sequence[Drawn], int]]) -> tuple[Slice, ...]:
    """How the draws of a forward of so many ``rows`` are cut, as forwards of fewer rows show.

    Raises:
        CannotSliceError: some draw is not of as many elements a row, or its operator is not known.
    """
    found = []
    for n, one in enumerate(whole):
        dims = set[int | None]()
        for drawn, fewer in parts:
            if len(drawn) != len(whole) or drawn[n].name != one.name or len(drawn[n].shape) != len(one.shape):
                raise CannotSliceError("a forward of fewer samples draws something else")
            differ = [dim for dim, size in enumerate(one.shape) if drawn[n].shape[dim] != size]
            if len(differ) > 1 or any(one.shape[dim] * fewer != drawn[n].shape[dim] * rows for dim in differ):
                raise CannotSliceError(f"{one.name} draws {list(drawn[n].shape)} for {fewer} of {rows} samples")
            dims.add(differ[0] if differ else None)
        if len(dims) != 1:
            raise CannotSliceError(f"{one.name} draws in another dimension for fewer samples")
        (dim,) = dims
        if dim is not None and one.name not in _KNOWN:
            raise CannotSliceError(f"{one.name} draws numbers that depend on more than their own element")
        found.append(Slice(one.name, dim, one.order))
    return tuple(found)


class SlicedRandom(TorchDispatchMode):
    """Random operators give a part's rows of what they draw for the whole; of one forward and its backward.

    What is computed again in the backward (activation checkpointing) begins with a state of the generator that the
    forward has seen, and is cut as it was there.

    Args:
        rows: of the part.
        slices: of a forward's draws.
        strict: whether a forward that draws something else than ``slices`` say ends in an error; else it draws from
            there on what a micro-batch of the part's size draws.

    Raises:
        CannotSliceError: by such a forward, or its backward.
    """

    def __init__(self, rows: Rows, slices: Sequence[Slice], *, strict: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.slices, self._strict = rows, slices, strict
        self.lost = ""
        """In words, what was drawn otherwise; empty where nothing was."""
        self._seen = dict[tuple[torch.device, bytes], Slice]()  # by the state of the generator before it
        self._tokens: list[Token[SlicedRandom | None]] = []

    def anew(self) -> SlicedRandom:
        """For the same part run once more."""
        return SlicedRandom(self.rows, self.slices, strict=self._strict)

    def __enter__(self) -> SlicedRandom:
        self._tokens.append(_current.set(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        _current.reset(self._tokens.pop())
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, and where it draws, for the whole."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
            return function(*args, **kwargs)
        given = by_name(function, args, kwargs)
        if not draws(function, given):
            return function(*args, **kwargs)
        try:
            return self._cut(function, args, kwargs, given)
        except CannotSliceError as error:
            if self._strict:
                raise
            self.lost = self.lost or str(error)
            return function(*args, **kwargs)

    def _cut(self, function: Any, args: Any, kwargs: dict[str, Any], given: dict[str, Any]) -> Any:
        own = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        device = torch.device(kwargs.get("device") or "cpu") if own is None else own.device
        cut = self._slice(function.name(), device)
        if cut.dim is None:
            return function(*args, **kwargs)
        if own is None:
            return self._sized(function, given, cut)
        if cut.name in _OF_VALUES:
            return self._of_values(function, own, given, cut)
        return self._for_whole(function, own, args, kwargs, cut)

    def _slice(self, name: str, device: torch.device) -> Slice:
        state = device, bytes(_generator(device).get_state().numpy())
        found = self._seen.get(state)
        if found is None and len(self._seen) < len(self.slices):
            found = self._seen[state] = self.slices[len(self._seen)]
        if found is None or found.name != name:
            raise CannotSliceError(f"{name} draws here, and not where the model was looked at")
        return found

    def _size(self, shape: Sequence[int], cut: Slice) -> tuple[list[int], Callable[[Tensor], Tensor]]:
        """The whole's shape, and what takes the part's rows of it."""
        dim, (start, stop, rows) = cut.dim, self.rows
        assert dim is not None
        if len(shape) != len(cut.order) or shape[dim] % (stop - start):
            raise CannotSliceError(f"{cut.name} draws {list(shape)} for {stop - start} samples")
        each = shape[dim] // (stop - start)
        whole = [*shape[:dim], each * rows, *shape[dim + 1 :]]
        return whole, lambda tensor: tensor.narrow(dim, start * each, (stop - start) * each)

    def _sized(self, function: Any, given: dict[str, Any], cut: Slice) -> Tensor:
        whole, part = self._size(given["size"], cut)
        with _room_for_whole():
            drawn = _call(function, given | {"size": whole})
        return part(drawn).contiguous()

    def _of_values(self, function: Any, own: Tensor, given: dict[str, Any], cut: Slice) -> Tensor:
        """Other rows have any values: how many numbers are drawn does not depend on them."""
        shape, part = self._size(own.shape, cut)
        whole = dict(given)
        with _room_for_whole():
            for name, value in given.items():
                if isinstance(value, Tensor):
                    if value.shape != own.shape:
                        raise CannotSliceError(f"{cut.name} is given {list(own.shape)} and {list(value.shape)}")
                    whole[name] = torch.empty_permuted(shape, cut.order, dtype=value.dtype, device=value.device)
                    part(whole[name].fill_(0.5)).copy_(value)
            drawn = part(_call(function, whole))
        return own.copy_(drawn) if cut.name == "aten::bernoulli_.Tensor" else drawn.clone()

    def _for_whole(self, function: Any, own: Tensor, args: Any, kwargs: Any, cut: Slice) -> Any:
        shape, part = self._size(own.shape, cut)
        with _room_for_whole():
            whole = torch.empty_permuted(shape, cut.order, dtype=own.dtype, device=own.device)
            drawn = function(whole.fill_(1.0) if cut.name == _DROPOUT else whole, *args[1:], **kwargs)
        if cut.name == _DROPOUT:
            kept = part(drawn[1]).clone()
            probability = by_name(function, args, kwargs)["p"]
            scaled = own * kept if probability == 1.0 else own * kept * (1.0 / (1.0 - probability))
            return scaled.to(own.dtype), kept
        drawn = part(drawn)
        return own.copy_(drawn) if cut.name in _FILLS else torch.empty_like(own, dtype=drawn.dtype).copy_(drawn)


_current: ContextVar[SlicedRandom | None] = ContextVar("sliced random numbers", default=None)


def current_slices() -> SlicedRandom | None:
    """What random numbers are cut by in this thread now; None where they are not."""
    return _current.get()


@contextmanager
def _room_for_whole() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise CannotSliceError("there is no memory for what the whole micro-batch draws at once") from None


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _call(function: Any, given: Mapping[str, Any]) -> Any:
    """An operator by its arguments' names, of which those before ``*`` go by place."""
    placed = [given[a.name] for a in function._schema.arguments if not a.kwarg_only and a.name in given]
    names = [a.name for a in function._schema.arguments if a.kwarg_only and a.name in given]
    return function(*placed, **{name: given[name] for name in names})
