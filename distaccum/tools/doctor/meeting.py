"""The ranks of a job, over the launcher's store: what each has found, their clocks, and whether they share a folder.

Only the store is used here, no process group: what keeps gloo or NCCL from connecting must not keep the ranks from
telling. Every wait has an end.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from time import time
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not marked as exported
from torch.distributed.rendezvous import rendezvous

from distaccum.distributed.environment import LaunchEnvironment, private_store
from distaccum.tools.doctor.facts import Look, seconds

MEET_S = 120.0  # interpreters on a busy file system differ by so much
_ROUNDS = 10
_ANSWER_S = 10.0
# A run's lock is of another machine's clock: what is 300 s old there is taken over (train/owner.py), and logs of ranks
# are read side by side.
_SKEW_WANTED_S = 1.0


class AbsentError(Exception):
    """Ranks have not come, or the store cannot be reached; the message says which."""


@dataclass(frozen=True)
class Meeting:
    """This rank's side."""

    ranks: LaunchEnvironment
    store: Store

    @classmethod
    def open(cls, ranks: LaunchEnvironment, within_s: float = MEET_S) -> Meeting:
        """Waits for all ranks.

        Raises:
            AbsentError: some did not come.
        """
        limit = timedelta(seconds=within_s)
        try:
            store, _, _ = next(rendezvous("env://", rank=ranks.rank, world_size=ranks.size, timeout=limit))
            return cls(ranks, private_store(store, ranks.rank, ranks.size, timeout_s=within_s))
        except (TimeoutError, RuntimeError, ValueError) as error:  # torch's DistNetworkError is a RuntimeError
            raise AbsentError(str(error).splitlines()[0]) from error

    def give(self, key: str, value: Any) -> None:
        """Shows ``value`` (of JSON's types) to the others."""
        with suppress(RuntimeError):
            self.store.set(key, json.dumps(value))

    def take(self, key: str, within_s: float) -> Any:
        """What another rank shows under ``key``; None where it has not come within so many seconds."""
        try:
            self.store.wait([key], timedelta(seconds=max(within_s, 0.01)))
            return json.loads(self.store.get(key))
        except RuntimeError:  # torch's time-out, or a connection that is gone
            return None


def answer_pings(meeting: Meeting) -> None:
    """On the ranks but 0: says the time when asked for it."""
    asked = meeting.take("clock", MEET_S)
    if asked is None or meeting.ranks.rank not in asked:
        return
    for turn in range(_ROUNDS):
        if meeting.take(f"ping/{meeting.ranks.rank}/{turn}", 2 * _ANSWER_S * len(asked)) is None:
            return
        meeting.give(f"pong/{meeting.ranks.rank}/{turn}", time())


def clocks(meeting: Meeting, asked: dict[int, str]) -> Look:
    """On rank 0: how far the clocks of these ranks (by rank: a name) are ahead of this one's.

    By F. Cristian's method ("Probabilistic clock synchronization", 1989): the other clock was read between question and
    answer, so half of the shortest round trip is the most that the difference is off.
    """
    found = Look()
    meeting.give("clock", list(asked))
    for rank, name in asked.items():
        best: tuple[float, float] | None = None
        for turn in range(_ROUNDS):
            asked_at = time()
            meeting.give(f"ping/{rank}/{turn}", 1)
            there = meeting.take(f"pong/{rank}/{turn}", _ANSWER_S)
            if there is None:
                break
            bound, ahead = (time() - asked_at) / 2, there - (asked_at + time()) / 2
            if best is None or bound < best[0]:
                best = (bound, ahead)
        judge_clock(found, rank, name, best)
    return found


def judge_clock(found: Look, rank: int, name: str, best: tuple[float, float] | None) -> None:
    """``best`` is the error bound and the difference, in seconds; None where there was no answer."""
    row = f"clock of rank {rank}"
    if best is None:
        found.tell(row, f"no answer within {_ANSWER_S:.0f} s")
        return
    bound, ahead = best
    way = "ahead of" if ahead >= 0 else "behind"
    text = f"{seconds(abs(ahead))} {way} rank 0's, give or take {seconds(bound)}"
    found.tell(row, text, {"ahead_s": ahead, "bound_s": bound})
    if abs(ahead) - bound > _SKEW_WANTED_S:
        what = f"the clock of {name} (rank {rank}) is {text}"
        found.find(what, "sudo timedatectl set-ntp true && sudo chronyc makestep    # there, and see: chronyc tracking")


def gather(meeting: Meeting, key: str, mine: Any, within_s: float) -> dict[int, Any]:
    """On rank 0: what every rank shows under ``key``; None of those that have not come within so many seconds."""
    if meeting.ranks.rank:
        meeting.give(f"{key}/{meeting.ranks.rank}", mine)
        return {}
    end = time() + within_s
    return {0: mine} | {rank: meeting.take(f"{key}/{rank}", end - time()) for rank in range(1, meeting.ranks.size)}


def agree(meeting: Meeting, key: str, mine: Any, within_s: float) -> Any:
    """Rank 0's ``mine`` (of JSON's types) on every rank; None where rank 0 is gone."""
    if meeting.ranks.rank:
        return meeting.take(key, within_s)
    meeting.give(key, mine)
    return mine
