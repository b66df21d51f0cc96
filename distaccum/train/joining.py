"""What an elastic run does between two views: components for other ranks, and the word that somebody waits to join."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.evaluation_weights import has_two_weights
from distaccum.config.checks import ROLLBACK
from distaccum.config.durations import seconds_of
from distaccum.config.elastic import ElasticConfig
from distaccum.config.schema import RunConfig
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.plan.units import Again, UnitPlan, of_ranks
from distaccum.distributed.elastic.membership import Membership
from distaccum.distributed.elastic.mirrors import keepers_of
from distaccum.distributed.elastic.polled_group import ViewChangedError
from distaccum.distributed.elastic.views import View
from distaccum.errors import ConfigError, DistaccumError
from distaccum.train.carried import Begin
from distaccum.train.components import TrainingComponents
from distaccum.train.desk import Desk
from distaccum.train.memory_checkpoint import MemoryCheckpoints

if TYPE_CHECKING:
    from rich.console import Console

    from distaccum.train.loop import Loop

_LOOK_S = 0.5
_OTHERWISE = "or start it with launch/train.sh, which goes on from its last checkpoint"


def adapted(components: TrainingComponents) -> TrainingComponents:
    """The components of an elastic run: training waits for saves, of which each rank writes a part.

    Raises:
        ConfigError: they have what cannot be carried from one set of ranks to another.
    """
    _check(components)
    waits = replace(components.config.checkpoint, background=False)
    return replace(components, config=replace(components.config, checkpoint=waits))


def expect_told(config: ElasticConfig, told: Mapping[str, Any]) -> None:
    """Raises ConfigError where the agents have not ``told`` what is configured: they read their command line alone."""
    own = {
        "min_ranks": config.min_ranks,
        "rejoin": config.rejoin,
        "expel_after": seconds_of("elastic.expel_after", config.expel_after),
    }
    for key, value in told.items():
        if own[key] != value:
            problem = f"and the job was started with {value}: its agents read their command line, and no file"
            raise ConfigError(f"elastic.{key}", getattr(config, key), problem, f"Write elastic.{key}=... there, too")


def _check(components: TrainingComponents) -> None:
    config: RunConfig = components.config
    if components.device.type != "cpu":
        problem = "an elastic run computes on CPUs, over gloo, which can be left at any moment"
        remedy = f"Hide the GPUs with CUDA_VISIBLE_DEVICES='', {_OTHERWISE}"
        raise ConfigError("device", components.device, problem, remedy)
    refused: dict[str, tuple[Any, str]] = {}
    if isinstance(components.plan, StreamPlan):
        refused["data"] = type(components.data.train).__name__, "a stream's position is its rank's own"
    if config.batch.rehearses:
        refused["batch.micro_size"] = "auto", "it is found by all ranks together, and these change"
    if config.metrics.windows:
        refused["metrics.windows"] = True, "a rank that is lost takes its digests with it"
    if config.trainer.on_spike == ROLLBACK:
        refused["trainer.on_spike"] = ROLLBACK, "it goes back to a checkpoint, and survivors to their memory"
    if config.profile.steps is not None:
        refused["profile.steps"] = config.profile.steps, "windows are counted anew where ranks change"
    two = [type(one).__name__ for one in components.optimizers if has_two_weights(one)]
    if two:
        refused["optimizer"] = two[0], "its train() and eval() round the weights between two windows"
    for key, (value, why) in refused.items():
        raise ConfigError(key, value, f"not in an elastic run: {why}", f"Leave it out, {_OTHERWISE}")


def of_ranks_now(components: TrainingComponents, view: View, again: Again | None) -> TrainingComponents:
    """The components for the ranks of a view, which may go on with an open window."""
    plan, ranks = cast(Any, components.plan), len(view.members)
    plan = plan.for_ranks(ranks, again) if isinstance(plan, UnitPlan) else of_ranks(plan, ranks)
    engine = replace(components.engine, world_size=ranks, keepers=keepers_of(view.members))
    return components.found(plan=plan, engine=engine)


@dataclass(frozen=True, kw_only=True)
class InView:
    """What a run among the members of a view is given beside the rest.

    Args:
        begin: its state, and the window that is open.
        rider: travels with the windows' counts.
        desk: what rank 0 has open from view to view.
        changes: within it an error that a lost rank has caused is a :class:`ViewChangedError`.
        first_to: whether this process is the first of the run to do something.
        memory: checkpoints in memory, of an engine whose windows cannot go on without a rank.
    """

    begin: Begin
    rider: JoinRider
    desk: Desk
    changes: Callable[[], AbstractContextManager[None]]
    first_to: Callable[[str], bool]
    memory: MemoryCheckpoints | None = None

    def enter(self, accumulator: Accumulator, console: Console | None) -> None:
        """Before the first window; ``console`` is rank 0's. What was carried is in the loop from here on."""
        if self.memory is not None:
            self.memory.forget_handed()
            if console is not None:
                self.memory.tell = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        accumulator.add_rider(self.rider)
        if self.begin.carried is not None:
            accumulator.trust()
            if self.memory is None:
                accumulator.engine.take_up(self.begin.kept)
        self.begin.release()

    def leave(self, loop: Loop, error: ViewChangedError) -> None:
        """The view has ended before the run: takes what is carried on from the ``loop``.

        Raises:
            ViewChangedError: a rank is lost while those that are left keep it together.
        """
        if self.memory is None:
            self.begin.carried = loop.carried()
        elif isinstance(error, JoinsError):  # so that nothing is computed again
            with self.changes():
                loop.keep_in_memory()

    def end(self, loop: Loop) -> None:
        """The run has ended on this rank, and others may be lost before they know."""
        if self.memory is None:
            self.begin.carried = loop.carried()

    def for_loop(self) -> dict[str, Any]:
        """The loop's own arguments."""
        carried, given = self.begin.carried, {"elastic": True, "memory": self.memory}
        if carried is None:
            return given
        own: dict[str, Any] = {"tail": carried.tail, "evaluation": carried.evaluation, "saved_step": carried.saved_step}
        own |= {"record": carried.record, "reason": carried.stop, "proven": carried.verified}
        own |= {"unlogged": carried.unlogged, "begun": carried.begun, "ends": carried.ends, "shares": carried.shares}
        own |= {"called": carried.called, "telling": carried.telling}
        return own | given


class JoinsError(ViewChangedError):  # what happens, not what is wrong
    """The view ends between two windows, on all its ranks alike, for somebody who waits: its group is whole."""


class JoinRider:
    """Tells all ranks with a window's count that a member waits to join; a thread asks the store, within the block."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._wished, self._ended = membership, False, Event()
        self._thread = Thread(target=self._look, name="elastic-candidates", daemon=True)

    def __enter__(self) -> JoinRider:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            with suppress(DistaccumError):
                self._wished = self._membership.wishes()

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """Whether this rank knows of one."""
        return [float(self._wished)]

    def incoming(self, sums: list[float]) -> None:
        """Ends the view before its next window where any rank does: on all of them.

        Raises:
            JoinsError: somebody waits to join.
        """
        if sums[0]:
            raise JoinsError("a member waits to join")
