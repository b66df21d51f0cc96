"""Run by torchrun: trains as ``launch/train.py`` does, where the second host sees what a checkpoint holds too late.

As with NFS, whose clients remember for a while that there was nothing: each entry is hidden for a second from the first
look at it on. So whoever looks once, and takes what is not there for gone, goes another way.
"""

import io
import os
import sys
import time
from collections.abc import Callable
from errno import ENOENT
from functools import wraps
from pathlib import Path
from typing import Any

from distaccum.train.cli import main

_SECONDS = 1.0


def hold_back(folder: str) -> None:
    """Hides what a run's checkpoints hold from this process, until a second has passed since it first looked for it."""
    looked, real_lstat = dict[str, float](), os.lstat

    def is_late(path: object) -> bool:
        name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if not isinstance(name, str) or not name.startswith(f"{folder}/checkpoints/step-"):
            return False
        try:
            real_lstat(name)
        except OSError:
            return False
        return time.monotonic() - looked.setdefault(name, time.monotonic()) < _SECONDS

    def hidden(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def looks(path: Any = ".", *given: Any, **named: Any) -> Any:
            if is_late(path):
                raise FileNotFoundError(ENOENT, "hidden", str(path))
            return call(path, *given, **named)

        return looks

    for name in ("stat", "lstat", "open", "scandir", "listdir"):
        setattr(os, name, hidden(getattr(os, name)))
    io.open = hidden(io.open)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        hold_back(str(Path(sys.argv[-1].removeprefix("hydra.run.dir=")).resolve()))
    main()
