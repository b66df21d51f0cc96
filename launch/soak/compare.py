"""Whether a disturbed run has become what the undisturbed one is: its records, its weights, its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import state
from distaccum.tools.verify import inspect
from distaccum.train.metrics.loggers import MEASURED
from launch.soak.attempt import status_of
from launch.soak.run import STEPS, step_of

_BELONGS = {
    "deepspeed.json",
    "environment.json",
    "report.html",
    ".hydra",
    "checkpoints",
    "history.json",
    "metrics.jsonl",
    "metrics.superseded.jsonl",
    "plan.json",
    "status.json",
    "logs",
    "hang",
    "wandb",
}
_TIMES = 10  # what undisturbed runs on other numbers of ranks differ by
_COUNTS = {"eval_accuracy"}  # steps of a whole sample, which the loss beside it says finer


@dataclass(frozen=True)
class Result:
    """What a run has left: records by update, tensors of the last checkpoint, where its progress stood."""

    records: list[dict[str, Any]]
    superseded: list[dict[str, Any]]
    tensors: dict[str, Tensor]
    progress: Progress


@dataclass(frozen=True)
class Bounds:
    """The largest differences allowed: relative of a record's numbers, and of a tensor's norm; 0 for no bit."""

    records: float = 0.0
    tensors: float = 0.0


@dataclass
class Reference:
    """The undisturbed run of a course, and what other numbers of ranks make of it."""

    result: Result
    others: list[Result] = field(default_factory=list)

    def bounds(self, worlds: set[int], own: int) -> Bounds:
        """No bit on one number of ranks. On several, the order of sums changes where the run is resumed.

        That is what a run on another number of ranks does from its first window on, so several times as much as those
        differ by is allowed.
        """
        if worlds == {own}:
            return Bounds()
        apart = [distances(other, self.result) for other in self.others]
        records, tensors = max(one.records for one in apart), max(one.tensors for one in apart)
        return Bounds(records=_TIMES * records, tensors=_TIMES * tensors)


def read(folder: Path) -> Result:
    """What is in a run directory whose run is done."""
    last = max((path for path in (folder / "checkpoints").glob("step-*")), key=step_of)
    tensors: dict[str, Tensor] = {}
    for file in sorted(last.rglob("*.safetensors")):
        tensors |= {f"{file.name.split('-')[0].split('.')[0]}/{name}": t for name, t in load_file(file).items()}
    superseded = _records(folder / "metrics.superseded.jsonl", damaged=True)
    return Result(_records(folder / "metrics.jsonl"), superseded, tensors, state.read(last).run.progress)


def _records(path: Path, *, damaged: bool = False) -> list[dict[str, Any]]:
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            if not damaged:
                raise
        else:
            found.append({key: value for key, value in record.items() if key not in MEASURED})
    return found


def problems(folder: Path, reference: Result, bounds: Bounds, *, damaged: Collection[str] = ()) -> Iterator[str]:
    """What is wrong with a run directory whose run has ended; ``damaged`` names checkpoints that are by intent."""
    status = status_of(folder)
    if status != {"state": "done", "step": STEPS, "reason": ""}:
        yield f"status.json says {status}"
        return
    result = read(folder)
    steps = [record["step"] for record in result.records]
    if steps != list(range(1, STEPS + 1)):
        yield f"metrics.jsonl has the updates {steps}"
        return
    yield from _record_problems(result.records, reference.records, bounds.records, "metrics.jsonl")
    by_step = {record["step"]: record for record in reference.records}
    repeated = [record for record in result.superseded if record["step"] in by_step]
    expected = [by_step[record["step"]] for record in repeated]
    yield from _record_problems(repeated, expected, bounds.records, "metrics.superseded.jsonl")
    yield from _tensor_problems(result.tensors, reference.tensors, bounds.tensors)
    if result.progress != reference.progress:
        yield f"progress is {result.progress}, that of the undisturbed run {reference.progress}"
    yield from _leftovers(folder)
    for finding in inspect(folder):
        if not finding.whole and finding.name not in damaged:
            yield f"distaccum verify: {finding.name} {finding.text}"


def _record_problems(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], bound: float, where: str
) -> Iterator[str]:
    for mine, right in zip(ours, theirs, strict=True):
        if mine.keys() != right.keys():
            yield f"{where}: step {mine['step']} has the keys {sorted(mine.keys() ^ right.keys())} or lacks them"
            return
        compared = mine.keys() - (_COUNTS if bound else set())
        off = {key: (mine[key], right[key]) for key in compared if _distance(mine[key], right[key]) > bound}
        if off:
            yield f"{where}: step {mine['step']} differs from the undisturbed run's by more than {bound:.1e}: {off}"
            return


def _tensor_problems(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> Iterator[str]:
    if ours.keys() != theirs.keys():
        yield f"the last checkpoint has other tensors: {sorted(ours.keys() ^ theirs.keys())}"
        return
    off = [name for name in ours if not _close(ours[name], theirs[name], bound)]
    if off:
        worst = tensor_distance(ours, theirs)
        yield f"{len(off)} of {len(ours)} tensors differ by up to {worst:.1e}, allowed {bound:.1e}: {off[:3]}"


def _close(mine: Tensor, right: Tensor, bound: float) -> bool:
    if mine.dtype != right.dtype or mine.shape != right.shape:
        return False
    if bound == 0:
        return torch.equal(mine.flatten().view(torch.uint8), right.flatten().view(torch.uint8))
    return _off(mine, right) <= bound


def _off(mine: Tensor, right: Tensor) -> float:
    mine, right = mine.double(), right.double()
    norm = float(right.norm())
    return float((mine - right).norm()) / norm if norm else float((mine - right).norm())


def distances(ours: Result, theirs: Result) -> Bounds:
    """How far two runs are apart."""
    records = record_distance(ours.records, theirs.records)
    return Bounds(records=records, tensors=tensor_distance(ours.tensors, theirs.tensors))


def record_distance(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """The largest relative distance of two numbers of the same record."""
    return max(_distance(m[key], r[key]) for m, r in zip(ours, theirs, strict=True) for key in r.keys() - _COUNTS)


def tensor_distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of two tensors, relative to their norm."""
    return max(_off(ours[name], right) for name, right in theirs.items())


def _distance(mine: Any, right: Any) -> float:
    if mine == right:
        return 0.0
    if isinstance(mine, float) and isinstance(right, float) and right:
        return abs(mine / right - 1)
    return math.inf


def _leftovers(folder: Path) -> Iterator[str]:
    left = {path.name for path in folder.iterdir()} - _BELONGS
    left |= {path.name for path in (folder / "checkpoints").glob(".*")}
    if left:
        yield f"left behind: {', '.join(sorted(left))}"
