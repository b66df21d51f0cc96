"""Checkpoint folders: written whole, verified by SHA-256, oldest pruned."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from distaccum.checkpoint.files import ABSENT, retried, sync, write_json, write_text
from distaccum.distributed.world import World
from distaccum.errors import CheckpointError

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_LATEST, _BEST = "latest", "best.json"
_REPLACED = ".replaced-"
_STEP = re.compile(r"step-(\d+)")
# What is read of a checkpoint: see state.py. A file of such a name that is not in the manifest would be read, too.
_READ = re.compile(r"(model|optimizer)\b.*\.safetensors$|state\.json$|random-\d+\.json$|data-\d+\.pt$|deepspeed/")
_TRY_AGAIN = "that is no damage, and nothing was changed. Mend the file system, and start again"


class UnreadableError(CheckpointError):
    """The file system gives an error, which says nothing about what a checkpoint holds."""


class CheckpointStore:
    """``step-N`` folders below ``root``, on a file system that all ranks share.

    Args:
        root: made when the first checkpoint is saved.
        keep: how many of the newest to keep; 0 for all.
    """

    def __init__(self, root: Path, *, keep: int) -> None:
        self.root, self._keep = root, keep

    def save(self, step: int, world: World, write: Callable[[Path], None], *, again: bool = False) -> Path:
        """Every rank calls ``write`` with the same folder; it becomes ``step-N`` once all have written.

        Whenever the process dies, ``step-N`` is either absent or complete, and an earlier checkpoint is still there.
        With ``again`` the ``step-N`` that is there was read by this run, and is replaced once the new one is complete.
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
            before = self.root / f"{_REPLACED}step-{step}"
            if again and final.is_dir():
                shutil.rmtree(before, ignore_errors=True)
                final.rename(before)
            self._publish(temporary, final)
            shutil.rmtree(before, ignore_errors=True)
            self._prune()
        world.barrier()
        return final

    def recover(self) -> None:
        """Puts back a checkpoint that a process which died was about to replace; before a run goes on, on rank 0."""
        for path in self.root.glob(f"{_REPLACED}step-*"):
            final = path.with_name(path.name.removeprefix(_REPLACED))
            if final.exists():
                shutil.rmtree(path)
            else:
                path.rename(final)

    def newest_valid(self) -> Path | None:
        """The newest checkpoint that verifies; the log warns of damaged ones, which are passed over.

        Raises:
            UnreadableError: a newer one cannot be read, so that nobody knows whether it is damaged.
        """
        for path in reversed(self._steps()):
            try:
                verify(path)
            except UnreadableError:
                raise
            except CheckpointError as error:
                _log.warning("passing over a damaged checkpoint: %s", error)
            else:
                _log.info("verified %s", path)
                return path
        return None

    def mark_best(self, path: Path, *, metric: str, value: float) -> None:
        """Keeps a checkpoint of this store beside the newest ones, in place of the one before; rank 0 calls it."""
        write_json(self.root / _BEST, {"checkpoint": path.name, "metric": metric, "value": value})

    def best(self) -> dict[str, Any] | None:
        """What :meth:`mark_best` has written; None where nothing was, or its checkpoint is gone."""
        try:
            found: dict[str, Any] = json.loads(retried((self.root / _BEST).read_bytes))
            return found if (self.root / found["checkpoint"]).is_dir() else None
        except (*ABSENT, ValueError, KeyError, TypeError):
            return None

    def _steps(self) -> list[Path]:
        try:
            found = retried(lambda: list(self.root.iterdir()))  # not glob, which passes over errors
        except ABSENT:
            return []
        except OSError as error:
            raise UnreadableError(f"{self.root}: cannot be read ({error}): {_TRY_AGAIN}") from error
        return sorted((path for path in found if _STEP.fullmatch(path.name)), key=_number)

    def _publish(self, temporary: Path, final: Path) -> None:
        for path in self._steps():
            if _number(path) >= _number(final):
                _clear(path)
        temporary.rename(final)
        sync(self.root)
        write_text(self.root / _LATEST, final.name + "\n")

    def _prune(self) -> None:
        folders = [path for path in self._steps() if path.is_dir() and not path.is_symlink()]
        best = self.best() or {}
        for path in folders[: -self._keep] if self._keep else []:
            if path.name != best.get("checkpoint"):
                shutil.rmtree(path)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _clear(path: Path) -> None:
    """Takes a checkpoint out of the way of one that is being saved; nothing is deleted."""
    try:
        verify(path)
    except UnreadableError:
        _set_aside(path, "aside")
    except CheckpointError:
        _set_aside(path, "damaged")
    else:
        _set_aside(path, "aside")


def _set_aside(path: Path, why: str) -> None:
    names = (path.with_name(f"{why}-{path.name}{f'-{i}' if i else ''}") for i in count())
    aside = next(name for name in names if not os.path.lexists(name))
    path.rename(aside)
    _log.warning("%s is %s now: it was in the way of a checkpoint of this run", path, aside.name)


def verify(path: Path) -> None:
    """Compares every file of a checkpoint with its manifest.

    Files that nothing here reads may have been added, as by a callback or by the file system.

    Raises:
        CheckpointError: it is damaged: there is no manifest, or a file that is read is missing, added or changed.
        UnreadableError: a file cannot be read, again and again.
    """
    try:
        text = retried((path / MANIFEST).read_bytes)
        expected: dict[str, str] = json.loads(text)
        if not isinstance(expected, dict):
            raise CheckpointError(f"{path}: {MANIFEST} is no manifest")
        actual = _digests(path)
    except (*ABSENT, ValueError) as error:
        raise CheckpointError(f"{path}: no readable {MANIFEST} ({error})") from error
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read ({error}): {_TRY_AGAIN}") from error
    added = {name for name in actual.keys() - expected.keys() if not _READ.match(name)}
    names = (expected.keys() | actual.keys()) - added
    different = sorted(name for name in names if expected.get(name) != actual.get(name))
    if different:
        raise CheckpointError(f"{path}: missing, added or changed: {', '.join(different)}")


def _seal(folder: Path) -> None:
    for file in folder.rglob("*"):
        sync(file)
    write_json(folder / MANIFEST, _digests(folder))  # syncs the folder too


def _digests(folder: Path) -> dict[str, str]:
    digests: dict[str, str] = {}
    for parent, folders, files in retried(lambda: list(os.walk(folder, onerror=_raise))):
        digests |= {f"{Path(parent, name).relative_to(folder).as_posix()}/": "" for name in folders}
        for name in files:
            path = Path(parent, name)
            if path != folder / MANIFEST:
                digests[path.relative_to(folder).as_posix()] = retried(partial(_digest, path))
    return dict(sorted(digests.items()))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _raise(error: OSError) -> None:
    raise error
