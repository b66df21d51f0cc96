"""What is left of a run that nobody of it can tell any more: its agent writes the status, and says how to go on."""

from __future__ import annotations

from pathlib import Path

from distaccum.train.failure import lines_of
from distaccum.train.run_dir import RunDir


def told(why: str, folder: str, token: str) -> list[str]:
    """The lines for people about a run of which no rank is left.

    Args:
        why: the reason, which its ``status.json`` gets unless a rank has written one.
        folder: its run directory.
        token: of the directory's owner.
    """
    run_dir = RunDir(Path(folder), token=token)
    if not run_dir.path.is_dir():  # it is on another node's disk
        return [why]
    run_dir.write_failure(why)
    return lines_of(run_dir, why)
