"""What a measurement gives: figures, some with a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a measurement runs.

    ``device``: of this rank. ``small``: sizes that a CPU has done in seconds, which show that the measurement works and
    nothing about a GPU.
    """

    device: torch.device
    small: bool


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number or word.

    ``of``: the case, ``124m, compiled`` say. ``name``: what was measured. ``unit``: of the value. ``target``: in words,
    with ``holds`` whether the value meets it; None without a target, or where the sizes are too small to judge it by.
    """

    of: str
    name: str
    value: float | str
    unit: str = ""
    target: str = ""
    holds: bool | None = None


Measurement = Callable[[Options], list[Figure]]
