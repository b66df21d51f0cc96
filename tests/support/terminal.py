"""A terminal for tests: what a process writes to a pty, as the rows that a person would see."""

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tests.support.commands import until

_END = "\x1b[77m"  # a style that there is not: what was written before it has been read
_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)", re.DOTALL)


class Rows:
    """Interprets the few control sequences that there are, and refuses all others; it scrolls and never forgets.

    Args:
        columns: its width.
    """

    def __init__(self, columns: int) -> None:
        self.columns, self._rows, self._row, self._column = columns, [""], 0, 0

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
            self._column = min(self.columns - 1, self._column + 1)
        else:
            raise AssertionError(f"a control sequence that a live line does not need: {number}{command}")

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append("")

    def _put(self, letter: str) -> None:
        if self._column == self.columns:
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
        self.stream: TextIO = os.fdopen(self._writer, "w", buffering=1)
        self.resize(columns)
        self._rows, self.said = Rows(columns), ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    @property
    def rows(self) -> list[str]:
        """What stands there now."""
        self.stream.flush()
        os.write(self._writer, _END.encode())
        text = ""
        while not text.endswith(_END):
            text += os.read(self._reader, 1 << 16).decode()
        text = text.removesuffix(_END)
        self.said += text
        self._rows.show(text)
        return self._rows.rows

    def echo(self, text: str) -> None:
        """What the terminal shows of what a person types."""
        _ = self.rows
        self._rows.show(text)

    def close(self) -> None:
        self.stream.close()
        os.close(self._reader)


class Tmux:
    """A command in a terminal of tmux, which has a scrollback, and can be made wider and narrower.

    Args:
        folder: for its socket.
        columns: its width.
        arguments: the command line; when it ends, ``ENDED`` and its exit code are the last line.
        variables: the environment.
    """

    def __init__(self, folder: Path, columns: int, arguments: Sequence[object], variables: Mapping[str, str]) -> None:
        self._socket = folder / "tmux"
        line = f"{shlex.join(map(str, arguments))}; echo ENDED $?; sleep 600"
        self._ask("new-session", "-d", "-x", str(columns), "-y", "30", line, env={**variables, "CI": ""})

    def _ask(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        whole = ["tmux", "-S", str(self._socket), "-f", "/dev/null", *command]
        return subprocess.run(whole, capture_output=True, text=True, check=True, env=env).stdout

    @property
    def lines(self) -> list[str]:
        """Scrollback and screen; what the terminal itself has wrapped is one line."""
        return [line.rstrip() for line in self._ask("capture-pane", "-p", "-J", "-S", "-").rstrip("\n").splitlines()]

    @property
    def rows(self) -> list[str]:
        """Scrollback and screen, as wide as they are."""
        return [line.rstrip() for line in self._ask("capture-pane", "-p", "-S", "-").rstrip("\n").splitlines()]

    @property
    def shows_cursor(self) -> bool:
        return self._ask("display-message", "-p", "#{cursor_flag}").strip() == "1"

    def resize(self, columns: int) -> None:
        self._ask("resize-window", "-x", str(columns))

    def press(self, key: str) -> None:
        self._ask("send-keys", key)

    def wait_for(self, there: Callable[[], bool], within_s: float = 100) -> None:
        until(there, within_s, told=lambda: "\n".join(self.lines))

    def kill(self) -> None:
        self._ask("kill-server")


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
