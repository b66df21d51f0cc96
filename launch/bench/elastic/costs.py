"""What an elastic run costs where nobody dies, beside torchrun's: the same windows, in runs by turns.

Each run is alone in a network namespace (root), whose loopback counter says what its processes have sent. Rank 0 counts
collectives and Python calls in some windows, and the bytes of tensors at an optimizer's step; later ones are timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from distaccum.accumulation.step import Outcome
from distaccum.elastic.group.polled_group import PolledGroup
from distaccum.testing.counters import CollectiveCounter
from distaccum.train.callbacks import Callback, Run
from launch.bench.elastic.notes import steps_of
from launch.bench.memory import live_storages

BEGINS, COUNTED = 20, 10
"""The window after which collectives are counted in so many, and then Python calls in so many."""
TIMED_FROM = 50
ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""Before a command that is to run alone in a network namespace."""
_KINDS = {
    "allreduce": "all-reduce",
    "alltoall_base": "all-to-all",
    "allgather": "all-gather",
    "_allgather_base": "all-gather",
}
Figures = dict[str, Any]


class NoteCosts(Callback):
    """Counts on rank 0, and writes to ``folder/costs`` after window ``until``.

    Args:
        folder: of the run's notes.
        until: the last window that is timed.
    """

    def __init__(self, folder: str, until: int) -> None:
        self._path, self._until = Path(folder) / "costs", until
        self._counter = CollectiveCounter()
        self._found: Figures = {}
        self._held: list[int] = []
        self._remove: Callable[[], None] | None = None
        self._calls = 0

    def on_update(self, run: Run, _: Outcome) -> None:
        """Counts from this window on, or stops counting."""
        if dist.get_rank():
            return
        step = run.progress.step
        if step == BEGINS:
            self._counter.__enter__()  # type: ignore[no-untyped-call]
        elif step == BEGINS + COUNTED:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            sys.setprofile(self._note)
        elif step == BEGINS + 2 * COUNTED:
            sys.setprofile(None)
            self._found["collectives"] = {kind: n / COUNTED for kind, n in self._counter.calls.items()}
            self._found["payload"] = sum(self._counter.payload.values()) / COUNTED
            self._found["Python calls"] = self._calls / COUNTED
            hook = register_optimizer_step_pre_hook(lambda *_: self._held.append(sum(live_storages().values())))
            self._remove = hook.remove
        elif step == BEGINS + 2 * COUNTED + 1 and self._remove is not None:
            self._remove()
            self._found["bytes at a step"] = max(self._held)
        elif step == TIMED_FROM:
            self._found["sent"] = -_sent()
        elif step == self._until:
            self._found["sent"] = (self._found["sent"] + _sent()) / (self._until - TIMED_FROM)
            self._path.write_text(json.dumps(self._found))

    def _note(self, frame: Any, event: str, _: Any) -> None:
        self._calls += event == "call"
        if event == "call" and frame.f_code is PolledGroup.allreduce.__code__:  # which torch's dispatcher does not see
            operation, (given, *_) = frame.f_locals["name"], frame.f_locals["given"]
            size = sum(tensor.nbytes for tensor in tree_leaves(given) if isinstance(tensor, Tensor))
            kind = _KINDS.get(operation, operation) if size >= CollectiveCounter.SMALL else "control"
            self._counter.calls[kind] += 1
            self._counter.payload[kind] += size


def _sent() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def overrides(folder: Path, until: int) -> list[str]:
    """The settings by which a run counts."""
    name = "+callbacks.costs"
    target = f"{name}._target_=launch.bench.elastic.costs.NoteCosts"
    return [target, f"{name}.folder={folder.resolve()}", f"{name}.until={until}", f"trainer.max_steps={until}"]


def of_run(folder: Path) -> Figures:
    """The figures of one run."""
    times = [step.time for step in steps_of(folder) if step.step >= TIMED_FROM]
    windows = [after - before for before, after in pairwise(times)]
    found: Figures = json.loads((folder / "costs").read_text())
    return {**found, "min_s": min(windows), "median_s": median(windows)}


def rows(ranks: int, runs: dict[str, list[Figures]]) -> list[list[str]]:
    """A line for each way; ratios are those of pairs of runs, over the last way."""
    lines = []
    *_, (_, others) = runs.items()
    for name, own in runs.items():
        ratios = {
            key: median(one[key] / other[key] for one, other in zip(own, others, strict=True))
            for key in ("min_s", "median_s")
        }
        collectives = own[-1]["collectives"]
        lines.append(
            [
                str(ranks),
                name,
                *(f"{1e3 * median(one[key] for one in own):.1f}" for key in ("min_s", "median_s")),
                *(f"{ratio:.3f}" for ratio in ratios.values()),
                ", ".join(f"{n:g} {kind}" for kind, n in sorted(collectives.items())),
                f"{median(one['Python calls'] for one in own):,.0f}",
                *(f"{median(one[key] for one in own) / 2**10:,.0f}" for key in ("payload", "sent", "bytes at a step")),
            ]
        )
    return lines


HEAD = [
    "ranks",
    "way",
    "window, ms: min",
    "median",
    "over restart: min",
    "median",
    "collectives of a window",
    "Python calls",
    "KiB given to collectives",
    "KiB sent by all",
    "KiB of tensors at a step",
]
