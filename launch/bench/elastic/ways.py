"""Ways to run a job whose processes are killed: distaccum's elastic one, torchrun's restarts, torchft."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from launch import ROOT, python_path

_LEAVES_WITHIN_S = 30.0
_PAUSE_S = 0.5  # before a replica group of torchft is followed by another, as an elastic run's agent has it
LIGHTHOUSE = ("--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000")
"""Of torchft's README."""
_LOOP = "launch.bench.elastic.torchft_loop"


class Way(ABC):
    """A job that runs within the ``with`` block, in a folder of its own.

    Args:
        folder: for what it writes.
        ranks: its processes.
        batch: samples of a window.
        micro: samples of a micro-batch.
        every: windows from one checkpoint to the next.
        channels: of the model.
        options: overrides of the main job, or flags of torchft's lighthouse.
    """

    name = ""
    before: tuple[str, ...] = ()
    """What its launcher's command begins with."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int,
        batch: int,
        micro: int,
        every: int,
        channels: int,
        options: Sequence[str] = (),
    ) -> None:
        self.folder, self.ranks = folder, ranks
        self._batch, self._micro, self._every = batch, micro, every
        self._channels, self._options = channels, options
        self._log = (folder / "output").open("ab")
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **python_path()}

    @abstractmethod
    def __enter__(self) -> Way: ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abstractmethod
    def workers(self) -> dict[int, int]:
        """The processes that compute, by their places."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether it has given up by itself."""

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  programs of this checkout
            command, env=self._environment, cwd=ROOT, stdout=self._log, stderr=self._log, start_new_session=True
        )


class MainJob(Way):
    """The main job with a launcher around it."""

    def __enter__(self) -> MainJob:
        """Starts the launcher."""
        self._launcher = self._start(*self.before, sys.executable, "-m", *self._launches(), *self._settings())
        return self

    @abstractmethod
    def _launches(self) -> tuple[str, ...]: ...

    def _settings(self) -> list[str]:
        witness = "launch.bench.elastic.witness"
        return [
            f"hydra.run.dir={self.folder.resolve() / 'run'}",
            "data=digits",
            "data.held_out=0.1986",  # 1,440 to train on: no window is shorter than others
            "model=cnn",
            f"model.channels={self._channels}",
            f"loss._target_={witness}.NotedCrossEntropy",
            f"+loss.folder={self.folder.resolve()}",
            f"+callbacks.notes._target_={witness}.NoteSteps",
            f"+callbacks.notes.folder={self.folder.resolve()}",
            f"batch.global_size={self._batch}",
            f"batch.micro_size={self._micro}",
            "trainer.max_steps=1000000",
            "trainer.eval_every=0",
            "trainer.verify=never",
            "trainer.log_every=1",
            f"checkpoint.every={self._every}",
            "metrics=jsonl",
            "numerics=reproducible",
            *self._options,
        ]

    def __exit__(self, *_: object) -> None:
        """Tells the launcher to leave."""
        self._launcher.terminate()
        try:
            self._launcher.wait(_LEAVES_WITHIN_S)
        except subprocess.TimeoutExpired:
            for pid in self.workers().values():
                os.kill(pid, signal.SIGKILL)
            os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()

    def wait(self) -> int:
        """Until it ends by itself; returns the launcher's exit code."""
        return self._launcher.wait()

    def has_ended(self) -> bool:
        """Whether the launcher has."""
        return self._launcher.poll() is not None

    def workers(self) -> dict[int, int]:
        """Those whose command line names this run, and whose variables name a rank."""
        found, run = {}, f"hydra.run.dir={self.folder.resolve() / 'run'}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if run in (process / "cmdline").read_bytes().split(b"\0"):
                    variables = (process / "environ").read_bytes().split(b"\0")
                    places = [one for one in variables if one.startswith(b"LOCAL_RANK=")]
                    if places:
                        found[int(places[0].partition(b"=")[2])] = int(process.name)
        return found


class Elastic(MainJob):
    """The others finish the window, and another process joins them."""

    name = "elastic"

    def _launches(self) -> tuple[str, ...]:
        return ("distaccum.elastic", f"--nproc={self.ranks}")


class Restart(MainJob):
    """torchrun ends all, starts all again, and they go on from the last checkpoint."""

    name = "restart"

    def _launches(self) -> tuple[str, ...]:
        torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", "--max-restarts=1000")
        return (*torchrun, "-m", "distaccum.train", "resume=auto")


class Torchft(Way):
    """Replica groups of one process each, of which this one starts another where one has ended.

    The interpreter that has torchft is named by the variable ``TORCHFT_PYTHON``.
    """

    name = "torchft"

    def __enter__(self) -> Torchft:
        """Starts its lighthouse and the groups."""
        self._python, self._ended = os.environ["TORCHFT_PYTHON"], Event()
        server = str(Path(self._python).with_name("torchft_lighthouse"))
        self._lighthouse = self._start(server, "--bind=[::]:29510", *self._options)
        self._groups = {group: self._start_group(group) for group in range(self.ranks)}
        self._keeper = Thread(target=self._keep, daemon=True)
        self._keeper.start()
        return self

    def _start_group(self, group: int) -> subprocess.Popen[bytes]:
        numbers = (group, self.ranks, self._batch, self._micro, self._channels)
        place = ("http://localhost:29510", str(self.folder.resolve()))
        return self._start(self._python, "-m", _LOOP, *place, *map(str, numbers))

    def _keep(self) -> None:
        while not self._ended.wait(0.01):
            for group, process in self._groups.items():
                if process.poll() is not None and not self._ended.wait(_PAUSE_S):
                    self._groups[group] = self._start_group(group)

    def __exit__(self, *_: object) -> None:
        """Ends them all."""
        self._ended.set()
        self._keeper.join()
        for process in (*self._groups.values(), self._lighthouse):
            process.kill()
            process.wait()

    def has_ended(self) -> bool:
        """Whether its lighthouse has."""
        return self._lighthouse.poll() is not None

    def workers(self) -> dict[int, int]:
        """Those that run."""
        return {group: process.pid for group, process in self._groups.items() if process.poll() is None}


WAYS: dict[str, type[Way]] = {way.name: way for way in (Elastic, Restart, Torchft)}
