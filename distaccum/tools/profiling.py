"""Profiles some windows of a run: a table of what took the time, and per rank a trace and a snapshot of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from distaccum.checkpoint.files import listed, write_json, write_text
from distaccum.config.trainer import ProfileConfig
from distaccum.data.hooks import WindowHook
from distaccum.distributed.activity import Phase
from distaccum.engines.base import Engine
from distaccum.errors import ConfigError
from distaccum.train.parts.base import Part

if TYPE_CHECKING:
    from rich.console import Console

    from distaccum.train.loop import Loop


# Where the time of a process's windows goes: the phases of its loop, marked as they begin, on the clock that counts.
#
# A phase is an attribute that the loop writes (:mod:`distaccum.distributed.activity`), watched here. Every moment
# between the first mark and the last belongs to one row, so that the rows of a window add up to its wall time.

ROWS = {
    "loading": "waiting for the window's data",
    "count": "the count's all-reduce: waiting for the ranks that still load",
    "copy": "copying micro-batches to the device",
    "forward": "forwards and losses",
    "backward": "backwards, with what they communicate meanwhile",
    "reduction": "what of the gradient's reduction is left when the last gradient is computed",
    "step": "norm, clipping, the optimizer's step, zeroing",
    "record": "the record's reduction, and reading it",
    "evaluation": "evaluations",
    "save": "saves",
    "other": "everything else: callbacks, logging, the loop itself",
}
_OF_PHASE = {
    Phase.LOADING: "loading",
    Phase.COUNTING: "count",
    Phase.COPYING: "copy",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.REDUCTION: "reduction",
    Phase.STEP: "step",
    Phase.RECORD: "record",
    Phase.EVALUATION: "evaluation",
    Phase.SAVE: "save",
}
Seconds = dict[str, float]


class Clock(Protocol):
    """Marks moments, and tells the seconds between two of them once both have happened."""

    def now(self) -> Any:
        """This moment."""

    def between(self, first: Any, second: Any) -> float:
        """Seconds."""


class HostClock:
    """The host's clock, for a CPU, where work is done when a call returns."""

    def now(self) -> float:
        """See :class:`Clock`."""
        return perf_counter()

    def between(self, first: float, second: float) -> float:
        """See :class:`Clock`."""
        return second - first


class DeviceClock:
    """A GPU's: moments are events on the stream that computes, which the host is ahead of.

    A phase lasts from when the stream gets to what it queues until it has done it. While the host does not keep up, the
    stream waits: that time belongs to the phase that the host is in. Nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """See :class:`Clock`."""
        own = torch.get_device_module(self._device)
        event = own.Event(enable_timing=True)
        event.record(own.current_stream(self._device))
        return event

    def between(self, first: Any, second: Any) -> float:
        """See :class:`Clock`."""
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3


class Timeline(WindowHook):
    """The marks of consecutive windows: a hook, and a :class:`~distaccum.distributed.activity.Watcher`.

    Args:
        clock: of this rank's device.
        show: told the name of each range as it begins, for a trace; never within a backward.
    """

    def __init__(self, clock: Clock, show: Callable[[str], None]) -> None:
        self._clock, self._show = clock, show
        self._marks: list[tuple[str, Any]] = []
        self._ends: list[tuple[int, int]] = []  # of each window: the marks before its end, and its number in the run
        self._phase = Phase.BETWEEN
        self._mark("other")

    def enter(self, phase: Phase) -> None:
        """Begins a phase."""
        row = _OF_PHASE.get(phase, "other")
        if phase is Phase.LOADING and self._phase is Phase.COUNTING:  # the data are there, the window begins
            row = "other"
        self._phase = phase
        self._mark(row)
        self._show("backward and reduction" if phase is Phase.REDUCTION else row)

    def before_backward(self, loss: Tensor) -> None:
        """Begins a backward; what is left of it when the gradients are computed is the reduction's.

        Autograd calls back in the order in which it was asked, when it has computed all gradients. A backward's first
        hook, the loss's own, asks before an engine's hooks do, which then wait for their collectives.
        """
        self._mark("backward")
        if not loss.requires_grad:
            return

        def computed() -> None:  # maybe in a thread of autograd's
            self._mark("reduction")

        def began(_: Tensor) -> None:
            hook.remove()
            Variable._execution_engine.queue_callback(computed)

        hook = loss.register_hook(began)  # type: ignore[no-untyped-call]

    def end_window(self, number: int) -> None:
        """Ends a window, the ``number``-th of the run; the next one begins."""
        self._mark("other")
        self._ends.append((len(self._marks) - 1, number))

    @property
    def windows(self) -> int:
        """Windows that have ended."""
        return len(self._ends)

    def rows(self) -> list[Seconds]:
        """For every window that has ended the seconds of each of :data:`ROWS`, ``wall``, and ``window``, its number."""
        found, first = [], 0
        for last, number in self._ends:
            seconds: Seconds = dict.fromkeys(ROWS, 0.0)
            for (row, begins), (_, ends) in zip(
                self._marks[first:last], self._marks[first + 1 : last + 1], strict=True
            ):
                seconds[row] += self._clock.between(begins, ends)
            wall = self._clock.between(self._marks[first][1], self._marks[last][1])
            found.append({"window": number, "wall": wall, **seconds})
            first = last
        return found

    def _mark(self, row: str) -> None:
        self._marks.append((row, self._clock.now()))


# What a profile says to people: the table of phases, per window and over the ranks, and who waits for whom.

_OWN = {"loading": ("loading",), "computing": ("copy", "forward", "backward")}
_MEETING = {"loading": "count", "computing": "reduction"}
_WORTH = 0.05  # of a window: a wait that is worth a sentence
_LEAST_S = 1e-3


class PhaseTable:
    """The times of all ranks.

    Args:
        by_rank: of every rank its windows, as :meth:`~distaccum.tools.profiling.Timeline.rows` gives them; as many on
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
                    f"rank {last} is waited for: {what} takes it {_ms(own[last])} ms a step, the others' median is "
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
        which = f"step {self._first}" if windows == 1 else f"steps {self._first} to {self._first + windows - 1}"
        return f"{which} of this process, {_ms(self._means[0]['wall'])} ms each (clock of the {self._device})"

    @property
    def _columns(self) -> Sequence[str]:
        return ("ms a step", "share", *(("min", "median", "max", "slowest rank") if len(self._means) > 1 else ()))

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


_log = logging.getLogger(__name__)
_HISTORY = 200_000  # allocations that a snapshot remembers


class Profiler(Part):
    """Profiles the windows of ``profile.steps``; off until then, and again after them.

    Windows are those that this process runs, counted from 1: a process that resumes a run counts anew. A window begins
    where its data are asked for and ends where the next one's are, so that what a record, an evaluation or a save
    between two takes is the first one's. Nothing here draws a random number or touches a tensor of the training.

    Args:
        config: what is wanted.
        engine: whose windows are profiled.
        folder: gets ``table.md``, ``table.json`` and the files of each rank.
        console: of rank 0, for the table.
    """

    def __init__(self, config: ProfileConfig, engine: Engine, folder: Path, *, console: Console | None) -> None:
        assert config.steps is not None
        self._config, self._engine, self._world = config, engine, engine.world
        self._folder, self._console = folder, console
        self._first, self._last = config.steps
        self._done = 0  # windows of this process
        self._range: Any = None
        self._pushed = False
        self._trace: Any = None
        self._timeline: Timeline | None = None
        self._left = True  # whether there is something to write still

    @staticmethod
    def check(config: ProfileConfig, device: torch.device, total_steps: int) -> None:
        """Refuses what this device cannot give, and windows that the run does not get to.

        Raises:
            ConfigError: either.
        """
        for name in ("memory", "nvtx"):
            if getattr(config, name) and device.type != "cuda":
                problem = f"is for a GPU, and this rank computes on {device.type}"
                remedy = "Leave it out: profile.steps alone says where the time goes"
                raise ConfigError(f"profile.{name}", True, problem, remedy)
        if config.steps[0] > total_steps:
            problem = f"begins after the last of the run's {total_steps} updates"
            raise ConfigError("profile.steps", config.steps, problem, "Name earlier windows, or make more updates")

    def begins(self, _: Loop) -> None:
        """Begins, if the first window is to be profiled."""
        self._prepare_next()

    def between_windows(self, run: Loop) -> None:
        """Writes the profile after its last window."""
        if not self._left:
            return
        self._done += 1
        if self._timeline is not None:
            self._timeline.end_window(self._world.activity.window)
        if self._done < self._last:
            self._prepare_next()
            return
        self._stop()
        run.resolve()
        with run.paused("writing the profile"):
            self.write()

    def windows_ended(self, _: Loop) -> None:
        """Ends a profile whose last window the run has not come to."""
        if not self._left:
            return
        asked = f"profile.steps=[{self._first}, {self._last}]"
        if self._timeline is None or not self._timeline.windows:
            self.close()
            if self._world.is_main:
                _log.warning("%s: the run has ended after window %d, and nothing is profiled", asked, self._done)
            return
        self._stop()
        if self._world.is_main:
            _log.warning("%s: the run has ended after window %d, and the profile ends there", asked, self._done)

    def leaves(self, run: Loop) -> None:
        """Writes a profile that has ended with the run."""
        if self._left:
            with run.paused("writing the profile"):
                self.write()

    def write(self) -> None:
        """Writes the files, whole or not at all, and prints the table; a collective.

        What cannot be written is warned of: it does not end the training.
        """
        assert self._timeline is not None
        self._left = False
        by_rank = self._world.all_gather_object(self._timeline.rows())
        device = "host" if self._world.device.type == "cpu" else "device"
        communicates = self._engine.facts.forward_communicates
        table = PhaseTable(by_rank, first=self._first, forward_communicates=communicates, device=device)
        try:
            self._folder.mkdir(exist_ok=True)
            if self._world.is_main:
                self._remove_other_ranks()
                write_text(self._folder / "table.md", table.markdown())
                write_json(self._folder / "table.json", table.values())
            if self._config.memory:
                self._write("memory.pickle", torch.cuda.memory._dump_snapshot)
            if self._trace is not None:
                self._write("trace.json.gz", self._trace.export_chrome_trace)
        except OSError as error:
            _log.warning("the profile is not whole, the training goes on: %s", error)
        finally:
            self.close()
        if self._console is not None:
            for line in (*table.lines(), f"profile: {self._folder}"):
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Ends what still runs, and writes nothing."""
        running = self._timeline is not None and self._left
        self._stop()
        if self._config.memory and self._timeline is not None:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._trace = self._timeline = None
        if running and self._world.is_main:
            _log.warning("profile.steps=[%d, %d]: the run has ended there, without a profile", self._first, self._last)
        self._left = False

    def _prepare_next(self) -> None:
        """Starts with the window that comes next, if it is the first; the window before that is torch's to warm up."""
        coming = self._done + 1
        if self._config.trace and coming in (self._first, self._first - 1) and self._trace is None:
            cuda = self._world.device.type == "cuda"
            activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] * cuda)]
            self._trace = torch.profiler.profile(activities=activities, with_stack=self._config.with_stack)
            self._trace.prepare_trace()
        if coming != self._first:
            return
        if self._trace is not None:
            self._trace.start_trace()
        if self._config.memory:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)
        if self._config.nvtx:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        clock = HostClock() if self._world.device.type == "cpu" else DeviceClock(self._world.device)
        self._timeline = Timeline(clock, self._show)
        self._world.activity.watch(self._timeline)
        self._engine.hooks.add(self._timeline)

    def _stop(self) -> None:
        """Ends the ranges and the trace, which keeps what it has."""
        if self._world.activity.watcher is None:
            return
        assert self._timeline is not None
        self._world.activity.watch(None)
        self._engine.hooks.remove(self._timeline)
        self._show("")
        if self._world.device.type != "cpu":
            own = torch.get_device_module(self._world.device)
            own.synchronize(self._world.device)  # what was queued belongs to the last window
        if self._config.nvtx:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        if self._trace is not None:
            self._trace.stop_trace()

    def _show(self, name: str) -> None:
        """Ends the range that is open, and begins another where there is a name."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._pushed:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
            self._pushed = False
        if name and self._trace is not None:
            self._range = torch.profiler.record_function(name)
            self._range.__enter__()
        if name and self._config.nvtx:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
            self._pushed = True

    def _write(self, kind: str, write: Callable[[str], object]) -> None:
        """A file of this rank, by another name until it is whole."""
        name = f"rank-{self._world.rank}.{kind}"
        part = self._folder / f".{name.replace('.', '.part.', 1)}"
        try:
            write(str(part))
            part.replace(self._folder / name)
        except RuntimeError as error:  # of torch's own writers
            raise OSError(f"{name}: {error}") from error
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def _remove_other_ranks(self) -> None:
        """Those of an earlier profile in this folder, on more ranks or with more files."""
        for path in listed(self._folder, "rank-*"):
            rank = path.name.removeprefix("rank-").partition(".")[0]
            gone = rank.isdecimal() and int(rank) >= self._world.size
            unwanted = (path.name.endswith("trace.json.gz") and not self._config.trace) or (
                path.name.endswith("memory.pickle") and not self._config.memory
            )
            if gone or unwanted:
                path.unlink(missing_ok=True)
