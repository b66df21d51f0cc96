"""The control groups of Linux that limit this process: of version 2, and of version 1.

https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """The folders of each group that this process is in, and of all above it; whether they are of version 2.

    As far as they are seen: a container may see its own alone, as the topmost. None where there are no such groups.

    Args:
        controller: of version 1: ``cpu``, ``memory``, ``pids``. A folder of version 2 has the files of all of them.
        root: below which the kernel's files are read.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, name = line.split(":", 2)
        unified = number == "0"
        if unified or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / ("" if unified else controller)
            folder = top / name.lstrip("/")
            for group in (folder, *folder.parents):
                yield group, unified
                if group == top:
                    break
