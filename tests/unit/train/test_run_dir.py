from __future__ import annotations

import json
from pathlib import Path

import pytest

from distaccum.errors import ConfigError
from distaccum.train.run_dir import RunDir, State


def _status(path: Path) -> list[object]:
    return list(json.loads((path / "status.json").read_text()).values())


def test_the_first_failure_stays_and_progress_cannot_hide_it(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_status(State.RUNNING, step=7)
    run_dir.write_failure("rank 1: the cause")
    run_dir.write_status(State.RUNNING, step=8)
    run_dir.write_failure("rank 0: connection closed")
    assert _status(tmp_path) == ["failed", 7, "rank 1: the cause"]


def test_the_next_attempt_has_its_own(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_failure("an old cause")
    run_dir.forget_failure()
    run_dir.write_status(State.RUNNING, step=3)
    assert _status(tmp_path) == ["running", 3, ""]
    run_dir.write_failure("a new cause")
    assert _status(tmp_path) == ["failed", 3, "a new cause"]


def test_a_refusal_leaves_a_run_with_results_alone(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_refusal("no")
    assert _status(tmp_path) == ["config_error", 0, "no"]
    run_dir.write_status(State.DONE, step=5)
    run_dir.metrics.touch()
    run_dir.write_refusal("no")
    assert _status(tmp_path) == ["done", 5, ""]
    with pytest.raises(ConfigError, match="resume=auto"):
        run_dir.refuse_to_mix()
