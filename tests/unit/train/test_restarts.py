"""A job that is started again by a machine ends after three failures in a row, and not by mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from distaccum.checkpoint.files import write_json
from distaccum.errors import ConfigError
from distaccum.train.restarts import is_restart, job_of_kubernetes, note_start, refuse_crash_loop
from distaccum.train.run_dir import RunDir, State


def _fails(folder: Path, step: int, state: State = State.FAILED) -> None:
    RunDir(folder).write_status(state, step=step, reason=f"rank 1: OSError at {step}")


def _restarts(folder: Path, *steps: int) -> None:
    for step in steps:
        _fails(folder, step)
        note_start(folder, restarted=True)


def test_the_third_failure_at_a_step_is_the_last(tmp_path: Path) -> None:
    note_start(tmp_path, restarted=False)
    _restarts(tmp_path, 12, 12)
    _fails(tmp_path, 10)
    with pytest.raises(ConfigError, match=r"3 starts in a row have failed, none after step 12, .*OSError at 10"):
        note_start(tmp_path, restarted=True)
    with pytest.raises(ConfigError):
        note_start(tmp_path, restarted=True)


def test_progress_a_save_and_a_person_reset_it(tmp_path: Path) -> None:
    _restarts(tmp_path, 12, 12, 13, 14, 15, 15)
    _fails(tmp_path, 15, State.PREEMPTED)
    note_start(tmp_path, restarted=True)
    _restarts(tmp_path, 15, 15)
    _fails(tmp_path, 15)
    note_start(tmp_path, restarted=False)
    assert not (tmp_path / "restarts.json").exists()
    _restarts(tmp_path, 15, 15)


def test_a_start_that_cuts_what_did_not_fit_is_not_the_same_again(tmp_path: Path) -> None:
    for rows in (64, 32, 16, 8):  # each has run out of memory with half of what the one before had
        _fails(tmp_path, 0)
        write_json(tmp_path / "memory.json", {"hardware": "", "failed": [[rows, 16]], "reason": "out of memory"})
        note_start(tmp_path, restarted=True)
    write_json(tmp_path / "memory.json", {"hardware": "", "failed": [[8, 16]], "reason": ""})  # taken up
    _restarts(tmp_path, 0, 0)
    _fails(tmp_path, 0)
    with pytest.raises(ConfigError, match="3 starts in a row"):
        note_start(tmp_path, restarted=True)


def test_killed_runs_count_and_a_damaged_record_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "restarts.json").write_text("[]")
    note_start(tmp_path, restarted=True)
    for _ in range(2):
        _fails(tmp_path, 0, State.RUNNING)
        note_start(tmp_path, restarted=True)
    _fails(tmp_path, 0, State.RUNNING)
    with pytest.raises(ConfigError):
        note_start(tmp_path, restarted=True)


@pytest.mark.parametrize(
    ("environment", "restarted"),
    [
        ({}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "0"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"SLURM_RESTART_COUNT": "2"}, True),
        ({"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MIN": "1"}, False),
        ({"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MIN": "1"}, True),
    ],
)
def test_who_has_started_it(environment: dict[str, str], restarted: bool) -> None:
    assert is_restart(environment) is restarted


def test_a_job_of_kubernetes_is_known_by_its_name(tmp_path: Path) -> None:
    """Which pods do not know how many came before them; a refused start leaves things as they are."""
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_ID": "uid-1"}
    assert (job_of_kubernetes(pod), job_of_kubernetes({"JOB_ID": "uid-1"})) == ("uid-1", "")
    for _ in range(3):
        refuse_crash_loop(tmp_path, restarted=False, job="uid-1")
        note_start(tmp_path, restarted=False, job="uid-1")
        _fails(tmp_path, 7)
    for _ in range(2):
        with pytest.raises(ConfigError, match="3 starts in a row have failed, none after step 7"):
            refuse_crash_loop(tmp_path, restarted=False, job="uid-1")
    _fails(tmp_path, 0, State.CONFIG_ERROR)  # what a refusal may leave as the status
    with pytest.raises(ConfigError):
        note_start(tmp_path, restarted=False, job="uid-1")
    note_start(tmp_path, restarted=False, job="uid-2")  # applied again by a person
    _fails(tmp_path, 7)
    note_start(tmp_path, restarted=False, job="uid-2")
