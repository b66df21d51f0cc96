"""The store of an elastic job: a process of its own, which the end of an agent, by whatever signal, does not end.

``python -m distaccum.elastic.agent.store_process PORT`` prints the port that it serves (a free one for 0); with
``alone`` on the loopback, where strangers on other machines cannot speak to it, as a store has no secret. It leaves by
itself: when the job has ended and everybody has read so, or when nobody is there any more.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]  # public, not marked so

from distaccum.distributed.signals import STOP_SIGNALS
from distaccum.elastic.agent.board import ALIVE, has_ended

LINGER_S = 60.0
"""For so long after the job has ended those who are connected may stay so."""
ALONE_S = 60.0
"""Without an agent's beat and without a connection for so long, nobody will come any more."""
SILENT_S = 3600.0
"""Connections of a host that has lost its power stay open, so that silence alone ends it, too. Stopped agents, as by
Ctrl-Z, are silent while their workers train."""
_LOOK_S = 0.5


class Watch:
    """Whether the store is needed: :meth:`is_over` is to be called every ``_LOOK_S`` seconds.

    Args:
        store: this process's own client.
        now: in seconds, as every later one.
    """

    def __init__(self, store: Store, now: float) -> None:
        self._store = store
        self._beats = store.add(ALIVE, 0)  # a round trip: both ends of this process's own connection are there now
        self._own = sockets()
        self._beaten_at = self._met_at = now
        self._ended_at: float | None = None

    def is_over(self, now: float) -> bool:
        """Looks at the beats, at the connections and at the job's end."""
        is_met = sockets() > self._own
        if self._ended_at is None and has_ended(self._store):
            self._ended_at = now
        elif self._ended_at is not None:
            return not is_met or now - self._ended_at > LINGER_S
        if (beats := self._store.add(ALIVE, 0)) != self._beats:
            self._beats, self._beaten_at = beats, now
        if is_met:
            self._met_at = now
        silent_s = now - self._beaten_at
        return silent_s > SILENT_S or (silent_s > ALONE_S and now - self._met_at > ALONE_S)


def sockets() -> int:
    """The open sockets of this process."""
    found = 0
    for one in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            found += str(one.readlink()).startswith("socket:")
    return found


def _served(port: int, *, alone: bool) -> TCPStore:
    """A store on every address of this machine, as torch's own listens; ``alone``: on its loopback only."""
    if not alone:
        return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    listens = socket.create_server(("127.0.0.1", port), backlog=1024)
    port = listens.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listens.detach())


def main() -> None:
    """Serves until nobody needs it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        store = _served(int(sys.argv[1]), alone="alone" in sys.argv)
    except (DistError, OSError) as error:
        sys.exit(f"distaccum: {str(error).splitlines()[0]}")
    watch = Watch(store, monotonic())  # before anybody knows the port: only this process's own sockets are there
    sys.stdout.write(f"{store.port}\n")
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # who reads the agent's output is not to wait for this process
        os.dup2(nowhere, stream)
    while not watch.is_over(monotonic()):
        sleep(_LOOK_S)


if __name__ == "__main__":
    main()
