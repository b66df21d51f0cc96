"""A look in a process of its own, after that process has been changed; mounts that end with it."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from distaccum.tools.doctor.facts import Look
from distaccum.tools.doctor.limits import Probe, look

_CLONE_NEWNS = 0x20000  # unshare(2)


def looked(act: Callable[[], Look], *, after: Callable[[], object] = lambda: None) -> Look:
    """What ``act`` finds in a child in which ``after`` was called first."""

    def both() -> Look:
        after()
        return act()

    found = look(Probe(name="probe", act=both, limit_s=240))
    assert [fact.text for fact in found.facts if fact.text.startswith(("could not", "no answer"))] == []
    return found


def mount(folder: Path, size: str) -> None:
    """In a child: puts a file system in memory of this size there, which nobody else sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)  # noqa: S607
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)  # noqa: S607


needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


def wrong(found: Look) -> list[str]:
    return [one.what for one in found.findings if one.wrong]


def notes(found: Look) -> list[str]:
    return [one.what for one in found.findings if not one.wrong]
