"""What distaccum does on a GPU: ``python launch/bench gpu part=correct`` (or ``speed``, ``size``, ``all``).

``profile=first`` is for the first minutes on a machine: some of all parts in an order of worth, each with a limit of
its own (``first.py``), and all output in one ``first.log``.

Each measurement runs in a fresh process, so that a CUDA error, memory that has run out or a hang is that one's alone.
It needs neither a network nor W&B; rich and matplotlib are used where they are installed. ``report.json`` in the run
directory is written anew after each measurement, and has all that was run there: ``part=speed`` after ``part=correct``
with the same ``hydra.run.dir`` adds to it. At the end a table is printed and ``report.md`` and a PNG for each part are
written.

The exit code is 1 if a measurement failed or a target does not hold, and 2 for settings that cannot be.

This process imports no torch: a GPU has no room for one that only waits.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from distaccum.config.checks import require, require_choice, require_positive
from distaccum.errors import ConfigError
from distaccum.tools.plan.settings_command import command
from launch.bench.gpu import plots
from launch.bench.gpu.processes import Answer, ask
from launch.bench.gpu.report import Measured, Report

PARTS = {name: f"launch.bench.gpu.{name}" for name in ("correct", "speed", "size")}
FIRST = {"first": "launch.bench.gpu.first"}
LOOK_S = 180.0  # for the machine and the names of all measurements: torch is imported from a cold disk
WHOLE = "(all)"  # the name under which a part stands that cannot be imported
SHARE = 0.5  # of a part's time that one measurement has at most: one that hangs leaves some to those after it
LEAST_S = 10.0  # a measurement is not begun with less: a process takes as long to start


def check(values: Mapping[str, Any], parts: Mapping[str, str] = PARTS) -> None:
    """Raises ConfigError for settings that cannot be; names of measurements are looked at later."""
    require_choice("part", values["part"], (*parts, "all"))
    require_choice("profile", values["profile"], (None, *FIRST))
    require_choice("small", values["small"], ("auto", True, False))
    minutes = values["minutes"]
    number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    require(number, "minutes", minutes, "is no number", "Give the minutes of a part, such as 9")
    require_positive("minutes", minutes)
    listed = isinstance(values["only"], list) and all(isinstance(name, str) for name in values["only"])
    require(listed, "only", values["only"], "is no list of names", "Write only=[tests,engines], for example")


def chosen(names: Mapping[str, Sequence[str]], only: Sequence[str], broken: Mapping[str, str]) -> list[tuple[str, str]]:
    """The part and name of each measurement to run, in their order.

    Raises:
        ConfigError: ``only`` names one that these parts do not have, but for the ``broken`` ones.
    """
    known = [name for part in names.values() for name in part]
    lost = "".join(f"; {part} cannot be imported: {why}" for part, why in broken.items())
    for name in only:
        require(
            name in known, "only", name, f"is no measurement here{lost}", f"Use some of {', '.join(map(repr, known))}"
        )
    return [(part, name) for part, own in names.items() for name in own if not only or name in only]


def run(values: Mapping[str, Any], folder: Path, parts: Mapping[str, str] = PARTS) -> int:
    """Measures as the settings say, writes the report, prints it; returns the exit code.

    Args:
        values: of ``conf/gpu.yaml``.
        folder: the run directory.
        parts: the module of each part.

    Raises:
        ConfigError: a setting cannot be, or the folder has the report of another machine.
    """
    check(values, parts)
    part, only = values["part"], values["only"]
    wanted = FIRST if values["profile"] else parts if part == "all" else {part: parts[part]}
    with TemporaryDirectory(prefix="distaccum-gpu-") as temporary:
        answers = Path(temporary)
        found = ask({"look": wanted}, answers / "look.json", log=answers / "look.log", limit_s=LOOK_S)
        if found.error:
            raise ConfigError("part", part, f"cannot be run here: {found.error}", "See what the last line says")
        machine, names, broken = (found.content[key] for key in ("machine", "names", "broken"))
        asked = chosen(names, only, broken)
        small = not machine["cuda"] if values["small"] == "auto" else values["small"]
        report = Report.of(folder, machine, options={**values, "small": small, "commit": machine["commit"]})
        for own in wanted:
            report.forget(own, WHOLE)
        unread = [] if only else [(own, WHOLE) for own in broken]
        for own, name in unread:
            report.add(Measured(part=own, name=name, small=small, error=f"cannot be imported: {broken[own]}"))
        ends, seconds = dict[str, float](), 60 * values["minutes"]
        for own, name in asked:
            left = ends.setdefault(own, monotonic() + seconds) - monotonic()
            limit = min(left, found.content["limits"].get(name, SHARE * seconds))
            report.add(_measure(wanted[own], own, name, small=small, folder=folder, answers=answers, limit_s=limit))
    report.finish()
    if find_spec("matplotlib") is not None:
        for part, measured in report.parts.items():
            plots.draw(measured, f"{part}: {report.title}", folder / f"{part}.png")
    return int(not report.good(unread + asked))


def _measure(
    module: str, part: str, name: str, *, small: bool, folder: Path, answers: Path, limit_s: float
) -> Measured:
    """Runs one measurement for so long at most; its output is kept in ``logs``."""
    measured = Measured(part=part, name=name, small=small)
    if limit_s < LEAST_S:
        return measured.left_out("no time was left in this part: raise minutes, or name it in only=[...]")
    print(f"{part}: {name}", file=sys.stderr, flush=True)  # noqa: T201  minutes may pass before the table
    file = re.sub(r"\W+", "-", f"{part} {name}")
    log = (answers if part in FIRST else folder / "logs") / f"{file}.log"
    log.parent.mkdir(exist_ok=True)
    began = monotonic()
    asked = {"module": module, "name": name, "small": small}
    answer: Answer = ask(asked, answers / f"{file}.json", log=log, limit_s=limit_s)
    if part in FIRST:
        with (folder / f"{part}.log").open("a") as together:
            together.write(f"=== {name}\n{log.read_text(errors='replace')}\n")
    figures, seconds = answer.content.get("figures", []), monotonic() - began
    return measured.done(figures, error=answer.error, said=answer.said, seconds=seconds)


def main() -> int:
    """Runs the command; returns its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or what is measuring would go on alone
    return command("gpu", run)
