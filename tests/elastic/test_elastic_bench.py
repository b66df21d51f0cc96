"""The bench of elastic runs: in small, and what it makes of the notes of a run."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.bench.elastic.figures import Kill, of_kill, rate, work_lost
from launch.bench.elastic.notes import Step, Unit, note_step, note_unit, steps_of, units_of
from tests.support.commands import ROOT, environment


@pytest.mark.heavy
def test_a_kill_is_put_into_a_table_and_a_picture(tmp_path: Path) -> None:
    keys = ("ranks=2", "kills=1", "quiet_s=8", "every_s=8", "ways=[elastic]", "channels=4", f"out={tmp_path}")
    command = [sys.executable, str(ROOT / "launch" / "bench"), "elastic", *keys]
    given = environment(PYTHONPATH=str(ROOT))
    finished = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=200)
    assert "s to the next window" in finished.stdout
    assert (tmp_path / "elastic.md").read_text().strip() in finished.stdout
    assert (tmp_path / "elastic.png").exists()


def test_notes_are_read_back(tmp_path: Path) -> None:
    note_step(tmp_path, 3, 4)
    note_unit(tmp_path, b"a")
    note_unit(tmp_path, b"a")
    assert [(step.step, step.ranks) for step in steps_of(tmp_path)] == [(3, 4)]
    first, second = units_of(tmp_path)
    assert first.content == second.content
    assert first.time <= second.time


def test_of_a_kill_that_others_survive() -> None:
    """The window that was in flight ends as if nothing had happened; the next one is late and has fewer ranks."""
    steps = [Step(float(i), 7, i, 4) for i in range(1, 6)]
    steps += [Step(8.0, 8, 6, 3), Step(9.0, 8, 7, 3), Step(12.0, 8, 8, 4)]
    found = of_kill(Kill(4.5, 0, 7), 20.0, steps)
    assert found["window_s"] == 1.0
    assert found["reached"] == 5
    assert found["seconds"] == 3.5
    assert found["windows again"] == 0
    assert found["back"] == 7.5
    assert found["joining_s"] == 3.0


def test_of_a_kill_after_which_all_start_again() -> None:
    """Going on means a window that the run had not reached before."""
    steps = [Step(float(i), 7, i, 4) for i in range(1, 6)]
    steps += [Step(20.0 + i, 8, 2 + i, 4) for i in range(1, 6)]
    found = of_kill(Kill(5.5, 0, 7), 50.0, steps)
    assert found["first"] == 15.5
    assert found["windows again"] == 3
    assert found["seconds"] == 18.5
    assert found["joining_s"] is None


def test_work_lost_is_what_is_computed_twice() -> None:
    units = [Unit(1.0, 7, 1), Unit(2.0, 8, 2), Unit(3.0, 8, 1), Unit(9.0, 8, 2)]
    assert work_lost(units, 2.5, 5.0) == 1


@pytest.mark.parametrize(("shrinks", "samples"), [(False, 120.0), (True, 110.0)])
def test_rate_counts_what_is_new(*, shrinks: bool, samples: float) -> None:
    steps = [Step(1.0, 7, 1, 4), Step(2.0, 7, 2, 4), Step(3.0, 8, 2, 4), Step(4.0, 8, 3, 3), Step(5.0, 8, 4, 4)]
    assert rate(steps, 1.5, 11.5, 400, 4, shrinks=shrinks) == pytest.approx(samples)
