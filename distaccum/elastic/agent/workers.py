"""A worker process: started with a launcher's variables, watched by its descriptor, and what it left when it ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

_UNTIL_HANDLED = (signal.SIGUSR1, signal.SIGUSR2)


class Worker:
    """A member's process, which leads a session of its own. Started from the main thread alone.

    The kernel tells a worker of the end of the thread that has started it, by which a worker dies with its agent.

    Args:
        member: its id, ``node.local.life``.
        local: its place on this node.
        command: the program and its arguments.
        environment: its whole environment.
    """

    def __init__(self, member: str, local: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.member, self.local = member, local
        with _ignored_until_handled():
            self._process = subprocess.Popen(  # noqa: S603  the program that the agent was given
                command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.pid = self._process.pid
        self.descriptor = os.pidfd_open(self.pid)
        """Readable once the process has ended."""
        self.began = monotonic()
        self.kill_at: float | None = None
        """When it is to be killed: others go on without it."""
        self.has_been_told = False
        """Whether the signal to leave was delivered."""

    def tell(self, number: int) -> None:
        """Sends a signal to the worker alone, and not to what it has started."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def catches(self, number: int) -> bool:
        """Whether it has a handler for the signal by now: while it starts it has none."""
        with suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) & 1 << (number - 1))
        return False

    def kill(self) -> None:
        """Kills it, with its whole session: it may have loading processes."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def ended(self) -> int:
        """Of one that has ended: its exit code, or minus the signal's number; ends what it has left behind."""
        self.kill()  # while it is a zombie, its number is nobody else's
        os.close(self.descriptor)
        return self._process.wait()


def how(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


@contextmanager
def _ignored_until_handled() -> Iterator[None]:
    """Within, processes start that ignore SIGUSR1 and SIGUSR2: a batch system may signal all that a job has started."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _UNTIL_HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
