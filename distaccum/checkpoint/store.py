"""Checkpoint folders: written whole, verified by digests, oldest pruned."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distaccum.checkpoint.files import (
    ABSENT,
    BEST,
    LATEST,
    awaited,
    digests,
    is_file,
    listed,
    make_folder,
    pointed,
    remove_folder,
    rename,
    retried,
    sync,
    write_json,
    write_text,
)
from distaccum.distributed.world import World
from distaccum.errors import CheckpointError

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_NONE: Mapping[str, Any] = MappingProxyType({})
_RECORD = "best.json"
_CHECKPOINTS = "checkpoints"
_REPLACED = ".replaced-"
_STEP = re.compile(r"step-(\d+)")
# What is read of a checkpoint: see state.py. A file of such a name that is not in the manifest would be read, too.
_READ = re.compile(r"(model|optimizer)\b.*\.safetensors$|state\.json$|random-\d+\.json$|(data|loop)-\d+\.pt$")
_IN_THE_WAY = "it was in the way of a checkpoint of this run"
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
        self._whole: set[str] = set()  # sealed or verified by this process

    def save(
        self,
        step: int,
        world: World,
        write: Callable[[Path], Mapping[str, str] | None],
        *,
        again: bool = False,
        before_publishing: Callable[[], None] = lambda: None,
    ) -> Path:
        """Every rank calls ``write`` with the same folder; it becomes ``step-N`` once all have written.

        ``write`` may return, by name in the folder, the digests of what it has written and synced; rank 0 syncs and
        reads the files for which no rank gives one.

        Whenever the process dies, ``step-N`` is either absent or complete, and an earlier checkpoint is still there.
        With ``again`` the ``step-N`` that is there was read by this run, and is replaced once the new one is complete.
        Rank 0 calls ``before_publishing`` when all is written, and an error there leaves the store as it was.
        """
        temporary = self.begin(step, world)
        with _named(temporary):
            given = world.all_gather_object(dict(write(temporary) or {}))  # all have written
            if world.is_main:
                self.publish(step, given, again=again, before_publishing=before_publishing)
        world.barrier()
        return self.root / f"step-{step}"

    def begin(self, step: int, world: World) -> Path:
        """An empty folder that every rank writes its part of ``step-N`` into; a collective."""
        temporary = self.folder_of(step)
        with _named(temporary):
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
                make_folder(temporary)
            world.barrier()
        return temporary

    def publish(
        self,
        step: int,
        given: Sequence[Mapping[str, str]],
        *,
        again: bool = False,
        before_publishing: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes ``step-N`` of what all ranks have written since :meth:`begin`; called by rank 0.

        Args:
            step: its number.
            given: each rank's digests of the files that it has written and synced.
            again: see :meth:`save`.
            before_publishing: see :meth:`save`.
        """
        final, temporary = self.root / f"step-{step}", self.folder_of(step)
        with _named(temporary):
            _seal(temporary, {name: digest for found in given for name, digest in found.items()})
            before_publishing()
            before = self.root / f"{_REPLACED}step-{step}"
            if again and final.is_dir():
                shutil.rmtree(before, ignore_errors=True)
                rename(final, before)
            self._publish(temporary, final)
            shutil.rmtree(before, ignore_errors=True)
            self._prune()

    def end_publishing(self, step: int) -> None:
        """Does what :meth:`publish` has left to do of ``step-N``, which is there and whole, if a process died in it."""
        final = self.root / f"step-{step}"
        sync(self.root)
        self._published(final, self._newer(final))
        self._prune()

    def drop(self, step: int) -> None:
        """Removes what was written since :meth:`begin`, as far as it can be; called by rank 0 when nobody writes."""
        shutil.rmtree(self.folder_of(step), ignore_errors=True)

    def folder_of(self, step: int) -> Path:
        """Where ``step-N`` is written until it is published."""
        return self.root / f".saving-step-{step}"

    def recover(self) -> None:
        """Puts back a checkpoint that a process which died was about to replace; before a run goes on, on rank 0."""
        for path in listed(self.root, f"{_REPLACED}step-*"):
            if path.with_name(path.name.removeprefix(_REPLACED)).exists():
                remove_folder(path)
        for path, final in self.to_recover():
            rename(path, final)
        if self.steps():
            self._point_to_best()

    def to_recover(self) -> list[tuple[Path, Path]]:
        """What :meth:`recover` would put back, and where; reads only."""
        found = listed(self.root, f"{_REPLACED}step-*")
        pairs = ((path, path.with_name(path.name.removeprefix(_REPLACED))) for path in found)
        return [(path, final) for path, final in pairs if not final.exists()]

    def newest_valid(self) -> Path | None:
        """The newest checkpoint that verifies; the log warns of damaged ones, which are passed over.

        Raises:
            UnreadableError: a newer one cannot be read, so that nobody knows whether it is damaged.
        """
        for path in reversed(self.steps()):
            try:
                verify(path)
            except UnreadableError:
                raise
            except CheckpointError as error:
                _log.warning("passing over a damaged checkpoint: %s", error)
            else:
                _log.info("verified %s", path)
                self._whole.add(path.name)
                return path
        return None

    def mark_best(self, path: Path, *, metric: str, mode: str, value: float) -> None:
        """Keeps a checkpoint of this store beside the newest ones, in place of the one before; rank 0 calls it.

        Called before ``path`` is published: until then, the one before is the best.
        """
        before = self.best()
        if before is not None and before["checkpoint"] == path.name:
            before = before.get("before")
        if before is not None:
            before = {name: value for name, value in before.items() if name != "before"}
        found = {"checkpoint": path.name, "metric": metric, "mode": mode, "value": value}
        write_json(self.root / _RECORD, found | {"before": before})
        if path.is_dir():
            self._point_to_best()

    def _point_to_best(self) -> None:
        """Has ``best`` name the best one: once that is there, and before the one before may be pruned."""
        try:
            found = self.best()
        except OSError as error:  # then nothing is pruned either
            _log.warning("%s stays as it is: %s", self.root / BEST, error)
            return
        if found is None:
            (self.root / BEST).unlink(missing_ok=True)
        elif pointed(self.root / BEST).name != found["checkpoint"]:
            write_text(self.root / BEST, found["checkpoint"] + "\n")

    def best(self, *, only_reads: bool = False) -> dict[str, Any] | None:
        """What :meth:`mark_best` has written; None where nothing was, or its checkpoint is gone.

        A damaged record is set aside, unless this ``only_reads``, and the log says so.
        """
        file = self.root / _RECORD
        try:
            found: dict[str, Any] | None = json.loads(retried(file.read_bytes, of=file))
            while found is not None and not (self.root / found["checkpoint"]).is_dir():
                found = found.get("before")
            if found is not None:
                _expect_best(found)
        except ABSENT:
            return None
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            if only_reads:
                _log.warning("%s is damaged", file)
                return None
            _set_aside(
                file, "damaged", "which checkpoint is the best is not known, and the next evaluation begins anew"
            )
            return None
        return found

    def steps(self) -> list[Path]:
        """Everything that is named like a checkpoint, oldest first.

        Raises:
            UnreadableError: nobody knows what is there.
        """
        try:
            found = listed(self.root)
        except OSError as error:
            raise UnreadableError(f"{self.root}: cannot be read ({error}): {_TRY_AGAIN}") from error
        return sorted((path for path in found if _STEP.fullmatch(path.name)), key=_number)

    def _publish(self, temporary: Path, final: Path) -> None:
        newer = self._newer(final)
        if os.path.lexists(final):
            _clear(final)
        rename(temporary, final)
        sync(self.root)
        self._published(final, newer)

    def _newer(self, final: Path) -> list[Path]:
        return [path for path in self.steps() if _number(path) > _number(final)]

    def _published(self, final: Path, newer: Sequence[Path]) -> None:
        """What is left to do once a checkpoint is there; ``newer`` ones were there before."""
        self._whole.add(final.name)
        for path in newer:  # once there is another one to go on from
            _clear(path)
            self._whole.discard(path.name)
        self._point_to_best()
        write_text(self.root / LATEST, final.name + "\n")
        newest = max(self.steps(), key=_number, default=final)
        if newest != final:  # another process has saved it, while this one slept before it wrote
            write_text(self.root / LATEST, newest.name + "\n")

    def _prune(self) -> None:
        """Removes what is older than the newest whole ones, under another name: one half removed is no damaged one."""
        if not self._keep:
            return
        try:
            best = self.best() or {}
            folders = [path for path in self.steps() if path.is_dir() and not path.is_symlink()]
            kept = sum(1 for path in folders[-self._keep :] if self._is_whole(path))
            old = [path for path in folders[: -self._keep] if path.name != best.get("checkpoint")]
            if kept < self._keep or not old:
                return
            removed = [_rename_to_remove(path) for path in old]
            sync(self.root)
            for path in removed:
                remove_folder(path)
        except (OSError, UnreadableError) as error:
            _log.warning("an older checkpoint cannot be removed, and stays for now (%s)", error)

    def _is_whole(self, path: Path) -> bool:
        """Whether a checkpoint can be relied on; one of an earlier process is verified once, and renamed if damaged."""
        if path.name not in self._whole:
            try:
                verify(path)
            except UnreadableError as error:
                _log.warning("no older checkpoint is removed: %s", error)
                return False
            except CheckpointError:
                _set_aside(path, "damaged", "an older one is kept in its place")
                return False
            self._whole.add(path.name)
        return True


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of a call that names no file names this one: it says what is full."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


def _rename_to_remove(path: Path) -> Path:
    removed = path.with_name(f".removing-{path.name}")
    shutil.rmtree(removed, ignore_errors=True)
    return rename(path, removed)


def _expect_best(found: Mapping[str, Any]) -> None:
    """Raises KeyError or TypeError of a record without a metric and its value, which the next evaluation needs."""
    if not (isinstance(found["metric"], str) and isinstance(found["value"], int | float)):
        raise TypeError


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _clear(path: Path) -> None:
    """Takes a checkpoint out of the way of one that is being saved; nothing is deleted."""
    try:
        verify(path)
    except UnreadableError:
        _set_aside(path, "aside", _IN_THE_WAY)
    except CheckpointError:
        _set_aside(path, "damaged", _IN_THE_WAY)
    else:
        _set_aside(path, "aside", _IN_THE_WAY)


def _set_aside(path: Path, name: str, why: str) -> None:
    names = (path.with_name(f"{name}-{path.name}{f'-{i}' if i else ''}") for i in count())
    aside = next(free for free in names if not os.path.lexists(free))
    rename(path, aside)
    _log.warning("%s is %s now: %s", path, aside.name, why)


def find(path: Path, *, best: bool = False) -> Path:
    """The checkpoint that ``path`` names: its folder; what ``latest`` or ``best`` beside it names; or a run's newest.

    Args:
        path: of a checkpoint, a pointer, or a run directory. Nothing is verified but a run's newest.
        best: that of the run with the best evaluation.

    Raises:
        CheckpointError: the run has none.
        UnreadableError: see :meth:`CheckpointStore.newest_valid`.
    """
    store = CheckpointStore(path / _CHECKPOINTS, keep=0)
    if best:
        kept = store.best(only_reads=True)
        if kept is None:
            problem = f"{path} has no best checkpoint"
            raise CheckpointError(f"{problem}: a run keeps one with checkpoint.best=eval_loss, or another result")
        return store.root / str(kept["checkpoint"])
    if not store.root.is_dir():
        return pointed(path)
    if (newest := store.newest_valid()) is None:
        raise CheckpointError(f"{path} has no whole checkpoint")
    return newest


def verify(path: Path) -> None:
    """Compares every file of a checkpoint with its manifest, after :func:`await_files`.

    Files that nothing here reads may have been added, as by a callback or by the file system. The folder itself may
    be a link; in it, a link or a pipe is no file of a checkpoint.

    Raises:
        CheckpointError: it is damaged: there is no manifest, or a file that is read is missing, added or changed.
        UnreadableError: a file cannot be read, again and again; or what made its digest is not installed.
    """
    await_files(path)
    try:
        text = retried(partial(_manifest, path), of=path / MANIFEST)
        expected: dict[str, str] = json.loads(text)
        if not isinstance(expected, dict):
            raise CheckpointError(f"{path}: {MANIFEST} is no manifest")
        actual = _digests(path, like=expected)
    except (*ABSENT, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: no readable {MANIFEST} ({error})") from error
    except ImportError as error:
        raise UnreadableError(f"{path}: {error}") from error
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read ({error}): {_TRY_AGAIN}") from error
    added = {name for name in actual.keys() - expected.keys() if not _READ.match(name)}
    names = (expected.keys() | actual.keys()) - added
    different = sorted(name for name in names if actual.get(name) is None or expected.get(name) != actual[name])
    if different:
        raise CheckpointError(f"{path}: missing, added or changed: {', '.join(different)}")


def await_files(folder: Path) -> None:
    """Waits for those of a checkpoint's files that its manifest names and that are not there: they may be late.

    Whoever reads them says what has not come after two seconds, or cannot be read.
    """

    with suppress(OSError, ValueError, RecursionError, CheckpointError):
        names: Mapping[str, str] = json.loads(awaited(partial(_manifest, folder)))

        def look() -> None:
            if [name for name in names if not os.path.lexists(folder / name)]:  # looks at each: all may be late
                _walk(folder)  # for which NFS asks what is there, where it remembers that something is not
                raise FileNotFoundError

        if isinstance(names, dict):
            awaited(look)


def _seal(folder: Path, known: Mapping[str, str] = _NONE) -> None:
    """Syncs what is not ``known`` to be durable, with its digest, and writes the manifest.

    A file of another host that this one does not see yet is in it, as that host has written and synced it.
    """
    for parent, folders, files in _walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.relative_to(folder).as_posix() not in known:
                sync(path)
    write_json(folder / MANIFEST, _digests(folder, known))  # syncs the folder too


def _digests(
    folder: Path, known: Mapping[str, str] = _NONE, *, like: Mapping[str, Any] = _NONE
) -> dict[str, str | None]:
    """By name: the digest of a file, "" for a folder, and None for what is neither, such as a link.

    ``known`` ones are taken as they are; others have the algorithms of ``like``.
    """
    found: dict[str, str | None] = dict(known)
    unknown: dict[str, Path] = {}
    for parent, folders, files in _walk(folder):
        for name in folders:
            path = Path(parent, name)
            found[f"{path.relative_to(folder).as_posix()}/"] = None if path.is_symlink() else ""
        for name in files:
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if path != folder / MANIFEST and relative not in known:
                unknown[relative] = path
    alike = {path: str(like.get(name) or "") for name, path in unknown.items()}
    found |= zip(unknown, digests(alike), strict=True)
    return dict(sorted(found.items()))


def _walk(folder: Path) -> list[tuple[str, list[str], list[str]]]:
    return retried(lambda: list(os.walk(folder, onerror=_raise)))


def _manifest(folder: Path) -> bytes:
    if not is_file(folder / MANIFEST):
        raise CheckpointError(f"{folder}: {MANIFEST} is no manifest")
    return (folder / MANIFEST).read_bytes()


def _raise(error: OSError) -> None:
    raise error
