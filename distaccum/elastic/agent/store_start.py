"""Starting the store's process, before the seconds in which the agent imports torch."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping

from distaccum.errors import DistaccumError

_ANSWER_S = 5.0


class StoreError(DistaccumError, RuntimeError):
    """There is no store where the job's agents are to meet, or none can be started there."""


def is_served(host: str, port: int) -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((host, port), timeout=_ANSWER_S):
            return True
    except OSError:
        return False


def start_store(
    port: int, *, alone: bool = False, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts the process; see :func:`port_of`. Of a job of one node, ``alone``, it listens on the loopback only.

    Its session is its own: what ends an agent's process group or its terminal does not reach it.
    """
    command = [sys.executable, "-m", "distaccum.elastic.agent.store_process", str(port), *(["alone"] if alone else [])]
    return subprocess.Popen(  # noqa: S603  this program
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )


def port_of(process: subprocess.Popen[str], port: int) -> int:
    """Waits until the store serves; returns its port.

    Raises:
        StoreError: it does not; it has said why.
    """
    assert process.stdout is not None
    with process.stdout as out:
        said = out.readline()
    if not said:
        raise StoreError(f"the store did not start on port {port} (exit code {process.wait()})")
    return int(said)
