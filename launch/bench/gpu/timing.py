"""Times on a device: of loops in turn, and of single pieces of work."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch

from launch.bench.variant import Step

_FILLER_CYCLES = 20_000_000  # of a GPU's clock: about 10 ms, in which the host queues what is timed
_AT_LEAST = 2  # rounds, however long they take
Seconds = dict[str, list[float]]


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of_windows(
    steps: Mapping[str, Step], device: torch.device, *, windows: int, rounds: int, within_s: float
) -> Seconds:
    """Seconds a window of each loop, by round: the loops in turn, so many windows at a time.

    After ``within_s`` no further round is begun, from the third on.
    """
    found: Seconds = {name: [] for name in steps}
    latest = perf_counter() + within_s
    synchronize(device)
    for done in range(rounds):
        if done >= _AT_LEAST and perf_counter() > latest:
            break
        for name, step in steps.items():
            began = perf_counter()
            for _ in range(windows):
                step()
            synchronize(device)
            found[name].append((perf_counter() - began) / windows)
    return found


def device_seconds(
    works: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> Seconds:
    """The device's own seconds of each work, by round, in turn; ``before`` is called before each, and not timed.

    On a GPU between two events, behind a kernel that keeps it busy while the host queues the work: launches that the
    host is late with would be timed else, and are hidden in training.
    """
    if device.type != "cuda":
        return _host_seconds(works, rounds, before)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            before()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(_FILLER_CYCLES)
            start.record()
            work()
            end.record()
            torch.cuda.synchronize(device)
            events[name].append((start, end))
    return {name: [start.elapsed_time(end) / 1e3 for start, end in pairs] for name, pairs in events.items()}


def _host_seconds(works: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object]) -> Seconds:
    found: Seconds = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            before()
            began = perf_counter()
            work()
            found[name].append(perf_counter() - began)
    return found


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Minimum and median of the ratios by round."""
    found = [one / other for one, other in zip(ours, theirs, strict=True)]
    return min(found), statistics.median(found)
