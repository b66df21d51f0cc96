"""A job of a sweep on a Slurm node, where Hydra's submitit launcher calls it: starts torchrun on the same overrides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from distaccum.config.schema import as_typed
from distaccum.distributed.signals import ignore_user_signals
from distaccum.errors import DistaccumError
from distaccum.tools.sweeps import objective_of
from distaccum.train.run_dir import RunDir, State

_PORTS = range(20000, 30000)
_AGAIN_S = 2.0


class SubmititJob:
    """Called once on every node of a Slurm job, with one task a node; has no state, and so can be pickled.

    Raises:
        DistaccumError: torchrun failed; its output is in the job's log, the reason in ``status.json``.
    """

    def __call__(self, node: Any) -> Any:
        """Runs the job; returns its objective, None where it was stopped before its end."""
        hydra = HydraConfig.get()
        command = [*torchrun(os.environ), "-m", "distaccum.train", *_arguments(hydra)]
        sys.stdout.write(f"{' '.join(command)}\n")  # the job's log
        sys.stdout.flush()
        process = subprocess.Popen(command, preexec_fn=ignore_user_signals)  # noqa: PLW1509, S603  no threads here
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's: it requeues the job, and ends this process
        asked: list[int] = []
        signal.signal(signal.SIGUSR2, lambda number, _: asked.append(number))
        exit_code, folder = _wait(process, asked), hydra.runtime.output_dir
        if asked and callable(requeue) and RunDir(Path(folder)).state() in (None, State.PREEMPTED, State.RUNNING):
            requeue(asked[0], None)
        if exit_code:
            raise DistaccumError(f"{folder}: torchrun ended with {exit_code}; see its status.json, or the job's log")
        run_dir = RunDir(Path(folder))
        if run_dir.state() is not State.DONE:
            return None
        objective = node.get("objective")
        names = objective if objective is None or isinstance(objective, str) else list(objective)
        return objective_of(names, {}, run_dir.metrics)


def _wait(process: subprocess.Popen[bytes], asked: Sequence[int]) -> int:
    """Waits for the exit code. Once asked to leave, repeats that to the workers: one that is starting ignores it."""
    while True:
        try:
            return process.wait(_AGAIN_S)
        except subprocess.TimeoutExpired:
            if asked:
                _tell_workers(process.pid)


def _tell_workers(launcher: int) -> None:
    """Sends SIGUSR2 to torchrun's children, which Slurm's own signal does not reach; they save and leave."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) == launcher:
                os.kill(int(stat.parent.name), signal.SIGUSR2)


def torchrun(environment: Mapping[str, str]) -> list[str]:
    """torchrun's command line on this node, from Slurm's variables: ``NPROC`` processes, or one a GPU, or two."""
    nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
    processes = environment.get("NPROC") or environment.get("SLURM_GPUS_ON_NODE") or "2"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={processes}"]
    if nodes == 1:
        return [*command, "--standalone"]
    number, first = environment["SLURM_JOB_ID"], environment["SLURM_NODEID"] == "0"
    endpoint = (
        f"{_address(_show('hostnames', environment['SLURM_JOB_NODELIST'])[0])}:{_PORTS[int(number) % len(_PORTS)]}"
    )
    meeting = [f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=is_host={str(first).lower()},read_timeout=300"]
    own = f"--local-addr={_address(environment['SLURMD_NODENAME'])}"
    return [*command, "--rdzv-backend=c10d", f"--rdzv-id={number}", *meeting, own]


def _address(node: str) -> str:
    """The address by which Slurm reaches a node, whose name need not resolve."""
    words = _show("node", node, "--oneliner")
    return next(word.removeprefix("NodeAddr=") for word in words if word.startswith("NodeAddr="))


def _show(*what: str) -> list[str]:
    return subprocess.run(["scontrol", "show", *what], check=True, capture_output=True, text=True).stdout.split()  # noqa: S603, S607


def _arguments(hydra: Any) -> list[str]:
    """The overrides of this job, with the launcher's folder as run directory; it resumes after a requeue."""
    given: list[str] = as_typed(hydra.overrides.task)
    folders = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    where = [f"--config-dir={folder}" for folder in folders]
    folder = hydra.runtime.output_dir
    if RunDir(Path(folder)).holds_checkpoints():  # it resumes its own, whatever it started from
        given = [one for one in given if not one.startswith("resume=")]
    resume = [] if any(one.startswith("resume=") for one in given) else ["resume=auto"]
    return [*where, *given, *resume, f"hydra.run.dir={folder}"]
