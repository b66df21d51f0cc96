"""A small GPT on each engine by a Trainer, on the CPU and then on the pretended GPU: what differs, and who waits."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.config.schema import RunConfig
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import open_world
from distaccum.engines.modules import to_local
from distaccum.models.gpt import GPT
from distaccum.train.callbacks import Callback
from launch import pretend
from launch.pretend import STATE

ENGINES = ("ddp", "zero1", "fsdp2")
FROM, TO = 2, 5  # the steps between which is counted; the third is logged


class Counts(Callback):
    """What the host has waited for in some windows."""

    found: Any = None

    def on_update(self, run: Any, outcome: object) -> None:
        if run.progress.step == FROM:
            STATE.forget()
        if run.progress.step == TO:
            self.found = dict(STATE.seen), dict(STATE.collectives)


def _trained(engine: str) -> tuple[list[Tensor], Any]:
    """This rank's weights, and what was counted."""
    rows = torch.randint(0, 32, (22, 13), generator=torch.Generator().manual_seed(1))
    data, counts = DataSpec(train=[(row[:-1], row[1:]) for row in rows], description=""), Counts()
    values = {
        "engine": engine,
        "batch": {"global_size": 6, "micro_size": 2},
        "trainer": {"max_steps": 5, "eval_every": 0, "log_every": 3, "verify": "never", "backend": "gloo"},
        "checkpoint": {"every": 0},
        "metrics": {"console": False, "report": False},
    }
    torch.manual_seed(0)
    model = GPT(vocab_size=32, seq_len=12, n_layer=1, n_head=2, n_embd=16, dropout=0.1, attention="math")
    with TemporaryDirectory() as folder:
        config = RunConfig.from_dict(values)
        Trainer(model, CrossEntropy(), data, config=config, callbacks=[counts], run_dir=folder).fit()
    return [to_local(p.detach()).cpu() for p in model.parameters()], counts.found


def main(path: str) -> None:
    """Writes a JSON file: by engine what was seen on rank 0, and of each rank whether its weights are the same."""
    ranks, mode, STATE.is_there = LaunchEnvironment.from_environment(), pretend.use(), False
    with open_world(ranks, ranks.store(), torch.device("cpu")):
        expected = {engine: _trained(engine)[0] for engine in ENGINES}
    answers, STATE.is_there = {}, True
    with mode, open_world(ranks, ranks.store(), pretend.DEVICE, backend="gloo") as world:  # ranks share the one card
        for engine in ENGINES:
            weights, (seen, collectives) = _trained(engine)
            same = all(map(torch.equal, weights, expected[engine]))
            told = world.all_gather_object((same, list(STATE.races)))
            answers[engine] = {"seen": seen, "collectives": collectives, "ranks": told}
        if world.is_main:
            Path(path).write_text(json.dumps(answers, indent=1))
