"""Stands in for a worker of an elastic job: says that it is there, and leaves with the exit code that a file says.

In the folder ``STANDIN``: ``<member>`` is its process and variables, ``<member>.exit`` how it is to end,
``<member>.told`` the signal it was told to leave by, after which it ends with 0.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from distaccum.distributed.signals import die_with_parent


def _leave(number: int, _: object) -> None:
    (FOLDER / f"{MEMBER}.told").write_text(signal.Signals(number).name)
    sys.exit(0)


FOLDER, MEMBER = Path(os.environ["STANDIN"]), os.environ["DISTACCUM_MEMBER"]

if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    if os.environ.get("STANDIN_IS_DEAF") is None:
        for told in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
            signal.signal(told, _leave)
    said = {"pid": os.getpid(), "variables": dict(os.environ), "arguments": sys.argv[1:]}
    new = FOLDER / f".{MEMBER}"
    new.write_text(json.dumps(said))
    new.rename(FOLDER / MEMBER)
    wanted = FOLDER / f"{MEMBER}.exit"
    while not wanted.exists():
        time.sleep(0.01)
    sys.exit(int(wanted.read_text()))
