"""The figures of ``engines.py`` as tables, on the console and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from distaccum.tools.plan.collectives import KINDS
from launch.bench.engines import PARAMETERS

Figures = dict[str, Any]
Rows = list[list[str]]
MEMORY_COLUMNS = {
    "parameters": "parameters",
    "gradients, boundary": "gradients at the boundary",
    "stepped with": "gradients stepped with",
    "between windows": "gradients between windows",
    "optimizer": "optimizer",
    "weight copies": "copies",
    "other": "other",
}


def memory_rows(figures: Figures) -> Rows:
    """MiB of the rank that holds most, and the theory's where there is one."""
    rows = [["MiB held on a rank", *MEMORY_COLUMNS, "allocated"]]
    for name, row in figures["engines"].items():
        if row["version"] is None:
            rows.append([name, "absent", *[""] * len(MEMORY_COLUMNS)])
            continue
        cells = []
        for key in (*MEMORY_COLUMNS.values(), "allocated"):
            expected = row["memory theory"].get(key)
            cells.append(_measured(max(row["memory"][key]), expected))
        rows.append([name, *cells])
    return rows


def wire_rows(figures: Figures) -> Rows:
    """Reductions of gradients, and MiB that a rank sends: measured, and by the theory."""
    rows = [["MiB sent in a window", "gradient reduced", "reductions", *KINDS, "all"]]
    for name, row in figures["engines"].items():
        if row["version"] is None:
            rows.append([name, "absent", *[""] * (len(KINDS) + 2)])
            continue
        sent, expected = row["wire"]["sent"], row["wire theory"]
        passes = row["wire"]["reduced"] / (PARAMETERS * figures["parameters"])
        cells = [_measured(sent[kind], expected[kind]) if sent[kind] or expected[kind] else "-" for kind in KINDS]
        total = _measured(sum(sent.values()), sum(expected.values()))
        rows.append([name, f"{passes:g}x", str(row["wire"]["reductions"]), *cells, total])
    return rows


def _measured(size: float, expected: float | None) -> str:
    return f"{size / 2**20:.2f}" + ("" if expected is None else f" / {expected / 2**20:.2f}")


def as_markdown(rows: Rows) -> str:
    """A Markdown table of the rows; the first one is its head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show(figures: Figures, path: Path) -> None:
    """Prints the tables, and writes them to ``path`` as Markdown."""
    size, accumulation = figures["parameters"], figures["accumulation"]
    about = f"{figures['ranks']} ranks, {size:,} parameters in fp32, accumulation {accumulation}"
    tables = [memory_rows(figures), wire_rows(figures)]
    for head, *body in tables:
        table = Table(*head, title=f"{about}: measured / theory")
        for row in body:
            table.add_row(*row)
        Console().print(table)
    path.write_text("\n".join(as_markdown(rows) for rows in tables))
