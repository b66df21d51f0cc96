"""The report: what each measurement gave, of one machine, in a file that is whole at any moment; and its table."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distaccum.checkpoint.files import write_json, write_text
from distaccum.errors import ConfigError

FILE = "report.json"
DONE, FAILED, LEFT_OUT = "done", "failed", "left out"
_SAME = ("torch", "cuda", "card", "cards", "driver", "python")  # figures of one report have these in common
_WIDTH = 160  # characters of the table where it goes to a file
_WHOLE = 1000  # from which on a number is shown without a fraction
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one measurement gave: figures as plain values, or why it has none.

    ``said``: the end of its output, where it failed. ``seconds``: with its process's start.
    """

    part: str
    name: str
    small: bool
    state: str = FAILED
    figures: Sequence[Mapping[str, Any]] = ()
    error: str = ""
    said: str = ""
    seconds: float = 0.0
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def left_out(self, why: str) -> Measured:
        """For one that was not begun."""
        return replace(self, state=LEFT_OUT, error=why)

    def done(self, figures: Sequence[Mapping[str, Any]], *, error: str, seconds: float, said: str = "") -> Measured:
        """For one that has ended: failed with an error, without figures, or with one that is not finite."""
        wrong = [f"{one['of']}, {one['name']}" for one in figures if not _is_finite(one["value"])]
        if not error and not figures:
            error = "it gave no figure"
        if not error and wrong:
            error = f"not finite: {'; '.join(wrong)}"
        told = [one if _is_finite(one["value"]) else {**one, "value": str(one["value"])} for one in figures]  # for JSON
        state, seconds = FAILED if error else DONE, round(seconds, 1)
        return replace(self, state=state, figures=told, error=error, said=said, seconds=seconds)

    @property
    def good(self) -> bool:
        """Whether it did not fail, and no target of its figures is missed."""
        return self.state != FAILED and all(one["holds"] is not False for one in self.figures)


def _is_finite(value: Any) -> bool:
    return isinstance(value, str) or math.isfinite(value)


class Report:
    """All that was measured in a folder, written anew with each measurement.

    Args:
        folder: of the report.
        machine: facts of the machine and the versions on it.
        options: of the runs, the last one's at the end.
        measured: by part and name.
    """

    def __init__(self, folder: Path, machine: Json, options: list[Json], measured: Sequence[Measured] = ()) -> None:
        self._folder, self._machine, self._options = folder, machine, options
        self._measured = {(one.part, one.name): one for one in measured}

    @classmethod
    def of(cls, folder: Path, machine: Json, *, options: Json) -> Report:
        """The folder's report, to which a run with these options adds; an empty one where it has none.

        Raises:
            ConfigError: it cannot be read, or is of another machine, or other versions.
        """
        file = folder / FILE
        if not file.exists():
            return cls(folder, machine, [options])
        remedy = "Choose another hydra.run.dir"
        try:
            content = json.loads(file.read_text())
            before, measured = content["machine"], [Measured(**one) for one in content["measurements"]]
            runs = [*content["options"], options]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError("hydra.run.dir", folder, f"its {FILE} cannot be read ({error})", remedy) from error
        other = [
            f"{key} {before.get(key)} and not {machine.get(key)}" for key in _SAME if before.get(key) != machine[key]
        ]
        if other:
            raise ConfigError("hydra.run.dir", folder, f"its {FILE} is of {', '.join(other)}", remedy)
        return cls(folder, machine, runs, measured)

    def add(self, measured: Measured) -> None:
        """Adds what was measured, in place of what an earlier run has under that name, and writes the file.

        One that is left out takes nothing's place.
        """
        key = measured.part, measured.name
        if measured.state != LEFT_OUT or key not in self._measured:
            self._measured[key] = measured
        self._write()

    def forget(self, part: str, name: str) -> None:
        """Drops what was measured under a name, if anything was."""
        self._measured.pop((part, name), None)

    def good(self, among: Sequence[tuple[str, str]]) -> bool:
        """Whether these, by part and name, are good."""
        return all(self._measured[key].good for key in among)

    @property
    def parts(self) -> dict[str, list[Measured]]:
        """What was measured, by part."""
        found: dict[str, list[Measured]] = {}
        for one in self._measured.values():
            found.setdefault(one.part, []).append(one)
        return found

    def finish(self) -> None:
        """Writes the table, and prints it."""
        self._write()
        write_text(self._folder / "report.md", f"{self.title}\n\n{_markdown(self._rows())}{self._notes()}")
        self._print(self.title)

    def _write(self) -> None:
        content = {
            "machine": self._machine,
            "options": self._options,
            "measurements": [asdict(one) for one in self._measured.values()],
        }
        write_json(self._folder / FILE, content)

    @property
    def title(self) -> str:
        """The machine, its versions and the date."""
        machine = self._machine
        device = machine["card"] or f"no GPU, {machine['cores']} CPU cores"
        over = f", CUDA {machine['cuda']}, driver {machine['driver']}" if machine["cuda"] else ""
        dates = sorted(one.date[:10] for one in self._measured.values())
        return f"{device}, torch {machine['torch']}{over} ({dates[-1] if dates else 'nothing measured'})"

    def _rows(self) -> list[list[str]]:
        rows = [["part", "measurement", "of", "figure", "value", "target", "holds"]]
        for one in self._measured.values():
            about = [one.part, f"{one.name}{' (small)' if one.small else ''}"]
            for figure in one.figures:
                held = {None: "", True: "yes", False: "NO"}[figure["holds"]]
                shown = f"{_shown(figure['value'])} {figure['unit']}".strip()
                rows.append([*about, figure["of"], figure["name"], shown, figure["target"], held])
            if one.state != DONE:
                why = one.error.strip().splitlines()[0]
                rows.append([*about, "", one.state, why, "", "NO" if one.state == FAILED else ""])
        return rows

    def _notes(self) -> str:
        left = [one.name for one in self._measured.values() if one.state == LEFT_OUT]
        return f"\nLeft out for lack of time: {', '.join(left)}.\n" if left else ""

    def _print(self, title: str) -> None:
        rows = self._rows()
        if find_spec("rich") is None:
            print(f"{title}\n\n{_markdown(rows)}{self._notes()}")  # noqa: T201
            return
        from rich.console import Console  # noqa: PLC0415  the bench runs without it
        from rich.markup import escape  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415

        head, *body = rows
        table = Table(*head, title=title, caption=self._notes().strip() or None)
        for row in body:
            table.add_row(*map(escape, row))
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= _WHOLE else f"{value:.4g}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of the rows; the first one is its head."""
    head, *body = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
