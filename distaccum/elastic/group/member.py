"""This process as a member of an elastic job, as its agent has started it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import monotonic, time
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not marked as exported

from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.signals import MEMBER
from distaccum.distributed.world import World
from distaccum.elastic.group.membership import Membership
from distaccum.elastic.group.polled_group import PolledGroup
from distaccum.elastic.group.views import Report, View
from distaccum.elastic.words import secret_of

JOB = "DISTACCUM_ELASTIC"
_ANSWERS_WITHIN = timedelta(minutes=10)


class Member:
    """A process's part in an elastic job.

    Args:
        name: ``node.local.life``.
        environment: what the launcher's variables say; who was not started with the job has a rank that is nobody's.
        store: the job's.
        membership: says who else is there.
        told: the settings that the agents have read from their command lines.
    """

    def __init__(
        self,
        name: str,
        environment: LaunchEnvironment,
        store: Store,
        membership: Membership,
        told: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.name, self.store, self.membership, self.told = name, store, membership, told
        self.environment = environment if self.is_first else replace(environment, rank=environment.size)
        self.rank = environment.rank
        """In the newest view."""

    @classmethod
    def of(cls, environment: LaunchEnvironment, variables: Mapping[str, str] = os.environ) -> Member | None:
        """What an agent has told this process; None where none has started it."""
        if MEMBER not in variables:
            return None
        name, job = variables[MEMBER], json.loads(variables[JOB])
        host, port = job["store"]
        server = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_ANSWERS_WITHIN)
        store, waits_s = PrefixStore(job["prefix"], server), float(job["expel_after_s"])
        secret, least = secret_of(job["prefix"], variables), int(job["least"])
        membership = Membership(store, name, expel_after_s=waits_s, least=least, limit_s=waits_s, secret=secret)
        told = {"min_ranks": membership.least, "rejoin": bool(job["rejoin"]), "expel_after": waits_s}
        return cls(name, environment, store, membership, told)

    @property
    def is_first(self) -> bool:
        """Whether this process was started with the job."""
        return self.name.endswith(".1")

    def lost_at_start(self, rank: int) -> str:
        """How the process that was started with the job as ``rank`` has ended; empty while it has not."""
        local = self.environment.local_size
        return self.membership.gone().get(f"{rank // local}.{rank % local}.1", "")

    def next_view(self, view: View | None, report: Report) -> tuple[View, Mapping[str, Report]]:
        """Reports, and waits for the view that follows; the first one is that of all who were started."""
        if view is None and self.is_first:
            local = self.environment.local_size
            started = [f"{rank // local}.{rank % local}.1" for rank in range(self.environment.size)]
            first = self.membership.begin(started)
            return first, {one: Report(member=one, position=report.position) for one in first.members}
        if view is None:
            self.membership.say_ready()
        return self.membership.regroup(view, report)

    @contextmanager
    def world(self, view: View, device: torch.device) -> Iterator[tuple[World, PolledGroup]]:
        """The view's process group, which is the default one within the block.

        Raises:
            ViewChangedError: a member is lost meanwhile.
        """
        group = self.membership.open_group(view)
        rank = view.rank_of(self.name)
        assert rank is not None
        try:
            with group.changes():
                yield World(rank=rank, size=len(view.members), device=device), group
        finally:
            group.leave()
            if dist.is_initialized():
                dist.destroy_process_group()

    def began(self, own: float) -> float:
        """When the job's first process began, for a process that began at ``own``: on this machine's monotonic clock.

        Between machines it is as exact as their clocks.
        """
        first = self.membership.words.first("began", repr(time() - (monotonic() - own)), float)
        return monotonic() - (time() - first)

    def tell_folder(self, path: Path, token: str) -> None:
        """Says where the run writes, for the agent that finds nobody left; ``token`` is that of the folder's owner."""
        self.membership.words.set("folder", json.dumps([str(path), token]))

    def first_to(self, what: str) -> bool:
        """Whether no process of the job has asked for this before; without a store nobody can tell."""
        try:
            return bool(self.store.add(f"first/{what}", 1) == 1)
        except dist.DistError:
            return True

    def end(self, exit_code: int) -> None:
        """Says that the job has ended, for all agents, unless the store has ended before."""
        with suppress(dist.DistError):
            self.membership.words.set("ended", str(exit_code))
