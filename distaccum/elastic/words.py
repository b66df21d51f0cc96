"""What the processes of an elastic job tell each other through its store, signed where the job has a token.

A store has no secret: whoever reaches its port can write there. What is not of this job, or is no such word, is left
out with a warning. Counters are not signed; they only say when to look.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.elastic.agent.settings import TOKEN

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def secret_of(prefix: str, variables: Mapping[str, str] = os.environ) -> str:
    """What a job's words are signed with; empty where it has no token. A word of another job of its is none of it."""
    token = variables.get(TOKEN, "")
    return f"{prefix}\n{token}" if token else ""


class Words:
    """Values of a store under its keys.

    Args:
        store: of the job, below its prefix.
        secret: signs them, with the key, so that one is of no use elsewhere; empty to sign nothing.
    """

    def __init__(self, store: Store, secret: str = "") -> None:
        self._store, self._secret = store, secret.encode()
        self._left_out: set[tuple[str, bytes]] = set()

    def set(self, key: str, text: str) -> None:
        """Writes a value, in the place of the one before."""
        self._store.set(key, self._signed(key, text))

    def get(self, key: str, parse: Callable[[str], _T]) -> _T | None:
        """A value as ``parse`` reads it; None where there is none, or none of this job."""
        return self._read(key, self._store.get(key), parse) if self._store.check([key]) else None

    def first(self, key: str, text: str, parse: Callable[[str], _T]) -> _T:
        """The value that was there first, this one where none was; what is no word of this job gives way."""
        expected, mine = "", self._signed(key, text)
        while True:
            found = self._store.compare_set(key, expected, mine)
            value = self._read(key, found, parse)
            if value is not None:
                return value
            try:
                expected = found.decode()
            except UnicodeDecodeError:  # which nobody can name
                self._store.set(key, mine)

    def _signed(self, key: str, text: str) -> str:
        return f"{self._mark(key, text)} {text}" if self._secret else text

    def _mark(self, key: str, text: str) -> str:
        return hmac.digest(self._secret, f"{key}\n{text}".encode(), "sha256").hex()[:32]

    def _read(self, key: str, found: bytes, parse: Callable[[str], _T]) -> _T | None:
        try:
            text = found.decode()
            mark, _, signed = text.partition(" ")
            if not self._secret or hmac.compare_digest(mark.encode(), self._mark(key, signed).encode()):
                return parse(signed if self._secret else text)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass  # said below
        if (key, found) not in self._left_out:
            self._left_out.add((key, found))
            _log.warning("%s of the store is no word of this job (%.60r), and is left out", key, found)
        return None
