"""The launcher of ``launch/train.sh``: one interpreter checks, then starts torchrun."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distaccum.distributed.environment import LaunchEnvironment
from distaccum.errors import ConfigError
from distaccum.tools import joining
from distaccum.tools.launch import Relay, stated_processes
from launch import local
from tests.support.commands import ROOT, TINY, environment, free_port, status

LOCAL = ROOT / "launch" / "local.py"
OWN_LOOP = ROOT / "tests" / "distributed" / "workers" / "own_loop.py"


def _start(*arguments: object, script: str = str(LOCAL), **extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, *script.split(), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**extra)
    )


@pytest.mark.slow
def test_a_mistake_is_found_before_torchrun_starts(tmp_path: Path) -> None:
    process = _start(*TINY, "trainer.max_step=1", f"hydra.run.dir={tmp_path / 'run'}")
    said, error = process.communicate(timeout=60)
    assert (process.returncode, said) == (2, "")
    (line,) = error.splitlines()
    assert line.startswith("distaccum: configuration error: trainer.max_step=1: no such setting; did you mean")
    assert status(tmp_path / "run")["state"] == "config_error"


@pytest.mark.slow
@pytest.mark.fault("the variables of an earlier launcher are left in the shell, or four of them")
def test_variables_that_are_left_over_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Callable[[str], None]
) -> None:
    pod = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    left = {**pod, "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "2"}
    process = _start("from distaccum.tools.joining import joined; joined(0, 2)", script="-c", **left)
    for given in (left, pod):
        local.drop_launcher(given)
    assert (len(left), len(pod)) == (0, 4)
    with pytest.raises(ConfigError) as refused:
        LaunchEnvironment.from_environment(pod)
    with socket.create_server(("", 0)) as taken:
        for name, value in {**pod, "LOCAL_RANK": "0", "MASTER_PORT": str(taken.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError) as listened:
            LaunchEnvironment.current().store()
    with process:
        assert process.stderr
        waits = process.stderr.readline()
        process.terminate()  # which ends it even while it waits
        assert process.wait(60) == -signal.SIGTERM
    says("\n".join([capsys.readouterr().err, str(refused.value), waits, str(listened.value)]))


@pytest.mark.parametrize("address", ["no such host", "two..dots"])
def test_a_host_that_cannot_be_resolved_is_named(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "distaccum"):
        joining._say(address, "29500", 2)
    assert f"at {address}:29500 ({address} cannot be resolved: " in caplog.text


@pytest.mark.parametrize(("name", "value"), [("NPROC", "abc"), ("SHUTDOWN_TIMEOUT", "2m")])
def test_a_number_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}={value}: is no number of "):
        Relay() if name == "SHUTDOWN_TIMEOUT" else stated_processes("")


@pytest.mark.slow
def test_a_check_alone_starts_nothing(tmp_path: Path) -> None:
    process = _start(*TINY, "--check=3", f"hydra.run.dir={tmp_path / 'run'}")
    said, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert said.startswith("check passed: GPT with ")
    assert "3 ranks x" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def _launch(*arguments: object, **extra: str) -> subprocess.Popen[str]:
    return _start(*arguments, script="-m distaccum launch", **extra)


@pytest.mark.heavy  # Slurm's test of it runs in CI
def test_a_loop_of_ones_own_is_told_to_leave_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """On two processes, where ``auto`` is one on the CPU."""
    weights = []
    for name in ("whole", "told"):
        folder = tmp_path / name
        process = _launch("--nproc=2", OWN_LOOP, 0.2 if name == "told" else 0, RUN_DIR=str(folder))
        if name == "told":
            deadline = time.monotonic() + 100
            while not (folder / "begun").exists():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
        said, error = process.communicate(timeout=100)
        assert (process.returncode, said, error) == (0, "from step 0 on 2\n", "")
        if name == "told":
            step = int((folder / "checkpoints" / "latest").read_text().removeprefix("step-"))
            assert 5 <= step < 36
            process = _launch(OWN_LOOP, RUN_DIR=str(folder), NPROC="2")
            said, error = process.communicate(timeout=100)
            assert (process.returncode, said, error) == (0, f"from step {step} on 2\n", "")
        weights.append((folder / "checkpoints" / "step-36" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    process = _launch(OWN_LOOP, RUN_DIR=str(tmp_path / "told"))
    assert process.communicate(timeout=100) == ("from step 36 on 1\n", "")


FAILS = "import os, sys; print('begins'); sys.exit(3 if os.environ['RANK'] == '1' else 0)"
KILLED = "import os, time; os.kill(os.getpid(), 9) if os.environ['RANK'] == '0' else time.sleep(60)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        (FAILS, 3, "rank 1 of 2 ended with exit code 3 (process "),
        pytest.param(KILLED, 128 + 9, "rank 0 of 2 was killed by SIGKILL (process ", marks=pytest.mark.heavy),
    ],
)
def test_a_program_that_fails_is_told_in_one_line(tmp_path: Path, program: str, code: int, message: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(program)
    process = _launch("--nproc", 2, file)
    _, error = process.communicate(timeout=100)
    assert process.returncode == code
    assert error.startswith(f"distaccum launch: {file}: {message}")
    assert error.endswith("); what it has printed says why\n")
    assert error.count("\n") == 1
