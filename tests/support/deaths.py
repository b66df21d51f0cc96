"""A callback that ends the process, or fills the disk: ``HOW`` says in which way, ``WHO`` on which rank."""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Timer

import torch

from distaccum.accumulation.step import Outcome
from distaccum.train.callbacks import Callback, Run
from distaccum.train.metrics.loggers import Logger, Record, RunInfo

_STEP = int(os.environ.get("AT", "3"))


class Images:
    """64 small images, equal on every rank."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1, 8, 8), torch.tensor(index % 10)


class Dies(Callback):
    """Does it after the third update or ``AT``, before that is logged, and once a file ``AWAIT`` is there."""

    def __init__(self, api_key: str = "", login: str = "", where: str = "") -> None:
        self._key = api_key

    def on_update(self, run: Run, outcome: Outcome) -> None:
        if run.progress.step == _STEP and os.environ.get("RANK", "0") == os.environ.get("WHO", "0"):
            while "AWAIT" in os.environ and not any(Path("/").glob(os.environ["AWAIT"][1:])):
                time.sleep(0.05)
            self._happen(os.environ.get("HOW", ""))

    def _happen(self, how: str) -> None:
        match how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "leave":
                os._exit(3)
            case "exit":
                sys.exit(0)
            case "fill":
                _fill(Path(os.environ["DISK"]))
            case "core":
                _kill_wandb(os.getpid())
            case "letters":
                raise OSError("möglich")
            case "raise":
                raise OSError(f"GET https://host/?key={self._key}: forbidden")


class KilledAnywhere(Callback):
    """SIGKILL, ``LATER`` seconds after update ``AT``, of the ranks in ``WHO``: it comes from another thread."""

    def on_update(self, run: Run, outcome: Outcome) -> None:
        if run.progress.step == int(os.environ.get("AT", "0")) and os.environ["RANK"] in os.environ["WHO"]:
            Timer(float(os.environ["LATER"]), os.kill, (os.getpid(), signal.SIGKILL)).start()


class Notes(Logger):
    """Writes what it is told into ``notes`` of the run directory, line by line."""

    def begin(self, run: RunInfo) -> None:
        self._file = (run.folder / "notes").open("a", buffering=1)
        self._note("begin", run.window)

    def log(self, record: Record) -> None:
        self._note(record["window"])

    def close(self, *, failed: bool) -> None:
        self._note("close", failed)
        self._file.close()

    def _note(self, *what: object) -> None:
        self._file.write(json.dumps(what) + "\n")


def _kill_wandb(pid: int) -> None:
    """W&B's own process, once it has written something."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = file.read_bytes().split(b"\0")
                if words[0].endswith(b"wandb-core") and str(pid).encode() in words:
                    time.sleep(1)
                    os.kill(int(file.parent.name), signal.SIGKILL)
                    return
        time.sleep(0.05)


def _fill(disk: Path) -> None:
    with suppress(OSError), (disk / "big").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
