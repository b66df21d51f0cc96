"""The arguments of a tool that takes flags: argparse, as every command of distaccum answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from distaccum.errors import near_misses
from distaccum.program import BAD_ARGUMENTS, complain, say


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
            prog=f"distaccum {command}",
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
        self.exit(BAD_ARGUMENTS, f"{self.format_usage()}{self.prog}: error: {message}\n")

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
