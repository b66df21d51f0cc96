"""The signals to an agent, as a descriptor that can be waited for together with the workers'."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

from distaccum.distributed.signals import FROM_THE_TERMINAL, STOP_SIGNALS


class Heard:
    """Within the block the stop signals do nothing but show in :attr:`descriptor`; in the main thread alone.

    Where SIGHUP or SIGINT is ignored, as under ``nohup``, it stays so.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        """Readable once a signal has come."""
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Heard:
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number not in FROM_THE_TERMINAL or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, _nothing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.descriptor)
        os.close(self._writer)

    def new(self) -> list[int]:
        """The signals that have come since the last call."""
        try:
            return [number for number in os.read(self.descriptor, 64) if number in self._before]
        except BlockingIOError:
            return []


def _nothing(number: int, frame: FrameType | None) -> None:
    """Reading the descriptor tells."""
