"""Runs in the background, to be killed, stopped or told to leave: at the end all of their processes are gone."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from distaccum.distributed.watchdog import DIED, trouble_of
from tests.support.commands import environment, family, logged, until


class Started:
    """What a command line has started in a run directory, with all processes of it that were seen; it has a log."""

    def __init__(self, run_dir: Path, start: Sequence[str], **extra: str) -> None:
        self.run_dir, self.log = run_dir, run_dir.with_suffix(".out")
        self._found, self._seen = logged(run_dir), set[int]()
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [*start, f"hydra.run.dir={run_dir}"],
                env=environment(**extra),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_records(self, number: int) -> list[int]:
        """Its processes, the launcher first, once so many windows are logged, and one of them is its own."""
        number = max(number, self._found + 1)
        is_there = lambda: logged(self.run_dir) >= number or self.process.poll() is not None  # noqa: E731
        until(is_there, pause_s=0.002, told=self.log.read_text)
        assert self.process.poll() is None, self.log.read_text()
        return self._family()

    def _family(self) -> list[int]:
        found = family(self.process.pid)
        self._seen |= set(found)
        return found

    def end(self, within_s: float) -> int:
        """The exit code; fails if it takes longer, or if a process is left."""
        deadline = time.monotonic() + within_s
        try:
            while self.process.poll() is None:
                self._family()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.05)
            gone = lambda: all(trouble_of(pid) == DIED for pid in self._seen - {self.process.pid})  # noqa: E731
            until(gone, max(10.0, deadline - time.monotonic()))
        finally:
            for pid in self._seen | {self.process.pid}:
                if trouble_of(pid) != DIED:
                    os.kill(pid, signal.SIGKILL)
        return self.process.wait()
