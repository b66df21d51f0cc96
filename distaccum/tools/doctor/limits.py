"""Probes with a limit: each looks in a process of its own, which is killed when its time is over.

A thread would not do: a driver, a library or a file system that hangs may hold Python's lock, and what crashes would
end the doctor. A process that waits for a dead disk cannot even be killed; it is left behind, and nobody waits for it.

Processes are forked, so a probe costs milliseconds and needs no pickling. Torch must not have opened a GPU before.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from distaccum.config.secrets import redact_text, values_of_environment
from distaccum.tools.doctor.facts import Look

_PR_SET_PDEATHSIG = 1  # prctl(2)
_CHUNK = 2**16
NO_ANSWER, UNSEEN = "no answer within", "could not be looked at"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A question about one place.

    ``act`` answers within ``limit_s`` seconds or is told of under ``name``; ``mend`` is for who wonders why it did not.
    """

    name: str
    act: Callable[[], Look]
    limit_s: float
    mend: str = ""


@dataclass
class Running:
    """A probe whose process has been started."""

    probe: Probe
    pid: int
    pipe: int
    began: float = field(default_factory=monotonic)

    def result(self) -> Look:
        """What the probe has found: its look, or a look that says why there is none. Waits until its time is over."""
        answer = bytearray()
        try:
            while chunk := self._read():
                answer += chunk
        except TimeoutError:
            self.end()
            look = Look()
            said = f"{NO_ANSWER} {self.probe.limit_s:.0f} s"
            look.tell(self.probe.name, said)
            if self.probe.mend:
                look.find(f"{self.probe.name}: {said}", self.probe.mend)
            return look
        finally:
            os.close(self.pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with suppress(ValueError):
            found: dict[str, Any] = json.loads(answer)
            return Look.from_json(found) if "facts" in found else _unseen(self.probe.name, found["error"])
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return _unseen(self.probe.name, f"its process {how}")

    def end(self) -> None:
        """Kills the process and what it has started; one that cannot be killed is left."""
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)  # before it has a group of its own
        with suppress(OSError):
            os.waitpid(self.pid, os.WNOHANG)

    def _read(self) -> bytes:
        left = self.began + self.probe.limit_s - monotonic()
        if not select.select([self.pipe], [], [], max(0.0, left))[0]:
            raise TimeoutError
        return os.read(self.pipe, _CHUNK)


def start(probe: Probe) -> Running:
    """Starts the process of a probe."""
    ours, its = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks beside threads: libraries' own, which survive a fork
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(ours)
            _answer(probe, its)
            code = 0
        finally:
            os._exit(code)  # without the exit handlers of what has been imported
    os.close(its)
    return Running(probe, pid, ours)


def look(probe: Probe) -> Look:
    """What a probe has found; see :meth:`Running.result`."""
    running = start(probe)
    try:
        return running.result()
    except BaseException:  # Ctrl-C, above all
        running.end()
        raise


def _answer(probe: Probe, pipe: int) -> None:
    """In the probe's process: looks, in silence, and writes what it has found."""
    os.setsid()  # so that all that it starts ends with it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    sys.stdout = sys.stderr = os.fdopen(silent, "w")
    faulthandler.disable()
    warnings.simplefilter("ignore")
    try:
        found = probe.act().to_json()
    except BaseException as error:  # a row of the table, whatever it is
        found = {"error": reason(error)}
    answer = json.dumps(found).encode()
    while answer:
        answer = answer[os.write(pipe, answer) :]


def reason(error: BaseException) -> str:
    """An error in one short line, without secrets."""
    text = " ".join(str(error).split())
    most = 300
    text = redact_text(text if len(text) <= most else f"{text[:most]} ...", values_of_environment())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _unseen(name: str, why: str) -> Look:
    found = Look()
    found.tell(name, f"{UNSEEN}: {why}")
    return found
