"""The live line: a terminal's last row, drawn anew a few times a second, below whatever else is printed.

The cursor waits at the row's beginning. So a terminal that is made narrower takes the cursor along with the row, and
all that it has made of the row is erased before the next drawing; and it is never hidden, so that no end of the process
can leave it hidden. (``rich.live`` hides it and waits at the row's end; and what a forked loading process prints
through it may wait for a lock that nobody there will release.)
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, RLock, Thread
from typing import Any, TextIO, cast

from rich.cells import set_cell_size

ERASE = "\r\x1b[K\x1b[C\x1b[J\r"
"""Erases from the beginning of the row to the end of the screen.

In two parts: tmux takes what is erased from the first row's beginning for a screen that is cleared, and keeps a copy.
"""
_CUT, _WRAP = "\x1b[?7l", "\x1b[?7h"
"""What does not fit into a row is cut, or goes on in the next one.

A terminal is narrower before its processes know: a row drawn then must not become two, of which one would be erased.
"""
_FIRST = "\x1b[G"
"""Moves the cursor to the first column as a carriage return does, which the kernel hands on apart from the text before
it: a terminal that is made narrower between the two takes the cursor to the last of the rows that the text becomes."""
_DUMB = ("dumb", "unknown")
_LOCK_S = 1.0  # a terminal that takes nothing must not hold up a message for ever
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-HJSTfhlsu]")  # moves the cursor to other rows, or hides it
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x1f]")


class LiveLine:
    """Shows a row below what this process prints, for the length of the block.

    ``sys.stdout`` and ``sys.stderr``, where they are terminals, are replaced: whole lines appear above the row as they
    are, and a line that is not whole yet, such as another progress bar, in a row of its own above it.

    Args:
        draw: the row's text, given how many columns there are; called in a thread, and on each line that is printed.
        every_s: seconds between two drawings.
    """

    def __init__(self, draw: Callable[[int], str], *, every_s: float = 0.25) -> None:
        self._draw, self._every_s = draw, every_s
        self._lock, self._ended, self._pid = RLock(), Event(), -1
        self._is_open = False  # whether the cursor stands behind a line without an end, and there is no row
        self._above: list[_Above] = []
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._thread = Thread(target=self._keep_drawing, name="live line", daemon=True)

    def __enter__(self) -> LiveLine:
        """Begins; ``sys.stdout`` is a terminal."""
        self._terminal, self._pid = sys.stdout, os.getpid()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if takes_live_line(stream):
                self._above.append(_Above(self, stream, name))
                setattr(sys, name, self._above[-1])
        self._take_over_handlers()
        self.refresh()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Erases the row, and gives the streams back."""
        self.stop()

    def stop(self) -> None:
        """Ends the block early: from any thread, and more than once."""
        with self._turn():
            if not self.is_shown:
                return
            self._ended.set()
            for handler, stream in self._moved:
                if isinstance(handler.stream, _Above):
                    handler.setStream(stream)
            for above in self._above:
                if getattr(sys, above.replaces) is above:
                    setattr(sys, above.replaces, above.stream)
            with suppress(OSError, ValueError):  # the terminal is gone
                self._write(("" if self._is_open else ERASE) + "".join(above.partial for above in self._above))

    @property
    def is_shown(self) -> bool:
        """Whether this process shows it."""
        return not self._ended.is_set() and not self.is_elsewhere

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a process that was forked from the one that shows it."""
        return os.getpid() != self._pid

    def refresh(self) -> None:
        """Draws it anew."""
        self.print_above("")

    def print_above(self, text: str) -> None:
        """Writes text, whole lines or nothing, and the row below it."""
        with self._turn():
            if self.is_shown and not self._is_open:
                self._write(ERASE + text + self._rows())

    def take(self, above: _Above, text: str) -> None:
        """Prints the lines of a stream that are whole now, and keeps the rest; all of it where there is no row now."""
        with self._turn():
            if _MOVES.search(text):  # somebody draws on the terminal himself
                self.stop()
            if self._is_open or not self.is_shown:
                self._write(text)
                self._is_open = self._is_open and not text.endswith("\n")
                self.refresh()
                return
            lines, newline, rest = (above.partial + text).rpartition("\n")
            # Of a line that is written over and over only the last form will ever be seen.
            above.partial = rest[rest.rstrip("\r").rfind("\r") :] if "\r" in rest else rest
            if newline:
                self.print_above(lines + newline)

    def flush(self, above: _Above) -> None:
        """A line that has no end and that is not written over may be a question, whose answer is typed behind it.

        It is shown as it would be alone, and the row is away until the line has an end.
        """
        with self._turn():
            if self.is_shown and above.partial and "\r" not in above.partial:
                self._write(ERASE + above.partial)
                above.partial, self._is_open = "", True

    @contextmanager
    def _turn(self) -> Iterator[None]:
        locked = self._lock.acquire(timeout=_LOCK_S)
        try:
            yield
        finally:
            if locked:
                self._lock.release()

    def _rows(self) -> str:
        columns = _columns(self._terminal)
        rows = [set_cell_size(_CONTROL.sub("", above.shown), columns - 1).rstrip() for above in self._above]
        rows = [row for row in rows if row]
        with suppress(Exception):  # a line that cannot be drawn must not end a run
            rows.append(self._draw(columns - 1)[: columns - 1])
        return _CUT + "\n".join(rows) + _WRAP + _FIRST + (f"\x1b[{len(rows) - 1}A" if len(rows) > 1 else "")

    def _write(self, text: str) -> None:
        """Past the stream's buffer, whose lock a process that is forked meanwhile would never get."""
        self._terminal.flush()
        left = text.encode(self._terminal.encoding or "utf-8", "replace")
        while left:
            left = left[os.write(self._terminal.fileno(), left) :]

    def _keep_drawing(self) -> None:
        while not self._ended.wait(self._every_s):
            with suppress(OSError, ValueError):  # the terminal is gone
                self.refresh()

    def _take_over_handlers(self) -> None:
        """Handlers that users have installed before write to the streams that were there then."""
        for handler in _stream_handlers():
            for above in self._above:
                if handler.stream is above.stream:
                    self._moved.append((handler, handler.stream))
                    handler.setStream(cast(TextIO, above))


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

    def __init__(self, line: LiveLine, stream: TextIO, replaces: str) -> None:
        super().__init__(stream)
        self._line, self.replaces, self.partial = line, replaces, ""

    @property
    def shown(self) -> str:
        """What the line that is not whole yet looks like."""
        return self.partial.strip("\r").rpartition("\r")[2]

    def write(self, text: str) -> int:
        """Writes text above the live line."""
        if self._line.is_elsewhere:
            return super().write(text)
        if not self._line.is_shown:
            return self.stream.write(text)
        self._line.take(self, text)
        return len(text)

    def leave(self) -> None:
        """Ends the live line, before the process ends without another word."""
        self._line.stop()
        self.stream.flush()

    def flush(self) -> None:
        """Shows a line that has no end yet."""
        if self._line.is_shown:
            self._line.flush(self)
        self.stream.flush()


@contextmanager
def erasing_streams() -> Iterator[None]:
    """Another process shows a live line on this terminal: what this one prints erases it first, for that block."""
    replaced = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if takes_live_line(stream):
            replaced[name] = stream, Erasing(stream)
            setattr(sys, name, replaced[name][1])
    try:
        yield
    finally:
        for name, (stream, erasing) in replaced.items():
            if getattr(sys, name) is erasing:
                setattr(sys, name, stream)


def takes_live_line(stream: TextIO | None) -> bool:
    """Whether a live line can stand there: on a terminal that is not dumb, and not in continuous integration.

    A program's own stream in place of Python's, such as one that also writes to a file, gets plain lines.
    """
    if os.environ.get("CI", "").lower() not in ("", "0", "false") or os.environ.get("TERM") in _DUMB:
        return False
    return isinstance(stream, io.TextIOWrapper) and stream.isatty()


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    others = (one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger))
    for logger in (logging.root, *others):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                yield handler


def _columns(terminal: TextIO) -> int:
    with suppress(OSError, ValueError):
        return os.get_terminal_size(terminal.fileno()).columns or 80
    return 80
