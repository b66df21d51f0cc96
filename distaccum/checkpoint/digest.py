"""The digests of a checkpoint's files: BLAKE3, which a core makes of 7 GB in a second, where SHA-256 takes three more.

A digest names its algorithm, as ``blake3:9f64...``; one without a name is SHA-256, of checkpoints from before.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from blake3 import blake3

NAME = "blake3:"


class Digest(Protocol):
    """What takes bytes piece by piece, in any pieces; without the interpreter's lock where they are many."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Adds the bytes of ``data``."""

    def hexdigest(self) -> str:
        """Of all bytes so far."""


def begin(like: str = NAME) -> Digest:
    """A digest of nothing yet, by the algorithm of the digest ``like``."""
    return blake3() if like.startswith(NAME) else hashlib.sha256()


def text(digest: Digest) -> str:
    """The digest with its algorithm's name, as manifests have it."""
    return f"{NAME if isinstance(digest, blake3) else ''}{digest.hexdigest()}"
