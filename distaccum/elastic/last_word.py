"""What is left of a run that nobody of it can tell any more: its agent writes the status, and says how to go on."""

from __future__ import annotations

from pathlib import Path

from distaccum.train.failure import lines_of
from distaccum.train.run_dir import RunDir


def told(why: str, folder: tuple[str, str] | None) -> list[str]:
    """The lines for people about a run of which no rank is left.

    Args:
        why: the reason, which its ``status.json`` gets unless a rank has written one.
        folder: its run directory, and the token of the directory's owner; None where it had come to none.
    """
    if folder is None or not (path := Path(folder[0])).is_dir():  # or it is on another node's disk
        return [why]
    run_dir = RunDir(path, token=folder[1])
    run_dir.write_failure(why)
    return lines_of(run_dir, why)
