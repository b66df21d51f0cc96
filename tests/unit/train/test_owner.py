"""One owner of a run directory: real processes that hold, lose and take it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event, Thread

import pytest

from distaccum.errors import ConfigError
from distaccum.train import owner
from distaccum.train.owner import STALE_S, Holder, Machine, Owner, OwnershipLostError, refuse_if_held
from distaccum.train.run_dir import RunDir, State
from tests.support.commands import environment
from tests.support.forked import ROOT

HOLDS = """
import sys, time
from pathlib import Path
from distaccum.errors import ConfigError
from distaccum.train.owner import Owner
time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
try:
    with Owner(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(60)
except ConfigError:
    print("refused", flush=True)
"""
ELSEWHERE = Machine(host="node-7", boot="another", namespace="")


def _start(folder: Path, at: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDS, str(folder), str(at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(PYTHONPATH=str(ROOT)))


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def _held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = _start(folder)
    try:
        assert _said(process) == "held"
        yield process
    finally:
        process.kill()
        process.communicate()


def _write(folder: Path, *, age: float, **changes: object) -> Holder:
    holder = replace(Holder.here(), **changes)  # type: ignore[arg-type]
    path = folder / "owner.json"
    path.write_text(json.dumps(asdict(holder)))
    os.utime(path, (time.time() - age, time.time() - age))
    return holder


def test_a_second_run_is_refused_by_the_name_of_the_first_until_that_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = RunDir(tmp_path)
    with _held(tmp_path) as first:
        os.kill(first.pid, signal.SIGSTOP)  # alive, though it gives no sign
        for take in (lambda: run_dir.own().__enter__(), lambda: refuse_if_held(tmp_path)):
            with pytest.raises(ConfigError, match=rf"another run's \(process {first.pid} on .*, since 20.*\)\. Wait"):
                take()
        run_dir.write_refusal("nothing of the second")
        run_dir.write_failure("nothing of the second")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["owner.json"]
        first.kill()
        first.wait()
        with run_dir.own():
            assert f"process {first.pid} on" in caplog.text
            assert "is gone: taken over" in caplog.text
            run_dir.write_status(State.RUNNING, step=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["status.json"]


@pytest.mark.slow
def test_of_many_that_come_at_once_one_gets_it(tmp_path: Path) -> None:
    _write(tmp_path, age=0, pid=2**22 + 1)  # of a dead process, so that all of them take over
    at = time.time() + 3
    started = [_start(tmp_path, at) for _ in range(12)]
    try:
        assert sorted(map(_said, started)) == ["held", *["refused"] * 11]
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.fault("the folder of a run whose machine is lost")
def test_on_another_machine_the_last_sign_of_life_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, says: Callable[[str], None]
) -> None:
    _write(tmp_path, age=5, machine=ELSEWHERE)
    with pytest.raises(ConfigError, match="on node-7"), Owner(tmp_path):
        pass
    _write(tmp_path, age=STALE_S + 60, machine=ELSEWHERE)
    with Owner(tmp_path):
        pass
    says(caplog.text)
    assert not (tmp_path / "owner.json").exists()
    monkeypatch.setattr(owner, "BEAT_S", 0.1)
    _write(tmp_path, age=STALE_S - 0.3, machine=ELSEWHERE)  # waited for
    with Owner(tmp_path):
        pass
    _write(tmp_path, age=STALE_S - 60, machine=ELSEWHERE)
    alive = Thread(target=lambda: (time.sleep(0.3), os.utime(tmp_path / "owner.json")))
    alive.start()
    with pytest.raises(ConfigError, match="on node-7"), Owner(tmp_path):
        pass
    alive.join()


@pytest.mark.fault("a job that Slurm starts again on another machine, or torchrun, and then")
def test_a_job_that_is_started_again_takes_its_folder_from_another_machine_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, says: Callable[[str], None]
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    attempts: tuple[tuple[dict[str, str], dict[str, str], bool], ...] = (
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, False),  # two steps of one job
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none"}, False),
    )
    for before, now, taken in attempts:
        then = Holder.here(before)
        _write(tmp_path, age=5, machine=ELSEWHERE, job=then.job, attempt=then.attempt)
        with monkeypatch.context() as changed:
            for name, value in now.items():
                changed.setenv(name, value)
            if taken:
                with Owner(tmp_path):
                    pass
                says(caplog.text)
                caplog.clear()
            else:
                with pytest.raises(ConfigError, match="on node-7"), Owner(tmp_path):
                    pass
    # A rendezvous id is no proof: a job on another machine may have the same one.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(owner, "BEAT_S", 0.5)
    _write(tmp_path, age=0, machine=ELSEWHERE, job="torchrun a")
    ended = Event()
    lives = Thread(target=lambda: [os.utime(tmp_path / "owner.json") for _ in iter(lambda: ended.wait(0.05), True)])
    lives.start()
    with pytest.raises(ConfigError, match=r"is another run's .*on node-7"), Owner(tmp_path):
        pass
    ended.set()
    lives.join()
    with Owner(tmp_path):
        pass
    says(caplog.text)


@pytest.mark.fault("a process that slept while its folder was taken over")
def test_who_has_lost_the_folder_writes_nothing_more_there(tmp_path: Path, says: Callable[[str], None]) -> None:
    run_dir = RunDir(tmp_path)
    with run_dir.own():
        run_dir.write_status(State.RUNNING, step=3)
        _write(tmp_path, age=0, machine=ELSEWHERE, token="another")  # noqa: S106  no password
        run_dir.write_failure("not written")
        with pytest.raises(OwnershipLostError, match=r"taken over by process .* on node-7") as caught:
            run_dir.write_status(State.RUNNING, step=4)
        says(str(caught.value))
    assert run_dir.status() == {"state": "running", "step": 3, "reason": ""}
    assert (tmp_path / "owner.json").exists()


def test_the_owner_gives_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 0.05)
    with Owner(tmp_path):
        path = tmp_path / "owner.json"
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime < time.time() - 10:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_lock_without_content_is_a_dead_ones_after_a_while(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    path.touch()
    with pytest.raises(ConfigError, match="whose name cannot be read"), Owner(tmp_path):
        pass
    os.utime(path, (0, 0))
    with Owner(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
