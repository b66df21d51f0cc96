"""What a sweep asks of a run: a choice of its own in each folder, and a number in the end."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode

from distaccum.config.direction import known_mode
from distaccum.config.schema import as_typed, names_of
from distaccum.errors import ConfigError, NoObjectiveError, near_misses, shorten
from distaccum.train.metrics.loggers import OF_RECORDS, records_of
from distaccum.train.run_dir import RunDir

# What a sweep chooses for a run: a run that was made with another choice is not gone on with under its name.

OVERRIDES = ".hydra/overrides.yaml"


def require_same_choice(chosen: Mapping[str, str], run_dir: RunDir) -> None:
    """Refuses to resume the run of a folder that a sweep has made with other values.

    Its result would stand there, and at the sweeper, as that of the new ones.

    Args:
        chosen: value by key, of what is swept alone: all else may change in a resumed run.
        run_dir: of the run.

    Raises:
        ConfigError: it names the first key.
    """
    file = run_dir.path / OVERRIDES
    if not run_dir.holds_checkpoints() or not file.is_file():
        return
    try:
        overrides = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError:  # damaged
        return
    made_with = dict(_split(str(one)) for one in overrides or [])
    for key, value in chosen.items():
        before = made_with.get(key)
        if before is None or not _is_same(value, before):
            how = f"with {before}" if before is not None else "without it"
            problem = f"the run in {run_dir.path} was made {how}, and resume=auto would take its result for this one's"
            remedy = "hydra.sweep.subdir='${hydra.job.override_dirname}' gives each choice a folder"
            seed = "hydra.sweeper.sampler.seed has Optuna choose the same again"
            raise ConfigError(key, value, problem, f"Use another hydra.sweep.dir; {remedy}, and {seed}")


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key, value


def _is_same(one: str, other: str) -> bool:
    try:  # 1e-3 and 0.001 are one number
        return one == other or float(one) == float(other)
    except ValueError:
        return False


def swept(overrides: Sequence[str], arguments: Sequence[str]) -> dict[str, str]:
    """Of a job's overrides those that the sweeper has chosen, which the command line does not state as they are."""
    stated, parser = set(), OverridesParser.create()
    for argument in arguments:
        with suppress(HydraException):  # a flag of Hydra's
            override = parser.parse_override(argument)
            if not override.is_sweep_override():
                stated.add(override.get_key_element())
    split = (one.partition("=") for one in overrides)
    return {key: value for key, _, value in split if key not in stated}


class Sweep:
    """The sweep that the job of Hydra's configuration belongs to, or none.

    ``tried``: a sweeper asks for the job's objective: any but Hydra's own, which runs what the command line lists.
    """

    def __init__(self) -> None:
        self._hydra = HydraConfig.get()
        self._runs_many = self._hydra.mode == RunMode.MULTIRUN
        self.tried = self._runs_many and not self._hydra.sweeper._target_.endswith(".BasicSweeper")

    def prepare(self, config: dict[str, Any], run_dir: RunDir) -> None:
        """States the objective that a sweeper takes by default, so that a run which has none is refused.

        Raises:
            ConfigError: as :func:`require_same_choice` and :func:`check_direction`.
        """
        if self.tried and config.get("objective") is None:
            config["objective"] = DEFAULT
        if self.tried:
            check_direction(self._hydra.sweeper.get("direction"), config["objective"])
        if self._runs_many and config.get("resume") == "auto":
            require_same_choice(swept(as_typed(self._hydra.overrides.task), sys.argv[1:]), run_dir)

    def objective(
        self, config: Mapping[str, Any], evaluation: Mapping[str, float], run_dir: RunDir
    ) -> float | list[float] | None:
        """What the job that has run is to return to Hydra.

        Raises:
            NoObjectiveError: as :func:`objective_of`, and :func:`require_finite` where a sweeper compares it.
        """
        found = objective_of(config.get("objective"), evaluation, run_dir.metrics)
        return require_finite(found, config["objective"]) if self.tried else found


def check_direction(direction: Any, objective: str | Sequence[str]) -> None:
    """Refuses a sweep that would look for the worst run: Optuna's sweeper minimizes where nothing is stated.

    Args:
        direction: ``minimize`` or ``maximize``, or one for each objective; None: the sweeper has none.
        objective: one name, or several.

    Raises:
        ConfigError: the name of an objective says that its other values are better.
    """
    ways = direction if isinstance(direction, Sequence) and not isinstance(direction, str) else [direction]
    for name, way in zip(names_of(objective), ways, strict=False):
        stated, known = str(way).rpartition(".")[2], known_mode(name)
        if stated in ("minimize", "maximize") and known is not None and not stated.startswith(known):
            size = "larger" if known == "max" else "smaller"
            problem = f"and objective={name} is better where it is {size}"
            raise ConfigError("hydra.sweeper.direction", stated, problem, f"State {known}imize for it")


# What a run returns to a sweeper: its last ``eval_loss``, or the numbers that ``objective`` names.

DEFAULT = "eval_loss"


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
