"""``distaccum launch PROGRAM``: a program of one's own on all GPUs of this machine, by torchrun in this process.

``launch/train.sh`` starts the main job in the same way, once it has checked it.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Timer
from time import monotonic, sleep
from types import FrameType
from typing import Any

from distaccum import program
from distaccum.distributed.signals import FROM_THE_TERMINAL, leave_terminal
from distaccum.errors import ConfigError
from distaccum.tools.arguments import Arguments

_EPILOG = """\
examples:
  distaccum launch own_loop.py --epochs 3
  distaccum launch --nproc=2 own_loop.py
  distaccum launch -m my_package.train

Options stand before the program; whatever follows it is the program's.
--nproc=auto, the default, is a process for each GPU, or one on the CPU.
exit codes: 0 all processes ended with 0; 2 nothing was started; else that of
the first process that failed
"""
_AUTO = "auto"
# Told to leave, the workers save. torchrun would end with an error and a traceback whatever they do, so these signals
# are passed on here, and to the workers alone.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LEFT_TO_TORCHRUN = "SIGQUIT"
_ONE_PRESS_S = 0.3


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; ends with its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    program.start(given[:1])  # what stands behind the program is the program's
    options = _parsed(given)
    try:
        processes, relay = _processes(options), Relay()
    except ConfigError as error:
        program.complain(f"distaccum launch: {error}\n")
        sys.exit(program.BAD_ARGUMENTS)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415  not for a help

    target = [*(["-m"] if options.module else []), options.program, *options.arguments]
    try:
        relay.torchrun(processes, ["--no-python", *_with_threads(processes), sys.executable, *target], quiet=True)
    except ChildFailedError as error:
        if relay.told_by:
            sys.exit(128 + relay.told_by)
        rank, first = error.get_first_failure()
        ended = f"rank {rank} of {processes} {how_it_ended(first)} (process {first.pid})"
        sys.stderr.write(f"distaccum launch: {options.program}: {ended}; what it has printed says why\n")
        sys.exit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode)


def _parsed(given: Sequence[str]) -> argparse.Namespace:
    parser = Arguments("launch", "Starts a program on all GPUs of this machine, a process each.", _EPILOG)
    parser.add_argument(
        "--nproc", default="", metavar="N", help="processes; auto: one for each GPU, or one (default: NPROC)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as for python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a Python file, as own_loop.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser.of(given)


def _processes(options: argparse.Namespace) -> int:
    """How many processes to start.

    Raises:
        ConfigError: no such number or program; or this process is itself one of several of a launcher.
    """
    number = stated_processes(options.nproc) or _AUTO
    if not options.module and not Path(options.program).is_file():
        raise ConfigError("PROGRAM", options.program, "no such file", "Name a Python file, or use -m for a module")
    from distaccum.distributed.environment import LaunchEnvironment  # noqa: PLC0415  not for a help

    if LaunchEnvironment.from_environment().launched:
        raise ConfigError("RANK", os.environ["RANK"], "a launcher has started this process", "Start it once, without")
    if number != _AUTO:
        return int(number)
    from distaccum.tools.accelerators import accelerators  # noqa: PLC0415  not for a help

    return accelerators()[1] or 1


def stated_processes(option: str) -> str:
    """``--nproc`` or the variable NPROC: a number, ``auto``, or empty.

    Raises:
        ConfigError: it is something else.
    """
    key, number = ("--nproc", option) if option else ("NPROC", os.environ.get("NPROC", ""))
    if number not in ("", _AUTO) and not (number.isdecimal() and int(number)):
        raise ConfigError(key, number, "is no number of processes", "Use 1 or more, or auto: one for each GPU")
    return number


def how_it_ended(failed: Any, more: str = "") -> str:
    """In words, how a process ended that torchrun tells of as failed."""
    by_signal = failed.exitcode < 0
    return f"was killed by {failed.signal_name()}" if by_signal else f"ended with exit code {failed.exitcode}{more}"


class Relay:
    """Passes signals on to the workers, which have ``SHUTDOWN_TIMEOUT`` seconds to save.

    A second Ctrl-C ends them at once.
    Where SIGHUP is ignored, as under ``nohup``, it stays ignored.

    Raises:
        ConfigError: ``SHUTDOWN_TIMEOUT`` is no number of seconds.
    """

    def __init__(self) -> None:
        self.has_workers = False
        """Whether the children are workers; before there is only the check."""
        self.told_by = 0
        """The first signal; 0 before."""
        stated = os.environ.get("SHUTDOWN_TIMEOUT", "120")
        if not stated.replace(".", "", 1).isdecimal():
            raise ConfigError("SHUTDOWN_TIMEOUT", stated, "is no number of seconds", "Give seconds, as 120")
        self._grace_s = float(stated)
        self._pressed_at = 0.0
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN or number not in FROM_THE_TERMINAL:
                signal.signal(number, self._pass_on)

    def torchrun(self, processes: int, program: Sequence[str], *, quiet: bool = False) -> None:
        """Runs so many processes of a program, with its arguments, by torchrun in this process, whose log may be quiet.

        Raises:
            ChildFailedError: one of them has failed.
        """
        from torch.distributed import run  # noqa: PLC0415  not for a help

        for name in list(logging.root.manager.loggerDict) if quiet else ():
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
        sys.argv[0] = run.__file__  # torchrun's own messages name it
        options = ["--standalone", f"--nproc-per-node={processes}", f"--signals-to-handle={_LEFT_TO_TORCHRUN}"]
        self.has_workers = True
        run.main([*options, f"--shutdown-timeout={self._grace_s:.0f}", *program])

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        workers = _children() if self.has_workers else []
        if number == signal.SIGHUP:
            leave_terminal()
        if not workers:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os._exit(128 + number)
        again = number == signal.SIGINT and 0 < self._pressed_at < monotonic() - _ONE_PRESS_S
        if number == signal.SIGINT:
            self._pressed_at = self._pressed_at or monotonic()
        _signal(workers, number)
        if again:
            self._end(workers)
        if not self.told_by:
            self.told_by = number
            timer = Timer(self._grace_s, _signal, (workers, signal.SIGKILL))
            timer.daemon = True
            timer.start()

    def _end(self, workers: list[int]) -> None:
        latest = monotonic() + 5
        while monotonic() < latest and not set(workers).isdisjoint(_children()):
            sleep(0.02)
        _signal(workers, signal.SIGKILL)
        os._exit(128 + signal.SIGINT)


def _signal(processes: list[int], number: int) -> None:
    """Of a worker that is killed, its whole session: it may have loading processes."""
    for pid in processes:
        with suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL and os.getsid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


def _children() -> list[int]:
    """This process's children that have not ended."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = file.read_text().rpartition(") ")[2].split()[:2]
            if int(parent) == os.getpid() and state not in "ZX":
                found.append(int(file.parent.name))
    return found


def _with_threads(processes: int) -> list[str]:
    """The beginning of a command that has a process's share of the cores as threads, unless the user has said so."""
    return ["env", f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', -(-cores() // processes))}"]


def cores() -> int:
    """The cores that this process may use: a container or a batch system may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
