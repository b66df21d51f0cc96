"""Which views come no further than the ones before; what agents must be told, and the entry point they start."""

import sys
from pathlib import Path
from typing import Any

import pytest

from distaccum.config.trainer import ElasticConfig
from distaccum.elastic.engine.shares import LostStateError
from distaccum.elastic.group.polled_group import ViewChangedError
from distaccum.elastic.group.views import NEWCOMER, Report, View
from distaccum.elastic.run.checks import expect_told
from distaccum.elastic.run.joining import JoinsError
from distaccum.elastic.run.standstill import Standstill, StandstillError
from distaccum.errors import ConfigError
from tests.support.commands import ROOT, captured

OVERDUE = ViewChangedError("what another member owes has not come, and the others wait for 3 s (elastic.expel_after)")
CHANGED = ViewChangedError("a member has left the group of generation 1")


class Members:
    """Each has a part of its own in noticing."""

    def __init__(self, *names: str) -> None:
        self.names, self._parts = names, {name: Standstill(3.0) for name in names}

    def joined(self, name: str) -> None:
        self.names = (*self.names, name)
        self._parts[name] = Standstill(3.0)

    def ends(self, generation: int, overdue: str = "", **positions: int) -> list[bool]:
        """A view is left, in which one member has waited for too long; who of them ends the run with that."""
        reports = {}
        for name in self.names:
            self._parts[name].note(OVERDUE if name == overdue else CHANGED)
            report = Report(member=name, position=positions[name], held=((0, positions.get("held", 1)),))
            reports[name] = Report.from_json(self._parts[name].told_in(report).to_json())
        ended = []
        for name in self.names:
            try:
                self._parts[name].look_at(View(generation=generation, members=self.names), reports)
            except StandstillError:
                ended.append(True)
            else:
                ended.append(False)
        return ended


def test_all_end_the_run_once_one_has_waited_at_the_same_place_three_times() -> None:
    members = Members("a", "b")
    assert [members.ends(number, "ab"[number % 2], a=5, b=4) for number in range(3)] == [
        [False, False],
        [False, False],
        [True, True],
    ]


@pytest.mark.parametrize("last", [{"a": 6}, {"held": 2}, {"overdue": ""}], ids=str)
def test_who_comes_further_or_has_lost_somebody_goes_on(last: dict[str, object]) -> None:
    members = Members("a", "b")
    first = {"overdue": "a", "a": 5, "b": 4}
    for number in range(2):
        members.ends(number, **first)  # type: ignore[arg-type]
    assert members.ends(2, **(first | last)) == [False, False]  # type: ignore[arg-type]
    assert members.ends(3, **first) == [False, False]  # type: ignore[arg-type]


def test_who_has_joined_counts_as_the_others() -> None:
    members = Members("a", "b")
    for number in range(2):
        members.ends(number, "a", a=5, b=5)
    members.joined("c")
    assert members.ends(2, "", a=5, b=5, c=NEWCOMER) == [False] * 3
    ended = [members.ends(3 + number, "a", a=5, b=5, c=5) for number in range(3)]
    assert ended == [[False] * 3, [False] * 3, [True] * 3]


def test_members_that_are_left_behind_one_after_the_other_end_the_run_too() -> None:
    members = Members("a", "b", "c", "d")
    ended = list[list[bool]]()
    for number in range(3):
        members.names = members.names[1:]
        ended.append(members.ends(number, "d", b=5, c=5, d=5))
    assert ended == [[False] * 3, [False] * 2, [True]]


def test_people_are_told_of_what_is_more_than_a_change(caplog: pytest.LogCaptureFixture) -> None:
    standstill = Standstill(3.0)
    for error in (CHANGED, JoinsError("a member waits to join"), OVERDUE, LostStateError("gone")):
        standstill.note(error)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [str(OVERDUE), "gone"]


TOLD = {"min_ranks": 1, "rejoin": True, "expel_after": 30.0}


@pytest.mark.parametrize("settings", [{}, {"expel_after": "0.5m"}, {"expel_after": 30}])
def test_what_the_agents_go_by_is_what_is_configured(settings: dict[str, Any]) -> None:
    expect_told(ElasticConfig(**settings), TOLD)
    expect_told(ElasticConfig(min_ranks=7), {})  # a job of no agents


@pytest.mark.parametrize(("key", "value"), [("min_ranks", 3), ("rejoin", False), ("expel_after", "60s")])
def test_settings_of_a_file_that_the_agents_have_not_read_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"elastic\.{key}.*Write elastic\.{key}=\.\.\. there"):
        expect_told(ElasticConfig(**{key: value}), TOLD)


def test_without_an_agent_it_is_refused_by_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distaccum.elastic.run", f"hydra.run.dir={tmp_path / 'run'}"]
    finished = captured(command, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert "no agent of an elastic job has started this. Start `python -m distaccum.elastic`" in finished.stderr
    assert finished.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
