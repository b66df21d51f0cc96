"""Optional extras of the package: the one line that installs what is missing."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

_LOCK = Path(__file__).parents[2] / "requirements-dev.lock"  # in a checkout, not in a wheel


def install_command(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to this environment; in a checkout, in the tested versions."""
    versions = f"-c {shlex.quote(str(_LOCK))} " if _LOCK.is_file() else ""
    return f"{shlex.quote(sys.executable)} -m pip install {versions}'distaccum[{extra}]'"
