"""A run directory on a small disk of its own, and the attempts at its run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distaccum.checkpoint.store import verify
from distaccum.errors import CheckpointError
from launch.soak.attempt import Attempt, SoakError, status_of
from launch.soak.schedule import Course

HANG_S = 6.0
STEPS, SAVE_EVERY, EVALUATE_EVERY = 180, 8, 12
DISK = "24m"
SETTINGS = (
    "data.seq_len=16",
    "data.held_out=0.005",
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=16",
    "batch.micro_size=4",
    "schedule.warmup_steps=10",
    f"trainer.max_steps={STEPS}",
    "trainer.log_every=1",
    f"trainer.eval_every={EVALUATE_EVERY}",
    f"trainer.hang_timeout={HANG_S:g}s",
    f"checkpoint.every={SAVE_EVERY}",
    "checkpoint.keep=3",
    "metrics=jsonl",
    "metrics.console=false",
)


class Run:
    """A run of a course in ``folder``; ``logs`` takes what its attempts print, in files by their number."""

    def __init__(self, course: Course, folder: Path, logs: Path, *, world: int | None = None) -> None:
        self.course, self.folder, self._logs = course, folder, logs
        self.world = world or course.worlds[0]
        self.worlds = {self.world}
        """The numbers of ranks that it has trained on."""
        self.status_before: Mapping[str, Any] = {}
        """What ``status.json`` said before the last attempt."""
        self.attempts: list[Attempt] = []
        self.damaged: set[str] = set()
        """The names of checkpoints that a fault has damaged."""
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, *, resume: str = "auto", beside: bool = False) -> Attempt:
        """Starts it, as a user does; ``beside`` another attempt that runs."""
        if not beside:
            self.status_before = status_of(self.folder)
        given = dict(setting.partition("=")[::2] for setting in (*SETTINGS, *self.course.overrides))
        arguments = (*(f"{key}={value}" for key, value in given.items()), f"resume={resume}")
        attempt = Attempt(
            self.folder,
            arguments,
            world=self.world,
            log=self._logs / f"{len(self.attempts):03}.log",
            temporary=self._logs / "tmp",
            bare=self.course.bare,
        )
        self.attempts.append(attempt)
        return attempt

    def valid(self) -> list[Path]:
        """The checkpoints that are whole, from the oldest to the newest."""
        whole = []
        for path in (self.folder / "checkpoints").glob("step-*"):
            with suppress(CheckpointError):
                verify(path)
                whole.append(path)
        return sorted(whole, key=step_of)

    def newest_valid(self) -> Path:
        """The checkpoint that a resume takes up."""
        return self.valid()[-1]

    @contextmanager
    def disk_full(self, *, leave: int) -> Iterator[None]:
        """For the block, fills the file system of the run directory but for ``leave`` bytes."""
        ballast = self.folder.parent / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file, suppress(OSError):
                for size in (1 << 16, 1 << 12, 1):
                    with suppress(OSError):
                        while file.write(b"x" * size) == size:
                            pass
            with ballast.open("r+b") as file:
                file.truncate(max(0, ballast.stat().st_size - leave))
            yield
        finally:
            ballast.unlink()


def step_of(path: Path) -> int:
    """The update of a checkpoint."""
    return int(path.name.rpartition("-")[2])


class MountError(SoakError):
    """This process may not mount a small disk."""


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A real file system of a few MB at ``folder``, for the block.

    Raises:
        MountError: this process may not mount one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)  # noqa: S603  a constant
    if mounted.returncode:
        raise MountError(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # noqa: S603, S607


def clear(folder: Path) -> None:
    """Removes what is in a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
