"""A small run of which one rank does something in a phase that is named: it stops, or is told to leave, or dies.

``PHASE`` names the phase, ``DOES`` what happens there: numbers of signals that the process sends itself, or a FIFO to
read from, which nobody writes to; ``WHO`` the rank. But for the import and the start it happens once ``AT`` updates are
made, when every kind of phase has been done before.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.accumulation.step import Outcome
from distaccum.data.spec import DataSpec
from distaccum.train.callbacks import Callback, Run
from tests.support.commands import NO_TEXT

SETTINGS = (
    "model=cnn",
    *NO_TEXT,
    "data._target_=tests.support.phases.data",
    "~model.channels",
    "model._target_=tests.support.phases.Net",
    "+callbacks.clock._target_=tests.support.phases.Clock",
    "batch.global_size=8",
    "batch.micro_size=2",
    "trainer.max_steps=32",
    "trainer.log_every=1",
    "trainer.eval_every=3",
    "trainer.verify=never",
    "metrics=jsonl",
    "checkpoint.every=2",
    "resume=auto",
)
PHASES = ("import", "startup", "loading", "forward", "backward", "reduction", "evaluation", "save")
_MICRO_STEPS = 2
_SLOW_S = 0.05
_SEEN_S = 0.4  # in the phase, before it happens: the others have seen this rank there


class _Now:
    """How far this process is."""

    step, forwards, happened = 0, 0, False


def happens(phase: str) -> None:
    if os.environ.get("PHASE") != phase or _Now.happened:
        return
    time.sleep(_SLOW_S)  # on all ranks, so that the phase is seen, and its usual length known
    early = phase not in PHASES[:2] and _Now.step < int(os.environ.get("AT", "4"))
    if early or os.environ.get("RANK", "0") != os.environ.get("WHO", "1"):
        return
    _Now.happened = True
    time.sleep(_SEEN_S)
    for how in os.environ["DOES"].split(","):
        if how.isdecimal():
            os.kill(os.getpid(), int(how))
        else:
            Path(how).read_bytes()


class Images:
    """Small images; of the training data and of what is held out."""

    def __init__(self, size: int, phase: str) -> None:
        self._size, self._phase = size, phase

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        happens(self._phase)
        return torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index)), torch.tensor(index % 10)


def data() -> DataSpec:
    """40 images to train on, which are five windows."""
    return DataSpec(train=Images(40, "loading"), eval_dataset=Images(8, "evaluation"), description="images")


class Net(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        happens("startup")
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x.flatten(1))
        if self.training and torch.is_grad_enabled():
            _Now.forwards += 1
            if _Now.forwards % _MICRO_STEPS:
                happens("forward")
                logits.register_hook(lambda _: happens("backward"))
            else:
                logits.register_hook(lambda _: happens("reduction"))
        return logits


class Clock(Callback):
    """Counts updates; a part of every checkpoint."""

    def on_update(self, run: Run, outcome: Outcome) -> None:
        _Now.step = run.progress.step

    def state_dict(self) -> dict[str, Any]:
        happens("save")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is none."""


happens("import")
