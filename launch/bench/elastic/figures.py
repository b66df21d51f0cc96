"""What a run and its kills come to, from what its processes have noted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from launch.bench.elastic.notes import Step, Unit

Figures = dict[str, Any]
_USUAL = 20  # windows before a kill


class Kill(NamedTuple):
    """When which place was killed."""

    time: float
    place: int
    pid: int


def of_kill(kill: Kill, until: float, steps: Sequence[Step]) -> Figures:
    """What came after a kill, until the next one; ``seconds`` is None where no window was finished any more.

    Those that were in flight and that nobody's death has held up still count as before it.
    """
    before = [step for step in steps if step.time <= kill.time]
    who = before[-1][1:2] + before[-1][3:]
    after = [step for step in steps if kill.time < step.time <= until]
    changed = [i for i, step in enumerate(after) if step[1:2] + step[3:] != who]
    while changed and after[: changed[0]]:
        before.append(after.pop(0))
        changed = [i - 1 for i in changed]
    reached = before[-1].step
    again = [step for step in after if step.step > reached] if changed else []
    usual = [b.time - a.time for a, b in pairwise(before[-_USUAL:])]
    whole = [step for step in after if step.ranks >= max(one.ranks for one in before)]
    found: Figures = {"at": kill.time, "place": kill.place, "window_s": median(usual), "reached": reached}
    found["seconds"] = again[0].time - kill.time if again else None
    found["first"] = after[0].time - kill.time if changed else None
    found["windows again"] = max(0, reached - after[0].step + 1) if changed else None
    found["back"] = whole[0].time - kill.time if whole else None
    found["joining_s"] = _pause_before(whole[0], steps) if whole and changed else None
    return found


def _pause_before(step: Step, steps: Sequence[Step]) -> float | None:
    i = steps.index(step)
    return step.time - steps[i - 1].time if i and steps[i - 1].ranks < step.ranks else None


def work_lost(units: Sequence[Unit], since: float, until: float) -> int:
    """Micro-batches that were begun a second time within that time."""
    seen: set[int] = set()
    lost = 0
    for unit in sorted(units):
        lost += unit.content in seen and since <= unit.time < until
        seen.add(unit.content)
    return lost


def rate(steps: Sequence[Step], since: float, until: float, batch: int, ranks: int, *, shrinks: bool) -> float:
    """Samples a second by which the run gets on; a gradient that ``shrinks`` has fewer samples on fewer ranks."""
    inside = [step for step in steps if since < step.time <= until]
    furthest = max((step.step for step in steps if step.time <= since), default=0)
    samples = 0.0
    for step in inside:
        if step.step > furthest:
            furthest = step.step
            samples += batch * step.ranks / ranks if shrinks else batch
    return samples / (until - since)


def spread(values: Sequence[float | None]) -> str:
    """Smallest, median and largest of those that there are."""
    known = [value for value in values if value is not None]
    return f"{min(known):.2f} / {median(known):.2f} / {max(known):.2f}" if known else "-"
