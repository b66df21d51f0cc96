"""A model of many small tensors: what a start, a step and a save cost grows with their number, and no faster."""

from __future__ import annotations

import cProfile
import gc
import pstats
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import Callback, CrossEntropy, DataSpec, Trainer
from distaccum.accumulation.step import Outcome
from distaccum.checkpoint.tensors import storable
from distaccum.distributed.world import World
from distaccum.train.callbacks import Run
from distaccum.train.parts.checkpoints import Checkpoints
from tests.support.runs import settings

DATA = [(torch.full((4,), i / 16), torch.tensor(i % 3)) for i in range(16)]


class Many(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.small = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(size)])

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.head(batch) + 1e-6 * torch.cat(list(self.small)).sum()
        return out


class Phases(Callback):
    """Counts the Python calls of a start, of the step from the second update to the third, and of a save."""

    def __init__(self) -> None:
        self.phases = {name: cProfile.Profile() for name in ("start", "step", "save")}

    def on_update(self, run: Run, outcome: Outcome) -> None:
        self.phases["start"].disable()
        if run.progress.step == 2:
            self.phases["step"].enable()
        else:
            self.phases["step"].disable()

    def calls(self) -> Counter[str]:
        return Counter({name: pstats.Stats(one).total_calls for name, one in self.phases.items()})  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def others_garbage_stays() -> Iterator[None]:
    """Finalizers of what other tests have left are calls too, whenever the collector comes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _counted(folder: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], int]:
    """The Python calls by phase, and the all-reduces, of a run whose model has ``size`` small tensors."""
    phases, reduced, save, reduce = Phases(), list[World](), Checkpoints.save, World.all_reduce_

    def saves(self: Checkpoints, *given: Any, **named: Any) -> None:
        phases.phases["save"].enable()
        save(self, *given, **named)
        phases.phases["save"].disable()

    def reduces(self: World, tensor: Tensor) -> Tensor:
        reduced.append(self)
        return reduce(self, tensor)

    trainer = {"max_steps": 4, "eval_every": 0, "log_every": 1}
    config = settings((4, 2), trainer, save=4, checkpoint={"background": False}, metrics={"report": False})
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", saves)
        patch.setattr(World, "all_reduce_", reduces)
        model = Many(size)
        phases.phases["start"].enable()
        Trainer(model, CrossEntropy(), DataSpec(train=DATA), config=config, run_dir=folder, callbacks=[phases]).fit()
    return phases.calls(), len(reduced)


def test_each_tensor_costs_as_many_calls_and_no_collective(
    gloo_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof of the first window reduced tensor by tensor: 20,000 all-reduces."""
    _counted(tmp_path / "warm", 10, monkeypatch)  # imports
    found = [_counted(tmp_path / str(size), size, monkeypatch) for size in (100, 200, 300)]
    assert len({reduced for _, reduced in found}) == 1
    calls = [one for one, _ in found]
    most = {"start": 1250, "step": 40, "save": 210}  # of which 1,151, 34 and 186 were measured
    for name, limit in most.items():
        first, second = (calls[i + 1][name] - calls[i][name] for i in range(2))
        assert second / 100 < limit, name
        assert second == pytest.approx(first, rel=0.02), name  # linear


def _calls(act: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(act)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_views_of_one_storage_are_compared_with_their_neighbours_alone() -> None:
    """As an engine's that shards: each was compared with all before it."""
    views = {size: dict(enumerate(torch.zeros(2 * size).split(2))) for size in (200, 400)}
    counted = {size: _calls(lambda size=size: storable({str(i): v for i, v in views[size].items()})) for size in views}  # type: ignore[misc]
    assert counted[400] / counted[200] == pytest.approx(2, rel=0.05)
    whole = torch.arange(6.0)
    tied = {"a": whole, "b": whole[2:4], "c": whole[4:], "d": whole, "e": whole.new_ones(2), "f": whole[3:5]}
    stored, _ = storable(tied)
    assert all(torch.equal(stored[name], tensor) for name, tensor in tied.items())
    places = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in stored.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    assert list(stored) == list(tied)
