"""What a run's settings differ from, and which of several runs has the better number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import yaml

from distaccum.config.direction import known_mode
from distaccum.config.engine import ENGINES
from distaccum.config.schema import RunConfig, conf_dir
from distaccum.tools.report.columns import Columns, Number, final, finite
from distaccum.tools.report.read import REFERENCE, YAML, Node, Run
from distaccum.tools.settings import groups

_GROUPS = ("model", "data", "loss", "schedule")  # whose settings no dataclass knows
_LESS_IS_BETTER = re.compile(r"_time_s$|_wait_s$|memory|skipped|nonfinite|retries")
_MORE_IS_BETTER = re.compile(r"_per_s$|mfu|tflops")
MISSING = object()


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names; a list is one value."""
    if isinstance(node, Mapping) and node:
        return {name: value for key, inner in node.items() for name, value in flat(inner, f"{prefix}.{key}").items()}
    return {prefix.removeprefix("."): node} if prefix else {}


def defaults(config: Node) -> dict[str, Any]:
    """What ``distaccum train`` without a word takes, flat; of the engine what the chosen one takes.

    A default that follows another setting, as ``${data.seq_len}``, is what that one is in ``config``.
    """
    node = asdict(RunConfig())
    chosen = config.get("engine")
    engine = ENGINES.get(str(chosen.get("name"))) if isinstance(chosen, dict) else None
    if engine is not None:
        node["engine"] = {**asdict(engine()), "name": node["engine"]["name"]}
    choices = {one.key: one.default for one in groups()}
    for group in _GROUPS:
        node[group] = yaml.load((conf_dir() / group / f"{choices[group]}.yaml").read_bytes(), Loader=YAML)  # noqa: S506
    of_run = flat(config)

    def resolved(value: Any) -> Any:
        follows = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        return of_run.get(follows[1], value) if follows else value

    return {key: resolved(value) for key, value in flat(node).items()}


def changed(run: Run) -> list[tuple[str, Any, Any]]:
    """Key, value and default of the settings that differ; :data:`MISSING` where there is none."""
    before, now = defaults(run.config), flat(run.config)
    found = [(key, value, before.get(key, MISSING)) for key, value in now.items()]
    return [(key, value, default) for key, value, default in found if not _same(value, default)]


def differing(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Key, and the value in each run, of the settings that are not the same in all of them."""
    settings = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for one in settings for key in one)
    rows = [(key, [one.get(key, MISSING) for one in settings]) for key in keys]
    return [(key, values) for key, values in rows if not all(_same(value, values[0]) for value in values)]


def _same(one: Any, other: Any) -> bool:
    if one is MISSING or other is MISSING:
        return all(value is MISSING or value in ({}, [], None) for value in (one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if one == other:
        return True
    try:  # 3e-3 is a text to YAML, and a number to everybody else
        return float(one) == float(other)
    except (TypeError, ValueError):
        return False


def better(metric: str, run: Run) -> int:
    """-1 where less is better, 1 where more is, 0 where nobody knows; of the run's own metric as it says."""
    checkpoint = run.config.get("checkpoint")
    if isinstance(checkpoint, Mapping) and checkpoint.get("best") == metric:
        mode = checkpoint.get("mode") or checkpoint.get("best_mode") or known_mode(metric)
    else:
        mode = known_mode(metric)
    if mode is not None:
        return 1 if mode == "max" else -1
    return -1 if _LESS_IS_BETTER.search(metric) else 1 if _MORE_IS_BETTER.search(metric) else 0


@dataclass(frozen=True)
class Best:
    """The best number of a metric in a run, its step, and its point among all records."""

    value: Number
    step: int
    point: int


def bests(run: Run, whole: Columns) -> dict[str, Best]:
    """By result of an evaluation whose better direction is known, the one of ``checkpoint.best`` first."""
    checkpoint = run.config.get("checkpoint")
    named = checkpoint.get("best") if isinstance(checkpoint, Mapping) else None
    found = {}
    for metric in sorted(whole.y, key=lambda name: (name != named, name != "eval_loss")):
        way = better(metric, run) if metric.startswith("eval_") else 0
        there = [(way * value, -i) for i, value in enumerate(whole.y[metric]) if way and value is not None]
        if there:
            value, point = max(there)
            found[metric] = Best(way * value, int(whole.x["step"][-point]), -point)
    return found


@dataclass(frozen=True)
class Summary:
    """A metric over a run: the last value, of whatever kind, and its step; of the finite ones what they span."""

    last: Any
    step: int
    least: Number | None
    median: Number | None
    greatest: Number | None


def summaries(run: Run, whole: Columns) -> dict[str, Summary]:
    """By metric, in the order of the records, of which ``whole`` has all."""
    series = whole.y
    found = {}
    for metric, (value, step) in final(run.records).items():
        there = [one for one in series.get(metric, ()) if one is not None]
        middle = median(there) if there else None
        found[metric] = Summary(value, step, min(there, default=None), middle, max(there, default=None))
    return found


def judged_by(metric: str, direction: int) -> str:
    """Which number of a run stands for it next to others: of scores the best, of speeds the median, else the last."""
    if metric == "loss" or metric.startswith(("loss_", "eval_")):
        return "least" if direction < 0 else "greatest"
    if metric.startswith("memory"):
        return "greatest"
    return "median" if metric.endswith("_s") or metric in ("mfu", "tflops_per_rank") else "last"


def best_of(values: Sequence[Any], direction: int) -> set[int]:
    """Which of the values are the best ones; none where nobody knows, or all are equal."""
    there = {i: number for i, value in enumerate(values) if (number := finite(value)) is not None}
    if not direction or len(set(there.values())) < 2:  # noqa: PLR2004  nothing to choose between
        return set()
    top = max(there.values(), key=lambda value: direction * value)
    return {i for i, value in there.items() if value == top}
