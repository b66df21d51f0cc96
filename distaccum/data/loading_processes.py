"""What became of loading processes: torch's own words are ``EOFError`` or "exited unexpectedly"."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import TypeVar
from weakref import finalize

from distaccum.distributed.memory import is_out_of_memory, out_of_memory
from distaccum.distributed.signals import ignore_stop_signals
from distaccum.distributed.world import World
from distaccum.errors import DataError

_T = TypeVar("_T")
_SHARED_MEMORY, _CGROUP = Path("/dev/shm"), Path("/sys/fs/cgroup")  # noqa: S108  where torch puts batches
MORE_SHARED_MEMORY = "give it more (docker run --shm-size=8g, or an emptyDir with medium: Memory)"
_LESS_AHEAD = "prefetch_windows=0 loads less ahead"
_MIB = 2**20
_ENDS_WITHIN_S = 2.0
_KILLED = re.compile(r"DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: (?P<signal>[^.]+)\..*")


def begin(_: int = 0) -> None:
    """In a loading process, before its first sample (a ``worker_init_fn``): what concerns the training is left to it.

    Stop signals are, see :func:`~distaccum.distributed.signals.ignore_stop_signals`; and a connection that ends because
    the training process was killed is no error to be told, where torch prints twenty lines.
    """
    ignore_stop_signals()
    training, tell = os.getppid(), sys.excepthook

    def tell_what_is_new(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        deadline = monotonic() + (_ENDS_WITHIN_S if isinstance(error, EOFError | ConnectionError) else 0)
        while os.getppid() == training:  # connections close before their process has ended
            if monotonic() >= deadline:
                tell(kind, error, traceback)
                return
            sleep(0.01)

    sys.excepthook = tell_what_is_new


class WorkerInit:
    """A ``worker_init_fn`` that leaves to the training process what concerns it, and calls the user's."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        """In a loading process, before its first sample."""
        begin(worker)
        if self._users is not None:
            self._users(worker)


class Iteration:
    """The latest iterator of what may start loading processes, kept until the next one, or until nobody has this.

    A ``DataLoader``'s iterator that is part of a cycle must not be garbage together with it: Python's collector ends
    its queues first, so that its processes are not told to end, and it waits five seconds for each of them.
    """

    def __init__(self) -> None:
        self._kept: list[object] = []
        finalize(self, self._kept.clear).atexit = False

    def begin(self, source: Iterable[_T]) -> Iterator[_T]:
        """``iter(source)``, which may fork loading processes; they destroy no garbage of this process."""
        iterator = _iterate(source)
        self._kept[:] = [iterator]
        return iterator


def _iterate(source: Iterable[_T]) -> Iterator[_T]:
    """``iter(source)``, whose processes leave the garbage alone that they inherit.

    Their own collector would destroy it there, without the threads that it belongs to: objects of torch's crash then.
    It leaves alone what is frozen when they are forked. A program that keeps frozen objects of its own, which would
    thaw with the others, collects its garbage before instead: a second in a process of millions of objects.
    """
    if gc.get_freeze_count():
        if getattr(source, "num_workers", 0):
            gc.collect()
        return iter(source)
    gc.freeze()
    try:
        return iter(source)
    finally:
        gc.unfreeze()


def children() -> list[BaseProcess]:
    """This process's loading processes, to be kept: one that has ended is not listed any more."""
    return active_children()


def explain(problem: Exception, processes: Sequence[BaseProcess], what: str, world: World) -> Exception:
    """The error that names the process that has died, or says that memory is over; else ``problem`` itself.

    Args:
        problem: from torch's ``DataLoader``.
        processes: what :func:`children` gave when they were started.
        what: was being loaded.
        world: this rank.
    """
    dead = _ended(processes, within_s=_ENDS_WITHIN_S if isinstance(problem, EOFError | ConnectionError) else 0)
    if not dead and is_out_of_memory(problem):  # here: the other ranks are told of it next
        over = out_of_memory(problem, world)
        over.__cause__ = problem
        return over
    if not dead:
        return problem
    codes = sorted({process.exitcode for process in dead if process.exitcode is not None})
    pids = ", ".join(str(process.pid) for process in dead)
    how, remedy = _cause(codes[0])
    error = DataError(f"the loading process {pids} {how} while {what} was loaded. {remedy}")
    error.__cause__ = problem
    return error


def _ended(processes: Sequence[BaseProcess], *, within_s: float) -> list[BaseProcess]:
    """Those that have failed, or fail so soon: a connection closes before the end of its process is known."""
    deadline = monotonic() + within_s
    while True:
        try:
            while not (dead := [process for process in processes if process.exitcode]) and monotonic() < deadline:
                sleep(0.01)
        except RuntimeError:  # torch's handler raises it wherever this process stands when it is told of an end
            continue
        return dead


def explain_late(problem: Exception) -> Exception:
    """The same for what torch raises wherever the training process is when a loading process dies; else ``problem``."""
    said = (str(problem).splitlines() or [""])[0].strip()
    found = _KILLED.fullmatch(said) if isinstance(problem, RuntimeError) else None
    if found is None:
        return problem
    numbers = [number for number in signal.Signals if signal.strsignal(number) == found["signal"]]
    how, remedy = _cause(-numbers[0]) if numbers else (f"was killed ({found['signal']})", "")
    error = DataError(f"the loading process {found['pid']} {how} while it loaded ahead. {remedy}")
    error.__cause__ = problem
    return error


def _cause(code: int) -> tuple[str, str]:
    if code >= 0:
        return f"ended with exit code {code}", "Its own message says why; num_workers=0 loads without one"
    name = signal.Signals(-code).name
    if -code == signal.SIGBUS:
        what = f"Batches travel through {_SHARED_MEMORY}, which {_free_shared_memory()}"
        return f"was killed by {name}", f"{what}: {MORE_SHARED_MEMORY}, or lower num_workers. {_LESS_AHEAD}"
    if -code == signal.SIGKILL:
        remedy = f"Lower num_workers, or give it more memory; {_SHARED_MEMORY} {_free_shared_memory()}. {_LESS_AHEAD}"
        return f"was killed by {name}, as the kernel does when memory is over{_memory_limit()},", remedy
    return f"was killed by {name}", "num_workers=0 loads in the training process, where it shows its stack"


def shared_memory() -> float:
    """The bytes of the memory that batches travel through, used or not; infinite where there is no telling."""
    with suppress(OSError):
        found = os.statvfs(_SHARED_MEMORY)
        return found.f_bsize * found.f_blocks
    return float("inf")


def _free_shared_memory() -> str:
    with suppress(OSError):
        found = os.statvfs(_SHARED_MEMORY)
        size = found.f_frsize / _MIB
        return f"has {found.f_bavail * size:,.0f} of {found.f_blocks * size:,.0f} MiB free"
    return "does not exist"


def _memory_limit() -> str:
    with suppress(OSError, ValueError):
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return f" (this container uses {used / _MIB:,.0f} of {limit / _MIB:,.0f} MiB)"
    return ""
