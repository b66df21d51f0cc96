"""What elastic runs of tests are made of, named by ``_target_``; it fails where the variable ``TEST_FAULTS`` says.

The variable holds a JSON list of ``[member, phase, at, how]``. A fault comes once in a process, in the first such phase
after ``at`` windows, or at the view that follows generation ``at``. ``how`` is ``kill``, ``stop``, ``raise``, ``nan``,
``leave`` or ``exit``; or ``await NAME``: it goes on once that file is in ``TEST_FOLDER``, and ``ready-MEMBER`` is there
when a newcomer waits to join. A member of ``*`` is each of them.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distaccum.accumulation.step import Outcome
from distaccum.checkpoint.store import CheckpointStore
from distaccum.data.spec import DataSpec
from distaccum.elastic.engine import mirror
from distaccum.elastic.group.member import Member
from distaccum.elastic.group.membership import Membership
from distaccum.elastic.run import going_on
from distaccum.elastic.run.in_place import InPlace
from distaccum.elastic.run.memory_checkpoint import MemoryCheckpoints
from distaccum.engines.ddp import tree
from distaccum.engines.ddp.zero1 import ZeRO1
from distaccum.tools import diagnose
from distaccum.train import run
from distaccum.train.callbacks import Callback, Run
from distaccum.train.metrics.loggers import JsonlLogger
from distaccum.train.metrics.meter import Meter

FEATURES, CLASSES = 12, 5
_FOLDER = Path(os.environ.get("TEST_FOLDER", "."))


class _Faults:
    """Those of this process, and how far it is."""

    def __init__(self) -> None:
        self.member = os.environ.get("DISTACCUM_MEMBER", "")
        asked = json.loads(os.environ.get("TEST_FAULTS", "[]")) if self.member else []
        self._left = [fault for fault in asked if fault[0] in (self.member, "*")]
        self.windows: int | None = 0 if self.member.endswith(".1") else None
        self.generation, self.armed = -1, False

    def at(self, phase: str, now: int | None = None) -> bool:
        """Does what is due; returns whether the caller is to give NaN."""
        now = self.windows if now is None else now
        for fault in self._left:
            if fault[1] != phase or now is None or now < fault[2]:
                continue
            self._left.remove(fault)
            return self._do(fault[3])
        return False

    def _do(self, how: str) -> bool:
        if how in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        elif how == "raise":
            raise ValueError("asked to fail")
        elif how == "leave":
            sys.exit("asked to leave")
        elif how == "exit":
            os._exit(7)
        elif how.startswith("await "):
            while not (_FOLDER / how.removeprefix("await ")).exists():
                time.sleep(0.01)
            time.sleep(1)  # until everybody has looked
        return how == "nan"


_FAULTS = _Faults()


def _around(owner: Any, name: str, before: str = "", after: str = "", of: Callable[..., int] | None = None) -> None:
    inner = getattr(owner, name)

    @wraps(inner)
    def outer(*args: Any, **named: Any) -> Any:
        now = None if of is None else of(*args, **named)
        if before:
            _FAULTS.at(before, now)
        found = inner(*args, **named)
        if after:
            _FAULTS.at(after, now)
        return found

    setattr(owner, name, outer)


def _hook(phase: str) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        _FAULTS.at(phase)

    return hook


def _arm() -> None:
    """Wraps what the phases are parts of, in a worker alone."""
    _around(dist, "all_reduce", "count")
    _around(dist, "all_to_all_single", "reduction", "sent")
    _around(tree, "_all_gather", "gathering", "gathered")
    _around(ZeRO1, "broadcast", "broadcast")
    _around(mirror, "_send", "exchange", "exchanging")
    _around(mirror.Mirror, "exchange", "", "exchanged")
    _around(mirror.Mirror, "commit", "broadcasted", "committed")
    register_optimizer_step_pre_hook(_hook("step"))
    register_optimizer_step_post_hook(_hook("stepped"))
    _around(Meter, "record", "recording", "recorded")
    _around(JsonlLogger, "log", "log", "logged")
    _around(diagnose, "diagnose", "diagnosis")
    _around(CheckpointStore, "begin", "", "save")
    _around(CheckpointStore, "publish", "publish", "published")
    _around(Member, "next_view", "leaving", of=lambda _, view, report: -1 if view is None else view.generation)
    _around(Membership, "_decide", "deciding", "decided", of=lambda _, view: view.generation - 1)
    _around(Membership, "open_group", "group", "formed", of=lambda _, view: view.generation - 1)
    _around(Membership, "say_ready", after="ready", of=lambda _: (_FOLDER / f"ready-{_FAULTS.member}").touch() or 0)
    _around(going_on, "hand_over", "hand over", "handed over", of=lambda view, *_: view.generation - 1)
    _around(mirror, "dealt", "dealing", "dealt", of=lambda share, wanted, *_, **__: 4 - len(wanted))
    _around(MemoryCheckpoints, "take", "keeping", "kept")
    _around(MemoryCheckpoints, "_exchanged", "exchanging", "exchanged")
    _around(InPlace, "begin", "going back", "went back", of=lambda _, saved, view, *__: view.generation - 1)
    _around(run, "build_accumulator", after="in", of=lambda *_, **__: (_FOLDER / f"in-{_FAULTS.member}").touch() or 0)
    _around(run, "build_accumulator", "", "built")
    _around(Member, "end", "ending", "ended")


class Samples:
    """Random points by their number."""

    def __init__(self, size: int, seed: int, delay_s: float = 0.0) -> None:
        self._size, self._seed, self._delay_s = size, seed, delay_s

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        _FAULTS.at("loading" if not self._seed else "evaluation data")
        if self._delay_s:
            time.sleep(self._delay_s)
        point = torch.randn(FEATURES, generator=torch.Generator().manual_seed(10_000 * self._seed + index))
        return point, (point[:CLASSES] + 0.3 * point[CLASSES : 2 * CLASSES]).argmax()


def data(*, delay_s: float = 0.0, size: int = 131, held_out: int = 23) -> DataSpec:
    """Two sets of points; each takes ``delay_s`` to read."""
    if _FAULTS.member and not _FAULTS.armed:
        _FAULTS.armed = True
        _arm()
    _FAULTS.at("starting", 0)
    return DataSpec(
        train=Samples(size, 0, delay_s), eval_dataset=Samples(held_out, 1), description="points", ignored={1: -100}
    )


class Net(nn.Module):
    """Two layers, dropout, and a buffer that counts nothing."""

    def __init__(self, *, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width), nn.GELU()
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        is_nan = _FAULTS.at("forward" if self.training else "evaluation")
        logits: Tensor = self.head(self.layers(points))
        if logits.requires_grad:
            logits.register_hook(_hook("backward"))
        return logits * float("nan") if is_nan else logits


class Told(Callback):
    """Notes how far the run is, and how many updates it was told of, in a state of its own."""

    def __init__(self) -> None:
        self.updates = self.evaluations = 0

    def on_update(self, run: Run, outcome: Outcome) -> None:
        _FAULTS.windows = run.progress.window
        _FAULTS.at("update")
        self.updates += 1

    def on_skip(self, run: Run, outcome: Outcome) -> None:
        _FAULTS.windows = run.progress.window
        _FAULTS.at("skip")

    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        _FAULTS.at("on_eval")
        self.evaluations += 1

    def on_checkpoint(self, run: Run, path: Path) -> None:
        _FAULTS.at("on_checkpoint")

    def on_end(self, run: Run, results: Mapping[str, float]) -> None:
        _FAULTS.at("on_end")

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "evaluations": self.evaluations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates, self.evaluations = state["updates"], state["evaluations"]
