"""Stop signals: from Slurm, from torchrun, and at the end of the parent process."""

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

# SIGTERM comes from Slurm, Kubernetes and torchrun; SIGUSR1 and SIGUSR2 from Slurm's --signal and from submitit.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # prctl(2)


class StopSignals:
    """Turns SIGTERM, SIGUSR1 and SIGUSR2 into a flag that a loop reads between windows::

        with StopSignals() as signals:
            for window in acc.windows(loader):
                ...
                if signals.received:
                    acc.stop()

    The handler only notes the first signal; later ones change nothing. A signal that the program handles itself is left
    to it. After one was received, all stay ignored after the block too, as the sender may repeat it while the process
    ends.
    """

    def __init__(self) -> None:
        self.received = ""
        """The first signal's name; empty before."""
        self._listener: Callable[[str], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        """Installs the handlers, which only the main thread can do."""
        with suppress(ValueError):
            for number in STOP_SIGNALS:
                if not callable(signal.getsignal(number)):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restores the previous handlers; if a signal was received, ignores further ones instead."""
        if self.received:
            self.ignore()
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ignore(self) -> None:
        """Ignores the signals until the process ends.

        A handler would not do: Python drops its handlers while it ends, and the signal would kill it.
        """
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._before.clear()

    @contextmanager
    def notify(self, listener: Callable[[str], object]) -> Iterator[None]:
        """Within the block, calls ``listener`` with the first signal's name: when it comes, or at once if it has.

        The call interrupts the main thread between two instructions, so ``listener`` should only set a flag.
        """
        self._listener = listener
        if self.received:
            listener(self.received)
        try:
            yield
        finally:
            self._listener = None

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self.received:
            self.received = signal.Signals(number).name
            if self._listener is not None:
                self._listener(self.received)


def die_with_parent() -> None:
    """Makes the kernel send this process SIGTERM when its parent ends, for whatever reason (only on Linux).

    A killed launcher cannot stop its workers, which would otherwise keep training.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def ignore_stop_signals(_: int = 0) -> None:
    """Ignores stop signals in a process that loads data (a ``worker_init_fn``): only the training process acts on them.

    They reach the whole process group, and a loader that one kills ends the training before it can save. Only a SIGTERM
    from the parent ends the loader: Python sends it in its clean-up.
    """
    ignore_user_signals()
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        Thread(target=_end_by_parent, daemon=True).start()


def ignore_user_signals() -> None:
    """Ignores SIGUSR1 and SIGUSR2 in this process and in those that it starts."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _end_by_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
