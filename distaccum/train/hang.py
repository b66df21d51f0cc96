"""The watchdog of a run, from its settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import inf
from threading import TIMEOUT_MAX, Timer
from typing import Any, NoReturn

from distaccum.config.checks import seconds_of
from distaccum.config.schema import RunConfig
from distaccum.config.trainer import TrainerConfig
from distaccum.data import loading_processes
from distaccum.distributed.memory import is_out_of_memory, out_of_memory
from distaccum.distributed.signals import StopSignals
from distaccum.distributed.watchdog import Watchdog, longest_pause, write_stacks
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, DistaccumError, PeerError
from distaccum.train.failure import innermost, is_lost_connection
from distaccum.train.run_dir import RunDir

_log = logging.getLogger(__name__)


@contextmanager
def watched_start(config: Mapping[str, Any], run_dir: RunDir, rank: int) -> Iterator[tuple[float, Callable[[], None]]]:
    """Watches a rank that builds model and data, which has as long as the first window; then its stacks are written.

    Args:
        config: the run's, as plain values.
        run_dir: takes the stacks.
        rank: this one.

    Yields:
        Seconds that a rank may be later than another, and what to call once this one is ready.
    """
    try:
        trainer = RunConfig.from_dict(config).trainer
    except ConfigError:  # which this rank says itself
        trainer = TrainerConfig()
    limit = longest_pause(hang_timeout(trainer), group_timeout(trainer)) if trainer.hang_timeout else inf
    timer = Timer(min(limit, TIMEOUT_MAX), _tell_slow_start, (run_dir, rank, limit))
    timer.daemon = True
    timer.start()
    try:
        yield limit, timer.cancel
    finally:
        timer.cancel()


def _tell_slow_start(run_dir: RunDir, rank: int, limit: float) -> None:
    if not run_dir.is_foreign():
        folder = run_dir.path / "hang"
        _log.warning("building model and data takes more than %.0f s; this rank's stacks are in %s", limit, folder)
        with suppress(OSError):
            write_stacks(folder, rank, "building model and data")


def hang_timeout(config: TrainerConfig) -> float | None:
    """In seconds; None where the run measures itself, or is not watched."""
    return None if config.hang_timeout in (None, "auto") else seconds_of("trainer.hang_timeout", config.hang_timeout)


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
            timeout=hang_timeout(config),
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
    if first and isinstance(meant, DistaccumError) and not isinstance(meant, ConfigError) and not world.is_main:
        _log.error("%s", meant)  # rank 0 says what the others tell it, if it lives; a setting's error is every rank's
    if meant is error:
        raise error
    raise meant from error


def _meaning_of(error: Exception, world: World) -> Exception:
    """What is over or has died, with its remedy; else ``error`` itself."""
    return out_of_memory(error, world) if is_out_of_memory(error) else loading_processes.explain_late(error)
