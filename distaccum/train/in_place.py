"""How a run goes on whose engine keeps a part of the state on each rank: back to a checkpoint, in the same processes.

Its model is sharded over a group that is of no use any more, and nobody has the shard of a rank that is lost. So model,
optimizer and data are built anew, as at the start, and take the state of the newest checkpoint: of one in memory
(:mod:`memory_checkpoint`), else on disk, else they begin as the run has begun.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint.state import SavedState
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.checks import AUTO
from distaccum.distributed.elastic.mirrors import newest_whole
from distaccum.distributed.elastic.views import Report, View
from distaccum.distributed.world import World
from distaccum.engines.factory import check_engine
from distaccum.train.carried import Begin
from distaccum.train.components import TrainingComponents
from distaccum.train.joining import adapted
from distaccum.train.memory_checkpoint import MemoryCheckpoints
from distaccum.train.resume import find_checkpoint
from distaccum.train.run_dir import RunDir

_log = logging.getLogger(__name__)

_MEMORY, _DISK, _BEGINNING = "memory", "disk", "beginning"


@dataclass(frozen=True, kw_only=True)
class _Goes:
    """To where a view goes back, as rank 0 says it: ``window`` is known of a checkpoint in memory or on disk."""

    to: str
    window: int = 0


class InPlace:
    """Begins each view of a run whose state is sharded.

    Args:
        make: builds the components anew.
        components: built already, for the first view of this process.
    """

    def __init__(self, make: Callable[[], TrainingComponents], components: TrainingComponents) -> None:
        self._make = make
        self._fresh: TrainingComponents | None = components  # which no engine has wrapped
        self._facts = components.facts
        self.memory = MemoryCheckpoints(components.config.elastic.memory_every)

    def let_go(self, components: TrainingComponents) -> TrainingComponents:
        """The components without the model and the optimizers, whose memory the next ones are to have."""
        return components.found(model=nn.Module(), optimizers=())

    def begin(
        self,
        saved: SavedState | None,
        view: View,
        reports: Mapping[str, Report],
        world: World,
        run_dir: RunDir,
    ) -> tuple[TrainingComponents, SavedState | None, Begin]:
        """Components that no engine has wrapped, and what they go on from; a collective of the view's group.

        Args:
            saved: what the run has begun from, as rank 0 of the first view has it.
            view: the new one.
            reports: of its members.
            world: this rank in it.
            run_dir: of the run.
        """
        os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}  # DeepSpeed reads them at stage 3
        self.memory.enter(view, world)
        components = self._fresh = self._fresh or adapted(self._make())
        vars(components)["facts"] = self._facts  # of the same settings
        if view.generation == 0:
            self._fresh = None
            return components, saved, Begin(None)
        components = _for_ranks(components, world.size)
        found = newest_whole(view, reports)
        goes, saved = _Goes(to=_BEGINNING), None
        if world.is_main:
            goes, saved = self._find(components, run_dir, None if found is None else found[0].step, world.size)
        goes = _Goes(**json.loads(world.broadcast_str(json.dumps(vars(goes)))))
        window = found[0].window if goes.to == _MEMORY and found is not None else goes.window
        reached = max((int(one.note.get("reached", 0)) for one in reports.values()), default=0)
        where = {
            _MEMORY: f"the checkpoint in memory after window {window}",
            _DISK: f"the checkpoint on disk after window {window}",
            _BEGINNING: "the beginning: there is no checkpoint that is whole",
        }[goes.to]
        again = max(0, reached - window)
        log = _log.warning if world.is_main else _log.info
        ranks = "1 rank goes" if world.size == 1 else f"{world.size} ranks go"
        windows = "1 window is" if again == 1 else f"{again} windows are"
        log("%s on from %s; %s computed again", ranks, where, windows)
        self.memory.reached = max(self.memory.reached, window)
        begin = Begin(self.memory.hand_over(view, reports) if goes.to == _MEMORY else None)
        if goes.to == _DISK:
            components = components.found(config=replace(components.config, resume=AUTO))  # as if it were resumed
        self._fresh = None
        return components, saved, begin

    def _find(
        self, components: TrainingComponents, run_dir: RunDir, step: int | None, ranks: int
    ) -> tuple[_Goes, SavedState | None]:
        """Rank 0 looks for what is newest; ``step`` is that of the newest whole checkpoint in memory."""
        config = replace(components.config, resume=AUTO)
        store = CheckpointStore(run_dir.checkpoints, keep=config.checkpoint.keep)
        store.recover()
        on_disk = [int(path.name.partition("-")[2]) for path in store.steps()]
        is_newer = step is not None and max(on_disk, default=0) > step and store.newest_valid() is not None
        if is_newer or (step is None and on_disk):
            saved = find_checkpoint(
                config,
                run_dir,
                store,
                components.plan.position,
                model=components.model,
                world_size=ranks,
                record=components.record,
                facts=components.facts,
            )
            if saved is not None and (step is None or saved.run.progress.step > step):
                return _Goes(to=_DISK, window=saved.run.progress.window), saved
        if step is not None:
            return _Goes(to=_MEMORY), None
        resume = components.config.resume
        named = resume not in (AUTO, "never")
        return _Goes(to=_BEGINNING), checkpoint.read(Path(resume).resolve()) if named else None


def _for_ranks(components: TrainingComponents, ranks: int) -> TrainingComponents:
    """Its engine is checked, and configured, for so many."""
    context = replace(components.engine, world_size=ranks)
    return components.found(engine=replace(context, generated=check_engine(components.model, context)))
