"""Atomic writes: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import json
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Forces a file's or a directory's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` to a temporary neighbour, syncs it and renames it over ``path``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def write_json(path: Path, value: object) -> None:
    """:func:`write_text` for a JSON value."""
    write_text(path, json.dumps(value, indent=2) + "\n")
