"""The main entry point: ``distaccum train``, or ``torchrun ... -m distaccum.train``, with Hydra overrides.

``--check`` or ``--check=N`` builds everything for this launch, or for N processes, and starts nothing; ``-v`` logs what
rank 0 does. Exit codes: 0 done, 2 bad configuration (one message on stderr), 1 anything else.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, suppress
from datetime import datetime, timedelta
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from distaccum.checkpoint.files import write_text
from distaccum.config.checks import AUTO, REPRODUCIBLE
from distaccum.config.command_line import check_overrides, register_aliases, take_flag
from distaccum.config.schema import RunConfig, as_typed, conf_dir, plain
from distaccum.config.secrets import redact, values_of
from distaccum.distributed.environment import LaunchEnvironment, accelerators, main_first
from distaccum.distributed.signals import StopSignals, die_with_parent
from distaccum.distributed.world import World, open_world
from distaccum.engines.context import EngineBuilder
from distaccum.errors import ConfigError, DistaccumError, NonFiniteError, NoObjectiveError, SpikeError
from distaccum.precision.selection import describe
from distaccum.program import FLAGS, SAID_BY_HYDRA, SUBMITIT, SWEEP, load, outlive_output
from distaccum.train.components import First, TrainingComponents, components_from_config
from distaccum.train.coordination import Job, JobCoordinator, JobRejectedError
from distaccum.train.failure import RUN_NOTE, lines_of, reason_of, tell_torchrun, watched_start
from distaccum.train.metrics.background import is_left_behind
from distaccum.train.run import Launch, RunResult, Start, prepare, run
from distaccum.train.run_dir import RunDir
from distaccum.train.run_log import enable_loggers, hide_on_stderr, log_to_stderr


def passed(components: TrainingComponents, from_step: int | None) -> str:
    """What ``--check`` says: what was built, for how many processes, and what the run would do.

    Args:
        components: all that was built.
        from_step: the step of the checkpoint that ``resume`` would continue; None without one.
    """
    begins = "" if from_step is None else f", from step {from_step} on"
    updates = f"{components.total_steps} updates{begins}"
    parts = (
        f"{type(components.model).__name__} with {components.parameters:,} parameters",
        f"{components.config.engine.name}, {describe(components.model, components.policy)}",
        components.plan.describe()[0],
        "one evaluation, no update" if components.evaluates_alone else updates,
    )
    return f"check passed: {'; '.join(parts)}"


_BAD_CONFIGURATION = 2
_RUN_DIRS = ("hydra.run.dir", "hydra.sweep.dir")
_DIVERGED = (NonFiniteError, SpikeError)  # raised on all ranks at the same window
_TRIAL_ENDS = (*_DIVERGED, NoObjectiveError)  # the other ranks are ready for the next
_log = logging.getLogger(__name__)


def main(launch: Callable[[LaunchEnvironment], Launch] = Launch) -> None:
    """Runs the job (or the sweep of jobs) that the command line describes, on this rank.

    Args:
        launch: how this process was started, of what the launcher's variables say.
    """
    arguments, verbose = take_flag(sys.argv[1:], "-v")
    sys.argv[1:] = register_aliases(arguments)
    with ExitStack() as log:
        try:
            environment = LaunchEnvironment.from_environment()
        except ConfigError as error:
            log.enter_context(log_to_stderr(0, verbose=False))
            sys.exit(_print_config_error(error))
        log.enter_context(log_to_stderr(environment.rank, verbose=verbose is not None))
        exit_code = _run_rank(environment, launch)
    if is_left_behind() or torch.distributed.is_initialized():  # a group that this rank cannot close alone
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # all files of the run are written and closed
    sys.exit(exit_code)


def _run_rank(environment: LaunchEnvironment, launch_of: Callable[[LaunchEnvironment], Launch]) -> int:
    with StopSignals() as signals:
        try:
            launch = launch_of(environment)
            if environment.launched:
                die_with_parent(launch.dies_by)
            coordinator = JobCoordinator(launch.environment, launch.store(), lost=launch.lost_at_start)
            run_jobs = _run_main_rank if launch.environment.rank == 0 else _run_worker_rank
            exit_code = run_jobs(launch, coordinator, signals)
        except ConfigError as error:
            return _print_config_error(error)
        except (torch.distributed.DistError, TimeoutError) as error:  # a run tells of its own
            place = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
            why = str(error).partition("\n")[0]
            _log.error("the launcher's store at %s is lost, and no run goes on: %s", place, why)
            return 1
        signals.ignore()
    launch.end(exit_code)
    return exit_code


def _run_job(
    job: Job,
    launch: Launch,
    coordinator: JobCoordinator,
    signals: StopSignals,
    *,
    accepted: Callable[[], None] = lambda: None,
) -> RunResult:
    """Runs one job on this rank, and calls ``accepted`` once all ranks can run it.

    Raises:
        JobRejectedError: on all ranks, before the process group, if the configuration cannot run on one of them.
    """

    run_dir, environment = RunDir(Path(job.run_dir), secrets=tuple(values_of(job.config))), launch.environment
    outlive_output()
    hide_on_stderr(run_dir.hidden)

    with watched_start(job.config, run_dir, environment.rank) as (within_s, ready):

        def agree(rejection: str | None) -> None:
            ready()
            if launch.joins:
                return  # the others run it already
            coordinator.agree(job, rejection, within_s=within_s)
            if launch.ranks_change:  # the others do not wait for rank 0: should it end here, they go on without it
                accepted()

        @contextmanager
        def open_group(device: torch.device, timeout: timedelta, backend: str) -> Iterator[World]:
            with coordinator.beginning(job, partial(reason_of, environment.rank)):
                if RUN_NOTE in os.environ and environment.rank == 0:
                    Path(os.environ[RUN_NOTE]).write_text(job.run_dir)
                accepted()
            store = coordinator.store_for(job)
            with open_world(environment, store, device, timeout, backend=backend, together=_DIVERGED) as world:
                yield world

        # Ranks that come and go have no turns in which they all take part.
        store = coordinator.store_for(job)
        first = nullcontext if launch.ranks_change else partial(main_first, environment, store)
        start = Start(
            make_components=partial(_make_components, job, environment, builder=launch.engines, first=first),
            run_dir=run_dir,
            launch=launch,
            began=monotonic(),
            signals=signals,
            agree=agree,
            open_group=open_group,
        )
        result = run(start)
    note = os.environ.get("DISTACCUM_PREEMPTED")
    if note and result.preempted:  # for launch/container.sh, on every node: torchrun's exit code does not tell
        Path(note).write_text(f"{job.run_dir}\n")
    return result


def _make_components(
    job: Job, environment: LaunchEnvironment, *, builder: EngineBuilder | None = None, first: First = nullcontext
) -> TrainingComponents:
    config = RunConfig.from_dict(job.config)
    device = environment.device(config.trainer.backend, key="trainer.backend")
    return components_from_config(
        config, world_size=environment.size, device=device, planned=environment.planned, builder=builder, first=first
    )


class _Jobs:
    """Called by Hydra on rank 0 for every job that it has composed."""

    def __init__(self, launch: Launch, coordinator: JobCoordinator, signals: StopSignals) -> None:
        self._launch, self._coordinator, self._signals = launch, coordinator, signals
        self._planned = _take_check(launch.environment)
        self._absent = frozenset(_absent(sys.argv[1:]))
        self.published, self.composed, self.preempted = 0, False, False
        # Hydra prints its own errors and exits with 1. They are kept until it has composed a job, and then reworded.
        self._captured, self._composing = io.StringIO(), ExitStack()
        self._composing.enter_context(redirect_stderr(self._captured))

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        """Pickles as what a launcher of Hydra's calls on another machine."""
        return load(SUBMITIT), ()

    def stop_capturing(self) -> None:
        """Lets stderr and the log through from here on."""
        self._composing.close()
        enable_loggers()

    def __call__(self, node: DictConfig) -> Any:
        """Runs one job; returns its objective.

        Raises:
            NonFiniteError, SpikeError, NoObjectiveError: the run diverged while a sweeper tries it: its trial failed.
        """
        self.stop_capturing()
        said = self._captured.getvalue()
        self._captured.seek(0)
        self._captured.truncate()  # the next job of a sweep tells what is new
        self.composed = True
        secrets = values_of(OmegaConf.to_container(node, resolve=False))  # what cannot be resolved is an error below
        run_dir = RunDir(Path(HydraConfig.get().runtime.output_dir), secrets=tuple(secrets))
        hide_on_stderr(run_dir.hidden)
        sys.stderr.write(run_dir.hidden(said))  # Hydra's warnings, and what a sweeper has said
        objective: Any = None
        try:
            objective = self._run(node, run_dir)
        except (ConfigError, JobRejectedError) as error:
            if self._planned is None or self._names_folder():
                run_dir.write_refusal(str(error))
            self._remove_if_empty(run_dir)
            tell_torchrun(str(error), run_dir)
            sys.exit(_print_config_error(error))
        except KeyboardInterrupt:
            raise
        except self._launch.gone as error:
            _log.warning("%s", error)
            sys.exit(1)
        except BaseException as error:  # sys.exit(0) of a user's function too
            _report(run_dir, self._launch.environment.rank, error)
            self._remove_if_empty(run_dir)
            if isinstance(error, _TRIAL_ENDS) and load(SWEEP)().tried:
                raise  # Hydra hands it to the sweeper, which decides whether it goes on
            sys.exit(1)
        if self.preempted:
            sys.exit(0)  # the same command with resume=auto runs the rest of a sweep
        return objective

    @staticmethod
    def _names_folder() -> bool:
        """Whether the command line says where the run will be: who checks a job first looks for a status there."""
        return any(override.startswith(_RUN_DIRS) for override in as_typed(HydraConfig.get().overrides.hydra))

    def _remove_if_empty(self, run_dir: RunDir) -> None:
        """Removes the folder where it is empty, and those above it that Hydra has made for it."""
        run_dir.remove_if_empty()
        for folder in run_dir.path.parents:
            if folder in self._absent and not run_dir.path.exists():
                with suppress(OSError):
                    folder.rmdir()

    def _run(self, node: DictConfig, run_dir: RunDir) -> Any:
        check_overrides(HydraConfig.get().overrides.task, str(HydraConfig.get().runtime.choices.get("engine")))
        config, sweep = _with_rehearsal(plain(node)), load(SWEEP)()
        sweep.prepare(config, run_dir)
        job = Job(number=self.published, run_dir=str(run_dir.path), config=config, tried=sweep.tried)
        if self._planned is not None:
            components = _make_components(job, self._planned)
            saved = prepare(components, run_dir, self._planned)
            from_step = None if saved is None else saved.run.progress.step
            sys.stdout.write(f"{passed(components, from_step)}\n")
            self._remove_if_empty(run_dir)
            return 0.0 if sweep.tried else None
        self.published += 1
        self._coordinator.publish(job)
        keep = partial(_keep_hydra_files, run_dir, node)
        result = _run_job(job, self._launch, self._coordinator, self._signals, accepted=keep)
        self.preempted = result.preempted
        if self.preempted:
            return None
        return sweep.objective(config, result.evaluation, run_dir)


def _with_rehearsal(config: dict[str, Any]) -> dict[str, Any]:
    """On GPUs the micro-batch is rehearsed where nobody states one."""
    fast = config.get("numerics") != REPRODUCIBLE
    if config["batch"].get("micro_size") is None and fast and accelerators()[1]:
        config["batch"]["micro_size"] = AUTO
    return config


def _run_main_rank(launch: Launch, coordinator: JobCoordinator, signals: StopSignals) -> int:
    """Rank 0: Hydra reads the command line and calls ``_Jobs`` for every job."""
    exit_code = 1
    try:
        sys.argv[1:] = register_aliases(load(FLAGS)(sys.argv[1:], own=("--check",)))
        jobs = _Jobs(launch, coordinator, signals)
    except ConfigError as error:
        exit_code = _refuse(error)
        coordinator.shutdown(0, exit_code)
        return exit_code
    OmegaConf.register_new_resolver("distaccum.run_name", _run_name, use_cache=True, replace=True)
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(jobs)()
        exit_code = 0
    except SystemExit as stop:
        exit_code = _exit_code(stop)
        if not jobs.composed and exit_code:
            jobs.stop_capturing()
            exit_code = _refuse_command_line(stop.__context__ or stop)
    except Exception as error:  # with HYDRA_FULL_ERROR Hydra raises what it otherwise prints
        if jobs.composed:
            raise
        jobs.stop_capturing()
        exit_code = _refuse_command_line(error)
    finally:
        jobs.stop_capturing()
        left = jobs.preempted or (launch.ranks_change and exit_code == 0)  # the other ranks, by themselves
        if not left:
            coordinator.shutdown(jobs.published, exit_code)
    return exit_code


def _absent(arguments: Sequence[str]) -> Iterator[Path]:
    """Folders that are not there before Hydra makes the run's: as far as the command line says where that will be."""
    stated = [value for key, _, value in (a.partition("=") for a in arguments) if key in _RUN_DIRS]
    for place in ("runs/run", *stated):
        above = Path(place.partition("${")[0] + "run").absolute().parents
        yield from (folder for folder in above if not os.path.exists(folder))  # noqa: PTH110  of any length


def _take_check(environment: LaunchEnvironment) -> LaunchEnvironment | None:
    """Takes ``--check``, or ``--check=N`` for N processes that torchrun is to start, off the command line."""
    sys.argv[1:], processes = take_flag(sys.argv[1:], "--check")
    if processes is None:
        return None
    if not processes:
        return environment
    if not processes.isdecimal() or processes == "0":
        raise ConfigError("--check", processes, "not a number of processes", "Use --check, or --check=2 for two")
    return LaunchEnvironment(size=int(processes), planned=True)


def _exit_code(stop: SystemExit) -> int:
    """The code that the interpreter would exit with; a text goes to stderr, as the interpreter does it."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _refuse_command_line(cause: BaseException) -> int:
    if isinstance(cause, DistaccumError) and not isinstance(cause, ConfigError):  # a job on another machine failed
        _log.error("%s", cause)
        return 1
    return _refuse(load(SAID_BY_HYDRA)(cause, sys.argv[1:]))


def _refuse(error: ConfigError) -> int:
    """Says what is wrong with the command line, also in the status of a run directory that it names."""
    for argument in sys.argv:
        key, _, value = argument.partition("=")
        if key == "hydra.run.dir" and "${" not in value:
            RunDir(Path(value)).write_refusal(str(error))
    return _print_config_error(error)


def _keep_hydra_files(run_dir: RunDir, node: DictConfig) -> None:
    """The files that Hydra writes, once the job is accepted: Hydra itself would write before anybody has checked."""
    hydra_config = HydraConfig.get()
    files = {
        "config": node,
        "hydra": OmegaConf.create({"hydra": hydra_config}),
        "overrides": as_typed(hydra_config.overrides.task),
    }
    folder = run_dir.path / ".hydra"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        plain_content = content if isinstance(content, list) else OmegaConf.to_container(content, resolve=False)
        kept = OmegaConf.create(redact(plain_content, run_dir.secrets))
        write_text(folder / f"{name}.yaml", OmegaConf.to_yaml(kept))


def _run_worker_rank(launch: Launch, coordinator: JobCoordinator, signals: StopSignals) -> int:
    """Every other rank: runs the jobs that rank 0 publishes, and leaves their errors to rank 0 to report."""
    for number in count():
        job = coordinator.await_job(number)
        if isinstance(job, int):
            return job
        try:
            preempted = _run_job(job, launch, coordinator, signals).preempted
            if preempted or launch.ranks_change:
                return 0
        except JobRejectedError:
            return _BAD_CONFIGURATION
        except launch.gone as error:
            _log.warning("%s", error)
            return 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            run_dir = RunDir(Path(job.run_dir), secrets=tuple(values_of(job.config)))
            _report(run_dir, launch.rank, error)
            if job.tried and isinstance(error, _DIVERGED):
                continue  # as on rank 0
            return _BAD_CONFIGURATION if isinstance(error, ConfigError) else 1
    raise AssertionError


def _report(run_dir: RunDir, rank: int, error: BaseException) -> None:
    """Rank 0, or its launcher, prints the failure; the rank that caused it one line, also in torchrun's error file."""
    reason, first = run_dir.hidden(reason_of(rank, error)), run_dir.failure()
    if "HYDRA_FULL_ERROR" in os.environ:
        sys.stderr.write(run_dir.hidden("".join(traceback.format_exception(error))))
    tell_torchrun(first or reason, run_dir)  # on every rank: torchrun may take any for the root cause
    if rank == 0 and RUN_NOTE not in os.environ:
        for line in lines_of(run_dir, reason):
            _log.error("%s", line)
    elif first in ("", reason):
        _log.error("%s", reason.removeprefix(f"rank {rank}: ") if rank else reason)


def _print_config_error(error: DistaccumError) -> int:
    _log.error("configuration error: %s", error)
    return _BAD_CONFIGURATION


def _run_name(resume: str, overrides: str) -> str:
    """A fresh name; with ``resume=auto`` one that the same command finds again."""
    if resume == "auto":
        return f"auto-{sha256(overrides.encode()).hexdigest()[:10]}"
    return f"{datetime.now().astimezone():%Y-%m-%d_%H-%M-%S}-{token_hex(2)}"


if __name__ == "__main__":
    main()
