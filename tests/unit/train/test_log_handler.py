"""The log of the command line; as a library distaccum installs no handler."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from distaccum.checkpoint.store import CheckpointStore
from distaccum.train.run_log import log_to_stderr

PACKAGE = logging.getLogger("distaccum")
LOG = logging.getLogger("distaccum.somewhere")


@pytest.mark.parametrize(
    ("rank", "verbose", "expected"),
    [
        (0, False, "distaccum: a warning\n"),
        (0, True, "distaccum: an information\ndistaccum: a warning\n"),
        (3, False, "distaccum: rank 3: a warning\n"),
        (3, True, "distaccum: rank 3: a warning\n"),
    ],
)
def test_what_a_rank_shows(rank: int, verbose: bool, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = PACKAGE.level, PACKAGE.propagate, list(PACKAGE.handlers)
    with log_to_stderr(rank, verbose=verbose):
        LOG.info("an information")
        LOG.warning("a warning")
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
