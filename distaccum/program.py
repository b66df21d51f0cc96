"""What every command does as a program: its version, its name, its arguments, and pipes that nobody reads.

A file of its own above ``errors``, so that each command begins alike, however it is started: as ``distaccum NAME``, by
its own script ``distaccum-NAME``, or with ``python -m``. Loads neither torch nor Hydra.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import distaccum
from distaccum.errors import near_misses

_log = logging.getLogger(__name__)

_WIDEST = 120
_BAD_ARGUMENTS = 2


def start(given: Sequence[str] | None = None) -> None:
    """Begins a command: pipes are quiet, and ``--version`` among ``given`` (by default all arguments) is answered.

    Called again, it does nothing more. Ends the process with 0 where the version was asked for.
    """
    quiet_pipes()
    if "--version" in (sys.argv[1:] if given is None else given):
        say(f"{version()}\n")
        sys.exit(0)


def help_asked(given: Sequence[str]) -> str | None:
    """What help is asked for: the KEY of ``--help KEY`` or ``--help=KEY``, empty for all of it; None for none."""
    for i, argument in enumerate(given):
        flag, _, key = argument.partition("=")
        if flag in ("--help", "-h"):
            following = given[i + 1] if i + 1 < len(given) else ""
            return key or (following if not following.startswith("-") and "=" not in following else "")
    return None


def say(text: str) -> None:
    """Writes to stdout on rank 0 alone, where torchrun has started several processes."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text)


def complain(text: str) -> None:
    """Writes to stderr on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(text)


def wrapped(text: str, indent: int = 0) -> str:
    """A paragraph that fits the terminal (80 columns where there is none, 120 at most), its further lines indented."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False) + "\n"


def version() -> str:
    """distaccum's version, torch's and Python's in one line; torch is not imported for it."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "missing"
    return f"distaccum {distaccum.__version__}, torch {torch}, Python {platform.python_version()}"


def name_of(command: str) -> str:
    """How the user has called the command: ``distaccum NAME``, or ``distaccum-NAME`` where the script has that name."""
    script = f"distaccum-{command}"
    return script if Path(sys.argv[0]).name == script else f"distaccum {command}"


class Arguments(argparse.ArgumentParser):
    """A command's arguments, with ``--help`` and ``--version``. Rank 0 alone prints, and flags cannot be shortened.

    Args:
        command: its name in ``distaccum NAME``.
        description: what it does.
        epilog: examples and exit codes, as they are to be printed.
    """

    def __init__(self, command: str, description: str, epilog: str) -> None:
        self._takes_value: dict[str, bool] = {}
        self._ends = False  # at the first argument that is no flag
        self._given: Sequence[str] = ()
        super().__init__(
            prog=name_of(command),
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--version", action="store_true", help="print the versions of distaccum, torch and Python")

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """See argparse."""
        made = super().add_argument(*names, **settings)
        self._takes_value |= dict.fromkeys(made.option_strings, made.nargs != 0)
        self._ends |= made.nargs == argparse.REMAINDER
        return made

    def of(self, given: Sequence[str] | None = None) -> argparse.Namespace:
        """The values of ``given``, by default of the command line; ends the process with 2 where they are wrong."""
        self._given = sys.argv[1:] if given is None else given
        return self.parse_args(self._given)

    def print_help(self, file: Any = None) -> None:
        """Prints it on rank 0."""
        if file is None:
            say(self.format_help())
        else:
            super().print_help(file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends the process, and says why on rank 0."""
        complain(message or "")
        sys.exit(status)

    def error(self, message: str) -> NoReturn:
        """Ends the process with 2. An unknown flag is what is said, where argparse would miss an argument first."""
        unknown = self._unknown()
        if unknown is not None:
            known = f"`{self.prog} --help` lists those there are"
            message = f"{unknown}: no such flag{near_misses(unknown, self._takes_value) or '.'} {known}"
        self.exit(_BAD_ARGUMENTS, f"{self.format_usage()}{self.prog}: error: {message}\n")

    def _unknown(self) -> str | None:
        """The first flag of ``given`` that the command does not have."""
        is_value = False
        for word in self._given:
            flag = word.partition("=")[0]
            if is_value:
                is_value = False
            elif flag in self._takes_value:
                is_value = self._takes_value[flag] and "=" not in word
            elif word == "--" or (self._ends and not word.startswith("-")):
                return None
            elif word.startswith("-") and word != "-" and word[:2] not in self._takes_value:  # -oFILE
                return flag
        return None


def quiet_pipes() -> None:
    """From when the reader of stdout or stderr is gone (``| head -1``), what is written to it goes nowhere.

    The command itself goes on: its files are written, its exit code says how it went, and a run trains to its end. A
    stream that was closed from the beginning (``>&-``) is nowhere, too.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(_Unread(os.open(os.devnull, os.O_WRONLY), "w")))
        elif stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.flush()
            setattr(sys, name, _quiet(stream))


def outlive_output() -> None:
    """From here on what cannot be written to stdout or stderr is lost, as on a full disk: a warning says so once.

    For a run of hours, whose results are elsewhere; another command whose output is not whole has failed.
    """
    for name in ("stdout", "stderr"):
        buffer = getattr(getattr(sys, name), "buffer", None)
        raw = getattr(buffer, "raw", buffer)
        if isinstance(raw, _Unread):
            raw.loses = True
            raw.is_told = name == "stdout"  # nothing can be told through stderr from within


def _quiet(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    raw = _Unread(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # python -u has none
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Unread(io.FileIO):
    """A descriptor that becomes one of the null device once its reader is gone, for child processes as well."""

    loses = False
    """Whether what cannot be written for another reason is lost, too, and the next write tried again."""
    is_told = False
    """Whether a warning says so, once."""

    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        except OSError as error:
            if not self.loses:
                raise
            told, self.is_told = self.is_told, False
            if told:
                _log.warning("stdout: %s; what is printed there is lost, and the run goes on", error)
        return memoryview(data).nbytes  # type: ignore[arg-type]
