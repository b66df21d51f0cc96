"""Atomic writes: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
# What a path that does not hold what was asked for gives. Any other error says nothing about what is on the disk:
# EIO, ESTALE or EINTR of a network file system, EACCES, EMFILE.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_ATTEMPTS = 4


def retried(read: Callable[[], _T]) -> _T:
    """What ``read`` returns; an error of the file system that says nothing about the content is tried again.

    Raises:
        OSError: the last of ``_ATTEMPTS`` errors, or that something is not there.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return read()
        except ABSENT:
            raise
        except OSError:
            continue
    return read()


def sync(path: Path) -> None:
    """Forces a file's or a directory's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes ``content`` to a temporary neighbour, syncs it and renames it over ``path``.

    Raises:
        OSError: it cannot be written; the neighbour is removed, where that can be.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        sync(temporary)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """:func:`write_bytes` for a text."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """:func:`write_text` for a JSON value."""
    write_text(path, json.dumps(value, indent=2) + "\n")
