"""Ranks that stop, in every way they do: the run names them in time, ends, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distaccum.distributed.watchdog import DIED, trouble_of
from distaccum.tools.stragglers import WINDOWS
from tests.support import commands
from tests.support.commands import GOES_WRONG, ROOT, captured, environment, family, logged, metrics, status, until

pytestmark = pytest.mark.slow
LOCAL = ROOT / "launch" / "local.py"
SETTINGS = (*GOES_WRONG, "model=cnn", "trainer.eval_every=0", "checkpoint.every=2", "resume=auto")
ENDLESS = (*SETTINGS, "trainer.max_steps=1000000", "checkpoint.every=100000", "+data.how=none")
AFTER_FAILURE_S = 30  # what torchrun gives the others when a worker has failed


class Run:
    """A run of two ranks under ``launch/local.py``, all of whose processes have to be gone at the end."""

    def __init__(self, run_dir: Path, *arguments: object, grace_s: int = 5) -> None:
        self.run_dir, self.log = run_dir, run_dir.with_suffix(".out")
        command = [sys.executable, str(LOCAL), *map(str, arguments), f"hydra.run.dir={run_dir}"]
        extra = {"NPROC": "2", "PYTHONPATH": str(ROOT), "SHUTDOWN_TIMEOUT": str(grace_s)}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=environment(**extra), stdout=file, stderr=file, start_new_session=True
            )
        self._seen: set[int] = set()

    def await_records(self, number: int) -> list[int]:
        """The launcher and its workers, once so many windows are logged."""
        until(lambda: logged(self.run_dir) >= number or self.process.poll() is not None, told=self.log.read_text)
        assert self.process.poll() is None, self.log.read_text()
        self._seen |= set(family(self.process.pid))
        return [self.process.pid, *sorted(self.workers())]

    def workers(self) -> list[int]:
        return [pid for pid in family(self.process.pid)[1:] if os.getsid(pid) == pid]

    def end(self, within_s: float) -> int:
        """The exit code; fails if it takes longer, or if a process is left."""
        deadline = time.monotonic() + within_s
        try:
            while self.process.poll() is None:
                self._seen |= set(family(self.process.pid))
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.1)
            until(lambda: all(trouble_of(pid) == DIED for pid in self._seen - {self.process.pid}), 10)
        finally:
            for pid in self._seen | {self.process.pid}:
                if trouble_of(pid) != DIED:
                    os.kill(pid, signal.SIGKILL)
        return self.process.wait()

    def stacks(self) -> dict[str, str]:
        return {file.name: file.read_text() for file in (self.run_dir / "hang").glob("*.txt")}


def _said(run: Run) -> str:
    """The one line about it, which stands in ``status.json`` as well."""
    (line,) = (line for line in run.log.read_text().splitlines() if "no rank has made progress" in line)
    found = status(run.run_dir)
    assert found["state"] == "failed"
    assert found["reason"].split(";")[0] in line
    return str(found["reason"])


@pytest.mark.heavy
@pytest.mark.fault("a loading process is stopped")
def test_a_loading_process_that_stops_is_named_with_its_rank(tmp_path: Path, says: Callable[[str], None]) -> None:
    run = Run(tmp_path / "run", *SETTINGS, "+data.how=stop", "trainer.num_workers=1", "trainer.hang_timeout=3s")
    run.await_records(4)
    assert run.end(within_s=60) != 0
    says(_said(run))
    stacks = run.stacks()
    assert set(stacks) == {"rank-0.txt", "rank-1.txt"}
    assert "all_reduce_host" in stacks["rank-0.txt"]
    assert "_try_get_data" in stacks["rank-1.txt"]


@pytest.mark.heavy
@pytest.mark.fault("SIGTERM while a rank is stopped")
def test_told_to_leave_while_a_rank_hangs_it_does_not_wait_for_its_timeout(
    tmp_path: Path, says: Callable[[str], None]
) -> None:
    run = Run(tmp_path / "run", *ENDLESS, "trainer.hang_timeout=auto", grace_s=30)
    launcher, _, second = run.await_records(20)
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
    run = Run(tmp_path / "run", *SETTINGS, "+data.how=sleep", setting, once, limit, "trainer.max_steps=20")
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
