"""The store's keys, as the agents read and write them: who is gone, who is in the newest view, whether all is over.

All lie under the prefix of one run, :attr:`Board.prefix`:

- ``shape``: how many nodes and processes a node, as the first agent has it.
- ``lives/<node>.<local>``: counts the workers started there, so that no id is ever used again.
- ``words``, ``word-numbers``, ``word/<n>``: which member is gone, and how it ended.
- ``view/<g>``: the members of a generation, by rank; decided by the workers, but for view 0.
- ``candidates``, ``candidate-number/<n>``: who waits to join.
- ``beat/<node>``: counts an agent's seconds; ``alive``: those of all agents.
- ``folder``: the run directory and its owner's token, as the newest first rank has told.
- ``ended``, ``why``: the job's exit code, and a reason.

All but counters are signed: see ``words.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from secrets import token_hex

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.elastic.agent.settings import TOKEN
from distaccum.elastic.words import Words, secret_of
from distaccum.errors import ConfigError

RUN, ALIVE = "elastic-run", "elastic-alive"
"""The two keys outside of the prefix: the run's name, and the count of all agents' seconds."""


def has_ended(store: Store) -> bool:
    """Whether the job that this store serves is over."""
    if not store.check([RUN]):
        return False
    prefix = f"elastic/{store.get(RUN).decode(errors='replace')}"
    return Words(PrefixStore(prefix, store), secret_of(prefix)).get("ended", int) is not None


@dataclass(frozen=True)
class Word:
    """That a member is gone, and how: ``was killed by SIGKILL``."""

    member: str
    how: str

    @classmethod
    def of(cls, text: str) -> Word:
        """As the store holds it."""
        said = json.loads(text)
        return cls(str(said["member"]), str(said["how"]))


@dataclass(frozen=True)
class View:
    """The members of a generation, in the order of their ranks."""

    generation: int
    members: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> View:
        """As the store holds it."""
        said = json.loads(text)
        return cls(int(said["generation"]), tuple(map(str, said["members"])))


class Board:
    """The keys of the run that ``store`` serves; the first who comes names it.

    Not for several threads. Every call is a round trip or a few, and none waits for a key.
    """

    def __init__(self, store: Store, variables: Mapping[str, str] = os.environ) -> None:
        self._plain = store
        self.run = store.compare_set(RUN, "", token_hex(8)).decode()
        self.prefix = f"elastic/{self.run}"
        self._store = PrefixStore(self.prefix, store)
        self._words = Words(self._store, secret_of(self.prefix, variables))
        self._read: set[int] = set()
        self._words_seen = 0
        self._candidates: list[str] = []
        self.view = View(-1, ())
        """The newest that :meth:`new_views` has read."""

    def agree_shape(self, nnodes: int, nproc: int) -> tuple[int, int]:
        """The nodes and processes a node of this job: those of who comes first, who also decides view 0.

        Raises:
            ConfigError: the first one has another token, or a stranger has written there.
        """
        if self._store.check(["shape"]) and self._words.get("shape", _shape) is None:
            problem = "another token, or none, has signed what is in the job's store"
            raise ConfigError(TOKEN, None, problem, "Start all agents of a job with the same one")
        nnodes, nproc = self._words.first("shape", json.dumps([nnodes, nproc]), _shape)
        members = tuple(f"{node}.{local}.1" for node in range(nnodes) for local in range(nproc))
        self._words.first("view/0", json.dumps({"generation": 0, "members": members}), View.of)
        return nnodes, nproc

    def lives(self, node: int, local: int) -> int:
        """How many workers were started there."""
        return self._store.add(f"lives/{node}.{local}", 0)

    def new_life(self, node: int, local: int) -> int:
        """The number of the next worker there, from 1."""
        return self._store.add(f"lives/{node}.{local}", 1)

    def tell_gone(self, member: str, how: str) -> None:
        """Writes the word."""
        number = self._store.add("word-numbers", 1)
        self._words.set(f"word/{number}", json.dumps({"member": member, "how": how}))
        self._store.add("words", 1)

    def new_words(self) -> list[Word]:
        """The words that have come since the last call, in their order."""
        written = self._store.add("words", 0)
        if written == self._words_seen:
            return []
        self._words_seen = written
        new = []
        for number in range(1, self._store.add("word-numbers", 0) + 1):
            # A number without a word is one of an agent that is writing it, or was killed over it.
            if number not in self._read and self._store.check([f"word/{number}"]):
                self._read.add(number)
                if (word := self._words.get(f"word/{number}", Word.of)) is not None:
                    new.append(word)
        return new

    def new_views(self) -> list[View]:
        """The views decided since the last call, in their order."""
        new = []
        while (view := self._words.get(f"view/{self.view.generation + 1}", View.of)) is not None:
            self.view = view
            new.append(view)
        return new

    def candidates(self) -> list[str]:
        """All who ever waited to join."""
        for number in range(len(self._candidates) + 1, self._store.add("candidates", 0) + 1):
            if not self._store.check([f"candidate-number/{number}"]):
                break
            self._candidates.append(self._words.get(f"candidate-number/{number}", str) or "")
        return [member for member in self._candidates if member]

    def beat(self, node: int) -> None:
        """Counts a second of this node's agent."""
        self._store.add(f"beat/{node}", 1)
        self._plain.add(ALIVE, 1)

    def beats(self, node: int) -> int:
        """The seconds of a node's agent; 0 for one that has not come."""
        return self._store.add(f"beat/{node}", 0)

    def ended(self) -> int | None:
        """The job's exit code, once it is over."""
        return self._words.get("ended", int)

    def end(self, code: int, why: str) -> None:
        """Ends the job, unless it has ended already; the reason is there before the code."""
        if self.ended() is None:
            self._words.set("why", why)
            self._words.first("ended", str(code), int)

    def folder(self) -> tuple[str, str] | None:
        """Path and owner's token of the run directory; None before the run has one."""
        return self._words.get("folder", _folder)

    def why(self) -> str:
        """The reason that was given with ``ended``."""
        return self._words.get("why", str) or ""


def _shape(text: str) -> tuple[int, int]:
    nnodes, nproc = json.loads(text)
    return int(nnodes), int(nproc)


def _folder(text: str) -> tuple[str, str]:
    path, token = json.loads(text)
    return str(path), str(token)
