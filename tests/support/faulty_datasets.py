"""Data sources that go wrong, for tests to name as ``data._target_``."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from distaccum.accumulation.step import Outcome
from distaccum.train.callbacks import Callback, Run


class FailsOnRankOne:
    """Raises in the middle of an epoch, on rank 1 alone."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 7 and os.environ.get("RANK") == "1":
            raise OSError("the disk of rank 1 is gone")
        return torch.zeros(1, 8, 8), torch.tensor(0)


class HasNoLength:
    """Raises before the first window."""

    def __len__(self) -> int:
        raise OSError("the index cannot be read")

    def __getitem__(self, index: int, /) -> None: ...


def leaves() -> None:
    """Ends the process with a text, as scripts do."""
    sys.exit("the token is missing")


class GoesWrong:
    """64 small images; reading number ``at`` does what ``how`` says, on one rank; with a file ``once`` only once.

    ``stop``: SIGSTOP of the process that reads it; ``stick``: it never comes back, as of a mount that is gone;
    ``sleep``: it takes five seconds; ``slow``: every image takes 20 ms; ``memory``: it asks for more memory than there
    is; ``none``: nothing; a number: a signal to the process that reads it.
    """

    def __init__(self, how: str, rank: int = 1, at: int = 7, once: str = "") -> None:
        self._how, self._at, self._once = how, at, Path(once) if once else None
        self._is_here = os.environ.get("RANK", "0") == str(rank)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        if self._how == "slow" and self._is_here:
            time.sleep(0.02)
        elif index == self._at and self._is_here and not (self._once and self._once.exists()):
            if self._once:
                self._once.touch()
            if self._how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self._how == "stick":
                time.sleep(1000)
            elif self._how == "memory":
                torch.empty(2**46)
            elif self._how == "sleep":
                time.sleep(5)
            elif self._how != "none":
                os.kill(os.getpid(), int(self._how))
        return torch.full((1, 8, 8), index / 64), torch.tensor(index % 10)


def prepared(folder: str, fails: str = "") -> GoesWrong:
    """Data that are prepared once, as a ``map`` with a cache does: who finds none makes it, or fails on rank 0."""
    cache = Path(folder, "cache")
    if fails and os.environ["RANK"] == "0":
        raise OSError(fails)
    if not cache.exists():
        with Path(folder, "made").open("a") as file:
            file.write(os.environ["RANK"])
        time.sleep(0.5)
        cache.touch()
    return GoesWrong("none")


class Raises(Callback):
    """An error of one rank alone, between two windows."""

    def __init__(self, rank: int = 0, step: int = 3) -> None:
        self._rank, self._step = rank, step

    def on_update(self, run: Run, outcome: Outcome) -> None:
        if run.progress.step == self._step and dist.get_rank() == self._rank:
            raise OSError("the file of rank 0 is gone")


class Alone(Callback):
    """A collective of the user's own that one rank calls, and the others do not."""

    def __init__(self, rank: int = 0, step: int = 3, numbers: int = 1) -> None:
        self._rank, self._step, self._numbers = rank, step, numbers

    def on_update(self, run: Run, outcome: Outcome) -> None:
        if run.progress.step == self._step and dist.get_rank() == self._rank:
            dist.all_reduce(torch.ones(self._numbers))
