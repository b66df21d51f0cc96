"""A terminal for tests: what a process writes to a pty, as the rows that a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)", re.DOTALL)


class Rows:
    """Interprets the few control sequences that there are, and refuses all others; it scrolls and never forgets.

    Args:
        columns: its width.
    """

    def __init__(self, columns: int) -> None:
        self._columns, self._rows, self._row, self._column = columns, [""], 0, 0

    def show(self, text: str) -> None:
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            assert found, f"no control sequence that a live line needs: {text[at : at + 20]!r}"
            at = found.end()
            number, command, line, plain = found.groups()
            if command:
                self._obey(number, command)
            elif line == "\r":
                self._column = 0
            elif line:
                self._down()
            else:
                for letter in plain:
                    self._put(letter)

    def _obey(self, number: str, command: str) -> None:
        row = self._rows[self._row]
        if command == "m":
            return
        if command == "K" and not number:
            self._rows[self._row] = row[: self._column]
        elif command == "J" and not number:
            self._rows[self._row :] = [row[: self._column]]
        elif command == "C" and not number:
            self._column = min(self._columns - 1, self._column + 1)
        elif command == "A" and number:
            self._row -= int(number)
            assert self._row >= 0
        else:
            raise AssertionError(f"a control sequence that a live line does not need: {number}{command}")

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append("")

    def _put(self, letter: str) -> None:
        if self._column == self._columns:
            self._down()
            self._column = 0
        row = self._rows[self._row].ljust(self._column)
        self._rows[self._row] = row[: self._column] + letter + row[self._column + 1 :]
        self._column += 1

    @property
    def rows(self) -> list[str]:
        """Without the spaces at their ends, and without empty rows at the end."""
        return "\n".join(row.rstrip() for row in self._rows).rstrip("\n").split("\n")


class Terminal:
    """A pty of a size; ``stream`` writes to it.

    Args:
        columns: its width.
    """

    def __init__(self, columns: int) -> None:
        self._reader, self._writer = pty.openpty()
        tty.setraw(self._writer)  # the line's discipline would put \r before each \n
        self.stream: TextIO = os.fdopen(self._writer, "w", buffering=1, newline="\r\n")
        self.resize(columns)
        self._rows, self.said = Rows(columns), ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    @property
    def rows(self) -> list[str]:
        """What stands there now."""
        while select.select([self._reader], [], [], 0.05)[0]:
            text = os.read(self._reader, 1 << 16).decode()
            self.said += text
            self._rows.show(text)
        return self._rows.rows

    def close(self) -> None:
        self.stream.close()
        os.close(self._reader)


@contextmanager
def on_terminal(columns: int) -> Iterator[Terminal]:
    """Standard output and error are a terminal, for the length of the block."""
    one, before = Terminal(columns), (sys.stdout, sys.stderr)
    sys.stdout = sys.stderr = one.stream
    try:
        yield one
    finally:
        sys.stdout, sys.stderr = before
        one.close()
