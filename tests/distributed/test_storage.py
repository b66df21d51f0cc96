"""Storage that fails under a run: an operation of the file system, one after the other, gets an error or kills."""

import errno
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distaccum.checkpoint.store import CheckpointStore
from tests.support import failing_io
from tests.support.commands import IMAGES, ROOT, TRAIN, captured, environment, in_memory, metrics, run, status, succeed
from tests.support.failing_io import ALWAYS
from tests.support.forked import Forks

WORKER = Path(__file__).parent / "workers" / "storage.py"
ON_A_SCREEN = 25
KEPT = ("records", "newest", "weights")
BACKGROUND = {"BACKGROUND": "1"}
Cells = Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return failing_io.build(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Servers of their own, which have the library."""
    made = Forks()
    yield made
    made.close()


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Cells:
    """What the worker found: in the undisturbed run, and in each cell."""

    def run(what: str, *, error: int = 0, times: int = 1, stride: int, **more: str) -> Any:
        folder = tmp_path_factory.mktemp(what)
        finished = captured(
            [sys.executable, str(WORKER), what, str(folder), str(error), str(times), str(stride)],
            timeout=280 if stride > 1 else 3000,
            PYTHONPATH=str(ROOT),
            LD_PRELOAD=str(library),
            **more,
        )
        assert finished.returncode == 0, finished.stderr
        whole, *rest = map(json.loads, finished.stdout.splitlines())
        return whole, rest

    return run


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in KEPT}


def _is_there(cell: dict[str, Any]) -> bool:
    """Whether the checkpoints of before are, or newer ones by which the oldest was replaced."""
    return set(cell["checkpoints"]) >= {"step-1", "step-2"} or set(cell["checkpoints"]) >= {"step-2", "step-3"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("number", "stride"),
    [
        (errno.EIO, 29),
        pytest.param(errno.ESTALE, 29, marks=pytest.mark.heavy),
        pytest.param(errno.EIO, 1, marks=pytest.mark.heavy),
    ],
)
@pytest.mark.fault("one error of the file system (EIO, ESTALE) at any read of a run that resumes, logs and saves")
def test_one_error_at_any_read_costs_nothing(cells: Cells, number: int, stride: int) -> None:
    """One at the log's or the lock's reads ended the run; one at a tensor's was told as another model's file."""
    whole, found = cells("resume", error=number, stride=stride)
    assert len(found) >= 200 // stride
    for cell in found:
        assert cell["said"] == "", cell
        assert _kept(cell) == _kept(whole), cell


@pytest.mark.heavy
@pytest.mark.fault("errors of the file system at every read from some moment on")
def test_errors_that_stay_end_the_run_and_lose_nothing(cells: Cells, says: Callable[[str], None]) -> None:
    whole, found = cells("resume", error=errno.EIO, times=ALWAYS, stride=17)
    failed = [cell for cell in found if cell["said"]]
    assert len(failed) >= 10
    for cell in found:
        if cell["said"]:
            says(cell["said"])
        else:  # they came when all was done but looking at older checkpoints
            assert cell["status"]["state"] == "done"
            assert _kept(cell) == _kept(whole), cell
        assert _is_there(cell), cell
        assert cell["newest"] in ("step-2", "step-3"), cell
        assert _kept(cell["after"]) == _kept(whole), cell


@pytest.mark.heavy
@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.heavy)])
@pytest.mark.fault("a full disk at any write: a checkpoint's files, its seal, `latest`, the history")
def test_a_full_disk_at_any_write_loses_nothing(cells: Cells, stride: int, says: Callable[[str], None]) -> None:
    """Tensors' files gave an error without a name, and so did what is synced."""
    whole, found = cells("save", error=errno.ENOSPC, stride=stride)
    failed = [cell for cell in found if cell["said"]]
    assert len(failed) >= 60 // stride
    for cell in failed:
        if not cell["said"].startswith("ConfigError: hydra.run.dir="):
            says(cell["said"])
            assert cell["status"]["state"] == "failed", cell
            assert "No space left on device: '" in cell["status"]["reason"], cell
            assert cell["status"]["reason"].endswith("Make room there, and go on"), cell
        assert _is_there(cell), cell
        assert cell["newest"] in ("step-2", "step-3"), cell
    for cell in found:
        assert _kept(cell["after"]) == _kept(whole), cell


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stride", "background"),
    [(19, {}), *(pytest.param(*one, marks=pytest.mark.heavy) for one in ((1, {}), (29, BACKGROUND), (1, BACKGROUND)))],
)
@pytest.mark.fault("kill -9 at any write of a save, in the background")
def test_a_death_at_any_write_loses_nothing(cells: Cells, stride: int, background: dict[str, str]) -> None:
    whole, found = cells("kill", stride=stride, **background)
    assert len(found) >= 60 // stride
    assert {cell["between"]["newest"] for cell in found} == {"step-2", "step-3"}
    for cell in found:
        assert cell["ended"] == 0, cell
        assert _kept(cell) == _kept(whole), cell
        assert not [name for name in cell["checkpoints"] if name.startswith(".")], cell


SETTINGS = (
    *IMAGES,
    "+callbacks.fails._target_=tests.support.failing_io.FailsToWrite",
    "batch.global_size=4",
    "batch.micro_size=1",
    "trainer.max_steps=9",
    "trainer.log_every=1",
    "trainer.eval_every=0",
    "metrics=jsonl",
    "checkpoint.every=2",
    "checkpoint.background=false",  # in which a failure ends the run at once
    "resume=auto",
)


def _run(forks: Forks, library: Path, *more: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """On two ranks, whose file system is the library's."""
    variables = environment(PYTHONPATH=str(ROOT), LD_PRELOAD=str(library), **extra)
    arguments = [str(TRAIN), *SETTINGS, *more]
    return forks.run(arguments, world=2, warm="distaccum", cwd=None, environment=variables, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [("1", ".saving-step-4", "step-2", "random-1.json"), ("0", "/.latest.", "step-4", "latest")],
    ids=["a rank", "latest"],
)
@pytest.mark.fault("a disk that is full for one rank, or for the file `latest` alone")
def test_a_disk_that_is_full_for_one(
    tmp_path: Path, library: Path, forks: Forks, case: tuple[str, ...], says: Callable[[str], None]
) -> None:
    who, where, kept, file = case
    run = partial(_run, forks, library, f"hydra.run.dir={tmp_path}")

    finished = run(WHO=who, WHERE=where)
    assert finished.returncode == 1
    assert status(tmp_path)["state"] == "failed"
    says(status(tmp_path)["reason"])
    assert status(tmp_path)["reason"].startswith(f"rank {who}: ")
    assert file in status(tmp_path)["reason"]
    assert len(finished.stderr.splitlines()) <= ON_A_SCREEN
    newest = CheckpointStore(tmp_path / "checkpoints", keep=0).newest_valid()
    assert newest is not None
    assert newest.name == kept
    resumed = run()
    assert resumed.returncode == 0, resumed.stderr
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 10))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "case",
    [
        ("ddp", "0", ".saving-step-4/", "step-9"),
        ("zero1", "1", ".saving-step-", "step-2"),
        ("fsdp2", "1", ".saving-step-6/", "step-9"),
    ],
    ids=lambda case: case[0],
)
def test_a_disk_that_is_full_for_a_rank_that_saves_in_the_background(
    tmp_path: Path, library: Path, forks: Forks, case: tuple[str, ...]
) -> None:
    """One save that fails is told and the run goes on; two in a row end it on all ranks, with that rank's reason."""
    engine, who, where, newest = case
    run = partial(_run, forks, library, f"hydra.run.dir={tmp_path}", f"engine={engine}", "checkpoint.background=true")

    # Just before the save of step 4 begins: that of step 2, in the background, has written all by then.
    finished, ends = run(WHO=who, WHERE=where, SINCE="4"), newest == "step-2"
    told = [line for line in finished.stderr.splitlines() if "could not be saved" in line]
    assert len(told) == 1 + ends, finished.stderr
    assert all(
        f"could not be saved: rank {who}: OSError: [Errno 28] No space left on device: '" in line for line in told
    )
    assert finished.returncode == ends
    assert status(tmp_path)["state"] == ("failed" if ends else "done")
    if ends:
        assert status(tmp_path)["reason"].startswith(f"rank {who}: OSError: [Errno 28] No space left on device: '")
    found = CheckpointStore(tmp_path / "checkpoints", keep=0).newest_valid()
    assert found is not None
    assert found.name == newest
    resumed = run()
    assert resumed.returncode == 0, resumed.stderr
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 10))
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-9\n"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that can be made read-only."""
    with in_memory(tmp_path / "disk") as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.fault("a run directory that is read-only")
def test_a_read_only_folder(disk: Path, tmp_path: Path, says: Callable[[str], None]) -> None:
    first, *arguments = disk / "run", *(one for one in SETTINGS if "fails" not in one and "resume" not in one)
    succeed(*arguments, "trainer.max_steps=2", f"hydra.run.dir={first}", PYTHONPATH=str(ROOT))
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)  # noqa: S607
    for folder, resume in ((first, "auto"), (disk / "new", "never")):
        refused = run(*arguments, f"resume={resume}", f"hydra.run.dir={folder}", PYTHONPATH=str(ROOT))
        assert refused.returncode == 2
        assert len(refused.stderr.splitlines()) == 1
        says(refused.stderr)
    elsewhere = tmp_path / "elsewhere"
    start = f"resume={first / 'checkpoints' / 'step-2'}"
    succeed(*arguments, start, f"hydra.run.dir={elsewhere}", PYTHONPATH=str(ROOT))
    assert [record["step"] for record in metrics(elsewhere)] == list(range(3, 10))
