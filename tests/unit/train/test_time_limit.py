"""When to stop, and when a checkpoint is due, on clocks of the test's own."""

import pytest

from distaccum.train.parts.time_limit import TimeLimit
from distaccum.train.saving import SaveClock


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def _run(max_time: float, window: float, save: float, *, parameters: int = 0, evaluation: float = 0.0) -> float:
    """Windows, with a save (and an evaluation) every tenth, until the limit is near; then what is not saved yet is.

    Returns the seconds that are left then.
    """
    clock = Clock()
    limit = TimeLimit(max_time, began=1000.0, parameters=parameters, now=clock)
    for number in range(1, 10_000):
        clock.seconds += window
        limit.window_ended()
        if number % 10 == 0:
            if evaluation:
                clock.seconds += evaluation
                limit.evaluated()
            clock.seconds += save
            limit.saved()
        if limit.is_near:
            return 1000.0 + max_time - clock.seconds - (save if number % 10 else 0)
    raise AssertionError


@pytest.mark.parametrize(("window", "save"), [(1.0, 0.5), (1.0, 20.0), (7.0, 3.0), (0.01, 5.0)])
def test_the_last_save_ends_in_time_and_not_much_time_is_given_away(window: float, save: float) -> None:
    left = _run(600, window, save)
    assert left >= 0
    assert left <= 3 * window + 2 * save  # where saves are frequent, the one that did not fit any more


def test_before_the_first_save_its_time_is_guessed_from_the_size() -> None:
    clock = Clock()
    limit = TimeLimit(100, began=1000.0, parameters=100_000_000, now=clock)  # 1.2 GB: 12 s, and half as much for luck
    clock.seconds += 80
    assert not limit.is_near
    clock.seconds += 2.5
    assert limit.is_near
    limit.saved()  # it took 82.5 s by this clock: what was measured counts
    clock.seconds = 1000.0
    assert limit.is_near


def test_an_evaluation_that_may_come_is_waited_for() -> None:
    assert _run(600, 1.0, 1.0, evaluation=50.0) >= 50


def test_start_up_counts_and_no_limit_is_never_near() -> None:
    clock = Clock()
    assert TimeLimit(10, began=985.0, parameters=0, now=clock).is_near
    assert not TimeLimit(None, began=0.0, parameters=0, now=clock).is_near


def test_rank_0_decides_and_all_know_it_after_the_same_count() -> None:
    first, second = Clock(), Clock()
    ranks = [SaveClock(60, decides=True, now=first), SaveClock(60, decides=False, now=second)]

    def count() -> list[bool]:
        sums = [sum(numbers) for numbers in zip(*(rank.outgoing(1, 1) for rank in ranks), strict=True)]
        for rank in ranks:
            rank.incoming(sums)
        return [rank.due for rank in ranks]

    second.seconds += 1000  # a clock that is set is nobody's business
    assert count() == [False, False]
    first.seconds += 59.9
    assert count() == [False, False]
    first.seconds += 0.1
    assert [rank.due for rank in ranks] == [False, False]
    assert count() == [True, True]
    assert count() == [True, True]  # until it is made
    for rank in ranks:
        rank.saved()
    assert count() == [False, False]
    first.seconds += 59
    for rank in ranks:
        rank.saved()  # any save counts
    first.seconds += 59
    assert count() == [False, False]


def test_what_was_saved_before_counts() -> None:
    clock = Clock()
    later = SaveClock(60, decides=True, ago=45, now=clock)
    clock.seconds += 14.9
    assert later.outgoing(1, 1) == [0.0]
    clock.seconds += 0.2
    assert later.outgoing(1, 1) == [1.0]
    later.saved()
    clock.seconds += 59
    assert later.outgoing(1, 1) == [0.0]
