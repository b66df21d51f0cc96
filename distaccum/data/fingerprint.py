"""A dataset, told from another one of the same length by a few of its samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from distaccum.data.reading import reading
from distaccum.data.sketch import Leaf, Sketch, same, sketch
from distaccum.data.spec import DataSpec, WorkerOptions, is_map_style
from distaccum.distributed.random import RNGState

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
        number
        for number in sorted(both, key=int)
        if not same(_sketch(saved["sketches"][number]), _sketch(current["sketches"][number]))
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


def _sketch(plain: list[list[Any]]) -> Sketch:
    leaves: list[Leaf] = [(path, kind, tuple(numbers)) for path, kind, numbers in plain]
    return tuple(leaves)
