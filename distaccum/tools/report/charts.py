"""Which series stand in one chart, and what its numbers are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distaccum.config.checks import unit_of
from distaccum.tools.report.columns import Columns
from distaccum.tools.report.read import Run

_EVALUATED = "eval_"
_COUNTS = re.compile(r"eval_(?:(?P<set>.+)_)?samples$")
# The same number at each record of an ordinary run; drawn where it is not.
_CONSTANT = {"loss_scale": 1.0, "skipped": 0, "nonfinite": 0, "memory_retries": 0, "recompiles": 0, "spikes": 0}


@dataclass(frozen=True)
class Line:
    """A metric of a chart, and what the chart's legend calls it.

    ``noisy``: whether its curve may be smoothed; not that of an evaluation, nor what is set or counted.
    """

    metric: str
    label: str
    noisy: bool = True


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Some series on one pair of axes.

    Attributes:
        key: of the chart, also in a picture's file name.
        form: how its numbers are written: ``number``, ``bytes``, ``share``, ``seconds`` or ``count``.
        unit: beside the axis, where the numbers are not written with one.
        limit: the setting whose value is drawn as a level line, by its dotted name.
    """

    key: str
    title: str
    lines: tuple[Line, ...]
    form: str = "number"
    unit: str = ""
    limit: str = ""


_FIXED = (
    Chart(
        key="grad_norm",
        title="Gradient norm",
        lines=(Line("grad_norm", "before clipping"),),
        unit="L2 norm, before clipping",
        limit="optim.clip_norm",
    ),
    Chart(key="lr", title="Learning rate", lines=(Line("lr", "rate", noisy=False),)),
    Chart(
        key="throughput",
        title="Throughput",
        lines=(Line("tokens_per_s", "tokens/s"), Line("samples_per_s", "samples/s")),
        form="count",
    ),
    Chart(key="mfu", title="Model FLOP utilization", lines=(Line("mfu", "MFU"),), form="share"),
    Chart(key="tflops", title="Compute", lines=(Line("tflops_per_rank", "TFLOP/s"),), unit="TFLOP/s a rank, mean"),
    Chart(
        key="time",
        title="Step time",
        lines=(Line("step_time_s", "step"), Line("data_wait_s", "of it waiting for data")),
        form="seconds",
    ),
    Chart(
        key="memory",
        title="Memory",
        lines=(
            Line("memory_bytes", "in use", noisy=False),
            Line("memory_reserved_bytes", "reserved by the allocator", noisy=False),
        ),
        form="bytes",
        unit="of the rank that has most",
    ),
    Chart(key="loss_scale", title="Loss scale", lines=(Line("loss_scale", "scale", noisy=False),)),
    Chart(
        key="skips",
        title="Skipped steps",
        lines=(Line("skipped", "skipped", noisy=False), Line("nonfinite", "NaN or infinite", noisy=False)),
        form="count",
        unit="steps so far",
    ),
    Chart(
        key="straggler",
        title="Time of the slowest rank",
        lines=(Line("slowest_over_median", "slowest rank"),),
        unit="times the median of the ranks",
    ),
)


def charts(runs: Sequence[Columns]) -> list[Chart]:
    """The charts of these runs: the losses, held-out scores, the fixed ones, and one for whatever else was logged."""
    there = _varying(runs)
    parts = [Line(name, name[5:]) for name in there if name.startswith("loss_") and name != "loss_scale"]
    scores = _held_out(there)
    losses = Line("loss", "training"), *parts, *scores.pop("loss", ())
    found = [Chart(key="loss", title="Loss", lines=losses, unit=f"mean per {counted(runs)[:-1]}")]
    for score, lines in scores.items():
        title = f"Held-out {score.replace('_', ' ')}"
        found.append(Chart(key=f"eval_{_slug(score)}", title=title, lines=tuple(lines), form=form_of(score)))
    rate = f"{counted(runs)}/s, over all ranks"
    fixed = [replace(chart, unit=rate) if chart.key == "throughput" else chart for chart in _FIXED]
    shown = [_with_lines(chart, there) for chart in [*found, *fixed]]
    drawn = {line.metric for chart in shown for line in chart.lines}
    rest = [name for name in there if name not in drawn and not _COUNTS.match(name)]
    shown += [Chart(key=_slug(name), title=name, lines=(Line(name, name),), form=form_of(name)) for name in rest]
    return _told_apart(chart for chart in shown if chart.lines)


def counted(runs: Sequence[Columns]) -> str:
    """What the losses of these runs count: ``tokens`` or ``samples``."""
    ends = [(run.x["samples"][-1], run.x["tokens"][-1]) for run in runs if run.records]
    return "tokens" if any(unit_of(*end) == "tokens" for end in ends) else "samples"


def _told_apart(found: Iterable[Chart]) -> list[Chart]:
    """The charts, with a number in a key that another has before them: metrics may differ in what no file name has."""
    kept: dict[str, Chart] = {}
    for chart in found:
        number = sum(re.fullmatch(rf"{chart.key}(-\d+)?", key) is not None for key in kept)
        key = f"{chart.key}-{number + 1}" if number else chart.key
        kept[key] = replace(chart, key=key)
    return list(kept.values())


def _with_lines(chart: Chart, there: Collection[str]) -> Chart:
    return replace(chart, lines=tuple(line for line in chart.lines if line.metric in there))


def _varying(runs: Sequence[Columns]) -> list[str]:
    """The metrics of all runs, without those that say nothing, and of two rates that of what the losses count."""
    names = list(dict.fromkeys(name for run in runs for name in run.y))
    dull = {
        name
        for name in _CONSTANT.keys() & set(names)
        if all(value in (None, _CONSTANT[name]) for run in runs for value in run.y.get(name, ()))
    }
    dull.add("samples_per_s" if counted(runs) == "tokens" else "tokens_per_s")
    return [name for name in names if name not in dull]


def _held_out(there: Sequence[str]) -> dict[str, list[Line]]:
    """By score, a line for each held-out set and class: every set says how many samples it has."""
    sets = sorted((m["set"] for name in there if (m := _COUNTS.match(name)) and m["set"]), key=len, reverse=True)
    scores: dict[str, list[Line]] = {}
    for name in there:
        if name.startswith(_EVALUATED) and not _COUNTS.match(name):
            rest = name.removeprefix(_EVALUATED)
            of = next((one for one in sets if rest.startswith(f"{one}_")), "")
            score, _, label = (rest[len(of) + 1 :] if of else rest).partition("/")  # of a class
            shown = " ".join(filter(None, ("held-out", of, label)))
            scores.setdefault(score, []).append(Line(name, shown, noisy=False))
    return scores


def form_of(metric: str) -> str:
    """How numbers of a metric are written, by its name."""
    if metric.endswith("_bytes"):
        return "bytes"
    if metric.endswith("_s"):
        return "count" if metric.endswith("_per_s") else "seconds"
    return "share" if metric in ("mfu", "underflow_share") else "number"


def level(run: Run, chart: Chart) -> float | None:
    """The value of the setting that the chart draws as a level line; None without one."""
    node: Any = run.config
    for key in chart.limit.split(".") if chart.limit else ():
        node = node.get(key) if isinstance(node, Mapping) else None
    number = not isinstance(node, bool) and isinstance(node, int | float)
    return float(node) if chart.limit and number else None


def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name)
