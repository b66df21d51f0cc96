"""An elastic run from view to view: each has a process group of its own, and goes on from where the last has ended."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol, cast

from distaccum.checkpoint.state import SavedState
from distaccum.distributed.signals import StopSignals
from distaccum.distributed.world import World
from distaccum.elastic.engine.builder import ElasticEngines
from distaccum.elastic.engine.shares import LostStateError
from distaccum.elastic.engine.window import Again, ContinuedPlan
from distaccum.elastic.group.member import Member
from distaccum.elastic.group.membership import ExpelledError
from distaccum.elastic.group.mirrors import keepers_of
from distaccum.elastic.group.polled_group import PolledGroup, ViewChangedError
from distaccum.elastic.group.views import Report, View
from distaccum.elastic.run.going_back import Anew
from distaccum.elastic.run.going_on import GoesOn
from distaccum.elastic.run.hand_over import Begin
from distaccum.elastic.run.in_place import InPlace
from distaccum.elastic.run.in_view import InView, Rank0Resources
from distaccum.elastic.run.joining import JoinHook
from distaccum.elastic.run.memory_checkpoint import MemoryCheckpoints
from distaccum.elastic.run.standstill import Standstill
from distaccum.errors import DistaccumError
from distaccum.program import REPORT, load
from distaccum.train.components import TrainingComponents
from distaccum.train.failure import note_failure
from distaccum.train.owner import Holder, Owner
from distaccum.train.run import RunResult, Start, train
from distaccum.train.run_dir import RunDir

_log = logging.getLogger(__name__)


class Successor(Owner):
    """Owns the run directory once this process is the first rank: after the first rank of a view before.

    Args:
        run_dir: knows the token of the owner that the other ranks know to be gone, if they know of one.
        generation: of the view that this process is first in; it takes over from earlier ones.
    """

    def __init__(self, run_dir: RunDir, generation: int) -> None:
        super().__init__(run_dir.path)
        self._after = run_dir.token
        self.holder = replace(self.holder, generation=generation)

    def why_dead(self, other: Holder | None) -> str | None:
        """Those before are, whether they run or not."""
        if other is not None and other.token == self._after:
            return "is gone, as the other ranks know"
        if other is not None and other.launch == self.holder.launch and other.generation < self.holder.generation:
            return f"was first in generation {other.generation} of this run"  # and may have died before it told anybody
        return super().why_dead(other)


class Continuity(Protocol):
    """What goes on from one view to the next."""

    @property
    def memory(self) -> MemoryCheckpoints | None:
        """Checkpoints in memory, where a window cannot go on without a rank."""

    def report(self, member: str) -> Report:
        """What the other members are told when a view is left."""

    def begin(
        self, saved: SavedState | None, view: View, reports: Mapping[str, Report], world: World, run_dir: RunDir
    ) -> tuple[TrainingComponents, SavedState | None, Begin]:
        """What a view trains, and what that goes on from; a collective of its group.

        Args:
            saved: what the run has begun from, as rank 0 of the first view has it.
            view: the new one.
            reports: of its members.
            world: this rank in it.
            run_dir: of the run.
        """

    def left(self, *, lost: bool) -> None:
        """A view has ended before the run; ``lost``: a part of the state is gone, with ranks."""


def run_in_views(anew: Anew, start: Start, member: Member) -> RunResult:
    """Trains with the members that are there, until a view has come to the end of the run.

    Args:
        anew: what is trained; nobody else holds it.
        start: of the run. It owns the run directory for as long as this process is rank 0.
        member: this process.
    """
    run_dir, owning = start.run_dir, start.owning
    device, reports_at_end, how = anew.get().device, anew.get().config.metrics.report, _continuity(anew)
    standstill = Standstill(member.membership.expel_after_s)
    view: View | None = None
    rank, logs = member.environment.rank, False
    with (
        nullcontext(start.signals) if start.signals else StopSignals() as caught,
        JoinHook(member.membership) as rider,
        Rank0Resources() as resources,
    ):
        member.membership.told_to_leave = lambda: caught.received

        def part(world: World, group: PolledGroup, view: View, reports: Mapping[str, Report]) -> RunResult | None:
            """A view's part of the run, whose model nobody holds afterwards."""
            components, read, begin = how.begin(start.saved, view, reports, world, run_dir)
            components = of_ranks_now(components, view, begin.again)
            in_view = InView(
                start,
                run_dir,
                world,
                saved=read,
                begin=begin,
                rider=rider,
                resources=resources,
                changes=group.changes,
                first_to=member.first_to,
                note=standstill.note,
                memory=how.memory,
            )
            return train(components, in_view, caught)

        while True:
            view, reports = member.next_view(view, standstill.told_in(how.report(member.name)))
            try:
                standstill.look_at(view, reports)
                with member.world(view, device) as (world, group):
                    rank = member.rank = world.rank
                    if world.is_main:
                        if not run_dir.owned:
                            owning.enter_context(run_dir.own(Successor(run_dir, view.generation)))
                            if reports_at_end:
                                owning.enter_context(load(REPORT)(run_dir))
                        member.tell_folder(run_dir.path, run_dir.token)
                        run_dir.forget_failure()  # of a rank without which the others go on
                    run_dir = run_dir.of_main(world)
                    run_dir.ranks_there = world.size
                    if not logs:
                        start.log.open(run_dir.logs)
                    logs = True
                    _log.info("generation %d: %d ranks, this is rank %d", view.generation, world.size, rank)
                    ended = part(world, group, view, reports)
                    if ended is not None:
                        world.barrier()  # rank 0 has written how the run has ended
                        return ended
            except (ViewChangedError, LostStateError) as error:
                standstill.note(error)
                how.left(lost=isinstance(error, LostStateError))
                del error
                gc.collect()  # a half-made engine leaves its hooks with its last reference
            except ExpelledError:
                raise
            except BaseException as error:
                _raise_if_left_out(member, error)
                note_failure(run_dir, rank, error)
                if isinstance(error, DistaccumError):  # which all ranks raise
                    member.end(1)
                raise


def _raise_if_left_out(member: Member, error: BaseException) -> None:
    """Raises ExpelledError where the others go on without this process: its error is its own. Not if nobody can say."""
    try:
        is_out = member.membership.is_left_out()
    except DistaccumError:
        return
    if is_out:
        _log.warning("after the others had gone on without this member: %s", error)
        _log.info("where that comes from", exc_info=error)
        raise ExpelledError(f"the others go on without member {member.name}") from error


def _continuity(anew: Anew) -> Continuity:
    config = anew.get().config
    return InPlace(anew, config.elastic.memory_every) if config.engine.goes_back else GoesOn(anew)


def of_ranks_now(components: TrainingComponents, view: View, again: Again | None) -> TrainingComponents:
    """The components for the ranks of a view, which may go on with an open window."""
    plan, ranks = cast(Any, components.plan).for_ranks(len(view.members)), len(view.members)
    if again is not None and plan.has_units:
        plan = ContinuedPlan.of(plan, again)
    builder = ElasticEngines(keepers_of(view.members))
    engine = replace(components.engine, world_size=ranks, builder=builder)
    return components.found(plan=plan, engine=engine)
