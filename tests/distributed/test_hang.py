"""Ranks that stop, in every way they do: the run names them in time, ends, and leaves no process behind."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distaccum.tools.stragglers import WINDOWS
from tests.support import commands
from tests.support.commands import GOES_WRONG, ROOT, captured, metrics, status
from tests.support.started import Started

pytestmark = pytest.mark.slow
LOCAL = ROOT / "launch" / "local.py"
SETTINGS = (*GOES_WRONG, "model=cnn", "trainer.eval_every=0", "checkpoint.every=2", "resume=auto")
ENDLESS = (*SETTINGS, "trainer.max_steps=1000000", "checkpoint.every=100000", "+data.how=none")
AFTER_FAILURE_S = 30  # what torchrun gives the others when a worker has failed


def start(run_dir: Path, *arguments: str, grace_s: int = 5) -> Started:
    """On two ranks, by ``launch/local.py``."""
    extra = {"NPROC": "2", "PYTHONPATH": str(ROOT), "SHUTDOWN_TIMEOUT": str(grace_s)}
    return Started(run_dir, [sys.executable, str(LOCAL), *arguments], **extra)


def _said(run: Started) -> str:
    """The one line about it, which stands in ``status.json`` as well."""
    (line,) = (line for line in run.log.read_text().splitlines() if "no rank has made progress" in line)
    found = status(run.run_dir)
    assert found["state"] == "failed"
    assert found["reason"].split(";")[0] in line
    return str(found["reason"])


@pytest.mark.heavy
@pytest.mark.fault("a loading process is stopped")
def test_a_loading_process_that_stops_is_named_with_its_rank(tmp_path: Path, says: Callable[[str], None]) -> None:
    run = start(tmp_path / "run", *SETTINGS, "+data.how=stop", "trainer.num_workers=1", "trainer.hang_timeout=3s")
    run.await_records(4)
    assert run.end(within_s=60) != 0
    says(_said(run))
    stacks = {file.name: file.read_text() for file in (run.run_dir / "hang").glob("*.txt")}
    assert set(stacks) == {"rank-0.txt", "rank-1.txt"}
    assert "all_reduce_host" in stacks["rank-0.txt"]
    assert "_try_get_data" in stacks["rank-1.txt"]


@pytest.mark.heavy
@pytest.mark.fault("SIGTERM while a rank is stopped")
def test_told_to_leave_while_a_rank_hangs_it_does_not_wait_for_its_timeout(
    tmp_path: Path, says: Callable[[str], None]
) -> None:
    run = start(tmp_path / "run", *ENDLESS, "trainer.hang_timeout=auto", grace_s=30)
    launcher, *others = run.await_records(20)
    second = sorted(pid for pid in others if os.getsid(pid) == pid)[1]
    time.sleep(3)  # until the pauses of a few windows are measured
    os.kill(second, signal.SIGSTOP)
    began = time.monotonic()
    os.kill(launcher, signal.SIGTERM)
    while status(run.run_dir)["state"] != "failed":
        assert time.monotonic() - began < 30, run.log.read_text()  # after which torchrun kills
        time.sleep(0.1)
    assert f"process {second} on " in status(run.run_dir)["reason"]
    says(status(run.run_dir)["reason"])
    run.end(within_s=AFTER_FAILURE_S)  # the launcher kills the stopped one 30 s after the signal


@pytest.mark.heavy
@pytest.mark.parametrize("setting", ["+data.at=0", "+data.at=7"])
def test_a_pause_that_is_no_hang_ends_nothing(tmp_path: Path, setting: str) -> None:
    """Five seconds before the first window, of which ten times the limit is allowed; and later within it."""
    limit = "trainer.hang_timeout=2s" if setting.endswith("=0") else "trainer.hang_timeout=8s"
    once = f"+data.once={tmp_path / 'once'}"
    run = start(tmp_path / "run", *SETTINGS, "+data.how=sleep", setting, once, limit, "trainer.max_steps=20")
    assert run.end(within_s=120) == 0, run.log.read_text()
    assert status(run.run_dir)["state"] == "done"
    assert not (run.run_dir / "hang").exists()


@pytest.mark.heavy
@pytest.mark.fault("a rank hangs, and torchrun may restart (`--max-restarts`)")
def test_torchrun_restarts_a_run_that_hangs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += [str(ROOT / "launch" / "train.py"), *SETTINGS, "+data.how=stop"]
    command += [f"+data.once={tmp_path / 'once'}", "trainer.max_steps=20", "trainer.hang_timeout=3s"]
    finished = captured([*command, f"hydra.run.dir={tmp_path / 'run'}"], timeout=120, PYTHONPATH=str(ROOT))
    assert finished.returncode == 0, finished.stderr
    assert "rank 1 (process " in finished.stderr
    assert status(tmp_path / "run") == {"state": "done", "step": 20, "reason": ""}


@pytest.mark.fault("three starts in a row fail without progress, by torchrun's restarts, Slurm's requeues or an array")
@pytest.mark.heavy
def test_a_run_that_fails_again_and_again_at_one_step_is_not_started_for_ever(
    tmp_path: Path, says: Callable[[str], None]
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=4"]
    command += [str(ROOT / "launch" / "train.py"), *SETTINGS, "+data.how=9", f"hydra.run.dir={tmp_path / 'run'}"]
    finished = captured(command, timeout=200, PYTHONPATH=str(ROOT))
    assert finished.returncode == 1
    refused = "3 starts in a row have failed, none after step"
    told = [line for line in finished.stderr.splitlines() if refused in line]
    assert sum(line.startswith("distaccum: configuration error: ") for line in told) == 2  # the fourth, and the fifth
    assert any("traceback : " in line for line in told)  # torchrun's own report has it for the root cause
    says(finished.stderr)
    named = "distaccum: the run failed: rank 1 "  # how it ended is known where torchrun has not waited for it yet
    assert len([line for line in finished.stderr.splitlines() if line.startswith(named)]) == 3
    assert status(tmp_path / "run")["state"] == "failed"
    for _ in range(2):
        by_hand = commands.run(
            *SETTINGS, "+data.how=9", f"hydra.run.dir={tmp_path / 'run'}", world=2, PYTHONPATH=str(ROOT)
        )
        assert "starts in a row" not in by_hand.stderr
        assert status(tmp_path / "run")["reason"].startswith("rank 1 ")


@pytest.mark.fault("a rank that is 1.5 times as slow as the median")
def test_a_slow_rank_is_told_and_does_not_end_the_run(tmp_path: Path, says: Callable[[str], None]) -> None:
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    slow = ("+data.how=slow", f"trainer.max_steps={WINDOWS + 10}")
    finished = commands.succeed(*SETTINGS, *slow, folder, world=2, PYTHONPATH=str(ROOT))
    says(finished.stderr)
    assert finished.stderr.count("is slow: ") == 1
    last = metrics(tmp_path / "run")[-1]
    assert last["slowest_rank"] == 1
    assert last["slowest_over_median"] > 1.5
