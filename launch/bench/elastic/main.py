"""What it costs that a process dies: an elastic run, torchrun's restarts, torchft; a table and a plot.

``python launch/bench elastic`` or, with some of its keys, ``python launch/bench elastic kills=20 ways=[elastic]``.
Every way trains the CNN on handwritten digits on ``ranks`` processes, with windows of ``batch`` samples in
micro-batches of ``micro``, with ``trainer.verify=never``. From ``quiet_s`` seconds after the first window on, one
process, picked by chance, is killed by SIGKILL every ``every_s`` seconds; where not all ranks are back by then, once
they are. ``restart`` saves a checkpoint every ``checkpoint`` windows. For ``torchft`` the variable TORCHFT_PYTHON names
the interpreter that has it; ``lighthouse`` are the flags of its server, by default those of its README.

The processes note each window and micro-batch themselves (``notes.py``). A micro-batch that is computed again is work
lost. Runs go to ``out``/WAY; table, plot and JSON to ``out``.

``costs=true`` (root) kills nobody, and measures what an elastic run costs then (``costs.py``): ``pairs`` of runs on two
and on ``ranks`` ranks.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distaccum.errors import ConfigError
from distaccum.tools.plan.settings_command import plot_file
from launch.bench.elastic import costs, figures, plots
from launch.bench.elastic.figures import Kill, of_kill, spread, work_lost
from launch.bench.elastic.notes import Step, steps_of, units_of
from launch.bench.elastic.ways import LIGHTHOUSE, WAYS, MainJob, Torchft, Way
from launch.bench.tables import as_markdown

_LIMIT_S = 180.0
_SETTLED_S = 2.0  # with all ranks
Figures = dict[str, Any]


@dataclass
class Options:
    """The keys of the command line."""

    ways: list[str] = field(default_factory=lambda: ["elastic", "restart"])
    ranks: int = 4
    kills: int = 20
    batch: int = 48
    micro: int = 4
    channels: int = 64
    every_s: float = 20.0
    quiet_s: float = 15.0
    checkpoint: int = 25
    seed: int = 0
    costs: bool = False
    pairs: int = 3
    windows: int = 100
    out: Path = Path("runs/elastic")
    plot: Path | None = None  # by default in ``out``
    overrides: list[str] = field(default_factory=list)  # of the main job
    lighthouse: list[str] = field(default_factory=lambda: list(LIGHTHOUSE))


class StoppedError(Exception):
    """A run that does not go on."""


def run(way: Way, options: Options) -> list[Kill]:
    """Runs the job and kills; returns whom, and when.

    Raises:
        StoppedError: the run has not gone on within three minutes.
    """
    chance, kills = random.Random(options.seed), list[Kill]()  # noqa: S311  of moments
    with way:
        _await(way, bool)
        due = monotonic() + options.quiet_s
        for _ in range(options.kills):
            sleep(max(0.0, due - monotonic()))
            _await_all(way, kills)
            sleep(chance.random() / 4)
            place = chance.choice([place for place in range(options.ranks) if not kills or place != kills[-1].place])
            pid = way.workers()[place]
            os.kill(pid, signal.SIGKILL)
            kills.append(Kill(monotonic(), place, pid))
            due = kills[-1].time + options.every_s
        sleep(max(0.0, due - monotonic()))
        _await_all(way, kills)
    return kills


def _await_all(way: Way, kills: Sequence[Kill]) -> None:
    """Waits until all ranks have been there for a while, and the run is further than it was at the last kill."""

    def met(steps: Sequence[Step]) -> bool:
        now = monotonic()
        recent = [step for step in steps if step.time > now - _SETTLED_S]
        longest = max((b.time - a.time for a, b in pairwise(recent)), default=_SETTLED_S)
        reached = max((step.step for step in steps if kills and step.time <= kills[-1].time), default=0)
        is_whole = all(step.ranks == way.ranks and step.step > reached for step in recent)
        return is_whole and longest < _SETTLED_S / 2

    _await(way, met)


def _await(way: Way, met: Callable[[Sequence[Step]], bool]) -> None:
    latest = monotonic() + _LIMIT_S
    while not met(steps_of(way.folder)):
        if monotonic() > latest or way.has_ended():
            raise StoppedError(f"{way.name} does not go on: see {way.folder}/output")
        sleep(0.1)


def summary(way: Way, kills: list[Kill], options: Options) -> Figures:
    """The figures of a run, each kill's among them."""
    steps, units = steps_of(way.folder), units_of(way.folder)
    shrinks = isinstance(way, Torchft)
    end = steps[-1].time
    untils = [*(kill.time for kill in kills[1:]), end]
    each = []
    for kill, until in zip(kills, untils, strict=True):
        each.append({**of_kill(kill, until, steps), "units again": work_lost(units, kill.time, until)})
    start = steps[0].time
    batch, ranks = options.batch, options.ranks
    rates = {
        "undisturbed": figures.rate(
            steps, kills[0].time - options.quiet_s + 2, kills[0].time, batch, ranks, shrinks=False
        ),
        "with kills": figures.rate(steps, kills[0].time, end, batch, ranks, shrinks=shrinks),
    }
    progress, furthest = [], 0
    for step in steps:
        if step.step > furthest:
            furthest = step.step
            progress.append((step.time - start, batch * step.ranks / ranks if shrinks else batch))
    fewer = sum(step.ranks < ranks for step in steps if step.time > kills[0].time)
    return {
        "each": each,
        **rates,
        "windows of fewer ranks": fewer,
        "progress": progress,
        "kills": [kill.time - start for kill in kills],
        "whole": [kill["at"] + kill["back"] - start for kill in each if kill["back"] is not None],
        "lasted_s": end - start,
    }


def table(runs: dict[str, Figures], options: Options) -> str:
    """Markdown: one line for each way."""
    rows = [
        [
            "per kill: min / median / max",
            "s to the next window",
            "over a window",
            "windows again",
            "micro-batches again",
            "s until all ranks are back",
            "s to a window with them",
            "samples/s with kills over without",
        ]
    ]
    for name, one in runs.items():
        each = one["each"]
        rows.append(
            [
                name,
                spread([kill["seconds"] for kill in each]),
                spread([kill["seconds"] and kill["seconds"] / kill["window_s"] for kill in each]),
                spread([kill["windows again"] for kill in each]),
                spread([kill["units again"] for kill in each]),
                spread([kill["back"] for kill in each]),
                spread([kill["joining_s"] for kill in each]),
                f"{one['with kills']:.0f} / {one['undisturbed']:.0f} = {one['with kills'] / one['undisturbed']:.2f}",
            ]
        )
    about = f"{options.ranks} ranks, {options.kills} kills, one every {options.every_s:g} s or more"
    return f"{about}\n\n{as_markdown(rows)}"


def compare(options: Options, plot: Path | None) -> str:
    """Runs every way; Markdown, and a plot."""
    runs = dict[str, Figures]()
    for name in options.ways:
        folder = _fresh(options.out / name)
        way = _way(name, folder, options.ranks, options)
        runs[name] = summary(way, run(way, options), options)
        (folder / "elastic.json").write_text(json.dumps(runs[name]))
    if plot is not None:
        plots.draw(runs, plot)
    return table(runs, options)


def measure_costs(options: Options) -> str:
    """Markdown: a line for each way on each number of ranks."""
    lines = [costs.HEAD]
    until = costs.TIMED_FROM + options.windows
    for ranks in sorted({2, options.ranks}):
        runs: dict[str, list[Figures]] = {"elastic": [], "restart": []}
        for _ in range(options.pairs):
            for name, found in runs.items():
                folder = _fresh(options.out / f"costs-{name}-{ranks}")
                way = _way(name, folder, ranks, options, costs.overrides(folder, until))
                assert isinstance(way, MainJob)
                way.before = costs.ALONE
                with way:
                    if way.wait():
                        raise StoppedError(f"{name} has failed: see {folder}/output")
                found.append(costs.of_run(folder))
        lines += costs.rows(ranks, runs)
    return as_markdown(lines)


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _way(name: str, folder: Path, ranks: int, options: Options, more: Sequence[str] = ()) -> Way:
    own = options.lighthouse if WAYS[name] is Torchft else options.overrides
    sizes = {"batch": options.batch, "micro": options.micro, "every": options.checkpoint, "channels": options.channels}
    return WAYS[name](folder, ranks=ranks, **sizes, options=(*own, *more))


def main() -> int:
    """Runs the command; returns its exit code."""
    try:
        given = OmegaConf.merge(OmegaConf.structured(Options), OmegaConf.from_cli())
        options = cast(Options, OmegaConf.to_object(given))
        plot = plot_file("plot", options.plot, options.out / "elastic.png")
    except OmegaConfBaseException as error:
        return _complain(f"{str(error).splitlines()[0]}. Its keys: {', '.join(vars(Options()))}")
    except ConfigError as error:
        return _complain(str(error))
    unknown = [name for name in options.ways if name not in WAYS]
    if unknown or not options.ways:
        return _complain(f"no such way: {', '.join(unknown)}. There are {', '.join(WAYS)}")
    if "torchft" in options.ways and "TORCHFT_PYTHON" not in os.environ:
        return _complain("name the interpreter that has torchft as TORCHFT_PYTHON")
    try:
        text = measure_costs(options) if options.costs else compare(options, plot)
    except StoppedError as error:
        _complain(str(error))
        return 1
    (options.out / ("costs.md" if options.costs else "elastic.md")).write_text(text)
    print(text)  # noqa: T201
    return 0


def _complain(problem: str) -> int:
    """Prints one line on stderr; returns the exit code of bad settings."""
    print(f"elastic: {problem}", file=sys.stderr)  # noqa: T201
    return 2
