"""The first window in which two runs differ, and in what: by ``windows.jsonl``, or by ``metrics.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distaccum.checkpoint.store import CheckpointStore
from distaccum.tools.compare.tensors import differing
from distaccum.train.metrics.loggers import records_of
from distaccum.train.run_dir import RunDir

Record = Mapping[str, Any]
Pair = tuple[Any, Any]

DATA, CONTENTS, COUNTS, SCALE, LOSS = "data", "contents", "counts", "loss scale", "loss"
GRADIENT, RATE, STEP = "gradient", "learning rate", "step"
ASPECTS = (DATA, CONTENTS, COUNTS, SCALE, LOSS, GRADIENT, RATE, STEP)
"""What windows differ in, in the order in which it comes about."""
_OF_WINDOWS = {
    DATA: ("epoch", "samples", "ids"),
    CONTENTS: ("contents",),
    COUNTS: ("counts",),
    SCALE: ("loss_scale",),
    LOSS: ("loss", "losses"),
    GRADIENT: ("grad_norm",),
    RATE: ("lr",),
    STEP: ("applied", "step"),
}
_OF_METRICS = {
    DATA: ("epoch", "samples"),
    COUNTS: ("tokens",),
    SCALE: ("loss_scale",),
    LOSS: ("loss",),
    GRADIENT: ("grad_norm",),
    RATE: ("lr",),
    STEP: ("applied", "step"),
}


@dataclass(frozen=True, kw_only=True)
class WindowDifference:
    """The first window that differs.

    Attributes:
        window: its number, as ``metrics.jsonl`` counts attempts.
        epoch: of it, in A.
        step: the updates with it, in A.
        applied: whether it was an update, in A.
        values: by aspect what differs, by the record's key; of A and of B.
        gradients: the norms of the parameters whose gradients differ; None of one that has none.
        regrouped: the numbers of micro-batches of both where the same samples are cut into others: contents cannot be
            compared.
    """

    window: int
    epoch: int
    step: int
    applied: bool
    values: Mapping[str, Mapping[str, Pair]]
    gradients: Mapping[str, Pair] = field(default_factory=dict)
    regrouped: Pair | None = None

    @property
    def steps_before(self) -> int:
        """The updates before this window."""
        return self.step - self.applied


@dataclass(frozen=True, kw_only=True)
class Windows:
    """What was compared of windows.

    Attributes:
        logged_only: whether of logged windows only, as a run has no other record.
        compared: how many windows.
        same_until: the last window before the difference that was compared; None where there was none.
        last: the last window that each run has a record of; 0 where it has none.
        difference: the first one; None where there is none.
        alone: how many windows before the last common one that only one of them has a readable record of.
    """

    logged_only: bool
    compared: int
    same_until: int | None
    last: tuple[int, int]
    difference: WindowDifference | None
    alone: int = 0


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What was compared of checkpoints.

    Attributes:
        step: of the checkpoint of both runs: the first that differs, else the newest one.
        weights: the names of those that differ.
        optimizer: the names of what differs of the optimizer's state.
    """

    step: int
    weights: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.weights or self.optimizer)


def same(one: Any, other: Any) -> bool:
    """Whether two plain values are the same, numbers bit by bit; NaN is NaN."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return one == other and math.copysign(1.0, one) == math.copysign(1.0, other)
    return bool(one == other)


def compare_windows(a: Path, b: Path) -> Windows:
    """Compares the windows that both run directories have a record of.

    Raises:
        OSError: a file cannot be read.
    """
    folders = (RunDir(a), RunDir(b))
    if all(folder.windows.exists() for folder in folders):
        found = _first(*(records_of(folder.windows) for folder in folders), logged_only=False)
        if found.compared:
            return found
    return _first(*(_losses(records_of(folder.metrics)) for folder in folders), logged_only=True)


def _losses(records: Iterable[Record]) -> Iterator[Record]:
    """The records of windows: one of an evaluation alone has no loss."""
    return (record for record in records if "loss" in record)


def _first(a: Iterable[Record], b: Iterable[Record], *, logged_only: bool) -> Windows:
    compared, same_until, difference, last = 0, None, None, [0, 0]
    alone = later = 0
    for one, other in _aligned(a, b):
        for i, record in enumerate((one, other)):
            last[i] = last[i] if record is None else int(record["window"])
        if one is None or other is None:
            later += 1
            continue
        alone, later = alone + later, 0
        if difference is not None:
            continue
        compared += 1
        difference = _difference(one, other, _OF_METRICS if logged_only else _OF_WINDOWS)
        if difference is None:
            same_until = int(one["window"])
    return Windows(
        logged_only=logged_only,
        compared=compared,
        same_until=same_until,
        last=(last[0], last[1]),
        difference=difference,
        alone=alone,
    )


def _aligned(a: Iterable[Record], b: Iterable[Record]) -> Iterator[tuple[Record | None, Record | None]]:
    """The records of both by their windows, which ascend; None for what one has not."""
    ones, others = ((one for one in records if isinstance(one.get("window"), int)) for records in (a, b))
    one, other = next(ones, None), next(others, None)
    while one is not None or other is not None:
        at, there = (math.inf if record is None else record["window"] for record in (one, other))
        yield (one if at <= there else None), (other if there <= at else None)
        one, other = (next(ones, None) if at <= there else one), (next(others, None) if there <= at else other)


def _difference(one: Record, other: Record, keys: Mapping[str, tuple[str, ...]]) -> WindowDifference | None:
    values: dict[str, dict[str, Pair]] = {}
    regrouped = None
    if one.get("ids") == other.get("ids") and one.get("cut") != other.get("cut"):
        regrouped = (one.get("micro_batches"), other.get("micro_batches"))
    for aspect, of_aspect in keys.items():
        if aspect == CONTENTS and regrouped is not None:
            continue
        for key in of_aspect:
            pair = (one.get(key), other.get(key))
            # What one of the runs does not know cannot be compared: the numbers of a stream's samples.
            if None not in pair and not same(*pair):
                values.setdefault(aspect, {})[key] = pair
    norms, others = one.get("norms", {}), other.get("norms", {})
    names = dict.fromkeys((*norms, *others))
    pairs = {name: (norms.get(name), others.get(name)) for name in names}
    gradients = {name: pair for name, pair in pairs.items() if not same(*pair)}
    if gradients:
        values.setdefault(GRADIENT, {})
    if not values:
        return None
    return WindowDifference(
        window=int(one["window"]),
        epoch=int(one.get("epoch", 0)),
        step=int(one.get("step", 0)),
        applied=bool(one.get("applied", True)),
        values={aspect: values[aspect] for aspect in ASPECTS if aspect in values},
        gradients=gradients,
        regrouped=regrouped,
    )


def compare_checkpoints(a: Path, b: Path, *, until: int | None = None) -> Tensors | None:
    """Compares the newest checkpoint of a step that both runs have, and where it differs looks for the first that does.

    Args:
        a: a run directory.
        b: the other one.
        until: the last step that is looked at; None: any.

    Returns:
        None where the runs have no such step in common.

    Raises:
        CheckpointError: a checkpoint is damaged.
        OSError: a file cannot be read.
    """
    folders, others = (
        {path.name: path for path in CheckpointStore(RunDir(run).checkpoints, keep=0).steps()} for run in (a, b)
    )
    steps = sorted(int(name.removeprefix("step-")) for name in folders.keys() & others.keys())
    steps = [step for step in steps if until is None or step <= until]
    if not steps:
        return None
    newest = _tensors(folders, others, steps[-1])
    if newest.same:
        return newest
    earlier = (_tensors(folders, others, step) for step in steps[:-1])
    return next((found for found in earlier if not found.same), newest)


def _tensors(folders: Mapping[str, Path], others: Mapping[str, Path], step: int) -> Tensors:
    one, other = (paths[f"step-{step}"] for paths in (folders, others))
    return Tensors(step=step, weights=tuple(differing(one, other)), optimizer=tuple(differing(one, other, "optimizer")))
