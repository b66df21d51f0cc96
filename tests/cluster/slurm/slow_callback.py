"""A callback that gives a test time to interrupt a run of tiny windows."""

from __future__ import annotations

import time

from distaccum.accumulation.step import Outcome
from distaccum.train.callbacks import Callback, Run


class Slow(Callback):
    """Sleeps ``seconds`` after each update."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_update(self, run: Run, outcome: Outcome) -> None:
        time.sleep(self._seconds)
