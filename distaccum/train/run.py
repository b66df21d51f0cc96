"""A run from its components to its status file: the one runner, of the command line and of ``Trainer.fit``.

::

    run                before the process group: components, run directory, checkpoint; then the group, and in it
      train            the engine, what is restored, the loggers, the loop, the summary
        build_accumulator
"""

from __future__ import annotations

import logging
import random
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.settings import AccumulatorSettings
from distaccum.checkpoint.files import write_json
from distaccum.checkpoint.state import SavedState
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.batch import SAMPLES
from distaccum.config.checks import ROLLBACK, seconds_of
from distaccum.data.factory import build_loader
from distaccum.data.spec import is_map_style
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.random import RNGState
from distaccum.distributed.signals import StopSignals
from distaccum.distributed.world import World
from distaccum.engines.context import EngineBuilder
from distaccum.engines.factory import create
from distaccum.errors import ConfigError, PeerError
from distaccum.program import (
    BEGINNING,
    BESIDE,
    CRASH_LOOP,
    DESCRIBE,
    ENVIRONMENT,
    LONGEST_RANK,
    MODULES,
    NOTE_START,
    PROFILER,
    REPORT,
    REWIND,
    UTILIZATION,
    WANDB_RUN_ID,
    WINDOWS,
    load,
)
from distaccum.train.checks import loading_of
from distaccum.train.components import TrainingComponents
from distaccum.train.coordination import JobRejectedError
from distaccum.train.determinism import deterministic_for, threads_of
from distaccum.train.failure import group_timeout, is_lost_connection, note_failure, reason_of, watchdog
from distaccum.train.loop import Loop, TrainingRun
from distaccum.train.metrics.build import build_loggers, check_loggers
from distaccum.train.metrics.loggers import Logger, RunInfo
from distaccum.train.micro_batch import find_micro_batch, hardware_of, memory_noted
from distaccum.train.owner import refuse_if_held
from distaccum.train.parts.base import Called, LossScaleAlert, Part
from distaccum.train.parts.checkpoints import Checkpoints
from distaccum.train.parts.evaluations import Evaluations
from distaccum.train.parts.records import Records, SkipRecords
from distaccum.train.parts.rollback import RollBack
from distaccum.train.parts.time_limit import TimeLimit
from distaccum.train.rank_exits import Peers
from distaccum.train.resume import find_checkpoint
from distaccum.train.run_dir import RunDir, State, check_shared
from distaccum.train.run_log import RunLog
from distaccum.train.screen import Screen, open_screen
from distaccum.train.session import Session
from distaccum.train.summary import line_of_model, not_finite, print_header, print_summary, print_taken_over

_log = logging.getLogger(__name__)

_CAUSE_S = 1.0  # within which the end of another rank's process is known, where that ended a collective of this one


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended: its last evaluation, empty without one, whether another process is to continue it, and where."""

    evaluation: dict[str, float]
    preempted: bool
    run_dir: Path


class Launch:
    """How this process was started: alone, or by torchrun. Its ranks are in one process group, from start to end.

    A launcher whose ranks come and go has a class of its own.

    Args:
        environment: who this process is.
    """

    dies_by: signal.Signals = signal.SIGTERM
    """What the kernel sends this process when its launcher has died."""
    ranks_change = False
    """Whether ranks are lost and come, so that a rank waits for no other at the end."""
    joins = False
    """Whether the others run the job already."""
    gone: tuple[type[BaseException], ...] = ()
    """What a process raises that the others have gone on without."""
    engines: EngineBuilder | None = None
    """Makes engines in the place of the factory."""
    lost_at_start: Callable[[int], str] | None = None
    """Says how a rank has ended that is awaited; empty while it has not."""

    def __init__(self, environment: LaunchEnvironment) -> None:
        self.environment = environment

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.environment.rank

    def store(self) -> Store:
        """The job's, by which its processes agree."""
        return self.environment.store()

    def adapted(self, components: TrainingComponents) -> TrainingComponents:
        """The components as this launcher trains them.

        Raises:
            ConfigError: it cannot.
        """
        return components

    def train(self, start: Start) -> RunResult:
        """Opens the process group and trains."""
        return _in_group(start)

    def end(self, exit_code: int) -> None:
        """The process is about to end."""


def _alone(_: str | None) -> None:
    """Asks no other rank: an error on a rank is that rank's alone."""


def _join(_: torch.device, timeout: timedelta, backend: str) -> AbstractContextManager[World]:
    """Joins the open process group, or opens one that stays open."""
    return nullcontext(World.join(timeout, backend=backend))


@dataclass(kw_only=True)
class Start:
    """A run as this process is told to start it, and what is prepared before its ranks agree that they can run it.

    Args:
        make_components: builds them; its errors are treated as the run's. It is called again where these are used up.
        run_dir: as rank 0 names it; the other ranks use rank 0's.
        launch: how this process was started.
        began: when the run began, as ``time.monotonic`` gives it; ``trainer.max_time`` counts from there.
        signals: preempt the run; None to catch them here while it trains.
        agree: given why this rank cannot run, or None; raises JobRejectedError on all ranks if one cannot.
        open_group: opens the process group of a device, with a timeout and a backend, and closes it.
    """

    make_components: Callable[[], TrainingComponents]
    run_dir: RunDir
    launch: Launch
    began: float
    signals: StopSignals | None = None
    agree: Callable[[str | None], None] = _alone
    open_group: Callable[[torch.device, timedelta, str], AbstractContextManager[World]] = _join

    components: TrainingComponents | None = field(init=False, default=None)
    saved: SavedState | None = field(init=False, default=None)
    """The checkpoint that it begins from, on rank 0."""
    beginning: str = field(init=False, default="")
    """For the header of a run without one."""
    log: RunLog = field(init=False)
    """Of this rank."""
    owning: ExitStack = field(init=False)
    """Has the run directory, on rank 0."""

    def take(self) -> TrainingComponents:
        """The components, which the caller alone holds from here on."""
        taken, self.components = self.components, None
        assert taken is not None
        return taken


def run(start: Start) -> RunResult:
    """Prepares, agrees, opens the process group, trains, and writes how the run ended; every rank calls it.

    Raises:
        ConfigError: this rank cannot run, and no other rank was asked.
        JobRejectedError: from ``start.agree``.
        NonFiniteError: too many gradients were NaN or infinite, on every rank; the weights are untouched.
        DataError: an epoch gives nothing to train on.
    """
    launch, run_dir, environment = start.launch, start.run_dir, start.launch.environment
    with RunLog(environment.rank, hide=run_dir.hidden) as start.log, ExitStack() as start.owning:
        try:
            if environment.rank == 0:
                run_dir.make()
                start.owning.enter_context(run_dir.own())
            start.components = launch.adapted(start.make_components())
            start.saved = prepare(start.components, run_dir, environment)
            if environment.rank == 0:
                start.beginning = _begin(start.components, run_dir, start.saved)
                if start.components.config.metrics.report:
                    start.owning.enter_context(load(REPORT)(run_dir))
        except (ConfigError, PeerError) as error:  # of a peer that was to prepare something first
            start.agree(str(error))
            raise
        except BaseException as error:
            if not launch.joins:  # else the run goes on without this process
                note_failure(run_dir, environment.rank, error)
            with suppress(JobRejectedError):  # the other ranks learn of it, and this one shows where it happened
                start.agree(reason_of(environment.rank, error))
            raise
        try:
            start.agree(None)
        except PeerError as error:
            note_failure(run_dir, environment.rank, error)
            raise
        return launch.train(start)


def _begin(components: TrainingComponents, run_dir: RunDir, saved: SavedState | None) -> str:
    """Rank 0 begins a run in its folder: the history, and what the header says of a start from zero."""
    own = components.config.resume == "auto"
    load(NOTE_START)(run_dir.path)
    beginning = load(BEGINNING)(run_dir) if saved is None and own else ""
    run_dir.forget_failure()
    run_dir.begin()
    load(DESCRIBE)(components.model, components.data, components.loss, run_dir.path)
    if saved is not None and own:
        run_dir.note_saved(saved.run.progress.step)
    return beginning


def _in_group(start: Start) -> RunResult:
    """Opens the group and trains. An error from here on is written by the rank that it happens on."""
    components, run_dir, environment = start.take(), start.run_dir, start.launch.environment
    rank, trainer = environment.rank, components.config.trainer
    with Peers(run_dir, rank=rank, local_size=environment.local_size) as peers:
        joined = False
        try:
            with (
                start.open_group(components.device, group_timeout(trainer), trainer.backend) as world,
                nullcontext(start.signals) if start.signals else StopSignals() as caught,
            ):
                _log.info("%d ranks, rank %d on %s", world.size, world.rank, world.device)
                run_dir = run_dir.of_main(world)
                joined = True
                start.log.open(run_dir.logs)
                peers.enter_phase("preparing")
                peers.show(run_dir)
                try:
                    with watchdog(trainer, world, run_dir, caught):
                        session = Session(start, run_dir, world, enter_phase=peers.enter_phase)
                        ended = train(components, session, caught)
                        assert ended is not None
                        return ended
                except BaseException as error:  # written before the group closes: closing makes the other ranks fail
                    if is_lost_connection(error):
                        peers.await_cause(_CAUSE_S)
                    note_failure(run_dir, rank, error)
                    raise
        except BaseException as error:
            if not joined:
                note_failure(run_dir, rank, error)
            raise


def prepare(components: TrainingComponents, run_dir: RunDir, environment: LaunchEnvironment) -> SavedState | None:
    """Rank 0 makes the run directory and finds the checkpoint that ``resume`` asks for; the other ranks do nothing.

    Raises:
        ConfigError: the directory or the checkpoint cannot be used.
    """
    if environment.rank != 0:
        return None
    check_loggers(components.config.metrics)
    run_dir.make()
    refuse_if_held(run_dir.path)
    load(CRASH_LOOP)(run_dir.path)
    saved = find_checkpoint(components, run_dir)
    if saved is not None and components.evaluates_alone and components.config.resume == "auto":
        problem = f"and trainer.max_steps=0 would end the run in {run_dir.path}, which has a checkpoint to go on from"
        raise ConfigError("resume", "auto", problem, f"Use resume={saved.folder} or init_from, and a folder of its own")
    return saved


def train(components: TrainingComponents, session: Session, signals: StopSignals) -> RunResult | None:
    """Trains from where the ``session`` begins; a collective. None where it ends before the run.

    ``signals`` can preempt it.
    """
    config, run_dir, world = components.config, session.run_dir, session.world
    with (
        deterministic_for(config),
        threads_of(config, components.device),
        open_screen(components.total_steps, world, signals, records=config.metrics.console) as screen,
    ):
        if world.is_main:
            run_dir.write_status(State.RUNNING, step=session.step)
        if config.checkpoint.saves and session.is_first:
            check_shared(run_dir.path, world)
        with ExitStack() as closing:
            run, generators = prepare_run(components, session, screen, closing)
            loop = session.loop(run, open_parts(run, screen.console, closing))
            screen.follow(lambda: loop.known_progress, lambda: loop.waited_s, run.utilization)
            generators.restore()  # modules that were imported for the header and the loggers may have drawn
            session.enter(run.accumulator, screen.console)
            with signals.notify(loop.preempt):
                evaluation = session.fit(loop)
            if evaluation is None:
                return None
            screen.enter("ending")
            for logger in run.loggers if loop.preempted else ():
                logger.mark_preempted()
        if screen.console is not None:
            _end(run, loop, evaluation, screen.console, session=session)
        run.accumulator.close()  # the model and the optimizer may be trained on with
        return RunResult(evaluation=evaluation, preempted=loop.preempted, run_dir=run_dir.path)


def prepare_run(
    components: TrainingComponents, session: Session, screen: Screen, closing: ExitStack
) -> tuple[TrainingRun, RNGState]:
    """Restores, wraps and opens what a run takes until ``closing``.

    With the run come the random numbers that it begins with: what is imported until then may draw.
    """
    run_dir, world, config = session.run_dir, session.world, components.config
    screen.enter(session.says)
    for callback in components.callbacks if session.is_first else ():
        callback.forget()
    restore = session.restore(components)
    utilization = load(UTILIZATION)(components, world.size) if world.is_main else None
    modules = load(MODULES)(components.model) if world.is_main else []  # an engine may take it apart
    accumulator = build_accumulator(components, world, verify=session.verify(config.trainer.verify))
    session.prepare(accumulator, closing)
    # The micro-batch that is known or rehearsed; what fits is noted until the end.
    hardware, marks = hardware_of(components, world), accumulator.engine.memory_marks
    closing.enter_context(memory_noted(run_dir, marks, restore.memory, hardware, world, resume=config.resume))
    if config.batch.rehearses:
        screen.enter("rehearsing")
    components = find_micro_batch(components, accumulator, restore.memory, hardware)
    # What draws outside micro-steps differs between ranks; initial weights do not.
    _seed(config.seed + world.rank)
    workers = loading_of(components.data, config, components.most_ahead)
    loader = build_loader(components.data, components.plan, world, workers=workers, seed=config.seed)
    wandb_id, note = restore.after_wrap(accumulator, wandb_id=load(WANDB_RUN_ID)())
    generators = RNGState.capture(world.device)
    closing.callback(accumulator.close, alone=session.closes_alone)  # the model's owner may train it further
    run = TrainingRun(
        components=components,
        accumulator=accumulator,
        loader=loader,
        run_dir=run_dir,
        store=CheckpointStore(run_dir.checkpoints, keep=config.checkpoint.keep),
        enter_phase=screen.and_show(session.enter_phase),
        tell_saved=screen.saved,
        wandb_id=wandb_id,
        logged=restore.logged,
        utilization=utilization,
        began=session.began,
        saved_step=session.saved_step,
        saved_ago_s=session.saved_ago_s(),
    )
    if screen.console is not None:
        opened = partial(_open_loggers, run, session, screen, note or session.beginning, modules)
        run = replace(run, loggers=session.loggers(opened, closing))
    return run, generators


def _open_loggers(
    run: TrainingRun, session: Session, screen: Screen, note: str, modules: Sequence[str]
) -> list[Logger]:
    """Rank 0 says what begins, in the run directory and on the screen, and opens the loggers of a run without any.

    Args:
        run: of this process.
        session: of the run.
        screen: has the console.
        note: for the header.
        modules: of the model, as lines for the header.
    """
    components, accumulator, run_dir, console = run.components, run.accumulator, run.run_dir, screen.console
    config, engine, progress = components.config, accumulator.engine, accumulator.progress
    assert console is not None
    run_dir.require_owned()
    rewind = partial(load(REWIND), before_writing=run_dir.require_owned)
    rewind(run_dir.metrics, progress.window, logged=run.logged)
    rewind(run_dir.windows, progress.window)
    plan = components.plan.as_dict() | {
        "total_steps": components.total_steps,
        "engine": engine.describe(),
        "model": line_of_model(components),
        "data": run_dir.hidden(components.data.description),
        **({"memory": components.memory} if config.batch.rehearses else {}),
        **({"optimizer_groups": list(map(asdict, components.groups))} if components.groups else {}),
    }
    for name, content in {"plan.json": plan, **engine.facts.artifacts}.items():
        write_json(run_dir.path / name, dict(content))
    commit = _git_commit()
    load(ENVIRONMENT)(run_dir, session.world, progress, components=components, before=session.before, git_commit=commit)
    info = RunInfo(
        folder=run_dir.path,
        id=run.wandb_id,
        window=progress.window,
        step=progress.step,
        total_steps=components.total_steps,
        config=components.record,
        plan=plan,
        git_commit=commit,
    )
    if session.first_to("print the header"):
        print_header(components, engine, run_dir, note, console, modules=modules)
    else:
        print_taken_over(progress, session.world.size, console)
    return build_loggers(
        config.metrics,
        config.checkpoint,
        info,
        screen.logger,
        device=session.world.device,
        given=components.loggers,
        progress=lambda: accumulator.tracker.known_progress,
        users=[*components.callbacks, components.loss],
    )


def open_parts(run: TrainingRun, console: Any, closing: ExitStack) -> list[Part]:
    """All that a run does beside training, in its order; files stay open until ``closing``.

    A window's own record is the first. A callback's average has the update before it is evaluated; the record of an
    update comes before its checkpoint, so that a run which dies between the two makes no update again. The time of all
    that is the time limit's to count, and a profile's window ends last.
    """
    components, engine, world = run.components, run.accumulator.engine, run.accumulator.world
    config, found = components.config, list[Part]()
    if config.metrics.windows:
        file = run.run_dir.windows if world.is_main else None
        numbered = is_map_style(components.data.train)
        recorder = load(WINDOWS)(engine, components.optimizers, world, file=file, numbered=numbered)
        closing.callback(recorder.close)
        found.append(recorder)
    stated = config.trainer.max_time
    max_time = None if stated is None else seconds_of("trainer.max_time", stated)
    time_limit = TimeLimit(max_time, began=run.began, parameters=components.parameters)
    records, checkpoints = Records(run), Checkpoints(run, time_limit)
    found += [
        LossScaleAlert(engine.facts.min_loss_scale),
        SkipRecords(records),
        *(Called(callback, components.optimizers) for callback in components.callbacks),
        records,
        Evaluations(run),
        checkpoints,
    ]
    if config.batch.balance != SAMPLES:
        found.append(load(LONGEST_RANK)(components.plan))
    if config.trainer.on_spike == ROLLBACK:
        found.append(RollBack(run, checkpoints))
    found.append(time_limit)
    if config.profile.steps is not None:
        profiler = load(PROFILER)(config.profile, engine, run.run_dir.path / "profile", console=console)
        closing.callback(profiler.close)
        found.append(profiler)
    return found


def _end(run: TrainingRun, loop: Loop, evaluation: Mapping[str, float], console: Any, *, session: Session) -> None:
    """Rank 0 says how the run has ended."""
    session.ended()
    state = State.PREEMPTED if loop.preempted else State.DONE
    reason = "; ".join(filter(None, (loop.stop_reason, not_finite(evaluation))))
    run.run_dir.write_status(state, step=loop.progress.step, reason=reason)
    if session.first_to("print the summary"):
        best = None
        with suppress(OSError):  # it is for people alone
            best = run.store.best(only_reads=True)
        print_summary(
            run.components,
            loop.progress,
            evaluation,
            run.run_dir,
            console,
            state=state,
            stop_reason=loop.stop_reason,
            best=best,
        )


def build_accumulator(components: TrainingComponents, world: World, *, verify: str | None = None) -> Accumulator:
    """The accumulator that the configuration describes; ``verify`` in the place of what that says."""
    config = components.config
    settings = AccumulatorSettings(
        global_batch_size=None if config.batch.schedule else config.batch.global_size,  # its plan says it
        micro_batch_size=config.batch.first_micro_size,
        count=components.loss.count,
        schedule=components.lr_factor,
        nonfinite=config.trainer.nonfinite,
        max_skips=config.trainer.max_skips,
        verify=verify or config.trainer.verify,
        verify_allow=config.trainer.verify_allow,
        on_divergence=config.trainer.on_divergence,
        on_spike="skip" if config.trainer.on_spike == ROLLBACK else config.trainer.on_spike,
        spike_zscore=config.trainer.spike_zscore,
        spike_window=config.trainer.spike_window,
        clip_norm=components.engine.clip_norm,
        clip_value=components.engine.clip_value,
        seed=config.seed,
    )
    engine = create(components.engine, components.model, components.optimizers, world)
    if engine.compiled is not None:
        engine.compiled.add_loss(components.loss)
    accumulator: Accumulator = load(BESIDE)(components, Accumulator.of_engine(engine, components.optimizers, settings))
    return accumulator


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  what users' code draws from


def _git_commit() -> str | None:
    """The commit of the folder that the run was started from, if it is a git checkout."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=5)  # noqa: S607
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
