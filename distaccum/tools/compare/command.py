"""``distaccum compare A B``: the first window in which two runs differ, and in what; nothing where they are the same.

Exit codes, as those of ``cmp``: 0 the same, 1 they differ, 2 they cannot be compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distaccum import program
from distaccum.errors import CheckpointError, ConfigError, shorten
from distaccum.tools.arguments import Arguments
from distaccum.tools.compare.difference import (
    ASPECTS,
    CONTENTS,
    COUNTS,
    DATA,
    GRADIENT,
    LOSS,
    RATE,
    SCALE,
    STEP,
    Tensors,
    WindowDifference,
    Windows,
    compare_checkpoints,
    compare_windows,
    same,
)
from distaccum.tools.report.compare import MISSING, differing
from distaccum.tools.report.read import Run, read_runs

_EPILOG = """\
Both runs need metrics.windows=true, which records every window; without it only logged windows can be compared. Times
and speeds are never compared.

examples:
  distaccum compare runs/before runs/after
  distaccum compare runs/before runs/after && echo the same
  distaccum compare runs/before runs/after --json

exit codes: 0 the same, as far as both go; 1 they differ; 2 they cannot be compared
"""
_DIFFER, _MISUSE = 1, 2
_MOST = 4  # settings and parameters that are named
_LONGEST = 60  # characters of a value
_WEIGHTS, _OPTIMIZER = "weights", "optimizer state"
_WIDTH = 17
_SILENT = ("metrics.", "resume", "objective", "profile.", "trainer.log_every", "checkpoint.")  # settings that train not


def main() -> None:
    """Runs ``distaccum compare``."""
    program.start()
    description = "Says the first window in which two runs differ, and in what. Silent where they are the same."
    parser = Arguments("compare", description, _EPILOG)
    parser.add_argument("a", type=Path, metavar="A", help="a run directory, as hydra.run.dir names it")
    parser.add_argument("b", type=Path, metavar="B", help="the one that it is compared with")
    parser.add_argument(
        "--json", action="store_true", help="the finding as one JSON object, also where nothing differs"
    )
    given = parser.of()
    try:
        runs = read_runs([given.a, given.b])
        finding = Finding(runs, [given.a, given.b])
    except ConfigError as error:
        parser.exit(_MISUSE, f"{parser.prog}: configuration error: {error}\n")
    except CheckpointError as error:
        parser.exit(_MISUSE, f"{parser.prog}: {error}\n")
    except OSError as error:
        parser.exit(_MISUSE, f"{parser.prog}: {error.filename}: {error.strerror}\n")
    if given.json:
        program.say(f"{json.dumps(finding.as_dict(), indent=2, default=str)}\n")
    else:
        program.say("".join(f"{line}\n" for line in finding.lines()))
        program.complain("".join(f"{parser.prog}: {note}\n" for note in finding.notes()))
    sys.exit(0 if finding.same else _DIFFER)


class Finding:
    """What two runs differ in first.

    Args:
        runs: A and B.
        given: their folders, as the user names them.

    Raises:
        ConfigError: nothing of them can be compared.
        CheckpointError: a checkpoint is damaged.
        OSError: a file cannot be read.
    """

    def __init__(self, runs: Sequence[Run], given: Sequence[Path]) -> None:
        self._runs = runs
        a, b = (run.path for run in runs)
        self.windows: Windows = compare_windows(a, b)
        first = self.windows.difference
        self.tensors: Tensors | None = compare_checkpoints(a, b, until=first.steps_before if first else None)
        if not self.windows.compared and self.tensors is None:
            problem = f"and {given[0]} have no window and no checkpoint in common"
            raise ConfigError("RUN", given[1], problem, "Record every window of both with metrics.windows=true")

    @property
    def same(self) -> bool:
        """Whether nothing differs in what both runs have."""
        return self.windows.difference is None and (self.tensors is None or self.tensors.same)

    def notes(self) -> Iterator[str]:
        """Of runs that are the same, in a line each, what was not compared."""
        if not self.same:
            return
        (a, b), windows = self.windows.last, self.windows
        if not windows.compared:
            yield f"no window of both is recorded; the checkpoints of step {self._step} are the same"
            return
        if windows.logged_only:
            kept = f", and the checkpoints of step {self._step}" if self.tensors is not None else ""
            yield f"{_counted(windows)}{kept} are the same; the others are not recorded ({self._without()})"
        elif windows.alone:
            many = "1 window" if windows.alone == 1 else f"{windows.alone} windows"
            yield f"{many} not compared: in windows.jsonl of one of them there is no line of it that can be read"
        if a != b:
            shorter, last, further = ("A", a, b) if a < b else ("B", b, a)
            yield f"the same as far as {shorter} goes: it ends with window {last}, the other with window {further}"

    @property
    def _step(self) -> int:
        return self.tensors.step if self.tensors is not None else 0

    def _without(self) -> str:
        names = [name for name, run in zip("AB", self._runs, strict=True) if not (run.path / "windows.jsonl").exists()]
        missing = f"no windows.jsonl in {' and '.join(names)}" if names else "windows.jsonl has others"
        return f"{missing}: metrics.windows=true"

    def lines(self) -> Iterator[str]:
        """The finding for a person; nothing where the runs are the same."""
        if self.same:
            return
        first, tensors = self.windows.difference, self.tensors
        if tensors is not None and not tensors.same:
            until = f"every window that was compared up to {self.windows.same_until} is the same"
            known = until if self.windows.same_until is not None else "no window before was compared"
            yield f"the checkpoint of step {tensors.step} is the first that differs; {known}"
            yield from _of_tensors(tensors)
        if first is not None:
            yield from self._of_window(first)
        yield from self._explained()

    def _of_window(self, first: WindowDifference) -> Iterator[str]:
        update = f"update {first.step}" if first.applied else f"skipped after update {first.step}"
        kind = "the first logged one" if self.windows.logged_only else "the first"
        yield f"window {first.window} (epoch {first.epoch}, {update}) is {kind} that differs"
        for aspect in first.values:
            yield _line(aspect, _said(first, aspect))
        if first.regrouped is not None:
            a, b = first.regrouped
            yield _line(CONTENTS, f"not compared: the samples are cut into other micro-batches ({a} in A, {b} in B)")
        unknown = {CONTENTS} if first.regrouped is not None or self.windows.logged_only else set()
        same_ones = [aspect for aspect in ASPECTS if aspect not in {*first.values, *unknown}]
        if same_ones:
            yield _line("the same", ", ".join(same_ones))
        if self.tensors is not None and self.tensors.same:
            yield _line(_WEIGHTS, f"the same at step {self.tensors.step}, the last checkpoint of both before it")
        elif self.tensors is None and first.steps_before:
            yield _line(_WEIGHTS, "not compared: no checkpoint of the same step before it")
        if self.windows.logged_only:
            before = self.windows.same_until
            since = f"since window {before}, the last that is the same" if before is not None else "from the beginning"
            yield _line("seen", f"logged windows alone ({self._without()}): the runs may differ {since}")

    def _explained(self) -> Iterator[str]:
        settings = self.settings()
        if settings:
            shown = [f"{key}: {_shown(a)} in A, {_shown(b)} in B" for key, (a, b) in settings.items()]
            yield _line("settings", _joined(shown))
        places = self.places()
        if places:
            shown = [f"{key}: {_shown(a)} in A, {_shown(b)} in B" for key, (a, b) in places.items()]
            yield _line("ran on", _joined(shown))
        if not settings and not places:
            yield _line("settings", "the same, as are the machine, the git commit and the versions")
        yield _line("that means", self.meaning())

    def settings(self) -> dict[str, tuple[Any, Any]]:
        """What the recorded settings differ in, but for those that do not train."""
        found = {key: (a, b) for key, (a, b) in differing(self._runs)}
        return {key: pair for key, pair in found.items() if not key.startswith(_SILENT)}

    def places(self) -> dict[str, tuple[Any, Any]]:
        """What the processes differ in that ran the first difference: ranks, host, device, commit, versions."""
        first = self.windows.difference
        at = first.window if first is not None else None
        a, b = (_place(run, at) for run in self._runs)
        return {key: (a.get(key), b.get(key)) for key in dict.fromkeys((*a, *b)) if a.get(key) != b.get(key)}

    def meaning(self) -> str:
        """What the first difference says of its cause."""
        first, tensors, before = self.windows.difference, self.tensors, self.windows.same_until
        if tensors is not None and not tensors.same:
            what = "the weights" if tensors.weights else "the optimizer's state, which moves the weights later,"
            steps = "the optimizer's step, or a change of the weights by hand"
            if before is None:
                return f"{what} differ before any window that was compared: look at the windows before"
            return f"every gradient norm is the same, and {what} are not: {steps}"
        assert first is not None
        aspect = next(iter(first.values))
        if self.windows.logged_only and aspect not in (DATA, COUNTS, RATE):
            return "what came first is not known: run both again with metrics.windows=true"
        meaning = self._of_loss(first) if aspect == LOSS else _MEANINGS[aspect]
        if aspect in (LOSS, GRADIENT) and first.regrouped is not None:
            meaning += ". The micro-batches are cut otherwise, which by itself moves last bits"
        elif aspect in (LOSS, GRADIENT) and "ranks" in self.places():
            meaning += ". Another number of ranks adds up in another order, which by itself moves last bits"
        return meaning

    def _of_loss(self, first: WindowDifference) -> str:
        before = self.windows.same_until
        forward = "the forward (code, kernels, threads, hardware, random numbers)"
        weighed = self.tensors is not None and self.tensors.step == first.steps_before
        if weighed:
            return f"the data is the same, and so are the weights before it: {forward}"
        if before is None:
            return f"the data is the same: the weights that it begins with, or {forward}"
        norms = f"and so are the gradient norms up to window {before}"
        return f"the data is the same, {norms}: {forward}; else the optimizer's step of window {before}"

    def as_dict(self) -> dict[str, Any]:
        """The finding for a program."""
        found: dict[str, Any] = {
            "same": self.same,
            "windows": asdict(self.windows),
            "tensors": None if self.tensors is None else asdict(self.tensors),
            "notes": list(self.notes()),
        }
        if not self.same:
            pairs = self.settings().items()
            settings = {key: [None if value is MISSING else value for value in pair] for key, pair in pairs}
            found |= {"settings": settings, "ran_on": self.places(), "meaning": self.meaning()}
        return found


_MEANINGS = {
    DATA: "the window holds other samples: seed, data set, global batch, or where a run has gone on",
    CONTENTS: "the same samples have other contents: the data, or what prepares and pads it",
    COUNTS: "the same data is counted otherwise: the loss's count",
    SCALE: "the loss scale of fp16 differs: its settings, or an overflow before",
    GRADIENT: "data and loss are the same: the backward, or the reduction between ranks",
    RATE: "data, loss and gradient are the same: the schedule, or the optimizer's settings",
    STEP: "the gradient is the same: what decides whether a window is applied (nonfinite, on_spike)",
}


def _line(name: str, text: str) -> str:
    return f"  {name:<{_WIDTH}}{text}"


def _counted(windows: Windows) -> str:
    kind = "logged window" if windows.logged_only else "window"
    return f"{windows.compared} {kind}{'' if windows.compared == 1 else 's'}"


def _joined(shown: Sequence[str]) -> str:
    left = len(shown) - _MOST
    return "; ".join(shown[:_MOST]) + (f"; and {left} more" if left > 0 else "")


def _shown(value: Any) -> str:
    text = "none" if value is MISSING or value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _said(first: WindowDifference, aspect: str) -> str:
    """What a line says of an aspect in which the window differs."""
    parts = [_pair(key, pair) for key, pair in first.values[aspect].items()]
    if aspect == GRADIENT and first.gradients:
        # The backward begins at the loss: the last of the model's order is where it has differed first.
        name, (a, b) = list(first.gradients.items())[-1]
        others = len(first.gradients) - 1
        more = f" (and {others} more parameter{'s' if others > 1 else ''})" if others else ""
        parts = [f"{name}: norm {_number(a)} in A, {_number(b)} in B{more}"]
    return "; ".join(parts)


def _pair(key: str, pair: tuple[Any, Any]) -> str:
    a, b = pair
    if key == "ids":
        return "other samples"
    if key == "contents":
        return "other contents"
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        names = [name for name in dict.fromkeys((*a, *b)) if not same(a.get(name), b.get(name))]
        return "; ".join(f"{name}: {_number(a.get(name))} in A, {_number(b.get(name))} in B" for name in names[:_MOST])
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"{len(a)} groups in A, {len(b)} in B"
        i = next(i for i, (one, other) in enumerate(zip(a, b, strict=True)) if not same(one, other))
        group = f"group {i}: " if len(a) > 1 else ""
        return f"{group}{_number(a[i])} in A, {_number(b[i])} in B"
    named = "" if key in ("loss", "loss_scale", "lr") else f"{key}: "
    return f"{named}{_number(a)} in A, {_number(b)} in B"


def _number(value: Any) -> str:
    return "none" if value is None else repr(value)


def _of_tensors(tensors: Tensors) -> Iterator[str]:
    for name, found in ((_WEIGHTS, tensors.weights), (_OPTIMIZER, tensors.optimizer)):
        yield _line(name, shorten(found, _MOST) if found else "the same")


def _place(run: Run, window: int | None) -> dict[str, Any]:
    """Where the process ran that trained on a window; None: the last one."""
    starts = [start for start in run.starts if window is None or int(start.get("window", 0)) < window]
    if not starts:
        return {}
    start = starts[-1]
    found = {key: start.get(key) for key in ("ranks", "host", "device", "git_commit")}
    versions = start.get("versions")
    return found | (versions if isinstance(versions, dict) else {})


if __name__ == "__main__":
    main()
