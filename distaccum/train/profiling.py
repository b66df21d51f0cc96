"""Profiles some windows of a run: a table of what took the time, and per rank a trace and a snapshot of memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distaccum.checkpoint.files import listed, write_json, write_text
from distaccum.config.schema import ProfileConfig
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.train.phase_table import PhaseTable
from distaccum.train.timeline import DeviceClock, HostClock, Timeline

if TYPE_CHECKING:
    from rich.console import Console

_log = logging.getLogger(__name__)
_HISTORY = 200_000  # allocations that a snapshot remembers


def check_profile(config: ProfileConfig, device: torch.device, total_steps: int) -> None:
    """Refuses what this device cannot give, and windows that the run does not get to.

    Raises:
        ConfigError: either.
    """
    for name in ("memory", "nvtx"):
        if getattr(config, name) and device.type != "cuda":
            remedy = "Leave it out: profile.steps alone says where the time goes"
            raise ConfigError(f"profile.{name}", True, f"is for a GPU, and this rank computes on {device.type}", remedy)
    if config.steps is not None and config.steps[0] > total_steps:
        problem = f"begins after the last of the run's {total_steps} updates"
        raise ConfigError("profile.steps", config.steps, problem, "Name earlier windows, or make more updates")


class Profiler:
    """Profiles the windows of ``profile.steps``; off until then, and again after them.

    Windows are those that this process runs, counted from 1: a process that resumes a run counts anew. A window begins
    where its data are asked for and ends where the next one's are, so that what a record, an evaluation or a save
    between two takes is the first one's. Nothing here draws a random number or touches a tensor of the training.

    Args:
        config: what is wanted.
        world: this rank.
        folder: gets ``table.md``, ``table.json`` and the files of each rank.
        forward_communicates: of the engine.
        console: of rank 0, for the table.
    """

    def __init__(
        self, config: ProfileConfig, world: World, folder: Path, *, forward_communicates: bool, console: Console | None
    ) -> None:
        assert config.steps is not None
        self._config, self._world, self._folder, self._console = config, world, folder, console
        self._communicates = forward_communicates
        self._first, self._last = config.steps
        self._done = 0  # windows of this process
        self._range: Any = None
        self._pushed = False
        self._trace: Any = None
        self._timeline: Timeline | None = None
        self._left = True  # whether there is something to write still

    def begin(self) -> None:
        """Before the first window."""
        self._prepare_next()

    def window_ended(self) -> bool:
        """After every window; returns whether the last one of the profile is done, and :meth:`write` is to be called.

        It is the same on every rank.
        """
        if not self._left:
            return False
        self._done += 1
        if self._timeline is not None:
            self._timeline.end_window(self._world.activity.window)
        if self._done >= self._last:
            self._stop()
            return True
        self._prepare_next()
        return False

    def run_ends(self) -> bool:
        """After the last window of the run; returns whether :meth:`write` is to be called, for the windows there are.

        It is the same on every rank.
        """
        if not self._left:
            return False
        asked = f"profile.steps=[{self._first}, {self._last}]"
        if self._timeline is None or not self._timeline.windows:
            self.close()
            if self._world.is_main:
                _log.warning("%s: the run has ended after window %d, and nothing is profiled", asked, self._done)
            return False
        self._stop()
        if self._world.is_main:
            _log.warning("%s: the run has ended after window %d, and the profile ends there", asked, self._done)
        return True

    def write(self) -> None:
        """Writes the files, whole or not at all, and prints the table; a collective.

        What cannot be written is warned of: it does not end the training.
        """
        assert self._timeline is not None
        self._left = False
        by_rank = self._world.all_gather_object(self._timeline.rows())
        device = "device" if self._world.device.type == "cuda" else "host"
        table = PhaseTable(by_rank, first=self._first, forward_communicates=self._communicates, device=device)
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
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or its library prints that it begins and ends
            cuda = self._world.device.type == "cuda"
            activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] * cuda)]
            self._trace = torch.profiler.profile(
                activities=activities, record_shapes=self._config.shapes, with_stack=self._config.with_stack
            )
            self._trace.prepare_trace()
        if coming != self._first:
            return
        if self._trace is not None:
            self._trace.start_trace()
        if self._config.memory:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)
        if self._config.nvtx:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        clock = DeviceClock(self._world.device) if self._world.device.type == "cuda" else HostClock()
        self._timeline = Timeline(clock, self._show)
        self._world.activity.watch(self._timeline)

    def _stop(self) -> None:
        """Ends the ranges and the trace, which keeps what it has."""
        if self._world.activity.watcher is None:
            return
        self._world.activity.watch(None)
        self._show("")
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # what was queued belongs to the last window
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
