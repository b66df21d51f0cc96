"""How a process of an elastic job runs it: as a member of views, each of which has a process group of its own."""

from __future__ import annotations

import os
import signal
import sys

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.distributed.environment import LaunchEnvironment
from distaccum.elastic.engine.builder import ElasticEngines
from distaccum.elastic.group.member import Member
from distaccum.elastic.group.membership import ExpelledError
from distaccum.elastic.run.checks import adapted, expect_told
from distaccum.elastic.run.going_back import Anew
from distaccum.elastic.run.views import run_in_views
from distaccum.errors import ConfigError
from distaccum.train import cli
from distaccum.train.components import TrainingComponents
from distaccum.train.run import Launch, RunResult, Start


class ElasticLaunch(Launch):
    """A process that an agent has started.

    Args:
        member: what it is in the job.
    """

    dies_by = signal.SIGKILL
    ranks_change = True
    gone = (ExpelledError,)
    engines = ElasticEngines()

    def __init__(self, member: Member) -> None:
        super().__init__(member.environment)
        self._member = member
        self.joins = not member.is_first
        self.lost_at_start = member.lost_at_start

    @classmethod
    def of(cls, environment: LaunchEnvironment) -> ElasticLaunch:
        """What the agent has told this process.

        Raises:
            ConfigError: no agent has started it.
        """
        member = Member.of(environment)
        if member is None:
            remedy = "Start `python -m distaccum.elastic`, or launch/elastic.sh"
            raise ConfigError("distaccum.elastic.run", None, "no agent of an elastic job has started this", remedy)
        return cls(member)

    @property
    def rank(self) -> int:
        """In the newest view."""
        return self._member.rank

    def store(self) -> Store:
        """The job's."""
        return self._member.store

    def adapted(self, components: TrainingComponents) -> TrainingComponents:
        """The components of an elastic run.

        Raises:
            ConfigError: they cannot be elastic, or the agents were told something else.
        """
        expect_told(components.config.elastic, self._member.told)
        return adapted(components)

    def train(self, start: Start) -> RunResult:
        """Trains view by view."""
        start.began = self._member.began(start.began)
        return run_in_views(Anew(start.make_components, start.take()), start, self._member)

    def end(self, exit_code: int) -> None:
        """Ends the process at once: groups that were left may have threads which wait."""
        if exit_code == 0 and self._member.rank == 0:
            self._member.end(0)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def main() -> None:
    """Runs the job that the command line describes, as a member of it."""
    cli.main(ElasticLaunch.of)
