"""The header and the summary of a run, for people."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint.files import BEST
from distaccum.data.loader import padding_share
from distaccum.data.loading_processes import prefetch_factor
from distaccum.data.packing import PackCollator
from distaccum.data.plan.batch import Ids, Plan
from distaccum.data.spec import DataSpec
from distaccum.engines.base import Engine
from distaccum.errors import shorten
from distaccum.precision.selection import describe
from distaccum.program import BEST_EVALUATION, STAGES, load
from distaccum.train.checks import loading_of
from distaccum.train.components import TrainingComponents
from distaccum.train.run_dir import RunDir, State
from distaccum.train.screen import say, shown

if TYPE_CHECKING:
    from rich.console import Console

_MARGIN = 11  # columns of the header's names


def line_of_model(components: TrainingComponents) -> str:
    """The model's own class, where ``fully_shard`` has made one of it and of torch's, and its parameters."""
    classes = type(components.model).__mro__
    own = next(kind.__name__ for kind in classes if not kind.__module__.startswith("torch.distributed.fsdp"))
    return f"{own}, {components.parameters:,} parameters"


def print_header(
    components: TrainingComponents,
    engine: Engine,
    run_dir: RunDir,
    note: str,
    console: Console,
    *,
    modules: Sequence[str] = (),
) -> None:
    """Prints model, data, engine, precision and the batch plan; below the model the lines of its ``modules``."""
    plan, config = components.plan, components.config
    lines = {
        "run": f"{shown(run_dir.path)}" + (f" ({note})" if note else ""),
        "world": f"{plan.world_size} x {engine.device.type}",
        "engine": f"{config.engine.name}: {engine.describe()}",
        "precision": describe(components.model, components.policy),
        "data": components.data.description + (", drawn by weight" if components.data.weights is not None else ""),
        "model": line_of_model(components),
        **_loading(components),
        "plan": plan.describe()[0],
        "epoch": f"{plan.describe()[1]}; {_updates(components)}",
    }
    if config.batch.scales:
        lines["stages"] = load(STAGES)(components)
    if reason := components.memory.get("reason"):
        lines["memory"] = str(reason)
    if components.groups:
        lines["groups"] = "; ".join(map(str, components.groups))
    if components.data.lengths is not None and not plan.is_stream:
        lines["pad"] = _padding(components.data, components.data.lengths, plan, config.batch.group_by_length)
    for name, line in lines.items():
        say(console, f"{name:<{_MARGIN}}{line}", indent=_MARGIN)
        for row in modules if name == "model" else ():
            say(console, f"{'':<{_MARGIN}}{row}", indent=_MARGIN + 2)


def print_taken_over(progress: Progress, ranks: int, console: Console) -> None:
    """Prints that this process is rank 0 from here on, in the place of one that was lost."""
    line = f"process {os.getpid()} is rank 0 now, of {ranks}; {progress.window} steps are done"
    say(console, f"{'rank 0':<{_MARGIN}}{line}", indent=_MARGIN)


def _loading(components: TrainingComponents) -> dict[str, str]:
    """What the loading processes that distaccum starts have ahead, if there are any."""
    plan, workers = components.plan, loading_of(components.data, components.config, components.most_ahead)
    factor = prefetch_factor(workers, plan.items_of_window)
    if factor is None:
        return {}
    items = "samples" if plan.is_stream else "micro-batches"
    ahead = f"up to {workers.num_workers * factor} {items} ahead"
    return {"loading": f"{workers.num_workers} processes on each rank, {ahead} ({plan.items_of_window} in a step)"}


def _updates(components: TrainingComponents) -> str:
    if components.evaluates_alone:
        return "no step to train, only an evaluation"
    return f"{components.total_steps} steps to train"


def _padding(data: DataSpec, lengths: Ids, plan: Plan, grouped: bool) -> str:
    plain, sorted_ = (padding_share(lengths, plan, grouped=one, collate=data.collate) for one in (False, True))
    if isinstance(data.collate, PackCollator):
        alone = padding_share(lengths, plan, grouped=False, collate=data.collate.bare)
        return f"{plain:.1%} of the tokens of a micro-batch are padding ({alone:.1%} with a document a row)"
    first, second = (sorted_, plain) if grouped else (plain, sorted_)
    other = "without grouping by length" if grouped else "with batch.group_by_length=true"
    return f"{first:.1%} of the tokens of a micro-batch are padding ({second:.1%} {other})"


def not_finite(evaluation: Mapping[str, float]) -> str:
    """Which results of the last evaluation are NaN or infinite, in words; empty for none."""
    bad = [f"{name} is {value}" for name, value in evaluation.items() if not math.isfinite(value)]
    return f"in the last evaluation, {shorten(bad)}" if bad else ""


def print_summary(
    components: TrainingComponents,
    progress: Progress,
    evaluation: Mapping[str, float],
    run_dir: RunDir,
    console: Console,
    *,
    state: State,
    stop_reason: str,
    best: Mapping[str, Any] | None = None,
) -> None:
    """Prints how the run ended: its results, for text what simple models reach on the same split, and where things are.

    ``best`` is the record of the best checkpoint.
    """
    if state is State.PREEMPTED:
        saved = f"saved in {shown(run_dir.checkpoints)}; the same command with resume=auto resumes it"
        if not components.config.checkpoint.saves:
            saved = "checkpoint.every=0, so nothing is saved"
        elif not progress.step:
            saved = "nothing to save yet; the same command with resume=auto begins"
        where = f"{progress.step} of {components.total_steps} steps"
        say(console, f"preempted ({stop_reason}): {where}; {saved}")
        return
    rows = {name.removeprefix("eval_").replace("_", " "): value for name, value in evaluation.items()}
    whole = components.config.trainer.eval_samples is None
    baselines = components.data.baselines() if whole and "bits per byte" in rows else {}
    done = f"{progress.step} steps, {progress.samples:,} samples, {progress.skipped} skipped"
    if components.evaluates_alone:
        done = f"evaluated the weights after {progress.step} steps"
    say(console, f"done: {done}; {shown(run_dir.path)}")
    if stop_reason:
        say(console, f"stopped early: {stop_reason}")
    if not_finite(evaluation):
        say(console, not_finite(evaluation), style="bold red")
    if rows:
        print_results(rows, baselines, console)
    if best is not None and components.config.checkpoint.best is not None:
        step, value = str(best["checkpoint"]).removeprefix("step-"), f"{best['metric']} {best['value']:.4f}"
        say(console, f"best: step {step}, {value}; {shown(run_dir.checkpoints / BEST)}")
    elif evaluated := load(BEST_EVALUATION)(run_dir.metrics, evaluation):
        say(console, f"best: {evaluated}")
    if components.config.metrics.report:
        say(console, f"report: {shown(run_dir.report)}")


def print_results(rows: Mapping[str, float], baselines: Mapping[str, float], console: Console) -> None:
    """Prints a table of numbers by name. Names are anybody's, and no markup of ``rich``: ``f1[macro]``."""
    width = max(14, *map(len, rows)) + 2
    lines = ["held-out", *(f"  {name:<{width}}{value:.4f}" for name, value in rows.items())]
    lines += [f"    {name:<{width - 2}}{value:.4f}  (bits per byte, same split)" for name, value in baselines.items()]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
