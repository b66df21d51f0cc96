"""One owner of a run directory: the lock ``owner.json``, which one run holds and which tells the others who that is.

It belongs to a dead run, and is taken over, if its process is gone from this machine; if the same job holds it that
Slurm has started again; or, where the process is on another machine, if it was not touched for ``STALE_S`` seconds by
the clock of the file system, or for two beats where it has the job's rendezvous id: two jobs may have the same one, and
both live. Who judges it locks the folder (``flock``). Where a file system has no such
locks two may take over at one moment; the first of them finds the other's name at its next status, and ends.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from threading import Event, Thread
from time import sleep
from types import TracebackType

from distaccum.checkpoint.files import retried
from distaccum.errors import ConfigError, DistaccumError

_log = logging.getLogger(__name__)

BEAT_S = 15.0
STALE_S = 300.0
NAME = "owner.json"
_TORCHRUN = "torchrun "
_UNNAMED = ("", "none", "distaccum")  # what torchrun's --rdzv-id is where nobody has given one


class OwnershipLostError(DistaccumError, RuntimeError):
    """Another run has taken the run directory over, as this process gave no sign of life for too long."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where process numbers mean the same: a host between two boots, and in it a container."""

    host: str
    boot: str
    namespace: str

    @classmethod
    def here(cls) -> Machine:
        """This process's."""
        boot = namespace = ""
        with suppress(OSError):  # Linux only
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115  not a path
        return cls(host=socket.gethostname(), boot=boot, namespace=namespace)


def process_start(pid: int) -> str | None:
    """When a process of this machine started, in its kernel's ticks; None if it is gone, or only not waited for yet."""
    if sys.platform == "linux":
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if state in "ZX" else fields[18]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return ""
    return ""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The content of ``owner.json``.

    ``job`` and ``attempt``: what Slurm or torchrun starts again, and how often it has. ``launch``: the same for all
    ranks that were started together. ``generation``: of an elastic run, whose first rank it is in that one.
    """

    machine: Machine
    pid: int
    started: str
    since: str
    job: str
    attempt: int
    launch: str
    token: str
    generation: int = 0

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Holder:
        """This process, with a token of its own."""
        job, attempt = _job(environment)
        return cls(
            machine=Machine.here(),
            pid=os.getpid(),
            started=process_start(os.getpid()) or "",
            since=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
            job=job,
            attempt=attempt,
            launch=launch(environment),
            token=token_hex(8),
        )

    @property
    def who(self) -> str:
        """For people."""
        return f"process {self.pid} on {self.machine.host}, since {self.since}"

    @property
    def runs(self) -> bool:
        """Whether its process runs on this machine, and is not another one of the same number."""
        return process_start(self.pid) == self.started


def launch(environment: Mapping[str, str] = os.environ) -> str:
    """A name that all ranks which were started together have, and no others."""
    if "RANK" not in environment:
        return f"{socket.gethostname()} {os.getpid()}"
    return " ".join(environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often Slurm or torchrun has started this job again."""
    counts = (environment.get(name, "") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    return sum(int(count) for count in counts if count.isdecimal())


def _job(environment: Mapping[str, str]) -> tuple[str, int]:
    if number := environment.get("SLURM_JOB_ID", ""):
        return f"slurm {environment.get('SLURM_CLUSTER_NAME', '')} {number}", restarts(environment)
    name = environment.get("TORCHELASTIC_RUN_ID", "")
    return ("", 0) if name in _UNNAMED else (f"{_TORCHRUN}{name}", restarts(environment))


def read_holder(folder: Path) -> Holder | None:
    """Who holds a run directory; None if nobody does.

    Raises:
        ValueError: the lock is no record of a holder.
    """
    path = folder / NAME
    try:
        text = retried(path.read_bytes, of=path)
    except FileNotFoundError:
        return None
    try:
        record = json.loads(text)
        return Holder(**{**record, "machine": Machine(**record["machine"])})
    except (TypeError, KeyError) as error:
        raise ValueError(str(error)) from error


class Owner:
    """Holds the lock of ``folder`` for the block; a thread touches it, so that other machines see a sign of life.

    Args:
        folder: the run directory.

    Raises:
        ConfigError: another run holds it, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self.holder = Holder.here()
        self._touched = 0.0  # when it was, the last time that somebody looked
        self._ended = Event()
        self._thread = Thread(target=self._beat, name="run-directory-owner", daemon=True)

    def __enter__(self) -> Owner:
        """Takes the lock, and over from a dead run; the log tells of that."""
        try:
            self._take()
        except OSError as error:
            raise _unwritable(self._path.parent, error) from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives the lock back, unless it is another run's by now."""
        self._ended.set()
        self._thread.join()
        with suppress(OSError, OwnershipLostError):
            self.require()
            self._path.unlink()

    def require(self) -> None:
        """Raises OwnershipLostError if another run has taken the folder over; one read of a small file.

        One that has ended since has taken the lock away with it.
        """
        try:
            holder = read_holder(self._path.parent)
        except ValueError:
            return
        if holder is None:
            problem = f"{self._path} is gone: another run has taken the folder over and ended, or somebody removed it"
            raise OwnershipLostError(f"{problem}. This process writes nothing more there, and ends")
        if holder.token != self.holder.token:
            problem = f"{self._path.parent} was taken over by {holder.who}: this process gave no sign of life before"
            raise OwnershipLostError(f"{problem}. It writes nothing more there, and ends")

    def _take(self) -> None:
        waits = False
        while (held := self._try()) is not None:
            if not waits:
                _log.warning("%s is held by %s: waiting for a sign of life of it", self._path.parent, held)
            waits = True
            sleep(BEAT_S / 5)

    def _try(self) -> str | None:
        """Takes the lock; or returns who holds it, of whom nobody knows whether it lives."""
        with _locked(self._path.parent):
            while not self._create():
                other, who = None, "a process whose name cannot be read"
                with suppress(ValueError):
                    if (other := read_holder(self._path.parent)) is None:
                        continue
                    who = other.who
                reason = self.why_dead(other)
                if reason is None and self._is_alive(other):
                    raise _refusal(self._path, who)
                if reason is None:
                    return who
                _log.warning("%s was held by %s, which %s: taken over", self._path.parent, who, reason)
                self._path.unlink(missing_ok=True)
        return None

    def _create(self) -> bool:
        """Makes the lock; False if there is one."""
        try:
            file = self._path.open("x")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(json.dumps(asdict(self.holder), indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:  # no room for it
            self._path.unlink()
            raise
        return True

    def why_dead(self, other: Holder | None) -> str | None:
        """Why the holder is taken over; None if it may live."""
        mine = self.holder
        if other is not None and other.machine == mine.machine:
            if not other.runs:
                return "is gone"
            return "is this process itself" if other.pid == mine.pid else None
        again, age = other is not None and other.job != "" and other.job == mine.job, self._age()
        named = again and mine.job.startswith(_TORCHRUN)
        if (named and age > 2 * BEAT_S) or (again and not named and other is not None and other.attempt < mine.attempt):
            return f"was an earlier attempt of this job ({mine.job})"
        return f"has given no sign of life for {age:.0f} s" if age > STALE_S else None

    def _is_alive(self, other: Holder | None) -> bool:
        if other is not None and other.machine == self.holder.machine:
            return True
        before, self._touched = self._touched, self._path.stat().st_mtime
        if before not in (0.0, self._touched):
            return True
        named = other is not None and other.job == self.holder.job and other.job.startswith(_TORCHRUN)
        return not named and self._age() <= 2 * BEAT_S  # torchrun may just have ended one of this job's

    def _age(self) -> float:
        """Seconds since the lock was touched, by the clock of the file system that holds it."""
        now = self._path.with_name(f".owner-{self.holder.token}")
        now.touch()
        try:
            return now.stat().st_mtime - self._path.stat().st_mtime
        except FileNotFoundError:
            return 0.0
        finally:
            now.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(OSError, OwnershipLostError):
                self.require()
                os.utime(self._path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time judges and takes over, where the file system knows such locks."""
    descriptor = retried(lambda: os.open(folder, os.O_RDONLY))
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def refuse_if_held(folder: Path) -> None:
    """Raises ConfigError if a live run holds the folder; takes and changes nothing."""
    try:
        other = read_holder(folder)
    except (OSError, ValueError):
        return
    if other is not None and other.machine == Machine.here() and other.pid != os.getpid() and other.runs:
        raise _refusal(folder / NAME, other.who)


def _refusal(path: Path, who: str) -> ConfigError:
    remedy = (
        f"Wait for it or stop it, or choose another folder. A run on another machine that is dead loses the folder "
        f"{STALE_S:.0f} s after its last sign of life"
    )
    return ConfigError("hydra.run.dir", path.parent, f"is another run's ({who})", remedy)


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    remedy = "Choose a folder that you can write to, or make room"
    return ConfigError("hydra.run.dir", folder, f"cannot be written ({error.strerror})", remedy)
