"""Resumes and saves, one after the other, each with another file operation that fails; needs ``failing_io.c``.

``storage.py WHAT FOLDER ERROR TIMES STRIDE`` prints one JSON object for each cell: the operation, its number, how it
ended. ``resume``: a run of three updates goes on from its second, and a read fails. ``save``: the same, and a write
fails. ``kill``: the process that goes on is killed at an operation, and another one goes on from what is left. With
``BACKGROUND`` in the environment saves are made in the background.
"""

import json
import logging
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it, in each child again
from torch import nn

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.checkpoint import files
from distaccum.checkpoint.store import CheckpointStore
from distaccum.testing import single_process_world
from tests.support import failing_io
from tests.support.failing_io import ALWAYS, READS, WRITES
from tests.support.runs import settings

DATA = [(torch.full((4,), i / 16), torch.tensor(i % 3)) for i in range(16)]
STEPS = 3


def train(folder: Path, steps: int) -> None:
    """Goes on to so many updates, each saved."""
    trainer = {"max_steps": steps, "eval_every": 0, "log_every": 1}
    saves = {"every": 1, "keep": 2, "background": "BACKGROUND" in os.environ}
    config = settings((4, 4), trainer, checkpoint=saves, resume="auto")
    torch.manual_seed(0)
    Trainer(nn.Linear(4, 3), CrossEntropy(), DataSpec(train=DATA), config=config, run_dir=folder).fit()


def found(folder: Path) -> dict[str, Any]:
    """What lies in a run directory: whole checkpoints, records, leftovers."""
    records = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    newest = CheckpointStore(folder / "checkpoints", keep=0).newest_valid()
    last = newest.name if newest else ""
    weights = (newest / "model.safetensors").read_bytes().hex() if newest else ""
    return {"records": records, "checkpoints": checkpoints, "newest": last, "weights": weights}


def fresh(folder: Path) -> Path:
    """A copy of the run of two updates."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / "good", run)
    return run


def attempt(run: Path) -> str:
    try:
        train(run, STEPS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing(folder: Path, operations: int, error: int, times: int, stride: int) -> Iterator[dict[str, Any]]:
    """A cell for each ``stride``-th operation."""
    at = random.Random(operations + error).randint(1, stride)  # noqa: S311
    while True:
        run = fresh(folder)
        failing_io.arm(run, operations, error, at=at, times=times)
        said = attempt(run)
        if failing_io.disarm() < at:
            return
        status = json.loads((run / "status.json").read_text())
        cell = {"operations": operations, "at": at, "said": said, "status": status, **found(run)}
        yield cell | {"again": attempt(run), "after": found(run)}
        at += stride


def killed(folder: Path, stride: int) -> Iterator[dict[str, Any]]:
    """As :func:`failing`; a child goes on and is killed, then, while that one's rest lies there, another one."""
    at = random.Random(stride).randint(1, stride)  # noqa: S311
    while True:
        run = fresh(folder)
        deaths = [_child(run, at), _child(run, at)]
        if not os.WIFSIGNALED(deaths[0]):
            return
        between = found(run)
        ended = _child(run, 0)
        yield {"at": at, "between": between, "deaths": deaths, "ended": ended, **found(run)}
        at += stride


def _child(run: Path, at: int, steps: int = STEPS) -> int:
    """Goes on in a process of its own, and how that ended; it is killed at an operation of this number, if any."""
    child = os.fork()
    if child == 0:
        with single_process_world():
            if at:
                failing_io.arm(run, WRITES, failing_io.KILL, at=at, times=ALWAYS)
            train(run, steps)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main() -> None:
    """Prints the undisturbed run first."""
    what, folder, error, times, stride = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    logging.disable(logging.CRITICAL)
    files._PAUSES_S = (0.001,) * 3  # type: ignore[attr-defined, assignment]
    with redirect_stdout(sys.stderr):
        _child(folder / "good", 0, STEPS - 1)
        shutil.copytree(folder / "good", folder / "whole")
        _child(folder / "whole", 0)
        print(json.dumps(found(folder / "whole")), file=sys.__stdout__, flush=True)
        groups = READS if what == "resume" else (WRITES,)
        with nullcontext() if what == "kill" else single_process_world():
            for group in groups:
                made = killed(folder, stride) if what == "kill" else failing(folder, group, error, times, stride)
                for cell in made:
                    print(json.dumps(cell), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
