"""A run's directory: what it holds, who sees it, how a failure is told, and when a machine's restarts end."""

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distaccum.checkpoint.files import write_json
from distaccum.errors import ConfigError, DataError, DistaccumError, SpikeError
from distaccum.tools.history import beginning, require_no_history
from distaccum.tools.record_file import rewind
from distaccum.tools.restarts import is_restart, job_of_kubernetes, note_start, refuse_crash_loop
from distaccum.train import run_dir as run_dir_module
from distaccum.train.failure import lines_of, reason_of
from distaccum.train.run_dir import RunDir, State, check_shared
from tests.support.threads import run_ranks


def _status(path: Path) -> list[object]:
    return list(json.loads((path / "status.json").read_text()).values())


def test_the_first_failure_stays_and_progress_cannot_hide_it(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_status(State.RUNNING, step=7)
    run_dir.write_failure("rank 1: the cause")
    run_dir.write_status(State.RUNNING, step=8)
    run_dir.write_failure("rank 0: connection closed")
    assert _status(tmp_path) == ["failed", 7, "rank 1: the cause"]
    run_dir.forget_failure()  # the next attempt has its own
    run_dir.write_status(State.RUNNING, step=3)
    assert _status(tmp_path) == ["running", 3, ""]
    run_dir.write_failure("a new cause")
    assert _status(tmp_path) == ["failed", 3, "a new cause"]


@pytest.mark.parametrize("ranks", [None, 4])
def test_a_status_has_a_line_for_each_key_as_shells_read_it(tmp_path: Path, ranks: int | None) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.ranks_there = ranks
    run_dir.write_status(State.RUNNING, step=7, reason='a "word",\n  and é')
    expected = {"state": "running", "step": 7, "reason": 'a "word",\n  and é'} | ({} if ranks is None else {"ranks": 4})
    assert (tmp_path / "status.json").read_text() == json.dumps(expected, indent=2) + "\n"


def test_a_status_is_encoded_in_c_for_it_is_written_in_each_window(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_qualname) if event == "call" else None)
    run_dir.write_status(State.RUNNING, step=7)
    sys.setprofile(None)
    assert "JSONEncoder.iterencode" in called
    assert not [name for name in called if name.startswith("_make_iterencode")]


@pytest.mark.parametrize("reason", ["a short one", "é" * 9999, 'rank 0: "x"\n' * 999])
def test_on_a_full_disk_a_long_reason_is_cut_and_the_status_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    def full(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    run_dir = RunDir(tmp_path)
    with run_dir.own():
        monkeypatch.setattr(run_dir_module, "write_text", full)
        run_dir.write_failure(reason)
        state, step, written = _status(tmp_path)
    assert (state, step) == ("failed", 0)
    assert isinstance(written, str)
    assert reason.startswith(written)
    assert len(written) >= min(len(reason), 600)


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


def test_a_run_begins_at_zero_only_where_none_was_ever_saved(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text("{}\n" * 12)  # of which nobody knows whether they were saved
    with pytest.raises(ConfigError, match=r"the run has 12 records in metrics\.jsonl"):
        require_no_history(run_dir)
    run_dir.metrics.unlink()
    require_no_history(run_dir)
    assert beginning(run_dir) == ""
    run_dir.write_status(State.DONE, step=12)
    assert "though status.json says done at step 12: checkpoints, records and history of that" in beginning(run_dir)
    run_dir.begin()
    run_dir.metrics.write_text("{}\n{}\n")
    require_no_history(run_dir)  # it was killed before its first checkpoint
    assert "begins again at zero: the attempt of 20" in beginning(run_dir)
    assert "its 2 records are moved to metrics.superseded.jsonl" in beginning(run_dir)
    run_dir.note_saved(40)
    run_dir.begin()  # changes nothing
    said = r"resume=auto: .* the folder checkpoints is empty or gone, and the run was saved at step 40\. Nothing is"
    with pytest.raises(ConfigError, match=said):
        require_no_history(run_dir)
    with pytest.raises(ConfigError, match="already holds the results"):
        run_dir.refuse_to_mix()


@pytest.mark.parametrize("left", ["step-4", "damaged-step-4", "aside-step-4-0"])
def test_a_folder_that_was_a_checkpoint_is_a_history(tmp_path: Path, left: str) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.begin()
    (run_dir.checkpoints / ".saving-step-2").mkdir(parents=True)
    require_no_history(run_dir)
    (run_dir.checkpoints / left).mkdir()
    said = rf"1 damaged \({left}\).* Restore the folder .* name a checkpoint .* with resume=PATH .* resume=never and a"
    with pytest.raises(ConfigError, match=said):
        require_no_history(run_dir)


@pytest.mark.fault("a requeued job with another run directory, as by a slip")
def test_a_job_that_is_started_again_in_an_empty_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, says: Callable[[str], None]
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    says(beginning(RunDir(tmp_path)))
    says(caplog.text)


@pytest.mark.fault("`.status.json.PID`, `.writable`, `checkpoints/.saving-step-N`, ... of dead processes")
def test_the_owner_clears_away_what_dead_processes_left(tmp_path: Path) -> None:
    left = (".status.json.4711", ".writable", ".writable.4711", ".owner-12ab", "metrics.tmp", ".status.reserve")
    for name in left:
        (tmp_path / name).touch()
    for name in (".ranks", "checkpoints/.saving-step-3", "checkpoints/step-2"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    run_dir = RunDir(tmp_path)
    with run_dir.own():
        run_dir.write_status(State.DONE, step=2)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert found == ["checkpoints", "checkpoints/step-2", "checkpoints/step-2/file", "status.json"]


def test_no_status_holds_a_secret(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, secrets=["s3cr3t-value"])
    run_dir.write_failure("rank 0: GET https://host/?key=s3cr3t-value and hf_0123456789abcdefghij")
    assert _status(tmp_path)[2] == "rank 0: GET https://host/?key=<redacted> and <redacted>"


def test_a_link_where_a_temporary_file_could_be_leads_nowhere(tmp_path: Path) -> None:
    """In a folder that others may write to, whose names they could guess."""
    run_dir, canary = RunDir(tmp_path / "run"), tmp_path / "canary"
    run_dir.path.mkdir()
    canary.write_text("somebody's")
    for name in (f".status.json.{os.getpid()}", ".status.json", f".writable.{os.getpid()}", "metrics.tmp"):
        (run_dir.path / name).symlink_to(canary)
    run_dir.metrics.write_text('{"window": 1}\n{"window": 2}\n')
    run_dir.make()
    run_dir.write_status(State.RUNNING, step=0)
    rewind(run_dir.metrics, 1)
    assert (run_dir.state(), run_dir.metrics.read_text()) == (State.RUNNING, '{"window": 1}\n')
    assert canary.read_text() == "somebody's"


def test_rollbacks_stay_in_the_history(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.begin()
    run_dir.note_saved(5)
    run_dir.note_rolled_back(5, 8)
    run_dir.note_saved(10)
    history = json.loads((tmp_path / "history.json").read_text())
    assert (history["saved"], history["rolled_back"]) == (10, [{"to_step": 5, "after_window": 8}])


@pytest.mark.parametrize(("error", "resumes"), [(DataError("a bad line"), True), (SpikeError("again"), False)])
def test_the_same_command_is_no_way_on_for_what_would_happen_again(
    tmp_path: Path, error: DistaccumError, *, resumes: bool
) -> None:
    run_dir = RunDir(tmp_path)
    with run_dir.own():
        run_dir.begin()
        run_dir.note_saved(4)
        run_dir.write_failure(reason_of(0, error))
        lines = lines_of(run_dir)
    assert lines[0] == f"the run failed: rank 0: {error.__class__.__name__}: {error}"
    assert any("the same command with resume=auto" in line for line in lines) == resumes


def test_a_folder_that_every_rank_sees(tmp_path: Path) -> None:
    assert run_ranks(3, lambda world: check_shared(tmp_path, world)) == [None] * 3
    assert list(tmp_path.iterdir()) == []


def test_folders_of_the_same_name_on_two_hosts(tmp_path: Path) -> None:
    hosts = [tmp_path / "host-0", tmp_path / "host-1"]
    hosts[0].mkdir()  # the other host's ranks have not even the folder
    raised = run_ranks(4, lambda world: check_shared(hosts[world.rank // 2], world))
    assert all(isinstance(error, ConfigError) for error in raised)
    for error in raised:
        assert "rank 2, rank 3 cannot see what rank 0 writes there" in str(error)
    assert list(hosts[0].iterdir()) == []


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


def test_who_has_started_it() -> None:
    array = {"SLURM_ARRAY_TASK_MIN": "1"}
    person = [{}, {"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "0"}, array | {"SLURM_ARRAY_TASK_ID": "1"}]
    machine = [{name: "1"} for name in person[1]] + [array | {"SLURM_ARRAY_TASK_ID": "2"}]
    assert [*map(is_restart, person + machine)] == [False] * 3 + [True] * 3


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
