"""Atomic writes: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from secrets import token_hex
from time import sleep
from typing import TypeVar

_T = TypeVar("_T")
# What a path that does not hold what was asked for gives. Any other error says nothing about what is on the disk:
# EIO, ESTALE or EINTR of a network file system, EACCES, EMFILE.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # another attempt changes nothing
_PAUSES_S = (0.02, 0.1, 0.5)  # before the second attempt, the third and the last


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


def listed(folder: Path, pattern: str = "*") -> list[Path]:
    """What is in the folder by a name of this pattern; not ``glob``, which takes one that it may not list for empty."""
    try:
        return sorted(path for path in retried(lambda: list(folder.iterdir())) if fnmatch(path.name, pattern))
    except ABSENT:
        return []


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
    """Writes ``content`` to a temporary neighbour, syncs it and renames it over ``path``.

    Nobody can guess the neighbour's name, or have put a link there that leads elsewhere.
    """

    def write() -> None:
        temporary = path.with_name(f".{path.name}.{token_hex(8)}")
        try:
            with temporary.open("xb") as file:
                file.write(content)
            sync(temporary)
            temporary.replace(path)
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
