"""The ways in, the sources, and the files that a run leaves."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.support.commands import QUIET, ROOT, TINY, environment, metrics, run, status, succeed

SHORT = (*TINY, *QUIET, "batch.global_size=8", "batch.micro_size=3", "trainer.max_steps=4")
METRICS = [
    "step",
    "window",
    "epoch",
    "loss",
    "grad_norm",
    "lr",
    "loss_scale",
    "applied",
    "skipped",
    "nonfinite",
    "samples",
    "tokens",
    "samples_per_s",
    "tokens_per_s",
    "step_time_s",
    "data_wait_s",
    "memory_bytes",
]


def test_what_is_not_installed_is_named_in_one_line() -> None:
    bare = [sys.executable, "-S", ROOT / "launch" / "train.py"]  # without what was installed
    finished = subprocess.run(bare, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert finished.stderr.startswith(
        "not installed, and needed: torch, numpy, hydra, omegaconf, safetensors, rich; `pip"
    )
    assert finished.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_run_leaves_what_the_contract_says(tmp_path: Path) -> None:
    finished = succeed(
        *SHORT, "trainer.eval_every=4", "checkpoint.every=2", f"hydra.run.dir={tmp_path}", world=2, torchrun=True
    )
    records = metrics(tmp_path)
    assert [list(record) for record in records[:3]] == [METRICS] * 3
    assert list(records[3]) == [*METRICS, "eval_loss", "eval_accuracy", "eval_bits_per_byte", "eval_samples"]
    assert records[3]["eval_bits_per_byte"] == pytest.approx(records[3]["eval_loss"] / np.log(2))
    last = {key: records[3][key] for key in METRICS[:3] + METRICS[6:12]}
    assert last == {
        "step": 4,
        "window": 4,
        "epoch": 0,
        "loss_scale": 1.0,
        "applied": True,
        "skipped": 0,
        "nonfinite": 0,
        "samples": 32,
        "tokens": 32 * 16,
    }
    assert status(tmp_path) == {"state": "done", "step": 4, "reason": ""}
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["unit"], plan["global_size"], plan["world_size"], plan["accumulation_steps"]) == ("samples", 8, 2, 2)
    assert plan["windows_per_epoch"] == -(-plan["samples"] // 8)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-2", "step-4"]
    assert sorted(path.name for path in (tmp_path / ".hydra").iterdir()) == [
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    ]
    assert f"hydra.run.dir={tmp_path}" not in OmegaConf.load(tmp_path / ".hydra" / "overrides.yaml")
    assert "global batch 8 samples = 2 ranks x 2 micro-steps of at most 3" in finished.stdout
    for baseline in ("bits per byte", "byte bigram", "zlib -9"):
        assert baseline in finished.stdout
    assert finished.stdout.count("\nplan ") == 1


def test_all_ranks_share_one_fresh_run_directory(tmp_path: Path) -> None:
    succeed(*SHORT, cwd=tmp_path, world=2)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert status(run_dir)["state"] == "done"


def test_a_refused_run_leaves_the_old_ones_files_alone(tmp_path: Path) -> None:
    succeed(*SHORT, f"hydra.run.dir={tmp_path}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refused = run(*SHORT, "optim.lr=1", f"hydra.run.dir={tmp_path}")
    assert refused.returncode == 2
    assert "resume=auto" in refused.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "start", [["-m", "distaccum.train"], pytest.param([str(ROOT / "launch" / "train.py")], marks=pytest.mark.heavy)]
)
def test_python_alone_is_a_world_of_one(tmp_path: Path, start: list[str]) -> None:
    subprocess.run(
        [sys.executable, *start, *SHORT, f"hydra.run.dir={tmp_path}"],
        env=environment(),
        check=True,
        timeout=60,
        capture_output=True,
    )
    assert json.loads((tmp_path / "plan.json").read_text())["world_size"] == 1


@pytest.mark.slow
def test_digits_are_learnt_and_their_accuracy_reported(tmp_path: Path) -> None:
    finished = succeed(
        "data=digits",
        "model=cnn",
        "batch.global_size=64",
        "batch.micro_size=32",
        "trainer.max_steps=200",
        "optim.lr=1e-2",
        "metrics=jsonl",
        "checkpoint.every=0",
        f"hydra.run.dir={tmp_path}",
        world=2,
    )
    assert metrics(tmp_path)[-1]["eval_accuracy"] > 0.9
    assert "eval_bits_per_byte" not in metrics(tmp_path)[-1]
    assert "accuracy" in finished.stdout
    assert "zlib" not in finished.stdout
