"""A probe that hangs, raises or crashes is a row, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from time import monotonic, sleep

import pytest

from distaccum.tools.doctor.facts import Finding, Look
from distaccum.tools.doctor.limits import Probe, look


def _lives(pid: int) -> bool:
    """Not a zombie that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_one_that_hangs_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    def hang() -> Look:
        child = subprocess.Popen(["sleep", "600"])  # noqa: S607
        (tmp_path / "pid").write_text(f"{os.getpid()} {child.pid}")
        sleep(600)
        return Look()

    began = monotonic()
    found = look(Probe(name="Disk", act=hang, limit_s=1, mend="mount"))
    assert monotonic() - began < 60
    assert [(fact.name, fact.text) for fact in found.facts] == [("Disk", "no answer within 1 s")]
    assert found.findings == [Finding(what="Disk: no answer within 1 s", mend="mount")]
    pids = list(map(int, (tmp_path / "pid").read_text().split()))
    deadline = monotonic() + 20
    while any(map(_lives, pids)) and monotonic() < deadline:
        sleep(0.01)
    assert not any(map(_lives, pids))


def test_one_that_raises_says_why_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "abcdefgh12345678")

    def fail() -> Look:
        raise OSError(f"no route to\nhttps://x?key={os.environ['MY_API_KEY']}")

    found = look(Probe(name="Network", act=fail, limit_s=20))
    assert [fact.text for fact in found.facts] == [
        "could not be looked at: OSError: no route to https://x?key=<redacted>"
    ]
    assert found.findings == []


def test_one_that_crashes_is_told_of_and_what_it_prints_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def crash() -> Look:
        print("noise", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
        return Look()

    found = look(Probe(name="GPUs", act=crash, limit_s=20))
    assert [fact.text for fact in found.facts] == ["could not be looked at: its process was killed by SIGSEGV"]
    assert capfd.readouterr() == ("", "")


def test_what_is_found_comes_back_as_it_was() -> None:
    given = Look()
    given.tell("long", "x" * 300_000, [1, None, {"a": 2.5}])  # more than a pipe holds
    given.find("what", "mend", wrong=False)
    assert look(Probe(name="p", act=lambda: given, limit_s=20)) == given
