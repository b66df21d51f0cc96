"""The image's entry point, run outside of an image: what a container's exit code says."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import NO_TEXT, ROOT, TINY, captured, environment, logged, run, status, until

pytestmark = pytest.mark.slow

ENTRY = ROOT / "launch" / "container.sh"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["/bin/bash", str(ENTRY), *TINY, "metrics=jsonl", "hydra.run.dir=runs/a", *arguments],
        cwd=folder,
        env=environment(PATH=PATH, NPROC="2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.heavy
def test_a_container_that_is_stopped_says_that_it_was_preempted(tmp_path: Path) -> None:
    process = _start(tmp_path, "trainer.max_steps=100000", "trainer.log_every=1", "trainer.eval_every=0", "resume=auto")
    until(lambda: logged(tmp_path / "runs" / "a") >= 3 or process.poll() is not None)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75, printed
    found = status(tmp_path / "runs" / "a")
    assert (found["state"], found["reason"]) == ("preempted", "SIGTERM")
    assert (tmp_path / "runs" / "a" / "checkpoints" / f"step-{found['step']}").is_dir()
    again = _start(tmp_path, f"trainer.max_steps={found['step'] + 2}", "trainer.eval_every=0", "resume=auto")
    printed, _ = again.communicate(timeout=120)
    assert again.returncode == 0, printed
    assert "resuming" in printed


@pytest.mark.heavy
def test_another_jobs_preemption_on_the_volume_is_not_its_own(tmp_path: Path) -> None:
    """Another container saves and leaves while this one runs: both exited with 75, and the done one was run again."""
    process = _start(tmp_path, "trainer.max_steps=4", "trainer.log_every=1", "trainer.eval_every=0")
    other, records = tmp_path / "runs" / "other", tmp_path / "runs" / "a" / "metrics.jsonl"
    until(lambda: records.exists() or process.poll() is not None)
    assert process.poll() is None
    other.mkdir()
    (other / "status.json").write_text('{"state": "preempted", "step": 3, "reason": "SIGTERM"}')
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert status(tmp_path / "runs" / "a")["state"] == "done"


@pytest.mark.heavy
def test_a_run_that_fails_is_no_preempted_one(tmp_path: Path) -> None:
    (tmp_path / "runs" / "b").mkdir(parents=True)
    (tmp_path / "runs" / "b" / "status.json").write_text('{"state": "preempted", "step": 3, "reason": "SIGTERM"}')
    os.utime(tmp_path / "runs" / "b" / "status.json", (time.time() + 600,) * 2)
    process = _start(tmp_path, "trainer.max_steps=4", "optim.lr=1e30", "trainer.eval_every=0")
    printed, _ = process.communicate(timeout=120)
    assert status(tmp_path / "runs" / "a")["state"] == "failed", printed
    assert process.returncode == 1


def test_bad_configuration_is_exit_code_2(tmp_path: Path) -> None:
    process = _start(tmp_path, "optim.lr=fast")
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert printed.count("configuration error") == 1


@pytest.mark.heavy
@pytest.mark.fault("the root file system and the home are read-only, as `launch/k8s/job.yaml` has it")
def test_a_root_that_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "runs").mkdir()
    command = (
        'mount --make-rprivate / && mount -t tmpfs tmpfs "$FOLDER/tmp" && mount --bind "$FOLDER/runs" "$FOLDER/runs" '
        '&& mount -o remount,bind,ro / && ! touch "$HOME/x" "$FOLDER/x" 2> /dev/null && cd "$FOLDER" && exec "$@"'
    )
    arguments = ("hydra.run.dir=runs/a", "trainer.max_steps=4", "trainer.eval_every=0", "batch.global_size=8")
    finished = subprocess.run(
        ["unshare", "--mount", "bash", "-c", command, "bash", "/bin/bash", str(ENTRY), *TINY, *arguments],  # noqa: S607
        env=environment(PATH=PATH, NPROC="2", FOLDER=str(tmp_path), TMPDIR=str(tmp_path / "tmp")),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "Operation not permitted" in finished.stderr:
        pytest.skip("may not mount")
    assert finished.returncode == 0, finished.stderr
    assert status(tmp_path / "runs" / "a") == {"state": "done", "step": 4, "reason": ""}
    assert list(tmp_path.glob("runs/a/wandb/offline-run-*/*.wandb"))


@pytest.mark.heavy
@pytest.mark.fault("a Kubernetes job whose pods fail at one step again and again")
def test_pods_that_fail_again_and_again_are_not_started_for_ever(tmp_path: Path, says: Callable[[str], None]) -> None:
    settings = (
        "model=cnn",
        *NO_TEXT,
        "data._target_=tests.support.faulty_datasets.GoesWrong",
        "+data.how=memory",
        "+data.at=13",
        "+data.rank=0",
        "batch.global_size=4",
        "batch.micro_size=4",
        "trainer.log_every=1",
        "checkpoint.every=2",
        "resume=auto",
        "metrics=jsonl",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_ID": "0f3b", "PYTHONPATH": str(ROOT), "NPROC": "1"}
    for _ in range(3):
        assert run(*settings, **pod).returncode == 1
        assert status(tmp_path / "run")["state"] == "failed"
    last = captured(["/bin/bash", str(ENTRY), *settings], timeout=100, PATH=PATH, **pod)
    assert last.returncode == 2, last.stderr
    says(last.stderr)
    assert run(*settings, **pod).returncode == 2
    assert run(*settings, **{**pod, "JOB_ID": "applied-again"}).returncode == 1
