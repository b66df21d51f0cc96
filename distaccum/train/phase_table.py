"""What a profile says to people: the table of phases, per window and over the ranks, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from distaccum.train.timeline import ROWS, Seconds

_OWN = {"loading": ("loading",), "computing": ("copy", "forward", "backward")}
_MEETING = {"loading": "count", "computing": "reduction"}
_WORTH = 0.05  # of a window: a wait that is worth a sentence
_LEAST_S = 1e-3


class PhaseTable:
    """The times of all ranks.

    Args:
        by_rank: of every rank its windows, as :meth:`~distaccum.train.timeline.Timeline.rows` gives them; as many on
            each.
        first: the first one's number, in the count of this process's windows.
        forward_communicates: whether the ranks wait for each other in forwards too.
        device: what the clock is of, for the heading.
    """

    def __init__(
        self, by_rank: Sequence[Sequence[Seconds]], *, first: int, forward_communicates: bool, device: str
    ) -> None:
        self._by_rank, self._first, self._device = by_rank, first, device
        self._communicates = forward_communicates
        self._means = [
            {row: fmean(window[row] for window in windows) for row in ("wall", *ROWS)} for windows in by_rank
        ]
        shown = ("loading", "count", "copy", "forward", "backward", "reduction", "step", "other")
        self._rows = [row for row in ROWS if row in shown or any(mean[row] for mean in self._means)]

    @property
    def waits(self) -> list[str]:
        """In words, which rank the others wait for, where that takes a twentieth of a window or more."""
        if len(self._means) == 1:
            return []
        said = []
        for what, parts in _OWN.items():
            if what == "computing" and self._communicates:
                said.append(
                    "the model's forward communicates: ranks wait for each other in it, and nothing is said of that"
                )
                continue
            own = [sum(mean[part] for part in parts) for mean in self._means]
            meeting = [mean[_MEETING[what]] for mean in self._means]
            last, waits = own.index(max(own)), meeting.index(max(meeting))
            others = median(own[:last] + own[last + 1 :])
            gap, wall = own[last] - others, max(mean["wall"] for mean in self._means)
            if last != waits and min(gap, meeting[waits] - meeting[last]) > max(_LEAST_S, _WORTH * wall):
                said.append(
                    f"rank {last} is waited for: {what} takes it {_ms(own[last])} ms a window, the others' median is "
                    f"{_ms(others)}; rank {waits} waits {_ms(meeting[waits])} ms in the {_MEETING[what]}"
                )
        return said

    def lines(self) -> list[str]:
        """For the console."""
        return [self._title, *self._aligned(), *self.waits]

    def markdown(self) -> str:
        """Both tables, over the ranks and of each window, with what the rows mean."""
        head = ("phase", *self._columns)
        ranks = [head, ["---", *["---:"] * len(self._columns)], *self._cells()]
        numbers = range(self._first, self._first + len(self._by_rank[0]))
        each: list[Sequence[str]] = [("window", "of the run", "whole", *self._rows), ["---:"] * (len(self._rows) + 3)]
        for number, window in zip(numbers, self._by_rank[0], strict=True):
            each.append((str(number), f"{window['window']:.0f}", *(_ms(window[row]) for row in ("wall", *self._rows))))
        waits = [f"- {line}" for line in self.waits]
        meanings = [f"- **{row}**: {ROWS[row]}" for row in self._rows]
        parts = [
            f"# Profile: {self._title}",
            _table(ranks),
            "\n".join(waits),
            "Windows of rank 0, in ms:",
            _table(each),
        ]
        return "\n\n".join(part for part in (*parts, "\n".join(meanings)) if part) + "\n"

    def values(self) -> dict[str, Any]:
        """For programs: seconds of every rank and window, and of the ranks' means the least, median and largest."""
        rows = {}
        for row in ("wall", *ROWS):
            means = [mean[row] for mean in self._means]
            spread = {"min": min(means), "median": median(means), "max": max(means)}
            rows[row] = {
                "window_s": spread,
                "sum_s": [sum(window[row] for window in windows) for windows in self._by_rank],
                "share": self._share(row),
                "slowest_rank": means.index(max(means)),
            }
        return {
            "windows": [self._first, self._first + len(self._by_rank[0]) - 1],
            "clock": self._device,
            "rows": rows,
            "ranks": [{"rank": rank, "windows": list(windows)} for rank, windows in enumerate(self._by_rank)],
            "waits": self.waits,
        }

    @property
    def _title(self) -> str:
        windows = len(self._by_rank[0])
        which = f"window {self._first}" if windows == 1 else f"windows {self._first} to {self._first + windows - 1}"
        return f"{which} of this process, {_ms(self._means[0]['wall'])} ms each (clock of the {self._device})"

    @property
    def _columns(self) -> Sequence[str]:
        return ("ms a window", "share", *(("min", "median", "max", "slowest rank") if len(self._means) > 1 else ()))

    def _share(self, row: str) -> float:
        return sum(mean[row] for mean in self._means) / (sum(mean["wall"] for mean in self._means) or 1.0)

    def _cells(self) -> list[list[str]]:
        found = []
        for row in self._rows:
            means = [mean[row] for mean in self._means]
            cells = [row, _ms(means[0]), f"{self._share(row):.1%}"]
            if len(means) > 1:
                cells += [_ms(min(means)), _ms(median(means)), _ms(max(means)), str(means.index(max(means)))]
            found.append(cells)
        return found

    def _aligned(self) -> list[str]:
        rows = [["", *self._columns], *self._cells()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        first, *rest = widths
        return [
            "  ".join([row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], rest, strict=True))])
            for row in rows
        ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
