"""What ended a rank that could not say so itself: a killed process, or one that left by ``os._exit``.

Each rank keeps one small file in ``.ranks`` of the run directory: its process, and what it is doing. A thread of every
rank waits, in the kernel, for the ends of the other ranks' processes on this machine. One that ends before its file
says so is the cause of what follows on the others, and goes into the run's status with its signal or exit code: Linux
tells it of a process that its launcher has not waited for yet.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from types import TracebackType

from distaccum.distributed.watchdog import crash_of
from distaccum.train.failure import apart
from distaccum.train.owner import Machine, process_start
from distaccum.train.run_dir import RunDir

_log = logging.getLogger(__name__)

_BYTES = 512  # of a rank's file, whose blocks are taken when it is made: a full disk does not hide what a rank does
_LOOK_AGAIN_MS = 100
_JOINS_WITHIN_S = 120.0
_GRACE_S = 2.0
_ENDED = "ended"
UNSEEN = "ended without a word"
"""How a rank has ended that its launcher had waited for before another rank looked: the launcher knows more."""
JOINING = "joining the process group"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    rank: int
    pid: int
    started: str
    machine: Machine
    phase: str

    @classmethod
    def read(cls, path: Path) -> _Entry | None:
        try:
            record = json.loads(path.read_bytes().rstrip(b"\n "))
            return cls(**{**record, "machine": Machine(**record["machine"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None


class Peers:
    """This rank's file, and the thread that watches the other ranks of this machine; within the block.

    Args:
        run_dir: the same on all ranks, or a rank is not watched.
        rank: this one.
        local_size: the ranks on this machine; 1 for none to watch.
    """

    def __init__(self, run_dir: RunDir, *, rank: int, local_size: int) -> None:
        self._run_dir, self._rank, self._local_size = run_dir, rank, local_size
        self._machine = Machine.here()
        self._phase = JOINING
        self._descriptor = -1
        self._found, self._stopped = Event(), Event()
        self._reader, self._writer = os.pipe()
        self._known: dict[int, tuple[int, Path]] = {}  # a descriptor of a process -> its number, its rank's file
        self._thread = Thread(target=self._watch, name="rank-watch", daemon=True)

    def __enter__(self) -> Peers:
        """Shows this rank to the others; a folder that takes no file leaves it unwatched."""
        self.show(self._run_dir)
        return self

    def show(self, run_dir: RunDir) -> None:
        """Shows this rank in rank 0's run directory, where it could not before: that was not made, or not known."""
        if run_dir.path == self._run_dir.path:
            self._run_dir = run_dir  # one object for this thread and the main one, which take turns in writing
        if self._descriptor < 0 and self._local_size > 1 and hasattr(os, "pidfd_open"):
            self._run_dir = run_dir
            with suppress(OSError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                self._descriptor = os.open(self._file(self._rank), flags, 0o644)
                self.enter_phase(self._phase)
                self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Says that this rank ends by itself, and stops watching."""
        self.enter_phase(_ENDED)
        self._stopped.set()
        os.write(self._writer, b".")
        if self._thread.is_alive():
            self._thread.join()
        for descriptor in (self._reader, self._writer, self._descriptor, *self._known):
            with suppress(OSError):  # -1 and below stand for none
                os.close(descriptor)
        self._descriptor = -1

    def enter_phase(self, phase: str) -> None:
        """Notes what this rank does from here on: one write of a small block, and none of a disk."""
        self._phase = phase
        if self._descriptor >= 0:
            pid = os.getpid()
            entry = _Entry(
                rank=self._rank, pid=pid, started=process_start(pid) or "", machine=self._machine, phase=phase
            )
            with suppress(OSError):
                os.pwrite(self._descriptor, json.dumps(asdict(entry)).encode().ljust(_BYTES), 0)

    def await_cause(self, timeout_s: float) -> None:
        """Waits until the end of another rank's process is in the status, or for so long: it may come late."""
        if self._thread.is_alive():
            self._found.wait(timeout_s)

    def _file(self, rank: int) -> Path:
        return self._run_dir.ranks / f"rank-{rank}.json"

    def _watch(self) -> None:
        poll, began = select.poll(), monotonic()
        poll.register(self._reader, select.POLLIN)
        while not self._stopped.is_set():
            looking = len(self._known) < self._local_size - 1 and monotonic() < began + _JOINS_WITHIN_S
            if looking:
                self._look_around(poll)
            for descriptor, _ in poll.poll(_LOOK_AGAIN_MS if looking else None):
                if descriptor != self._reader:
                    pid, path = self._known[descriptor]
                    code = _exit_code(pid)  # first of all: until its launcher has waited for it
                    poll.unregister(descriptor)
                    self._note(_Entry.read(path), code)

    def _look_around(self, poll: select.poll) -> None:
        others = set(self._run_dir.ranks.glob("rank-*.json")) - {self._file(self._rank)}
        for path in others - {path for _, path in self._known.values()}:
            entry = _Entry.read(path)
            if entry is None or entry.machine != self._machine:
                continue
            try:
                descriptor = os.pidfd_open(entry.pid)
            except OSError:  # gone already, and waited for
                self._known[-entry.rank - 2] = entry.pid, path  # no descriptor, and not looked at again
                self._note(entry, None)
                continue
            self._known[descriptor] = entry.pid, path
            poll.register(descriptor, select.POLLIN)

    def _note(self, entry: _Entry | None, code: int | None) -> None:
        """Writes the cause, unless the rank said itself that it ends; a group that it was to join never comes.

        A rank's file is gone where the run has ended on rank 0.
        """
        if entry is not None and entry.phase != _ENDED:
            reason = f"rank {entry.rank} {_how(code)} while {entry.phase} (process {entry.pid} on {entry.machine.host})"
            crash = crash_of(entry.rank, self._run_dir.hang)
            self._run_dir.write_failure(reason + crash + apart(crash))
            self._found.set()
        if self._phase == JOINING and not self._stopped.wait(_GRACE_S) and self._phase == JOINING:
            why = self._run_dir.failure() or "another rank has left"
            _log.error("the process group cannot be opened, and this rank ends: %s", why)
            self._run_dir.write_failure(why)
            sys.stderr.flush()
            os._exit(1)  # the main thread waits in the store for a rank that does not come, and takes no exception


def _how(code: int | None) -> str:
    if code is None:
        return UNSEEN
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = " (from outside, or by the kernel for memory: see dmesg)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit code {code} without an error of Python's"


def _exit_code(pid: int) -> int | None:
    """The exit code of a process that has ended, negative for a signal; None if its parent has waited for it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" else None
