"""What a run returns to a sweeper: its last ``eval_loss``, or the numbers that ``objective`` names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from distaccum.errors import ConfigError, DistaccumError, near_misses, shorten
from distaccum.train.metrics.loggers import records_of
from distaccum.train.metrics.names import OF_RECORDS

DEFAULT = "eval_loss"


class NoObjectiveError(DistaccumError):
    """A run has ended without the number that a sweeper is to be given."""


def names_of(objective: Any) -> list[str]:
    """The names of an objective, which is a name, several, or None."""
    if objective is None:
        return []
    return [objective] if isinstance(objective, str) else list(objective)


def check_of_records(name: str) -> None:
    """Refuses what is neither a record's number nor an evaluation's.

    Raises:
        ConfigError: it names what may be meant.
    """
    if not any(fnmatchcase(name, known) for known in OF_RECORDS):
        hint = near_misses(name, [known for known in OF_RECORDS if not known.endswith("*")])
        remedy = "Use eval_loss, another result of the evaluation, or a number of metrics.jsonl, as loss"
        raise ConfigError("objective", name, f"no record and no evaluation has it{hint}", remedy)


def objective_of(
    objective: str | Sequence[str] | None, evaluation: Mapping[str, float], records: Path
) -> float | list[float] | None:
    """The numbers of a run that has ended: its last evaluation's, else those of the last record that has them.

    Args:
        objective: one name, several, or None for the evaluation's loss.
        evaluation: the last one; empty where it is not known.
        records: ``metrics.jsonl``.

    Returns:
        A number, or as many as names; None where none is named, and there is no evaluation.

    Raises:
        NoObjectiveError: nothing has a number of that name; it lists those that there are.
    """
    found = _last(records) | dict(evaluation)
    if objective is None:
        return found.get(DEFAULT)
    for name in names_of(objective):
        if name not in found:
            there = f"there are {shorten(sorted(found), most=len(found))}" if found else "there is no record"
            raise NoObjectiveError(f"objective={name}: the run has ended without such a number; {there}")
    values = [found[name] for name in names_of(objective)]
    return values[0] if isinstance(objective, str) else values


def require_finite(value: float | list[float] | None, objective: Any) -> float | list[float]:
    """The value, which a sweeper compares with others.

    Raises:
        NoObjectiveError: a part of it is NaN or infinite.
    """
    values = value if isinstance(value, list) else [value]
    for name, one in zip(names_of(objective), values, strict=True):
        if one is None or not math.isfinite(one):
            raise NoObjectiveError(f"objective={name}: the run has ended with {one}, which nothing compares with")
    assert value is not None
    return value


def _last(records: Path) -> dict[str, float]:
    """The last number of each name."""
    found: dict[str, float] = {}
    for record in records_of(records):
        found |= {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    return found
