"""An fp16 run that is killed in the middle of a growth interval goes on at the same scales, bit by bit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.commands import TINY, kill_when, metrics, status, succeed

SETTINGS = (
    *TINY,
    "batch.global_size=6",
    "batch.micro_size=2",
    "trainer.max_steps=30",
    "metrics=jsonl",
    "trainer.log_every=1",
    "trainer.eval_every=0",
    "checkpoint.every=4",
    "resume=auto",
    "precision=fp16",
    "precision.scaler.growth_interval=7",
    "precision.scaler.hysteresis=2",
    "precision.scaler.initial_scale_power=22",
    "precision.underflow_every=0",
)
EXACT = ("step", "window", "loss", "grad_norm", "lr", "loss_scale", "applied", "skipped", "nonfinite", "samples")


@pytest.mark.heavy
@pytest.mark.parametrize(("world", "records"), [(1, 30), (2, 21)])
def test_killed_within_a_growth_interval_and_resumed_is_bitwise_uninterrupted(
    tmp_path: Path, world: int, records: int
) -> None:
    """At 21 records a growth lies ahead, for which those before the checkpoint count; at 30, with an overflow forgiven
    before the checkpoint, one that is not forgiven any more."""
    succeed(*SETTINGS, f"hydra.run.dir={tmp_path / 'whole'}", world=world)
    kill_when(tmp_path / "killed", records, *SETTINGS, world=world)
    assert status(tmp_path / "killed")["state"] == "running"
    resumed = succeed(*SETTINGS, f"hydra.run.dir={tmp_path / 'killed'}", world=world)
    assert "resuming" in resumed.stdout
    assert "at step 30" not in resumed.stdout  # none of its processes had gone on

    whole, killed = metrics(tmp_path / "whole"), metrics(tmp_path / "killed")
    # repr, as NaN is not equal to itself
    assert [repr([record[key] for key in EXACT]) for record in killed] == [
        repr([record[key] for key in EXACT]) for record in whole
    ]
    scales = [record["loss_scale"] for record in whole]
    assert not whole[0]["applied"]
    assert scales[0] == scales[1] == 2.0**22  # the first overflow is forgiven
    assert any(before < after for before, after in pairwise(scales))
    assert status(tmp_path / "killed") == {"state": "done", "step": 30, "reason": ""}
