"""Coordination of the ranks over the launcher's key-value store, before any process group exists.

Rank 0 alone reads the command line and publishes each job with its resolved configuration. So all ranks run one
configuration in one run directory, and a mistake is reported once.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf
from time import monotonic, sleep
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.distributed.environment import REJECTED, LaunchEnvironment
from distaccum.distributed.watchdog import trouble_of
from distaccum.errors import DistaccumError, PeerError, shorten

_log = logging.getLogger(__name__)

_SHUTDOWN_S = 10.0
_POLL_S = 0.01
_FIRST_WORD_S = 60.0  # of waiting in silence; then after twice as long, each time


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: its number in a sweep, its directory, and its resolved configuration as plain values.

    ``tried``: a sweeper looks for the best of many runs, so that one whose gradients are NaN ends itself alone.
    """

    number: int
    run_dir: str
    config: Mapping[str, Any]
    tried: bool = False


class JobRejectedError(DistaccumError):
    """Some rank cannot run the job; the message is that rank's, the same on all."""


class JobCoordinator:
    """Passes jobs, and whether ranks can run them, through the store. Reading waits until a value is written.

    Args:
        environment: who this process is.
        store: of all ranks.
        lost: how the process of a rank has ended, or an empty string; None where its launcher ends this one then.
    """

    def __init__(
        self, environment: LaunchEnvironment, store: Store, *, lost: Callable[[int], str] | None = None
    ) -> None:
        self._environment, self._store, self._lost = environment, store, lost
        store.set(f"process/{environment.rank}", json.dumps([os.getpid(), socket.gethostname()]))

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
        lost_of = self._lost
        while lost_of is not None and not self._store.check([f"job/{number}"]):
            if lost := lost_of(0):
                _log.error("rank 0 %s before the run had begun", lost)
                return 1
            sleep(_POLL_S)
        published = json.loads(self._store.get(f"job/{number}"))
        if isinstance(published, int):
            self._store.add("left", 1)
            return published
        return Job(**published)

    def store_for(self, job: Job) -> Store:
        """The part of the store in which a job's process group may write."""
        return PrefixStore(f"job-{job.number}", self._store)

    def agree(self, job: Job, rejection: str | None, *, within_s: float) -> None:
        """Collects from every rank why it cannot run the job, or None.

        Args:
            job: that is to run.
            rejection: this rank's.
            within_s: seconds that a rank may come later than another; infinity for no limit.

        Raises:
            JobRejectedError: on all ranks, with the first rank's rejection, if any rank cannot run it.
            PeerError: a rank has not come in time.
        """
        store, rank = self.store_for(job), self._environment.rank
        if rejection is not None:
            store.set(REJECTED, rejection)
        store.set(f"verdict/{rank}", json.dumps(rejection))
        if rank == 0:
            verdicts = {other: f"verdict/{other}" for other in range(self._environment.size)}
            try:
                self._await(store, verdicts, within_s)
            except PeerError as error:
                if self._lost is None:  # else the others see that this rank ends
                    store.set("verdict", json.dumps(error.reason))
                raise
            given = [json.loads(store.get(name)) for name in verdicts.values()]
            store.set("verdict", json.dumps(next((verdict for verdict in given if verdict), None)))
        else:
            self._await(store, {0: "verdict/0"}, within_s)
            self._await(store, {0: "verdict"}, 2 * within_s)  # for rank 0 may wait for others
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

    def _await(self, store: Store, names: Mapping[int, str], within_s: float) -> None:
        """Waits until each rank has written what is named."""
        began, absent, word_s = monotonic(), list(names), _FIRST_WORD_S
        while absent := [rank for rank in absent if not store.check([names[rank]])]:
            for rank in absent:
                if lost := self._lost(rank) if self._lost is not None else "":
                    raise PeerError(f"rank {rank} {lost} before the run had begun", "while this rank waited for it")
            waited = monotonic() - began
            if waited > min(word_s, within_s):
                late = shorten(map(self._process, absent))
                said = f"{late} is not ready to train {waited:.0f} s after rank {self._environment.rank} was"
                if waited > within_s:
                    raise PeerError(f"{said} (trainer.hang_timeout)", "while this rank waited for it")
                ends = f"after {within_s:.0f} s the run ends" if within_s < inf else "the run waits for it"
                _log.warning("%s; %s (trainer.hang_timeout)", said, ends)
                word_s *= 2
            sleep(_POLL_S)

    def _process(self, rank: int) -> str:
        """What is known of a rank that does not come."""
        if not self._store.check([f"process/{rank}"]):
            return f"rank {rank}"
        pid, host = json.loads(self._store.get(f"process/{rank}"))
        trouble = trouble_of(pid) if host == socket.gethostname() else ""
        return f"rank {rank} (process {pid} on {host}{f', which {trouble}' if trouble else ''})"
