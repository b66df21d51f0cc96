"""Where a run goes back to whose members have not its whole state between them, and what it is built of then."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint.state import SavedState
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.checks import AUTO
from distaccum.distributed.world import World
from distaccum.elastic.group.mirrors import Mark
from distaccum.elastic.run.checks import adapted
from distaccum.train.components import TrainingComponents
from distaccum.train.resume import find_checkpoint
from distaccum.train.run_dir import RunDir

_log = logging.getLogger(__name__)

MEMORY, DISK, BEGINNING = "memory", "disk", "beginning"


class Anew:
    """Components that no engine has wrapped: those that are built already, and then others.

    Args:
        make: builds them.
        components: built already.
    """

    def __init__(self, make: Callable[[], TrainingComponents], components: TrainingComponents) -> None:
        self._make = make
        self._fresh: TrainingComponents | None = components
        self._facts = components.facts  # of the model that is not wrapped yet, for whoever becomes rank 0

    def get(self) -> TrainingComponents:
        """The same ones until they are taken."""
        if self._fresh is None:
            self._fresh = adapted(self._make())
            vars(self._fresh)["facts"] = self._facts  # of the same settings
        return self._fresh

    def take(self) -> TrainingComponents:
        """Those of :meth:`get`, which are held by the caller alone from here on."""
        taken, self._fresh = self.get(), None
        return taken


@dataclass(frozen=True, kw_only=True)
class Goes:
    """To where a view goes back: memory, disk or the beginning, after ``window``.

    ``named`` is what the settings begin with, where that is a checkpoint or weights of another run.
    """

    to: str
    window: int = 0
    named: str = ""

    @property
    def where(self) -> str:
        """For people."""
        return {
            MEMORY: f"the checkpoint in memory after window {self.window}",
            DISK: f"the checkpoint on disk after window {self.window}",
            BEGINNING: f"{self.named or 'the beginning'}: there is no checkpoint of this run that is whole",
        }[self.to]

    def tell(self, world: World, *, reached: int) -> None:
        """Says so, where ``reached`` windows had ended before."""
        again = max(0, reached - self.window)
        log = _log.warning if world.is_main else _log.info
        ranks = "1 rank goes" if world.size == 1 else f"{world.size} ranks go"
        windows = "1 window is" if again == 1 else f"{again} windows are"
        log("%s on from %s; %s computed again", ranks, self.where, windows)

    def configured(self, components: TrainingComponents) -> TrainingComponents:
        """From disk a run goes on as if it were resumed."""
        if self.to != DISK:
            return components
        return components.found(config=replace(components.config, resume=AUTO))


def newest(
    components: TrainingComponents, run_dir: RunDir, world: World, *, in_memory: Mark | None = None
) -> tuple[Goes, SavedState | None]:
    """The newest of the checkpoint in memory, those on disk and the beginning; a collective.

    Returns:
        Where that is, and on rank 0 what is read from disk.
    """
    goes, saved = Goes(to=BEGINNING), None
    if world.is_main:
        goes, saved = _find(components, run_dir, in_memory)
    return Goes(**json.loads(world.broadcast_str(json.dumps(vars(goes))))), saved


def _find(components: TrainingComponents, run_dir: RunDir, in_memory: Mark | None) -> tuple[Goes, SavedState | None]:
    config = replace(components.config, resume=AUTO)
    store = CheckpointStore(run_dir.checkpoints, keep=config.checkpoint.keep)
    store.recover()
    on_disk = [int(path.name.partition("-")[2]) for path in store.steps()]
    step = None if in_memory is None else in_memory.step
    is_newer = step is not None and max(on_disk, default=0) > step and store.newest_valid() is not None
    if is_newer or (step is None and on_disk):
        saved = find_checkpoint(components.found(config=config), run_dir)
        if saved is not None and (step is None or saved.run.progress.step > step):
            return Goes(to=DISK, window=saved.run.progress.window), saved
    if in_memory is not None:
        return Goes(to=MEMORY, window=in_memory.window), None
    resume = components.config.resume
    if resume not in (AUTO, "never"):
        saved = checkpoint.read(Path(resume).resolve())
        return Goes(to=BEGINNING, window=saved.run.progress.window, named=f"resume={resume}"), saved
    init_from = components.config.init_from
    return Goes(to=BEGINNING, named=f"the beginning, with init_from={init_from}" if init_from else ""), None
