"""Starting the real thing: torchrun and the entry points, as a user would."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.forked import GRACE_S, ROOT, Forks

_FORKS = Forks()
TRAIN = ROOT / "launch" / "train.py"
TINY = (  # a model and a text so small that a window takes milliseconds
    "data.seq_len=16",
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=16",
    "schedule.warmup_steps=2",
)
SIXTY = (  # steps of a run that is ended and continued
    *TINY,
    "model.dropout=0.1",
    "batch.global_size=10",
    "batch.micro_size=2",
    "trainer.max_steps=60",
    "metrics=jsonl",
    "trainer.log_every=1",
    "trainer.eval_every=20",
    "resume=auto",
)
NO_TEXT = ("~data.seq_len", "~data.held_out", "~data.vocab_size")  # for data that have no such settings
IMAGES = ("model=cnn", *NO_TEXT, "data._target_=tests.support.deaths.Images")
GOES_WRONG = (  # data that fail at a sample, or wait, as data.how says
    *NO_TEXT,
    "data._target_=tests.support.faulty_datasets.GoesWrong",
    "batch.global_size=4",
    "batch.micro_size=1",
    "trainer.log_every=1",
    "metrics=jsonl",
)
QUIET = ("trainer.eval_every=0", "checkpoint.every=0", "metrics=jsonl", "trainer.log_every=1")


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without a launcher's variables; one thread a process, or OMP_NUM_THREADS of them."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return {"OMP_NUM_THREADS": "1"} | kept | {"CUDA_VISIBLE_DEVICES": ""} | extra


def command(world: int, script: Path, arguments: Sequence[object]) -> list[str]:
    """The command line: plain python for a world of one, torchrun otherwise."""
    start = [sys.executable]
    if world > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return [*start, str(script), *map(str, arguments)]


def run(
    *arguments: object,
    world: int = 1,
    script: Path = TRAIN,
    cwd: Path | None = None,
    timeout: float = 240,
    grace: float = GRACE_S,
    torchrun: bool = False,
    warm: str = "distaccum",
    imports: Sequence[str] = (),
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Runs to the end and returns what it printed; the caller looks at the exit code.

    The ranks are forked from a process that has imported what ``warm`` says (a name of :data:`forked.WARM`), and the
    modules of other libraries in ``imports``. With ``torchrun`` the real launcher starts them, in fresh interpreters:
    for tests of what a launcher does.
    """
    if not torchrun:
        return _FORKS.run(
            list(map(str, (script, *arguments))),
            world=world,
            warm=warm,
            cwd=cwd,
            environment=environment(**extra),
            timeout=timeout,
            grace=grace,
            imports=imports,
        )
    return captured(command(world, script, arguments), timeout=timeout, cwd=cwd, **extra)


def captured(
    arguments: Sequence[object], *, timeout: float | None = None, cwd: Path | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to the end and returns what it printed; the caller looks at the exit code."""
    return subprocess.run(
        list(map(str, arguments)),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        cwd=cwd,
        env=environment(**extra),
    )


def succeed(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Calls :func:`run` and asserts that the exit code is 0."""
    finished = run(*arguments, **options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished


def kill_when(run_dir: Path, records: int, *arguments: object, world: int) -> None:
    """Starts a run and kills every one of its processes, without warning, once it has logged so many records."""
    process = subprocess.Popen(
        command(world, TRAIN, [*arguments, f"hydra.run.dir={run_dir}"]),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: logged(run_dir) >= records or process.poll() is not None, pause_s=0.005)
        assert process.poll() is None, "the run ended before it was killed"
    finally:
        for pid in family(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def family(pid: int) -> list[int]:
    """A process and all below it: torchrun's workers have sessions of their own, where no signal to a group gets."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)  # noqa: S607
    parents = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    found = [pid]
    for one in found:
        found += [child for child, parent in parents if parent == one]
    return found


@contextmanager
def in_memory(folder: Path, size: str = "50%") -> Iterator[Path]:
    """A real file system of this size there; skips where none may be mounted."""
    import pytest  # noqa: PLC0415  workers import this module

    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("may not mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # noqa: S607


def until(
    holds: Callable[[], Any], within_s: float = 120, pause_s: float = 0.02, told: Callable[[], object] = str
) -> Any:
    """What ``holds`` returns, once that is true; fails after so long, with what is ``told`` then."""
    deadline = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < deadline, told()
        time.sleep(pause_s)
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def logged(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def status(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "status.json").read_text())
    return found
