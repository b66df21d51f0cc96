"""What the ranks agree on before the first window: the division of the data, and the data themselves."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from distaccum.data.batches import members
from distaccum.data.loading_processes import reading, tell_epoch
from distaccum.data.spec import DataSpec, WorkerOptions, is_map_style
from distaccum.distributed.random import RNGState
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, DataError, PeerError, shorten

# A few numbers of an item, which tell two items apart without sending either.

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
        for name, value in parts(item):
            yield from _leaves(value, f"{path}{name}")


def parts(item: Any) -> Iterator[tuple[str, Any]]:
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


# A dataset, told from another one of the same length by a few of its samples.

_SAMPLES = 8


def fingerprint(data: DataSpec, workers: WorkerOptions | None = None) -> dict[str, Any]:
    """The number of training samples, and sketches of a few of them, as JSON holds it; of a stream nothing.

    The samples lie at even distances. Each is read twice: one that is not the same a second time (a random crop) tells
    nothing, and neither does one that cannot be read here. Random number generators are left as they were.

    Args:
        data: of the run.
        workers: how the run loads samples; None: in this process.
    """
    if not is_map_style(data.train):
        return {}
    tell_epoch(data.train, 0)  # whatever an earlier run of this process has told it
    length, before = len(data.train), RNGState.capture(torch.device("cpu"))
    numbers = sorted({round(i * (length - 1) / (_SAMPLES - 1)) for i in range(_SAMPLES)}) if length else []
    try:
        sketches = reading(data.train, [[i] for i in numbers for _ in range(2)], _of_one, workers or WorkerOptions())
        found = {number: _twice(sketches) for number in numbers}
    finally:
        before.restore()
    return {"samples": length, "sketches": {str(number): _plain(one) for number, one in found.items() if one}}


def differs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """In words, how the data of a checkpoint differs from this run's; "" where it does not, or nobody knows."""
    if not saved or not current:
        return ""
    if saved["samples"] != current["samples"]:
        return f"{current['samples']} samples, and before {saved['samples']}"
    both = saved["sketches"].keys() & current["sketches"].keys()
    other = [
        number for number in sorted(both, key=int) if not same(saved["sketches"][number], current["sketches"][number])
    ]
    return f"sample {other[0]} is not the one it was ({len(other)} of {len(both)} compared differ)" if other else ""


def _twice(sketches: Iterator[Sketch | None]) -> Sketch | None:
    found: list[Sketch | None] = []
    for _ in range(2):
        with suppress(Exception):  # the training itself says so, where it reads the sample
            found.append(next(sketches))
    return found[0] if len(found) == 2 and same(*found, exactly=True) else None  # noqa: PLR2004


def _of_one(samples: list[Any]) -> Sketch | None:
    return sketch(samples[0])


def _plain(one: Sketch) -> list[list[Any]]:
    return [[path, kind, list(numbers)] for path, kind, numbers in one]


_DIVIDED = "divide it by rank, as in itertools.islice(items, rank, None, world_size)"


def raise_on_all(world: World, error: Exception | None, where: str) -> NoReturn:
    """Raises ``error`` on the ranks that have one, and PeerError with the first of them on the others; a collective."""
    reasons = world.all_gather_object(_reason(world, error))
    if error is not None:
        raise error
    raise PeerError(next(reason for reason in reasons if reason is not None), where)


def tell_of_failure(world: World, error: Exception) -> None:
    """Answers the other ranks, which are about to compare their loaders, with the reason why this one has none."""
    if world.size > 1:
        world.all_gather_object((_reason(world, error), {}, []))


def _reason(world: World, error: Exception | None) -> str | None:
    return None if error is None else f"rank {world.rank}: {type(error).__name__}: {error}"


class Agreement:
    """Compares what the ranks are about to train on, before the first window of a loader: one host collective.

    Args:
        world: this rank.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.reached = world.size == 1

    def on(self, facts: Mapping[str, Any], sketches: Sequence[Sketch | None], error: Exception | None) -> list[Any]:
        """Compares ``facts``, which must be the same on every rank, and gathers the sketches of every rank's items.

        Args:
            facts: the numbers that give a window's index its meaning, by the names that the user knows.
            sketches: of this rank's items.
            error: why this rank cannot go on, which is raised on every rank.

        Returns:
            The sketches of each rank.

        Raises:
            ConfigError: a fact differs; the same message on every rank.
            PeerError: another rank has an ``error``.
        """
        given = self._world.all_gather_object((_reason(self._world, error), dict(facts), list(sketches)))
        self.reached = True
        if error is not None:
            raise error
        for reason, _, _ in given:
            if reason is not None:
                raise PeerError(reason, "before the first window")
        every = [others for _, others, _ in given]
        for name in every[0] | facts:
            values = [others.get(name) for others in every]
            if any(value != values[0] for value in values):
                said = shorten(f"{value} on rank {rank}" for rank, value in enumerate(values))
                problem = f"differs between the ranks: {said}"
                remedy = "Give every rank the same: each one divides the same data in the same way"
                raise ConfigError(name, None, problem, remedy)
        return [others for _, _, others in given]


def differing_item(gathered: Sequence[Sequence[Sketch | None]]) -> tuple[int, int] | None:
    """The first item that a rank has otherwise than rank 0, and that rank; None where all are alike."""
    first, *others = gathered
    for rank, items in enumerate(others, 1):
        for number, (own, item) in enumerate(zip(items, first, strict=True)):
            if same(own, item) is False:
                return number, rank
    return None


def refuse_other_data(sample: int, rank: int) -> NoReturn:
    """Raises DataError: ``sample`` is not the same on ``rank`` as on rank 0."""
    problem = f"the ranks were given different data: sample {sample} of rank 0 is not that of rank {rank}"
    remedy = "Give every rank the whole dataset in the same order, as the ranks' shares are made from it"
    hints = (
        "a random_split, a shuffle or random data need a generator with a seed, a listing of files has to be sorted, "
        "and nothing may be divided by rank before"
    )
    raise DataError(f"{problem}. {remedy}: {hints}")


def refuse_equal_streams(gathered: Sequence[Sequence[Sketch | None]]) -> None:
    """Raises DataError if two ranks' streams begin with the same items, as a stream does that is not divided."""
    for rank, items in enumerate(gathered):
        for other in range(rank):
            pairs = list(zip(items, gathered[other], strict=False))
            if pairs and is_telling([own for own, _ in pairs]) and all(same(a, b, exactly=True) for a, b in pairs):
                raise DataError(
                    f"the streams of ranks {other} and {rank} begin with the same items: every rank would train on the "
                    f"whole stream. Each rank takes its own part: {_DIVIDED}. Data that repeat on purpose: "
                    "DataSpec(train=stream, may_repeat=True)"
                )


def refuse_equal_workers(sketches: Sequence[Sketch | None], workers: int) -> None:
    """Raises DataError if the first items of a rank's ``workers`` loading processes are the same."""
    if is_telling(sketches[:1]) and all(same(sketches[0], other, exactly=True) for other in sketches[1:]):
        raise DataError(
            f"the {workers} workers of the DataLoader begin with the same batch: each of them yields the whole stream, "
            "which is trained on as often. Let the dataset's __iter__ divide by torch.utils.data.get_worker_info() "
            "(its id and num_workers). Data that repeat on purpose: DataSpec(train=loader, may_repeat=True)"
        )
