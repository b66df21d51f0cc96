"""The disk on real file systems: a folder of this test, one too small, one that nothing can be written to."""

import shutil
import subprocess
from pathlib import Path
from threading import Thread
from time import sleep

import pytest

from distaccum.tools.doctor.disk import disk, file_system, nearest, sees_mark
from distaccum.tools.doctor.facts import Look
from tests.tools.doctor.here import looked, mount, needs_mounts, notes, wrong

WORK = ".distaccum-doctor-test"


def test_everything_is_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distaccum.tools.doctor.disk._MOST", 2**23)
    found = disk(tmp_path / "not" / "yet", WORK)
    assert list(tmp_path.iterdir()) == []
    assert found.value("folder") == str(tmp_path)
    names = [fact.name for fact in found.facts]
    assert {"writes, synced", "fsync of 4 KiB", "rename", "free space"} <= set(names)
    assert [name for name in names if name.startswith("reads, ")]
    assert found.value("writes, synced") > 0
    assert found.value("rename") is True
    assert abs(found.value("free space") - shutil.disk_usage(tmp_path).free) < 2**30


@pytest.mark.skipif(shutil.which("findmnt") is None, reason="util-linux is not installed")
@pytest.mark.parametrize("place", ["/", "/proc/self", "/dev/shm", "/sys"])  # noqa: S108
def test_the_file_system_is_that_of_findmnt(place: str) -> None:
    command = ["findmnt", "-n", "-o", "FSTYPE,SOURCE", "-T", str(Path(place).resolve())]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert file_system(Path(place)) == tuple(told[-1].split())  # the last of those mounted there hides the others


def test_a_mount_with_a_space_in_its_name(tmp_path: Path) -> None:
    table = tmp_path / "mounts"
    table.write_text(f"/dev/a / ext4 rw 0 0\nhost:/b {tmp_path}/my\\040data nfs4 rw 0 0\n")
    assert file_system(tmp_path / "my data" / "runs", table) == ("nfs4", "host:/b")
    assert file_system(tmp_path / "my", table) == ("ext4", "/dev/a")


@needs_mounts
def test_a_small_one_in_memory_which_fills_up(tmp_path: Path) -> None:
    found = looked(lambda: disk(tmp_path, WORK), after=lambda: mount(tmp_path, "64m"))
    assert f"{tmp_path} has 64.0 MiB left; two checkpoints of a GPT of 124 million parameters take 3 GiB" in wrong(
        found
    )
    assert f"{tmp_path} is memory (tmpfs): runs are gone with the machine" in notes(found)
    assert found.value("writes, synced") > 0

    def full() -> None:
        mount(tmp_path, "64k")
        (tmp_path / "rest").write_bytes(bytes(2**16))

    found = looked(lambda: disk(tmp_path, WORK), after=full)
    assert f"{tmp_path} is full for you: No space left on device" in wrong(found)


def test_where_nothing_can_be_written() -> None:
    assert wrong(disk(Path("/proc/self"), WORK))[-1].startswith("nothing can be written in /proc/self: ")


def test_a_file_that_is_written_over_in_place_is_no_atomic_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file system that copies what is renamed: the reader then sees a part of it."""

    def copied(new: Path, path: Path) -> Path:
        path.write_bytes(b"")
        sleep(0.001)
        path.write_bytes(new.read_bytes())
        return path

    monkeypatch.setattr("distaccum.tools.doctor.disk._MOST", 2**22)
    monkeypatch.setattr("distaccum.tools.doctor.disk._RENAMES", 30)
    monkeypatch.setattr(Path, "replace", copied)
    found = disk(tmp_path, WORK)
    assert found.value("rename") is False
    assert any("not replaced in one step" in one for one in wrong(found))


def test_a_file_of_another_rank_is_waited_for(tmp_path: Path) -> None:
    assert sees_mark(tmp_path, "mark", 0.05).value("seen") == -1.0

    def later() -> None:
        sleep(0.1)
        (tmp_path / "mark").touch()

    thread = Thread(target=later)
    thread.start()
    found: Look = sees_mark(tmp_path, "mark", 20)
    thread.join()
    assert 0 < found.value("seen") < 20


def test_the_nearest_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert nearest(tmp_path / "a" / "b") == tmp_path
    assert nearest(tmp_path / "file") == tmp_path
    assert nearest(tmp_path) == tmp_path
