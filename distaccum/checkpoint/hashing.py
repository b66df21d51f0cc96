"""SHA-256 by threads: of what is written, beside its writing, and of several large files at once.

``hashlib``, reads, writes and syncs release the interpreter's lock, so that one core hashes what another one writes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from stat import S_ISREG
from types import TracebackType
from typing import TypeAlias

from distaccum.checkpoint.files import retried, sync

Pieces: TypeAlias = Sequence[memoryview | bytes]

THREADS = min(8, os.cpu_count() or 1)
_LARGE = 2**22  # bytes: a thread costs more than it saves where there are fewer


class HashingWriter:
    """Writes files into a folder, and hashes the same memory in other threads meanwhile; a context.

    A digest tells what a file is to hold, not what the disk gives back: a write that is torn or lost in silence does
    not agree with it. When the block ends, whatever the threads had is hashed, or dropped after an error.

    Args:
        folder: exists already.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="sha256")
        self._digests: dict[str, str | Future[str]] = {}

    def __enter__(self) -> HashingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=kind is not None)

    def write(self, name: str, pieces: Pieces) -> None:
        """Writes one file, durable when this returns; ``pieces`` may not change before :attr:`digests` are read.

        No more files are kept in memory than there are threads.

        Raises:
            OSError: the disk is full, or gone; with the file's name.
        """
        file, size = self.folder / name, sum(map(len, pieces))
        running = [digest for digest in self._digests.values() if isinstance(digest, Future) and not digest.done()]
        if len(running) >= THREADS:
            running[0].result()
        self._digests[name] = self._threads.submit(_sha256, pieces) if size >= _LARGE else _sha256(pieces)
        try:
            with file.open("wb") as opened:
                for piece in pieces:
                    opened.write(piece)
            sync(file)
        except OSError as error:
            if error.filename is None:
                error.filename = str(file)
            raise

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file by its name; waits for the threads."""
        return {
            name: digest.result() if isinstance(digest, Future) else digest for name, digest in self._digests.items()
        }


def digests(files: Sequence[Path]) -> list[str | None]:
    """The SHA-256 of each file, None for what is none, such as a link; the large ones are read by threads.

    Raises:
        OSError: one cannot be read, again and again.
    """
    tasks: list[Callable[[], str | None]] = []
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="sha256")
    try:
        for file in files:
            read = partial(retried, partial(_digest, file), of=file)
            large = retried(partial(_size, file), of=file) >= _LARGE
            tasks.append(threads.submit(read).result if large else read)
        return [task() for task in tasks]
    finally:
        threads.shutdown(cancel_futures=True)


def is_file(path: Path) -> bool:
    """Whether it is no link, pipe or device: what a link names may be anywhere, and to read the others may not end."""
    return S_ISREG(path.lstat().st_mode)


def _size(path: Path) -> int:
    found = path.lstat()
    return found.st_size if S_ISREG(found.st_mode) else 0


def _digest(path: Path) -> str | None:
    if not is_file(path):
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256(pieces: Pieces) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
