"""The rank that the others wait for is named, from times that ride in the count."""

from __future__ import annotations

import logging
import time

import pytest
import torch

from distaccum.data.counter import GlobalCounter
from distaccum.data.hooks import Hooks, WindowHook
from distaccum.distributed.world import World
from distaccum.errors import MisuseError
from distaccum.tools.stragglers import WINDOWS, Stragglers


def _ranks(size: int) -> tuple[list[World], list[Stragglers]]:
    worlds = [World(rank=rank, size=size, device=torch.device("cpu")) for rank in range(size)]
    return worlds, [Stragglers(world, forward_communicates=False) for world in worlds]


def _windows(worlds: list[World], ranks: list[Stragglers], loading: list[float], computing: list[float]) -> None:
    for _ in range(WINDOWS + 2):
        given = []
        for world, rank, loads, computes in zip(worlds, ranks, loading, computing, strict=True):
            now = time.perf_counter()
            world.activity.counted_at, world.activity.arrived_at = now - 1, now - 1 + computes
            world.activity.loading_at = now - loads
            given.append(rank.outgoing(4, 1))
        for rank in ranks:
            rank.incoming([sum(numbers) for numbers in zip(*given, strict=True)])


@pytest.mark.parametrize(
    ("loading", "computing", "what"),
    [([0.01, 0.01, 0.3], [0.1, 0.1, 0.1], "loading data"), ([0.01] * 3, [0.1, 0.1, 0.2], "its forwards and backwards")],
)
def test_a_slow_rank_is_named_once_with_what_is_slow(
    loading: list[float], computing: list[float], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    worlds, ranks = _ranks(3)
    with caplog.at_level(logging.WARNING, "distaccum"):
        _windows(worlds, ranks, loading, computing)
        _windows(worlds, ranks, loading, computing)
    (record,) = caplog.records  # rank 0 alone speaks
    assert record.getMessage().startswith("rank 2 is slow: ")
    assert f"a window for {what}" in record.getMessage()
    for rank in ranks:
        assert rank.metrics["slowest_rank"] == 2
        assert rank.metrics["slowest_over_median"] > 1.5


def test_equal_ranks_and_differences_of_a_millisecond_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    worlds, ranks = _ranks(3)
    with caplog.at_level(logging.WARNING, "distaccum"):
        _windows(worlds, ranks, [0.01] * 3, [0.1, 0.12, 0.11])
        _windows(worlds, ranks, [0.0] * 3, [0.001, 0.001, 0.003])
    assert not caplog.records


def test_a_collective_of_the_programs_own_in_the_counts_place_is_refused() -> None:
    _, ranks = _ranks(2)
    given = ranks[0].outgoing(4, 1)
    with pytest.raises(MisuseError, match="has met a collective that this program calls on some ranks only"):
        ranks[0].incoming([number + 5 for number in given])


def test_each_hook_gets_its_own_numbers(gloo_world: World) -> None:
    got: dict[str, list[float]] = {}

    class Carries(WindowHook):
        def __init__(self, name: str, numbers: list[float]) -> None:
            self._name, self._numbers = name, numbers

        def outgoing(self, micro_batches: int, losses: int) -> list[float]:
            return [*self._numbers, float(micro_batches + losses)]

        def incoming(self, sums: list[float]) -> None:
            got[self._name] = sums

    counter = GlobalCounter(gloo_world, None)
    counter.hooks = Hooks(Carries("a", [1.0, 2.0]), Carries("b", []))
    assert counter.all_reduce([], [5.0]) == ({}, [5.0])
    assert got == {"a": [1.0, 2.0, 0.0], "b": [0.0]}
