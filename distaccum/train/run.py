"""One training run in an open process group: the engine, what is resumed, the sinks, the loop, the report."""

from __future__ import annotations

import random
import subprocess
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex

import numpy as np
import torch
from rich.console import Console

from distaccum.accumulation.accumulator import Accumulator
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.durations import seconds_of
from distaccum.data.factory import build_loader
from distaccum.data.loader import WindowLoader
from distaccum.distributed.signals import StopSignals
from distaccum.distributed.world import World
from distaccum.train.callbacks import named
from distaccum.train.components import TrainingComponents, build_loggers
from distaccum.train.loop import Loop
from distaccum.train.metrics.loggers import Logger, rewind_jsonl
from distaccum.train.origin import Restore
from distaccum.train.report import print_header, print_summary
from distaccum.train.run_dir import RunDir, State
from distaccum.train.time_limit import Deadline


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended: its last evaluation, empty without one, and whether it is to be continued."""

    evaluation: dict[str, float]
    preempted: bool


def train(
    parts: TrainingComponents,
    start: Path | None,
    store: CheckpointStore,
    run_dir: RunDir,
    world: World,
    *,
    signals: StopSignals,
    began: float,
) -> RunResult:
    """Trains ``parts`` from the checkpoint ``start`` (as rank 0 has it), or from zero.

    ``signals`` can preempt it; ``trainer.max_time`` counts from ``began``, as ``time.monotonic`` told it.
    """
    if world.is_main:
        run_dir.write_status(State.RUNNING, step=0)
    checkpoint_path = world.broadcast_str(str(start or ""))
    origin = Restore.of(checkpoint_path, parts, world)
    origin.fill_model()
    accumulator, feed = build_accumulator(parts, world)
    wandb_id, note = token_hex(4), origin.init(accumulator.engine)
    if origin.path is not None:
        wandb_id, note = _resume(origin, parts, accumulator, feed, wandb_id)
    console = Console()
    with ExitStack() as closing:
        loggers: list[Logger] = []
        if world.is_main:
            rewind_jsonl(run_dir.metrics, accumulator.progress.window)
            plan = parts.plan.as_dict() | {"total_steps": parts.total_steps, "engine": accumulator.engine.describe()}
            run_dir.write_plan(plan)
            about = {"config": asdict(parts.config), "plan": plan, "git_commit": _git_commit()}
            print_header(parts, accumulator.engine, run_dir, note, console)
            run_dir.write_artifacts(accumulator.engine.artifacts)
            loggers = build_loggers(parts, run_dir, console, wandb_id=wandb_id, about=about)
            for logger in loggers:
                closing.push(partial(_close, logger))
        loop = Loop(
            parts,
            accumulator,
            feed,
            run_dir=run_dir,
            store=store,
            loggers=loggers,
            wandb_id=wandb_id,
            deadline=_deadline(parts, began),
        )
        with signals.notify(loop.preempt):
            evaluation = loop.fit()
        for logger in loggers if loop.preempted else ():
            logger.mark_preempted()
    if world.is_main:
        state = State.PREEMPTED if loop.preempted else State.DONE
        run_dir.write_status(state, step=loop.progress.step, reason=loop.stop_reason)
        print_summary(parts, loop.progress, evaluation, run_dir, console, state=state, stop_reason=loop.stop_reason)
    return RunResult(evaluation=evaluation, preempted=loop.preempted)


def _deadline(parts: TrainingComponents, began: float) -> Deadline:
    max_time = parts.config.trainer.max_time
    seconds = None if max_time is None else seconds_of("trainer.max_time", max_time)
    return Deadline(seconds, began=began, parameters=parts.parameters)


def build_accumulator(parts: TrainingComponents, world: World) -> tuple[Accumulator, WindowLoader]:
    config = parts.config
    accumulator = Accumulator(
        parts.model,
        parts.optimizers,
        global_batch_size=config.batch.global_size,
        micro_batch_size=config.batch.micro_size,
        count=parts.loss.count,
        schedule=parts.schedule,
        clip_norm=config.optim.clip_norm,
        clip_value=config.optim.clip_value,
        nonfinite=config.trainer.nonfinite,
        max_skips=config.trainer.max_skips,
        engine=config.engine,
        precision=config.precision,
        seed=config.seed,
        prefetch=config.trainer.prefetch,
        world=world,
    )
    _seed(config.seed + world.rank)  # dropout differs between ranks; the initial weights did not
    feed = build_loader(
        parts.source,
        parts.plan,
        world,
        num_workers=config.trainer.num_workers,
        group_by_length=config.batch.group_by_length,
    )
    return accumulator, feed


def _resume(
    origin: Restore, parts: TrainingComponents, accumulator: Accumulator, feed: WindowLoader, wandb_id: str
) -> tuple[str, str]:
    """Takes up a checkpoint; returns the W&B run's id and a line for the report."""
    run, continued, data = origin.take_up(accumulator)
    if parts.config.resume == "auto":  # a run started from a named checkpoint is another run
        wandb_id = run.wandb_id
    accumulator.restore(run.progress, run.position, data)
    for name, callback in named(parts.callbacks).items():
        if name in run.callbacks:
            callback.load_state_dict(run.callbacks[name])
    carried = "everything carries over"
    if not origin.carries_optimizer:
        begins_anew = f"optimizer state ({run.optimizer_format}) and loss scale do not"
        carried = f"weights, clocks and data carry over, {begins_anew}"
    note = f"resuming {origin.path} at step {run.progress.step}; {carried} ({origin.saved_by(run)})"
    return wandb_id, note + ("" if continued else "; another world size, so dropout draws fresh random numbers")


def _close(logger: Logger, kind: type[BaseException] | None, *_: object) -> None:
    logger.close(failed=kind is not None)


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
