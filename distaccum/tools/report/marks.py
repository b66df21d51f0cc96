"""Where something happened in a run: epochs, starts, rollbacks, checkpoints that are kept, attempts not applied."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from distaccum.tools.report.columns import AXES, Columns, Number
from distaccum.tools.report.read import Node, Run

KINDS = ("epoch", "start", "rollback", "checkpoint", "skip")
_MOST = 300  # of a kind, evenly chosen: more cannot be told apart


@dataclass(frozen=True)
class Mark:
    """Something that happened: its kind, its place on each axis, and a sentence."""

    kind: str
    at: tuple[Number, ...]
    text: str


def marks(run: Run, whole: Columns) -> list[Mark]:
    """The run's marks; ``whole`` has a point for each of its records."""
    if not run.records:
        return []
    windows = [_number(record.get("window")) for record in run.records]
    steps = _rising(_number(record.get("step")) for record in run.records)

    def at(i: int) -> tuple[Number, ...]:
        i = min(max(i, 0), len(windows) - 1)
        return tuple(whole.x[axis][i] for axis in AXES)

    def at_step(step: int) -> tuple[Number, ...]:
        """Between two records, where both are at some distance."""
        i = bisect_left(steps, step)
        if not 0 < i < len(steps) or steps[i] == step:
            return at(i)
        share = (step - steps[i - 1]) / (steps[i] - steps[i - 1])
        return tuple(low + (high - low) * share for low, high in zip(at(i - 1), at(i), strict=True))

    def mark(kind: str, i: int, text: str) -> Mark:
        return Mark(kind, at(i), text)

    found: list[Mark] = []
    epochs = [(i, _number(record.get("epoch"))) for i, record in enumerate(run.records)]
    found += [mark("epoch", i, f"epoch {after}") for (_, before), (i, after) in pairwise(epochs) if after > before]
    for before, start in pairwise(run.starts):
        found.append(mark("start", bisect_right(windows, _number(start.get("window"))) - 1, _of_start(start, before)))
    for rollback in _rollbacks(run):
        window, step = _number(rollback.get("after_window")), rollback.get("to_step")
        found.append(mark("rollback", bisect_right(windows, window) - 1, f"rolled back to step {step}"))
    best = str(run.best.get("checkpoint", ""))
    for step in run.kept:
        text = f"checkpoint of step {step}" + (", the best" if best.endswith(f"step-{step}") else "")
        found.append(Mark("checkpoint", at_step(step), text))
    skips = [i for i, record in enumerate(run.records) if record.get("applied") is False]
    found += [mark("skip", i, f"step skipped: attempt {windows[i]}") for i in skips]
    return [one for kind in KINDS for one in _some([mark for mark in found if mark.kind == kind])]


def _of_start(start: Node, before: Node) -> str:
    ended = start.get("before")
    state = ended.get("state") if isinstance(ended, dict) else None
    how = {"preempted": "was preempted", "failed": "failed", "done": "was done", "running": "was killed"}.get(
        str(state)
    )
    text = f"resumed at step {start.get('step')}" + (f": the process before {how}" if how else "")
    if start.get("ranks") != before.get("ranks"):
        text += f"; {before.get('ranks')} → {start.get('ranks')} ranks"
    return text


def _rollbacks(run: Run) -> Iterator[Node]:
    found = run.history.get("rolled_back")
    for one in found if isinstance(found, list) else ():
        if isinstance(one, dict):
            yield one


def _some(found: list[Mark]) -> list[Mark]:
    if len(found) <= _MOST:
        return found
    return [found[i * len(found) // _MOST] for i in range(_MOST)]


def _rising(steps: Iterable[int]) -> Sequence[int]:
    """The highest step so far at each record: after a rollback steps come again."""
    highest, found = 0, []
    for step in steps:
        highest = max(highest, step)
        found.append(highest)
    return found


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
