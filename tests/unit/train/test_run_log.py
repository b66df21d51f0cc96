"""The log file of a rank, read back; and the log of the command line, which a library does not install."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from distaccum.checkpoint.store import CheckpointStore
from distaccum.errors import ON_ALL_RANKS
from distaccum.train import run_log
from distaccum.train.run_log import RunLog, log_to_stderr

USERS = logging.getLogger("users.own")
OURS = logging.getLogger("distaccum.somewhere")


@pytest.fixture
def as_command() -> Iterator[None]:
    with log_to_stderr(1, verbose=False):
        yield


@pytest.mark.usefixtures("as_command")
def test_every_record_is_in_the_file_with_its_time_and_the_console_has_the_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = datetime.now(UTC)
    with RunLog(1) as log:
        OURS.info("before the folder is known")
        log.open(tmp_path / "logs")
        USERS.info("loss %.2f", 0.5)
        USERS.debug("too much")
        USERS.warning("look at %s", "this")
        OURS.warning("ours")
    USERS.warning("after the run")
    lines = [line.split(" ", 3) for line in (tmp_path / "logs" / "rank-1.log").read_text().splitlines()]
    assert [line[1:] for line in lines] == [
        ["INFO", "distaccum.somewhere:", "before the folder is known"],
        ["INFO", "users.own:", "loss 0.50"],
        ["WARNING", "users.own:", "look at this"],
        ["WARNING", "distaccum.somewhere:", "ours"],
    ]
    for when, *_ in lines:
        assert abs((datetime.fromisoformat(when) - before).total_seconds()) < 600  # with its zone, or this raises
    assert capsys.readouterr().err.splitlines() == [
        "[rank 1] WARNING users.own: look at this",
        "distaccum: rank 1: ours",
        "[rank 1] WARNING users.own: after the run",
    ]


@pytest.mark.usefixtures("as_command")
def test_a_run_that_goes_on_appends_and_a_refused_one_leaves_nothing(tmp_path: Path) -> None:
    for number in range(2):
        with RunLog(0) as log:
            log.open(tmp_path / "logs")
            USERS.info("start %d", number)
    with RunLog(5):
        USERS.info("refused")
    text = (tmp_path / "logs" / "rank-0.log").read_text()
    assert [line.rpartition(": ")[2] for line in text.splitlines()] == ["start 0", "start 1"]
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank-0.log"]
    with RunLog(0) as log:
        log.open(tmp_path / "quiet")
    assert not (tmp_path / "quiet").exists()


@pytest.mark.usefixtures("as_command")
def test_it_stays_below_a_size_and_has_the_newest_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "MOST_BYTES", 10_000)
    with RunLog(0) as log:
        log.open(tmp_path)
        for number in range(1000):
            USERS.info("record %d", number)
    files = sorted(tmp_path.iterdir(), reverse=True)
    assert [path.name for path in files] == ["rank-0.log.1", "rank-0.log"]
    assert all(path.stat().st_size <= 10_000 for path in files)
    numbers = [int(line.rpartition(" ")[2]) for path in files for line in path.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 1000))
    assert len(numbers) > 100


@pytest.mark.fault("a full disk, for a rank's log")
@pytest.mark.usefixtures("as_command")
def test_a_full_disk_costs_records_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Callable[[str], None]
) -> None:
    (tmp_path / "rank-1.log").symlink_to("/dev/full")
    with RunLog(1) as log:
        log.open(tmp_path)
        for number in range(3):
            USERS.info("record %d", number)
    (told,) = capsys.readouterr().err.splitlines()
    problem = "cannot be written (No space left on device), and the run goes on without it"
    assert told == f"distaccum: {tmp_path}/rank-1.log {problem}"
    says(told)


@pytest.mark.usefixtures("as_command")
def test_secrets_do_not_get_there(tmp_path: Path) -> None:
    with RunLog(0, hide=lambda text: text.replace("hunter2", "***")) as log:
        log.open(tmp_path)
        USERS.warning("the key is %s", "hunter2")
        USERS.error("it failed", exc_info=ValueError("of hunter2"))
    text = (tmp_path / "rank-0.log").read_text()
    assert "the key is ***" in text
    assert "ValueError: of ***" in text
    assert "hunter2" not in text


def test_a_message_with_an_error_of_its_own_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's raise
    with log_to_stderr(0, verbose=False), RunLog(0) as log:
        log.open(tmp_path)
        USERS.warning("%d", "no number")
        USERS.warning("%d", 3)
    assert capsys.readouterr().err.count("--- Logging error ---") == 2  # as Python has it, console and file
    (line,) = (tmp_path / "rank-0.log").read_text().splitlines()
    assert line.endswith("users.own: 3")


def test_warnings_are_there_and_go_where_they_went(tmp_path: Path) -> None:
    told: list[str] = []

    def show(message: Warning | str, *_: object) -> None:
        told.append(str(message))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "showwarning", show)
        with RunLog(0) as log:
            log.open(tmp_path)
            warnings.showwarning("of a module", UserWarning, "model.py", 12)
        assert warnings.showwarning is show
    assert told == ["of a module"]
    assert "WARNING warnings: model.py:12: UserWarning: of a module" in (tmp_path / "rank-0.log").read_text()


def test_in_a_program_that_configures_no_logging_warnings_still_get_to_standard_error(tmp_path: Path) -> None:
    alone = logging.Logger("alone")  # pytest gives the root logger handlers of its own
    alone.parent = None
    taken = RunLog(0)
    alone.addHandler(taken)
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(sys, "stderr", type("", (), {"write": lambda _, text: said.append(text), "flush": lambda _: 0})())
        patch.setitem(logging.Logger.manager.loggerDict, "alone", alone)
        alone.warning("heard")
        alone.info("not heard")
        alone.addHandler(logging.NullHandler())
        alone.warning("somebody else's")
    assert "".join(said) == "heard\n"


def test_nothing_is_left_behind() -> None:
    before = list(logging.root.handlers), warnings.showwarning, logging.root.level
    with RunLog(0), RunLog(0):
        pass
    assert (logging.root.handlers, warnings.showwarning, logging.root.level) == before


PACKAGE = logging.getLogger("distaccum")


@pytest.mark.parametrize(
    ("rank", "verbose", "expected"),
    [
        (0, False, "distaccum: a warning\ndistaccum: the same on all\n"),
        (0, True, "distaccum: an information\ndistaccum: a warning\ndistaccum: the same on all\n"),
        (3, False, "distaccum: rank 3: a warning\n"),
        (3, True, "distaccum: rank 3: a warning\n"),
    ],
)
def test_what_a_rank_shows(rank: int, verbose: bool, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = PACKAGE.level, PACKAGE.propagate, list(PACKAGE.handlers)
    with log_to_stderr(rank, verbose=verbose):
        OURS.info("an information")
        OURS.warning("a warning")
        OURS.warning("the same on all", extra=ON_ALL_RANKS)
    assert capsys.readouterr() == ("", expected)
    assert (PACKAGE.level, PACKAGE.propagate, PACKAGE.handlers) == before


def test_a_library_has_no_handlers() -> None:
    loggers = [PACKAGE, *(logging.getLogger(name) for name in logging.Logger.manager.loggerDict)]
    assert not [one for one in loggers if one.name.startswith("distaccum") and one.handlers]


def test_a_damaged_checkpoint_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step-3").mkdir()
    with log_to_stderr(0, verbose=False):
        assert CheckpointStore(tmp_path, keep=0).newest_valid() is None
    assert capsys.readouterr().err.startswith(f"distaccum: passing over a damaged checkpoint: {tmp_path}/step-3: no ")
