"""Shell completion: the subcommands of ``distaccum``, and behind ``train`` and ``plan`` the settings, by Hydra.

``eval "$(distaccum -sc install=bash)"`` tells the shell to ask ``distaccum -sc query=bash`` with what was typed in
``COMP_LINE``. Where nothing is answered the shell completes names of files. It loads no torch.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr

import hydra
from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.completion_plugin import DefaultCompletionPlugin

from distaccum.config.command_line import register_aliases
from distaccum.config.schema import conf_dir
from distaccum.program import CONFIGURATIONS

_CURSOR_AT_COMMAND = 2  # words: distaccum, and the one being typed
_OFFERED = ("--check", "--help", "--version", "--cfg", "--multirun", "--config-dir", "--info")


def complete(name: str, arguments: Sequence[str], *, line: str | None = None) -> None:
    """Answers ``-sc install=SHELL``, ``uninstall=SHELL`` and ``query=SHELL`` for ``conf/NAME.yaml``.

    Args:
        name: of the primary configuration.
        arguments: the command line, with ``-sc``.
        line: what was typed, from the command's name on; by default ``COMP_LINE``, as the shell sets it.
    """
    if any(argument.startswith("query=") for argument in arguments):
        answers = _answers(name, os.environ.get("COMP_LINE", "") if line is None else line)
        sys.stdout.write("".join(f"{answer}\n" for answer in answers))
        return
    sys.argv[1:] = arguments
    hydra.main(config_path=str(conf_dir()), config_name=name, version_base="1.3")(_nothing)()


def _answers(name: str, line: str) -> Sequence[str]:
    """What may stand where the line ends; nothing where it cannot be composed."""
    _, *words = line.split()
    typing = "" if line.endswith(" ") or not words else words.pop()
    if typing.startswith("-"):
        return _OFFERED
    known = get_args_parser()._option_string_actions  # argparse has no public name for them
    before = [word for word in words if not word.startswith("-") or word in known]
    register_aliases(())
    try:
        with redirect_stderr(io.StringIO()), initialize_config_dir(str(conf_dir()), version_base="1.3"):
            plugin = DefaultCompletionPlugin(GlobalHydra.instance().config_loader())
            return plugin._query(config_name=name, line=" ".join([*before, typing]))
    except (Exception, SystemExit):  # of many kinds
        return ()


def _nothing(_: object) -> None:
    """Hydra's task, which is not run."""


def complete_words(commands: Iterable[str], arguments: Sequence[str]) -> None:
    """Answers ``distaccum [COMMAND] -sc install=SHELL`` and the shell's ``query=SHELL``."""
    name, line = "config", os.environ.get("COMP_LINE", "")
    words = line.split()
    if any(argument.startswith("query=") for argument in arguments):
        if len(words) + line.endswith(" ") <= _CURSOR_AT_COMMAND:
            sys.stdout.write(f"{' '.join([*commands, '--help', '--version'])}\n")
            return
        if words[1] not in CONFIGURATIONS:
            return
        name, line = CONFIGURATIONS[words[1]], f"distaccum {line.partition(words[1])[2].lstrip()}"
    sys.argv = ["distaccum", *arguments]  # the name that Hydra tells the shell
    complete(name, [one for one in arguments if one not in CONFIGURATIONS], line=line)
