"""The figures of the network bench as tables, on the console and as Markdown, and as a bar chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.bench.tables import as_markdown

MIB = 2**20
Rows = list[list[str]]
Figures = dict[str, Any]


def window_rows(figures: Figures) -> Rows:
    """What a window takes and sends with each loop, and the forecast of its time."""
    rows = [
        [
            "",
            "window",
            "forecast",
            "off by",
            "over no_sync",
            "count",
            "alone / p10",
            "sent by a host",
            "over the gradient",
        ]
    ]
    for name, row in figures["ways"].items():
        seconds, size = row["seconds"], row["bytes"]
        times = [f"{seconds:.2f} s", f"{row['forecast']:.2f} s", f"{row['error']:+.1%}", f"{row['over no_sync']:.3f}x"]
        counts = ["", ""]
        if "count_last_ms" in row:
            share = row["count_last_ms"] / seconds / 1e3
            counts = [
                f"{row['count_last_ms']:.2f} ms, {share:.2%}",
                f"{row['alone_ms']:.2f} / {row['alone_p10_ms']:.2f} ms",
            ]
        rows.append([name, *times, *counts, f"{size / MIB:.2f} MiB", f"{size / row['gradient bytes']:.3f}x"])
    return rows


def validation_rows(figures: Figures) -> Rows:
    """Forecast and measurement of each loop at each rate."""
    rows = [["", "Mbit/s", "latency", "micro-step", "update", "forecast", "window", "off by"]]
    for at in figures["rates"]:
        for name, row in at["ways"].items():
            told = [f"{row['micro_step_ms']:.1f} ms", f"{row['update_ms']:.1f} ms"]
            times = [f"{row['forecast']:.3f} s", f"{row['seconds']:.3f} s", f"{row['error']:+.1%}"]
            rows.append([name, f"{at['mbit']:g}", f"{at['latency_us']:.0f} us", *told, *times])
    return rows


def show(rows: Rows, title: str, path: Path) -> None:
    """Prints a table, and writes it to ``path`` as Markdown; the first row is its head."""
    head, *body = rows
    table = Table(*head, title=title)
    for row in body:
        table.add_row(*row)
    Console().print(table)
    path.write_text(f"{title}\n\n{as_markdown(rows)}")


def draw(figures: Figures, path: Path) -> None:
    """Draws window time and bytes of each loop to a PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    names, rows = list(figures["ways"]), list(figures["ways"].values())
    figure = Figure(figsize=(8, 3), layout="constrained")
    figure.suptitle(title(figures), fontsize=10)
    left, right = figure.subplots(1, 2, sharey=True)
    heights = range(len(names))
    bars = left.barh(heights, [row["seconds"] for row in rows], color="C0", height=0.6)
    left.bar_label(bars, [f" {row['seconds']:.2f} s" for row in rows])
    left.plot([row["forecast"] for row in rows], heights, "k|", markersize=22, label="forecast")
    left.legend(frameon=False, loc="lower right")
    left.set_xlabel("time of a window (s)")
    bars = right.barh(heights, [row["bytes"] / MIB for row in rows], color="C1", height=0.6)
    right.bar_label(bars, [f" {row['bytes'] / MIB:.1f} MiB" for row in rows])
    right.axvline(
        rows[0]["gradient bytes"] / MIB, color="0.4", linewidth=0.8, linestyle="--", label="the gradient in fp32"
    )
    right.legend(frameon=False, loc="lower right")
    right.set_xlabel("sent by each host in a window (MiB)")
    left.set_yticks(heights, names)
    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.2)
        axes.set_xlim(left=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def title(figures: Figures) -> str:
    """One line about what was measured."""
    size = sum(figures["ways"]["distaccum"]["parameters"])
    return (
        f"two hosts, one process each, {figures['mbit']:g} Mbit/s, MTU {figures['mtu']}; "
        f"{size / 1e6:.1f} million parameters, accumulation {figures['accumulation']}"
    )
