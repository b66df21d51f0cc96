"""The store of the launcher's ranks, joined so that whoever waits for it reads for whom, and why."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # public, though not marked as exported
from torch.distributed.rendezvous import rendezvous

from distaccum.errors import ConfigError

_log = logging.getLogger(__name__)

_SILENT_S = 3.0
_STATED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def joined(rank: int, size: int) -> Store:
    """The store at ``MASTER_ADDR`` and ``MASTER_PORT``, where it may take long until all ranks have come.

    torchrun has one before it starts any rank. Ranks of other launchers wait for each other, and so does a process that
    somebody starts in a shell which still has the variables of an earlier launcher: it waits for nobody.

    Raises:
        ConfigError: rank 0 cannot listen there, or that is no address.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdecimal() or int(port) not in range(1 << 16):
        raise ConfigError("MASTER_PORT", port, "no port", "Use a number up to 65535, or start with torchrun")
    waits = threading.Timer(_SILENT_S, _say, (address, port, size))
    waits.daemon = True
    waits.start()
    try:
        with _killable():
            store: Store = next(rendezvous("env://", rank=rank, world_size=size))[0]
    except DistError as error:
        if rank:
            raise
        why = str(error).partition("\n")[0]
        taken = "another process listens there" if "EADDRINUSE" in why else f"rank 0 cannot listen there ({why})"
        raise ConfigError("MASTER_PORT", port, taken, "Choose another port, or start with torchrun") from error
    finally:
        waits.cancel()
    return store


@contextmanager
def _killable() -> Iterator[None]:
    """Within the block SIGTERM and Ctrl-C end this process at once: it has nothing to save, and Python does not run."""
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(address: str, port: str, size: int) -> None:
    stated = ", ".join(f"{name}={os.environ.get(name, '')}" for name in _STATED)
    why = ""
    try:
        socket.getaddrinfo(address, int(port))
    except (OSError, UnicodeError) as error:  # UnicodeError of what can be no name, as with two dots
        why = f" ({address} cannot be resolved: {getattr(error, 'strerror', None) or 'it is no host name'})"
    text = "%s of the environment: waits for the %d ranks at %s:%s%s. To train in one process, unset %s"
    _log.warning(text, stated, size, address, port, why, " ".join(_STATED))
