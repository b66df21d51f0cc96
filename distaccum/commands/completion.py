"""Shell completion of ``distaccum``: its subcommands, and behind ``train`` and ``plan`` the settings, by Hydra.

``eval "$(distaccum -sc install=bash)"`` tells the shell to ask ``distaccum -sc query=bash`` with what was typed in
``COMP_LINE``. Where nothing is answered the shell completes names of files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

CONFIGURATIONS = {"train": "config", "plan": "plan"}
_CURSOR_AT_COMMAND = 2  # words: distaccum, and the one being typed


def complete(commands: Iterable[str], arguments: Sequence[str]) -> None:
    """Answers ``distaccum [COMMAND] -sc install=SHELL`` and the shell's ``query=SHELL``."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    if any(argument.startswith("query=") for argument in arguments):
        if len(words) + line.endswith(" ") <= _CURSOR_AT_COMMAND:
            sys.stdout.write(f"{' '.join([*commands, '--help', '--version'])}\n")
            return
        if words[1] not in CONFIGURATIONS:
            return
        name, line = CONFIGURATIONS[words[1]], f"distaccum {line.partition(words[1])[2].lstrip()}"
    else:
        name = "config"
    from distaccum.config import completion  # noqa: PLC0415  it loads Hydra

    sys.argv = ["distaccum", *arguments]  # the name that Hydra tells the shell
    completion.complete(name, [one for one in arguments if one not in CONFIGURATIONS], line=line)
