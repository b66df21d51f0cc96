"""``distaccum NAME ...``: finds the subcommand, and calls it as if it had been started by its own script."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from distaccum import program
from distaccum.commands.completion import CONFIGURATIONS, complete
from distaccum.commands.table import Command, commands
from distaccum.errors import near_misses

_BAD_ARGUMENTS = 2
_COMPLETION = ("-sc", "--shell-completion")
_HELP = ("--help", "-h", "help")
_EXAMPLES = """\
examples:
  distaccum train                             train the default model here
  distaccum train --help                      what can be set, group by group
  distaccum train --check=8 engine=fsdp2      would it run on 8 processes?
  torchrun --nproc-per-node=8 -m distaccum train engine=fsdp2
  distaccum verify runs/NAME
"""


def main() -> None:
    """Runs the subcommand that ``sys.argv[1]`` names, and exits as it does."""
    program.start(sys.argv[1:2])
    first, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    known = commands()
    if first in _HELP:
        if first == "help" and rest:  # `distaccum help train`
            first, rest = rest[0], ["--help"]
        else:
            program.say(overview(known))
            sys.exit(0)
    if first in _COMPLETION or (first in CONFIGURATIONS and any(word in _COMPLETION for word in rest)):
        complete(known, sys.argv[1:])
        sys.exit(0)
    if first not in known:
        program.complain(f"distaccum: {_unknown(first, known)}\n")
        sys.exit(_BAD_ARGUMENTS)
    sys.argv = [f"distaccum {first}", *rest]
    known[first].load()()


def overview(known: Mapping[str, Command]) -> str:
    """What ``distaccum --help`` prints."""
    width = max(map(len, known)) + 4
    listed = "".join(program.wrapped(f"  {one.name}".ljust(width) + one.says, width) for one in known.values())
    return (
        "usage: distaccum COMMAND [ARGUMENTS]\n\n"
        "State the global batch, get exactly its gradient: the trainer and its tools.\n\n"
        f"commands:\n{listed}\n"
        "options:\n"
        "  --help     this text; after a command, its own\n"
        "  --version  the versions of distaccum, torch and Python\n\n"
        f"{_EXAMPLES}\n"
        "Each command is a script as well: distaccum-train, distaccum-verify, ...\n"
    )


def _unknown(word: str, known: Mapping[str, Command]) -> str:
    if "=" in word or word.startswith("-"):
        return f"{word}: no command. Settings and flags follow one, as in: distaccum train {word}"
    return f"{word}: no such command{near_misses(word, known) or '.'} Use one of {', '.join(known)}"
