"""README.md is true: its example is taken from it as it stands, and run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from distaccum.data.datasets.lines import lines
from tests.support.commands import ROOT, environment, metrics, status

README = (ROOT / "README.md").read_text()


def _files() -> dict[str, str]:
    """The example's files: a path in backticks, then a block with its content."""
    return dict(re.findall(r"\n`(my_[\w/.]+)`:\n\n```\w+\n(.*?)```", README, flags=re.DOTALL))


def _command(containing: str) -> list[str]:
    """The one command of the README that contains these words, on this interpreter."""
    (line,) = [line for line in README.splitlines() if containing in line and line.startswith(("torchrun", "python"))]
    name, *arguments = shlex.split(line)
    return [sys.executable, *(["-m", "torch.distributed.run"] if name == "torchrun" else []), *arguments]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = _files()
    assert len(files) == 5
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def test_your_own_model_data_loss_and_optimizer(project: Path) -> None:
    command = [*_command("--config-dir my_conf data=points"), "hydra.run.dir=run", "metrics=jsonl"]
    finished = subprocess.run(
        command, cwd=project, env=environment(), capture_output=True, text=True, check=False, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    assert "Points, 100 samples" in finished.stdout
    assert status(project / "run")["state"] == "done"
    records = metrics(project / "run")
    assert records[-1]["samples"] == 2000
    assert records[-1]["loss"] < 0.05 < records[0]["loss"]  # the noise's variance is 0.01
    assert "eval_loss" not in records[-1]


def test_the_testing_example(project: Path) -> None:
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "single_process_world" in b]
    finished = subprocess.run(
        [sys.executable, "-c", block], cwd=project, env=environment(), capture_output=True, text=True, check=True
    )
    assert float(finished.stdout) == pytest.approx(2 * 4 * 2**0.5)  # two micro-steps of 4 samples: d/dw = d/db = 8


def test_the_contract_names_what_there_is() -> None:
    contract = README[README.index("## Contract") : README.index("## Architecture")]
    for key in [
        "batch.global_size",
        "batch.micro_size",
        "engine",
        "precision",
        "seed",
        "trainer.max_steps",
        "trainer.max_epochs",
        "trainer.log_every",
        "trainer.eval_every",
        "checkpoint.every",
        "checkpoint.keep",
        "resume",
        "optim.lr",
        "optim.clip_norm",
    ]:
        assert key in contract
    for group in ("engine", "precision", "data", "model", "optim", "schedule", "metrics"):
        (row,) = [line for line in contract.splitlines() if line.startswith(f"| `{group}` |")]
        choices = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
        assert set(re.findall(r"`([\w-]+)`", row)) == {group} | choices


def _diff() -> list[str]:
    (block,) = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)
    return block.splitlines()


def test_coming_from_accelerate_changes_under_ten_lines() -> None:
    removed, added = ([line for line in _diff() if line.startswith(sign)] for sign in "-+")
    replaced = min(len(removed), len(added))
    assert replaced + abs(len(removed) - len(added)) < 10


@pytest.mark.parametrize("sign", ["-", "+"])
def test_both_sides_of_the_accelerate_diff_run(tmp_path: Path, sign: str) -> None:
    script = "\n".join(line[1:] for line in _diff() if line[:1] in (" ", sign))
    script += "\nprint(f'loss {loss.item():.4f} rate {scheduler.get_last_lr()[0]:.6f}')\n"
    path = tmp_path / "loop.py"
    path.write_text(script)
    finished = subprocess.run(
        [sys.executable, path],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    loss, rate = re.findall(r"[\d.]+", finished.stdout)
    assert float(loss) < 3.5
    updates = -(-len(lines(seq_len=64).train) // 64)  # type: ignore[arg-type]
    assert float(rate) == pytest.approx(3e-3 * 0.99**updates, rel=1e-3)
