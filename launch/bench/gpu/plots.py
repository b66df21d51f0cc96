"""The figures of a part as bars: one chart for each unit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.bench.gpu.report import Measured

_BAR, _MARGIN, _WIDTH = 0.24, 0.9, 9.0  # inches
_DECADES = 50.0  # from which ratio of the largest to the smallest bar a scale is logarithmic
Bars = list[tuple[str, float]]


def by_unit(measured: Sequence[Measured]) -> dict[str, Bars]:
    """What each bar is of, and its length, by the figures' unit; words are left out."""
    found: dict[str, Bars] = {}
    for one in measured:
        for figure in one.figures:
            if isinstance(figure["value"], int | float) and not isinstance(figure["value"], bool):
                bar = (f"{figure['of']}: {figure['name']}", float(figure["value"]))
                found.setdefault(figure["unit"], []).append(bar)
    return found


def draw(measured: Sequence[Measured], title: str, path: Path) -> None:
    """Draws the figures to a PNG; none where there are no numbers."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    charts = by_unit(measured)
    if not charts:
        return
    heights = [_BAR * len(bars) + _MARGIN for bars in charts.values()]
    figure = Figure(figsize=(_WIDTH, sum(heights) + _MARGIN), layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (unit, bars) in zip(axes, charts.items(), strict=True):
        lengths = [length for _, length in bars]
        drawn = axis.barh(range(len(bars)), lengths, color="C0", height=0.7)
        axis.bar_label(drawn, [f" {length:.4g}" for length in lengths], fontsize=7)
        axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
        axis.invert_yaxis()
        if min(lengths) > 0 and max(lengths) > _DECADES * min(lengths):
            axis.set_xscale("log")
        axis.set_xlabel(unit or "(no unit)", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    figure.savefig(path, dpi=100, metadata={"Software": None})
