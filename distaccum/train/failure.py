"""What is told of a failure, or of a rank that hangs: the reason in the status, lines on the screen, the traceback."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from math import inf
from pathlib import Path
from threading import TIMEOUT_MAX, Timer
from time import time
from typing import Any, NoReturn

from distaccum.config.checks import seconds_of
from distaccum.config.trainer import TrainerConfig
from distaccum.data import loading_processes
from distaccum.distributed.memory import is_out_of_memory, out_of_memory
from distaccum.distributed.signals import StopSignals
from distaccum.distributed.watchdog import Watchdog, is_of_library, longest_pause, write_stacks
from distaccum.distributed.world import World
from distaccum.errors import GONE, ConfigError, DistaccumError, PeerError, SpikeError
from distaccum.train.run_dir import RunDir

# Errors in words: another rank that has gone, and where this one was.

# How the libraries that join the ranks say that another one is gone: gloo, NCCL, torch's store.
_LOST = re.compile(
    r"connection (closed|reset|refused|was)|closed by (remote )?peer|reset by peer|broken pipe|socket closed|gloo|nccl|"
    r"timed? ?out|remote process exited|failed to (recv|send)|EnforceNotMet",
    re.IGNORECASE,
)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective has failed, as it does when another rank is gone."""
    if isinstance(error, DistaccumError):  # whose words may name the group's timeout
        return isinstance(error, PeerError) and error.reason == GONE  # else that rank has said why
    return isinstance(error, RuntimeError | OSError) and _LOST.search(str(error)) is not None


def innermost(error: BaseException) -> str:
    """Where an error comes from, in code that is not a library's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_of_library(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "an unknown line"


RUN_NOTE = "DISTACCUM_RUN_NOTE"
"""Names the file for the run directory, written by rank 0. Its launcher, which reads it, then prints a failure."""


def reason_of(rank: int, error: BaseException) -> str:
    """``rank N: Type: message``; another rank's reason where the error follows from it."""
    if isinstance(error, PeerError):
        return error.reason
    if isinstance(error, SystemExit):
        return f"rank {rank}: the program called sys.exit({error.code!r}) in the middle of the run"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"rank {rank}: {type(error).__name__}: {error}{'. Make room there, and go on' if full else ''}"


def note_failure(run_dir: RunDir, rank: int, error: BaseException) -> None:
    """Writes the reason into the run's status and the traceback into ``logs/rank-N.log``; never raises."""
    run_dir.write_failure(reason_of(rank, error))
    if not run_dir.is_foreign():
        with suppress(OSError):  # a full disk: the status has its own reserve
            run_dir.logs.mkdir(exist_ok=True)
            with (run_dir.logs / f"rank-{rank}.log").open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}\n")
                file.write(run_dir.hidden("".join(traceback.format_exception(error))))


def tell_torchrun(reason: str, run_dir: RunDir) -> None:
    """Writes torchrun's error file, if it asked for one: its report then has the cause, and no traceback."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if name:
        more = f"; more in {run_dir.logs}" if run_dir.logs.is_dir() else ""
        told = {"py_callstack": reason + more, "timestamp": str(int(time()))}
        with suppress(OSError):
            Path(name).write_text(json.dumps({"message": {"message": reason, "extraInfo": told}}))


def lines_of(run_dir: RunDir, own: str = "") -> list[str]:
    """The failure for people: cause and rank, step, what is saved, the command that goes on, where more is.

    Args:
        run_dir: of the run.
        own: the reason of this rank, where nothing could be written.
    """
    status, saved = run_dir.status(), run_dir.saved_step()
    cause = run_dir.failure() or own or str(status.get("reason") or "unknown")
    kept = "no checkpoint was saved" if saved is None else f"step {saved} is saved in {run_dir.checkpoints}"
    lines = [f"the run failed: {_short(cause)}", f"last logged step: {status.get('step', 0)}; {kept}"]
    if saved is not None and f": {SpikeError.__name__}: " not in cause:  # which says another way on
        folder = f"hydra.run.dir={run_dir.path}"
        if not re.fullmatch(r"[\w./:@%+=-]+", folder, re.ASCII):  # for the shell, and in it for Hydra
            folder = f"\"hydra.run.dir='{run_dir.path}'\""
        lines.append(f"to go on: the same command with resume=auto {folder}")
    logs = sorted(run_dir.logs.glob("rank-*.log")) if run_dir.logs.is_dir() else []
    if logs:
        ranks = "1 rank" if len(logs) == 1 else f"{len(logs)} ranks"
        lines.append(f"logs and tracebacks: {run_dir.logs}/rank-N.log (of {ranks})")
    return lines


def _short(text: str, most: int = 12) -> str:
    lines = text.splitlines()
    left = len(lines) - most
    return "\n".join([*lines[:most], *([f"... {left} more lines"] if left > 0 else [])])


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
    own = config.get("trainer") or {}
    try:  # these two alone: to type a whole configuration takes longer than the rest of a start
        trainer = TrainerConfig(**{key: own[key] for key in ("hang_timeout", "group_timeout") if key in own})
    except (ConfigError, TypeError):  # which this rank says itself
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
            except Exception as error:
                if isinstance(error, PeerError) and not is_lost_connection(error):
                    raise
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
