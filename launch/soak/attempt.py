"""One start of a run by ``launch/train.sh``, or a torchrun of one's own: its processes, what they do, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep, time
from typing import Any

from launch import ROOT, python_path
from launch.soak.schedule import EVALUATION, SAVE

# What launch/train.sh becomes, once there is an environment.
_LOCAL, _TRAIN = (ROOT / "launch" / name for name in ("local.py", "train.py"))
_MARK = "DISTACCUM_SOAK"
_POLL_S = 0.002
_GONE_S = 20.0
PATIENCE_S = 120.0
GRACE_S = 8
_DOES = {SAVE: "saving", EVALUATION: "evaluating"}


class SoakError(Exception):
    """A run did not do what is documented."""


class OverError(Exception):
    """The run was done before the fault could happen."""


class Attempt:
    """Starts a run; its output goes to ``log`` and ``log.err``.

    Args:
        folder: the run directory.
        arguments: Hydra overrides, without the run directory.
        world: ranks.
        log: for the output.
        temporary: the processes' folder for temporary files.
        bare: whether torchrun starts the ranks, whose exit code is 1 whatever has happened, and which prints much.
    """

    def __init__(
        self, folder: Path, arguments: tuple[str, ...], *, world: int, log: Path, temporary: Path, bare: bool = False
    ) -> None:
        self.folder, self.world, self.log, self.bare = folder, world, log, bare
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(_TRAIN)]
        self._mark = token_hex(8)
        self.began, self.began_at = time(), monotonic()
        temporary.mkdir(parents=True, exist_ok=True)
        own = {"NPROC": str(world), "SHUTDOWN_TIMEOUT": str(GRACE_S), _MARK: self._mark, "TMPDIR": str(temporary)}
        launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        inherited = {name: value for name, value in os.environ.items() if name not in launcher}
        alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline"}
        with log.open("w") as out, self._errors.open("w") as error:
            self._process = subprocess.Popen(  # noqa: S603  as the schedule asks
                [sys.executable, *(torchrun if bare else [str(_LOCAL)]), *arguments, f"hydra.run.dir={folder}"],
                env=inherited | alone | python_path() | own,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=error,
                start_new_session=True,
            )

    # --- what it is

    @property
    def pid(self) -> int:
        """Of the launcher."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    @property
    def _errors(self) -> Path:
        return self.log.with_suffix(".err")

    @property
    def out(self) -> str:
        """What it has printed on stdout."""
        return self.log.read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it has printed on stderr."""
        return self._errors.read_text(errors="replace")

    def processes(self) -> list[int]:
        """All processes that came of it and live, orphans too."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0") and _state(int(entry.name)) not in "ZX":
                        found.append(int(entry.name))
        return found

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks."""
        found = {}
        for pid in _children(self.pid):
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = next((v[5:] for v in variables if v.startswith(b"RANK=")), b"")
                if rank:
                    found[int(rank)] = pid
        return dict(sorted(found.items()))

    def loaders(self) -> list[int]:
        """The loading processes of all ranks."""
        command = {pid: _command(pid) for rank in self.ranks().values() for pid in _children(rank)}
        return [pid for pid, words in command.items() if b"wandb-core" not in words and b"train.py" in words]

    def wandb(self) -> list[int]:
        """W&B's own processes."""
        return [pid for pid in self.processes() if b"wandb-core" in _command(pid)]

    def phases(self) -> dict[str, str]:
        """What the ranks do, as they show it."""
        found = {}
        for path in sorted((self.folder / ".ranks").glob("rank-*.json")):
            with suppress(OSError, ValueError, KeyError):
                found[path.stem] = json.loads(path.read_bytes().rstrip(b"\n "))["phase"]
        return found

    def step(self) -> int:
        """The last logged update of this attempt; -1 while it has logged none.

        A resumed run first takes the later records out of the log, which then is as old as that.
        """
        path = self.folder / "metrics.jsonl"
        with suppress(OSError, ValueError, KeyError, IndexError):
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_mtime <= self.began:
                    return -1
                file.seek(max(0, status.st_size - 8192))
                line = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
            return int(json.loads(line)["step"])
        return -1

    # --- waiting

    def wait_for(self, what: str, holds: Callable[[], Any], *, within_s: float = PATIENCE_S) -> bool:
        """Waits until something holds; False if the run ends before.

        Raises:
            SoakError: neither, within so many seconds.
        """
        latest = monotonic() + within_s
        while not holds():
            if self.code is not None:
                return bool(holds())
            if monotonic() > latest:
                raise SoakError(f"waited {within_s:.0f} s for {what}, at step {self.step()}: {self.phases()}")
            sleep(_POLL_S)
        return True

    def await_phase(self, moment: str) -> bool:
        """Waits until a rank saves, or evaluates."""
        if moment == SAVE and self.world == 1:
            saving = self.folder / "checkpoints"
            return self.wait_for("a save", lambda: any(saving.glob(".saving-*")))
        word = _DOES[moment]
        return self.wait_for(word, lambda: any(phase.startswith(word) for phase in self.phases().values()))

    def end(self, within_s: float) -> int:
        """Waits for the launcher's end, and for that of all processes; returns the exit code.

        Raises:
            SoakError: the run or a process of it is still there.
        """
        latest = monotonic() + within_s
        while (code := self.code) is None:
            if monotonic() > latest:
                raise SoakError(f"still running after {within_s:.0f} s, at step {self.step()}: {self.phases()}")
            sleep(0.01)
        latest = monotonic() + _GONE_S
        while left := self.processes():
            if monotonic() > latest:
                commands = [_command(pid).replace(b"\0", b" ").decode(errors="replace")[:200] for pid in left]
                raise SoakError(f"processes are left {_GONE_S:.0f} s after the launcher's end: {commands}")
            sleep(0.05)
        return code

    # --- what is done to it

    def kill(self) -> None:
        """Ends all processes at once, at whatever they are."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGSTOP)  # it would report the ends of the others
        while processes := self.processes():
            for pid in processes:
                send(pid, signal.SIGKILL)
            self._process.poll()
            sleep(0.01)
        self._process.wait()


def send(pid: int, number: int) -> None:
    """Sends a signal, if the process is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _children(pid: int) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            state, parent = file.read_text().rpartition(") ")[2].split()[:2]
            if int(parent) == pid and state not in "ZX":
                found.append(int(file.parent.name))
    return sorted(found)


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def status_of(folder: Path) -> Mapping[str, Any]:
    """``status.json``; empty without one.

    Raises:
        SoakError: it is damaged.
    """
    try:
        found: dict[str, Any] = json.loads((folder / "status.json").read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SoakError(f"status.json is damaged: {error}") from error
    return found
