"""How an agent comes to the store: node 0's starts it, or finds the one that it has left; the others join."""

from __future__ import annotations

import subprocess
from datetime import timedelta
from time import monotonic, sleep

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.elastic.agent.board import has_ended
from distaccum.elastic.agent.store_start import StoreError, is_served, port_of, start_store

JOIN_S = 900.0
"""Nodes may start so far apart."""
_LOOK_S = 0.5
_CONNECT_S = 30.0
_STORE_S = 60.0


def serve(host: str, port: int, started: subprocess.Popen[str] | None, *, alone: bool = False) -> tuple[TCPStore, int]:
    """What node 0's agent does: joins the store at this address, or starts one where there is none.

    Args:
        host: this machine, as the others reach it.
        port: 0 for a free one.
        started: the store's process, where it was started already.
        alone: no other node is to reach it.

    Returns:
        a client, and the port.

    Raises:
        StoreError: the port is taken by something else, or no store has come up.
    """
    while started is None:
        if not is_served(host, port):
            started = start_store(port, alone=alone)
        elif (store := _joined(host, port)) is not None:
            return store, port
        else:
            sleep(_LOOK_S)  # of a job that has ended: it leaves in a moment
    port = port_of(started, port)
    return _connected(host, port), port


def join(host: str, port: int, within_s: float = JOIN_S) -> TCPStore:
    """What the other agents do: they wait for node 0's store.

    Raises:
        StoreError: there is none after so many seconds.
    """
    latest = monotonic() + within_s
    while monotonic() < latest:
        if is_served(host, port) and (store := _joined(host, port)) is not None:
            return store
        sleep(_LOOK_S)
    who = "the agent with --node-rank=0 starts the store"
    raise StoreError(f"no job is at {host}:{port} after {within_s:.0f} s: {who}")


def _joined(host: str, port: int) -> TCPStore | None:
    """A client; none where the job has ended, whose store is about to leave."""
    store = _connected(host, port)
    try:
        return None if has_ended(store) else store
    except DistError:
        return None


def _connected(host: str, port: int) -> TCPStore:
    within = timedelta(seconds=_CONNECT_S)
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=within)
    except DistError as error:
        raise StoreError(f"{host}:{port} is no store: {str(error).splitlines()[0]}") from error
    store.set_timeout(timedelta(seconds=_STORE_S))
    return store
