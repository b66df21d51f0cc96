"""Memory that is over, loading processes that die, and a user's own collective, on one of two ranks."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import GOES_WRONG, ROOT, run, status

pytestmark = pytest.mark.slow
SETTINGS = (*GOES_WRONG, "trainer.eval_every=0", "trainer.max_steps=60", "checkpoint.every=2")
ON_A_SCREEN = 25
SOON_S = 45  # with the imports; a rank that waited for the others' collectives would take 30 minutes


def _fail(folder: Path, *more: str, **extra: str) -> subprocess.CompletedProcess[str]:
    began = time.monotonic()
    finished = run(*SETTINGS, *more, f"hydra.run.dir={folder}", world=2, timeout=100, PYTHONPATH=str(ROOT), **extra)
    assert time.monotonic() - began < SOON_S
    assert finished.returncode != 0, finished.stderr
    assert status(folder)["state"] == "failed"
    assert len(finished.stderr.splitlines()) <= ON_A_SCREEN
    return finished


@pytest.mark.fault("out of memory on one rank, of the host or of a GPU, in a single sample")
@pytest.mark.parametrize(
    ("how", "hang_timeout"),
    [
        ("host", "auto"),
        ("device", "null"),
        pytest.param("host", "null", marks=pytest.mark.heavy),
        pytest.param("device", "auto", marks=pytest.mark.heavy),
    ],
)
def test_memory_that_is_over_names_the_micro_batch_and_the_remedy(
    tmp_path: Path, how: str, hang_timeout: str, says: Callable[[str], None]
) -> None:
    said = {"host": "can't allocate memory: you tried to allocate", "device": "CUDA out of memory."}[how]
    model = ("~model", "+model._target_=tests.support.hungry.Hungry", "+data.how=none", "trainer.verify=never")
    finished = _fail(tmp_path, *model, f"trainer.hang_timeout={hang_timeout}", HOW=how)
    for told in (finished.stderr, status(tmp_path)["reason"]):
        says(told)
        assert said in told
    assert "Traceback" not in finished.stderr


@pytest.mark.fault("out of memory while samples are loaded")
def test_memory_that_is_over_in_a_dataset(tmp_path: Path, says: Callable[[str], None]) -> None:
    says(_fail(tmp_path, "model=cnn", "+data.how=memory").stderr)
    says(status(tmp_path)["reason"])


@pytest.mark.fault("kill -9 of a loading process")
@pytest.mark.parametrize("at", [7, *(pytest.param(at, marks=pytest.mark.heavy) for at in (3, 20))])
def test_a_loading_process_that_is_killed(tmp_path: Path, at: int, says: Callable[[str], None]) -> None:
    says(_fail(tmp_path, "model=cnn", "+data.how=9", f"+data.at={at}", "trainer.num_workers=1").stderr)
    says(status(tmp_path)["reason"])


@pytest.mark.fault("shared memory is over in a loading process")
def test_a_loading_process_whose_shared_memory_is_over(tmp_path: Path, says: Callable[[str], None]) -> None:
    says(_fail(tmp_path, "model=cnn", "+data.how=7", "trainer.num_workers=1").stderr)
    says(status(tmp_path)["reason"])


@pytest.mark.fault("a collective of the user's own, which one rank alone calls")
@pytest.mark.parametrize(
    ("numbers", "rank"), [(1, 0), *(pytest.param(*one, marks=pytest.mark.heavy) for one in ((3, 1), (100_000, 0)))]
)
def test_a_collective_that_one_rank_alone_calls(
    tmp_path: Path, numbers: int, rank: int, says: Callable[[str], None]
) -> None:
    """gloo aborts the process that receives more than it expects."""
    alone = {"_target_": "tests.support.faulty_datasets.Alone", "rank": rank, "numbers": numbers}
    callback = [f"+callbacks.alone.{key}={value}" for key, value in alone.items()]
    finished = _fail(tmp_path, "model=cnn", "+data.how=none", *callback)
    says(status(tmp_path)["reason"])
    assert "call both on every rank, in the same order" in finished.stderr
