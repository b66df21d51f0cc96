"""The folder that runs go to: its file system, what is free, and how fast it writes, syncs, reads and renames.

What is measured is unlinked before its first byte, so that nothing is left, however the doctor ends. The few files that
need a name lie in a folder of the doctor's own, which it removes.
"""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from secrets import token_bytes, token_hex
from shutil import rmtree
from statistics import median
from threading import Event, Thread
from time import perf_counter

from distaccum.config.checks import size_of
from distaccum.tools.doctor.facts import Look, seconds

# At most so much is written, and for so long: more than a controller's cache, where the disk is fast.
_MOST, _FOR_S, _BLOCK = 2**28, 2.0, 2**22
_SYNCS, _RENAMES = 9, 200
# Two checkpoints of the smallest GPT-2 (124M parameters, 12 bytes each): a new one is written before an old one goes.
_FREE_WANTED = 3 * 2**30
# What a time limit reckons with before the first save (train/parts/time_limit.py).
_RATE_WANTED = 100e6
_INODES_WANTED = 1000
_SYNC_WANTED_S = 0.1  # each file of a checkpoint is synced, and each folder
_MEMORY, _LAYERS = ("tmpfs", "ramfs"), ("overlay", "aufs")


def nearest(folder: Path) -> Path:
    """The folder, made absolute, or what of it is there already."""
    folder = folder.expanduser().absolute()
    return next((one for one in (folder, *folder.parents) if one.is_dir()), Path("/"))


def disk(folder: Path, work: str) -> Look:
    """What the file system of ``folder`` does; ``work`` is the name of the folder made in it, and removed."""
    found = Look()
    there = nearest(folder)
    absent = "" if there == folder.expanduser().absolute() else f" (for {folder}, which is not there yet)"
    found.tell("folder", f"{there}{absent}", str(there))
    kind, source = file_system(there)
    found.tell("file system", f"{kind} ({source})", kind)
    _free(found, there)
    if kind in _MEMORY:
        found.find(f"{there} is memory ({kind}): runs are gone with the machine", _elsewhere(), wrong=False)
    if kind in _LAYERS:
        what = f"{there} is the container's own layer ({kind}): runs are gone with the container"
        found.find(what, "docker run -v /data/runs:/work/runs    # and runs that go there", wrong=False)
    own = there / work
    try:
        own.mkdir()
        _measure(found, own)
    except OSError as error:
        _refused(found, there, error)
    finally:
        rmtree(own, ignore_errors=True)
    return found


def clean(folder: Path, work: str) -> Look:
    """Removes the folder that a probe has left which was killed."""
    rmtree(nearest(folder) / work, ignore_errors=True)
    return Look()


def file_system(path: Path, table: Path = Path("/proc/self/mounts")) -> tuple[str, str]:
    """The kind of file system that ``path`` is on, and what is mounted there."""
    real = path.resolve()
    best, answer = -1, ("unknown", "no table of mounts")
    with suppress(OSError):
        for line in table.read_text().splitlines():
            source, point, kind, *_ = line.split(" ")
            where = Path(point.encode().decode("unicode_escape"))  # a space is \040
            if real.is_relative_to(where) and len(where.parts) >= best:  # a later mount hides an earlier one
                best, answer = len(where.parts), (kind, source)
    return answer


def _free(found: Look, folder: Path) -> None:
    seen = os.statvfs(folder)
    free, total = seen.f_bavail * seen.f_frsize, seen.f_blocks * seen.f_frsize
    found.tell("free space", f"{size_of(free)} of {size_of(total)}", free)
    if total and free < _FREE_WANTED:
        what = f"{folder} has {size_of(free)} left; two checkpoints of a GPT of 124 million parameters take 3 GiB"
        found.find(what, f"du -sh {folder}/* | sort -h | tail    # or another place: {_elsewhere()}")
    if seen.f_files:
        found.tell("free inodes", f"{seen.f_favail:,}", seen.f_favail)
        if seen.f_favail < _INODES_WANTED:
            found.find(f"{folder} has {seen.f_favail} inodes left: no more files can be made there", _elsewhere())
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        found.tell("size of a file (ulimit -f)", size_of(limit), limit)
        if limit < _FREE_WANTED:
            found.find(f"a file may have {size_of(limit)}, which a checkpoint's may exceed", "ulimit -f unlimited")


def _measure(found: Look, own: Path) -> None:
    free = os.statvfs(own)
    most = min(_MOST, free.f_bavail * free.f_frsize // 4)
    if most >= _BLOCK:
        _write_and_read(found, own, most)
    pauses = []
    for number in range(_SYNCS):
        with (own / f"sync-{number}").open("wb") as file:
            file.write(token_bytes(4096))
            file.flush()
            began = perf_counter()
            os.fsync(file.fileno())
            pauses.append(perf_counter() - began)
    found.tell("fsync of 4 KiB", f"{seconds(median(pauses))}, at most {seconds(max(pauses))}", median(pauses))
    if median(pauses) > _SYNC_WANTED_S:
        what = f"an fsync takes {seconds(median(pauses))}, and a checkpoint makes some for each file"
        found.find(what, _elsewhere(), wrong=False)
    _rename(found, own)


def _write_and_read(found: Look, own: Path, most: int) -> None:
    """One file, written in blocks and synced, then read past the kernel's cache where the file system allows that."""
    path = own / token_hex(4)
    written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    direct = getattr(os, "O_DIRECT", 0)
    try:
        try:
            read = os.open(path, os.O_RDONLY | direct)
        except OSError:  # EINVAL: not on this file system
            direct, read = 0, os.open(path, os.O_RDONLY)
        path.unlink()
        block, count = token_bytes(_BLOCK), 0  # random: some file systems compress
        began = perf_counter()
        while count < most and perf_counter() - began < _FOR_S:
            count += os.write(written, block)
        os.fsync(written)
        speed = count / (perf_counter() - began)
        found.tell("writes, synced", f"{speed / 1e6:,.0f} MB/s ({size_of(count)})", speed)
        if speed < _RATE_WANTED:
            what = f"it writes {speed / 1e6:.0f} MB/s: a checkpoint of 1.5 GB takes {1.5e9 / speed:.0f} s"
            found.find(what, f"{_elsewhere()} checkpoint.background=true", wrong=False)
        how, speed = _read_back(read, count, direct=bool(direct))
        found.tell(f"reads, {how}", f"{speed / 1e6:,.0f} MB/s", speed)
        os.close(read)
    finally:
        os.close(written)


def _read_back(read: int, count: int, *, direct: bool) -> tuple[str, float]:
    """How it was read, and bytes a second."""
    how = "past the cache"
    if not direct:
        how = "perhaps from the cache"
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(read, 0, 0, os.POSIX_FADV_DONTNEED)
            how = "its cache dropped"
    done, memory = 0, mmap(-1, _BLOCK)  # aligned, as direct reads need
    began = perf_counter()
    while done < count and perf_counter() - began < _FOR_S:
        done += os.readv(read, [memory])
    return how, done / (perf_counter() - began)


def _rename(found: Look, own: Path) -> None:
    """A file that is replaced again and again, and read meanwhile: it is there, and whole, each time."""
    path, over = own / "renamed", Event()
    path.write_bytes(b"0" * 4096)
    wrong: list[str] = []

    def reader() -> None:
        while not over.is_set():
            try:
                content = path.read_bytes()
            except OSError as error:
                if error.errno != errno.ESTALE:  # of NFS: what was opened has been replaced, and is known to be
                    wrong.append(f"it was not there ({error.strerror})")
                continue
            if len(content) != 4096 or len(set(content)) != 1:  # noqa: PLR2004
                wrong.append(f"{len(content)} of 4096 bytes were there")

    thread = Thread(target=reader, daemon=True)
    thread.start()
    for number in range(_RENAMES):
        new = own / "new"
        new.write_bytes(b"%d" % (number % 10) * 4096)
        new.replace(path)
    over.set()
    thread.join()
    found.tell(
        "rename", f"not atomic: {wrong[0]}" if wrong else f"atomic, as far as {_RENAMES} of them show", not wrong
    )
    if wrong:
        what = f"a file is not replaced in one step here: {wrong[0]} while it was renamed over"
        found.find(f"{what}; a reader may find half a checkpoint", _elsewhere())


def _refused(found: Look, there: Path, error: OSError) -> None:
    found.tell("measurement", f"not to the end: {error.strerror}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        mend = f"quota -s; du -sh {there}/* | sort -h | tail    # or another place: {_elsewhere()}"
        found.find(f"{there} is full for you: {error.strerror}", mend)
    else:
        found.find(f"nothing can be written in {there}: {error.strerror}", _elsewhere())


def _elsewhere() -> str:
    return "distaccum train hydra.run.dir=/scratch/$USER/runs/NAME"


def shared_mark(folder: Path, name: str) -> Look:
    """On rank 0: makes the file that the others look for."""
    (nearest(folder) / name).touch()
    return Look()


def sees_mark(folder: Path, name: str, within_s: float) -> Look:
    """On another rank: whether the file is there, and after how many seconds."""
    found, path, began = Look(), nearest(folder) / name, perf_counter()
    while not path.exists() and perf_counter() - began < within_s:
        os.listdir(path.parent)  # noqa: PTH208  makes a network file system ask its server
        Event().wait(0.02)
    took = perf_counter() - began
    found.tell("seen", f"after {seconds(took)}" if path.exists() else "not seen", took if path.exists() else -1.0)
    return found


def remove_mark(folder: Path, name: str) -> Look:
    """On rank 0: removes the file."""
    (nearest(folder) / name).unlink(missing_ok=True)
    return Look()
