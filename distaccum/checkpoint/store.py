"""Checkpoint folders: written whole, verified by SHA-256, oldest pruned."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from distaccum.checkpoint.files import sync, write_json, write_text
from distaccum.distributed.world import World
from distaccum.errors import CheckpointError

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_LATEST = "latest"
_STEP = re.compile(r"step-(\d+)")


class CheckpointStore:
    """``step-N`` folders below ``root``, on a file system that all ranks share.

    Args:
        root: made when the first checkpoint is saved.
        keep: how many of the newest to keep; 0 for all.
    """

    def __init__(self, root: Path, *, keep: int) -> None:
        self.root, self._keep = root, keep

    def save(self, step: int, world: World, write: Callable[[Path], None]) -> Path:
        """Every rank calls ``write`` with the same folder; it becomes ``step-N`` once all have written.

        Whenever the process dies, ``step-N`` is either absent or complete, and an earlier checkpoint is still there.
        """
        final, temporary = self.root / f"step-{step}", self.root / f".saving-step-{step}"
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        world.barrier()
        write(temporary)
        world.barrier()
        if world.is_main:
            _seal(temporary)
            self._publish(temporary, final)
            self._prune()
        world.barrier()
        return final

    def newest_valid(self) -> Path | None:
        """The newest checkpoint that verifies; the log warns of damaged ones, which are passed over."""
        for path in reversed(self._steps()):
            try:
                verify(path)
            except CheckpointError as error:
                _log.warning("passing over a damaged checkpoint: %s", error)
            else:
                _log.info("verified %s", path)
                return path
        return None

    def _steps(self) -> list[Path]:
        found = [path for path in self.root.glob("step-*") if _STEP.fullmatch(path.name)]
        return sorted(found, key=_number)

    def _publish(self, temporary: Path, final: Path) -> None:
        for path in self._steps():  # what lies at or beyond this step was found damaged when the run was resumed
            if _number(path) >= _number(final):
                shutil.rmtree(path)
        temporary.rename(final)
        sync(self.root)
        write_text(self.root / _LATEST, final.name + "\n")

    def _prune(self) -> None:
        for path in self._steps()[: -self._keep] if self._keep else []:
            shutil.rmtree(path)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def verify(path: Path) -> None:
    """Compares every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: the manifest is missing or unreadable, or a file is missing, added or changed.
    """
    try:
        expected: dict[str, str] = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: no readable {MANIFEST} ({error})") from error
    try:
        actual = _digests(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    different = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
    if different:
        raise CheckpointError(f"{path}: missing, added or changed: {', '.join(different)}")


def _seal(folder: Path) -> None:
    for file in folder.rglob("*"):
        sync(file)
    write_json(folder / MANIFEST, _digests(folder))  # syncs the folder too


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            digests[f"{name}/"] = ""
        elif name != MANIFEST:
            with path.open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
