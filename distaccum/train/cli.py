"""The main entry point: ``distaccum-train``, or ``torchrun ... -m distaccum.train``, with Hydra overrides.

Exit codes: 0 done, 2 bad configuration (one message on stderr), 1 anything else.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import ExitStack, redirect_stderr
from datetime import datetime
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from secrets import token_hex

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from distaccum.checkpoint.files import write_text
from distaccum.config.hydra_errors import check_overrides, from_hydra
from distaccum.config.schema import conf_dir, plain
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.signals import StopSignals, die_with_parent
from distaccum.errors import ConfigError, DistaccumError
from distaccum.train.coordination import Job, JobCoordinator, JobRejectedError
from distaccum.train.metrics.wandb import is_left_behind
from distaccum.train.run_dir import RunDir
from distaccum.train.run_job import check_job, run_job
from distaccum.train.submitit import SubmititJob

_BAD_CONFIGURATION = 2


def main() -> None:
    """Runs the job (or the sweep of jobs) that the command line describes, on this rank."""
    try:
        ranks = LaunchEnvironment.from_environment()
    except ConfigError as error:
        sys.exit(_print_config_error(error))
    with StopSignals() as signals:
        if ranks.launched:
            die_with_parent()
        agreement = JobCoordinator(ranks, ranks.store())
        exit_code = (
            _run_main_rank(ranks, agreement, signals)
            if ranks.rank == 0
            else _run_worker_rank(ranks, agreement, signals)
        )
        signals.ignore()
    if is_left_behind():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # everything of ours is written and closed
    sys.exit(exit_code)


class _Jobs:
    """What Hydra calls back for every job that it has composed, on rank 0."""

    def __init__(self, ranks: LaunchEnvironment, agreement: JobCoordinator, signals: StopSignals) -> None:
        self._ranks, self._agreement, self._signals = ranks, agreement, signals
        self._planned = _take_check(ranks)
        self.announced, self.composed, self.preempted = 0, False, False
        # Hydra prints its own errors and exits with 1. Kept until it has composed a job, they are said in our words.
        self._hydra_says, self._composing = io.StringIO(), ExitStack()
        self._composing.enter_context(redirect_stderr(self._hydra_says))

    def __reduce__(self) -> tuple[type[SubmititJob], tuple[()]]:
        """What a launcher of Hydra's takes to another machine."""
        return SubmititJob, ()

    def stop_capturing(self) -> None:
        """From here on what is printed is shown."""
        self._composing.close()

    def __call__(self, node: DictConfig) -> None:
        self.stop_capturing()
        sys.stderr.write(self._hydra_says.getvalue())  # its warnings
        self.composed = True
        run_dir = RunDir(Path(HydraConfig.get().runtime.output_dir))
        try:
            self._run(node, run_dir)
        except (ConfigError, JobRejectedError) as error:
            run_dir.write_refusal(str(error))
            sys.exit(_print_config_error(error))
        except DistaccumError as error:
            print(f"distaccum: {error}", file=sys.stderr)  # noqa: T201
            sys.exit(1)
        if self.preempted:
            sys.exit(0)  # the rest of a sweep is for the next time

    def _run(self, node: DictConfig, run_dir: RunDir) -> None:
        check_overrides(HydraConfig.get().overrides.task, str(HydraConfig.get().runtime.choices.get("engine")))
        job = Job(number=self.announced, run_dir=str(run_dir.path), config=plain(node))
        if self._planned is not None:
            check_job(job, self._planned)
            run_dir.remove_if_empty()
            return
        self.announced += 1
        self._agreement.publish(job)
        accepted = partial(_keep_hydra_files, run_dir, node)
        self.preempted = run_job(job, self._ranks, self._agreement, self._signals, accepted=accepted).preempted


def _run_main_rank(ranks: LaunchEnvironment, agreement: JobCoordinator, signals: StopSignals) -> int:
    """Rank 0: Hydra reads the command line and calls back for every job."""
    jobs = _Jobs(ranks, agreement, signals)
    exit_code = 1
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
        if not jobs.preempted:  # else the others know
            agreement.shutdown(jobs.announced, exit_code)
    return exit_code


def _take_check(ranks: LaunchEnvironment) -> LaunchEnvironment | None:
    """Takes ``--check``, or ``--check=N`` for N processes that torchrun is to start, off the command line."""
    asked = [argument for argument in sys.argv[1:] if argument.partition("=")[0] == "--check"]
    if not asked:
        return None
    sys.argv = [argument for argument in sys.argv if argument not in asked]
    processes = asked[-1].partition("=")[2]
    if not processes:
        return ranks
    if not processes.isdecimal() or processes == "0":
        error = ConfigError("--check", processes, "not a number of processes", "Use --check, or --check=2 for two")
        sys.exit(_print_config_error(error))
    return LaunchEnvironment(size=int(processes), planned=True)


def _exit_code(stop: SystemExit) -> int:
    """What the interpreter would exit with; a text is printed, as it would be."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)  # noqa: T201
    return 1


def _refuse_command_line(cause: BaseException) -> int:
    if isinstance(cause, DistaccumError) and not isinstance(
        cause, ConfigError
    ):  # of a job that a launcher took elsewhere
        print(f"distaccum: {cause}", file=sys.stderr)  # noqa: T201
        return 1
    error = from_hydra(cause, sys.argv[1:])
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
        "overrides": hydra_config.overrides.task,
    }
    folder = run_dir.path / ".hydra"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        write_text(folder / f"{name}.yaml", OmegaConf.to_yaml(content))


def _run_worker_rank(ranks: LaunchEnvironment, agreement: JobCoordinator, signals: StopSignals) -> int:
    """Every other rank: runs the jobs that rank 0 announces, and is silent about what rank 0 reports."""
    for number in count():
        job = agreement.await_job(number)
        if isinstance(job, int):
            return job
        try:
            if run_job(job, ranks, agreement, signals).preempted:
                return 0
        except JobRejectedError:
            return _BAD_CONFIGURATION
        except DistaccumError:
            return 1
    raise AssertionError


def _print_config_error(error: DistaccumError) -> int:
    print(f"distaccum: configuration error: {error}", file=sys.stderr)  # noqa: T201
    return _BAD_CONFIGURATION


def _run_name(resume: str, overrides: str) -> str:
    """A fresh name; with ``resume=auto`` one that the same command finds again."""
    if resume == "auto":
        return f"auto-{sha256(overrides.encode()).hexdigest()[:10]}"
    return f"{datetime.now().astimezone():%Y-%m-%d_%H-%M-%S}-{token_hex(2)}"


if __name__ == "__main__":
    main()
