"""What stands on a terminal while there is a live line, after it, in the processes around it; how it is left."""

import logging
import os
import sys
import threading
from pathlib import Path
from typing import TextIO, cast

import pytest
import torch

from distaccum.distributed.signals import StopSignals
from distaccum.distributed.world import World
from distaccum.train.live_line import Erasing, LiveLine, erasing_streams, takes_live_line
from distaccum.train.screen import open_screen
from tests.support.terminal import on_terminal

LOG = logging.getLogger("users.own")
ROW = "step 3/10  loss 0.3000"


@pytest.fixture(autouse=True)
def terminal_of_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("CI", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def _line(text: str = ROW) -> LiveLine:
    return LiveLine(lambda columns: text[:columns], every_s=3600, faint=r"loss [\d.]+")


def test_what_is_printed_stays_whole_above_the_row() -> None:
    with on_terminal(40) as screen:
        handler = logging.StreamHandler()  # of a user, from before
        LOG.addHandler(handler)
        try:
            print("before")
            with _line() as line:
                print("a line", "of a program")
                LOG.warning("a warning of a logger")
                sys.stderr.write("x" * 100 + "\nafter it\n")
                line.write("")
                rows = screen.rows
                assert rows[:3] == ["before", "a line of a program", "a warning of a logger"]
                assert rows[-5:] == ["x" * 40, "x" * 40, "x" * 20, "after it", ROW]
            print("after")
            assert handler.stream is screen.stream
        finally:
            LOG.removeHandler(handler)
        assert screen.rows[-2:] == ["after it", "after"]
        assert ROW not in screen.rows
        assert "step 3/10  \x1b[2mloss 0.3000\x1b[22m\r" in screen.said
        assert "\x1b[?25" not in screen.said  # the cursor is never hidden, and so cannot stay hidden
        assert sys.stdout is screen.stream


def test_the_row_is_away_while_a_line_is_written_over() -> None:
    with on_terminal(40) as screen:
        with _line() as line:
            for done in range(4):
                sys.stderr.write(f"\rloading: {done}/3 ")
                line.write("")
            assert screen.rows == ["loading: 3/3"]
            sys.stderr.write("\n")
            assert screen.rows == ["loading: 3/3", ROW]
            print("no end", end="")
        print(" yet")
        assert screen.rows == ["loading: 3/3", "no end yet"]


def test_a_question_stands_alone_until_it_is_answered() -> None:
    with on_terminal(40) as screen:
        with _line() as line:
            print("above")
            print("continue? ", end="", flush=True)
            line.write("")
            assert screen.rows == ["above", "continue?"]
            assert screen.said.endswith("continue? ")  # the cursor stands where the answer is typed
            screen.echo("yes\r\n")
            sys.stdout.write("it goes on\n")
            assert screen.rows == ["above", "continue? yes", "it goes on", ROW]
            print(".", end="", flush=True)
            print(".", end="", flush=True)
        print(".")
        assert screen.rows == ["above", "continue? yes", "it goes on", "..."]


def test_the_row_is_never_wider_than_the_terminal() -> None:
    with on_terminal(40) as screen, LiveLine(lambda columns: "7" * (columns + 50), every_s=3600) as line:
        assert screen.rows == ["7" * 39]
        screen.resize(30)
        line.write("")
        assert screen.rows == ["7" * 29]


def test_a_process_that_ends_at_once_can_take_its_row_along() -> None:
    with on_terminal(40) as screen, _line():
        sys.stderr.write("a rank hangs\n")
        assert screen.rows == ["a rank hangs", ROW]
        sys.stderr.leave()  # type: ignore[attr-defined]
        assert screen.rows == ["a rank hangs"]


def test_a_row_that_cannot_be_drawn_ends_nothing() -> None:
    with on_terminal(40) as screen:

        def draw(_: int) -> str:
            raise ZeroDivisionError

        with LiveLine(draw, every_s=3600):
            print("printed")
            assert screen.rows == ["printed"]


def test_a_process_that_is_forked_prints_whole_lines_and_waits_for_nobody() -> None:
    with on_terminal(40) as screen, _line() as line:
        taken, done = threading.Event(), threading.Event()

        def draw_for_long() -> None:
            with line._lock:
                taken.set()
                done.wait(60)

        other = threading.Thread(target=draw_for_long)
        other.start()
        taken.wait(60)
        child = os.fork()  # its copy of the lock is never released
        if child == 0:
            print("from a loading process")
            os._exit(0 if os.times().elapsed else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert screen.rows == ["from a loading process"]
        done.set()
        other.join()
        line.write("")
        assert screen.rows == ["from a loading process", ROW]


def test_another_rank_erases_the_row_before_it_prints() -> None:
    with on_terminal(40) as screen, _line() as line:
        with pytest.MonkeyPatch.context() as patch:  # as if in its own process
            patch.setattr(sys, "stderr", screen.stream)
            patch.setenv("TERM", "xterm")
            patch.delenv("CI", raising=False)
            with erasing_streams():
                print("[rank 1] a warning", file=sys.stderr)
                sys.stderr.write("one\ntwo\n")
            assert sys.stderr is screen.stream
        line.write("")
        assert screen.rows == ["[rank 1] a warning", "one", "two", ROW]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, True), ({"TERM": "dumb"}, False), ({"CI": "true"}, False), ({"CI": "false"}, True), ({"CI": ""}, True)],
)
def test_where_there_is_a_live_line(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], expected: bool) -> None:
    with on_terminal(40) as screen:
        for name, value in ({"TERM": "xterm", "CI": "", "FORCE_COLOR": "1"} | settings).items():
            monkeypatch.setenv(name, value)
        assert takes_live_line(screen.stream) is expected
        reader, writer = os.pipe()
        with os.fdopen(writer, "w") as pipe, os.fdopen(reader):
            assert not takes_live_line(pipe)
        assert not takes_live_line(None)
        assert not takes_live_line(cast(TextIO, Erasing(screen.stream)))  # a program's own, on a terminal


WORLD = World(rank=0, size=2, device=torch.device("cpu"))


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
