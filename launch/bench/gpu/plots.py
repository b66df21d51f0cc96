"""The figures of a part as bars: one chart for each thing that is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.bench.gpu.report import Measured

_BAR, _MARGIN, _WIDTH = 0.24, 0.8, 9.0  # inches
_DECADES = 50.0  # from which ratio of the longest to the shortest bar a scale is logarithmic
Bars = list[tuple[str, float]]


def by_name(measured: Sequence[Measured]) -> dict[str, Bars]:
    """What each bar is of, and its length, by the figures' names with their units; words are left out."""
    found: dict[str, Bars] = {}
    for one in measured:
        for figure in one.figures:
            value, unit = figure["value"], figure["unit"]
            if isinstance(value, int | float):
                name = f"{figure['name']} ({unit})" if unit else figure["name"]
                found.setdefault(name, []).append((figure["of"], float(value)))
    return found


def draw(measured: Sequence[Measured], title: str, path: Path) -> None:
    """Draws the figures to a PNG; none where there are no numbers."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    charts = by_name(measured)
    if not charts:
        return
    heights = [_BAR * len(bars) + _MARGIN for bars in charts.values()]
    figure = Figure(figsize=(_WIDTH, sum(heights) + _MARGIN), layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (name, bars) in zip(axes, charts.items(), strict=True):
        lengths = [length for _, length in bars]
        drawn = axis.barh(range(len(bars)), lengths, color="C0", height=0.7)
        axis.bar_label(drawn, [f" {length:,.4g}" for length in lengths], fontsize=7)
        axis.set_yticks(range(len(bars)), [of for of, _ in bars], fontsize=7)
        axis.tick_params(axis="x", labelsize=7)
        axis.set_ylim(len(bars) - 0.5, -0.5)
        if min(lengths) > 0 and max(lengths) > _DECADES * min(lengths):
            axis.set_xscale("log")
        axis.set_title(name, fontsize=8, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
        if min(lengths) >= 0 and axis.get_xscale() == "linear":
            axis.set_xlim(left=0)
    figure.savefig(path, dpi=100, metadata={"Software": None})
