"""Checkpoints that an older distaccum has saved: a run goes on from each as the older one did."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.commands import ROOT, metrics, status, succeed

SAVED = ROOT / "tests" / "data" / "checkpoints"  # its README says by which commit and commands they were made
STEP = 3
SETTINGS = (
    "data=lines",
    "data.seq_len=24",
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=8",
    "model.dropout=0.0",  # the older one's random numbers were the ranks', and are drawn no more
    "resume_allow=[model.dropout]",
    "schedule.warmup_steps=2",
    "batch.global_size=10",
    "batch.micro_size=2",
    "trainer.max_steps=6",
    "trainer.log_every=1",
    "trainer.eval_every=0",
    "checkpoint.every=3",
    "checkpoint.keep=0",
    "metrics=jsonl",
    "resume=auto",
)
ENGINES = {
    "ddp": ("engine=ddp",),
    "zero1": ("engine=zero1",),
    "fsdp2": ("engine=fsdp2",),
    "deepspeed": ("engine=deepspeed", "engine.stage=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_goes_on_as_the_older_one_did(tmp_path: Path, engine: str) -> None:
    if engine == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    expected = metrics(SAVED / engine)
    run_dir = tmp_path / "run"
    shutil.copytree(SAVED / engine, run_dir)
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in expected[:STEP]))

    resumed = succeed(*SETTINGS, *ENGINES[engine], f"hydra.run.dir={run_dir}", world=2, warm="deepspeed")

    assert "resuming" in resumed.stdout
    found = metrics(run_dir)
    exact = ("step", "window", "epoch", "lr", "samples", "tokens", "applied")
    assert [[record[key] for key in exact] for record in found] == [
        [record[key] for key in exact] for record in expected
    ]
    for key in ("loss", "grad_norm"):  # of another processor, the last bits differ
        assert [record[key] for record in found] == pytest.approx([record[key] for record in expected], rel=1e-6), key
    assert status(run_dir) == {"state": "done", "step": 6, "reason": ""}
