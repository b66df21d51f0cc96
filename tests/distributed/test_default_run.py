"""Minutes long: the default run to its target, and an installation outside the checkout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.support.commands import ROOT, environment, metrics, status, succeed

pytestmark = pytest.mark.heavy


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [1, 2])
def test_it_learns_real_text(tmp_path: Path, world: int) -> None:
    threads = str(2 // world)
    finished = succeed(f"hydra.run.dir={tmp_path}", world=world, timeout=1200, OMP_NUM_THREADS=threads)
    reached = metrics(tmp_path)[-1]["eval_bits_per_byte"]
    assert reached <= 2.4
    assert f"bits per byte   {reached:.4f}" in finished.stdout
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.timeout(1800)
def test_16_bits_end_within_one_percent_of_32(tmp_path: Path) -> None:
    """Accumulation 8 on 2 processes."""
    reached = {}
    for precision in ("fp32", "bf16", "fp16"):
        settings = (f"precision={precision}", "batch.micro_size=2", "checkpoint.every=0", "metrics=jsonl")
        succeed(*settings, f"hydra.run.dir={tmp_path / precision}", world=2, timeout=900)
        reached[precision] = metrics(tmp_path / precision)[-1]["eval_bits_per_byte"]
    print(reached)
    for precision in ("bf16", "fp16"):
        assert reached[precision] == pytest.approx(reached["fp32"], rel=0.01)


@pytest.mark.timeout(1200)
def test_the_wheel_elsewhere_trains_forecasts_and_exports(tmp_path: Path) -> None:
    """In a clean environment, outside the checkout, with a configuration folder of the user's."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "requirements.lock", str(ROOT)],
        check=True,
        timeout=900,
    )
    group = tmp_path / "mine" / "experiment"
    group.mkdir(parents=True)
    (group / "tiny.yaml").write_text("# @package _global_\nmodel:\n  n_layer: 1\ntrainer:\n  max_steps: 3\n")
    settings = ["--config-dir", "mine", "experiment=tiny", "batch.global_size=4", "batch.micro_size=2", "metrics=jsonl"]

    def call(*command: str) -> None:
        program, *arguments = command
        subprocess.run(
            [python.with_name(program), *arguments],
            cwd=tmp_path,
            env=environment(PYTHONPATH=""),  # the wheel's package, not the checkout's
            check=True,
            timeout=240,
        )

    call("distaccum", "train", *settings, "hydra.run.dir=one")
    call("torchrun", "--standalone", "--nproc-per-node=2", "-m", "distaccum.train", *settings, "hydra.run.dir=two")
    for run_dir in (tmp_path / "one", tmp_path / "two"):
        assert status(run_dir) == {"state": "done", "step": 3, "reason": ""}
        assert json.loads((run_dir / "plan.json").read_text())["total_steps"] == 3
    call("distaccum", "plan", "cluster.micro_step_ms=1", "hydra.run.dir=forecast")
    assert json.loads((tmp_path / "forecast" / "plan.json").read_text())["cluster"]["micro_step_ms"] == 1
    call("distaccum", "audit", "--help")
    call("distaccum", "doctor", "--only", "software")
    call("distaccum", "report", "one", "two", "-o", "both.html")
    call("distaccum", "verify", "one")
    call("distaccum", "export", "one/checkpoints/step-3", "weights.safetensors")
    weights = tmp_path / "one" / "checkpoints" / "step-3" / "model.safetensors"
    assert load_file(tmp_path / "weights.safetensors").keys() == load_file(weights).keys()
