"""The charts of a report as pictures, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from distaccum.config.extras import install_command
from distaccum.errors import ConfigError
from distaccum.tools.report.charts import charts, level
from distaccum.tools.report.columns import columns
from distaccum.tools.report.read import Run

_DASHES = ("-", "--", ":", "-.")


def pictures(runs: Sequence[Run], report: Path) -> dict[Path, bytes]:
    """A PNG of each chart over updates, named after the report: ``report-loss.png``.

    Raises:
        ConfigError: matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--png", None, "matplotlib is missing", f"Run {install_command('plot')}")
    from matplotlib.figure import Figure  # noqa: PLC0415  only where pictures are asked for

    points = [columns(run.records) for run in runs]
    found: dict[Path, bytes] = {}
    for chart in charts(points):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        for number, (run, one) in enumerate(zip(runs, points, strict=True)):
            for i, line in enumerate(line for line in chart.lines if line.metric in one.y):
                there = [(x, y) for x, y in zip(one.x["step"], one.y[line.metric], strict=True) if y is not None]
                words = [
                    run.name if len(runs) > 1 else "",
                    line.label if len(chart.lines) > 1 or len(runs) == 1 else "",
                ]
                axes.plot(
                    *(zip(*there, strict=True) if there else ((), ())),
                    color=f"C{number % 10}",
                    linestyle=_DASHES[i % len(_DASHES)],
                    marker="." if len(there) <= 40 else "",  # noqa: PLR2004  as the page does
                    label=" ".join(filter(None, words)),
                )
            if (limit := level(run, chart)) is not None:
                axes.axhline(limit, color="0.5", linestyle=":", linewidth=1)
        axes.set(title=chart.title, xlabel="updates")
        axes.grid(alpha=0.3)
        axes.legend()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        found[report.with_name(f"{report.stem}-{chart.key}.png")] = buffer.getvalue()
    return found
