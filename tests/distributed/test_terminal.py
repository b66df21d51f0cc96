"""A real terminal: what a run shows on it, and what it does to a run, as Ctrl-C once and twice, and being closed."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distaccum.distributed.watchdog import DIED, trouble_of
from tests.distributed.workers.screen import WORDS
from tests.support.commands import ROOT, TINY, TRAIN, command, environment, family, logged, metrics, status, until
from tests.support.terminal import Tmux

pytestmark = pytest.mark.slow
SETTINGS = (
    *TINY,
    "trainer.max_steps=1000000",
    "trainer.log_every=1",
    "trainer.eval_every=0",
    "trainer.num_workers=1",
    "checkpoint.every=100000",
    "metrics=jsonl",
    "metrics.console=false",  # a bar would be drawn anew at each record
    "resume=auto",
)
CTRL_C = b"\x03"
START = {
    "one process": command(1, TRAIN, []),
    "launch/train.sh": [sys.executable, str(ROOT / "launch" / "local.py")],  # what it becomes, once it has made .venv
    "torchrun": command(2, TRAIN, []),
}


class Terminal:
    """A run that has a terminal of its own, and what it wrote there."""

    def __init__(self, run_dir: Path, start: list[str]) -> None:
        self.run_dir, self._said = run_dir, b""
        arguments = [*start, *SETTINGS, f"hydra.run.dir={run_dir}"]
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(arguments[0], arguments, environment(NPROC="2", PYTHONPATH=str(ROOT)))  # noqa: S606

        def begins() -> bool:
            self.read()
            return logged(run_dir) >= 3

        until(begins, told=self.read)
        self._family = set(family(self.pid))
        self._said = b""

    def read(self) -> bytes:
        while select.select([self._terminal], [], [], 0.05)[0]:
            try:
                self._said += os.read(self._terminal, 1 << 16)
            except OSError:
                break
        return self._said

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def close(self) -> None:
        os.close(self._terminal)
        self._terminal = -1

    def end(self, within_s: float) -> int:
        """The exit code; fails if it takes longer, or if a process is left."""
        deadline, ended = time.monotonic() + within_s, 0
        try:
            while not ended:
                assert time.monotonic() < deadline, self._said.decode()
                if self._terminal >= 0:
                    self.read()
                ended, state = os.waitpid(self.pid, os.WNOHANG)
                time.sleep(0.02)
            until(lambda: all(trouble_of(pid) == DIED for pid in self._family), 10)
        finally:
            for pid in self._family:
                if trouble_of(pid) != DIED:
                    os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(state)

    def lines(self) -> list[str]:
        """What it wrote beside the records and the terminal's echo; a wrapped line, whose rest is indented, is one."""
        said = self._said.decode().replace("^C", "").replace("\r\n  ", " ").splitlines()
        return [line for line in said if line.strip() and not line.startswith("step ")]


def _is_saved(run_dir: Path, by: str) -> None:
    found = status(run_dir)
    assert (found["state"], found["reason"]) == ("preempted", by)
    assert (run_dir / "checkpoints" / f"step-{found['step']}").is_dir()


@pytest.mark.fault("Ctrl-C")
@pytest.mark.parametrize("start", ["one process", pytest.param("launch/train.sh", marks=pytest.mark.heavy), "torchrun"])
def test_ctrl_c_saves_and_says_in_one_line_how_to_go_on(
    tmp_path: Path, start: str, says: Callable[[str], None]
) -> None:
    run = Terminal(tmp_path / "run", START[start])
    run.type(CTRL_C)
    exit_code = run.end(within_s=40)
    _is_saved(run.run_dir, "SIGINT")
    saved = [line for line in run.lines() if "the same command with resume=auto resumes it" in line]
    assert len(saved) == 1
    says("".join(run.lines()))
    if start == "torchrun":  # its agent ends with a traceback of its own, whatever its workers do
        assert "KeyboardInterrupt" not in "".join(run.lines())
        return
    others = [line for line in run.lines() if line not in saved]
    assert len(others) <= 1, others
    assert all(line.startswith("distaccum: told to leave (SIGINT)") for line in others)
    assert exit_code == 0


@pytest.mark.fault("a second Ctrl-C, as while the window never ends")
@pytest.mark.parametrize("start", ["one process", pytest.param("launch/train.sh", marks=pytest.mark.heavy)])
def test_a_second_ctrl_c_ends_a_run_that_cannot_save(tmp_path: Path, start: str, says: Callable[[str], None]) -> None:
    run = Terminal(tmp_path / "run", START[start])
    loaders = [pid for pid in family(run.pid) if "pt_data_worker" in Path(f"/proc/{pid}/comm").read_text()]
    os.kill(loaders[-1], signal.SIGSTOP)  # so that the window never ends
    time.sleep(1)
    run.type(CTRL_C)
    time.sleep(2)
    run.type(CTRL_C)
    assert run.end(within_s=10) == 130
    found = status(run.run_dir)
    assert found["state"] == "failed"
    assert "ended at once by a second Ctrl-C (SIGINT), without a save" in found["reason"]
    (patience, end) = run.lines()
    assert patience.startswith("distaccum: told to leave (SIGINT)")
    says(end)


@pytest.mark.fault("the terminal closes (SIGHUP)")
@pytest.mark.parametrize(
    "start", ["one process", *(pytest.param(name, marks=pytest.mark.heavy) for name in list(START)[1:])]
)
def test_a_terminal_that_is_closed_lets_the_run_save(tmp_path: Path, start: str) -> None:
    run = Terminal(tmp_path / "run", START[start])
    run.close()
    run.end(within_s=40)
    _is_saved(run.run_dir, "SIGHUP")


@pytest.mark.fault("the terminal closes (SIGHUP)")
@pytest.mark.heavy
@pytest.mark.parametrize("start", ["one process", "launch/train.sh"])
def test_under_nohup_the_run_goes_on(tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # nohup.out
    run = Terminal(tmp_path / "run", ["nohup", *START[start]])
    run.close()
    time.sleep(2)
    before = len(metrics(run.run_dir))
    time.sleep(2)
    assert len(metrics(run.run_dir)) > before
    assert status(run.run_dir)["state"] == "running"
    os.kill(run.pid, signal.SIGTERM)
    assert run.end(within_s=40) == 0
    _is_saved(run.run_dir, "SIGTERM")


@pytest.mark.fault("the disk of what a run prints (`> train.log`) is full")
def test_a_full_disk_of_what_is_printed_ends_no_run(tmp_path: Path, says: Callable[[str], None]) -> None:
    short = (*TINY, "trainer.max_steps=3", "trainer.log_every=1", "trainer.eval_every=0", "metrics=jsonl")
    given = command(1, TRAIN, [*short, f"hydra.run.dir={tmp_path}"])
    with Path("/dev/full").open("w") as full:
        finished = subprocess.run(
            given, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=90, env=environment()
        )
    assert finished.returncode == 0, finished.stderr
    (line,) = finished.stderr.splitlines()
    says(line)
    assert status(tmp_path)["state"] == "done"
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2, 3]


LIVE = re.compile(r"step \d+/1,000,000(  |$)")


@pytest.mark.parametrize(("columns", "ranks"), [(80, 2), pytest.param(120, 1, marks=pytest.mark.heavy)])
def test_what_happens_stays_in_the_scrollback_and_one_row_lives(tmp_path: Path, columns: int, ranks: int) -> None:
    start = command(ranks, ROOT / "tests" / "distributed" / "workers" / "screen.py", [tmp_path])
    run = Tmux(tmp_path, columns, start, environment(PYTHONPATH=str(ROOT), TERM="screen"))
    try:
        run.wait_for((tmp_path / "waits-6").exists)
        time.sleep(0.6)  # two drawings
        (live,) = [row for row in run.rows if LIVE.match(row)]
        assert run.rows[-1] == live
        assert len(live) < columns
        assert "loss" in live.split()
        for narrow in (columns // 2, columns // 3, columns):
            run.resize(narrow)
            time.sleep(0.6)
            assert [row for row in run.lines if LIVE.match(row)] == run.lines[-1:]
        assert run.shows_cursor
        (tmp_path / "go-6").touch()

        run.wait_for((tmp_path / "waits-24").exists)
        run.press("C-c")
        (tmp_path / "go-24").touch()
        run.wait_for(lambda: "ENDED" in run.lines[-1])
        said = run.lines
        assert not [line for line in said if LIVE.match(line)]
        assert run.shows_cursor
        records = metrics(tmp_path / "run")
        for record in records:
            text = f"loss {record['loss']:.4f}  grad norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}"
            assert len([line for line in said if line.startswith(f"step {record['step']:>6}/1000000  {text}")]) == 1
            if "eval_loss" in record:
                assert f"step {record['step']:>6}/1000000  held-out:  loss {record['eval_loss']:.4f}  samples 4" in said
        skipped = [record for record in records if not record["applied"]]
        assert skipped
        joined = " ".join(line.strip() for line in said)
        assert joined.count("SKIPPED: the gradient is NaN or infinite") == len(skipped)
        for step in (4, 8, 20):
            assert f"step {step:>6}/1000000  saved: {tmp_path}/run/checkpoints/step-{step} " in joined
        for rank in range(ranks):
            assert f"rank {rank} prints {WORDS}" in said
            assert [line for line in said if line.endswith(f"UserWarning: rank {rank} warns")]
            assert f"rank {rank} logs" in said
            assert f"rank {rank} counts 3/3" in said
            log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
            assert log.count(f" WARNING users.own: rank {rank} logs\n") == 1
            assert log.count(f"UserWarning: rank {rank} warns\n") == 1
        assert "preempted (SIGINT): 24 of 1000000 steps; saved in" in joined
        own = [row for row in run.rows if row.startswith(("step ", "  ", "run ", "epoch ", "preempted"))]
        assert all(len(row) <= columns for row in own if str(tmp_path) not in row)
    finally:
        run.kill()
