"""What the tests of Slurm run, and how they look at it."""

import sys
from pathlib import Path
from typing import Any

from tests.cluster.slurm.cluster import NODES, Cluster
from tests.support import wide
from tests.support.commands import ROOT, TINY, metrics

TRAIN = ROOT / "slurm" / "train.sbatch"
SWEEP = ROOT / "slurm" / "sweep.sbatch"
STEPS = 40
SETTINGS = (
    *TINY,
    "batch.global_size=10",
    "batch.micro_size=2",
    "metrics=jsonl",
    "trainer.log_every=1",
    "trainer.eval_every=0",
    "checkpoint.every=10",
    f"trainer.max_steps={STEPS}",
    wide.MODEL,
)
_EXACT = ("step", "window", "epoch", "loss", "grad_norm", "lr", "samples", "tokens")


def slow(seconds: float) -> tuple[str, ...]:
    """Overrides: a window takes milliseconds; where a test interrupts the run, each update waits so long."""
    return ("+callbacks.slow._target_=tests.cluster.slurm.slow_callback.Slow", f"+callbacks.slow.seconds={seconds}")


def submit(
    cluster: Cluster, *overrides: object, options: tuple[str, ...] = (), script: Path = TRAIN, **extra: str
) -> str:
    """A job of one process a node, in this interpreter's environment, on an idle cluster; returns its number."""
    for node in NODES:
        cluster.await_node(node)
    variables = {"NPROC": "1", "DISTACCUM_ENV": f"venv:{sys.prefix}"} | extra
    return cluster.submit(*options, script, *overrides, **variables)


def exact(run_dir: Path) -> list[list[Any]]:
    """What must not depend on interruptions, of every update."""
    return [[record.get(key) for key in _EXACT] for record in metrics(run_dir)]


def logs(run_dir: Path) -> dict[str, str]:
    """The nodes' logs by file name."""
    return {file.name: file.read_text() for file in (run_dir / "slurm").glob("*.log")}
