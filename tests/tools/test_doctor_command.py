"""The doctor on real ranks: what they do together is measured, and each finding between them is made true once."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from launch import python_path
from launch.bench.network.hosts import torchrun, two_hosts
from tests.cluster.two_hosts.hosts import need_hosts
from tests.support.commands import ROOT, captured, environment, family, run

pytestmark = pytest.mark.slow

WORKER = ROOT / "tests" / "distributed" / "workers" / "doctor.py"
BETWEEN = "Between the ranks"


def _told(*arguments: object, code: int = 0, **variables: str) -> dict[str, Any]:
    """What two ranks tell in JSON, of themselves together."""
    given = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"} | variables
    finished = run("--json", "--only", "ranks", *arguments, script=WORKER, world=2, **given)
    assert finished.returncode == code, finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr
    told: dict[str, Any] = json.loads(finished.stdout)
    assert (told["ranks"], told["right"]) == (2, code == 0)
    return told


def _facts(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (section,) = [one for one in told["sections"] if one["title"] == BETWEEN]
    return {fact["name"]: fact for fact in section["nodes"][""]}


def _wrong(told: dict[str, Any]) -> list[str]:
    return [one["what"] for one in told["findings"] if one["wrong"]]


def test_two_ranks_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    facts = _facts(_told("--folder", tmp_path))
    assert list(tmp_path.iterdir()) == []
    sizes = ("1.0 KiB", "16.0 KiB", "256 KiB", "4.0 MiB", "64.0 MiB")
    rows = [facts[f"all-reduce of {size}"]["value"] for size in sizes if f"all-reduce of {size}" in facts]
    assert len(rows) == len(sizes) or "left out" in facts
    for row, power in zip(rows, (10, 14, 18, 22, 26), strict=False):
        assert row["bytes"] == 2**power
        # Of two ranks each sends half of the sum's parts, twice: as many bits as the whole holds.
        assert row["bus_bits_per_s"] == pytest.approx(8 * row["bytes"] / row["seconds"])
    assert facts["backend"]["value"] == "gloo"
    assert 0 <= facts["shared folder"]["value"] < 1
    clock = facts["clock of rank 1"]["value"]
    assert abs(clock["ahead_s"]) <= clock["bound_s"] + 1e-3  # it is the same clock


def test_another_version_is_named(tmp_path: Path) -> None:
    told = _told("--folder", tmp_path, code=1, DIFFERENT=f"version {tmp_path / 'other'} numpy 9.9.9")
    assert [re.sub(r"^numpy differs: \S+ on rank 0; ", "", one) for one in _wrong(told)] == ["9.9.9 on rank 1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    told = _told("--folder", tmp_path, code=1, DIFFERENT=f"disk {tmp_path}")
    assert _wrong(told) == [
        f"rank 1 cannot see what rank 0 writes in {tmp_path}, and every rank writes a part of a checkpoint"
    ]
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_connect_still_tell(tmp_path: Path) -> None:
    told = _told("--folder", tmp_path, code=1, DIFFERENT="gloo nothing7", OPEN_S="3")
    assert "the ranks do not connect: there was no all-reduce" in _wrong(told)
    texts = [fact["text"] for name, fact in _facts(told).items() if name.startswith("all-reduce, rank")]
    assert any("nothing7" in text for text in texts)
    assert any(
        one["what"].startswith("GLOO_SOCKET_IFNAME differs: none on rank 0; nothing7") for one in told["findings"]
    )


def test_the_command_of_the_page_as_torchrun_starts_it(tmp_path: Path) -> None:
    """All parts, as people read them: one table, on standard output, with plain exit codes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    finished = captured(
        [*command, "distaccum", "doctor", "--folder", str(tmp_path)],
        timeout=280,
        cwd=ROOT,
        WANDB_MODE="offline",
        PYTHONPATH=str(ROOT),
    )
    text = finished.stdout
    assert text.startswith("distaccum doctor: 2 ranks on 1 node\n")
    titles = re.findall(r"^\w[\w ]+$", text, re.MULTILINE)
    assert titles == ["Software", "DeepSpeed", "GPUs", "Machine", "Network", "Disk", "Job", BETWEEN]
    assert (finished.returncode == 0) == text.endswith("Nothing that was looked at is wrong.\n")
    assert "could not be looked at" not in text
    assert list(tmp_path.iterdir()) == []
    assert family(os.getpid())  # ps answers; and no probe is left of those that torchrun has started
    left = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True).stdout  # noqa: S607
    assert str(tmp_path) not in left


def _held_in_the_disks_part(folder: Path) -> subprocess.Popen[str] | None:
    """A doctor whose probe of the disk is stopped while its folder is there; None if it had ended before."""
    heard = ["env", "--default-signal=INT,TERM"]  # a job in a shell's background ignores SIGINT
    process = subprocess.Popen(
        [*heard, sys.executable, "-m", "distaccum", "doctor", "--only", "disk", "--folder", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
    )
    while not list(folder.iterdir()) and process.poll() is None:
        sleep(0.001)
    for pid in family(process.pid)[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    if list(folder.iterdir()):
        return process
    process.kill()
    process.communicate()
    return None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_told_to_stop_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = None
    while process is None:  # a busy machine looks too late
        process = _held_in_the_disks_part(tmp_path)
    process.send_signal(number)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_torch_that_cannot_be_imported_is_what_is_wrong(tmp_path: Path) -> None:
    """Everything that does without it is told all the same."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')"
    )
    finished = captured(
        [sys.executable, "-m", "distaccum", "doctor", "--json", "--only", "software,host,network,job"],
        cwd=ROOT,
        PYTHONPATH=f"{tmp_path}:{ROOT}",
        WANDB_MODE="offline",
    )
    assert (finished.returncode, finished.stderr) == (1, "")
    told = json.loads(finished.stdout)
    assert _wrong(told) == ["torch cannot be imported: libcudart.so.13: cannot open shared object file"]
    assert told["unseen"] == 1  # the machine's part asks torch for its threads
    assert [section["title"] for section in told["sections"]][:4] == ["Software", "Machine", "Network", "Job"]


@pytest.mark.heavy
def test_two_hosts_are_measured_beside_their_link(tmp_path: Path) -> None:
    """100 Mbit/s, over a virtual link that is sold as 10 Gbit/s: noted, and the rate is that of the link."""
    need_hosts()
    with two_hosts(mbit=100) as made:
        program = [str(WORKER), "--json", "--only", "ranks", "--folder", str(tmp_path)]
        finished = torchrun(made, program, timeout=200, environment=python_path() | {"WANDB_MODE": "offline"})
    assert all(one.returncode == 0 for one in finished), finished
    (text,) = [one.stdout for one in finished if one.stdout.strip()]
    told = json.loads(text)
    assert len(told["nodes"]) == 2
    facts = _facts(told)
    rates = [fact["value"]["bus_bits_per_s"] for name, fact in facts.items() if name.startswith("all-reduce of")]
    assert 50e6 < rates[-1] < 110e6  # of the largest; of a smaller one much may leave at once
    assert facts["nominal"]["value"] == 10e9
    (note,) = [one["what"] for one in told["findings"] if not one["wrong"] and "between the nodes" in one["what"]]
    assert "virtual: its rate is the driver's word" in note
