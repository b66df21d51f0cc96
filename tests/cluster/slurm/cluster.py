"""A real Slurm for tests: munged, slurmctld and two nodes, all on the loopback interface and in one folder.

Nothing of the machine's own Slurm or munge is read or changed. Processes of the cluster, jobs included, are those whose
environment names its ``slurm.conf``: that is how all of them are found and ended, whatever became of their parents.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from getpass import getuser
from pathlib import Path
from secrets import token_bytes

from tests.support.commands import ROOT, environment

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
NODES = ("n1", "n2")
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
    "PREEMPTED",
)
_CONF = Path(__file__).with_name("slurm.conf")


def missing_tools() -> list[str]:
    """The programs of Slurm and munge that this machine lacks."""
    return [tool for tool in TOOLS if _find(tool) is None]


class Cluster:
    """Start it with ``with Cluster(folder) as cluster``; on any exit every process of it is gone.

    Args:
        folder: new, and with a short path: a socket lies in it.
        tracking: how Slurm follows a job's processes. With ``pgid`` a signal reaches a task's own process group and not
            torchrun's workers, whose sessions are their own; so it is with cgroups, which most clusters have.
            ``linuxproc`` reaches all descendants, and would hide a script that does not pass a signal on.
    """

    def __init__(self, folder: Path, *, tracking: str = "pgid") -> None:
        self.folder, self._tracking = folder, tracking
        self.conf = folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Cluster:
        with ExitStack() as failed:
            failed.callback(self.stop)
            self._start()
            failed.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir()
        (self.folder / "jobs").mkdir()
        controller, n1, n2 = _free_ports(3)
        settings = {"folder": self.folder, "user": getuser(), "tracking": self._tracking}
        ports = {"controller_port": controller, "n1_port": n1, "n2_port": n2}
        self.conf.write_text(_CONF.read_text().format(**settings, **ports))
        self._start_munge()
        self._launch("slurmctld", "slurmctld", "-D", "-i", "-f", str(self.conf))
        for node in NODES:
            self.start_node(node)
        self._await(lambda: all(self.node_state(node) == "IDLE" for node in NODES), 120, "the nodes to come up")

    def _start_munge(self) -> None:
        key, log = self.folder / "munge.key", self.folder / "munge.log"
        key.write_bytes(token_bytes(128))
        key.chmod(0o600)
        files = (f"--{name}-file={self.folder / name}" for name in ("pid", "seed"))
        address = self.folder / "munge.socket"
        self._launch(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={address}",
            f"--log-file={log}",
            *files,
        )
        self._await(address.exists, 60, "munged")

    def start_node(self, node: str) -> None:
        """Starts the node's slurmd, as after a reboot; see :meth:`await_node`."""
        self._launch(node, "slurmd", "-D", "-N", node, "-f", str(self.conf))

    def _launch(self, name: str, program: str, *arguments: str) -> None:
        path = _find(program)
        assert path, program
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [path, *arguments],
                env=self.environment(),
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def environment(self, **extra: str) -> dict[str, str]:
        """What a client program of this cluster needs, and ``extra``."""
        kept = {name: value for name, value in environment().items() if not name.startswith(("SLURM", "SBATCH"))}
        return kept | {"SLURM_CONF": str(self.conf)} | extra

    def await_node(self, node: str) -> None:
        """Waits until the controller gives work to the node."""
        self._await(lambda: self.node_state(node) == "IDLE", 60, f"{node} to come back")

    def kill_node(self, node: str) -> None:
        """As if its power failed: slurmd, its step daemons and all tasks on it end at once."""
        self._daemons[node].kill()
        _kill_all(lambda variables: self._is_ours(variables) and variables.get("SLURMD_NODENAME") == node)
        self._daemons.pop(node).wait()

    def stop(self) -> None:
        """Ends every process of the cluster and of its jobs; safe to call again."""
        _kill_all(self._is_ours)
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons.clear()

    def command(self, *arguments: object, check: bool = True, cwd: Path | None = None, **extra: str) -> str:
        """Runs a client program (``scontrol``, ``squeue``, ...) and returns what it printed."""
        finished = subprocess.run(
            list(map(str, arguments)),
            env=self.environment(**extra),
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert finished.returncode == 0 or not check, finished.stdout + finished.stderr
        return finished.stdout

    def submit(self, *arguments: object, cwd: Path = ROOT, **extra: str) -> str:
        """``sbatch`` with these arguments, from ``cwd``; returns the job's number.

        ``extra`` goes into the job's environment. Its output lands in a file of its own, see :meth:`output`.
        """
        out = self.folder / "jobs" / "%A_%a.out"
        made = self.command("sbatch", "--parsable", f"--output={out}", *arguments, cwd=cwd, **extra)
        return made.strip()

    def fields(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says of a job, or of an element of an array (``12_1``)."""
        words = self.command("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, ..."""
        return self.fields(job)["JobState"]

    def wait(self, job: str, timeout: float = 120) -> str:
        """Waits until the job has ended for good and returns its state."""
        self._await(lambda: self.state(job) in ENDED, timeout, f"job {job}")
        return self.state(job)

    def wait_for(self, condition: Callable[[], bool], job: str, timeout: float = 120) -> None:
        """Waits for something that a running job does; fails, with its output, where the job ends without it."""

        def happened() -> bool:
            over = self.state(job) in ENDED
            return condition() or (over and self._fail(job))

        self._await(happened, timeout, f"what job {job} was to do")

    def _fail(self, job: str) -> bool:
        raise AssertionError(f"job {job} has ended: {self.fields(job)}\n{self.output(job)}")

    def output(self, job: str) -> str:
        """What the batch script has printed so far, in all its starts."""
        number, _, element = job.partition("_")
        file = self.folder / "jobs" / f"{number}_{element or 4294967294}.out"
        return file.read_text() if file.exists() else ""

    def scancel(self, *arguments: object) -> None:
        """``scancel`` with these arguments."""
        self.command("scancel", *arguments)

    def tell_to_stop(self, job: str) -> None:
        """Signals the batch script alone, as ``--signal=B:USR1@120`` does 120 s before the time limit."""
        number = self.fields(job)["JobId"]  # of an array's last element: the array's, which would mean all of it
        name = job if job.startswith(f"{number}_") else number
        # While other elements wait, scancel 22.05 delivers it, takes that for a failure and tries again, many times.
        self.command("timeout", "2", "scancel", "--batch", "--signal=USR1", name, check=False)

    def node_state(self, node: str) -> str:
        """IDLE, ALLOCATED, DOWN, ...; with a mark behind it where slurmd does not answer."""
        words = self.command("scontrol", "show", "node", "--oneliner", node, check=False).split()
        return next((word.removeprefix("State=") for word in words if word.startswith("State=")), "")

    def processes(self, job: str) -> list[int]:
        """The processes of a job's tasks and of its batch script, on all nodes; not Slurm's own."""
        number = self.fields(job)["JobId"]
        return _processes(lambda variables: self._is_ours(variables) and variables.get("SLURM_JOB_ID") == number)

    def _is_ours(self, variables: Mapping[str, str]) -> bool:
        return variables.get("SLURM_CONF") == str(self.conf)

    def _await(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout:.0f} s for {what}\n{self.diagnosis()}"
            time.sleep(0.1)

    def diagnosis(self) -> str:
        """The queue and the last lines of every log, for a failed test's message."""
        parts = [self.command("squeue", check=False)]
        for pattern in ("*.log", "*.out", "jobs/*"):
            for log in sorted(self.folder.glob(pattern)):
                parts += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(parts)


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin")


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _processes(is_meant: Callable[[Mapping[str, str]], bool]) -> list[int]:
    """The living processes of this user whose environment is meant; zombies have none."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                if is_meant(dict(pair.split("=", 1) for pair in pairs if "=" in pair)):
                    found.append(int(entry.name))
    return found


def _kill_all(is_meant: Callable[[Mapping[str, str]], bool]) -> None:
    """Kills until none is left: a process may start another while it is being looked for."""
    deadline = time.monotonic() + 30
    while found := _processes(is_meant):
        assert time.monotonic() < deadline, f"cannot kill {found}"
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
