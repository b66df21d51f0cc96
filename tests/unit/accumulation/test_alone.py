"""A collective that some ranks call and others do not is an error on all of them, and none waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from distaccum.data.counter import GlobalCounter
from distaccum.distributed.activity import Activity
from distaccum.errors import MisuseError, PeerError


class _Together:
    """Two ranks as two threads: each collective meets whichever the other one is in, as with gloo."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=10)
        self._given: list[Any] = [None, None]

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._given[rank] = value
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given


class _Rank:
    size = 2

    def __init__(self, rank: int, together: _Together) -> None:
        self.rank, self._together, self.activity = rank, together, Activity()

    def all_reduce_host(self, numbers: Any) -> list[float]:
        first, second = self._together.exchange(self.rank, list(numbers))
        assert len(first) == len(second)  # gloo would wait, or write past the end
        return [a + b for a, b in zip(first, second, strict=True)]

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._together.exchange(self.rank, value)

    def all_gather_names(self, names: Any) -> tuple[str, ...]:
        return tuple(sorted({name for given in self.all_gather_object(list(names)) for name in given}))


def _on_two_ranks(run: Callable[[Any], Any]) -> list[Any]:
    together = _Together()

    def outcome(rank: int) -> Any:
        try:
            return run(_Rank(rank, together))
        except (MisuseError, PeerError) as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(outcome, range(2)))


@pytest.mark.parametrize("counts", [1, {"a": 1, "b": 2}], ids=["one loss", "two losses"])
def test_a_collective_of_one_rank_alone_is_an_error_on_both(counts: Any) -> None:
    """``if acc.world.is_main: print(acc.mean_loss())`` made both ranks wait for each other."""
    width = 1 if isinstance(counts, int) else 2

    def run(world: Any) -> Any:
        counter = GlobalCounter(world, lambda _: counts)
        counter.all_reduce([counter.micro_batch(None)])
        assert counter.sum_together("mean_loss()", [1.0 + world.rank] * width) == [3.0] * width  # on both
        assert counter.sum_together("state_dict()") == []
        assert counter.sum_together("other()", [1.0] * (width + 3)) == [2.0] * (width + 3)
        if world.rank == 0:
            counter.sum_together("mean_loss()", [1.0] * width)
        return counter.all_reduce([counter.micro_batch(None)])

    found = _on_two_ranks(run)
    assert [type(error) for error in found] == [MisuseError, PeerError]
    for error in found:
        assert "mean_loss() was called on some ranks alone" in str(error)
        assert "`value = acc.mean_loss()` before `if acc.world.is_main:`" in str(error)


@pytest.mark.parametrize("late", [True, False])
def test_counts_known_late_meet_it_too(late: bool) -> None:
    def run(world: Any) -> Any:
        counter = GlobalCounter(world, None if late else lambda _: 1)
        batches = [] if late else [counter.micro_batch(None)]
        counter.all_reduce(batches)
        assert counter.sum_together("mean_loss()", [2.0]) == [4.0]
        if world.rank == 1:
            counter.sum_together("mean_loss()", [2.0])
        return counter.all_reduce(batches)

    assert sorted(type(error).__name__ for error in _on_two_ranks(run)) == ["MisuseError", "PeerError"]
