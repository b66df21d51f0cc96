"""The report: one HTML file that needs no network, with its data, its style and its script inside."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

import distaccum
from distaccum.tools.report.charts import charts, counted, form_of, level
from distaccum.tools.report.columns import AXES, Columns, columns, finite, parts_of, thinned
from distaccum.tools.report.compare import (
    MISSING,
    best_of,
    bests,
    better,
    changed,
    differing,
    flat,
    judged_by,
    summaries,
)
from distaccum.tools.report.marks import marks
from distaccum.tools.report.read import PARTS, Run

_HERE = Path(__file__).parent
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SPAN = {"least": "min", "median": "median", "greatest": "max"}
_RATES = {"tokens_per_s": " tokens/s", "samples_per_s": " samples/s", "tflops_per_rank": " TFLOP/s"}
_LONGEST = 400  # characters of a setting's value


def page(runs: Sequence[Run]) -> str:
    """The whole file; several runs are laid over each other."""
    whole = [columns(run.records) for run in runs]
    style, script = ((_HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    # Nothing is loaded, and no script runs but this one, whatever a run's files hold.
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_digest(script)}'"
    title = ", ".join(run.name for run in runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")  # noqa: PLR2004
    about = dict.fromkeys(filter(None, map(_trained, runs)))
    shown = "".join(f'<p class="about">{_text(one)}</p>' for one in about) if len(about) == 1 else ""
    parts = parts_of(whole)
    drawn = [thinned(one, parts) for one in whole]
    body = [
        f"<header><h1>{_text(title)}</h1>{shown}{_states(runs)}</header>",
        _table(*_overview(runs, whole), name="runs"),
        _section("differences", "Differences", _differences(runs)) if len(runs) > 1 else "",
        '<nav id="tools"></nav><main id="charts"><noscript><p>The curves need JavaScript.</p></noscript></main>',
        _section("final", "Final numbers", _final(runs, whole) + _slowest(runs) + _tables(runs)),
        *(_about(run, alone=len(runs) == 1) for run in runs),
        f"<footer>{_notes(runs, drawn)}</footer>",
        f'<script type="application/json" id="data">{_embedded(_data(runs, whole, drawn))}</script>',
    ]
    text = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">\n'
        f"<title>{_text(title)} · distaccum</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, body))
        + f"\n<script>{script}</script>\n</body>\n</html>\n"
    )
    return text.encode(errors="replace").decode()  # names of files may hold what no text does


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


def _embedded(data: object) -> str:
    """JSON that no HTML can end: ``<`` and what follows it are only written as escapes."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(runs: Sequence[Run], whole: Sequence[Columns], drawn: Sequence[Columns]) -> dict[str, Any]:
    """What the script draws."""
    shown = charts(drawn)
    metrics = {line.metric for chart in shown for line in chart.lines}
    return {
        "axes": AXES,
        "counted": counted(whole),
        "runs": [
            {
                "name": run.name,
                "records": points.records,
                "x": points.x,
                "y": {name: values for name, values in points.y.items() if name in metrics},
                "bad": {name: odd for name, odd in points.bad.items() if name in metrics},
                "marks": [asdict(mark) for mark in marks(run, all_points)],
                "best": {
                    name: {"at": [all_points.x[axis][one.point] for axis in AXES], "step": one.step, "value": one.value}
                    for name, one in bests(run, all_points).items()
                },
                "levels": {chart.key: value for chart in shown if (value := level(run, chart)) is not None},
            }
            for run, all_points, points in zip(runs, whole, drawn, strict=True)
        ],
        "charts": [asdict(chart) for chart in shown],
    }


# ------------------------------------------------------------------------------------------------- parts of the page


def _states(runs: Sequence[Run]) -> str:
    """What is wrong, or not at its end, first."""
    said = []
    for run in runs:
        reason, step = str(run.status.get("reason") or ""), run.status.get("step", 0)
        name = f"{_text(run.name)}: " if len(runs) > 1 else ""
        if run.state in ("failed", "config_error"):
            said.append(f'<p class="failed"><b>{name}failed</b> at step {_text(step)}. {_text(reason)}</p>')
        elif run.state == "running":
            said.append(f'<p class="note"><b>{name}running</b> when this was written, unless it was killed.</p>')
        elif run.state == "unknown":
            said.append(f'<p class="note"><b>{name}</b>has no status.json that can be read.</p>')
        elif reason or run.state != "done":
            said.append(f'<p class="note"><b>{name}{_text(run.state)}</b> at step {_text(step)}. {_text(reason)}</p>')
    return "".join(said)


def _trained(run: Run) -> str:
    """The model and the data, as the run's header names them."""
    return " · ".join(str(run.plan[key]) for key in ("model", "data") if run.plan.get(key))


def _best(run: Run, whole: Columns) -> str:
    """The best value of the result that the run is judged by, and its step."""
    for metric, one in bests(run, whole).items():
        name = metric.removeprefix("eval_").replace("_", " ")
        return f"{_text(name)} <b>{_number(metric, one.value)}</b> at step {one.step:,}"
    return ""


def _overview(runs: Sequence[Run], whole: Sequence[Columns]) -> tuple[list[str], list[list[str]]]:
    places = AXES[:3] if counted(whole) == "tokens" else AXES[:2]
    best = [_best(run, points) for run, points in zip(runs, whole, strict=True)]
    head = ["run", "state", "steps", *places[1:], "time of training", "ranks", "engine", "began"]
    head[2:2] = ["best result"] if any(best) else []
    rows = []
    for number, (run, points) in enumerate(zip(runs, whole, strict=True)):
        last = {axis: points.x[axis][-1] if points.x[axis] else 0 for axis in AXES}
        started = run.starts[0].get("at") if run.starts else run.history.get("begun")
        engine = run.config.get("engine")
        rows.append(
            [
                f'<i class="swatch c{number % 10}"></i>{_text(run.name)}',
                f'<span class="state {_text(run.state)}">{_text(run.state)}</span>',
                *([best[number]] if any(best) else []),
                *(f"{last[axis]:,}" for axis in places),
                _duration(last["hours"] * 3600),
                _text(run.plan.get("world_size", "")),
                _text(engine.get("name", "") if isinstance(engine, dict) else engine or ""),
                _text(started or ""),
            ]
        )
    return head, rows


def _differences(runs: Sequence[Run]) -> str:
    lines = [("model and data", values)] if len(set(values := list(map(_trained, runs)))) > 1 else []
    rows = [[_text(key), *map(_value, values)] for key, values in [*lines, *differing(runs)]]
    if not rows:
        return "<p>Their configurations are the same.</p>"
    return _table(["setting", *(_text(run.name) for run in runs)], rows)


def _final(runs: Sequence[Run], whole: Sequence[Columns]) -> str:
    if not any(run.records for run in runs):
        return "<p>Nothing was logged.</p>"
    other = "samples_per_s" if counted(whole) == "tokens" else "tokens_per_s"
    found = [summaries(run, points) for run, points in zip(runs, whole, strict=True)]
    for one in found:
        one.pop(other, None)
    if len(runs) == 1:
        best = bests(runs[0], whole[0])
        rows = [
            [
                _text(name),
                _number(name, one.last),
                f"{one.step:,}",
                *(_number(name, getattr(one, key)) for key in _SPAN),
                f"{_number(name, best[name].value)} at step {best[name].step:,}" if name in best else "",
            ]
            for name, one in found[0].items()
        ]
        return _table(["metric", "last", "at step", *_SPAN.values(), "best"], rows, name="last")
    rows = []
    for name in dict.fromkeys(name for one in found for name in one):
        direction = next((way for run in runs if (way := better(name, run))), 0)
        for which in dict.fromkeys(["last", judged_by(name, direction) if direction else "last"]):
            values = [getattr(one[name], which) if name in one else None for one in found]
            judged = direction if which == judged_by(name, direction) or name.startswith("eval_") else 0
            rows.append(_compared(name, name if which == "last" else f"{name}, {_SPAN[which]}", values, judged))
    said = '<p class="quiet">The last value of each run, and the one that it is judged by. The best is bold.</p>'
    return said + _table(["metric", *(_text(run.name) for run in runs)], rows, name="last")


def _slowest(runs: Sequence[Run]) -> str:
    """How often each rank was the slowest one, and how much slower than the median of the ranks."""
    said = []
    for run in runs:
        ratios: dict[int, list[float]] = {}
        for record in run.records:
            rank, ratio = finite(record.get("slowest_rank")), finite(record.get("slowest_over_median"))
            if rank is not None and ratio is not None:
                ratios.setdefault(int(rank), []).append(ratio)
        of = f" of {run.name}" if len(runs) > 1 else ""
        rows = [
            [
                f"rank {rank}",
                f"{len(found):,}",
                " to ".join(dict.fromkeys(f"{one:.2f}" for one in (min(found), max(found)))) + " x",
            ]
            for rank, found in sorted(ratios.items(), key=lambda one: -len(one[1]))
        ]
        if rows:
            said.append(f"<h3>Slowest rank{_text(of)}</h3>{_table(['rank', 'records', 'time over the median'], rows)}")
    return "".join(said)


def _tables(runs: Sequence[Run]) -> str:
    """The last table of each name in each run, as a confusion matrix."""
    said = []
    for run in runs:
        last = {name: (one, record) for record in run.records for name, one in record.items() if isinstance(one, dict)}
        for name, (one, record) in last.items():
            columns, rows = one.get("columns"), one.get("rows")
            if isinstance(columns, list) and isinstance(rows, list):
                of = f" of {run.name}" if len(runs) > 1 else ""
                said.append(f"<h3>{_text(name)}{_text(of)}, at step {_text(record.get('step'))}</h3>")
                cells = (list(map(_text, row)) for row in rows if isinstance(row, list))
                said.append(_table(list(map(_text, columns)), cells))
    return "".join(said)


def _compared(metric: str, title: str, values: Sequence[Any], direction: int) -> list[str]:
    best = best_of(values, direction)
    cells = [_number(metric, value) for value in values]
    return [_text(title), *(f'<b class="best">{cell}</b>' if i in best else cell for i, cell in enumerate(cells))]


def _about(run: Run, *, alone: bool) -> str:
    """Settings, plan, environment and log of one run; of one among several folded away."""
    parts = [
        _details("Changed from the defaults", _changed(run), open_=alone),
        _details("All settings", _all_settings(run)),
        _details("Parameter groups", _groups(run)),
        _details("Plan", _pairs(flat({key: value for key, value in run.plan.items() if key != "optimizer_groups"}))),
        _details("Environment", _environment(run), open_=alone),
        _details("Log", _log(run), open_=alone),
    ]
    body = "".join(parts)
    return f'<section class="run"><h2>{"About the run" if alone else _text(run.name)}</h2>{body}</section>'


def _changed(run: Run) -> str:
    rows = [[_text(key), _value(value), _value(default)] for key, value, default in changed(run)] if run.config else []
    typed = f"<p>Command line: <code>{_text(' '.join(run.overrides))}</code></p>" if run.overrides else ""
    return typed + (_table(["setting", "value", "default"], rows) if rows else "")


def _all_settings(run: Run) -> str:
    if not run.config:
        return ""
    search = '<p><input type="search" class="search" placeholder="search settings" aria-label="search settings"></p>'
    return search + _pairs(flat(run.config))


def _groups(run: Run) -> str:
    groups = run.plan.get("optimizer_groups")
    rows = [
        [_text(one.get("optimizer")), _text(one.get("states")), _text(written(one.get("parameters"), "count"))]
        for one in (groups if isinstance(groups, list) else ())
        if isinstance(one, dict)
    ]
    return _table(["optimizer", "settings", "parameters"], rows) if rows else ""


def _environment(run: Run) -> str:
    if not run.starts:
        return ""
    now = {key: value for key, value in run.starts[-1].items() if key != "before"}
    tables = _pairs(flat(now))
    if len(run.starts) > 1:
        head = ["began", "at step", "ranks", "host", "commit", "the process before"]
        rows = [
            [
                *(_text(one.get(key, "")) for key in ("at", "step", "ranks", "host")),
                _text(str(one.get("git_commit") or "")[:10]),
                _ended(one.get("before")),
            ]
            for one in run.starts
        ]
        tables += f"<h3>Processes that trained here</h3>{_table(head, rows)}"
    return tables


def _ended(before: Any) -> str:
    if not isinstance(before, dict) or not before:
        return ""
    state = str(before.get("state"))
    return _text(f"{'killed' if state == 'running' else state} {before.get('reason') or ''}".strip())


def _log(run: Run) -> str:
    parts = []
    if run.log.loud:
        lines = "\n".join(f"[rank {rank}] {line}" for rank, line in run.log.loud)
        parts.append(f"<pre>{_text(lines)}</pre>")
    for rank, text in run.log.ends.items():
        parts.append(f"<details><summary>end of logs/rank-{rank}.log</summary><pre>{_text(text)}</pre></details>")
    if run.log.ranks > len(run.log.ends):
        parts.append(f"<p>{run.log.ranks} ranks have logs; these are of the first {len(run.log.ends)}.</p>")
    return "".join(parts)


def _notes(runs: Sequence[Run], drawn: Sequence[Columns]) -> str:
    said = []
    for run, points in zip(runs, drawn, strict=True):
        name = f"{_text(run.name)}: " if len(runs) > 1 else ""
        if run.logged > len(run.records):
            said.append(
                f"{name}of {run.logged:,} records {len(run.records):,} are read, for curves and tables: of each "
                f"{-(-run.logged // PARTS):,} the last one, evaluations, what is not finite, and the extremes of loss "
                "and gradient norm."
            )
        if points.thinned:
            count = len(points.x["step"])
            said.append(
                f"{name}{points.records:,} records are drawn as {count:,} points, the least and the greatest of each "
                f"{points.records // (count // 2):,}; the tables are of all of these."
            )
        if run.damaged:
            said.append(f"{name}{run.damaged} lines of metrics.jsonl are damaged or cut short, and left out.")
        if run.superseded:
            said.append(f"{name}{run.superseded} records were made again after a resume (metrics.superseded.jsonl).")
    said.append("Time of training is step_time_s times attempts: without evaluations, checkpoints and pauses.")
    said.append(f"Made {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} by distaccum {distaccum.__version__}.")
    return "".join(f"<p>{one}</p>" for one in said)


# ------------------------------------------------------------------------------------------------------- small pieces


def _text(value: object) -> str:
    return escape(str(value))


def _section(key: str, title: str, body: str) -> str:
    return f'<section id="{key}"><h2>{title}</h2>{body}</section>'


def _details(title: str, body: str, *, open_: bool = False) -> str:
    return f"<details{' open' if open_ else ''}><summary>{title}</summary>{body}</details>" if body else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> str:
    """A table of cells that are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    mark = f' id="{name}"' if name else ""
    return f'<div class="scroll"><table{mark}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _pairs(settings: dict[str, Any]) -> str:
    return (
        _table(["key", "value"], [[_text(key), _value(value)] for key, value in settings.items()]) if settings else ""
    )


def _value(value: Any) -> str:
    if value is MISSING:
        return '<span class="quiet">-</span>'
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    cut = f"{text[:_LONGEST]} ... ({len(text):,} characters)" if len(text) > _LONGEST else text
    return _text(cut)


def _number(metric: str, value: Any) -> str:
    """A metric's number in its form, with all its digits where the pointer rests."""
    if value is None:
        return ""
    shown = written(value, form_of(metric)) + _RATES.get(metric, "")
    return f'<span title="{_text(repr(value))}">{_text(shown)}</span>'


def written(value: Any, form: str) -> str:
    """A number for people: ``form`` as :func:`distaccum.tools.report.charts.form_of` names it."""
    if finite(value) is None:
        return str(value)[:40]
    if form == "bytes":
        size, unit = float(value), 0
        while abs(size) >= 1024 and unit < len(_UNITS) - 1:  # noqa: PLR2004  of a unit in the next
            size, unit = size / 1024, unit + 1
        return f"{size:.4g} {_UNITS[unit]}"
    if form in ("share", "seconds"):
        return f"{value:.2%}" if form == "share" else _duration(value)
    if float(value).is_integer() and abs(value) < 1e15:  # noqa: PLR2004  beyond which a float skips whole numbers
        return f"{int(value):,}"
    if form == "count" and value >= 1000:  # noqa: PLR2004
        return f"{value:,.0f}"
    return f"{value:.{4 if form == 'count' else 6}g}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:  # noqa: PLR2004  two minutes
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"  # noqa: PLR2004  two hours
