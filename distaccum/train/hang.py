"""The watchdog of a run, from its settings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

from distaccum.config.durations import seconds_of
from distaccum.config.schema import TrainerConfig
from distaccum.data import loading_processes
from distaccum.distributed.signals import StopSignals
from distaccum.distributed.watchdog import Watchdog
from distaccum.distributed.world import World
from distaccum.errors import DistaccumError, PeerError
from distaccum.train.faults import innermost, is_lost_connection, is_out_of_memory, out_of_memory
from distaccum.train.run_dir import RunDir

_log = logging.getLogger(__name__)


def group_timeout(config: TrainerConfig) -> timedelta:
    """After which a collective gives up."""
    return timedelta(seconds=seconds_of("trainer.group_timeout", config.group_timeout))


@contextmanager
def watchdog(config: TrainerConfig, world: World, run_dir: RunDir, signals: StopSignals) -> Iterator[None]:
    """Watches this rank within the block, unless ``trainer.hang_timeout`` is null; a second Ctrl-C says why it ends."""
    signals.last_words = lambda reason: run_dir.write_failure(f"rank {world.rank}: {reason}")
    try:
        if config.hang_timeout is None:
            try:
                yield
            except Exception as error:
                meant = _meaning_of(error, world)
                if meant is error:
                    raise
                raise meant from error
            return
        dog = Watchdog(
            world,
            timeout=None if config.hang_timeout == "auto" else seconds_of("trainer.hang_timeout", config.hang_timeout),
            group_timeout=group_timeout(config),
            on_hang=run_dir.write_failure,
            folder=run_dir.hang,
            told=lambda: signals.told,
        )
        with dog:
            try:
                yield
            except PeerError:
                raise
            except Exception as error:
                raise_in_words(error, world, dog)
    finally:
        signals.last_words = None


def apart(crash: str) -> str:
    """What to change where a crash looks like gloo's, which aborts at collectives of different sizes; else nothing."""
    if "Aborted" not in crash:
        return ""
    return ": if each was in a collective of its own, call both on every rank, in the same order"


def raise_in_words(error: Exception, world: World, dog: Watchdog) -> NoReturn:
    """Raises ``error``, or what it means; the other ranks, whose collectives fail then, learn of it.

    Raises:
        DataError: a loading process has died.
        ResourceError: memory is over.
        PeerError: another rank has failed or is gone.
    """
    if is_lost_connection(error):
        cause, gone = dog.cause()
        here = f"rank {world.rank} was in {world.activity.now()}, at {innermost(error)}"
        here += apart(cause)
        if gone:
            cause = f"{cause}; {here}"
            if world.rank == min(set(range(world.size)) - set(gone)) != 0:
                _log.error("%s", cause)  # rank 0 cannot
        if cause:
            raise PeerError(cause, "while this rank waited for it" if gone else here) from error
    meant = _meaning_of(error, world)
    first = dog.tell(f"rank {world.rank}: {type(meant).__name__}: {meant}")
    if first and isinstance(meant, DistaccumError) and not world.is_main:
        _log.error("%s", meant)  # rank 0 says what the others tell it, if it lives
    if meant is error:
        raise error
    raise meant from error


def _meaning_of(error: Exception, world: World) -> Exception:
    """What is over or has died, with its remedy; else ``error`` itself."""
    return out_of_memory(error, world) if is_out_of_memory(error) else loading_processes.explain_late(error)
