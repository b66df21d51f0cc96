"""The image, built on this machine and run as its user in namespaces of its own.

Takes root, buildah, debootstrap, some 15 GB of disk and a quarter of an hour: ``pytest -m container``.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.container.engine import UID, Container, Image
from tests.support.commands import metrics, status

pytestmark = [pytest.mark.container, pytest.mark.timeout(3600)]  # the first one waits for the build

JOB = ("data.seq_len=64", "model.n_layer=2", "trainer.eval_every=0", "trainer.log_every=1", "batch.global_size=16")
ENDLESS = ("trainer.max_steps=100000", "checkpoint.every=100000")
STOPPED_WITHIN = 150.0  # seconds: what torchrun gives the workers, and a little


@contextmanager
def _running(image: Image, *arguments: str, **environment: str) -> Iterator[Container]:
    container = image.start(*arguments, **environment)
    try:
        yield container
    finally:
        container.kill()


def _await_records(container: Container, run: str, records: int) -> None:
    file = container.runs / run / "metrics.jsonl"
    container.await_that(lambda: file.exists() and file.read_text().count("\n") >= records, timeout=180)


def _processes_of(image: Image) -> list[int]:
    """Processes, of any container, that have the image's tree for their root."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and (process / "root").readlink() == image.tree:
                found.append(int(process.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def test_the_main_job_runs_as_the_images_user(image: Image) -> None:
    code, printed = image.run("trainer.max_steps=20", "hydra.run.dir=runs/job", *JOB)
    assert code == 0, printed
    run = image.volumes / "runs" / "job"
    assert status(run) == {"state": "done", "step": 20, "reason": ""}
    assert [record["step"] for record in metrics(run) if "loss" in record][-1] == 20
    assert {file.lstat().st_uid for file in run.rglob("*")} == {UID}


def test_two_processes_unless_told_otherwise(image: Image) -> None:
    with _running(image, *ENDLESS, "hydra.run.dir=runs/two", *JOB) as container:
        _await_records(container, "two", 1)
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in _processes_of(image)]
        workers = [
            line for line in commands if b"-u" in line and any(word.endswith(b"launch/train.py") for word in line)
        ]
        assert len(workers) == 2, commands


def test_any_uid_can_run_it(image: Image) -> None:
    container = image.start("trainer.max_steps=2", "hydra.run.dir=/tmp/job", *JOB, user="4321:4321", NPROC="1")
    assert container.wait(300) == 0, container.printed()


def test_a_mistake_is_one_message_and_exit_code_2(image: Image) -> None:
    code, printed = image.run("optim.lr=fast")
    assert code == 2, printed
    assert printed.count("configuration error") == 1
    assert "optim.lr" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"NPROC": "two"}, "NPROC=two"),
        ({"NNODES": "2"}, "NODE_RANK="),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "localhost"}, "NODE_RANK=2"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR="),
    ],
)
def test_so_is_a_mistake_in_the_environment(image: Image, environment: dict[str, str], says: str) -> None:
    code, printed = image.run(**environment)
    assert code == 2, printed
    assert says in printed
    assert printed.count("\n") == 1


def test_sigterm_ends_in_a_checkpoint_from_which_it_goes_on(image: Image) -> None:
    arguments = ("resume=auto", "hydra.run.dir=runs/stop", *JOB)
    with _running(image, *ENDLESS, *arguments) as container:
        _await_records(container, "stop", 3)
        code, seconds = container.stop(STOPPED_WITHIN)
        printed = container.printed()
    print(f"SIGTERM: stopped after {seconds:.1f} s with exit code {code}")
    assert code == 75
    run = image.volumes / "runs" / "stop"
    stopped = status(run)
    assert stopped["state"] == "preempted", (stopped, printed)
    assert list((run / "checkpoints").glob(f"step-*{stopped['step']}"))
    assert _processes_of(image) == []

    more = stopped["step"] + 3
    code, printed = image.run(f"trainer.max_steps={more}", "checkpoint.every=100000", *arguments)
    assert code == 0, printed
    assert status(run)["state"] == "done"
    steps = [record["step"] for record in metrics(run) if "loss" in record]
    assert steps == list(range(1, more + 1))


def test_sigterm_is_not_lost_before_the_job_listens(image: Image) -> None:
    with _running(image, *ENDLESS, "hydra.run.dir=runs/early", *JOB) as container:
        container.await_that(lambda: len(_processes_of(image)) > 1, timeout=60)
        code, seconds = container.stop(STOPPED_WITHIN)
    print(f"SIGTERM at the start: stopped after {seconds:.1f} s with exit code {code}")
    assert code != 0
    assert not (image.volumes / "runs" / "early" / "metrics.jsonl").exists()
    assert _processes_of(image) == []


def test_orphans_are_reaped(image: Image) -> None:
    orphan = "(sleep 0.2 &) ; sleep 1; ps -A -o pid=,stat=,comm="
    code, printed = image.run("bash", "-c", orphan)
    assert code == 0, printed
    processes = [line.split() for line in printed.splitlines()]
    assert [processes[0][0], processes[0][2]] == ["1", "tini"]
    assert not [one for one in processes if one[1].startswith("Z") or one[2] == "sleep"]


def test_two_containers_make_one_job(image: Image) -> None:
    both = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29571"}
    arguments = ("trainer.max_steps=3", "hydra.run.dir=runs/nodes", *JOB)
    with (
        _running(image, *arguments, NODE_RANK="1", **both) as second,  # it waits for the one that keeps the list
        _running(image, *arguments, NODE_RANK="0", **both) as first,
    ):
        assert first.wait(240) == 0, first.printed()
        assert second.wait(60) == 0, second.printed()
    run = image.volumes / "runs" / "nodes"
    assert status(run)["step"] == 3
    assert first.printed().count("done: 3 steps") + second.printed().count("done: 3 steps") == 1


@pytest.mark.parametrize("tests", ["unit", "architecture", "distributed/test_evaluation.py"])
def test_the_tests_pass_inside(image: Image, tests: str) -> None:
    code, printed = image.run("pytest", "-q", f"/opt/distaccum/tests/{tests}", timeout=1800)
    print(printed.splitlines()[-1])
    assert code == 0, printed[-6000:]


def test_deepspeed_runs_without_a_compiler(image: Image) -> None:
    code, printed = image.run("engine=deepspeed", "trainer.max_steps=2", "hydra.run.dir=runs/deepspeed", *JOB)
    assert code == 0, printed
    assert image.run("bash", "-c", "command -v gcc nvcc")[0] == 1


def test_no_secret_is_in_the_image(image: Image, secret: str) -> None:
    command = ["grep", "-rlF", "--binary-files=text", "--devices=skip", secret, str(image.tree)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == ""
    assert secret not in image.described
    assert not (image.tree / "etc/pip.conf").exists()


def test_what_the_image_says_of_itself(image: Image) -> None:
    labels = image.config["Labels"]
    assert labels["org.opencontainers.image.title"] == "distaccum"
    assert labels["org.opencontainers.image.revision"] == "of-the-test"
    assert image.config["User"] == f"{UID}:{UID}"
    assert image.config["Entrypoint"][0] == "tini"
    assert image.config["StopSignal"] == "SIGTERM"


def test_the_code_is_not_the_users_to_change(image: Image) -> None:
    code, printed = image.run("bash", "-c", "touch /opt/distaccum/x || touch /opt/venv/x")
    assert code != 0
    assert printed.count("Permission denied") == 2
