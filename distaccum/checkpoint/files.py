"""Atomic writes: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from stat import S_ISREG
from time import sleep
from types import TracebackType
from typing import Any, BinaryIO, TypeAlias, TypeVar

# The digests of a checkpoint's files: BLAKE3, which a core makes of 7 GB in a second, where SHA-256 takes three more.
# That is for a machine where nothing can be installed. A digest names its algorithm, as ``blake3:9f64...``.
_BLAKE3, _SHA256 = "blake3", "sha256"
_ALGORITHMS: dict[str, Callable[[], Any]] = {_SHA256: sha256}
with suppress(ModuleNotFoundError):
    from blake3 import blake3

    _ALGORITHMS[_BLAKE3] = blake3


def begin_digest(like: str = "") -> Any:
    """A digest of nothing yet; where its ``update`` takes many bytes, it does so without the interpreter's lock.

    Args:
        like: a digest, whose algorithm is taken; without one the quickest that is there.

    Raises:
        ImportError: that algorithm is not there.
    """
    name = like.partition(":")[0]
    if name == _BLAKE3 not in _ALGORITHMS:
        raise ImportError("its digests are BLAKE3's, and the package blake3 is not here: pip install blake3")
    quickest = list(_ALGORITHMS.values())[-1]
    return _ALGORITHMS.get(name, quickest)()


def digest_text(digest: Any) -> str:
    """The digest with its algorithm's name, as manifests have it."""
    return f"{digest.name}:{digest.hexdigest()}"


_T = TypeVar("_T")
# What a path that does not hold what was asked for gives. Any other error says nothing about what is on the disk:
# EIO, ESTALE or EINTR of a network file system, EACCES, EMFILE.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # another attempt changes nothing
POINTERS = LATEST, BEST = ("latest", "best")
"""Files beside checkpoints, each with the name of one."""
_PAUSES_S = (0.02, 0.1, 0.5)  # before the second attempt, the third and the last
_LATE_S = (0.1, 0.4, 1.5)  # before looks at what a network file system may show late


def retried(act: Callable[[], _T], *, of: Path | None = None) -> _T:
    """What ``act`` returns; an error of the file system that says nothing about the content is tried again.

    Args:
        act: may be called again after an error: it reads, or writes anew all that it writes.
        of: named in an error that names no file.

    Raises:
        OSError: the last of four errors; or at once, that something is not there, or that nothing can be written there.
    """
    for pause in (*_PAUSES_S, None):
        try:
            return act()
        except OSError as error:
            if isinstance(error, ABSENT) or error.errno in _FULL or pause is None:
                if of is not None and error.filename is None:
                    error.filename = str(of)
                raise
            sleep(pause)
    raise AssertionError


def awaited(look: Callable[[], _T]) -> _T:
    """What ``look`` returns once it finds the file: another machine may have just written it.

    Raises:
        FileNotFoundError: it is not there after two seconds.
    """
    for pause in _LATE_S:
        with suppress(FileNotFoundError):
            return look()
        sleep(pause)
    return look()


def rename(path: Path, final: Path) -> Path:
    """Renames a file or folder, in the place of a file that is there; returns the new path.

    Where a reply of NFS is lost the request is repeated, and told that there is no ``path``: looks whether that is so
    because it has happened.
    """
    own = retried(path.lstat)

    def act() -> None:
        try:
            path.replace(final)
        except OSError:
            if not (os.path.lexists(final) and os.path.samestat(own, final.lstat())):
                raise

    retried(act, of=path)
    return final


def make_folder(path: Path) -> None:
    """Makes a folder that is not there yet; one that is empty may be of a request of this whose reply was lost.

    Raises:
        FileExistsError: something is there.
    """

    def act() -> None:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir() or any(path.iterdir()):
                raise

    retried(act, of=path)


def remove_folder(path: Path) -> None:
    """Removes a folder with what is in it; where a reply is lost, something is gone already, and it goes on."""
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        shutil.rmtree(path)


def listed(folder: Path, pattern: str = "*") -> list[Path]:
    """What is in the folder by a name of this pattern; not ``glob``, which takes one that it may not list for empty."""
    try:
        return sorted(path for path in retried(lambda: list(folder.iterdir())) if fnmatch(path.name, pattern))
    except ABSENT:
        return []


def pointed(path: Path) -> Path:
    """What a ``latest`` or ``best`` beside checkpoints names; any other path as it is."""
    if path.name not in POINTERS or not path.is_file():
        return path
    with path.open("rb") as file:
        name = file.read(64).decode(errors="replace").strip()
    return path.with_name(name) if re.fullmatch(r"step-\d+", name) else path


def sync(path: Path) -> None:
    """Forces a file's or a directory's content to the disk.

    Raises:
        OSError: it may not be there: that is not tried again, since a second call would say that all is well.
    """
    descriptor = retried(lambda: os.open(path, os.O_RDONLY))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file, or makes one, as :func:`replace_file` does."""
    replace_file(path, lambda file: file.write(content))


def replace_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Has a temporary neighbour filled, syncs it and renames it over ``path``: the old file is there, or the new one.

    Nobody can guess the neighbour's name, or have put a link there that leads elsewhere.
    """

    def write() -> None:
        temporary = path.with_name(f".{path.name}.{token_hex(8)}")
        try:
            with temporary.open("xb") as file:
                fill(file)
            sync(temporary)
            rename(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)

    retried(write, of=path)


def write_text(path: Path, text: str) -> None:
    """:func:`write_bytes` for a text."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """:func:`write_text` for a JSON value."""
    write_text(path, json.dumps(value, indent=2) + "\n")


# Files written and hashed by threads: what is written beside its writing, and several files at once.
#
# Digests, reads, writes and syncs release the interpreter's lock, so that one core hashes what another one writes.

Pieces: TypeAlias = Sequence[memoryview | bytes]

THREADS = min(8, os.cpu_count() or 1)
_READ = 2**20  # bytes at once
_LARGE = 2**22  # bytes: a thread costs more than it saves where there are fewer


class HashingWriter:
    """Writes files into a folder, and hashes the same memory beside; a context, at whose end all of them are durable.

    A digest tells what a file is to hold, not what the disk gives back: a write that is torn or lost in silence does
    not agree with it. Large files are written by threads, some at once, and others hash them; small ones at once.

    Args:
        folder: exists already.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._threads = ThreadPoolExecutor(2 * THREADS, thread_name_prefix="checkpoint")
        self._running: dict[Future[str], str] = {}  # files that are being written, and their names
        self._digests: dict[str, str] = {}

    def __enter__(self) -> HashingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish(most=0)
        finally:
            self._threads.shutdown(cancel_futures=True)

    def write(self, name: str, pieces: Pieces) -> None:
        """Writes one file, or has it written; returns when fewer files than there are threads are still in memory.

        Args:
            name: of the file in the folder.
            pieces: its content, which may not change before :attr:`digests` are read.

        Raises:
            OSError: the disk is full, or gone; with the name of this file, or of one before.
        """
        if sum(map(len, pieces)) < _LARGE:
            retried(partial(_write, self.folder / name, pieces))
            self._digests[name] = _digest_of(pieces)
            return
        self._running[self._threads.submit(self._write_and_hash, self.folder / name, pieces)] = name
        self._finish(most=THREADS - 1)

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each file by its name, once all are durable; raises what :meth:`write` does."""
        self._finish(most=0)
        return dict(self._digests)

    def _finish(self, *, most: int) -> None:
        """Waits until so many files are still being written, or fewer."""
        while len(self._running) > most:
            for ended in wait(self._running, return_when=FIRST_COMPLETED).done:
                self._digests[self._running.pop(ended)] = ended.result()

    def _write_and_hash(self, file: Path, pieces: Pieces) -> str:
        """In one thread; another one hashes. As many files as there are cores take two threads each: all there are."""
        hashed = self._threads.submit(_digest_of, pieces)
        retried(partial(_write, file, pieces))
        return hashed.result()


def digests(files: Mapping[Path, str]) -> list[str | None]:
    """The digest of each file, None for what is none, such as a link; the large ones are read by threads.

    Args:
        files: with each a digest whose algorithm is taken, as :func:`begin_digest` does.

    Raises:
        ImportError: an algorithm is not there.
        OSError: one cannot be read, again and again.
    """
    tasks: list[Callable[[], str | None]] = []
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="digest")
    try:
        for file, like in files.items():
            read = partial(retried, partial(_digest, file, like), of=file)
            large = retried(partial(_size, file), of=file) >= _LARGE
            tasks.append(threads.submit(read).result if large else read)
        return [task() for task in tasks]
    finally:
        threads.shutdown(cancel_futures=True)


def _write(file: Path, pieces: Pieces) -> None:
    try:
        with file.open("wb") as opened:
            for piece in pieces:
                opened.write(piece)
        sync(file)
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


def is_file(path: Path) -> bool:
    """Whether it is no link, pipe or device: what a link names may be anywhere, and to read the others may not end."""
    return S_ISREG(path.lstat().st_mode)


def _size(path: Path) -> int:
    found = path.lstat()
    return found.st_size if S_ISREG(found.st_mode) else 0


def _digest(path: Path, like: str) -> str | None:
    if not is_file(path):
        return None
    found, buffer = begin_digest(like), bytearray(_READ)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            found.update(memoryview(buffer)[:size])
    return digest_text(found)


def _digest_of(pieces: Pieces) -> str:
    found = begin_digest()
    for piece in pieces:
        found.update(piece)
    return digest_text(found)
