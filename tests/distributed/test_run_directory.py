"""Whose a run directory is, what it has been, what became of a rank: real processes, signals and disks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.commands import (
    IMAGES,
    ROOT,
    TRAIN,
    captured,
    command,
    environment,
    family,
    in_memory,
    logged,
    metrics,
    run,
    status,
    succeed,
    until,
)

SETTINGS = (
    *IMAGES,
    "+callbacks.dies._target_=tests.support.deaths.Dies",
    "batch.global_size=4",
    "batch.micro_size=1",
    "trainer.max_steps=9",
    "trainer.log_every=1",
    "metrics=jsonl",
    "checkpoint.every=2",
    "checkpoint.background=false",  # what is saved is there when a rank dies
)
ON_A_SCREEN = 25


def _run(folder: Path, *more: str, **options: object) -> subprocess.CompletedProcess[str]:
    return run(*SETTINGS, *more, f"hydra.run.dir={folder}", PYTHONPATH=str(ROOT), **options)  # type: ignore[arg-type]


def _start(folder: Path, *more: str, **extra: str) -> subprocess.Popen[str]:
    """By ``launch/local.py``, on two ranks."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch" / "local.py"), *SETTINGS, *more, f"hydra.run.dir={folder}"],
        env=environment(PYTHONPATH=str(ROOT), NPROC="2", **extra),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _await_records(folder: Path) -> None:
    until(lambda: logged(folder) > 3)


def _await_ranks(folder: Path, pause_s: float = 0.05) -> list[int]:
    """The processes of two ranks, once they have noted who they are."""
    files = [folder / ".ranks" / f"rank-{rank}.json" for rank in range(2)]
    until(lambda: all(file.exists() and file.read_bytes().strip() for file in files), pause_s=pause_s)
    return [json.loads(file.read_bytes())["pid"] for file in files]


def _ranks(launcher: int) -> dict[int, int]:
    """Those of a launcher's processes that are to be ranks, by their rank."""
    ranks = {}
    for pid in family(launcher)[1:]:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks |= {int(word[5:]): pid for word in words if word.startswith(b"RANK=")}
    return ranks


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.heavy
def test_a_locale_without_letters(tmp_path: Path) -> None:
    """``LC_ALL=C``, even where Python does not take it for UTF-8: paths, reasons and logs keep their letters."""
    folder, plain = tmp_path / "größe", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = command(1, TRAIN, [*SETTINGS, f"hydra.run.dir='{folder}'", "resume=auto"])
    ended = captured(words, PYTHONPATH=str(ROOT), HOW="letters", **plain)
    assert ended.returncode == 1, ended.stderr
    assert "resume=auto \"hydra.run.dir='" in ended.stderr
    assert status(folder)["reason"] == "rank 0: OSError: möglich"
    assert "möglich" in (folder / "logs" / "rank-0.log").read_text()
    ended = captured(words, PYTHONPATH=str(ROOT), **plain)
    assert ended.returncode == 0, ended.stderr
    assert [record["step"] for record in metrics(folder)] == list(range(1, 10))


@pytest.mark.slow
@pytest.mark.fault("all checkpoints damaged, or `checkpoints/` gone, with `resume=auto`")
def test_a_run_whose_checkpoints_are_lost_does_not_begin_anew_in_silence(
    tmp_path: Path, says: Callable[[str], None]
) -> None:
    succeed(*SETTINGS, f"hydra.run.dir={tmp_path}", PYTHONPATH=str(ROOT))
    for file in tmp_path.glob("checkpoints/step-*/model.safetensors"):
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
    damaged = _run(tmp_path, "resume=auto")
    shutil.rmtree(tmp_path / "checkpoints")
    gone = _run(tmp_path, "resume=auto")
    for refused in (damaged, gone):
        assert refused.returncode == 2
        says(refused.stderr)
        assert "the run was saved at step 9. Nothing is changed. Restore the folder checkpoints; or" in refused.stderr
        assert "resume=never and a new hydra.run.dir" in refused.stderr
        assert status(tmp_path)["state"] == "done"
        assert len(metrics(tmp_path)) == 9
    assert "2 damaged (" in damaged.stderr
    assert "the folder checkpoints is empty or gone" in gone.stderr


@pytest.mark.fault("`sys.exit(0)` in a user's function")
def test_sys_exit_in_a_users_function_is_a_failure(tmp_path: Path, says: Callable[[str], None]) -> None:
    finished = _run(tmp_path, HOW="exit")
    assert finished.returncode == 1
    assert status(tmp_path)["state"] == "failed"
    assert status(tmp_path)["reason"] == "rank 0: the program called sys.exit(0) in the middle of the run"
    says(finished.stderr)
    said = finished.stderr.splitlines()
    assert said[-3:] == [
        f"distaccum: last logged step: 2; step 2 is saved in {tmp_path}/checkpoints",
        f"distaccum: to go on: the same command with resume=auto hydra.run.dir={tmp_path}",
        f"distaccum: logs and tracebacks: {tmp_path}/logs/rank-N.log (of 1 rank)",
    ]
    assert "sys.exit(0)" in (tmp_path / "logs" / "rank-0.log").read_text()
    resumed = _run(tmp_path, "resume=auto")
    assert resumed.returncode == 0, resumed.stderr
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 10))


@pytest.mark.slow
@pytest.mark.fault("a token or password among the settings")
def test_no_file_of_a_run_has_a_secret_in_it(tmp_path: Path, says: Callable[[str], None]) -> None:
    secrets = ("canary-of-a-key", "hf_canaryABCDEFGHIJKLMNOP", "canary-of-the-environment")
    keys = ("api_key", "login", "where")
    values = (*secrets[:2], "'/x/${oc.env:SOME_TOKEN}'")
    given = [f"+callbacks.dies.{key}={value}" for key, value in zip(keys, values, strict=True)]
    run_dir = tmp_path / "run"
    finished = _run(run_dir, *given, "metrics=wandb", HOW="raise", SOME_TOKEN=secrets[2], WANDB_SILENT="true")
    assert finished.returncode == 1
    assert "key=<redacted>: forbidden" in finished.stderr
    says(status(run_dir)["reason"])
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {"state.json", "config.yaml", "hydra.yaml", "overrides.yaml", "rank-0.log"} <= {file.name for file in files}
    assert any(file.suffix == ".wandb" for file in files)
    found = [(file, secret) for file in files for secret in secrets if secret.encode() in file.read_bytes()]
    assert not found
    assert not any(secret in finished.stdout + finished.stderr for secret in secrets)


@pytest.mark.slow
@pytest.mark.fault("a run that died before its first checkpoint, with `resume=auto`")
def test_what_did_not_reach_a_checkpoint_begins_again_and_says_so(tmp_path: Path, says: Callable[[str], None]) -> None:
    assert _run(tmp_path, "checkpoint.every=100", "resume=auto", HOW="exit").returncode == 1
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"window": 3, "lo\xff')
    again = _run(tmp_path, "checkpoint.every=100", "resume=auto")
    assert again.returncode == 0, again.stderr
    says(again.stderr)
    says(again.stdout)
    assert "begins again at zero: the attempt of" in " ".join(again.stdout.split())
    assert "metrics.jsonl: line 3 is damaged" in again.stderr
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 10))


@pytest.mark.fault("kill -9 of a rank, or `os._exit` in it")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said", "rank"),
    [
        ("kill", "was killed by SIGKILL", "0"),
        pytest.param("kill", "was killed by SIGKILL", "1", marks=pytest.mark.heavy),
        pytest.param("leave", "ended with exit code 3 without an error", "0", marks=pytest.mark.heavy),
        pytest.param("leave", "ended with exit code 3 without an error", "1", marks=pytest.mark.heavy),
    ],
)
def test_the_status_names_a_rank_that_died_in_silence(
    tmp_path: Path, rank: str, how: str, said: str, says: Callable[[str], None]
) -> None:
    process = _start(tmp_path, HOW=how, WHO=rank)
    _, said_there = process.communicate(timeout=120)
    assert process.returncode == 1
    found = status(tmp_path)
    assert found["state"] == "failed"
    assert found["reason"].startswith(f"rank {rank} {said}")
    assert " while training (process " in found["reason"]
    says(said_there)
    told = said_there.splitlines()
    assert len(told) <= ON_A_SCREEN
    assert any(line.startswith(f"distaccum: the run failed: rank {rank} {said}") for line in told)
    assert f"distaccum: to go on: the same command with resume=auto hydra.run.dir={tmp_path}" in told
    resumed = _run(tmp_path, "resume=auto")  # the lock of a rank 0 that was killed is a dead one's
    assert resumed.returncode == 0, resumed.stderr
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 10))


@pytest.mark.heavy
@pytest.mark.parametrize("when", ["training", "joining"])
def test_a_launcher_says_how_a_rank_ended_that_no_other_rank_saw_ending(tmp_path: Path, when: str) -> None:
    """Rank 0 looks only when the launcher has waited for rank 1 already, as on a busy machine."""
    process = _start(tmp_path, "trainer.max_steps=100000")
    if when == "training":
        _await_records(tmp_path)
    first, second = _await_ranks(tmp_path, 0.001)
    os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    until(lambda: _is_gone(second), 20)
    os.kill(first, signal.SIGCONT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    reason = status(tmp_path)["reason"]
    assert reason.startswith("rank 1 was killed by SIGKILL" + (" while " if when == "training" else ""))
    assert f"the run failed: {reason}" in told


@pytest.mark.fault("kill -9 of all ranks at once")
@pytest.mark.heavy
def test_ranks_that_all_die_at_once_leave_their_launcher_to_say_it(tmp_path: Path, says: Callable[[str], None]) -> None:
    process = _start(tmp_path, "trainer.max_steps=100000")
    _await_records(tmp_path)
    workers = family(process.pid)[1:]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert status(tmp_path)["state"] == "failed"
    assert "was killed by SIGKILL" in status(tmp_path)["reason"]
    says(told)
    assert len(told.splitlines()) <= ON_A_SCREEN


@pytest.mark.fault("a rank fails after all agreed to run, before the process group")
@pytest.mark.heavy
def test_a_rank_does_not_wait_for_one_that_failed_before_the_group(tmp_path: Path, says: Callable[[str], None]) -> None:
    (tmp_path / ".hydra").touch()  # no folder, so that rank 0 cannot keep its settings there
    began = time.monotonic()
    finished = _run(tmp_path, world=2, torchrun=True)
    assert finished.returncode == 1
    assert time.monotonic() - began < 25 + 8  # was 33 s of waiting, and the start
    assert status(tmp_path)["state"] == "failed"
    assert status(tmp_path)["reason"].startswith("rank 0: FileExistsError:")
    assert "rank 1: the process group cannot be opened" not in finished.stderr  # rank 0 has told it
    says(finished.stderr)


@pytest.mark.heavy
def test_a_rank_does_not_wait_for_one_that_was_killed_before_the_group(tmp_path: Path) -> None:
    run_dir, note = tmp_path / "run", tmp_path / "note"
    os.mkfifo(note)  # nobody reads it, so that rank 0 waits there
    process = subprocess.Popen(
        command(2, TRAIN, [*SETTINGS, f"hydra.run.dir={run_dir}"]),
        env=environment(PYTHONPATH=str(ROOT), DISTACCUM_RUN_NOTE=str(note)),
        stderr=subprocess.PIPE,
        text=True,
    )
    first, second = _await_ranks(run_dir)
    until(lambda: _watches(second, first))  # how a process ended is not to be seen once its launcher has waited for it
    began = time.monotonic()
    os.kill(first, signal.SIGKILL)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert time.monotonic() - began < 25  # torchrun waits for 30 s before it kills
    assert "rank 1: the process group cannot be opened, and this rank ends: rank 0 was killed by SIGKILL" in told
    assert status(run_dir)["reason"].startswith("rank 0 was killed by SIGKILL")


def _watches(pid: int, other: int) -> bool:
    """Whether a process holds a descriptor of another one."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.append(descriptor.read_text())
    return any(f"Pid:\t{other}\n" in info for info in found)


@pytest.mark.fault("kill -9 of a rank before it has begun")
@pytest.mark.slow
def test_a_rank_that_is_killed_in_its_imports_is_named(tmp_path: Path, says: Callable[[str], None]) -> None:
    process = _start(tmp_path / "run")
    until(lambda: 1 in _ranks(process.pid), pause_s=0)
    os.kill(_ranks(process.pid)[1], signal.SIGKILL)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    says(told)
    assert not (tmp_path / "run" / "status.json").exists()


@pytest.mark.fault("kill -9 of the launcher while the ranks import")
@pytest.mark.heavy
@pytest.mark.parametrize("already", [pytest.param(False, marks=pytest.mark.heavy), True])
def test_ranks_end_with_a_launcher_that_is_killed_in_their_imports(tmp_path: Path, *, already: bool) -> None:
    """A process that asks for its parent's end only afterwards is not told of one that was before."""
    process = _start(tmp_path / "run")
    ranks = set[int]()

    def two_are_held() -> bool:
        for pid in {*_ranks(process.pid).values()} - ranks:
            ranks.add(pid)
            os.kill(pid, signal.SIGCONT if already else signal.SIGSTOP)  # before its interpreter runs
        return len(ranks) == 2

    until(two_are_held, pause_s=0)
    time.sleep(0.5 if already else 0)
    process.kill()
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    told = process.communicate(timeout=60)[1]
    assert not told  # and no rank looks for it
    until(lambda: all(map(_is_gone, ranks)), 20)
    assert not (tmp_path / "run" / "status.json").exists()


@pytest.mark.fault("kill -9 of a loading process whose rank waits for another")
@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["ddp", pytest.param("zero1", marks=pytest.mark.heavy)])
def test_a_loading_process_that_dies_while_its_rank_waits_is_named(
    engine: str, tmp_path: Path, says: Callable[[str], None]
) -> None:
    """Torch raises that wherever the rank is: here in the count's all-reduce, for which rank 1 is late."""
    more = (f"engine={engine}", "trainer.num_workers=1", "trainer.max_steps=1000000", "checkpoint.every=0")
    process = _start(tmp_path, *more)
    _await_records(tmp_path)
    first, second = _await_ranks(tmp_path)
    os.kill(second, signal.SIGSTOP)
    time.sleep(1)
    (loader,) = family(first)[1:]
    os.kill(loader, signal.SIGKILL)
    time.sleep(1)
    os.kill(second, signal.SIGCONT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    says(told)
    assert status(tmp_path)["reason"].startswith(f"rank 0: DataError: the loading process {loader} was killed by SIG")


@pytest.mark.heavy
@pytest.mark.fault("a second run in the folder of a live one; then the folder of a run that was killed")
def test_a_second_run_in_the_folder_of_one_that_trains_is_refused(tmp_path: Path, says: Callable[[str], None]) -> None:
    arguments = [*SETTINGS, "trainer.max_steps=100000", f"hydra.run.dir={tmp_path}"]
    first = subprocess.Popen(
        command(2, TRAIN, arguments), env=environment(PYTHONPATH=str(ROOT)), stdout=subprocess.DEVNULL
    )
    try:
        _await_records(tmp_path)
        holder = json.loads((tmp_path / "owner.json").read_text())
        for resume, world in (("auto", 1), ("never", 2)):
            second = _run(tmp_path, f"resume={resume}", world=world)
            assert second.returncode == 2
            assert f"is another run's (process {holder['pid']} on {holder['machine']['host']}, since" in second.stderr
        assert status(tmp_path)["state"] == "running"
    finally:
        for pid in family(first.pid):
            os.kill(pid, signal.SIGKILL)
        first.wait()
    assert json.loads((tmp_path / "owner.json").read_text()) == holder
    resumed = _run(tmp_path, "resume=auto", f"trainer.max_steps={status(tmp_path)['step'] + 3}")
    assert resumed.returncode == 0, resumed.stderr
    says(second.stderr + resumed.stderr)
    assert not (tmp_path / "owner.json").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of a few kB."""
    with in_memory(tmp_path / "disk", "200k") as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.heavy), 2])
@pytest.mark.fault("a full disk while metrics or status are written")
def test_a_full_disk_ends_the_run_with_its_reason(small_disk: Path, world: int, says: Callable[[str], None]) -> None:
    run_dir = small_disk / "run"
    finished = _run(run_dir, "checkpoint.every=0", world=world, HOW="fill", DISK=str(small_disk))
    assert finished.returncode == 1
    found = status(run_dir)
    assert found["state"] == "failed"
    says(found["reason"])
    assert found["reason"].startswith("rank 0: OSError: [Errno 28] No space left on device: ")
    assert found["reason"].endswith(
        ("status.json'. Make room there, and go on", "metrics.jsonl'. Make room there, and go on")
    )
    assert len(finished.stderr.splitlines()) <= ON_A_SCREEN
    records = metrics(run_dir)  # whole lines only
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    with (
        (small_disk / "more").open("wb", buffering=0) as more,
        suppress(OSError),
    ):  # what the first run has cleared away
        while True:
            more.write(bytes(256))
    full = _run(run_dir, "checkpoint.every=0", "resume=auto")
    assert full.returncode in (1, 2)  # as little as what the first left may be room for
    assert "No space left on device" in full.stderr
    (small_disk / "big").unlink()
    (small_disk / "more").unlink()
    assert _run(run_dir, "checkpoint.every=0", "resume=auto").returncode == 0
    assert [record["step"] for record in metrics(run_dir)] == list(range(1, 10))


@pytest.mark.heavy
@pytest.mark.fault("ranks that do not share the run directory")
def test_ranks_of_another_machine_that_see_another_disk(tmp_path: Path, says: Callable[[str], None]) -> None:
    """Two of four ranks have mounts of their own, as those of a second machine do."""
    if os.geteuid():
        pytest.skip("may not mount")
    settings = [setting for setting in SETTINGS if "data._target_" not in setting]
    data = ["data._target_=tests.support.elsewhere.Elsewhere", f"+data.folder={tmp_path}"]
    began = time.monotonic()
    arguments = [*settings, *data, f"hydra.run.dir={tmp_path / 'run'}"]
    finished = run(*arguments, world=4, PYTHONPATH=str(ROOT), timeout=100)
    assert finished.returncode == 2, finished.stderr
    assert time.monotonic() - began < 60
    says(finished.stderr)
    says(status(tmp_path / "run")["reason"])
    assert len(finished.stderr.splitlines()) <= 6, finished.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.fault("a run started again on a full disk")
@pytest.mark.heavy
def test_no_rank_waits_for_one_that_finds_the_disk_full_at_the_start(
    small_disk: Path, says: Callable[[str], None]
) -> None:
    """Wherever in the start it is full: rank 0 may have no room for the files by which the other one knows it."""
    run_dir, ballast, page = small_disk / "run", small_disk / "big", os.sysconf("SC_PAGESIZE")
    assert _run(run_dir, "checkpoint.every=0", world=2).returncode == 0
    for pages in range(5):
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(b"x" * page) == page:
                pass
        os.truncate(ballast, ballast.stat().st_size - pages * page)
        began = time.monotonic()
        finished = _run(run_dir, "checkpoint.every=0", "resume=auto", "trainer.max_steps=20", world=2)
        assert finished.returncode in (1, 2)
        says(finished.stderr)
        assert time.monotonic() - began < 25  # was 30 s and more, with two pages of 4 kB left
        ballast.unlink()
