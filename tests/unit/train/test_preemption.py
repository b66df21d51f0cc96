"""A run that is preempted in one process goes on as if it had not been: what neither logs nor saves may tell apart."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from distaccum import CheckpointConfig, MetricsConfig, RunConfig, TrainerConfig, WandbConfig
from distaccum.distributed.world import World
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.models.cnn import CNN
from distaccum.train.run_dir import RunDir
from distaccum.train.trainer import Trainer
from tests.support.runs import At


class Noisy:
    """Samples that draw random numbers when they are read; with ``asks`` the run is asked to leave at the first."""

    def __init__(self, *, asks: bool = False) -> None:
        self._asks = asks

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._asks:
            os.kill(os.getpid(), signal.SIGUSR1)
        noise = torch.randn(1, 8, 8) + float(np.random.rand()) + random.random()  # noqa: NPY002, S311
        return noise, index % 3


def _losses(
    folder: Path, *, preempted_at: int | None = None, asks: bool = False, resume: str = "auto", **loading: int
) -> list[float]:
    run_dir = RunDir(folder)
    run_dir.make()
    random.seed(0)
    config = RunConfig(
        trainer=TrainerConfig(log_every=1, **loading),
        checkpoint=CheckpointConfig(every=3),
        metrics=MetricsConfig(console=False, wandb=WandbConfig(mode="disabled")),
    )
    torch.manual_seed(0)
    trainer = Trainer(
        CNN(channels=1, classes=3),
        CrossEntropy(),
        Noisy(asks=asks),
        global_batch_size=4,
        micro_batch_size=2,
        max_steps=12,
        resume=resume,
        config=config,
        run_dir=folder,
        callbacks=[At(preempted_at, lambda run: os.kill(os.getpid(), signal.SIGUSR1))] if preempted_at else [],
    )
    trainer.fit()
    assert trainer.preempted == (asks or preempted_at is not None)
    if not run_dir.metrics.exists():
        return []
    return [json.loads(line)["loss"] for line in run_dir.metrics.read_text().splitlines()]


def test_what_loading_draws_is_the_same_after_a_preemption(gloo_world: World, tmp_path: Path) -> None:
    whole = _losses(tmp_path / "whole")
    for step in (4, 7):  # within an epoch, and at its end
        assert _losses(tmp_path / str(step), preempted_at=step) == whole[:step]
        assert _losses(tmp_path / str(step)) == whole


_IN_A_NEW_PROCESS = """
import json, sys
from pathlib import Path
from tests.unit.train.test_preemption import _losses
print(json.dumps([_losses(Path(folder), preempted_at=at) for folder, at in json.loads(sys.argv[1])]))
"""


@pytest.mark.heavy  # a kill and a resume in new processes run in CI: distributed/test_resume.py
def test_what_loading_draws_is_the_same_after_a_preemption_in_a_new_process(tmp_path: Path) -> None:
    """Modules that a process imports on its way to the first window may draw random numbers."""

    def losses(*runs: tuple[str, int | None]) -> list[list[float]]:
        given = json.dumps([(str(tmp_path / folder), preempted_at) for folder, preempted_at in runs])
        command = [sys.executable, "-c", _IN_A_NEW_PROCESS, given]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
        found: list[list[float]] = json.loads(ended.stdout.splitlines()[-1])
        return found

    whole, part = losses(("whole", None), ("parts", 4))
    assert part == whole[:4]
    assert losses(("parts", None)) == [whole]


@pytest.mark.slow
def test_what_is_loaded_ahead_is_the_same_after_a_preemption(gloo_world: World, tmp_path: Path) -> None:
    """Also where more of it is loaded ahead then, by more processes."""
    whole = _losses(tmp_path / "whole", num_workers=1, prefetch_windows=0)
    assert len(set(whole)) == 12
    assert _losses(tmp_path / "parts", preempted_at=4, num_workers=2) == whole[:4]
    assert _losses(tmp_path / "parts", num_workers=2, prefetch_windows=3) == whole


def test_a_run_from_a_named_checkpoint_has_one_of_its_own_when_it_is_preempted_at_once(
    gloo_world: World, tmp_path: Path
) -> None:
    whole = _losses(tmp_path / "whole")
    start = tmp_path / "whole" / "checkpoints" / "step-9"
    assert _losses(tmp_path / "parts", asks=True, resume=str(start)) == []
    assert (tmp_path / "parts" / "checkpoints" / "step-9").is_dir()
    assert _losses(tmp_path / "parts") == whole[9:]


def test_before_the_first_update_it_does_not_claim_to_have_saved(
    gloo_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _losses(tmp_path, asks=True) == []
    assert not (tmp_path / "checkpoints").exists()
    said = capsys.readouterr().out
    assert "preempted (SIGUSR1): 0 of 12 steps; nothing to save yet" in said
    assert "saved in" not in said
