"""What became of loading processes: torch's own words are ``EOFError`` or "exited unexpectedly"."""

from __future__ import annotations

import errno
import gc
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic, perf_counter, sleep
from types import TracebackType
from typing import Any, TypeVar, cast
from weakref import finalize

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from distaccum.data.batches import map_tensors
from distaccum.data.spec import MapDataset, WorkerOptions
from distaccum.distributed.memory import is_out_of_memory, out_of_memory
from distaccum.distributed.random import seed_others
from distaccum.distributed.signals import ignore_stop_signals
from distaccum.distributed.world import World
from distaccum.errors import DataError, DataWarning

# What loading processes load ahead: how many micro-batches, and with which random numbers.

_log = logging.getLogger(__name__)
_MIB = 2**20
_TORCHS_FACTOR = 2  # of a DataLoader that is told none
_TOLD: dict[int, int] = {}  # in a loading process: the epoch that its copy of the dataset was told last


def prefetch_factor(workers: WorkerOptions, window: int) -> int | None:
    """Items that each loading process has ahead, so that together they have ``workers.prefetch_windows`` windows.

    Torch's ``DataLoader`` sends an item's number to a process whenever it hands one out. So when all items of a window
    are taken, the processes are at those of the next one, and load them while the window is computed. A factor that is
    stated, or torch's own, is kept where it is larger; with no ``prefetch_windows`` it is all there is. All of them
    together are no more than ``workers.most_ahead``.

    Args:
        workers: their number, and what is stated.
        window: the items of a rank's largest window: micro-batches, or samples of a stream.

    Returns:
        Torch's ``prefetch_factor``; None without loading processes.
    """
    if not workers.num_workers:
        return None
    wanted = -(-workers.prefetch_windows * window // workers.num_workers)
    factor = max(wanted, workers.prefetch_factor or _TORCHS_FACTOR)
    return factor if workers.most_ahead is None else min(factor, max(1, workers.most_ahead // workers.num_workers))


def note_memory(window: Sequence[Any], ahead: int) -> None:
    """Logs the host memory that micro-batches loaded ahead may take, and warns where shared memory cannot hold them.

    Args:
        window: a window's micro-batches on the host, after which those ahead are reckoned.
        ahead: how many of them may be loaded ahead.
    """
    sizes: list[int] = []
    for batch in window:
        map_tensors(batch, lambda tensor: sizes.append(tensor.nbytes))
    held, limit = sum(sizes) / max(len(window), 1) * ahead, shared_memory()
    _log.info("up to %d micro-batches are loaded ahead: about %.1f MiB of host memory", ahead, held / _MIB)
    if held > limit:
        what = f"up to {ahead} micro-batches are loaded ahead, about {held / _MIB:,.0f} MiB"
        where = f"and the shared memory that they travel through has {limit / _MIB:,.0f} MiB"
        remedy = f"{MORE_SHARED_MEMORY[0].upper()}{MORE_SHARED_MEMORY[1:]}"
        warnings.warn(f"{what}, {where}. {remedy}, or set prefetch_windows=0", DataWarning, stacklevel=2)


def stream_loader(stream: IterableDataset[Any], workers: WorkerOptions, window: int) -> DataLoader[Any]:
    """Torch's ``DataLoader`` of the samples of a stream that divides itself among the loading processes.

    Args:
        stream: the samples of this rank.
        workers: how they are loaded.
        window: the samples of a rank's window.
    """
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=workers.num_workers,
        worker_init_fn=begin,
        multiprocessing_context=workers.multiprocessing_context,
        timeout=workers.timeout,
        prefetch_factor=prefetch_factor(workers, window),
    )


class SeededIds(list[int]):
    """The samples of a micro-batch, as a plain list for the loading process that gets them, which they seed.

    Torch pickles them into a process's queue, and the process loads them as soon as it has unpickled them: what a
    dataset draws from the global generators of torch, NumPy and Python is then a function of the key. It depends
    neither on which process loads, nor on what it has loaded before or how far ahead it is. With an ``epoch`` they
    tell it to the process's copy of the dataset.
    """

    def __init__(self, ids: list[int], key: int, epoch: int | None = None) -> None:
        super().__init__(ids)
        self._key, self._epoch = key, epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return _seeded, (self._key, list(self), self._epoch)

    @classmethod
    def here(cls, ids: list[int], key: int) -> list[int]:
        """The ids, with which this process seeds its own generators: it loads the samples next."""
        return _seeded(key, ids)


def _seeded(key: int, ids: list[int], epoch: int | None = None) -> list[int]:
    worker = get_worker_info()
    if worker is not None and epoch is not None and _TOLD.get(worker.id) != epoch:
        tell_epoch(worker.dataset, epoch)
        _TOLD[worker.id] = epoch
    torch.default_generator.manual_seed(key)  # of the host alone
    seed_others(key)
    return ids


def told_of_epochs(dataset: Any) -> list[Any]:
    """What has a ``set_epoch``: the dataset, or else those in its attributes, and in lists and mappings there."""
    known, waiting, found = dict[int, Any](), [dataset], list[Any]()
    while waiting and len(known) < _MOST_NESTED:
        one = waiting.pop(0)
        if id(one) in known or not hasattr(type(one), "__getitem__") | hasattr(type(one), "__iter__"):
            continue
        known[id(one)] = one
        if hasattr(one, "set_epoch"):
            found.append(one)
            continue
        waiting += getattr(one, "__dict__", {}).values()
        waiting += islice(one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else (), 100)
    return found


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Calls ``set_epoch`` where there is one."""
    for one in told_of_epochs(dataset):
        one.set_epoch(epoch)


_T = TypeVar("_T")
SHARED_MEMORY, _CGROUP = Path("/dev/shm"), Path("/sys/fs/cgroup")  # noqa: S108  where torch puts batches
MORE_SHARED_MEMORY = "give it more (docker run --shm-size=8g, or an emptyDir with medium: Memory)"
_LESS_AHEAD = "prefetch_windows=0 loads less ahead"
_ENDS_WITHIN_S = 2.0
_NO_MORE = (errno.EAGAIN, errno.ENOMEM, errno.ENOSPC)
_MOST_NESTED = 1000  # objects of a dataset that are looked at
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
        """``iter(source)``, which may fork loading processes; they destroy no garbage of this process.

        Raises:
            DataError: not all of them could be started, as there are too many processes or memory is over.
        """
        before = set(active_children())
        try:
            iterator = _iterate(source)
        except BaseException as error:
            # Those that were forked may not have begun to listen to this process, which would wait for them at its end.
            for process in set(active_children()) - before:
                process.kill()
                process.join()
            if getattr(error, "errno", None) in _NO_MORE or "can't start new thread" in str(error):
                problem = f"not all of {getattr(source, 'num_workers', 0)} loading processes could be started ({error})"
                remedy = "Lower num_workers, or raise the limit of processes (ulimit -u, pids.max) or of memory"
                if getattr(error, "errno", None) == errno.ENOSPC:  # for their semaphores
                    remedy = f"{SHARED_MEMORY} {_free_shared_memory()}: {MORE_SHARED_MEMORY}"
                raise DataError(f"{problem}. {remedy}") from error
            raise
        self._kept[:] = [iterator]
        return iterator


def _iterate(source: Iterable[_T]) -> Iterator[_T]:
    """``iter(source)``, whose processes leave the garbage alone that they inherit.

    Their own collector would destroy it there, without the threads that it belongs to: objects of torch's crash then.
    It leaves alone what is frozen when they are forked. A program that keeps frozen objects of its own, which would
    thaw with the others, collects its garbage before instead: a second in a process of millions of objects.
    """
    workers = getattr(source, "num_workers", None)
    if workers == 0:
        return iter(source)  # to count what is frozen takes 40 ms after the imports of a run
    if gc.get_freeze_count():
        if workers:
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
        what = f"Batches travel through {SHARED_MEMORY}, which {_free_shared_memory()}"
        return f"was killed by {name}", f"{what}: {MORE_SHARED_MEMORY}, or lower num_workers. {_LESS_AHEAD}"
    if -code == signal.SIGKILL:
        remedy = f"Lower num_workers, or give it more memory; {SHARED_MEMORY} {_free_shared_memory()}. {_LESS_AHEAD}"
        return f"was killed by {name}, as the kernel does when memory is over{_memory_limit()},", remedy
    return f"was killed by {name}", "num_workers=0 loads in the training process, where it shows its stack"


def shared_memory() -> float:
    """The bytes of the memory that batches travel through, used or not; infinite where there is no telling."""
    with suppress(OSError):
        found = os.statvfs(SHARED_MEMORY)
        return found.f_bsize * found.f_blocks
    return float("inf")


def _free_shared_memory() -> str:
    with suppress(OSError):
        found = os.statvfs(SHARED_MEMORY)
        size = found.f_frsize / _MIB
        return f"has {found.f_bavail * size:,.0f} of {found.f_blocks * size:,.0f} MiB free"
    return "does not exist"


def _memory_limit() -> str:
    with suppress(OSError, ValueError):
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return f" (this container uses {used / _MIB:,.0f} of {limit / _MIB:,.0f} MiB)"
    return ""


# Samples that are read beside the training, for what is to be known of them.


def reading(
    dataset: MapDataset, batches: Sequence[list[int]], of: Callable[[list[Any]], Any], workers: WorkerOptions
) -> Iterator[Any]:
    """What ``of`` makes of the samples of each batch; after one that raises, the next may be asked for.

    Where loading processes are forked, one of them reads. A dataset that opens its file with its first sample, as one
    does for loading processes, would open it in this process, and all that are forked later would share the open file
    and its one position: they would read each other's samples. Where they are started otherwise, they get the dataset
    pickled, as an open file cannot be; what is read here is such a copy.

    Args:
        dataset: map-style samples.
        batches: the samples of each, by number.
        of: from a batch's samples to what is wanted of them.
        workers: how the others are loaded.
    """
    forked = workers.num_workers > 0 and start_method(workers.multiprocessing_context) == "fork"
    if workers.num_workers and not forked:
        with suppress(Exception):  # it is pickled for the loading processes too, which then say so
            dataset = pickle.loads(pickle.dumps(dataset))  # noqa: S301  written here
    loader: DataLoader[Any] = DataLoader(
        cast("Dataset[Any]", dataset),  # torch names its base class, and uses [index] only
        batch_sampler=cast(Any, batches),
        collate_fn=of,
        num_workers=int(forked),
        multiprocessing_context="fork" if forked else None,
        worker_init_fn=WorkerInit(workers.worker_init_fn),
        timeout=workers.timeout if forked else 0,
        generator=torch.Generator(),  # of the process's seed: none of the model's numbers is drawn
    )
    return Iteration().begin(loader)


def start_method(context: Any) -> str | None:
    """That of a ``DataLoader``'s ``multiprocessing_context``: a context, a name, or None for the default."""
    if isinstance(context, str):
        return context
    return str((multiprocessing if context is None else context).get_start_method())


# How long a rank waits for the micro-batches of a window: the device, or, without one of its own, the host.


class WaitClock:
    """Times the loading of windows, and never makes the host wait for the device.

    The host is ahead of a GPU, which goes on while the host waits for data. So an event marks the end of what was
    queued before the loading. If the GPU has not got there when the data are there, it has not waited. If it has, it
    was idle from that event until now, which a second event marks; what lies between them is known when both have
    happened.

    Args:
        device: of this rank.
        clock: seconds of the host.
        event: makes an event of the device, as ``torch.cuda.Event``; None: the device's own, or none without a GPU.
    """

    def __init__(
        self, device: torch.device, *, clock: Callable[[], float] = perf_counter, event: Callable[[], Any] | None = None
    ) -> None:
        if event is None and device.type != "cpu":
            event = partial(torch.get_device_module(device).Event, enable_timing=True)
        self._clock, self._event = clock, event
        self._began = 0.0
        self._queued: Any = None

    def start(self) -> None:
        """Called when a window is asked for: all work of the one before is queued."""
        self._began = self._clock()
        if self._event is not None:
            self._queued = self._event()
            self._queued.record()

    def stop(self) -> tuple[float, Callable[[], float] | None]:
        """Called when its micro-batches are there.

        Returns:
            the seconds that the host has waited; and what gives those of the device, when the window is run, None where
            there are no events.
        """
        waited, queued = self._clock() - self._began, self._queued
        if self._event is None or queued is None:
            return waited, None
        if not queued.query():
            return waited, float  # 0.0: the device is still busy
        loaded = self._event()
        loaded.record()
        return waited, partial(_idle, queued, loaded, waited)


def _idle(queued: Any, loaded: Any, most: float) -> float:
    """Seconds between two events of a device, and no more than the host has waited."""
    loaded.synchronize()  # no wait: the device was idle when it was recorded, and has computed a window since
    idle: float = queued.elapsed_time(loaded) / 1e3
    return min(most, idle)
