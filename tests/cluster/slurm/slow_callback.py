"""A callback that gives a test time to interrupt a run of tiny windows."""

import time
from pathlib import Path

from distaccum.accumulation.step import Outcome
from distaccum.train.callbacks import Callback, Run


class Slow(Callback):
    """Sleeps ``seconds`` after each update; makes the file ``sleeps`` before, if one is named."""

    def __init__(self, seconds: float, sleeps: str | None = None) -> None:
        self._seconds, self._sleeps = seconds, sleeps

    def on_update(self, run: Run, outcome: Outcome) -> None:
        if self._sleeps is not None:
            Path(self._sleeps).touch()
        time.sleep(self._seconds)
