"""Hydra's shell completion for a configuration of ours: without torch, and quiet where a line cannot be read."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress

import hydra
from hydra._internal.utils import get_args_parser

from distaccum.config.command_line import register_aliases
from distaccum.config.schema import conf_dir

_OFFERED = ("--check", "--help", "--version", "--cfg", "--multirun", "--config-dir", "--info")


def complete(name: str, arguments: Sequence[str], *, line: str | None = None) -> None:
    """Answers ``-sc install=SHELL``, ``uninstall=SHELL`` and ``query=SHELL`` for ``conf/NAME.yaml``.

    Args:
        name: of the primary configuration.
        arguments: the command line, with ``-sc``.
        line: what was typed, from the command's name on; by default ``COMP_LINE``, as the shell sets it.
    """
    typed = os.environ.get("COMP_LINE", "") if line is None else line
    words = typed.split()
    if words and words[-1].startswith("-") and not typed.endswith(" "):
        sys.stdout.write(f"{' '.join(_OFFERED)}\n")
        return
    known = get_args_parser()._option_string_actions  # argparse has no public name for them
    kept = [word for word in words if not word.startswith("-") or word in known]
    os.environ["COMP_LINE"] = " ".join(kept) + (" " if typed.endswith(" ") or not kept else "")
    sys.argv[1:] = arguments
    register_aliases(())
    asks = any(argument.startswith("query=") for argument in arguments)
    answer = hydra.main(config_path=str(conf_dir()), config_name=name, version_base="1.3")(_nothing)
    if not asks:
        answer()
        return
    with suppress(SystemExit), redirect_stderr(io.StringIO()):  # what cannot be composed completes nothing
        answer()


def _nothing(_: object) -> None:
    """Hydra's task, which is not run."""
