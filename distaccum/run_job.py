"""One job from its resolved configuration to its status file, on one rank."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from secrets import token_hex

import numpy as np
import torch
from rich.console import Console

from distaccum.agreement import Agreement, Job, RefusedError
from distaccum.build import Parts, build_engine, build_parts, build_sinks
from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint.store import CheckpointStore
from distaccum.clocks import Clocks
from distaccum.config import from_node
from distaccum.errors import ConfigError
from distaccum.metrics.sinks import Sink, rewind_jsonl
from distaccum.report import introduce, summarise
from distaccum.resume import find_start
from distaccum.run_dir import RunDir, State
from distaccum.trainer import Trainer, position
from distaccum.world import Ranks, World, open_world


def _nothing() -> None:
    pass


def run_job(job: Job, ranks: Ranks, agreement: Agreement, *, accepted: Callable[[], None] = _nothing) -> None:
    """Prepares, agrees, calls ``accepted``, trains and reports.

    Raises:
        RefusedError: on all ranks, before the process group, if the configuration cannot run on one of them.
    """
    run_dir = RunDir(Path(job.run_dir))
    parts, start, store = _agree_on_parts(job, run_dir, ranks, agreement)
    accepted()
    with open_world(ranks, agreement.store_for(job), parts.device) as world:
        try:
            _train(parts, start, store, run_dir, world)
        except BaseException as error:  # written before the group closes: that is what makes the other ranks fail
            run_dir.write_failure(_reason(ranks, error))
            raise


def check_job(job: Job, ranks: Ranks) -> None:
    """Builds all that can be built before a process group, and leaves nothing behind.

    Raises:
        RefusedError: if the configuration cannot run.
    """
    run_dir = RunDir(Path(job.run_dir))
    try:
        _prepare(job, run_dir, ranks)
    except ConfigError as error:
        raise RefusedError(str(error)) from error


def _prepare(job: Job, run_dir: RunDir, ranks: Ranks) -> tuple[Parts, Path | None, CheckpointStore]:
    config = from_node(job.config)
    parts = build_parts(config, world_size=ranks.size, device=ranks.device())
    store = CheckpointStore(run_dir.checkpoints, keep=config.checkpoint.keep)
    if ranks.rank != 0:
        return parts, None, store
    run_dir.make()
    return parts, find_start(config.resume, run_dir, store, position(parts)), store


def _agree_on_parts(
    job: Job, run_dir: RunDir, ranks: Ranks, agreement: Agreement
) -> tuple[Parts, Path | None, CheckpointStore]:
    try:
        ready = _prepare(job, run_dir, ranks)
        if ranks.rank == 0:
            run_dir.forget_failure()
    except ConfigError as error:
        agreement.settle(job, str(error))
        raise AssertionError from error  # settle has raised
    except BaseException as error:
        run_dir.write_failure(_reason(ranks, error))
        with suppress(RefusedError):  # the other ranks are told, and this one shows where it happened
            agreement.settle(job, _reason(ranks, error))
        raise
    agreement.settle(job, None)
    return ready


def _reason(ranks: Ranks, error: BaseException) -> str:
    return f"rank {ranks.rank}: {type(error).__name__}: {error}"


def _train(parts: Parts, start: Path | None, store: CheckpointStore, run_dir: RunDir, world: World) -> None:
    if world.is_main:
        run_dir.write_status(State.RUNNING, step=0)
    checkpoint_path = world.text_from_main(str(start or ""))
    engine = build_engine(parts, world)
    _seed(parts.config.seed + world.rank)  # dropout differs between ranks; the initial weights did not
    clocks, wandb_id, note = Clocks(), token_hex(4), ""
    if checkpoint_path:
        run = checkpoint.read(Path(checkpoint_path))
        clocks = run.clocks
        if parts.config.resume == "auto":  # a run started from a named checkpoint is another run
            wandb_id = run.wandb_id
        continued = checkpoint.load(Path(checkpoint_path), engine, world)
        note = f"resuming {checkpoint_path} at step {clocks.step}"
        note += "" if continued else "; another world size, so dropout draws fresh random numbers"
    console = Console()
    with ExitStack() as closing:
        sinks = []
        if world.is_main:
            rewind_jsonl(run_dir.metrics, clocks.step)
            plan = parts.plan.as_dict() | {"total_steps": parts.total_steps}
            run_dir.write_plan(plan)
            about = {"config": asdict(parts.config), "plan": plan, "git_commit": _git_commit()}
            introduce(parts, world, run_dir, note, console)
            sinks = build_sinks(parts, run_dir, console, wandb_id=wandb_id, about=about)
            for sink in sinks:
                closing.push(partial(_close, sink))
        trainer = Trainer(
            parts, engine, world, run_dir=run_dir, store=store, sinks=sinks, clocks=clocks, wandb_id=wandb_id
        )
        evaluation = trainer.fit()
    if world.is_main:
        run_dir.write_status(State.DONE, step=trainer.clocks.step)
        summarise(parts, trainer.clocks, evaluation, run_dir, console)


def _close(sink: Sink, kind: type[BaseException] | None, *_: object) -> None:
    sink.close(failed=kind is not None)


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
