"""What ranks settle over the launcher's key-value store before any process group exists.

Rank 0 alone reads the command line; the others are handed each job as it resolved it, so all run one configuration and
one run directory, and a mistake is found and reported once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.distributed.environment import LaunchEnvironment
from distaccum.errors import DistaccumError

_FAREWELL_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: its number in a sweep, its directory, and its resolved configuration as plain values."""

    number: int
    run_dir: str
    config: Mapping[str, Any]


class JobRejectedError(DistaccumError):
    """Some rank cannot run the job; the message is that rank's, the same on all."""


class JobCoordinator:
    """The ranks' shared notes. Reading waits until they are written."""

    def __init__(self, ranks: LaunchEnvironment, store: Store) -> None:
        self._ranks, self._store = ranks, store

    def publish(self, job: Job) -> None:
        """Rank 0 hands a job to the others."""
        self._store.set(f"job/{job.number}", json.dumps(asdict(job)))

    def shutdown(self, number: int, exit_code: int) -> None:
        """Rank 0 says that there is no job of this number: the others leave with ``exit_code``.

        After a success it waits a little until they have read it, for the store may live in this very process.
        """
        self._store.set(f"job/{number}", json.dumps(exit_code))
        deadline = monotonic() + _FAREWELL_S
        while exit_code == 0 and self._store.add("left", 0) < self._ranks.size - 1 and monotonic() < deadline:
            sleep(0.01)

    def await_job(self, number: int) -> Job | int:
        """The job of this number, or the exit code to leave with."""
        note = json.loads(self._store.get(f"job/{number}"))
        if isinstance(note, int):
            self._store.add("left", 1)
            return note
        return Job(**note)

    def store_for(self, job: Job) -> Store:
        """The part of the store in which a job's process group may write."""
        return PrefixStore(f"job-{job.number}", self._store)

    def agree(self, job: Job, rejection: str | None) -> None:
        """Every rank says whether it can run the job, and if not, why.

        Raises:
            RefusedError: on all ranks, with the first complaint, if any rank cannot.
        """
        notes = self.store_for(job)
        notes.set(f"verdict/{self._ranks.rank}", json.dumps(rejection))
        if self._ranks.rank == 0:
            verdicts = [json.loads(notes.get(f"verdict/{rank}")) for rank in range(self._ranks.size)]
            notes.set("verdict", json.dumps(next((verdict for verdict in verdicts if verdict), None)))
        first = json.loads(notes.get("verdict"))
        if first:
            raise JobRejectedError(first)
