"""Takes a run back to its last checkpoint where a window's gradient norm spikes; the data go on after that window.

Source: A. Chowdhery et al., "PaLM" (2022), section 5.1: restart from a checkpoint before the spike, and leave out the
batches that were seen before and during it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint.store import CheckpointStore
from distaccum.distributed.activity import Phase
from distaccum.errors import SpikeError
from distaccum.train import ema
from distaccum.train.callbacks import restore as restore_callbacks
from distaccum.train.components import TrainingComponents
from distaccum.train.parts.base import Done, Part
from distaccum.train.parts.checkpoints import Checkpoints
from distaccum.train.screen import TRAINING

if TYPE_CHECKING:
    from distaccum.train.loop import Loop, TrainingRun

_log = logging.getLogger(__name__)

MOST = 3  # rollbacks to one checkpoint


class RollBack(Part):
    """``trainer.on_spike=rollback``.

    Args:
        run: is taken back.
        checkpoints: of the run.
    """

    watches = True

    def __init__(self, run: TrainingRun, checkpoints: Checkpoints) -> None:
        self._run, self._checkpoints = run, checkpoints

    def on_skip(self, run: Loop, done: Done) -> None:
        """Rolls the run back where the window was skipped for its norm."""
        if not done.outcome.finite:
            return
        self._checkpoints.settle(run)
        run.enter_phase(f"rolling back from step {run.progress.step}")
        world, window = self._run.accumulator.world, run.progress.window
        world.activity.phase = Phase.SAVE
        if roll_back(self._run.accumulator, self._run.store, self._run.components) is not None:
            run.evaluation = run.unlogged = None
            if world.is_main:
                self._run.run_dir.note_rolled_back(run.progress.step, window)
            self._checkpoints.save(run, again=True)  # whoever resumes goes on with the same data
        run.enter_phase(TRAINING)


def roll_back(accumulator: Accumulator, store: CheckpointStore, components: TrainingComponents) -> Path | None:
    """Loads the newest checkpoint of ``store`` after a window that made no step; a collective between two windows.

    Weights, optimizer state, loss scale, random numbers, callbacks, statistics and ``step`` are the checkpoint's. The
    data, and what counts attempts, samples and tokens, go on: updates that are undone count as skipped.

    Returns:
        The checkpoint, which is to be saved anew, so that whoever resumes goes on with the same data; None where there
        is none yet, and nothing was done.

    Raises:
        SpikeError: it was loaded so often before; on every rank.
        CheckpointError: it cannot be loaded.
    """
    world, progress, spikes = accumulator.world, accumulator.progress, accumulator.spikes
    assert spikes is not None  # trainer.on_spike=rollback looks for them
    newest = store.newest_valid() if world.is_main else None
    folder = world.broadcast_str(str(newest) if newest else "")
    if not folder:
        if world.is_main:
            _log.warning("trainer.on_spike=rollback: there is no checkpoint yet, so the window is skipped only")
        return None
    saved = checkpoint.read(Path(folder))
    step = saved.run.progress.step
    times = spikes.roll_back(step, saved.run.spikes)
    if times > MOST:
        raise SpikeError(
            f"window {progress.window} spikes, and the run has been rolled back to step {step} {MOST} times already, "
            f"each time to go on with other data. Resume from an earlier checkpoint than {folder}, lower the learning "
            "rate, or raise trainer.spike_zscore"
        )
    accumulator.use_evaluation_weights()
    checkpoint.restore(saved, accumulator.engine, world)
    accumulator.go_on_from(undone(progress, step))
    accumulator.engine.hooks.load_state(saved.run.hooks)
    restore_callbacks(components.callbacks, saved.run.callbacks)
    ema.begin(components.callbacks, accumulator.engine, saved.folder)
    if world.is_main:
        _log.warning(
            "rolled back from step %d to %s; training goes on with the data after window %d (%d of %d times to this "
            "checkpoint)",
            progress.step,
            folder,
            progress.window,
            times,
            MOST,
        )
    return saved.folder


def undone(progress: Progress, step: int) -> Progress:
    """The progress where the updates after ``step`` do not count: their windows are skipped ones."""
    return replace(progress, step=step, skipped=progress.skipped + progress.step - step)
