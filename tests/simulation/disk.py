"""A folder in which every system call can fail, be the last one, or be lost with the machine's memory.

Within :meth:`Disk.installed` the functions of ``os`` and ``open`` count what each simulated process does below the
folder, and a :class:`Job` may act before or after a call. What is written really lies in the folder; beside it the disk
keeps what a machine that loses power would find there. The model is that of ALICE (Pillai et al., OSDI 2014), with
ordered names:

- ``fsync`` of a file makes its content durable, and not its name; ``fsync`` of a folder its names;
- of the names that a folder was given or lost since, any number of the first survive; a rename is one of these changes;
- of a file's bytes written since, any number of the first survive, or zeros in their place.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import posixpath
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import safetensors.torch
import torch
from safetensors import SafetensorError

from distaccum.checkpoint import tensors
from distaccum.train import saving

CHANGES = ("create", "write", "fsync", "rename", "link", "unlink", "mkdir", "rmdir", "truncate", "utime")
READS = ("open", "read", "stat", "list")
_FIRST_PID = 5_000_000  # above what Linux gives


class CrashedError(BaseException):
    """The process ends within a call; nothing that it still does reaches the disk."""


@dataclass
class Call:
    """A system call of a rank: the ``number``-th of its rank, and the ``of_kind``-th of its kind."""

    kind: str
    path: str
    rank: int
    number: int
    of_kind: int


@dataclass(eq=False)
class Job:
    """Processes that are started together on a host; ``before`` and ``after`` see each call of theirs.

    ``before`` may raise an OSError in the call's place, or return the share of a write that is still done; the process
    is then ended by ``after``, which is to raise CrashedError. ``pace``: how many calls the thread that writes a
    checkpoint makes before each call of a process's own thread; it makes all that are left when that one waits for it.
    """

    size: int
    host: str = "a"
    pace: int = 1
    before: Callable[[Call], float | None] = lambda _: None
    after: Callable[[Call], None] = lambda _: None
    dead: bool = False
    counts: Counter[Any] = field(default_factory=Counter)
    first_pid: int = 0


class _Behind(threading.Thread):
    """The thread that writes a checkpoint of a process; a call of it comes when the process's own thread lets it come.

    So only one of the two runs at any time, and a cell is the same whenever it is run. What a job does before and after
    the calls is done by the process's own thread, where its collectives are.
    """

    def __init__(self, disk: Disk, **options: Any) -> None:
        super().__init__(**options)
        process = disk.process
        assert process is not None
        self.job, self.rank = process
        self._disk = disk
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._asked: tuple[str, Callable[[], Any]] | None = None
        self._answer: Any = None
        self._error: BaseException | None = None
        self.ended = False

    def start(self) -> None:
        super().start()
        self._disk.behind[self.job, self.rank] = self
        self._go_on()

    def run(self) -> None:
        self._turn.acquire()
        try:
            with self._disk.running(self.job, self.rank):
                super().run()
        except CrashedError:
            pass
        finally:
            self.ended = True
            self._back.release()

    def ask(self, when: str, act: Callable[[], Any]) -> Any:
        """What ``act`` gives, or raises, in the process's own thread; called by this one."""
        self._asked = (when, act)
        self._back.release()
        self._turn.acquire()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its frames would hold it, and the files that are open there
        return self._answer

    def call(self) -> None:
        """Lets it make a call; called by the process's own thread."""
        self._go_on()
        if self._asked is not None and self._asked[0] == "after":
            self._go_on()

    def join(self, timeout: float | None = None) -> None:
        """Lets it make all of its calls.

        Raises:
            CrashedError: the process has ended in one of them.
        """
        while not self.ended:
            self._go_on()
        super().join()
        if self._disk.is_dead:
            raise CrashedError

    def _go_on(self) -> None:
        """Answers what it has asked, and waits until it asks again or has ended."""
        if self.ended:
            return
        if self._asked is not None:
            (_, act), self._asked = self._asked, None
            try:
                self._answer = act()
            except (OSError, CrashedError) as error:
                self._error = error
        self._turn.release()
        self._back.acquire()


@dataclass(eq=False)
class _Node:
    """A file or folder as the machine's disk has it: names for a folder, bytes for a file."""

    is_folder: bool
    content: bytes | None = None
    names: dict[str, _Node] = field(default_factory=dict)
    pending: list[dict[str, _Node | None]] = field(default_factory=list)
    last: bytes = b""  # what an unlinked file held


class _File(io.FileIO):
    """A file whose reads and writes are calls."""

    disk: Disk
    place: str

    def write(self, data: Any, /) -> int:
        data = bytes(data)
        if self.disk.is_dead:
            return len(data)  # what is still in a buffer is lost with the process
        with self.disk.call("write", self.place) as share:
            done = data if share is None else data[: int(share * len(data))]
            return super().write(done)

    def truncate(self, size: int | None = None, /) -> int:
        with self.disk.call("truncate", self.place):
            return super().truncate(size)

    def readinto(self, buffer: Any, /) -> int:
        with self.disk.call("read", self.place):
            return super().readinto(buffer)  # type: ignore[return-value]

    def readall(self) -> bytes:
        with self.disk.call("read", self.place):
            return super().readall()  # type: ignore[return-value]


class Disk:
    """The folder ``root`` with all processes that use it."""

    def __init__(self, root: Path) -> None:
        self.root, self._prefix = root, str(root)
        self._local = threading.local()
        self._alive: dict[int, str] = {}
        self._started = _FIRST_PID
        self._real = {name: getattr(os, name) for name in self._functions()}
        self._open, self._getpid, self._host = io.open, os.getpid, socket.gethostname
        self._top = _Node(is_folder=True)
        self._nodes = {os.stat(root).st_ino: self._top}
        self._turn = threading.RLock()
        self.behind: dict[tuple[Job, int], _Behind] = {}
        self._files: WeakSet[_File] = WeakSet()

    # processes

    def start(self, job: Job) -> None:
        """Gives a job's ranks process numbers that no process has had."""
        job.first_pid, self._started = self._started, self._started + job.size
        self._alive |= dict.fromkeys(range(job.first_pid, self._started), job.host)

    def end(self, job: Job) -> None:
        """Its processes are gone."""
        job.dead = True
        for thread in [thread for (owner, _), thread in self.behind.items() if owner is job]:
            with suppress(CrashedError):
                thread.join()
        for pid in range(job.first_pid, job.first_pid + job.size):
            self._alive.pop(pid, None)

    @contextmanager
    def running(self, job: Job, rank: int) -> Iterator[None]:
        """Within the block this thread is the job's process of that rank."""
        before, self._local.process = getattr(self._local, "process", None), (job, rank)
        try:
            yield
        finally:
            self._local.process = before

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Within the block this thread is no process of the simulation."""
        before, self._local.process = self.process, None
        try:
            yield
        finally:
            self._local.process = before

    @property
    def process(self) -> tuple[Job, int] | None:
        """The job and the rank that this thread is of."""
        return getattr(self._local, "process", None)

    @property
    def is_dead(self) -> bool:
        """Whether this thread's process is gone."""
        return self.process is not None and self.process[0].dead

    @contextmanager
    def call(self, kind: str, path: str) -> Iterator[float | None]:
        """Counts a call, lets the job act, and yields the share of a write that is done, None for all."""
        if self.process is None:
            yield None
            return
        job, rank = self.process
        thread = threading.current_thread()
        if isinstance(thread, _Behind):
            made, share = thread.ask("before", partial(self._before, job, rank, kind, path))
            yield share
            thread.ask("after", partial(job.after, made))
            return
        if (behind := self.behind.get((job, rank))) is not None:
            for _ in range(job.pace):
                behind.call()
        made, share = self._before(job, rank, kind, path)
        yield share
        job.after(made)

    def _before(self, job: Job, rank: int, kind: str, path: str) -> tuple[Call, float | None]:
        if job.dead:
            raise CrashedError
        job.counts[rank] += 1
        job.counts[rank, kind] += 1
        made = Call(kind, path, rank, job.counts[rank], job.counts[rank, kind])
        share = job.before(made)
        if job.dead:  # while another process had its turn
            raise CrashedError
        return made, share

    def is_writing(self, job: Job) -> bool:
        """Whether a thread of the job writes a checkpoint."""
        return any(owner is job and not thread.ended for (owner, _), thread in self.behind.items())

    # the machine's disk

    def cut_power(self, random: Random) -> None:
        """The machine goes down: the folder is what its disk may hold, as ``random`` chooses."""
        with self._turn:
            now = {}
            for path in self.root.rglob("*"):
                if path.is_file():
                    now[os.stat(path).st_ino] = path.read_bytes()
            here = {id(node): now[ino] for ino, node in self._nodes.items() if ino in now}
            holds = self._survivors(self._top, random, here, {})
            shutil.rmtree(self.root)
            self.root.mkdir()
            self._top = _Node(is_folder=True)
            self._nodes = {os.stat(self.root).st_ino: self._top}
            self._write(self.root, self._top, holds)

    def _survivors(
        self, folder: _Node, random: Random, now: dict[int, bytes], seen: dict[int, bytes]
    ) -> dict[str, Any]:
        """Names with bytes or, for a folder, such a dict."""
        names = dict(folder.names)
        for change in folder.pending[: random.randint(0, len(folder.pending))]:
            names = _changed(names, change)
        found: dict[str, Any] = {}
        for name, node in names.items():
            if node.is_folder:
                found[name] = self._survivors(node, random, now, seen)
            else:
                if id(node) not in seen:
                    seen[id(node)] = _torn(node.content or b"", now.get(id(node), node.last), random)
                found[name] = seen[id(node)]
        return found

    def _write(self, path: Path, node: _Node, holds: dict[str, Any]) -> None:
        for name, content in holds.items():
            child, place = _Node(is_folder=isinstance(content, dict)), path / name
            if child.is_folder:
                place.mkdir()
                self._write(place, child, content)
            else:
                place.write_bytes(content)
                child.content = content
            node.names[name] = child
            self._nodes[os.stat(place).st_ino] = child

    def adopt(self) -> None:
        """Takes what lies in the folder for durable, as after a change that no process of the simulation made."""
        self._top = _Node(is_folder=True)
        self._nodes = {os.stat(self.root).st_ino: self._top}
        self._adopt(self.root, self._top)

    def _adopt(self, path: Path, node: _Node) -> None:
        for place in path.iterdir():
            child = _Node(is_folder=place.is_dir())
            node.names[place.name] = child
            self._nodes[os.stat(place).st_ino] = child
            if child.is_folder:
                self._adopt(place, child)
            else:
                child.content = place.read_bytes()

    def _node(self, path: str) -> _Node | None:
        try:
            return self._nodes.get(self._real["lstat"](path).st_ino)
        except OSError:
            return None

    def _note(self, parent: str, change: dict[str, _Node | None]) -> None:
        folder = self._node(parent)
        if folder is not None:
            folder.pending.append(change)

    # what is put in the place of the functions of os

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block every call below the folder is a call of this disk."""
        with ExitStack() as stack:
            for name, function in self._functions().items():
                stack.enter_context(patch.object(os, name, function))
            for module in (io, builtins):
                stack.enter_context(patch.object(module, "open", self._opened))
            stack.enter_context(patch.object(os, "getpid", self._pid))
            stack.enter_context(patch.object(socket, "gethostname", self._hostname))
            stack.enter_context(patch.object(safetensors.torch, "serialize_file", self._serialized))
            stack.enter_context(patch.object(tensors, "safe_open", self._safe_opened))
            stack.enter_context(patch.object(torch, "save", self._saved))
            stack.enter_context(patch.object(saving, "Thread", partial(_Behind, self)))
            yield
        for file in self._files:  # that a process left open which died; the garbage collector would warn of it
            with suppress(OSError):
                file.close()

    def _functions(self) -> dict[str, Callable[..., Any]]:
        counted = {
            "stat": "stat",
            "lstat": "stat",
            "scandir": "list",
            "listdir": "list",
            "utime": "utime",
            "truncate": "truncate",
        }
        return {
            **{name: partial(self._counted, kind, name) for name, kind in counted.items()},
            **{name: partial(self._write_fd, name) for name in ("write", "pwrite")},
            **{name: partial(self._renamed, name) for name in ("rename", "replace")},
            **{name: partial(self._removed, name, "unlink") for name in ("unlink", "remove")},
            "rmdir": partial(self._removed, "rmdir", "rmdir"),
            "open": self._os_open,
            "fsync": self._fsync,
            "link": self._link,
            "mkdir": self._mkdir,
        }

    def _pid(self) -> int:
        return self._getpid() if self.process is None else self.process[0].first_pid + self.process[1]

    def _hostname(self) -> str:
        return self._host() if self.process is None else self.process[0].host

    def _at(self, path: Any, folder: int | None = None) -> str | None:
        """The path if it is below the folder and a process of the simulation asks for it."""
        if self.process is None:
            return None
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif folder is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        text = os.fsdecode(path)
        return text if text.startswith(self._prefix) else None

    def _opened(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
        text = "" if isinstance(file, int) else os.fspath(file)
        if isinstance(text, str) and text.startswith("/proc/") and text.endswith("/stat") and self.process:
            number = text.split("/")[2]
            if number.isdecimal() and int(number) >= _FIRST_PID:
                if self._alive.get(int(number)) != self.process[0].host:
                    raise FileNotFoundError(errno.ENOENT, "no such process", text)
                return io.StringIO(f"{number} (python) R " + " ".join([number] * 40))
        path = None if isinstance(file, int) else self._at(text)
        if path is None:
            return self._open(file, mode, buffering, *rest, **options)
        raw_mode = "".join(letter for letter in mode if letter in "rwax+")
        creates = raw_mode[0] in "wax" and not self._lexists(path)
        with self.call("create" if creates else "open", path), self._turn:
            raw = _File(path, raw_mode)
            self._files.add(raw)
            if creates:
                self._created(path, is_folder=False)
        raw.disk, raw.place = self, path
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else None
        buffered = buffered or (io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw))
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **options)

    def _lexists(self, path: str) -> bool:
        try:
            self._real["lstat"](path)
        except OSError:
            return False
        return True

    def _created(self, path: str, *, is_folder: bool) -> None:
        node = _Node(is_folder=is_folder)
        self._nodes[self._real["lstat"](path).st_ino] = node
        self._note(_parent(path), {_name(path): node})

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place = self._at(path, dir_fd)
        if place is None:
            return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
        creates = bool(flags & os.O_CREAT) and not self._lexists(place)
        with self.call("create" if creates else "open", place), self._turn:
            descriptor = int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
            if creates:
                self._created(place, is_folder=False)
            return descriptor

    def _write_fd(self, name: str, descriptor: int, data: Any, *rest: Any) -> int:
        place = self._at(descriptor)
        if place is None:
            return int(self._real[name](descriptor, data, *rest))
        with self.call("write", place) as share:
            done = data if share is None else bytes(data)[: int(share * len(data))]
            return int(self._real[name](descriptor, done, *rest))

    def _fsync(self, descriptor: int) -> None:
        place = self._at(descriptor)
        if place is None:
            self._real["fsync"](descriptor)
            return
        with self.call("fsync", place), self._turn:
            node = self._nodes.get(os.fstat(descriptor).st_ino)
            if node is None:
                return
            if node.is_folder:
                for change in node.pending:
                    node.names = _changed(node.names, change)
                node.pending.clear()
            else:
                with self._open(f"/proc/self/fd/{descriptor}", "rb") as file:
                    node.content = file.read()

    def _renamed(self, name: str, source: Any, target: Any, **options: Any) -> None:
        before, after = self._at(source), self._at(target)
        if before is None or after is None:
            self._real[name](source, target, **options)
            return
        with self.call("rename", after), self._turn:
            node, over = self._node(before), self._node(after)
            if over is not None and over is not node:
                self._keep(after, over)
            self._real[name](source, target, **options)
            if _parent(before) == _parent(after):
                self._note(_parent(after), {_name(before): None, _name(after): node})
            else:
                self._note(_parent(before), {_name(before): None})
                self._note(_parent(after), {_name(after): node})

    def _keep(self, path: str, node: _Node) -> None:
        """Notes what a file held that loses its last name, as that may come back; its number may be another's then."""
        found = self._real["lstat"](path)
        if not node.is_folder and found.st_nlink == 1:
            with self._open(path, "rb") as file:
                node.last = file.read()
        if node.is_folder or found.st_nlink == 1:
            self._nodes.pop(found.st_ino, None)

    def _link(self, source: Any, target: Any, **options: Any) -> None:
        place = self._at(target)
        if place is None:
            self._real["link"](source, target, **options)
            return
        with self.call("link", place), self._turn:
            self._real["link"](source, target, **options)
            self._note(_parent(place), {_name(place): self._node(place)})

    def _removed(self, name: str, kind: str, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._at(path, dir_fd)
        if place is None:
            self._real[name](path, dir_fd=dir_fd)
            return
        with self.call(kind, place), self._turn:
            node = self._node(place)
            if node is not None and not (node.is_folder and self._real["listdir"](place)):
                self._keep(place, node)
            self._real[name](path, dir_fd=dir_fd)
            self._note(_parent(place), {_name(place): None})

    def _mkdir(self, path: Any, mode: int = 0o777, **options: Any) -> None:
        place = self._at(path)
        if place is None:
            self._real["mkdir"](path, mode, **options)
            return
        with self.call("mkdir", place), self._turn:
            self._real["mkdir"](path, mode, **options)
            self._created(place, is_folder=True)

    def _counted(self, kind: str, name: str, path: Any = ".", *rest: Any, **options: Any) -> Any:
        place = self._at(path, options.get("dir_fd"))
        if place is None:
            return self._real[name](path, *rest, **options)
        with self.call(kind, place):
            return self._real[name](path, *rest, **options)

    # what writes and reads in a library that is not Python

    def _serialized(self, data: Any, file: Any, metadata: Any = None) -> None:
        aside = self.root.parent / f".serialized-{threading.get_ident()}"
        _SERIALIZE(data, aside, metadata=metadata)
        with self._open(aside, "rb") as written:
            content = written.read()
        self._real["unlink"](aside)
        try:
            with self._opened(file, "wb", 0) as target:
                target.write(content)
        except OSError as error:
            raise SafetensorError(f"I/O error: {error}") from error

    def _safe_opened(self, file: Any, **options: Any) -> Any:
        place = self._at(file)
        if place is None:
            return _SAFE_OPEN(file, **options)
        with self.call("read", place):
            return _SAFE_OPEN(file, **options)

    def _saved(self, value: Any, file: Any, *rest: Any, **options: Any) -> None:
        buffer = io.BytesIO()
        _TORCH_SAVE(value, buffer, *rest, **options)
        if isinstance(file, io.BytesIO):
            file.write(buffer.getvalue())
            return
        with self._opened(file, "wb") as target:
            target.write(buffer.getvalue())


_parent, _name = posixpath.dirname, posixpath.basename
_SERIALIZE, _SAFE_OPEN, _TORCH_SAVE = safetensors.torch.serialize_file, tensors.safe_open, torch.save


def _changed(names: dict[str, _Node], change: dict[str, _Node | None]) -> dict[str, _Node]:
    return {name: node for name, node in {**names, **change}.items() if node is not None}


def _torn(durable: bytes, now: bytes, random: Random) -> bytes:
    if now.startswith(durable):
        kept = random.randint(len(durable), len(now))
        zeros = random.randint(0, len(now) - kept) if random.random() < 0.5 else 0
        return now[:kept] + bytes(zeros)
    return random.choice([durable, now[: random.randint(0, len(now))], now])
