"""The soak's schedule: the same for a seed, every kind of fault in it, each where it can happen."""

from itertools import islice, pairwise

import pytest

from launch.soak.injections import KNOWN
from launch.soak.schedule import COURSES, KINDS, ROUND, Fault, Round, schedule

ROUNDS = 8  # 64 faults: what twenty minutes have to hold
SEEDS = (1, 2, 3)


def _rounds(seed: int) -> list[Round]:
    return list(islice(schedule(seed), ROUNDS))


def _faults(seed: int) -> list[Fault]:
    return [fault for played in _rounds(seed) for fault in played.faults]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_is_a_schedule(seed: int) -> None:
    assert _rounds(seed) == _rounds(seed)
    assert _rounds(seed) != _rounds(seed + 1)
    faults = _faults(seed)
    assert [fault.number for fault in faults] == list(range(1, ROUNDS * ROUND + 1))
    assert faults[10].random().random() == faults[10].random().random()
    assert len({fault.random().random() for fault in faults}) == len(faults)


@pytest.mark.parametrize("seed", SEEDS)
def test_twenty_minutes_have_every_kind_and_every_course(seed: int) -> None:
    assert {fault.kind for fault in _faults(seed)} == KINDS.keys()
    assert {played.course.name for played in _rounds(seed)} == COURSES.keys()


@pytest.mark.parametrize("seed", range(50))
def test_a_fault_comes_where_it_can_happen(seed: int) -> None:
    for played in _rounds(seed):
        for fault in played.faults:
            kind = KINDS[fault.kind]
            assert fault.moment in kind.moments
            assert not kind.needs or kind.needs in played.course.has


def test_schedules_are_not_of_one_kind() -> None:
    """A kind may follow itself, but not for a whole round."""
    for seed in SEEDS:
        kinds = [fault.kind for fault in _faults(seed)]
        assert sum(one == other for one, other in pairwise(kinds)) < ROUND


def test_every_kind_can_be_injected() -> None:
    assert KINDS.keys() == KNOWN
