"""Stop signals: from Slurm, from torchrun, from the terminal, and at the end of the parent process."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from threading import Thread
from time import monotonic
from types import FrameType
from typing import Any

# SIGTERM comes from Slurm, Kubernetes and torchrun; SIGUSR1 and SIGUSR2 from Slurm's --signal and from submitit.
# SIGHUP comes from a terminal that is closed, and SIGINT from Ctrl-C.
FROM_THE_TERMINAL = (signal.SIGHUP, signal.SIGINT)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, *FROM_THE_TERMINAL)
MEMBER = "DISTACCUM_MEMBER"
"""Names a process of an elastic job: `node.local.life`."""
LAUNCHER = "DISTACCUM_LAUNCHER"  # the variable with the process id of the launcher, for the ranks that it starts
_PR_SET_PDEATHSIG = 1  # prctl(2)
_ONE_PRESS_S = 0.3  # wrappers pass on a Ctrl-C that the whole process group has got already
_PATIENCE_S = 1.0  # before a person is told that Ctrl-C was understood
_NO_SIGNAL = 0
_INTERRUPTED = 128 + signal.SIGINT  # the exit code
_ignored: set[signal.Signals] = set()  # by an earlier block of this process, not by nohup


class StopSignals:
    """Turns SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and SIGINT (Ctrl-C) into a flag that a loop reads between windows::

        with StopSignals() as signals:
            for window in acc.windows(loader):
                ...
                if signals.received:
                    acc.stop()

    The handler only notes the first signal; later ones change nothing, but for a second Ctrl-C: it ends the process at
    once, with exit code 130. A signal that the program handles itself is left to it, and so are SIGHUP and SIGINT where
    they are ignored, as SIGHUP is under ``nohup``. After a signal was received, all but Ctrl-C stay ignored after the
    block too, as the sender may repeat it while the process ends.

    A thread learns of signals as well, since Python's handlers have to wait while the main thread is in a collective.
    """

    def __init__(self) -> None:
        self.received = ""
        """The first signal's name; empty before."""
        self.told = ""
        """The same, at once: also while the main thread waits where no handler runs."""
        self.last_words: Callable[[str], object] | None = None
        """Called with the reason before a second Ctrl-C ends the process."""
        self._presses: list[float] = []
        self._wake_up: _WakeUp | None = None
        self._listener: Callable[[str], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        """Installs the handlers, which only the main thread can do."""
        with suppress(ValueError):
            for number in STOP_SIGNALS:
                if _is_free(number):
                    self._before[number] = signal.signal(number, self._handle)
            self._wake_up = _WakeUp(self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the previous handlers; if a signal was received, ignores further ones instead, but for Ctrl-C."""
        if self._wake_up is not None:
            self._wake_up.close()
        if self.received:
            before = dict(self._before)
            self.ignore()
            if signal.SIGINT in before:
                self._before[signal.SIGINT] = before[signal.SIGINT]
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ignore(self) -> None:
        """Ignores the signals until the process ends; a Ctrl-C after a first signal then ends it, without a traceback.

        A handler would not do: Python drops its handlers while it ends, and the signal would kill it.
        """
        for number in self._before:
            left = number == signal.SIGINT and self.received
            signal.signal(number, signal.SIG_DFL if left else signal.SIG_IGN)
            if not left:
                _ignored.add(number)
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
        elif number == signal.SIGINT and _is_interactive():
            raise KeyboardInterrupt

    def _notice(self, number: int | None) -> float | None:
        """In the thread: a signal has come, or (None) the time that this asked for is over, in seconds."""
        if number is None:
            if _speaks():
                _say(f"told to leave ({self.told}): this window ends, then the run saves; Ctrl-C again ends it at once")
            return None
        if number not in self._before:
            return None
        self.told = self.told or signal.Signals(number).name
        if number == signal.SIGHUP:
            leave_terminal()
        if number != signal.SIGINT:
            return None
        self._presses.append(monotonic())
        if self._presses[-1] - self._presses[0] <= _ONE_PRESS_S:
            return _PATIENCE_S
        if not _is_interactive():
            self._abort()
        return None

    def _abort(self) -> None:
        with suppress(Exception):  # whatever happens, the person wants an end
            if self.last_words is not None:
                self.last_words("ended at once by a second Ctrl-C (SIGINT), without a save")
        if _speaks():
            _say("ended at once by a second Ctrl-C, without a save; resume=auto goes on from the last checkpoint")
        for child in active_children():
            child.kill()
        os._exit(_INTERRUPTED)


def _is_free(number: signal.Signals) -> bool:
    """Whether the program leaves a signal to us."""
    handler = signal.getsignal(number)
    if number in FROM_THE_TERMINAL and handler is signal.SIG_IGN and number not in _ignored:
        return False
    return not callable(handler) or handler is signal.default_int_handler


def _is_interactive() -> bool:
    """Whether a person would lose more than the program: a notebook's kernel, a Python prompt."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _speaks() -> bool:
    """Whether this process is the one of its run that speaks to a person."""
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"distaccum: {text}\n")
        sys.stderr.flush()


def leave_terminal() -> None:
    """Writes to a terminal that is gone would fail, and end the run: they go nowhere instead."""
    for stream in (1, 2):
        watched = select.poll()
        watched.register(stream, 0)  # errors alone
        if watched.poll(0):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


class _WakeUp:
    """Reads the numbers of signals in a thread, as the kernel delivers them: Python's handlers run in the main thread.

    Args:
        notice: called with each, and with None so many seconds after it asked for that.

    Raises:
        ValueError: this is not the main thread.
    """

    def __init__(self, notice: Callable[[int | None], float | None]) -> None:
        self._notice = notice
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # A loading process that is forked would write to this pipe what the whole process group gets.
        os.register_at_fork(after_in_child=self._detach)
        self._thread = Thread(target=self._read, name="signals", daemon=True)
        self._thread.start()

    def _detach(self) -> None:
        if self._writer >= 0:
            with suppress(ValueError):
                signal.set_wakeup_fd(-1)

    def _read(self) -> None:
        patience: float | None = None
        while True:
            if not select.select([self._reader], [], [], patience)[0]:
                patience = self._notice(None)
                continue
            for number in os.read(self._reader, 64):
                if number == _NO_SIGNAL:
                    return
                patience = self._notice(number) or patience

    def close(self) -> None:
        """Ends it, and gives the signals' numbers to whom they went before."""
        signal.set_wakeup_fd(self._before)
        os.write(self._writer, bytes([_NO_SIGNAL]))  # closing would not do: loading processes have it open, too
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)
        self._writer = -1


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Makes the kernel send this process a signal when its parent ends, for whatever reason (only on Linux).

    A killed launcher cannot stop its workers, which would otherwise keep training. A member of an elastic job takes
    SIGKILL: the others count on it that nobody of that launcher trains any more. What counts as the parent is the
    thread that has started this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def ignore_stop_signals(_: int = 0) -> None:
    """Ignores stop signals in a process that loads data (a ``worker_init_fn``): only the training process acts on them.

    They reach the whole process group, and a loader that one kills ends the training before it can save. Only a SIGTERM
    from the parent ends the loader: Python sends it in its clean-up.
    """
    ignore_user_signals()
    for number in FROM_THE_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
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
