"""Being asked to stop: by Slurm, by torchrun, by the end of the process that started this one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from types import FrameType, TracebackType
from typing import Any

# What Slurm, Kubernetes and torchrun send; what people have Slurm send before a time limit; what submitit has.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # prctl(2)


class StopSignals:
    """Turns SIGTERM, SIGUSR1 and SIGUSR2 into a wish that a loop can look at between windows::

        with StopSignals() as signals:
            for window in acc.windows(loader):
                ...
                if signals.received:
                    acc.stop()

    The handler does nothing but note the first one; later ones change nothing. A signal that the program handles itself
    is left to it. Once one was received, they stay without effect after the block too: whoever asks may ask again while
    the process is leaving.
    """

    def __init__(self) -> None:
        self.received = ""
        """The first signal's name; empty before."""
        self._told: Callable[[str], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        """Installs the handlers; in another thread than the main one there can be none."""
        with suppress(ValueError):
            for number in STOP_SIGNALS:
                if not callable(signal.getsignal(number)):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Puts back what was there before, unless one was received."""
        if self.received:
            self.ignore()
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ignore(self) -> None:
        """For good. (A handler would not do: Python gives handlers up while it ends, and would be killed.)"""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._before.clear()

    @contextmanager
    def notify(self, listener: Callable[[str], object]) -> Iterator[None]:
        """Within it ``listener`` is called with the name of the first signal: when it comes, or at once if it has.

        It is called between two instructions of the main thread, so it should set a flag and no more.
        """
        self._told = listener
        if self.received:
            listener(self.received)
        try:
            yield
        finally:
            self._told = None

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self.received:
            self.received = signal.Signals(number).name
            if self._told is not None:
                self._told(self.received)


def die_with_parent() -> None:
    """Has the kernel send this process SIGTERM when the one that started it ends, however that ends (Linux alone).

    A launcher that is killed cannot tell its workers; without this they would train on, unseen.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def ignore_stop_signals(_: int = 0) -> None:
    """For processes that load data (a ``worker_init_fn``): these signals are for the process that trains.

    They reach the whole process group, and a loader that dies of one takes the training down before it can save. Only
    the parent's own SIGTERM ends it, by which Python clears up at the end.
    """
    ignore_user_signals()
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        Thread(target=_end_by_parent, daemon=True).start()


def ignore_user_signals() -> None:
    """What a process ignores, those that it starts ignore too, until they say otherwise."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _end_by_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
