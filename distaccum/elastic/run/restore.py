"""Restores a run from what was carried from the view before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distaccum.accumulation.accumulator import Accumulator
from distaccum.elastic.engine.ddp import resumable
from distaccum.elastic.run.carried import Carried
from distaccum.train import ema
from distaccum.train.callbacks import Callback
from distaccum.train.callbacks import restore as restore_callbacks


class RestoreCarried:
    """Restores a run from what was carried; as :class:`~distaccum.train.resume.Restore` does from a checkpoint.

    The weights are in the model already, or come with the engine's state.
    """

    def __init__(self, carried: Carried, callbacks: Sequence[Callback]) -> None:
        self._carried: Carried | None = carried
        self._run, self._callbacks = carried.run, callbacks

    def after_wrap(self, accumulator: Accumulator, *, wandb_id: str) -> tuple[str, str]:
        """Restores all that a run has in memory, and lets go of it.

        Returns:
            The id of the W&B run, and no note.
        """
        carried, self._carried = self._carried, None
        assert carried is not None
        if carried.shares is None:
            accumulator.engine.load_state(carried.engine)
        else:
            engine = resumable(accumulator.engine)
            engine.load_dealt(carried.engine, carried.shares.now, torn=carried.shares.torn)
        run = carried.run
        accumulator.restore(run.progress, run.position, None, run.spikes, run.hooks)
        accumulator.tracker.skips_in_a_row = carried.skips_in_a_row
        accumulator.know_counted(carried.counted)
        restore_callbacks(self._callbacks, run.callbacks)
        ema.begin(self._callbacks, accumulator.engine, None)
        average = ema.of(self._callbacks)
        if average is not None and carried.average is not None:
            average.load(carried.average)
        if carried.random is not None:
            carried.random.restore()
        return run.wandb_id, ""

    @property
    def memory(self) -> Mapping[str, Any]:
        """What the run knows of memory."""
        return self._run.memory

    @property
    def logged(self) -> Mapping[str, int]:
        """Window and step of the last record."""
        return self._run.logged
