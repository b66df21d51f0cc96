"""Run directories as files, written by hand, and the report's own HTML read by Python's parser."""

import json
import math
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml


def record(step: int, **values: object) -> dict[str, object]:
    """As a run logs it, with numbers that depend on the step alone."""
    return {
        "step": step,
        "window": step,
        "epoch": step // 40,
        "loss": 5 * math.exp(-step / 50) + 1,
        "grad_norm": 1 + math.sin(step),
        "lr": 1e-3 / step,
        "loss_scale": 1.0,
        "applied": True,
        "skipped": 0,
        "samples": 8 * step,
        "tokens": 256 * step,
        "tokens_per_s": 1e4,
        "step_time_s": 0.5,
        "data_wait_s": 0.01,
        "memory_bytes": 2**30,
    } | values


def a_run(
    folder: Path,
    records: Sequence[Mapping[str, object]] = (),
    *,
    status: Mapping[str, object] | None = None,
    config: Mapping[str, object] | None = None,
    more: str = "",
) -> Path:
    """A run directory; ``more`` is appended to ``metrics.jsonl`` as it is."""
    (folder / ".hydra").mkdir(parents=True)
    lines = "".join(json.dumps(one) + "\n" for one in records)
    (folder / "metrics.jsonl").write_text(lines + more)
    (folder / "status.json").write_text(json.dumps(status or {"state": "done", "step": len(records), "reason": ""}))
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(dict(config or {"optim": {"clip_norm": 1.0}})))
    return folder


class Page(HTMLParser):
    """A report as a browser takes it apart: the scripts' texts, the tables' cells by their id, all other text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._table = ""
        self._script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self._script = True
            self.scripts.append("")
        if tag == "table":
            self._table = dict(attrs).get("id") or f"table-{len(self.tables)}"
            self.tables[self._table] = []
        if tag == "tr":
            self.tables[self._table].append([])
        if tag in ("td", "th"):
            self.tables[self._table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = False
        if tag == "table":
            self._table = ""

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[-1] += data
            return
        self.texts.append(data)
        if self._table and self.tables[self._table] and self.tables[self._table][-1]:
            self.tables[self._table][-1][-1] += data

    @property
    def text(self) -> str:
        """All that is written on it."""
        return " ".join(self.texts)

    @property
    def data(self) -> dict[str, Any]:
        """What the curves are drawn from."""
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found

    def rows(self, table: str) -> dict[str, list[str]]:
        """A table's rows by their first cell."""
        return {row[0]: row[1:] for row in self.tables[table] if row}
