"""The command ``python -m launch.soak [seed=1] [minutes=20] [out=runs/soak] [only=K] [from=K]``.

Runs are started as users do, and disturbed by the schedule of ``seed`` for so many minutes; then the last one goes on
to its end. ``only=K`` plays fault K alone, ``from=K`` leaves out those before. ``out`` has ``soak.jsonl``, a line for
each fault, and ``soak.md``, the table. Exit code 1 where a fault is not survived as documented: ``out``/failed then is
the run directory, ``out``/logs what it printed. A folder with files that no soak has made is refused. It needs Linux,
and a small tmpfs: the right to mount one, or user namespaces (``unshare``).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import NoReturn, Optional, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.soak.attempt import SoakError
from launch.soak.run import MountError, small_disk
from launch.soak.schedule import schedule
from launch.soak.soak import Soak, summary

_NAMESPACE = "DISTACCUM_SOAK_NAMESPACE"
_MARK = ".made-by-soak"
_BAD_SETTINGS = 2


@dataclass
class Options:
    """The keys of the command line, and ``from``."""

    seed: int = 1
    minutes: float = 20
    out: Path = Path("runs/soak")
    only: Optional[int] = None  # noqa: UP045  OmegaConf reads no `|`
    since: int = 1  # from=K


def run(options: Options) -> int:
    """Plays the schedule; returns the exit code."""
    out = options.out.resolve()
    began = monotonic()
    _make(out)
    with small_disk(out / "disk"):
        soak = Soak(
            out,
            out / "disk",
            time_is_over=lambda: monotonic() - began > 60 * options.minutes and options.only is None,
            say=_say,
        )
        try:
            for played in schedule(options.seed):
                faults = [fault for fault in played.faults if _is_wanted(fault.number, options)]
                if faults:
                    soak.play(replace(played, faults=tuple(faults)))
                last = played.faults[-1].number
                if monotonic() - began > 60 * options.minutes or (options.only is not None and last >= options.only):
                    break
        except SoakError as problem:
            return _complain(options, soak, problem)
    minutes = (monotonic() - began) / 60
    text = summary(soak.entries, soak.compared, minutes)
    (out / "soak.md").write_text(text + "\n")
    _say(text)
    shutil.rmtree(out / "logs", ignore_errors=True)
    return 0


class NotOursError(Exception):
    """The folder is not one that a soak has made."""


def _make(out: Path) -> None:
    """Makes the folder anew, which begins with a mark.

    Raises:
        NotOursError: there is something without it, which is not a soak's to delete.
    """
    mark = out / _MARK
    if out.exists() and not mark.is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise NotOursError(f"out={out} holds what no soak has made; nothing is deleted. Name a new folder")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _is_wanted(number: int, options: Options) -> bool:
    return number == options.only if options.only is not None else number >= options.since


def _complain(options: Options, soak: Soak, problem: SoakError) -> int:
    fault = soak.now
    _say(f"FAILED at fault {fault.number if fault else '-'} ({fault}): {problem}")
    _say(f"{len(soak.entries)} faults were handled before. Run directory: {soak.out}/failed; output: {soak.out}/logs")
    if fault is not None:
        command = f"python -m launch.soak seed={options.seed}"
        _say(f"to replay: {command} only={fault.number}, or with the rest: {command} from={fault.number}")
    return 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _stop(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _options(arguments: list[str]) -> Options:
    named = [f"since={a.partition('=')[2]}" if a.startswith("from=") else a for a in arguments]
    given = OmegaConf.merge(OmegaConf.structured(Options), OmegaConf.from_cli(named))
    return cast(Options, OmegaConf.to_object(given))


def _in_own_namespace() -> NoReturn:
    """Starts anew where everybody may mount."""
    own = ["unshare", "--user", "--map-root-user", "--mount"]
    command = [*own, sys.executable, "-m", "launch.soak", *sys.argv[1:]]
    os.execvpe(command[0], command, {**os.environ, _NAMESPACE: "1"})  # noqa: S606  as the user asks


def main() -> int:
    """Runs the command; returns its exit code."""
    try:
        options = _options(sys.argv[1:])
    except OmegaConfBaseException as error:
        _say(f"soak: {str(error).splitlines()[0]}. Its keys: seed, minutes, out, only, from")
        return _BAD_SETTINGS
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        return run(options)
    except NotOursError as error:
        _say(f"soak: {error}")
        return _BAD_SETTINGS
    except MountError as error:
        if _NAMESPACE in os.environ or shutil.which("unshare") is None:
            _say(f"soak: {error}. It needs root's rights, or user namespaces (unshare)")
            return _BAD_SETTINGS
    _in_own_namespace()
