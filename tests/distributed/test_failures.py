"""Failures that are not the configuration's: the status names the first cause, and the exit code is 1."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import NO_TEXT, ROOT, run, status

WAITING_DESTROY = ROOT / "tests" / "distributed" / "workers" / "waiting_destroy.py"
SETTINGS = (
    "model=cnn",
    *NO_TEXT,
    "batch.global_size=4",
    "batch.micro_size=1",
    "trainer.max_steps=40",
    "trainer.log_every=1",
    "metrics=jsonl",
    "checkpoint.every=2",
)


@pytest.mark.fault("an exception on one rank")
@pytest.mark.parametrize(
    "attempt",
    [pytest.param(0, marks=pytest.mark.slow), *(pytest.param(number, marks=pytest.mark.heavy) for number in (1, 2))],
)
def test_the_rank_that_failed_first_is_named(tmp_path: Path, attempt: int, says: Callable[[str], None]) -> None:
    finished = run(
        *SETTINGS,
        "data._target_=tests.support.faulty_datasets.FailsOnRankOne",
        f"seed={attempt}",
        f"hydra.run.dir={tmp_path}",
        world=2,
        torchrun=True,
        PYTHONPATH=str(ROOT),
        timeout=60,
    )
    assert finished.returncode == 1
    found = status(tmp_path)
    assert (found["state"], found["reason"]) == ("failed", "rank 1: OSError: the disk of rank 1 is gone")
    # torchrun prints a traceback of its own, and a report: its cause is the true one, whichever rank it takes for it.
    assert finished.stderr.count("Traceback (most recent call last)") == 1
    causes = re.findall(r"traceback : (.*)", finished.stderr)
    assert causes
    assert set(causes) == {f"rank 1: OSError: the disk of rank 1 is gone; more in {tmp_path}/logs"}
    assert len([line for line in finished.stderr.splitlines() if line.startswith("distaccum:")]) == 5
    says(finished.stderr)


def test_a_loop_of_ones_own_that_fails_on_one_rank_ends_on_all(tmp_path: Path) -> None:
    finished = run("loop", world=2, script=WAITING_DESTROY, cwd=tmp_path, PYTHONPATH=str(ROOT), timeout=30)
    assert finished.returncode == 1
    assert "OSError: the disk of rank 1 is gone" in finished.stderr


@pytest.mark.parametrize(
    ("target", "said"), [("HasNoLength", "the index cannot be read"), ("leaves", "the token is missing")]
)
def test_trouble_before_the_first_window_is_reported_too(tmp_path: Path, target: str, said: str) -> None:
    finished = run(
        *SETTINGS,
        f"data._target_=tests.support.faulty_datasets.{target}",
        f"hydra.run.dir={tmp_path}",
        PYTHONPATH=str(ROOT),
    )
    assert finished.returncode == 1
    assert said in finished.stderr
    assert status(tmp_path)["state"] == "failed"
    assert said in status(tmp_path)["reason"]


def test_hydras_own_switch_for_tracebacks_hides_nothing(tmp_path: Path) -> None:
    finished = run("optim.lrr=1", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert finished.returncode == 2
    assert "optim.lrr=1: no such setting" in finished.stderr


@pytest.mark.slow
@pytest.mark.fault("a Slurm job that fails at one step each time that it is requeued")
def test_a_job_that_is_requeued_again_and_again(tmp_path: Path, says: Callable[[str], None]) -> None:
    data = ("data._target_=tests.support.faulty_datasets.GoesWrong", "+data.how=memory", "+data.rank=0")
    arguments = [*SETTINGS, *data, "resume=auto", f"hydra.run.dir={tmp_path}"]
    codes = []
    for requeues in range(5):
        finished = run(*arguments, PYTHONPATH=str(ROOT), SLURM_JOB_ID="4711", SLURM_RESTART_COUNT=str(requeues))
        codes.append(finished.returncode)
    assert codes == [1, 1, 1, 2, 2]
    says(finished.stderr)
    assert status(tmp_path)["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp2", "deepspeed"])
@pytest.mark.fault("an exception of one rank between two windows, as in a callback, on any engine")
def test_an_error_of_one_rank_between_two_windows(tmp_path: Path, engine: str, says: Callable[[str], None]) -> None:
    """zero1 gathered its optimizer's state on the way out, which the other rank's count answered."""
    finished = run(
        "trainer",
        *SETTINGS,
        "data._target_=tests.support.faulty_datasets.GoesWrong",
        "+data.how=none",
        "+callbacks.raises={_target_: tests.support.faulty_datasets.Raises}",
        f"engine={engine}",
        "trainer.hang_timeout=20s",
        f"hydra.run.dir={tmp_path}",
        world=2,
        script=WAITING_DESTROY,
        PYTHONPATH=str(ROOT),
    )
    assert finished.returncode == 1
    assert status(tmp_path)["reason"] == "rank 0: OSError: the file of rank 0 is gone", finished.stderr
    says(finished.stderr)
    assert not (tmp_path / "hang").exists()
