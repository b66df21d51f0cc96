"""One rank stops, or is told to leave, in each phase of a run, from the imports to a save."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distaccum.distributed.watchdog import DIED, trouble_of
from tests.support.commands import ROOT, environment, family, metrics, run, status, succeed, until
from tests.support.phases import PHASES, SETTINGS

pytestmark = pytest.mark.slow
WATCHED = ("trainer.hang_timeout=1s", "trainer.group_timeout=20s")
WORDS = {
    "loading": "loading data of window 5",
    "forward": "a forward of window 5",
    "backward": "a backward of window 5",
    "reduction": "the gradient's reduction of window 5",
    "evaluation": "an evaluation after window 6",
    "save": "a save after window 4",
}
IN_CI = ("backward",)  # a test of hangs has loading, by a launcher
EXACT = ("step", "window", "epoch", "loss", "grad_norm", "lr", "samples", "eval_loss", "eval_accuracy")


def _run(folder: Path, *more: str, phase: str, does: object, who: int = 1) -> str:
    """What a run says that fails; no rank is left, or the call would not end in time."""
    finished = run(
        *SETTINGS,
        *more,
        f"hydra.run.dir={folder}",
        world=2,
        timeout=50,
        grace=1,
        PYTHONPATH=str(ROOT),
        PHASE=phase,
        DOES=str(does),
        WHO=str(who),
    )
    assert finished.returncode == 1
    found = status(folder)
    assert found["state"] == "failed"
    return f"{finished.stderr}\n{found['reason']}"


def _exact(folder: Path) -> list[list[object]]:
    return [[record.get(key) for key in EXACT] for record in metrics(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[list[object]]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    succeed(*SETTINGS, f"hydra.run.dir={folder}", world=2, PYTHONPATH=str(ROOT))
    return _exact(folder)


@pytest.mark.fault("a rank is stopped (SIGSTOP) while it loads, in a forward, a backward, the")
@pytest.mark.parametrize(
    "phase", [word if word in IN_CI else pytest.param(word, marks=pytest.mark.heavy) for word in WORDS]
)
def test_a_rank_that_stops_is_named_with_its_phase(tmp_path: Path, phase: str, says: Callable[[str], None]) -> None:
    said = _run(tmp_path, *WATCHED, phase=phase, does=signal.SIGSTOP.value)
    says(said)
    assert f"it was last seen in {WORDS[phase]}" in said
    assert "Thread 0x" in (tmp_path / "hang" / "rank-0.txt").read_text()


@pytest.mark.fault("rank 0 is stopped, which writes the status")
def test_rank_0_that_stops_is_named_by_another(tmp_path: Path, says: Callable[[str], None]) -> None:
    says(_run(tmp_path, *WATCHED, phase="loading", does=signal.SIGSTOP.value, who=0))


@pytest.mark.fault("a read that does not return (a dead mount, a FIFO) while a rank loads data")
def test_a_read_that_does_not_return_is_named_with_its_line(tmp_path: Path, says: Callable[[str], None]) -> None:
    os.mkfifo(tmp_path / "fifo")
    says(_run(tmp_path / "run", *WATCHED, phase="loading", does=tmp_path / "fifo"))
    stacks = {file.name: file.read_text() for file in (tmp_path / "run" / "hang").glob("*.txt")}
    assert set(stacks) == {"rank-0.txt", "rank-1.txt"}
    assert "all_reduce_host" in stacks["rank-0.txt"]
    assert "in happens" in stacks["rank-1.txt"]


@pytest.mark.fault("a rank stops, or a read does not return, while it builds model and data")
@pytest.mark.parametrize(
    ("how", "who"),
    [pytest.param("stop", 0, marks=pytest.mark.heavy), pytest.param("stop", 1, marks=pytest.mark.heavy), ("read", 1)],
)
def test_a_rank_that_does_not_get_to_training_is_named(
    tmp_path: Path, how: str, who: int, says: Callable[[str], None]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    does = signal.SIGSTOP.value if how == "stop" else tmp_path / "fifo"
    limit = ("trainer.hang_timeout=0.3s", "trainer.group_timeout=20s")
    said = _run(tmp_path / "run", *limit, phase="startup", does=does, who=who)
    says(said)
    assert f"rank {who} (process " in said
    if how == "stop":
        assert "which is stopped (SIGSTOP, or Ctrl-Z)) is not ready" in said
    else:
        assert "building model and data takes more than 3 s; this rank's stacks are in" in said
        assert "in happens" in (tmp_path / "run" / "hang" / "rank-1.txt").read_text()


@pytest.mark.fault("SIGTERM or Ctrl-C of `launch/train.sh` while it checks, while ranks import, and after")
@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after", [0.5, 3.0, 5.0, 6.0, 7.0, 8.0, 9.0, 12.0])
def test_told_to_leave_while_it_starts_nothing_is_left(tmp_path: Path, after: float, number: signal.Signals) -> None:
    arguments = [*SETTINGS, "trainer.max_steps=100000", "trainer.eval_every=0", f"hydra.run.dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch" / "local.py"), *arguments],
        env=environment(NPROC="2", PYTHONPATH=str(ROOT)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  no threads here
        start_new_session=True,
    )
    time.sleep(after)
    pids = family(process.pid)
    os.kill(process.pid, number)
    _, told = process.communicate(timeout=45)
    until(lambda: all(trouble_of(pid) == DIED for pid in pids), 10)
    assert len(told.splitlines()) <= 5
    assert "Traceback" not in told
    if (tmp_path / "run" / "status.json").exists():
        assert (status(tmp_path / "run")["state"], process.returncode) == ("preempted", 0)
    else:
        assert process.returncode in (-number, 128 + number)


@pytest.mark.fault("SIGTERM or SIGUSR1 to one rank alone, once or twice, at any moment in any")
def test_one_rank_that_is_told_to_leave_takes_all_with_it(
    tmp_path: Path, whole: list[list[object]], says: Callable[[str], None]
) -> None:
    folder = f"hydra.run.dir={tmp_path}"
    step = 0
    for i, phase in enumerate(PHASES):
        number = signal.SIGUSR1 if i % 2 else signal.SIGTERM
        finished = succeed(
            *SETTINGS,
            folder,
            world=2,
            timeout=60,
            PYTHONPATH=str(ROOT),
            PHASE=phase,
            DOES=f"{number.value},{signal.SIGTERM.value}",  # a second signal changes nothing
            WHO=str(i // 2 % 2),
            AT=str(step + 1),
        )
        says(finished.stdout)
        found = status(tmp_path)
        assert (found["state"], found["reason"]) == ("preempted", number.name), phase
        assert step <= found["step"] <= step + 5
        step = found["step"]
        assert (tmp_path / "checkpoints" / f"step-{step}").is_dir() == (step > 0)
        assert not step or _exact(tmp_path) == whole[:step]
    succeed(*SETTINGS, folder, world=2, PYTHONPATH=str(ROOT))
    assert _exact(tmp_path) == whole
