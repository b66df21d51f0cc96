"""Who shows what on a terminal, and how it is left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from distaccum.distributed.signals import StopSignals
from distaccum.distributed.world import World
from distaccum.train.screen import open_screen
from tests.support.terminal import on_terminal

WORLD = World(rank=0, size=2, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def terminal_of_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("CI", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def test_a_second_ctrl_c_leaves_the_terminal_in_order() -> None:
    signals, said = StopSignals(), list[str]()
    before = signals.last_words = said.append
    with on_terminal(80) as screen:
        with open_screen(10, WORLD, signals, records=True) as shown:
            told = list[str]()
            enter_phase = shown.and_show(told.append)
            enter_phase("saving step 3")
            shown.saved(3, Path("/a"))
            assert told == ["saving step 3"]
            assert [row[:28] for row in screen.rows] == ["step      3/10  saved: /a", "step 0/10  saving step 3  RS"]
            assert signals.last_words is not None
            signals.last_words("ended at once")
            sys.stderr.write("no row comes back\n")
            shown.enter("training")
            assert screen.rows == ["step      3/10  saved: /a", "no row comes back"]
        assert said == ["ended at once"]
        assert signals.last_words == before


def test_what_ends_a_run_takes_the_row_along() -> None:
    with on_terminal(80) as screen:

        def fail() -> None:
            with open_screen(10, WORLD, StopSignals(), records=True):
                assert screen.rows[0].startswith("step 0/10  starting")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert screen.rows == [""]
        assert sys.stdout is screen.stream


@pytest.mark.parametrize(("rank", "records"), [(1, True), (1, False), (0, False)])
def test_others_and_runs_without_records_show_no_row(rank: int, records: bool) -> None:
    world = World(rank=rank, size=2, device=torch.device("cpu"))
    with on_terminal(80) as screen:
        with open_screen(10, world, StopSignals(), records=records) as shown:
            shown.enter("saving step 3")
            shown.saved(3, Path("/a"))
            print("printed")
            assert (shown.console is None) == (rank == 1)
            shown.and_show(print)("a phase")
        assert screen.rows == ["printed", "a phase"]
        assert ("\x1b" in screen.said) == (rank == 1 and records)
