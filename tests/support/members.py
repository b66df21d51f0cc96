"""Processes that are members of an elastic run, and the store that they share.

Each process writes what happens to it into a file of its own: a queue that they share would be locked for good by one
that is killed while it writes.
"""

import faulthandler
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

from torch.distributed import PrefixStore, TCPStore

_START = multiprocessing.get_context("forkserver")
_START.set_forkserver_preload(["tests.support.members", "distaccum.elastic.group.membership", "pytest"])


class Notes:
    """What one process has to tell."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, what: str, **more: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [json.loads(line) for line in lines]

    def of(self, what: str) -> list[dict[str, Any]]:
        return [each for each in self.read() if each["what"] == what]


def held(what: str) -> int:
    """How many files (``fd``) or threads (``task``) this process has."""
    return len(list(Path("/proc/self", what).iterdir()))


def _run(program: Callable[..., None], notes: Notes, port: int, name: str, arguments: tuple[Any, ...]) -> None:
    import torch  # noqa: PLC0415  # the server that forks has it

    faulthandler.dump_traceback_later(30)  # where a test hangs, it says where
    torch.set_num_threads(1)
    store = PrefixStore("run", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    try:
        program(store, name, notes, *arguments)
    except BaseException as error:
        notes.write("error", kind=type(error).__name__, text=str(error))
        raise
    notes.write("end", fds=held("fd"), threads=held("task"))
    os._exit(0)  # as a worker that ends with groups that it has left


class Members:
    """The processes of one test. Who dies is said to be gone in the store, as an agent does it."""

    def __init__(self, folder: Path, *, say_gone: bool = True) -> None:
        self._folder, self._say_gone = folder, say_gone
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store = PrefixStore("run", self._server.clone())
        self.processes: dict[str, Any] = {}
        self._threads: dict[str, Thread] = {}

    def start(self, name: str, program: Callable[..., None], *arguments: Any) -> None:
        process = _START.Process(
            target=_run, args=(program, self.notes(name), self._server.port, name, arguments), daemon=True
        )
        process.start()
        self.processes[name] = process
        self._threads[name] = Thread(target=self._await, args=(name, process), daemon=True)
        self._threads[name].start()

    def notes(self, name: str) -> Notes:
        return Notes(self._folder / f"{name}.jsonl")

    def signal(self, name: str, number: int = signal.SIGKILL) -> float:
        now = time.monotonic()
        os.kill(self.processes[name].pid, number)
        return now

    def say(self, member: str, how: str) -> None:
        number = self.store.add("word-numbers", 1)
        self.store.set(f"word/{number}", json.dumps({"member": member, "how": how}))
        self.store.add("words", 1)

    def await_notes(self, name: str, what: str, count: int = 1, limit_s: float = 30) -> list[dict[str, Any]]:
        deadline = time.monotonic() + limit_s
        while len(found := self.notes(name).of(what)) < count:
            assert time.monotonic() < deadline, (name, what, self.notes(name).read()[-5:])
            assert not self.notes(name).of("error"), self.notes(name).of("error")
            time.sleep(0.005)
        return found

    def join(self, limit_s: float = 30) -> dict[str, int | None]:
        """The exit codes, when all have ended or the limit is over."""
        deadline = time.monotonic() + limit_s
        for thread in self._threads.values():  # which alone ask after a process, for two at once get a wrong answer
            thread.join(max(0, deadline - time.monotonic()))
        return {
            name: None if thread.is_alive() else self.processes[name].exitcode for name, thread in self._threads.items()
        }

    def ended(self, *names: str, limit_s: float = 20) -> bool:
        """Whether these have ended by then, and well."""
        deadline = time.monotonic() + limit_s
        for name in names:
            self._threads[name].join(max(0, deadline - time.monotonic()))
        return all(not self._threads[name].is_alive() and self.processes[name].exitcode == 0 for name in names)

    def close(self) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.join()

    def _await(self, name: str, process: Any) -> None:
        process.join()
        if self._say_gone and process.exitcode:
            self.say(name, f"ended with exit code {process.exitcode}")


@contextmanager
def members(folder: Path, *, say_gone: bool = True) -> Iterator[Members]:
    started = Members(folder, say_gone=say_gone)
    try:
        yield started
    finally:
        started.close()
