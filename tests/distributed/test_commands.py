"""``distaccum`` as a person starts it: under torchrun, and with a reader that leaves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import QUIET, ROOT, TINY, environment, metrics, status

pytestmark = pytest.mark.slow

STEPS = 4
TRAIN = (*TINY, *QUIET, f"trainer.max_steps={STEPS}")


def _shell(line: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of bash, in which ``$@`` is a command of this interpreter; it fails where any part of a pipe does."""
    words = ["bash", "-o", "pipefail", "-c", line, "bash", sys.executable, *arguments]
    env = environment(PYTHONPATH=str(ROOT))
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder, env=env, timeout=240)


@pytest.mark.heavy
def test_two_ranks_train_on_when_the_reader_of_their_output_leaves(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "distaccum", "train")
    ended = _shell('"$@" 2> error | head -1', *launcher, *TRAIN, "hydra.run.dir=run", folder=tmp_path)
    assert ended.returncode == 0, (tmp_path / "error").read_text()
    assert ended.stdout.count("\n") == 1
    assert "Traceback" not in (tmp_path / "error").read_text()
    assert status(tmp_path / "run") == {"state": "done", "step": STEPS, "reason": ""}
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))


@pytest.mark.heavy
def test_help_under_torchrun_is_said_once(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "distaccum")
    ended = _shell('"$@"', *launcher, "train", "--help", "seed", folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (
        0,
        "  seed  (int; default 0)\n      Random seed for initial weights, data order and dropout.\n",
    )


@pytest.mark.heavy
def test_a_forecast_is_written_when_nobody_reads_it(tmp_path: Path) -> None:
    plan = ("-m", "distaccum.tools.plan.command", *TINY, "cluster.micro_step_ms=1", "hydra.run.dir=run")
    ended = _shell('"$@" | true', *plan, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["model"]["blocks"] == 1


@pytest.mark.parametrize("arguments", [["train", "--cfg", "job"], ["verify", "."]])
def test_no_command_says_anything_of_a_closed_pipe(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "done", "step": 1, "reason": ""}')
    ended = _shell('"$@" | true', "-m", "distaccum", *arguments, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
