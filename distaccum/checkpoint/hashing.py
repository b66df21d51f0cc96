"""Files written and hashed by threads: what is written beside its writing, and several files at once.

Digests, reads, writes and syncs release the interpreter's lock, so that one core hashes what another one writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from stat import S_ISREG
from types import TracebackType
from typing import TypeAlias

from distaccum.checkpoint import digest
from distaccum.checkpoint.files import retried, sync

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
            _write(self.folder / name, pieces)
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
        _write(file, pieces)
        return hashed.result()


def digests(files: Mapping[Path, str]) -> list[str | None]:
    """The digest of each file, None for what is none, such as a link; the large ones are read by threads.

    Args:
        files: with the digest that each is compared with, or that of any other, whose algorithm is taken.

    Raises:
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
    found, buffer = digest.begin(like), bytearray(_READ)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            found.update(memoryview(buffer)[:size])
    return digest.text(found)


def _digest_of(pieces: Pieces) -> str:
    found = digest.begin()
    for piece in pieces:
        found.update(piece)
    return digest.text(found)
