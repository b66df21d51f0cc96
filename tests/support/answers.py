"""Programs of ``tests/distributed/workers``: how a test runs one and has its answer, and how one of them gives it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tests.support.commands import ROOT, succeed

if TYPE_CHECKING:
    from distaccum.distributed.world import World

WORKERS = ROOT / "tests" / "distributed" / "workers"


def answer(worker: str, *arguments: object, asked: Any = None, world: int = 2, **options: Any) -> Any:
    """What a worker writes into the file of its first argument; the second one is a file that holds what is asked."""
    if world == 1 and options.get("warm") == "deepspeed":
        options["LOCAL_RANK"] = "0"  # DeepSpeed asks for it
    with TemporaryDirectory() as folder:
        files = [Path(folder, "answer.json")]
        if asked is not None:
            files.append(Path(folder, "asked.json"))
            files[1].write_text(json.dumps(asked))
        script = WORKERS / f"{worker}.py"
        succeed(*files, *arguments, world=world, script=script, PYTHONPATH=str(ROOT), **options)
        return json.loads(files[0].read_text())


def give(find: Callable[[World], Any], *, timeout_s: float = 0.0, of_all: bool = False) -> None:
    """Joins the other ranks, and writes what is found there: by this rank alone, or ``of_all``.

    With ``timeout_s`` ranks that wait for each other fail, before the limit of the test ends them.
    """
    from distaccum.distributed import world  # noqa: PLC0415  a test asks without torch

    if timeout_s:
        world.GROUP_TIMEOUT = timedelta(seconds=timeout_s)
    joined = world.World.join()
    found = find(joined)
    if of_all:
        found = joined.all_gather_object(found)
    if joined.is_main:
        Path(sys.argv[1]).write_text(json.dumps(found))


def asked() -> Any:
    """What a worker is asked."""
    return json.loads(Path(sys.argv[2]).read_text())
