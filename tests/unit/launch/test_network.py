"""The figures of the two-host bench, from windows that are made up: which host counts, and what is paired with what."""

import pytest

from launch.bench.network.main import alone, of_count, paired
from launch.bench.network.tables import window_rows


def test_a_window_is_paired_with_the_other_loops_of_the_same_turn() -> None:
    ours = [[1.0, 9.0, 3.0], [2.0, 4.0, 1.0]]  # by host: the slower one's windows are 2, 9 and 3 s
    theirs = [[1.0, 1.0, 1.0], [1.0, 6.0, 4.0]]  # 1, 6 and 4 s
    assert paired(ours, theirs) == pytest.approx(1.5)  # of 2, 1.5 and 0.75


def test_a_count_costs_what_the_last_host_to_come_waits() -> None:
    found = of_count([[0.001, 0.050, 0.003], [0.040, 0.002, 0.060]])  # a window's other host waits for that one
    assert found == pytest.approx({"count_last_ms": 2.0, "count_first_ms": 50.0, "count_best_ms": 1.0})
    assert of_count([[], []]) == {}  # a loop without counts


def test_the_table_has_the_counts_share_of_a_window() -> None:
    row = {"seconds": 0.5, "forecast": 0.4, "error": -0.2, "over no_sync": 1.02, "bytes": 1024, "gradient bytes": 1024}
    counted = {**row, "count_last_ms": 5.0, "alone_ms": 0.5, "alone_p10_ms": 0.25}
    head, by_hand, ours = window_rows({"ways": {"hand-written, no_sync": row, "distaccum": counted}})
    for line, counts in ((ours, ("5.00 ms, 1.00%", "0.50 / 0.25 ms")), (by_hand, ("", ""))):
        cells = dict(zip(head, line, strict=True))
        assert (cells["count"], cells["alone / p10"]) == counts


def test_counts_alone() -> None:
    first = [0.001 * number for number in range(1, 21)]
    assert alone([first, [1.0] * 20]) == pytest.approx({"alone_ms": 10.5, "alone_p10_ms": 3.0})
    assert alone([[], []]) == {}
