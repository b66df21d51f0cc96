"""The live line: a terminal's last row, drawn anew a few times a second, below whatever else is printed.

The cursor waits at the row's beginning, and is never hidden: a terminal that is made narrower takes it along with the
row, and no end of the process leaves anything behind. (``rich.live`` hides it, and a loading process that was forked
meanwhile may wait for its lock for ever.)
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from threading import Event, RLock, Thread
from typing import Any, TextIO, cast

ERASE = "\r\x1b[K\x1b[C\x1b[J\r"
"""Erases from the beginning of the row to the end of the screen.

In two parts: tmux takes what is erased from the first row's beginning for a screen that is cleared, and keeps a copy.
"""
_DIM = "\x1b[2m\\g<0>\x1b[22m"
_DUMB = ("dumb", "unknown")


class LiveLine:
    """Shows a row below what this process prints, for the length of the block.

    ``sys.stdout`` and ``sys.stderr``, where they are terminals, are replaced: what is printed erases the row, which
    comes back when the printed line has an end.

    Args:
        draw: the row's text, given how many columns there are; called in a thread, and on each line that is printed.
        every_s: seconds between two drawings.
        faint: a pattern of what is dim in the text.
    """

    def __init__(self, draw: Callable[[int], str], *, every_s: float = 0.25, faint: str = r"(?!)") -> None:
        self._draw, self._every_s, self._faint = draw, every_s, faint
        self._lock, self._ended, self._pid = RLock(), Event(), os.getpid()
        self._is_open = False  # whether the cursor stands behind a line without an end, and there is no row
        self._streams = ExitStack()

    def __enter__(self) -> LiveLine:
        """Begins; ``sys.stdout`` is a terminal."""
        self._terminal = sys.stdout
        self._streams.enter_context(_replaced(partial(_Above, self)))
        self.write("")
        Thread(target=self._keep_drawing, name="live line", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Erases the row, and gives the streams back."""
        self.stop()

    def stop(self) -> None:
        """Ends the block early: from any thread, and more than once."""
        with self._lock:
            if self._ended.is_set() or self.is_elsewhere:
                return
            with suppress(OSError, ValueError):  # the terminal is gone
                self._put("" if self._is_open else ERASE)
            self._ended.set()
            self._streams.close()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a process that was forked from the one that shows it."""
        return os.getpid() != self._pid

    def write(self, text: str) -> None:
        """Prints text above the row, which is drawn anew; nothing draws it without text."""
        with self._lock:
            if self._ended.is_set():
                self._put(text)
                return
            erase = "" if self._is_open else ERASE
            self._is_open = not text.endswith("\n") if text else self._is_open
            self._put(erase + text + ("" if self._is_open else self._row()))

    def _row(self) -> str:
        columns = 80
        with suppress(OSError, ValueError):
            columns = os.get_terminal_size(self._terminal.fileno()).columns or columns
        with suppress(Exception):  # a line that cannot be drawn must not end a run
            return re.sub(self._faint, _DIM, self._draw(columns - 1)[: columns - 1]) + "\r"
        return ""

    def _put(self, text: str) -> None:
        """Past the stream's buffer, whose lock a process that is forked meanwhile would never get."""
        self._terminal.flush()
        left = text.encode(self._terminal.encoding or "utf-8", "replace")
        while left:
            left = left[os.write(self._terminal.fileno(), left) :]

    def _keep_drawing(self) -> None:
        while not self._ended.wait(self._every_s):
            with suppress(OSError, ValueError):  # the terminal is gone
                self.write("")


class Erasing:
    """A stream of a process beside the one that shows a live line on the same terminal: erases it before each line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self._begins = stream, True

    def write(self, text: str) -> int:
        """Writes text."""
        erase = ERASE if self._begins and text else ""
        self._begins = text.endswith("\n") if text else self._begins
        self.stream.write(erase + text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes all of them."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Above(Erasing):
    """``sys.stdout`` or ``sys.stderr`` while there is a live line; all but writing is the stream's own."""

    def __init__(self, line: LiveLine, stream: TextIO) -> None:
        super().__init__(stream)
        self._line = line

    def write(self, text: str) -> int:
        """Writes text above the live line."""
        if self._line.is_elsewhere:
            return super().write(text)
        self._line.write(text)
        return len(text)

    def leave(self) -> None:
        """Ends the live line, before the process ends without another word."""
        self._line.stop()
        self.stream.flush()


def erasing_streams() -> AbstractContextManager[None]:
    """Another process shows a live line on this terminal: what this one prints erases it first, for that block."""
    return _replaced(Erasing)


@contextmanager
def _replaced(wrapped: Callable[[TextIO], Erasing]) -> Iterator[None]:
    """Wraps standard output and error where they are terminals, also for the handlers of ``logging`` that have them."""
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    pairs = [(name, one, wrapped(one)) for name, one in streams.items() if takes_live_line(one)]
    for name, stream, wrapper in pairs:
        _replace(name, stream, wrapper)
    try:
        yield
    finally:
        for name, stream, wrapper in pairs:
            _replace(name, wrapper, stream)


def takes_live_line(stream: TextIO | None) -> bool:
    """Whether a live line can stand there: on a terminal that is not dumb, and not in continuous integration.

    A program's own stream in place of Python's, such as one that also writes to a file, gets plain lines.
    """
    if os.environ.get("CI", "").lower() not in ("", "0", "false") or os.environ.get("TERM") in _DUMB:
        return False
    return isinstance(stream, io.TextIOWrapper) and stream.isatty()


def _replace(name: str, before: object, after: object) -> None:
    if getattr(sys, name) is before:
        setattr(sys, name, after)
    others = (one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger))
    for logger in (logging.root, *others):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") is before:  # not a property
                handler.setStream(cast(TextIO, after))
