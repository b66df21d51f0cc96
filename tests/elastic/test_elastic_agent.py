"""Agents of elastic jobs, with stand-ins for the workers: who tells whom of an end, and what comes after it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from distaccum.distributed.watchdog import trouble_of
from tests.support.commands import ROOT, environment, free_port, until

_AGENT = Path(__file__).with_name("workers") / "elastic_agent.py"
ALSO = (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
_KILLED = "was killed by SIGKILL"


def _hears() -> None:
    """A program that is started under ``nohup``, or in the background, ignores what its agent then leaves ignored."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Job:
    """Agents, and what their stand-ins write into one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        own = {"STANDIN": str(self.folder), "PYTHONPATH": str(ROOT), "DISTACCUM_TOKEN": ""}  # as tests write words, too
        variables = environment(**own | extra)
        command = [sys.executable, str(_AGENT), *arguments]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": _hears}
        agent = subprocess.Popen(command, env=variables, text=True, start_new_session=True, **out)  # type: ignore[call-overload]
        self.agents.append(agent)
        return agent

    def member(self, name: str) -> dict[str, Any]:
        """A stand-in that has come."""
        until((self.folder / name).exists, 30)
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found

    def end(self, name: str, code: int) -> None:
        """Has a stand-in leave with this exit code."""
        new = self.folder / f".{name}.exit"
        new.write_text(str(code))
        new.rename(self.folder / f"{name}.exit")

    def keys(self, name: str = "0.0.1") -> PrefixStore:
        """The job's keys, by the variables of a stand-in."""
        told = json.loads(self.member(name)["variables"]["DISTACCUM_ELASTIC"])
        return PrefixStore(told["prefix"], TCPStore(*told["store"], is_master=False, wait_for_workers=False))

    def store_pids(self) -> list[int]:
        """The processes of this job's store: theirs is the environment of this job."""
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                is_store = b"distaccum.elastic.agent.store_process" in file.read_bytes()
                if is_store and f"STANDIN={self.folder}\0".encode() in file.with_name("environ").read_bytes():
                    found.append(int(file.parent.name))
            except OSError:
                continue
        return found

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.communicate()
        for pid in self.store_pids():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    started = Job(tmp_path)
    try:
        yield started
    finally:
        started.close()


def _words(keys: PrefixStore) -> dict[str, str]:
    said = [json.loads(keys.get(f"word/{number}")) for number in range(1, keys.add("words", 0) + 1)]
    return {word["member"]: word["how"] for word in said}


def _is_gone(pid: int) -> bool:
    return trouble_of(pid) == "has died"


def test_a_worker_that_is_killed_is_told_and_followed_and_the_job_ends_by_the_key(job: Job) -> None:
    agent = job.start("--nproc=2", "seed=3", "elastic.min_ranks=2", "elastic.expel_after=9s")
    keys, killed = job.keys(), job.member("0.1.1")
    assert killed["arguments"] == ["seed=3", "elastic.min_ranks=2", "elastic.expel_after=9s"]
    assert json.loads(keys.get("view/0")) == {"generation": 0, "members": ["0.0.1", "0.1.1"]}
    began = time.monotonic()
    os.kill(killed["pid"], signal.SIGKILL)
    until(lambda: keys.add("words", 0), 5)
    assert _words(keys) == {"0.1.1": _KILLED}

    after = job.member("0.1.2")
    assert time.monotonic() - began > 0.5  # the others have the cores first
    changing = {"DISTACCUM_MEMBER", "SHLVL", "_", "LC_CTYPE"}
    before, now = killed["variables"], after["variables"]
    assert {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)} <= changing
    told = json.loads(now["DISTACCUM_ELASTIC"])
    port = int(now["MASTER_PORT"])
    assert told["store"] == ["127.0.0.1", port]
    assert (told["least"], told["expel_after_s"], told["node"]) == (2, 9.0, 0)
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE")
    assert [now[name] for name in launcher] == ["1", "2", "1", "2", "127.0.0.1", "True"]
    assert now["DISTACCUM_LAUNCHER"] == str(agent.pid)

    assert len(job.store_pids()) == 1
    keys.set("ended", "0")
    job.end("0.0.1", 0)
    job.end("0.1.2", 0)
    _, error = agent.communicate(timeout=30)
    assert agent.returncode == 0
    assert error == f"distaccum: 0.1.1 (process {killed['pid']}) {_KILLED}; another is started in its place\n"


def test_without_a_next_life_the_place_stays_empty_and_the_last_end_is_that_of_the_job(job: Job) -> None:
    agent = job.start("--nproc=2", "elastic.rejoin=false")
    keys = job.keys()
    os.kill(job.member("0.1.1")["pid"], signal.SIGKILL)
    until(lambda: keys.add("words", 0))
    time.sleep(1)
    assert agent.poll() is None
    assert not (job.folder / "0.1.2").exists()
    job.end("0.0.1", 3)
    _, error = agent.communicate(timeout=30)
    assert agent.returncode == 1
    assert error.splitlines()[-1] == "distaccum: no rank is left: first 0.1.1 was killed by SIGKILL"
    assert "ended with exit code 3; its place stays empty, as elastic.rejoin=false says" in error
    assert (keys.get("ended"), _words(keys)["0.0.1"]) == (b"1", "ended with exit code 3")


@pytest.mark.parametrize(("code", "nproc"), [(2, 2), (0, 1)])
def test_a_configuration_that_cannot_run_ends_the_job_and_so_do_all_that_leave_with_0(
    job: Job, code: int, nproc: int
) -> None:
    agent, last = job.start(f"--nproc={nproc}"), f"0.{nproc - 1}.1"
    job.member("0.0.1")
    job.member(last)
    job.end(last, code)
    _, error = agent.communicate(timeout=30)
    assert (agent.returncode, error) == (code, "")
    assert code == 0 or (job.folder / "0.0.1.told").read_text() == "SIGTERM"


@pytest.mark.heavy
def test_a_place_whose_workers_never_last_is_given_up(job: Job) -> None:
    agent = job.start("--nproc=2")
    for life in (1, 2, 3):
        job.member(f"0.1.{life}")
        job.end(f"0.1.{life}", 1)
    keys = job.keys()
    until(lambda: keys.add("words", 0) == 3)
    time.sleep(1)
    assert not (job.folder / "0.1.4").exists()
    keys.set("ended", "0")
    job.end("0.0.1", 0)
    _, error = agent.communicate(timeout=30)
    assert agent.returncode == 0
    assert error.endswith("ended with exit code 1 within 20 s, as 3 have in a row: its place is given up\n")


def test_a_worker_that_the_others_left_behind_is_killed_and_followed(job: Job) -> None:
    """Stopped, it cannot leave by itself."""
    agent = job.start("--nproc=2")
    keys, stopped = job.keys(), job.member("0.1.1")
    os.kill(stopped["pid"], signal.SIGSTOP)
    keys.set("view/1", json.dumps({"generation": 1, "members": ["0.0.1"]}))
    job.member("0.1.2")
    assert _words(keys) == {"0.1.1": _KILLED}
    assert agent.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.heavy) for one in ALSO)])
def test_told_to_leave_the_workers_do_and_nobody_follows(job: Job, number: signal.Signals) -> None:
    agent = job.start("--nproc=2")
    job.member("0.0.1")
    job.member("0.1.1")
    agent.send_signal(number)
    _, error = agent.communicate(timeout=30)
    assert (agent.returncode, error) == (0, "")
    assert [(job.folder / f"0.{local}.1.told").read_text() for local in (0, 1)] == [number.name] * 2
    until(lambda: not job.store_pids(), 10)


def test_who_does_not_leave_in_time_is_killed(job: Job) -> None:
    agent = job.start("--nproc=1", STANDIN_IS_DEAF="", SHUTDOWN_TIMEOUT="1")
    job.member("0.0.1")
    agent.send_signal(signal.SIGUSR1)  # which it would never know of
    agent.communicate(timeout=30)
    assert agent.returncode == 128 + signal.SIGUSR1
    assert not (job.folder / "0.0.2").exists()


@pytest.mark.heavy
def test_two_nodes_of_which_one_is_lost_and_comes_back(job: Job) -> None:
    """Node 0, whose agent has started the store."""
    meeting = ("--nproc=1", "--nnodes=2", f"--rdzv=127.0.0.1:{free_port()}")
    second = job.start(*meeting, "--node-rank=1")
    first = job.start(*meeting, "--node-rank=0")
    keys, lost = job.keys("1.0.1"), job.member("0.0.1")
    assert job.member("1.0.1")["variables"]["RANK"] == "1"
    refused = job.start(*meeting, "--node-rank=1")
    _, error = refused.communicate(timeout=30)
    said = "distaccum: configuration error: --node-rank=1: an agent with this number is at work in this job. "
    assert (refused.returncode, error) == (2, f"{said}Give each node its own\n")
    refused = job.start("--nproc=2", *meeting[1:], "--node-rank=1")
    _, error = refused.communicate(timeout=30)
    assert (refused.returncode, error.count("\n")) == (2, 1)
    assert "--nnodes x --nproc=2 x 2: the job has 2 nodes of 1 processes" in error

    first.kill()
    until(lambda: _is_gone(lost["pid"]), 5)
    until(lambda: keys.add("words", 0))
    assert _words(keys) == {"0.0.1": "is on node 0, whose agent has been silent for 10 s"}

    back = job.start(*meeting, "--node-rank=0")
    assert job.member("0.0.2")["variables"]["RANK"] == "0"
    back.kill()
    until(lambda: _is_gone(job.member("0.0.2")["pid"]), 5)
    again = job.start(*meeting, "--node-rank=0")
    job.member("0.0.3")  # before the lease of the one before it is over
    assert _words(keys)["0.0.2"] == "has died with its agent"
    assert len(job.store_pids()) == 1

    keys.set("ended", "0")
    job.end("0.0.3", 0)
    job.end("1.0.1", 0)
    for agent in (again, second):
        agent.communicate(timeout=30)
        assert agent.returncode == 0


@pytest.mark.fault("the store of an elastic job dies")
def test_the_end_of_the_store_is_no_end_of_the_workers(job: Job, says: Callable[[str], None]) -> None:
    """They were killed, with all that they had not saved."""
    agent = job.start("--nproc=2")
    job.member("0.0.1")
    job.member("0.1.1")
    os.kill(*job.store_pids(), signal.SIGKILL)
    _, error = agent.communicate(timeout=30)
    assert agent.returncode == 1
    assert [(job.folder / f"0.{local}.1.told").read_text() for local in (0, 1)] == ["SIGTERM"] * 2
    says(error)


def test_bad_arguments_are_one_line(job: Job) -> None:
    agent = job.start("--nproc=2", "elastic.min_ranks=3")
    out, error = agent.communicate(timeout=30)
    assert (agent.returncode, out, error.count("\n")) == (2, "", 1)
    said = "elastic.min_ranks=3: the job starts with 2 ranks, and could not go on. "
    assert error.startswith(f"distaccum: configuration error: {said}")
    assert job.store_pids() == []


def test_torch_meets_at_the_store_and_serves_none(job: Job) -> None:
    job.start("--nproc=1")
    variables = job.member("0.0.1")["variables"]
    program = "from torch.distributed.rendezvous import rendezvous\n"
    program += "store, rank, size = next(rendezvous('env://'))\nprint(store.check(['elastic-run']), rank, size)"
    found = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert found.stdout == "True 0 1\n"
