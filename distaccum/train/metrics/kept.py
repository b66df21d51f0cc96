"""Checkpoints held for a tracker that is to upload them, beyond their removal from ``checkpoints/``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

_BEST = "best"


class KeptCheckpoints:
    """Hard links of checkpoints below a folder: no byte is copied, and none is lost when the run prunes its own.

    Args:
        folder: on the file system of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, path: Path, *, step: int, best: bool) -> Path:
        """Holds the checkpoint at ``path``; returns where.

        Raises:
            OSError: another file system, or one without hard links.
        """
        kept = self._folder / f"step-{step}"
        partial = self._folder / f".step-{step}"
        if not _is_same(path, kept):  # which may be read at this moment
            rmtree(partial, ignore_errors=True)  # a run died as it was made
            rmtree(kept, ignore_errors=True)  # of a past that the run repeats
            for file, name in files_of(path):
                link = partial / name
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, link)
            partial.rename(kept)
        if best:
            (self._folder / _BEST).write_text(str(step))
        return kept

    def all(self, until: int) -> Iterator[tuple[Path, int, bool]]:
        """Those up to a step, by step: where, of which step, and whether it is the best."""
        marker = self._folder / _BEST
        best = marker.read_text() if marker.exists() else ""
        steps = sorted(int(path.name.removeprefix("step-")) for path in self._folder.glob("step-*"))
        for step in steps:
            if step <= until:
                yield self._folder / f"step-{step}", step, str(step) == best

    def drop(self) -> None:
        """Removes them all."""
        rmtree(self._folder, ignore_errors=True)


def is_wanted(log_checkpoints: str, *, best: bool) -> bool:
    """Whether a checkpoint is one of ``none``, ``best`` or ``all``."""
    return log_checkpoints == "all" or (log_checkpoints == "best" and best)


def _is_same(path: Path, kept: Path) -> bool:
    try:
        return all(file.samefile(kept / name) for file, name in files_of(path))
    except OSError:
        return False


def files_of(kept: Path) -> Iterator[tuple[Path, str]]:
    """Each file of a checkpoint, and its name in it."""
    for file in sorted(kept.rglob("*")):
        if file.is_file():
            yield file, file.relative_to(kept).as_posix()
