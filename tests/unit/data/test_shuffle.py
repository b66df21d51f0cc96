from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from distaccum.data.plan.shuffle import Shuffle


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1023, 1024, 1025, 50_000])
def test_it_is_a_permutation(samples: int) -> None:
    ids = Shuffle(samples, seed=3, epoch=1)(np.arange(samples))
    assert sorted(ids.tolist()) == list(range(samples))


def test_it_depends_on_seed_and_epoch_and_nothing_else() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return Shuffle(1000, seed=seed, epoch=epoch)(np.arange(1000)).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_a_lookup_is_the_same_alone_as_among_others() -> None:
    shuffle = Shuffle(1000, seed=0, epoch=0)
    whole = shuffle(np.arange(1000))
    assert [int(shuffle(np.array([i]))[0]) for i in range(0, 1000, 77)] == whole[::77].tolist()


@pytest.mark.slow
def test_every_position_receives_every_sample_about_equally_often() -> None:
    samples, trials = 20, 4000
    counts = np.zeros((samples, samples))
    for epoch in range(trials):
        counts[np.arange(samples), Shuffle(samples, seed=1, epoch=epoch)(np.arange(samples))] += 1
    expected = trials / samples
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (samples - 1) ** 2
    assert abs(chi_square - freedom) < 6 * np.sqrt(2 * freedom)  # six standard deviations of the chi-square law


def test_neighbours_part() -> None:
    ids = Shuffle(100_000, seed=0, epoch=0)(np.arange(100_000))
    assert np.mean(np.abs(np.diff(ids)) == 1) < 1e-3


def test_a_billion_samples_cost_nothing_to_hold() -> None:
    tracemalloc.start()
    ids = Shuffle(10**12, seed=0, epoch=0)(np.arange(64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(ids.tolist())) == 64
    assert ids.min() >= 0
    assert ids.max() < 10**12
    assert peak < 100_000
