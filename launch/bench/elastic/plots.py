"""Throughput over the time of a run, with the moments at which processes were killed and others have joined."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BIN_S = 0.5


def draw(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draws one chart for each way, with one time below all, to a PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    figure = Figure(figsize=(9, 0.6 + 1.7 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        edges = [i * _BIN_S for i in range(int(run["lasted_s"] / _BIN_S))]
        counts = [0.0] * len(edges)
        for time, samples in run["progress"]:
            if 0 <= time < len(edges) * _BIN_S:
                counts[int(time / _BIN_S)] += samples / _BIN_S
        axis.stairs(counts, [*edges, len(edges) * _BIN_S], fill=True, color="C0", alpha=0.6)
        for i, time in enumerate(run["kills"]):
            axis.axvline(time, color="C3", linewidth=1, label="a process is killed" if not i else None)
        for i, time in enumerate(run["whole"]):
            label = "all ranks are back" if not i else None
            axis.axvline(time, color="C2", linewidth=1, linestyle="--", label=label)
        axis.axhline(run["undisturbed"], color="0.4", linewidth=0.8, linestyle=":", label="before the first kill")
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_ylabel("samples/s", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0)
    axes[0].legend(frameon=False, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    axes[-1].set_xlabel("seconds", fontsize=8)
    figure.savefig(path, dpi=100, metadata={"Software": None})
