"""Storage that all ranks share: found out before the first window, not when the first checkpoint is sealed."""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep

from distaccum.distributed.world import World
from distaccum.errors import ConfigError, shorten

_PATIENCE_S = 20.0  # a network file system shows a new file to other hosts after its caches have aged


def check_shared(folder: Path, world: World) -> None:
    """Whether every rank sees what rank 0 writes into ``folder``; a collective.

    Raises:
        ConfigError: one does not; the same on every rank.
    """
    if world.size == 1:
        return
    name = world.broadcast_str(f".shared-{token_hex(8)}")
    mark = folder / name
    if world.is_main:
        mark.touch()
    world.barrier()
    blind = world.all_gather_names([] if _sees(mark) else [f"rank {world.rank}"])
    if world.is_main:
        mark.unlink(missing_ok=True)
    if blind:
        problem = f"{shorten(blind)} cannot see what rank 0 writes there, and every rank writes a part of a checkpoint"
        remedy = "Give an absolute path on a file system that all hosts share, or checkpoint.every=0"
        raise ConfigError("hydra.run.dir", folder, problem, remedy)


def _sees(mark: Path) -> bool:
    latest = monotonic() + _PATIENCE_S
    while not (found := mark.exists()) and mark.parent.is_dir() and monotonic() < latest:
        sleep(0.1)
    return found
