"""Coordination of the ranks over the launcher's key-value store, before any process group exists.

Rank 0 alone reads the command line and publishes each job with its resolved configuration. So all ranks run one
configuration in one run directory, and a mistake is reported once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.distributed.environment import LaunchEnvironment
from distaccum.errors import DistaccumError, PeerError

_SHUTDOWN_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: its number in a sweep, its directory, and its resolved configuration as plain values."""

    number: int
    run_dir: str
    config: Mapping[str, Any]


class JobRejectedError(DistaccumError):
    """Some rank cannot run the job; the message is that rank's, the same on all."""


class JobCoordinator:
    """Passes jobs, and whether ranks can run them, through the store. Reading waits until a value is written."""

    def __init__(self, environment: LaunchEnvironment, store: Store) -> None:
        self._environment, self._store = environment, store

    def publish(self, job: Job) -> None:
        """Hands a job to the other ranks; called by rank 0."""
        self._store.set(f"job/{job.number}", json.dumps(asdict(job)))

    def shutdown(self, number: int, exit_code: int) -> None:
        """Publishes ``exit_code`` in place of job ``number``: the other ranks leave with it; called by rank 0.

        After a success it waits a few seconds until they have read it, since the store may live in this process.
        """
        self._store.set(f"job/{number}", json.dumps(exit_code))
        latest = monotonic() + _SHUTDOWN_S
        while exit_code == 0 and self._store.add("left", 0) < self._environment.size - 1 and monotonic() < latest:
            sleep(0.01)

    def await_job(self, number: int) -> Job | int:
        """The job of this number, or the exit code to leave with."""
        published = json.loads(self._store.get(f"job/{number}"))
        if isinstance(published, int):
            self._store.add("left", 1)
            return published
        return Job(**published)

    def store_for(self, job: Job) -> Store:
        """The part of the store in which a job's process group may write."""
        return PrefixStore(f"job-{job.number}", self._store)

    def agree(self, job: Job, rejection: str | None) -> None:
        """Collects from every rank why it cannot run the job, or None.

        Raises:
            JobRejectedError: on all ranks, with the first rank's rejection, if any rank cannot run it.
        """
        store = self.store_for(job)
        store.set(f"verdict/{self._environment.rank}", json.dumps(rejection))
        if self._environment.rank == 0:
            verdicts = [json.loads(store.get(f"verdict/{rank}")) for rank in range(self._environment.size)]
            store.set("verdict", json.dumps(next((verdict for verdict in verdicts if verdict), None)))
        first = json.loads(store.get("verdict"))
        if first:
            raise JobRejectedError(first)

    @contextmanager
    def beginning(self, job: Job, reason_of: Callable[[BaseException], str]) -> Iterator[None]:
        """Rank 0's last steps alone, before all join the process group; the other ranks wait until it has made them.

        A rank that failed there could show no file of its own on a full disk, and the others would wait for it.

        Raises:
            PeerError: on the other ranks, if rank 0 has failed, with its reason.
        """
        store = self.store_for(job)
        if self._environment.rank == 0:
            try:
                yield
            except BaseException as error:
                store.set("beginning", reason_of(error))
                raise
            store.set("beginning", "")
            return
        reason = store.get("beginning").decode()
        if reason:
            raise PeerError(reason, "while this rank waited for it")
        yield
