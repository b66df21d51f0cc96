"""The checkpoints of a run: begun, in the background or not, published, and told; a second one that fails ends it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint.store import verify
from distaccum.config.checks import AUTO
from distaccum.distributed.activity import Phase
from distaccum.distributed.memory import lacks
from distaccum.errors import CheckpointError, DistaccumError, NonFiniteError, PeerError, SpikeError
from distaccum.train import ema
from distaccum.train.callbacks import Run, looks_at_checkpoints
from distaccum.train.callbacks import states as callback_states
from distaccum.train.failure import reason_of
from distaccum.train.micro_batch import memory_to_save
from distaccum.train.parts.base import Done, Every, Part
from distaccum.train.parts.time_limit import TimeLimit
from distaccum.train.run_dir import State
from distaccum.train.saving import BackgroundSave, BestCheckpoint, HostMemory, SaveClock, clear

if TYPE_CHECKING:
    from distaccum.train.loop import Loop, TrainingRun

_log = logging.getLogger(__name__)

_RESCUE_S = 20.0  # after an error, for what is still being written; a launcher ends the ranks after 30


class _Then:
    """A run as callbacks see it that are told of a checkpoint, which it made some windows ago."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self._run, self.progress = run, progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


class Checkpoints(Part):
    """Saves every ``checkpoint.every``-th update or each epoch, by the clock, the best evaluation, and the end.

    Args:
        run: what is saved.
        time_limit: told how long a save takes.
    """

    def __init__(self, run: TrainingRun, time_limit: TimeLimit) -> None:
        components, world = run.components, run.accumulator.world
        self._run, self._components, self._config = run, components, components.config.checkpoint
        self._accumulator, self._run_dir, self._store = run.accumulator, run.run_dir, run.store
        self._world, self._loggers, self._time_limit = world, run.loggers, time_limit
        self._every = Every(self._config.every, components.plan)
        self.by_epoch = self._every.by_epoch
        self._best = BestCheckpoint(self._config, run.store, world)
        minutes = self._config.every_minutes
        ago = run.saved_ago_s
        self._clock = None if minutes is None else SaveClock(60 * minutes, decides=world.is_main, ago=ago)
        if self._clock is not None:
            run.accumulator.add_hook(self._clock)
        self._background = self._make_background() if self._config.background else None
        self._host_memory = HostMemory(world.device)
        self._begun = Progress()  # of the last one in the background
        self._failed_saves = 0  # in a row, of those in the background
        self._is_best = False  # the one that is being saved
        # A run from another run's checkpoint has saved none itself.
        resumed = run.accumulator.progress.step if components.config.resume == "auto" else 0
        self.saved_step = resumed if run.saved_step is None else run.saved_step
        """Of the newest checkpoint of this run."""
        if self.saved_step:
            run.accumulator.replicas.saved = run.store.root / f"step-{self.saved_step}"

    def due(self, progress: Progress) -> bool:
        """By the number of updates, or the end of an epoch."""
        return self._every(progress)

    def on_update(self, run: Loop, done: Done) -> None:
        """Saves, if that is due, or if the evaluation after this update is the best so far."""
        step = done.progress.step
        best = self.improves(run, step, known=run.may_be_saved)
        if best or self.due(done.progress):
            self.save(run, best=best)

    def between_windows(self, run: Loop) -> None:
        """Saves by the clock; publishes what the background has written."""
        if self._clock is not None and self._clock.due:
            run.resolve()
            if run.progress.step != self._newest_step:
                self.save(run)
        if self._pending is not None and self._pending.ready:
            self.settle(run)

    def epoch_ended(self, run: Loop) -> None:
        """Saves, if that is due, or the evaluation the best so far, and the epoch's last window was no update."""
        step = run.progress.step
        if self.improves(run, step, known=False):
            self._save_last(run, best=True)
        elif self.by_epoch and step != self._newest_step:
            self.save(run)

    def preempted(self, run: Loop) -> None:
        """Saves the last update, unless that is done."""
        self._save_last(run, best=False)

    def ends(self, run: Loop) -> None:
        """Saves the last update, unless that is done; its evaluation may be the best one."""
        known = run.may_be_saved and (run.unlogged is not None or self.saved_step != run.progress.step)
        self._save_last(run, best=self.improves(run, run.progress.step, known=known))

    def fails(self, run: Loop, error: BaseException) -> None:
        """What is being saved in the background is published."""
        if isinstance(error, NonFiniteError | SpikeError):
            self.settle(run, at_end=True)
        elif self._pending is not None:
            self._rescue(self._pending)

    def save(self, run: Loop, *, best: bool = False, again: bool = False, waits: bool = False) -> None:
        """Saves this step; returns when it is published, or when training may go on. A collective.

        Args:
            run: has the progress.
            best: its evaluation makes it the best so far; it is published before this returns.
            again: see :meth:`CheckpointStore.save`; so is this.
            waits: so is this.

        Raises:
            OSError: it cannot be written. What is written later tells so in :meth:`settle`.
        """
        self.settle(run, at_end=waits)
        with run.paused(f"saving step {run.progress.step}"):
            for part in run.parts:
                part.before_save(run)
            self._is_best = best
            self._save(run, run.evaluation[1] if best and run.evaluation else None, again=again, waits=waits)
            self._is_best = False

    def settle(self, run: Loop, *, at_end: bool = False) -> None:
        """Publishes what was saved in the background, for whose files this waits; a collective between two windows.

        A failure is a warning, and also an error where the one before has failed too and this is not ``at_end``.

        Raises:
            OSError: this rank could write neither this one nor the one before.
            PeerError: another rank could not.
        """
        if self._pending is not None:
            with run.paused("publishing a checkpoint"):
                self._settle(run, self._pending, at_end=at_end)

    @property
    def _pending(self) -> BackgroundSave | None:
        """The save in the background that is not settled yet; the same on every rank."""
        return self._background if self._background is not None and self._background.pending else None

    @property
    def _newest_step(self) -> int:
        """Of the newest checkpoint, one that is being saved included."""
        return self.saved_step if self._pending is None else self._pending.step

    def improves(self, run: Loop, step: int, *, known: bool) -> bool:
        """Whether ``step`` is to be ``checkpoint.best``, by its evaluation, which is the same on every rank.

        It is that already where it is ``known`` to a group of ranks before.
        """
        found = run.results_of(step)
        return found is not None and (self._best.improves(found) or (known and self._best.is_of(step, found)))

    def _save_last(self, run: Loop, *, best: bool) -> None:
        if not self._config.saves or self._components.evaluates_alone:
            return
        self.settle(run, at_end=True)
        if self.saved_step != run.progress.step:
            self.save(run, best=best, waits=True)
        elif best and run.evaluation:
            evaluation, path = run.evaluation[1], self._store.root / f"step-{self.saved_step}"
            if self._world.is_main:
                self._before_publishing(run.progress.step, evaluation)
            self._best.note(evaluation)
            for logger in self._loggers:
                logger.checkpoint(path, step=run.progress.step, best=True)

    def _save(self, run: Loop, best: Mapping[str, float] | None, *, again: bool, waits: bool) -> None:
        self._run_dir.require_owned()
        self._world.activity.phase = Phase.SAVE
        self._accumulator.replicas.check()
        self._accumulator.replicas.check_state()
        self._accumulator.use_evaluation_weights()
        step = run.progress.step
        if run.may_be_saved and self._takes_over(run.progress):
            self._made(run, self._store.root / f"step-{step}", best)
            return
        part = checkpoint.Part.of(
            self._accumulator.engine,
            self.run_state(run.logged),
            self._run.loader.state(),
            self._world,
            average=ema.of(self._components.callbacks),
        )
        if not (best is not None or again or waits) and self._begin(step, part):
            return
        path = self._store.save(
            step, self._world, part.write, again=again, before_publishing=partial(self._before_publishing, step, best)
        )
        self._made(run, path, best)

    def _takes_over(self, progress: Progress) -> bool:
        """Whether the whole checkpoint of this very progress is there; a collective."""
        there = self._world.is_main and _is_of(self._store.root / f"step-{progress.step}", progress)
        if there:
            self._store.end_publishing(progress.step)
        return bool(self._world.broadcast_str("there" if there else ""))

    def _made(self, run: Loop, path: Path, best: Mapping[str, float] | None) -> None:
        """This step's checkpoint is there, for which training has waited."""
        if best is not None:
            self._best.note(best)
        if self._clock is not None:
            self._clock.saved()
        self._saved(run, run.progress, path)
        self._time_limit.saved()

    def _settle(self, run: Loop, background: BackgroundSave, *, at_end: bool) -> None:
        self._run_dir.require_owned()
        self._world.activity.phase = Phase.SAVE
        written = background.take()
        error = written.error
        reason = "" if error is None else self._run_dir.hidden(reason_of(self._world.rank, error))
        outcomes = self._world.all_gather_object((dict(written.digests), reason))
        if self._world.is_main and not any(reason for _, reason in outcomes):
            try:
                self._publish(written.step, [digests for digests, _ in outcomes])
            except OSError as failed:
                error, reason = failed, self._run_dir.hidden(reason_of(self._world.rank, failed))
        reasons = [*(reason for _, reason in outcomes if reason), self._world.broadcast_str(reason)]
        first = next(filter(None, reasons), "")
        if not first:
            self._saved(run, self._begun, self._store.root / f"step-{written.step}")
        else:
            self._failed(run, written.step, first, error, at_end=at_end)
        self._time_limit.saved(behind=written.seconds)

    def _rescue(self, background: BackgroundSave) -> None:
        """Publishes what was saved in the background before an error, without a collective: ranks may be gone."""
        try:
            written = background.take(_RESCUE_S)
            if self._world.is_main and written.error is None:
                folder = self._store.folder_of(written.step)
                self._publish(written.step, background.left_by_all(folder, _RESCUE_S))
                self._run_dir.note_saved(written.step)
                for logger in self._loggers:  # whoever goes on from it tells of later ones alone
                    logger.checkpoint(self._store.root / f"step-{written.step}", step=written.step, best=False)
        except (OSError, ValueError, DistaccumError) as error:
            _log.warning("step %d, which was being saved, is lost (%s)", background.step, error)

    def _make_background(self) -> BackgroundSave | None:
        if self._config.background is not True and any(map(looks_at_checkpoints, self._components.callbacks)):
            if self._world.is_main:
                reason = "a callback's on_checkpoint may look at the model"
                _log.info("checkpoint.background: %s, so training waits for saves", reason)
            return None
        background = BackgroundSave(self._world.rank, self._world.size)
        self._accumulator.add_hook(background)
        return background

    def run_state(self, logged: Mapping[str, int]) -> checkpoint.RunState:
        """What a checkpoint keeps beside the engine's state; ``logged`` is window and step of the last record."""
        spikes = self._accumulator.spikes
        return checkpoint.RunState(
            progress=self._accumulator.tracker.progress,
            position=self._run.loader.position,
            wandb_id=self._run.wandb_id,
            config=self._components.record,
            callbacks=callback_states(self._components.callbacks),
            facts=self._components.facts if self._world.is_main else {},
            spikes={} if spikes is None else spikes.state_dict(),
            hooks=self._accumulator.engine.hooks.state(),
            logged=logged,
            memory=memory_to_save(self._components, self._accumulator),
        )

    def _begin(self, step: int, part: checkpoint.Part) -> bool:
        """Copies this rank's part, which a thread writes from then on; False where training has to wait for it."""
        if self._background is None or not self._has_memory(part):
            self._background = None
            return False
        folder = self._store.begin(step, self._world)
        self._host_memory.reuse(part.sizes)
        copies = list(part.files(self._host_memory.copy))
        self._host_memory.wait()
        self._begun = self._accumulator.tracker.progress
        self._background.begin(step, folder, copies)
        if self._clock is not None:
            self._clock.saved()
        self._time_limit.copied()
        return True

    def _has_memory(self, part: checkpoint.Part) -> bool:
        if self._config.background != AUTO:
            return True
        problem = lacks(self._world, self._host_memory.missing(part.sizes))
        if problem and self._world.is_main:
            _log.warning("checkpoint.background=auto: training waits for saves, as %s for a copy", problem)
        return not problem

    def _publish(self, step: int, digests: Sequence[Mapping[str, str]]) -> None:
        self._run_dir.require_owned()
        clear(self._store.folder_of(step))
        self._store.publish(step, digests, before_publishing=self._run_dir.require_owned)

    def _before_publishing(self, step: int, best: Mapping[str, float] | None) -> None:
        self._run_dir.require_owned()
        if best is not None:
            self._best.mark(self._store.root / f"step-{step}", best)

    def _saved(self, run: Loop, progress: Progress, path: Path) -> None:
        """Tells of a checkpoint that is there."""
        self.saved_step, self._accumulator.replicas.saved = progress.step, path
        self._failed_saves, self.trouble = 0, ""
        if self._world.is_main:
            self._run_dir.note_saved(progress.step)
        self._world.activity.phase = Phase.BETWEEN
        for logger in self._loggers:
            logger.checkpoint(path, step=progress.step, best=self._is_best)
        self._run.tell_saved(progress.step, path)
        seen = run if progress == run.progress else cast(Run, _Then(run, progress))
        run.tell("on_checkpoint", lambda part: part.on_checkpoint(seen, path))
        _log.info("saved %s", path)

    def _failed(self, run: Loop, step: int, reason: str, error: Exception | None, *, at_end: bool) -> None:
        """What could not be saved in the background; the checkpoint before is there."""
        self._failed_saves += 1
        self.trouble = f"step {step} could not be saved: {reason}"
        if self._world.is_main:
            self._store.drop(step)
            self._run_dir.write_status(State.RUNNING, step=run.known_progress.step, reason=self.trouble)
            goes_on = "the run goes on, and ends if the next save fails, too"
            ends = goes_on if self._failed_saves == 1 else "it is the second in a row, and the run ends"
            _log.warning("%s; %s", self.trouble, "it is saved once more" if at_end else ends)
        if self._failed_saves > 1 and not at_end:
            raise error or PeerError(reason, "while this rank wrote its part of a checkpoint")


def _is_of(path: Path, progress: Progress) -> bool:
    """Whether a whole checkpoint is there, and of this progress."""
    try:
        verify(path)
        return checkpoint.read(path).run.progress == progress
    except CheckpointError:
        return False
