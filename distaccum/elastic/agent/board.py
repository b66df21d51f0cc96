"""The store's keys, as the agents read and write them: who is gone, who is in the newest view, whether all is over.

All lie under the prefix of one run, :attr:`Board.prefix`:

- ``shape``: how many nodes and processes a node, as the first agent has it.
- ``lives/<node>.<local>``: counts the workers started there, so that no id is ever used again.
- ``words``, ``word-numbers``, ``word/<n>``: which member is gone, and how it ended.
- ``view/<g>``, ``newest``: the members of a generation, by rank; decided by the workers, but for view 0.
- ``candidates``, ``candidate-number/<n>``: who waits to join.
- ``beat/<node>``: counts an agent's seconds; ``alive``: those of all agents.
- ``folder``: the run directory and its owner's token, as the newest first rank has told.
- ``ended``, ``why``: the job's exit code, and a reason.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from secrets import token_hex

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, though not marked as exported

_log = logging.getLogger(__name__)

RUN, ALIVE = "elastic-run", "elastic-alive"
"""The two keys outside of the prefix: the run's name, and the count of all agents' seconds."""


def has_ended(store: Store) -> bool:
    """Whether the job that this store serves is over."""
    return store.check([RUN]) and store.check([f"elastic/{store.get(RUN).decode()}/ended"])


@dataclass(frozen=True)
class Word:
    """That a member is gone, and how: ``was killed by SIGKILL``."""

    member: str
    how: str


@dataclass(frozen=True)
class View:
    """The members of a generation, in the order of their ranks."""

    generation: int
    members: tuple[str, ...]


class Board:
    """The keys of the run that ``store`` serves; the first who comes names it.

    Not for several threads. Every call is a round trip or a few, and none waits for a key.
    """

    def __init__(self, store: Store) -> None:
        self._plain = store
        self.run = store.compare_set(RUN, "", token_hex(8)).decode()
        self.prefix = f"elastic/{self.run}"
        self._store = PrefixStore(self.prefix, store)
        self._read: set[int] = set()
        self._words_seen = 0
        self._candidates: list[str] = []
        self.view = View(-1, ())
        """The newest that :meth:`new_views` has read."""

    def agree_shape(self, nnodes: int, nproc: int) -> tuple[int, int]:
        """The nodes and processes a node of this job: those of who comes first, who also decides view 0."""
        mine = json.dumps({"nnodes": nnodes, "nproc": nproc})
        said = json.loads(self._store.compare_set("shape", "", mine))
        nnodes, nproc = said["nnodes"], said["nproc"]
        members = [f"{node}.{local}.1" for node in range(nnodes) for local in range(nproc)]
        self._store.compare_set("view/0", "", json.dumps({"generation": 0, "members": members}))
        self._store.compare_set("newest", "", "0")
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
        self._store.set(f"word/{number}", json.dumps({"member": member, "how": how}))
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
                text = self._store.get(f"word/{number}")
                try:
                    said = json.loads(text)
                    new.append(Word(str(said["member"]), str(said["how"])))
                except (ValueError, TypeError, KeyError):
                    _log.warning("word/%d of the store is no word of this job (%.60r), and is left out", number, text)
        return new

    def new_views(self) -> list[View]:
        """The views decided since the last call, in their order."""
        new = []
        while self._store.check([f"view/{self.view.generation + 1}"]):
            said = json.loads(self._store.get(f"view/{self.view.generation + 1}"))
            self.view = View(said["generation"], tuple(said["members"]))
            new.append(self.view)
        return new

    def candidates(self) -> list[str]:
        """All who ever waited to join."""
        for number in range(len(self._candidates) + 1, self._store.add("candidates", 0) + 1):
            if not self._store.check([f"candidate-number/{number}"]):
                break
            self._candidates.append(self._store.get(f"candidate-number/{number}").decode())
        return self._candidates

    def beat(self, node: int) -> None:
        """Counts a second of this node's agent."""
        self._store.add(f"beat/{node}", 1)
        self._plain.add(ALIVE, 1)

    def beats(self, node: int) -> int:
        """The seconds of a node's agent; 0 for one that has not come."""
        return self._store.add(f"beat/{node}", 0)

    def ended(self) -> int | None:
        """The job's exit code, once it is over."""
        return int(self._store.get("ended")) if self._store.check(["ended"]) else None

    def end(self, code: int, why: str) -> None:
        """Ends the job, unless it has ended already; the reason is there before the code."""
        if not self._store.check(["ended"]):
            self._store.set("why", why)
            self._store.compare_set("ended", "", str(code))

    def folder(self) -> tuple[str, str] | None:
        """Path and owner's token of the run directory; None before the run has one."""
        if not self._store.check(["folder"]):
            return None
        path, token = json.loads(self._store.get("folder"))
        return path, token

    def why(self) -> str:
        """The reason that was given with ``ended``."""
        return self._store.get("why").decode() if self._store.check(["why"]) else ""
