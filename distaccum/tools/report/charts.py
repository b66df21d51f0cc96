"""Which series stand in one chart, and what its numbers are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distaccum.tools.report.columns import Columns
from distaccum.tools.report.read import Run

_EVALUATED = "eval_"
_COUNTS = re.compile(r"eval_(?:(?P<set>.+)_)?samples$")
# The same number at each record of an ordinary run; drawn where it is not.
_CONSTANT = {"loss_scale": 1.0, "skipped": 0, "nonfinite": 0, "memory_retries": 0, "recompiles": 0, "spikes": 0}


@dataclass(frozen=True)
class Line:
    """A metric of a chart, and what the chart's legend calls it."""

    metric: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Some series on one pair of axes.

    Attributes:
        key: of the chart, also in a picture's file name.
        form: how its numbers are written: ``number``, ``bytes``, ``share``, ``seconds`` or ``count``.
        limit: the setting whose value is drawn as a level line, by its dotted name.
        noisy: whether its curves may be smoothed; not those of evaluations, nor what is set or counted.
    """

    key: str
    title: str
    lines: tuple[Line, ...]
    form: str = "number"
    limit: str = ""
    noisy: bool = True


_FIXED = (
    Chart(
        key="grad_norm",
        title="Gradient norm",
        lines=(Line("grad_norm", "norm before clipping"),),
        limit="optim.clip_norm",
    ),
    Chart(key="lr", title="Learning rate", lines=(Line("lr", "rate"),), noisy=False),
    Chart(
        key="throughput",
        title="Throughput",
        lines=(Line("tokens_per_s", "tokens/s"), Line("samples_per_s", "samples/s")),
        form="count",
    ),
    Chart(key="mfu", title="Model FLOP utilization", lines=(Line("mfu", "MFU"),), form="share"),
    Chart(key="tflops", title="TFLOP/s of a rank", lines=(Line("tflops_per_rank", "TFLOP/s"),)),
    Chart(
        key="time",
        title="Time of a window",
        lines=(Line("step_time_s", "window"), Line("data_wait_s", "waiting for data")),
        form="seconds",
    ),
    Chart(
        key="memory",
        title="Memory of the rank that has most",
        lines=(Line("memory_bytes", "in use"), Line("memory_reserved_bytes", "reserved by the allocator")),
        form="bytes",
        noisy=False,
    ),
    Chart(key="loss_scale", title="Loss scale", lines=(Line("loss_scale", "scale"),), noisy=False),
    Chart(
        key="skips",
        title="Skipped attempts",
        lines=(Line("skipped", "skipped"), Line("nonfinite", "NaN or infinite")),
        form="count",
        noisy=False,
    ),
)


def charts(runs: Sequence[Columns]) -> list[Chart]:
    """The charts of these runs: loss, held-out scores, the fixed ones, and one for whatever else was logged."""
    there = _varying(runs)
    losses = [name for name in there if name.startswith("loss_") and name != "loss_scale"]
    found = [Chart(key="loss", title="Loss", lines=(Line("loss", "loss"), *(Line(name, name[5:]) for name in losses)))]
    found += [*_held_out(there), *_FIXED]
    shown = [_with_lines(chart, there) for chart in found]
    drawn = {line.metric for chart in shown for line in chart.lines}
    rest = [name for name in there if name not in drawn and not _COUNTS.match(name)]
    shown += [Chart(key=_slug(name), title=name, lines=(Line(name, name),), form=form_of(name)) for name in rest]
    return _told_apart(chart for chart in shown if chart.lines)


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
    """The metrics of all runs, without those that say nothing, and of two rates the tokens'."""
    names = list(dict.fromkeys(name for run in runs for name in run.y))
    dull = {
        name
        for name in _CONSTANT.keys() & set(names)
        if all(value in (None, _CONSTANT[name]) for run in runs for value in run.y.get(name, ()))
    }
    if "tokens_per_s" in names:
        dull.add("samples_per_s")
    return [name for name in names if name not in dull]


def _held_out(there: Sequence[str]) -> list[Chart]:
    """A chart for each score, with a line for each held-out set and class: every set says how many samples it has."""
    sets = sorted((m["set"] for name in there if (m := _COUNTS.match(name)) and m["set"]), key=len, reverse=True)
    scores: dict[str, list[Line]] = {}
    for name in there:
        if name.startswith(_EVALUATED) and not _COUNTS.match(name):
            rest = name.removeprefix(_EVALUATED)
            of = next((one for one in sets if rest.startswith(f"{one}_")), "")
            score, _, label = (rest[len(of) + 1 :] if of else rest).partition("/")  # of a class
            shown = " ".join(filter(None, (of, label))) or score.replace("_", " ")
            scores.setdefault(score, []).append(Line(name, shown))
    return [
        Chart(
            key=f"eval_{_slug(score)}",
            title=f"Held-out {score.replace('_', ' ')}",
            lines=tuple(lines),
            form=form_of(score),
            noisy=False,
        )
        for score, lines in scores.items()
    ]


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
