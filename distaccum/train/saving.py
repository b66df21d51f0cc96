"""A run's saves: begun, in the background or not, published, and told; so is one that fails, and two end the run."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import torch
from torch import Tensor

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint.files import HashingWriter, Pieces, write_json
from distaccum.checkpoint.store import CheckpointStore, verify
from distaccum.config.checks import AUTO
from distaccum.config.trainer import CheckpointConfig
from distaccum.data.loader import WindowLoader
from distaccum.distributed.activity import Phase
from distaccum.distributed.memory import lacks
from distaccum.distributed.world import World
from distaccum.errors import CheckpointError, ConfigError, DistaccumError, PeerError
from distaccum.train import ema
from distaccum.train.callbacks import looks_at_checkpoints
from distaccum.train.callbacks import states as callback_states
from distaccum.train.components import TrainingComponents
from distaccum.train.failure import reason_of
from distaccum.train.micro_batch import memory_to_save
from distaccum.train.run_dir import RunDir, State
from distaccum.train.time_limit import TimeLimit

# Host memory that a save copies tensors into, so that training may change them: reused by the next save.


class HostMemory:
    """Copies of tensors on the host, in memory that is taken once; pinned where the tensors are on a GPU.

    A copy is complete after :meth:`wait`, and stays until :meth:`reuse`.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pins = device, device.type == "cuda"
        self._taken: list[Tensor] = []
        self._next = 0

    def missing(self, sizes: Sequence[int]) -> int:
        """The bytes that copies of tensors of these sizes take, beside what is taken already.

        Torch pins memory in powers of two: https://docs.pytorch.org/docs/stable/notes/cuda.html, on its host allocator.
        """
        return max(0, sum(map(self._taken_for, sizes)) - sum(self._taken_for(tensor.nbytes) for tensor in self._taken))

    def reuse(self) -> None:
        """The next copies overwrite those of before; where they come in the same order, no memory is taken."""
        self._next = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy on the host, of the same type and shape; from a GPU it is made behind the device's work."""
        if self._next == len(self._taken):
            self._taken.append(self._take(tensor.nbytes))
        elif self._taken[self._next].nbytes != tensor.nbytes:
            self._taken[self._next] = self._take(tensor.nbytes)
        copied = self._taken[self._next].view(tensor.dtype).view(tensor.shape)
        self._next += 1
        return copied.copy_(tensor, non_blocking=self._pins)

    def wait(self) -> None:
        """Until the copies are there."""
        if self._pins:
            torch.cuda.current_stream(self._device).synchronize()

    def _take(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pins)

    def _taken_for(self, size: int) -> int:
        return 1 << (size - 1).bit_length() if self._pins and size else size


# A checkpoint's files, written by a thread while training goes on.

_LEFT, _POLL_S = ".rank-{}.json", 0.05


def clear(folder: Path) -> None:
    """Removes what the ranks have left for rank 0: it is no part of a checkpoint."""
    for file in folder.glob(_LEFT.format("*")):
        file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Written:
    """How this rank's part of ``step-N`` ended: the digests of its files, or an error, after so many seconds."""

    step: int
    digests: Mapping[str, str]
    seconds: float
    error: Exception | None = None


class BackgroundSave:
    """One save at a time. That it has ended on all ranks is known from the count of a later window.

    See :class:`~distaccum.data.counter.Rider`. A save's number travels, as what is summed may have been sent before the
    save began.

    Each rank also leaves its digests in the folder, so that rank 0 can publish where the ranks have lost each other.

    Args:
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._number = 0
        self._thread: Thread | None = None
        self.step = -1
        """Of the last one that was begun."""
        self._written: Written | None = None
        self.ready = False
        """Whether it has ended on all ranks, well or not; the same on every rank."""

    @property
    def pending(self) -> bool:
        """Whether there is one that was not taken yet; the same on every rank."""
        return self._thread is not None

    def begin(self, step: int, folder: Path, files: Iterable[tuple[str, Pieces]]) -> None:
        """Writes the files, which are in memory that nobody changes until :meth:`take`, into the folder."""
        assert self._thread is None
        self._number, self.step = self._number + 1, step
        self._thread = Thread(target=self._write, args=(step, folder, files), name="checkpoint", daemon=True)
        self._thread.start()

    def take(self, within_s: float | None = None) -> Written:
        """How it ended, for which this waits; there is none afterwards.

        Raises:
            TimeoutError: it did not end within so many seconds; it may go on.
        """
        assert self._thread is not None
        self._thread.join(within_s)
        if self._thread.is_alive():
            raise TimeoutError(f"step {self.step} is still being written")
        written, self._written, self._thread, self.ready = self._written, None, None, False
        assert written is not None
        return written

    def _write(self, step: int, folder: Path, files: Iterable[tuple[str, Pieces]]) -> None:
        began = monotonic()
        try:
            with HashingWriter(folder) as writer:
                for name, content in files:
                    writer.write(name, content)
                digests = writer.digests
            write_json(folder / _LEFT.format(self._rank), digests)
            written = Written(step, digests, monotonic() - began)
        except Exception as error:  # raised, or told, where all ranks know of it
            written = Written(step, {}, monotonic() - began, error)
        self._written = written

    def left_by_all(self, folder: Path, within_s: float) -> list[dict[str, str]]:
        """The digests that all ranks have left in the folder.

        Raises:
            TimeoutError: some have left none within so many seconds.
        """
        files, latest = [folder / _LEFT.format(rank) for rank in range(self._world_size)], monotonic() + within_s
        while not all(file.exists() for file in files):
            if monotonic() > latest:
                raise TimeoutError(f"{folder}: some ranks have not written their part")
            sleep(_POLL_S)
        return [json.loads(file.read_bytes()) for file in files]

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """The number of the save that has ended here; 0.0 without one."""
        return [float(self._number) if self._written is not None else 0.0]

    def incoming(self, sums: list[float]) -> None:
        """Whether it has ended on every rank."""
        self.ready = self.pending and sums[0] == self._number * self._world_size


# The checkpoint with the best evaluation, which is kept beside the newest ones.


class BestCheckpoint:
    """Which evaluation has been the best of the run, also across resumes; a collective to make.

    Args:
        config: ``best`` names a result of the evaluation, null: none; ``best_mode`` says what is better.
        store: keeps the checkpoint, and which it is.
        world: this rank.
    """

    def __init__(self, config: CheckpointConfig, store: CheckpointStore, world: World) -> None:
        self._config, self._store = config, store
        self._value, self._name = math.nan, ""
        if config.best is not None:
            kept = json.loads(world.broadcast_str(json.dumps(store.best() if world.is_main else None)))
            if kept is not None and kept["metric"] == config.best:
                self._value, self._name = float(kept["value"]), str(kept["checkpoint"])

    def improves(self, evaluation: Mapping[str, float]) -> bool:
        """Whether this evaluation, the same on every rank, is better than any before; NaN never is.

        Raises:
            ConfigError: it has no such result.
        """
        name = self._config.best
        if name is None:
            return False
        if name not in evaluation:
            known = ", ".join(evaluation)
            raise ConfigError("checkpoint.best", name, f"the evaluation gives {known}", "Name one of these")
        sign = 1.0 if self._config.best_mode == "min" else -1.0
        value = sign * evaluation[name]
        return value < (math.inf if math.isnan(self._value) else sign * self._value)

    def is_of(self, step: int, evaluation: Mapping[str, float]) -> bool:
        """Whether this evaluation is the best one as this process began, and its checkpoint that of this step."""
        name = self._config.best
        return name is not None and self._name == f"step-{step}" and evaluation.get(name) == self._value

    def mark(self, path: Path, evaluation: Mapping[str, float]) -> None:
        """Keeps ``path``, which is of the weights that were evaluated; the one before is pruned like any other.

        Rank 0 calls it before ``path`` is there, so that a run which dies then does not forget that it was the best.
        """
        assert self._config.best is not None
        self._store.mark_best(path, metric=self._config.best, value=evaluation[self._config.best])

    def note(self, evaluation: Mapping[str, float]) -> None:
        """From here on a better one has to be better than this; every rank calls it."""
        assert self._config.best is not None
        self._value = evaluation[self._config.best]


# Checkpoints by the clock: rank 0 says when one is due, and it travels with the count of a window.


class SaveClock:
    """Due so long after the last save, or after the start; all ranks learn of it before the same window.

    See :class:`~distaccum.data.counter.Rider`.

    Args:
        every: seconds.
        decides: whether this rank's clock counts: rank 0's does.
        ago: seconds since the last save.
        now: the clock, in seconds.
    """

    def __init__(self, every: float, *, decides: bool, ago: float = 0.0, now: Callable[[], float] = monotonic) -> None:
        self._every, self._decides, self._now = every, decides, now
        self.saved()
        self._began -= ago

    def saved(self) -> None:
        """Begins to count anew; on all ranks, after any save."""
        self._began, self.due = self._now(), False

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """1.0 from the rank that decides, where a save is due."""
        return [float(self._decides and self._now() - self._began >= self._every)]

    def incoming(self, sums: list[float]) -> None:
        """Whether that rank has said so: the same on every rank."""
        self.due = self.due or sums[0] > 0


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
            part.write,
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
