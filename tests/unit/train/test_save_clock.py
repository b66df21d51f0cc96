"""When a checkpoint is due, on clocks of the test's own."""

from __future__ import annotations

from distaccum.train.saving import SaveClock


class Clock:
    """Seconds, moved by hand."""

    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


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
