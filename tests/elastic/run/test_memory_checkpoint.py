"""Checkpoints in memory: what is kept is what comes back, whole, from those who are left."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint.state import RunState
from distaccum.distributed.random import RNGState
from distaccum.distributed.world import World
from distaccum.elastic.group.mirrors import Mark
from distaccum.elastic.group.views import Report, View
from distaccum.elastic.run import memory_checkpoint
from distaccum.elastic.run.carried import NOT_BEGUN, Carried
from distaccum.elastic.run.memory_checkpoint import MemoryCheckpoints
from distaccum.engines.base import EngineState
from distaccum.errors import PeerError
from tests.support.threads import run_ranks

ODD = {
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "nothing": torch.zeros(0, 3),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
}


def _share(window: int, model: dict[str, Tensor], optimizer: dict[str, Tensor], rank: int = 0) -> Carried:
    return Carried(
        run=RunState(
            progress=Progress(window=window, step=window), position={}, wandb_id="x", config={}, callbacks={"a": {}}
        ),
        engine=EngineState(model=model, optimizer=optimizer, optimizer_values={str(rank): rank}, scaler={"scale": 2.0}),
        average={f"average {rank}": torch.full((3,), float(rank))},
        saved_step=window - 1,
        evaluation=(window, {"loss": 1.0}),
        verified=True,
        stop="enough" if rank == 1 else "",
        random=RNGState.capture(),
    )


def _same(mine: dict[str, Any], other: dict[str, Any]) -> bool:
    return mine.keys() == other.keys() and all(
        one.dtype == other[name].dtype and one.shape == other[name].shape and one.equal(other[name])
        for name, one in mine.items()
    )


def test_bytes_give_back_what_was_packed_and_no_view_of_it() -> None:
    share = _share(7, ODD, {"one": torch.ones(2)})
    packed = memory_checkpoint._packed(share)
    found = memory_checkpoint._unpacked(packed.clone())
    assert _same(dict(found.engine.model), ODD)
    assert replace(found, engine=share.engine, average=None) == replace(share, average=None, random=None)
    before = packed.clone()
    found.engine.model["half"].zero_()
    assert packed.equal(before)


def test_one_is_due_every_few_windows_and_after_a_checkpoint_on_disk() -> None:
    memory = MemoryCheckpoints(4)
    memory.enter(View(generation=0, members=("0.0.1",)), World(rank=0, size=1, device=torch.device("cpu")))
    assert memory.report("0.0.1").position == NOT_BEGUN
    memory.take(lambda: _share(5, {}, {}))
    assert not memory.window_ended(8, 4)
    assert memory.window_ended(9, 4)
    assert memory.window_ended(6, 6)
    assert memory.report("0.0.1").position > NOT_BEGUN
    assert memory.report("0.0.1").note["reached"] == 6


def _keeps(world: World, *, size: int = 3) -> MemoryCheckpoints:
    memory = MemoryCheckpoints(4)
    memory.enter(View(generation=0, members=tuple(f"0.{rank}.1" for rank in range(size))), world)
    rank = world.rank
    for window in (4, 8):
        tensors = {f"weight {rank}": torch.full((rank + 2, 3), float(window + rank))}
        memory.take(partial(_share, window, tensors, {f"moment {rank}": ODD["half"]}, rank))
    return memory


def test_those_who_are_left_have_the_whole_state() -> None:
    kept = run_ranks(3, _keeps)
    left = [one for rank, one in enumerate(kept) if rank != 1]
    assert all(isinstance(one, MemoryCheckpoints) for one in left)
    view = View(generation=1, members=("0.0.1", "0.2.1", "0.1.2"))
    reports = {member: one.report(member) for member, one in zip(view.members, left, strict=False)}  # type: ignore[union-attr]
    reports["0.1.2"] = Report(member="0.1.2", position=-1)

    def back(world: World) -> Carried:
        memory: Any = left[world.rank] if world.rank < 2 else MemoryCheckpoints(4)
        memory.enter(view, world)
        found: Carried = memory.hand_over(view, reports)
        return found

    for rank, found in enumerate(run_ranks(3, back)):
        assert isinstance(found, Carried), found
        assert sorted(found.engine.model) == ["weight 0", "weight 1", "weight 2"]
        assert found.engine.model["weight 1"].equal(torch.full((3, 3), 9.0))
        assert sorted(found.engine.optimizer) == ["moment 0", "moment 1", "moment 2"]
        assert found.engine.optimizer_values == {"0": 0, "1": 1, "2": 2}
        assert found.average is not None
        assert sorted(found.average) == ["average 0", "average 1", "average 2"]
        assert (found.stop, found.run.progress.window) == ("enough", 8)
        assert (found.random is None) == (rank == 2)


def test_two_are_kept_until_all_have_the_newer_one() -> None:
    for memory in run_ranks(3, _keeps):
        assert isinstance(memory, MemoryCheckpoints)
        assert [one.mark.window for one in memory._kept] == [4, 8]
        assert not memory.window_ended(9, 7)
        assert [one.mark for one in memory._kept] == [Mark(window=8, generation=0, step=8, ranks=3)]


def test_what_comes_damaged_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = run_ranks(2, lambda world: _keeps(world, size=2))
    view = View(generation=1, members=("0.0.1", "0.1.2"))
    first: Any = kept[0]
    reports = {"0.0.1": first.report("0.0.1"), "0.1.2": Report(member="0.1.2", position=-1)}
    send, shares = torch.distributed.broadcast, list[Tensor]()

    def damaged(tensor: Tensor, *args: Any, **named: Any) -> Any:
        done = send(tensor, *args, **named)
        if tensor.dtype is torch.uint8 and torch.distributed.get_rank() == 1:
            shares.append(tensor)
            if len(shares) == 2:  # the last: the other rank waits for nothing more
                tensor[-1] += 1
        return done

    def back(world: World) -> Carried:
        memory = first if world.rank == 0 else MemoryCheckpoints(4)
        memory.enter(view, world)
        found: Carried = memory.hand_over(view, reports)
        return found

    monkeypatch.setattr(memory_checkpoint.dist, "broadcast", damaged)
    assert isinstance(run_ranks(2, back)[1], PeerError)
