"""A training in FOLDER that prints, warns and logs on every rank, skips, evaluates, saves, waits, and never ends."""

import logging
import math
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn

from distaccum import Callback, DataSpec, Trainer
from distaccum.accumulation.step import Outcome
from distaccum.config.schema import RunConfig
from distaccum.train.callbacks import Run
from tests.support.accumulators import Loss

RANK = os.environ.get("RANK", "0")
WORDS = " ".join(f"word{number}" for number in range(30))
LOG = logging.getLogger("users.own")


class Speaks(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_update(self, run: Run, outcome: Outcome) -> None:
        step = run.progress.step
        if step == 3:
            time.sleep(2 * int(RANK))  # a line of one rank at a time
            print(f"rank {RANK} prints {WORDS}")
            warnings.warn(f"rank {RANK} warns", stacklevel=1)
            LOG.warning("rank %s logs", RANK)
            for done in range(4):
                sys.stderr.write(f"\rrank {RANK} counts {done}/3")
                time.sleep(0.1 if RANK == "0" else 0)
            sys.stderr.write("\n")
        if step in (6, 24):
            (self.folder / f"waits-{step}").touch()
            while not (self.folder / f"go-{step}").exists():
                time.sleep(0.05)
        time.sleep(0.02)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    samples = list(torch.randn(64, 3))
    samples[20][1] = math.inf
    settings = {
        "batch": {"global_size": 4, "micro_size": 1},
        "trainer": {"max_steps": 1_000_000, "log_every": 4, "eval_every": 4, "nonfinite": "skip"},
        "checkpoint": {"every": 4},
        "metrics": {"wandb": {"mode": "disabled"}},
    }
    Trainer(
        nn.Linear(3, 1),
        Loss(),
        DataSpec(train=samples, eval_dataset=samples[:4], description="numbers"),
        config=RunConfig.from_dict(settings),
        callbacks=[Speaks(folder)],
        run_dir=folder / "run",
    ).fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
