"""A run's saves: begun, in the background or not, published, and told; so is one that fails, and two end the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint.host_memory import HostMemory
from distaccum.checkpoint.store import CheckpointStore, verify
from distaccum.config.checks import AUTO
from distaccum.data.loader import WindowLoader
from distaccum.distributed.activity import Phase
from distaccum.distributed.free_memory import lacks
from distaccum.errors import CheckpointError, DistaccumError, PeerError
from distaccum.train import ema
from distaccum.train.background_save import BackgroundSave, clear
from distaccum.train.best import BestCheckpoint
from distaccum.train.callbacks import looks_at_checkpoints
from distaccum.train.callbacks import states as callback_states
from distaccum.train.components import TrainingComponents
from distaccum.train.failure import reason_of
from distaccum.train.micro_batch import memory_to_save
from distaccum.train.run_dir import RunDir, State
from distaccum.train.save_clock import SaveClock
from distaccum.train.time_limit import TimeLimit

_log = logging.getLogger(__name__)

_RESCUE_S = 20.0  # after an error, for what is still being written; a launcher ends the ranks after 30


class Saver:
    """Makes the checkpoints of one run; every method but the properties and :meth:`rescue` is a collective.

    Args:
        components: what a checkpoint keeps beside the state; and how often, and how.
        accumulator: has the state and the progress.
        loader: has the position in the data.
        run_dir: for the history, and for the status where a save fails.
        store: for the checkpoints.
        time_limit: told how long a save takes.
        wandb_id: kept in every checkpoint.
        saved_step: of the checkpoint that the run goes on from, if it is one of its own; else 0.
        on_saved: called with each checkpoint that is there, and its progress, between two windows.
    """

    def __init__(
        self,
        components: TrainingComponents,
        accumulator: Accumulator,
        loader: WindowLoader,
        *,
        run_dir: RunDir,
        store: CheckpointStore,
        time_limit: TimeLimit,
        wandb_id: str,
        saved_step: int,
        saved_ago_s: float = 0.0,
        on_saved: Callable[[Path, Progress], None],
    ) -> None:
        self._components = components
        self._accumulator = accumulator
        self._loader = loader
        self._run_dir = run_dir
        self._store = store
        self._time_limit = time_limit
        self._wandb_id = wandb_id
        self._on_saved = on_saved
        self._world = accumulator.world
        self._best = BestCheckpoint(components.config.checkpoint, store, self._world)
        minutes = components.config.checkpoint.every_minutes
        self._clock = None if minutes is None else SaveClock(60 * minutes, decides=self._world.is_main, ago=saved_ago_s)
        if self._clock is not None:
            accumulator.add_rider(self._clock)
        self._background = self._make_background() if components.config.checkpoint.background else None
        self._host_memory = HostMemory(self._world.device)
        self._begun = Progress()  # of the last one in the background
        self._failed_saves = 0  # in a row, of those in the background
        self.saved_step = saved_step
        """Of the newest checkpoint of this run."""
        if saved_step:
            accumulator.replicas.saved = store.root / f"step-{saved_step}"
        self.trouble = ""
        """What became of the last save in the background, if it failed."""

    @property
    def due(self) -> bool:
        """Whether the clock asks for a save; the same on every rank."""
        return self._clock is not None and self._clock.due

    @property
    def pending(self) -> bool:
        """Whether a save in the background waits for :meth:`settle`; the same on every rank."""
        return self._background is not None and self._background.pending

    @property
    def ready(self) -> bool:
        """Whether :meth:`settle` would not wait; the same on every rank."""
        return self._background is not None and self._background.ready

    def is_saved(self, step: int) -> bool:
        """Whether the last save was, or is, of this step."""
        saving = self._background is not None and self._background.pending and self._background.step == step
        return saving or step == self.saved_step

    def improves(self, evaluation: Mapping[str, float], *, known: bool = False) -> bool:
        """Whether ``checkpoint.best`` is to be the checkpoint of this evaluation, which is the same on every rank.

        It is that already where it is ``known`` to a view before: see :meth:`save`.
        """
        if self._best.improves(evaluation):
            return True
        return known and self._best.is_of(self._accumulator.tracker.progress.step, evaluation)

    def save(
        self,
        logged: Mapping[str, int],
        *,
        best: Mapping[str, float] | None = None,
        again: bool = False,
        waits: bool = False,
        known: bool = False,
    ) -> None:
        """Saves this step; returns when it is published, or when training may go on. No other one may be pending.

        Args:
            logged: window and step of the last record.
            best: the evaluation that makes it the best so far; it is published before this returns.
            again: see :meth:`CheckpointStore.save`; so is this.
            waits: so is this.
            known: a view before may have saved this step, and have ended before all knew. Then it is only told.

        Raises:
            OSError: it cannot be written. What is written later tells so in :meth:`settle`.
        """
        self._run_dir.require_owned()
        self._world.activity.phase = Phase.SAVE
        self._accumulator.replicas.check()
        self._accumulator.replicas.check_state()
        self._accumulator.use_evaluation_weights()
        engine, step = self._accumulator.engine, self._accumulator.tracker.progress.step
        if known and self._takes_over(step):
            self._made(self._store.root / f"step-{step}", best)
            return
        part = checkpoint.Part.of(
            engine,
            self.run_state(logged),
            self._loader.state(),
            self._world,
            average=ema.of(self._components.callbacks),
        )
        if not (best is not None or again or waits) and self._begin(step, part):
            return
        path = self._store.save(
            step,
            self._world,
            partial(part.write, engine=engine),
            again=again,
            before_publishing=partial(self._before_publishing, step, best),
        )
        self._made(path, best)

    def _takes_over(self, step: int) -> bool:
        """Whether the whole checkpoint of this very progress is there; a collective."""
        there = self._world.is_main and self._is_there(self._store.root / f"step-{step}")
        if there:
            self._store.end_publishing(step)
        return bool(self._world.broadcast_str("there" if there else ""))

    def _is_there(self, path: Path) -> bool:
        try:
            verify(path)
            return checkpoint.read(path).run.progress == self._accumulator.tracker.progress
        except CheckpointError:
            return False

    def _made(self, path: Path, best: Mapping[str, float] | None) -> None:
        """This step's checkpoint is there, for which training has waited."""
        if best is not None:
            self._best.note(best)
        if self._clock is not None:
            self._clock.saved()
        self._saved(self._accumulator.tracker.progress, path)
        self._time_limit.saved()

    def settle(self, *, at_end: bool = False) -> None:
        """Publishes what was saved in the background, for whose files this waits; between two windows.

        A failure is a warning, and also an error where the one before has failed too and this is not ``at_end``.

        Raises:
            OSError: this rank could write neither this one nor the one before.
            PeerError: another rank could not.
        """
        assert self._background is not None
        self._run_dir.require_owned()
        self._world.activity.phase = Phase.SAVE
        written = self._background.take()
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
            self._saved(self._begun, self._store.root / f"step-{written.step}")
        else:
            self._failed(written.step, first, error, at_end=at_end)
        self._time_limit.saved(behind=written.seconds)

    def rescue(self) -> tuple[int, Path] | None:
        """Publishes what was saved in the background before an error, without a collective: ranks may be gone.

        Returns:
            On rank 0 the step and the checkpoint, if it is there now.
        """
        if self._background is None or not self._background.pending:
            return None
        try:
            written = self._background.take(_RESCUE_S)
            if self._world.is_main and written.error is None:
                folder = self._store.folder_of(written.step)
                self._publish(written.step, self._background.left_by_all(folder, _RESCUE_S))
                self._run_dir.note_saved(written.step)
                return written.step, self._store.root / f"step-{written.step}"
        except (OSError, ValueError, DistaccumError) as error:
            _log.warning("step %d, which was being saved, is lost (%s)", self._background.step, error)
        return None

    def mark_best(self, evaluation: Mapping[str, float]) -> None:
        """Makes the checkpoint of this step, which is there, the best so far."""
        if self._world.is_main:
            self._before_publishing(self.saved_step, evaluation)
        self._best.note(evaluation)

    def _make_background(self) -> BackgroundSave | None:
        asked, reason = self._components.config.checkpoint.background is True, ""
        if not asked and any(map(looks_at_checkpoints, self._components.callbacks)):
            reason = "a callback's on_checkpoint may look at the model"
        if reason:
            if self._world.is_main:
                problem = f"checkpoint.background: {reason}, so training waits for saves"
                _log.log(logging.WARNING if asked else logging.INFO, problem)
            return None
        background = BackgroundSave(self._world.rank, self._world.size)
        self._accumulator.add_rider(background)
        return background

    def run_state(self, logged: Mapping[str, int]) -> checkpoint.RunState:
        """What a checkpoint keeps beside the engine's state; ``logged`` is window and step of the last record."""
        spikes = self._accumulator.spikes
        return checkpoint.RunState(
            progress=self._accumulator.tracker.progress,
            position=self._loader.position,
            wandb_id=self._wandb_id,
            config=self._components.record,
            callbacks=callback_states(self._components.callbacks),
            facts=self._components.facts if self._world.is_main else {},
            spikes={} if spikes is None else spikes.state_dict(),
            logged=logged,
            memory=memory_to_save(self._components, self._accumulator),
        )

    def _begin(self, step: int, part: checkpoint.Part) -> bool:
        """Copies this rank's part, which a thread writes from then on; False where training has to wait for it."""
        if self._background is None or not self._has_memory(part):
            self._background = None
            return False
        folder = self._store.begin(step, self._world)
        self._host_memory.reuse()
        copies = list(part.files(self._host_memory.copy))
        self._host_memory.wait()
        self._begun = self._accumulator.tracker.progress
        self._background.begin(step, folder, copies)
        if self._clock is not None:
            self._clock.saved()
        self._time_limit.copied()
        return True

    def _has_memory(self, part: checkpoint.Part) -> bool:
        if self._components.config.checkpoint.background != AUTO:
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

    def _saved(self, progress: Progress, path: Path) -> None:
        """Tells of a checkpoint that is there."""
        self.saved_step, self._accumulator.replicas.saved = progress.step, path
        self._failed_saves, self.trouble = 0, ""
        if self._world.is_main:
            self._run_dir.note_saved(progress.step)
        self._world.activity.phase = Phase.BETWEEN
        self._on_saved(path, progress)
        _log.info("saved %s", path)

    def _failed(self, step: int, reason: str, error: Exception | None, *, at_end: bool) -> None:
        """What could not be saved in the background; the checkpoint before is there."""
        self._failed_saves += 1
        self.trouble = f"step {step} could not be saved: {reason}"
        if self._world.is_main:
            self._store.drop(step)
            known = self._accumulator.tracker.known_progress
            self._run_dir.write_status(State.RUNNING, step=known.step, reason=self.trouble)
            goes_on = "the run goes on, and ends if the next save fails, too"
            ends = goes_on if self._failed_saves == 1 else "it is the second in a row, and the run ends"
            _log.warning("%s; %s", self.trouble, "it is saved once more" if at_end else ends)
        if self._failed_saves > 1 and not at_end:
            raise error or PeerError(reason, "while this rank wrote its part of a checkpoint")
