"""How a run goes on whose engine keeps a part of the state on each rank: back to a checkpoint, in the same processes.

Its model is sharded over a group that is of no use any more, and nobody has the shard of a rank that is lost. So model,
optimizer and data are built anew, as at the start, and take the state of the newest checkpoint: of one in memory
(:mod:`memory_checkpoint`), else on disk, else they begin as the run has begun.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from distaccum.checkpoint.state import SavedState
from distaccum.distributed.world import World
from distaccum.elastic.group.mirrors import newest_whole
from distaccum.elastic.group.views import Report, View
from distaccum.elastic.run.going_back import MEMORY, Anew, newest
from distaccum.elastic.run.hand_over import Begin
from distaccum.elastic.run.memory_checkpoint import MemoryCheckpoints
from distaccum.engines.factory import check_engine
from distaccum.train.components import TrainingComponents
from distaccum.train.run_dir import RunDir


class InPlace:
    """Begins each view of a run whose state is sharded; see :class:`~distaccum.elastic.run.views.Continuity`.

    Args:
        anew: what is built of it.
        every: windows from one checkpoint in memory to the next.
    """

    def __init__(self, anew: Anew, every: int) -> None:
        self._anew = anew
        self.memory = MemoryCheckpoints(every)

    def report(self, member: str) -> Report:
        """What the other members are told."""
        return self.memory.report(member)

    def begin(
        self, saved: SavedState | None, view: View, reports: Mapping[str, Report], world: World, run_dir: RunDir
    ) -> tuple[TrainingComponents, SavedState | None, Begin]:
        """Components that no engine has wrapped, and what they go on from; a collective of the view's group."""
        os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}  # DeepSpeed reads them at stage 3
        self.memory.enter(view, world)
        components, begin = self._anew.get(), Begin()
        if view.generation > 0:
            components = _for_ranks(components, world.size)
            found = newest_whole(view, reports)
            goes, saved = newest(components, run_dir, world, in_memory=None if found is None else found[0])
            goes.tell(world, reached=max((int(one.note.get("reached", 0)) for one in reports.values()), default=0))
            self.memory.reached = max(self.memory.reached, goes.window)
            begin = Begin(self.memory.hand_over(view, reports) if goes.to == MEMORY else None)
            components = goes.configured(components)
        self._anew.take()
        return components, saved, begin

    def left(self, *, lost: bool) -> None:
        """The checkpoints in memory are what there is, and nobody holds the model."""


def _for_ranks(components: TrainingComponents, ranks: int) -> TrainingComponents:
    """Its engine is checked, and configured, for so many."""
    context = replace(components.engine, world_size=ranks)
    return components.found(engine=replace(context, generated=check_engine(components.model, context)))
