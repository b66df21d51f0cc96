"""One job from its resolved configuration to its status file, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.schema import from_node
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.signals import StopSignals
from distaccum.distributed.world import open_world
from distaccum.errors import ConfigError
from distaccum.train.components import TrainingComponents, components_from_config
from distaccum.train.coordination import Job, JobCoordinator, JobRejectedError
from distaccum.train.resume import find_start
from distaccum.train.run import RunResult, train
from distaccum.train.run_dir import RunDir


def _nothing() -> None:
    pass


def run_job(
    job: Job,
    ranks: LaunchEnvironment,
    agreement: JobCoordinator,
    signals: StopSignals,
    *,
    accepted: Callable[[], None] = _nothing,
) -> RunResult:
    """Prepares, agrees, calls ``accepted``, trains and reports.

    Raises:
        RefusedError: on all ranks, before the process group, if the configuration cannot run on one of them.
    """
    began, run_dir = monotonic(), RunDir(Path(job.run_dir))
    parts, start, store = _agree_on_parts(job, run_dir, ranks, agreement)
    accepted()
    with open_world(ranks, agreement.store_for(job), parts.device) as world:
        try:
            return train(parts, start, store, run_dir, world, signals=signals, began=began)
        except BaseException as error:  # written before the group closes: that is what makes the other ranks fail
            run_dir.write_failure(_reason(ranks, error))
            raise


def check_job(job: Job, ranks: LaunchEnvironment) -> None:
    """Builds all that can be built before a process group, and leaves nothing behind; ``ranks`` may be planned only.

    Raises:
        RefusedError: if the configuration cannot run.
    """
    run_dir = RunDir(Path(job.run_dir))
    try:
        _prepare(job, run_dir, ranks)
    except ConfigError as error:
        raise JobRejectedError(str(error)) from error


def _prepare(
    job: Job, run_dir: RunDir, ranks: LaunchEnvironment
) -> tuple[TrainingComponents, Path | None, CheckpointStore]:
    config = from_node(job.config)
    parts = components_from_config(config, world_size=ranks.size, device=ranks.device(), planned=ranks.planned)
    store = CheckpointStore(run_dir.checkpoints, keep=config.checkpoint.keep)
    if ranks.rank != 0:
        return parts, None, store
    run_dir.make()
    start = find_start(config, run_dir, store, parts.plan.position, model=parts.model, world_size=ranks.size)
    return parts, start, store


def _agree_on_parts(
    job: Job, run_dir: RunDir, ranks: LaunchEnvironment, agreement: JobCoordinator
) -> tuple[TrainingComponents, Path | None, CheckpointStore]:
    try:
        ready = _prepare(job, run_dir, ranks)
        if ranks.rank == 0:
            run_dir.forget_failure()
    except ConfigError as error:
        agreement.agree(job, str(error))
        raise AssertionError from error  # settle has raised
    except BaseException as error:
        run_dir.write_failure(_reason(ranks, error))
        with suppress(JobRejectedError):  # the other ranks are told, and this one shows where it happened
            agreement.agree(job, _reason(ranks, error))
        raise
    agreement.agree(job, None)
    return ready


def _reason(ranks: LaunchEnvironment, error: BaseException) -> str:
    return f"rank {ranks.rank}: {type(error).__name__}: {error}"
